"""A wrapped model that is called in parts: its policy goes with every module inside it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accuracy import eps
from flax import nnx

import jaxmp
from jaxmp import PolicyMap

from linen_models import BF16, F16, KEY, RNGS
from support import assert_same, assert_same_program, contraction_dtypes, gaussian

X = gaussian(1, 6, 8)
MAP = PolicyMap({"encoder/in": "float32", "head": "float32"}, default=BF16)


# Linen.


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.relu(nn.Dense(16, name="in")(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(8)(nn.Dropout(0.5, deterministic=not train)(x))


class Repeated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return nn.Dense(8)(nn.tanh(x)), None


class VAE(nn.Module):
    def setup(self) -> None:
        self.encoder, self.decoder, self.head = Encoder(), nn.Dense(8), nn.Dense(8)
        self.layers = [nn.Dense(8), nn.Dense(8)]
        self.heads = {"a": nn.Dense(8)}
        self.scanned = nn.scan(
            nn.remat(Repeated), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.head(self.decode(self.encoder(x)))
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](self.scanned(x, None)[0])

    def decode(self, z: jax.Array) -> jax.Array:
        return self.decoder(z)

    def _private(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.encoder(x))


VARIABLES = jax.eval_shape(lambda: VAE().init({"params": KEY, **RNGS}, X))
WRAPPED = jaxmp.wrap(VAE(), BF16)


def by_function(wrapped: nn.Module, variables: Any, x: Any) -> Any:
    return wrapped.apply(variables, x, method=lambda m, x: m.decoder(m.encoder(x)))


def by_nn_apply(wrapped: nn.Module, variables: Any, x: Any) -> Any:
    return nn.apply(lambda m, x: m.decoder(m.encoder(x)), wrapped)(variables, x)


def bound(call: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda wrapped, variables, x: call(wrapped.bind(variables), x)


def unbound(wrapped: nn.Module, variables: Any, x: Any) -> Any:
    encoder, its_own = wrapped.bind(variables).encoder.unbind()
    return encoder.apply(its_own, x)


LINEN: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "a function as method": (by_function, 3),
    "nn.apply": (by_nn_apply, 3),
    "a private method by name": (lambda m, v, x: m.apply(v, x, method="_private"), 3),
    "bind": (bound(lambda m, x: m.decoder(m.encoder(x))), 3),
    "a list": (bound(lambda m, x: m.layers[1](m.layers[0](x))), 2),
    "a dict": (bound(lambda m, x: m.heads["a"](x)), 1),
    "unbind": (unbound, 2),
    "a class call": (bound(lambda m, x: VAE.decode(m, x)), 1),
    "a class call of a private method": (bound(lambda m, x: VAE._private(m, x)), 3),
    "scan of remat": (bound(lambda m, x: m.scanned(x, None)[0]), 1),
}


@pytest.mark.parametrize("how", LINEN)
def test_a_linen_model_called_in_parts(how: str) -> None:
    call, count = LINEN[how]
    assert contraction_dtypes(lambda v: call(WRAPPED, v, X), VARIABLES) == {"bfloat16": count}
    assert_same_program(
        lambda v: call(jaxmp.wrap(VAE(), "float32"), v, X), lambda v: call(VAE(), v, X), VARIABLES
    )


def test_paths_of_a_policy_map_hold_for_parts() -> None:
    wrapped = jaxmp.wrap(VAE(), MAP)
    for call in (by_function, by_nn_apply, bound(lambda m, x: m.decoder(m.encoder(x)))):
        found = contraction_dtypes(lambda v, call=call: call(wrapped, v, X), VARIABLES)
        assert found == {"float32": 1, "bfloat16": 2}, call
    assert contraction_dtypes(lambda v: wrapped.bind(v).head(X), VARIABLES) == {"float32": 1}
    whole = jaxmp.wrap(VAE(), PolicyMap({"encoder": "float32"}, default=BF16))
    assert contraction_dtypes(lambda v: whole.bind(v).encoder(X), VARIABLES) == {"float32": 2}


def test_gradients_averages_and_masks_of_parts_are_those_of_the_whole() -> None:
    class Model(nn.Module):
        def setup(self) -> None:
            self.encoder, self.decoder = Encoder(), nn.Dense(8)

        def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
            return self.decoder(self.encoder(x, train=train))

    wrapped = jaxmp.wrap(Model(), BF16)
    variables = jax.jit(functools.partial(wrapped.init, train=False))({"params": KEY, **RNGS}, X)
    given: dict[str, Any] = {"rngs": {"dropout": KEY}, "mutable": ["batch_stats"]}

    def whole(params: Any) -> Any:
        out, changed = wrapped.apply({**variables, "params": params}, X, train=True, **given)
        return jnp.mean(out**2), changed["batch_stats"]

    def parts(params: Any) -> Any:
        model = wrapped.bind({**variables, "params": params}, **given)
        out = model.decoder(model.encoder(X, train=True))
        return jnp.mean(out**2), model.variables["batch_stats"]

    def function(params: Any) -> Any:
        def method(model: Any, x: jax.Array) -> jax.Array:
            return model.decoder(model.encoder(x, train=True))

        out, changed = wrapped.apply({**variables, "params": params}, X, method=method, **given)
        return jnp.mean(out**2), changed["batch_stats"]

    fns = [jax.value_and_grad(fn, has_aux=True) for fn in (whole, parts, function)]
    got = jax.jit(lambda params: [fn(params) for fn in fns])(variables["params"])
    close = functools.partial(np.testing.assert_allclose, atol=8 * eps("bfloat16"))
    for other in got[1:]:
        jax.tree.map(close, got[0], other)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))


def test_parameters_that_parts_create_are_stored_as_the_policy_says() -> None:
    wrapped = jaxmp.wrap(VAE(), "p=bf16,c=bf16,o=f32")
    encode: Any = lambda m, x: m.encoder(x)  # noqa: E731
    for init in (
        lambda: wrapped.init({"params": KEY, **RNGS}, X, method=encode),
        lambda: nn.init(encode, wrapped)({"params": KEY, **RNGS}, X),
    ):
        params = jax.eval_shape(init)["params"]
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_modules_in_fields_carry_the_policy_unbound_and_keep_their_names() -> None:
    class Whole(nn.Module):
        encoder: nn.Module
        heads: tuple[nn.Module, ...]
        named: dict[str, nn.Module]

        def __call__(self, x: jax.Array) -> jax.Array:
            for module in (self.encoder, *self.heads, self.named["a"]):
                x = module(x)
            return x

    shared = nn.Dense(8)
    model = Whole(shared, (nn.Dense(8), shared), {"a": nn.Dense(8)})
    wrapped = jaxmp.wrap(model, PolicyMap({"named_a": "float32"}, default=BF16))
    variables = wrapped.init(KEY, X)
    assert_same(variables, model.init(KEY, X))
    for module, name, dtype in (
        (wrapped.encoder, "encoder", "bfloat16"),
        (wrapped.heads[0], "heads_0", "bfloat16"),
        (wrapped.named["a"], "named_a", "float32"),
    ):
        params = {"params": variables["params"][name]}
        assert contraction_dtypes(lambda v, m=module: m.apply(v, X), params) == {dtype: 1}, name
    assert type(model.encoder) is nn.Dense
    assert copy.deepcopy(wrapped) == wrapped


def test_a_part_wrapped_again_or_by_itself_has_its_own_policy() -> None:
    again = jaxmp.wrap(jaxmp.wrap(nn.Sequential([nn.Dense(8)]), BF16).layers[0], F16)
    assert contraction_dtypes(lambda v: again.apply(v, X), again.init(KEY, X)) == {"float16": 1}
    inside = jaxmp.wrap(nn.Sequential([jaxmp.wrap(nn.Dense(8), F16)]), BF16)
    variables = inside.init(KEY, X)
    assert contraction_dtypes(lambda v: inside.bind(v).layers[0](X), variables) == {"float16": 1}


def test_a_float32_that_the_author_meant_holds_for_the_part() -> None:
    class Model(nn.Module):
        def setup(self) -> None:
            self.body, self.head = nn.Dense(8), nn.Dense(8, dtype=jnp.float32)

    model = jaxmp.wrap(Model(), BF16)
    v = jax.eval_shape(lambda: model.init(KEY, X, method=lambda m, x: m.head(m.body(x))))
    assert contraction_dtypes(lambda v: model.bind(v).head(X), v) == {"float32": 1}
    assert contraction_dtypes(lambda v: model.bind(v).body(X), v) == {"bfloat16": 1}


def test_value_and_grad_warns_of_float16_in_parts_without_a_scale() -> None:
    wrapped = jaxmp.wrap(VAE(), F16)
    params = jax.tree.map(lambda a: jnp.zeros(a.shape), VARIABLES["params"])

    def loss(params: Any) -> jax.Array:
        rest = {"batch_stats": jax.tree.map(jnp.zeros_like, VARIABLES["batch_stats"])}
        return jnp.sum(by_function(wrapped, {"params": params, **rest}, X))

    state = jaxmp.TrainState.create(apply_fn=wrapped.apply, params=params, tx=optax.sgd(0.1))
    with pytest.warns(UserWarning, match="no loss scale"):
        jax.eval_shape(lambda p: state.value_and_grad(loss)(p), params)


# NNX.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(nnx.relu(self.up(x))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = Block(rngs)
        self.layers = nnx.List([Block(rngs), Block(rngs)])
        self.heads = nnx.Dict(a=nnx.Linear(8, 8, rngs=rngs))
        self.sequence = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.relu)
        self.table = nnx.Embed(16, 8, rngs=rngs)
        self.head = nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs)
        self.shared = self.encoder.up

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.heads["a"](self.sequence(x)))

    def exactly(self, x: jax.Array) -> jax.Array:
        return jaxmp.full_precision(self.__call__)(x)


def net(policy: Any = BF16) -> Net:
    return jaxmp.wrap(Net(nnx.Rngs(0)), policy)


def dtypes(model: nnx.Module, call: Callable[[Any, jax.Array], Any]) -> dict[str, int]:
    """The dtypes of the products of a call, whose modules were split and merged."""
    graph, state = nnx.split(model)
    return contraction_dtypes(lambda s: call(nnx.merge(graph, s), X), state)


NNX: dict[str, tuple[Callable[[Any, jax.Array], Any], dict[str, int]]] = {
    "a module inside": (lambda m, x: m.encoder(x), {"bfloat16": 2}),
    "one inside that": (lambda m, x: m.encoder.down(m.encoder.up(x)), {"bfloat16": 2}),
    "a list": (lambda m, x: [layer(x) for layer in m.layers], {"bfloat16": 4}),
    "a dict": (lambda m, x: m.heads["a"](x), {"bfloat16": 1}),
    "a sequence": (lambda m, x: m.sequence.layers[0](x), {"bfloat16": 1}),
    "a method": (lambda m, x: m.table.attend(x), {"bfloat16": 1}),
    "a shared module": (lambda m, x: m.shared(x), {"bfloat16": 1}),
    "a class call": (lambda m, x: Net.__call__(m, x), {"bfloat16": 8, "float32": 1}),
    "the author's float32": (lambda m, x: m.head(x), {"float32": 1}),
    "nnx.remat": (lambda m, x: nnx.remat(Block.__call__)(m.encoder, x), {"bfloat16": 2}),
    "nnx.vmap": (
        lambda m, x: nnx.vmap(lambda up, x: up(x), in_axes=(None, 0))(m.encoder.up, x),
        {"bfloat16": 1},
    ),
    "jax.vmap of a module": (lambda m, x: jax.vmap(m.encoder.up)(x), {"bfloat16": 1}),
    "nnx.jit": (lambda m, x: nnx.jit(lambda e, x: e(x))(m.encoder, x), {"bfloat16": 2}),
    "another autocast": (
        lambda m, x: jaxmp.autocast(lambda x: m.encoder.up(x), F16)(x),
        {"bfloat16": 1},
    ),
}


@pytest.mark.parametrize("how", NNX)
def test_an_nnx_model_called_in_parts(how: str) -> None:
    call, want = NNX[how]
    assert dtypes(net(), call) == want
    assert set(dtypes(net("float32"), call)) <= {"float32", "float16"}


COPIES: dict[str, Callable[[Net], Net]] = {
    "nnx.clone": nnx.clone,
    "copy.deepcopy": copy.deepcopy,
    "jax.tree.map": lambda model: jax.tree.map(jnp.copy, model),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_an_nnx_model_carry_the_policy(how: str) -> None:
    assert dtypes(COPIES[how](net()), lambda m, x: m.encoder(x)) == {"bfloat16": 2}


def test_a_pickled_part_carries_the_policy() -> None:
    block = pickle.loads(pickle.dumps(jaxmp.wrap(Picklable(nnx.Rngs(0)), BF16)))
    assert dtypes(block, lambda m, x: m.inner(x)) == {"bfloat16": 1}


class Picklable(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.LinearGeneral(8, 8, rngs=rngs)


def test_parts_are_instances_of_their_classes_and_share_their_variables() -> None:
    model = Net(nnx.Rngs(0))
    wrapped = jaxmp.wrap(model, BF16)
    assert isinstance(wrapped.encoder, Block)
    assert type(model.encoder) is Block
    assert type(wrapped.encoder).__name__ == "Block"
    assert wrapped.encoder.up.kernel is model.encoder.up.kernel
    assert wrapped.shared is wrapped.encoder.up
    assert jax.tree.structure(nnx.state(wrapped)) == jax.tree.structure(nnx.state(model))


def test_paths_and_classes_of_a_policy_map_hold_for_nnx_parts() -> None:
    wrapped = net(PolicyMap({"encoder/up": "float32", nnx.Embed: "float32"}, default=BF16))
    assert dtypes(wrapped, lambda m, x: m.encoder(x)) == {"float32": 1, "bfloat16": 1}
    assert dtypes(wrapped, lambda m, x: m.encoder.up(x)) == {"float32": 1}
    assert dtypes(wrapped, lambda m, x: m.table.attend(x)) == {"float32": 1}
    assert dtypes(wrapped, lambda m, x: m.layers[0].up(x)) == {"bfloat16": 1}


def test_modules_that_are_set_later_carry_the_policy() -> None:
    wrapped = net()
    wrapped.head = nnx.Linear(8, 3, rngs=nnx.Rngs(1))
    wrapped.layers.append(Block(nnx.Rngs(1)))
    wrapped.encoder.down = nnx.Linear(8, 5, rngs=nnx.Rngs(1))
    for call in (
        lambda m, x: m.head(x),
        lambda m, x: m.layers[2].up(x),
        lambda m, x: m.encoder.down(x),
    ):
        assert dtypes(wrapped, call) == {"bfloat16": 1}


def test_a_region_around_a_method_of_the_model_itself_holds() -> None:
    assert dtypes(net(), lambda m, x: m.exactly(x)) == {"float32": 9}


def test_an_nnx_part_wrapped_again_or_by_itself_has_its_own_policy() -> None:
    again = jaxmp.wrap(net().encoder, F16)
    assert dtypes(again, lambda m, x: m.up(m(x))) == {"float16": 3}
    model = Net(nnx.Rngs(0))
    model.encoder = jaxmp.wrap(model.encoder, F16)
    wrapped = jaxmp.wrap(model, BF16)
    assert dtypes(wrapped, lambda m, x: m.encoder.up(m.encoder(x))) == {"float16": 3}


def test_parts_of_an_nnx_model_train_as_the_whole() -> None:
    def whole(model: Net, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    def parts(model: Net, x: jax.Array) -> jax.Array:
        h = model.encoder(x)
        for layer in model.layers:
            h = layer(h)
        return jnp.mean(model.head(model.heads["a"](model.sequence(h))) ** 2)

    losses = []
    for loss in (whole, parts):
        model = net(PolicyMap({"head": BF16}, default=BF16))
        optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)

        @nnx.jit
        def step(model: Net, optimizer: Any, x: jax.Array, loss: Any = loss) -> jax.Array:
            value, grads = nnx.value_and_grad(loss)(model, x)
            optimizer.update(model, grads)
            return value

        losses.append([float(step(model, optimizer, X)) for _ in range(3)])
        assert jnp.any(model.encoder.norm.mean[...])
    np.testing.assert_allclose(*losses, rtol=8 * eps("bfloat16"))
    assert losses[0][-1] < losses[0][0]
