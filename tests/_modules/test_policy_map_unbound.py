"""Keys of a PolicyMap for modules that are applied unbound, or called past those around them."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp

from linen_models import BF16, F16, all_counts
from support import case, contraction_dtypes

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


class Two(nn.Module):
    features: int = 16

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(self.features, name="up")(x))
        return nn.Dense(16, name="down")(x)


def unbound(layers, x):
    module, variables = layers.unbind()
    return module.apply(variables, x)


def cloned(layers, x):
    return layers.clone(parent=None).apply(layers.variables, x)


def another(layers, x):
    return type(layers)(parent=None).apply({"params": layers.variables["params"]}, x)


def in_jit(layers, x):
    return jax.jit(type(layers)(parent=None).apply)(layers.variables, x)


class Model(nn.Module):
    """A model with two layers of one kind, which calls only one of them, by a function."""

    call: object
    first: type = Two

    def setup(self):
        self.layers = self.first()
        self.others = self.first()

    def __call__(self, x):
        if self.is_initializing():
            return self.others(self.layers(x))
        return self.call(self.layers, x)


class Inside(nn.Module):
    """A model in which another is, under a transformation."""

    inside: type

    @nn.compact
    def __call__(self, x):
        return self.inside(unbound, name="model")(x)


class InScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        layers = nn.scan(lambda m, x, _: (m(x), None), **options)
        return layers(Model(unbound, name="model"), x, None)[0]


def counts(model, keys, default=BF16):
    """Returns the products forward and backward of a wrapped model, by their dtypes."""
    wrapped = jaxmp.wrap(model, jaxmp.PolicyMap(keys, default=default))
    return all_counts(wrapped, model.init(jax.random.key(0), X), X)


@pytest.mark.parametrize("call", [unbound, cloned, another])
def test_a_module_that_is_applied_has_the_path_of_its_variables(call):
    for keys, float32 in [
        ({"layers": "float32"}, 5),
        ({"layers/down": "float32"}, 3),
        ({"*/down": "float32"}, 3),
        ({"layers/up": BF16, "layers": "float32"}, 3),
        ({"others": "float32"}, 0),
        ({nn.Dense: "float32"}, 5),
    ]:
        with case(keys):
            expected = {"float32": float32, "bfloat16": 5 - float32}
            assert counts(Model(call), keys) == {d: n for d, n in expected.items() if n}
    with pytest.raises(ValueError, match="the pattern 'down' matches no module"):
        counts(Model(call), {"down": "float32"})


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (Inside(Model), 0),
        (Inside(nn.jit(Model)), 0),
        (Inside(nn.remat(Model)), 1),
        (InScan(), 1),
    ],
    ids=["plain", "jit", "remat", "scan"],
)
def test_a_module_that_is_applied_inside_a_transformation(model, more):
    found = counts(model, {"model/layers/down": "float32"})
    assert found == {"float32": 3, "bfloat16": 2 + more}
    assert counts(model, {"model/layers": "float32"}).keys() == {"float32"}


JittedDense = nn.jit(nn.Dense)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedDense(16, name="dense")(x)


def test_applied_modules_of_one_class_have_policies_of_their_own():
    class Both(nn.Module):
        def setup(self):
            self.first = Jitted()
            self.second = Jitted()

        def __call__(self, x):
            if self.is_initializing():
                return self.second(self.first(x))
            return cloned(self.second, cloned(self.first, x))

    assert counts(Both(), {"first/dense": "float32"}) == {"float32": 2, "bfloat16": 3}
    assert counts(Both(), {"second/dense": "float32"}) == {"float32": 3, "bfloat16": 2}


def test_a_path_that_is_not_known_is_warned_of():
    for key in ("layers", "layers/down", "**/down"):
        message = rf"a Two is applied unbound, .* the key '{key}' has no effect on it, .* layers"
        with (
            case(key),
            pytest.warns(UserWarning, match=message.replace("**", r"\*\*")),
        ):
            assert counts(Model(in_jit), {key: "float32"}) == {"bfloat16": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts(Model(in_jit), {Two: "float32", "layers": F16}) == {"float32": 5}
        assert counts(Model(in_jit), {"layers": BF16, "others": BF16}) == {"bfloat16": 5}


class Teacher(nn.Module):
    """A model that applies one which is not among its modules."""

    features: int

    @nn.compact
    def __call__(self, x):
        make = nn.initializers.lecun_normal()
        up = self.param("kernel_up", make, (16, self.features))
        down = self.param("kernel_down", make, (self.features, 16))
        params = {n: {"kernel": w, "bias": w[0]} for n, w in (("up", up), ("down", down))}
        teacher = Two(self.features, parent=None).apply({"params": params}, x)
        return Two(name="student")(x) + nn.Dense(16, name="down")(teacher)


def test_a_module_with_variables_of_its_own_has_no_key():
    """Not those of the same names in the model, which are no paths of its modules."""
    keys = {"down": "float32", "student": "float32"}
    assert counts(Teacher(8), keys) == {"float32": 8, "bfloat16": 5}


# --- Called past the modules around --------------------------------------------------------------


class Encoder(nn.Module):
    def setup(self):
        self.layer = nn.Dense(16)

    def __call__(self, x):
        return self.layer(x)


class Tied(nn.Module):
    encoder: nn.Module

    def __call__(self, x):
        return self.encoder.layer(x)


class Past(nn.Module):
    def setup(self):
        self.encoder = Encoder()
        self.decoder = Tied(self.encoder)

    def __call__(self, x):
        return self.decoder(self.encoder.layer(self.encoder(x)))


@pytest.mark.parametrize("key", ["encoder", "encoder/**", "encoder/layer", Encoder])
def test_a_module_called_past_the_one_around_it_has_its_policy(key):
    assert counts(Past(), {key: "float32"}) == {"float32": 8}
    assert counts(Past(), {key: "float32", "decoder": F16}) == {"float32": 8}
    assert counts(Past(), {key: BF16, "decoder": F16}, "float32") == {"bfloat16": 8}


class Lifted(nn.Module):
    def setup(self):
        self.layers = Two()

    @nn.remat
    def run(self, x):
        return self.layers(x)

    def __call__(self, x):
        return self.run(x)


@pytest.mark.parametrize("lift", [lambda cls: cls, nn.remat, nn.jit])
def test_the_wrapped_module_is_itself_in_its_lifted_methods(lift):
    assert counts(lift(Lifted)(), {"layers": "float32"}).keys() == {"float32"}


class Child(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.parent.embed(nn.Dense(16, name="dense")(x))


class Parent(nn.Module):
    def setup(self):
        self.child = Child()
        self.layer = nn.Dense(16)

    def embed(self, x):
        return self.layer(x)

    def __call__(self, x):
        return self.child(x)


def test_the_wrapped_module_is_itself_where_one_inside_calls_it():
    assert counts(Parent(), {"layer": "float32"}) == {"float32": 3, "bfloat16": 2}


class NnxEncoder(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x):
        return jaxmp.full_precision(self.layer)(x)


class NnxPast(nnx.Module):
    def __init__(self):
        self.encoder, self.head = NnxEncoder(nnx.Rngs(0)), nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.encoder.layer(self.encoder(x)))


def nnx_counts(keys, default):
    graph, state = nnx.split(jaxmp.wrap(NnxPast(), jaxmp.PolicyMap(keys, default=default)))
    return dict(contraction_dtypes(lambda state: nnx.merge(graph, state)(X), state))


@pytest.mark.parametrize("key", ["encoder", NnxEncoder])
def test_an_nnx_module_called_past_the_one_around_it_has_its_policy(key):
    assert nnx_counts({key: "float32"}, BF16) == {"float32": 2, "bfloat16": 1}
    # Inside a call of the encoder, the author's region is further in.
    assert nnx_counts({key: F16}, BF16) == {"float32": 1, "float16": 1, "bfloat16": 1}
