"""`wrap` on models that hand one dtype to every layer, and on those that single a layer out."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import jaxmp
from jaxmp import PolicyMap

from linen_models import BF16, SEQUENCE, TOKENS, X, counts, over_layers, variables_of
from support import contraction_dtypes, gaussian

EVERYWHERE = PolicyMap({"**": BF16}, default=BF16)


@dataclasses.dataclass(frozen=True)
class Config:
    """One dtype for every layer, as transformers are configured."""

    dtype: Any = jnp.float32
    router: Any = None  # that of the router, where it has one of its own
    head: Any = None
    layers: int = 2
    scanned: bool = False


# --- Linen ---------------------------------------------------------------------------------------


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        dtype = self.config.dtype
        y = nn.LayerNorm(dtype=dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(1, dtype=dtype)(y)
        y = nn.LayerNorm(dtype=dtype)(x)
        gate = nn.Dense(2, dtype=self.config.router or dtype, name="router")(y)
        y = nn.Dense(8, dtype=dtype)(nn.gelu(nn.Dense(16, dtype=dtype)(y)))
        x = x + y * gate.max(-1, keepdims=True)
        return (x, None) if self.config.scanned else x


class LM(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Embed(16, 8)(tokens)  # the lookup is often given none
        x = x.astype(config.dtype or jnp.float32)
        if config.scanned:
            x, _ = over_layers(Block, config.layers)(config, name="blocks")(x, None)
        else:
            for i in range(config.layers):
                x = Block(config, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=config.dtype)(x)
        return nn.Dense(16, dtype=config.head or config.dtype, name="head")(x)


def lm_counts(config: Config, policy: Any = BF16) -> dict[str, int]:
    return counts(jaxmp.wrap(LM(config), policy), variables_of(LM(config), TOKENS), TOKENS)


@pytest.mark.parametrize("dtype", [jnp.float32, "float32", np.dtype("float32"), None])
@pytest.mark.parametrize("scanned", [False, True])
def test_a_dtype_for_every_layer_says_nothing(dtype: Any, scanned: bool) -> None:
    config = Config(dtype, scanned=scanned)
    variables = variables_of(LM(config), TOKENS)
    plain = contraction_dtypes(jaxmp.autocast(LM(config).apply, BF16), variables, TOKENS)
    wrapped = contraction_dtypes(jaxmp.wrap(LM(config), BF16).apply, variables, TOKENS)
    assert wrapped == plain
    assert set(plain) == {"bfloat16"}


def test_float32_everywhere_does_not_single_a_router_out() -> None:
    assert lm_counts(Config(jnp.float32, router=jnp.float32)) == {"bfloat16": 19}


@pytest.mark.filterwarnings("error")  # a router is little
def test_float32_of_a_router_among_layers_without_a_dtype_is_meant() -> None:
    assert lm_counts(Config(None, router=jnp.float32)) == {"float32": 2, "bfloat16": 17}
    assert lm_counts(Config(None, router="float32", layers=1)) == {"float32": 1, "bfloat16": 9}
    assert lm_counts(Config(None, router=jnp.float32), EVERYWHERE) == {"bfloat16": 19}


def test_float32_of_a_head_among_layers_of_16_bits_is_meant() -> None:
    assert lm_counts(Config(jnp.bfloat16, head=jnp.float32)) == {"bfloat16": 18, "float32": 1}


class Classed(nn.Module):
    """A dense layer whose class says float32, as those of t5x do."""

    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.ones, (x.shape[-1], self.features))
        return jnp.asarray(x, self.dtype) @ jnp.asarray(kernel, self.dtype)


class OfClassed(nn.Module):
    dtypes: tuple[Any, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for dtype in self.dtypes:
            x = Classed(8, dtype)(x)
        return x


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32", jnp.float32), {"bfloat16": 2}),
        # The class says float32 anyway; that others were given 16 bits says that this is meant.
        ((jnp.bfloat16, jnp.float32), {"bfloat16": 1, "float32": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 50%")
def test_a_class_that_says_float32(dtypes: Any, expected: dict[str, int]) -> None:
    model = OfClassed(dtypes)
    assert counts(jaxmp.wrap(model, BF16), variables_of(model, X), X) == expected


class Convolutions(nn.Module):
    convs: Any
    head: Any
    count: int = 6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.count):
            x = nn.relu(
                nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3), dtype=self.convs)(x))
            )
        return nn.Dense(2, dtype=self.head)(x.mean((1, 2)))


@pytest.mark.parametrize(
    ("convs", "head", "expected"),
    [
        (None, jnp.float32, {"bfloat16": 6, "float32": 1}),  # the exception
        (jnp.float32, None, {"bfloat16": 7}),  # the rule, which the head was not told
        (jnp.float32, jnp.float32, {"bfloat16": 7}),
    ],
)
def test_a_class_of_its_own_is_compared_with_the_other_layers(
    convs: Any, head: Any, expected: dict[str, int]
) -> None:
    model, x = Convolutions(convs, head), gaussian(3, 2, 6, 6, 8)
    assert counts(jaxmp.wrap(model, BF16), variables_of(model, x), x) == expected


class Told(nn.Module):
    """It converts its input by itself; the layers in it were given no dtype."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.Dense(8)(jnp.asarray(x, self.dtype)))


def test_no_dtype_inside_of_a_float32_module_is_no_other_dtype() -> None:
    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8, dtype=jnp.float32)(Told(jnp.float32)(Told(jnp.float32)(x)))

    assert counts(jaxmp.wrap(Blocks(), BF16), variables_of(Blocks(), X), X) == {"bfloat16": 5}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 33%")
@pytest.mark.parametrize("root", [None, jnp.bfloat16])
def test_a_root_that_hands_no_dtype_or_another_on(root: Any) -> None:
    class Root(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.DenseGeneral(8, dtype=self.dtype)(nn.DenseGeneral(8, dtype=self.dtype)(x))
            return nn.Dense(8, dtype=jnp.float32)(x)

    expected = {"bfloat16": 2, "float32": 1}
    assert counts(jaxmp.wrap(Root(root), BF16), variables_of(Root(root), X), X) == expected


class Adapter(nn.Module):
    """Low-rank weights in the scope of the layer that they are added to."""

    inner: nn.Module
    dtype: Any = None

    def setup(self) -> None:
        nn.share_scope(self, self.inner)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        down, up = (self.param(n, nn.initializers.ones, s) for n, s in LOW_RANK.items())
        return self.inner(x) + x @ down @ up


LOW_RANK = {"down": (8, 6), "up": (6, 8)}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with")
@pytest.mark.parametrize(
    ("inner", "adapter", "expected"),
    [
        (None, None, {"bfloat16": 4}),
        (jnp.float32, None, {"bfloat16": 3, "float32": 1}),
        (jnp.float32, jnp.float32, {"bfloat16": 1, "float32": 3}),
    ],
)
def test_modules_that_share_a_scope(inner: Any, adapter: Any, expected: Any) -> None:
    class Adapted(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Adapter(nn.Dense(8, dtype=inner), adapter)(nn.Dense(8)(x))

    assert counts(jaxmp.wrap(Adapted(), BF16), variables_of(Adapted(), X), X) == expected


class SetsDtype(nn.Module):
    """Its dtype is not a field, and there after `setup` only; `kernel` is for others to read."""

    given: Any = None

    def setup(self) -> None:
        self.dtype = self.given
        self.kernel = self.param("kernel", nn.initializers.ones, (8, 8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.asarray(x, self.dtype) @ self.kernel


class OfSetsDtype(nn.Module):
    def setup(self) -> None:
        self.head, self.trunk = SetsDtype(jnp.float32), SetsDtype()
        self.read = SetsDtype(jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.trunk(x)) @ self.read.kernel


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 33%")
def test_a_dtype_that_setup_sets_and_a_module_that_is_only_read() -> None:
    variables = variables_of(OfSetsDtype(), X)
    for policy in (BF16, PolicyMap({"read": "float32"}, default=BF16)):
        wrapped = jaxmp.wrap(OfSetsDtype(), policy)
        assert counts(wrapped, variables, X) == {"bfloat16": 2, "float32": 1}
    stored = jaxmp.wrap(OfSetsDtype(), PolicyMap({"read": "bfloat16"}, default=BF16))
    params = jax.eval_shape(stored.init, jax.random.key(0), X)["params"]
    dtypes = {name: str(param["kernel"].dtype) for name, param in params.items()}
    assert dtypes == {"head": "float32", "trunk": "float32", "read": "bfloat16"}


def test_norms_that_are_float32_do_not_make_the_rest_so() -> None:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = x + nn.Dense(8)(nn.tanh(nn.LayerNorm(dtype=jnp.float32)(x)))
            return x

    assert counts(jaxmp.wrap(Normed(), BF16), variables_of(Normed(), X), X) == {"bfloat16": 3}


def test_the_policy_map_goes_before_the_word_and_the_word_before_the_default() -> None:
    policies = PolicyMap({"block_0/router": BF16}, default=BF16)
    config = Config(None, router=jnp.float32)
    assert lm_counts(config, policies) == {"float32": 1, "bfloat16": 18}


def test_parameters_are_stored_as_the_layer_runs() -> None:
    config = Config(None, router=jnp.float32)
    params = jax.eval_shape(jaxmp.wrap(LM(config), "bfloat16").init, jax.random.key(0), TOKENS)[
        "params"
    ]
    assert {str(p.dtype) for p in jax.tree.leaves(params["block_0"]["router"])} == {"float32"}
    assert {str(p.dtype) for p in jax.tree.leaves(params["head"])} == {"bfloat16"}
    same = jax.eval_shape(
        jaxmp.wrap(LM(Config(jnp.float32)), "bfloat16").init, jax.random.key(0), TOKENS
    )
    assert {str(p.dtype) for p in jax.tree.leaves(same)} == {"bfloat16"}


def test_two_instances_of_a_class_do_not_share_what_is_meant() -> None:
    """They have one wrapped class and one parameter tree, and other fields."""
    for _ in range(2):
        assert lm_counts(Config(None, router=jnp.float32, layers=1))["float32"] == 1
        assert lm_counts(Config(None, layers=1)) == {"bfloat16": 10}
        assert lm_counts(Config(jnp.float32, layers=1)) == {"bfloat16": 10}


class Jitted(nn.Module):
    """The router is in a part that JAX traces once: the second trace does not enter it again."""

    router: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.jit(Routed)(self.router)(x)
        return nn.Dense(8)(x)


class Routed(nn.Module):
    router: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(64)(nn.Dense(6, dtype=self.router, name="router")(x))


@pytest.mark.parametrize("nested", [False, True])
def test_a_part_that_is_traced_once(nested: bool) -> None:
    model = Jitted(jnp.float32)
    wrapped, variables = jaxmp.wrap(model, BF16), variables_of(model, X)
    apply = jaxmp.autocast(wrapped.apply, BF16) if nested else wrapped.apply
    for _ in range(3):
        assert contraction_dtypes(apply, variables, X) == {"bfloat16": 2, "float32": 1}
        assert contraction_dtypes(model.apply, variables, X) == {"float32": 3}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 11%")
def test_random_keys_are_drawn_as_in_the_module_itself() -> None:
    """The first trace of a model with a layer singled out is done twice."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            noise = jax.random.normal(self.make_rng("noise"), x.shape)
            x = nn.Dense(64)(nn.Dense(1, dtype=jnp.float32)(x))
            return (
                noise,
                nn.Dropout(0.5, deterministic=False)(jnp.ones_like(x)),
                self.make_rng("noise"),
            )

    rngs = {"noise": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = Noisy().init({"params": jax.random.key(0), **rngs}, X)
    wrapped = jaxmp.wrap(Noisy(), BF16)
    for apply in (wrapped.apply, jaxmp.autocast(wrapped.apply, BF16)):
        got, want = apply(variables, X, rngs=rngs), Noisy().apply(variables, X, rngs=rngs)
        for a, b in zip(got[:2], want[:2], strict=True):
            np.testing.assert_array_equal(a, b)
        assert jax.random.key_data(got[2]).tolist() == jax.random.key_data(want[2]).tolist()


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 11%")
def test_variables_that_a_call_changes_change_once() -> None:
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            count = self.variable("state", "count", lambda: jnp.zeros(()))
            count.value += 1
            self.sow("intermediates", "seen", x)
            return nn.Dense(64)(nn.Dense(1, dtype=jnp.float32)(x))

    variables = Counting().init(jax.random.key(0), X)
    wrapped = jaxmp.wrap(Counting(), BF16)
    for apply in (wrapped.apply, jaxmp.autocast(wrapped.apply, BF16)):
        _, changed = apply(variables, X, mutable=["state", "intermediates"])
        assert changed["state"]["count"] == variables["state"]["count"] + 1
        assert len(changed["intermediates"]["seen"]) == 1


# --- A default is no word ------------------------------------------------------------------------


class Part(nn.Module):
    """Layers with a dtype, and one without: its class tells it from them."""

    dtype_mm: Any
    convert: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.convert(self.dtype_mm) if self.convert else self.dtype_mm
        for _ in range(3):
            x = nn.Dense(8, dtype=dtype)(x)
        return nn.Dense(8)(x)


def with_default(default: Any) -> Any:
    """A model with a field of that default, from which it goes to the layers two modules below."""

    class Model(nn.Module):
        dtype_mm: Any = default
        head: Any = None
        convert: Any = None
        param_dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = Part(self.dtype_mm, self.convert)(x)
            return nn.Dense(8, dtype=self.head, param_dtype=self.param_dtype)(x)

    return Model


def low_of(model: nn.Module) -> dict[str, int]:
    return counts(jaxmp.wrap(model, BF16), variables_of(model, X), X)


FLOAT32S = ["float32", jnp.float32, np.float32, np.dtype("float32")]


@pytest.mark.parametrize("default", FLOAT32S)
def test_the_default_of_a_field_is_no_word_whatever_it_is_called(default: Any) -> None:
    model = with_default(default)
    assert low_of(model()) == {"bfloat16": 5}
    assert low_of(model(convert=jnp.dtype)) == {"bfloat16": 5}
    for (
        given
    ) in FLOAT32S:  # a field that was given its default cannot be told from one that was not
        assert low_of(model(given)) == {"bfloat16": 5}


@pytest.mark.filterwarnings("ignore:wrap. 3 layers with 60%")
@pytest.mark.parametrize("default", [None, "bfloat16"])
def test_float32_in_a_field_of_another_default_is_meant(default: Any) -> None:
    assert low_of(with_default(default)("float32")) == {"bfloat16": 2, "float32": 3}
    assert low_of(with_default(default)(jnp.float32)) == {"bfloat16": 2, "float32": 3}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 20%")
def test_float32_of_a_head_is_meant_where_others_have_a_default() -> None:
    """The default is said in another way; the one of `param_dtype` goes to `param_dtype`."""
    for default in ("float32", None):
        model = with_default(default)(head=jnp.float32)
        assert low_of(model) == {"bfloat16": 4, "float32": 1}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 33%")
def test_float32_of_a_head_is_meant_where_all_others_have_a_default() -> None:
    class Model(nn.Module):
        dtype_mm: str = "float32"

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(8, dtype=self.dtype_mm)(nn.Dense(8, dtype=self.dtype_mm)(x))
            return nn.Dense(8, dtype=jnp.float32)(x)

    assert low_of(Model()) == {"bfloat16": 2, "float32": 1}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 50%")
def test_a_default_of_float32_is_meant_among_layers_of_16_bits() -> None:
    class Model(nn.Module):
        dtype: Any = jnp.bfloat16
        logits_dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8, dtype=self.logits_dtype)(nn.Dense(8, dtype=self.dtype)(x))

    assert low_of(Model()) == {"bfloat16": 1, "float32": 1}


@dataclasses.dataclass
class Plain:
    compute: Any = "float32"


@dataclasses.dataclass(slots=True)
class Slots:
    compute: Any = jnp.float32


@struct.dataclass
class Struct:
    compute: Any = np.float32


@dataclasses.dataclass(frozen=True)
class Nested:
    precision: Any = dataclasses.field(default_factory=Plain)

    @property
    def compute(self) -> Any:
        return self.precision.compute


class Configured(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(Part(self.config.compute)(x))


@pytest.mark.filterwarnings("ignore:wrap. 3 layers with 60%")
@pytest.mark.parametrize("config", [Plain, Slots, Struct, Nested])
def test_the_default_of_a_configuration_is_no_word(config: Any) -> None:
    assert low_of(Configured(config())) == {"bfloat16": 5}


@pytest.mark.filterwarnings("ignore:wrap. 3 layers with 60%")
def test_float32_of_a_configuration_that_has_no_default_is_meant() -> None:
    config = dataclasses.make_dataclass("config", ["compute"])("float32")
    assert low_of(Configured(config)) == {"bfloat16": 2, "float32": 3}


# --- NNX -----------------------------------------------------------------------------------------


class Einsum(nnx.Module):
    """A layer of the author's own, of which `dtype` and `param_dtype` are attributes."""

    def __init__(self, spec: str, shape: Any, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.spec, self.dtype, self.param_dtype = spec, dtype, jnp.float32
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape, self.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.spec, x, jnp.asarray(self.w[...], self.dtype))


class NNXBlock(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        dtype = config.dtype
        self.norm = nnx.RMSNorm(8, dtype=dtype, rngs=rngs)
        self.qkv = Einsum("btd,sdh->sbth", (3, 8, 8), dtype=dtype, rngs=rngs)
        self.router = nnx.Linear(8, 2, dtype=config.router or dtype, rngs=rngs)
        self.up = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(16, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        q, k, v = self.qkv(y)
        x = x + jax.nn.softmax(q @ k.mT) @ v
        y = self.norm(x)
        return x + self.down(nnx.gelu(self.up(y))) * self.router(y).max(-1, keepdims=True)


class NNXModel(nnx.Module):
    def __init__(self, config: Config = Config()) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(config, rngs) for _ in range(config.layers)])
        self.head = Einsum("btd,dv->btv", (8, 16), dtype=config.head or config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_counts(config: Config, policy: Any = BF16) -> dict[str, int]:
    return dict(contraction_dtypes(jaxmp.wrap(NNXModel(config), policy), TOKENS))


@pytest.mark.parametrize("dtype", [jnp.float32, "float32"])
def test_nnx_a_dtype_for_every_layer_says_nothing(dtype: Any) -> None:
    model = NNXModel(Config(dtype))
    plain = contraction_dtypes(jaxmp.autocast(lambda t: model(t), BF16), TOKENS)
    assert contraction_dtypes(jaxmp.wrap(model, BF16), TOKENS) == plain == {"bfloat16": 13}
    assert nnx_counts(Config(jnp.float32, router=jnp.float32)) == {"bfloat16": 13}


@pytest.mark.filterwarnings("error")
def test_nnx_float32_of_a_router_is_meant() -> None:
    assert nnx_counts(Config(None, router=jnp.float32)) == {"float32": 2, "bfloat16": 11}
    assert nnx_counts(Config(None, router=jnp.float32), EVERYWHERE) == {"bfloat16": 13}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 10%")
def test_nnx_float32_of_a_head_is_meant() -> None:
    assert nnx_counts(Config(jnp.bfloat16, head=jnp.float32)) == {"float32": 1, "bfloat16": 12}


class NNXPart(nnx.Module):
    """Layers with a dtype, and one without."""

    def __init__(self, rngs: nnx.Rngs, dtype_mm: Any = "float32", head: Any = None) -> None:
        self.a = nnx.Linear(8, 8, dtype=dtype_mm, rngs=rngs)
        self.b = nnx.Linear(8, 8, dtype=dtype_mm, rngs=rngs)
        self.head = nnx.Linear(8, 8, dtype=head, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.b(self.a(x)))


class NNXAround(nnx.Module):
    """Hands on what it has, perhaps from a configuration, to a module without a default."""

    def __init__(self, config: Any, param_dtype: Any = jnp.float32, head: Any = None) -> None:
        self.config, self.head = config, head
        rngs = nnx.Rngs(0)
        self.part = NNXInner(rngs, config.compute, head, param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.part(x)


class NNXInner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any, head: Any, param_dtype: Any) -> None:
        self.a = nnx.Linear(8, 8, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.b = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(8, 8, dtype=head, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.b(self.a(x)))


def nnx_low_of(model: nnx.Module) -> dict[str, int]:
    return dict(contraction_dtypes(jaxmp.wrap(model, BF16), X))


@pytest.mark.filterwarnings("ignore:wrap. . layer")
def test_nnx_a_default_is_no_word() -> None:
    rngs = nnx.Rngs(0)
    assert nnx_low_of(NNXPart(rngs)) == {"bfloat16": 3}
    assert nnx_low_of(NNXPart(rngs, "float32")) == {"bfloat16": 3}
    assert nnx_low_of(NNXPart(rngs, head=jnp.float32)) == {"bfloat16": 2, "float32": 1}


@pytest.mark.filterwarnings("ignore:wrap. . layer")
@pytest.mark.parametrize("config", [Plain, Slots, Struct, Nested])
def test_nnx_the_default_of_a_configuration_is_no_word(config: Any) -> None:
    assert nnx_low_of(NNXAround(config())) == {"bfloat16": 3}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 33%")
def test_nnx_float32_of_a_head_is_meant_where_others_have_a_default() -> None:
    assert nnx_low_of(NNXAround(Plain(), head=jnp.float32)) == {"bfloat16": 2, "float32": 1}
    assert nnx_low_of(NNXAround(Plain(None), head=jnp.float32)) == {"bfloat16": 2, "float32": 1}


# --- What is said of it --------------------------------------------------------------------------


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="trunk")(x)
        heads = [nn.Dense(8, dtype=jnp.float32, name=name)(x) for name in ("value", "policy")]
        return heads[0] + heads[1]


def test_much_that_stays_float32_is_warned_about_once() -> None:
    wrapped, variables = jaxmp.wrap(TwoHeads(), BF16), variables_of(TwoHeads(), X)
    with pytest.warns(UserWarning, match="stay float32") as caught:
        wrapped.apply(variables, X)
    assert [w.filename for w in caught] == [__file__]
    (said,) = [str(w.message) for w in caught]
    assert "2 layers with 67%" in said
    assert "TwoHeads/policy" in said
    assert "TwoHeads/value" in said
    remedy = said.split("To overrule that: ")[1].rstrip(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.apply(variables, X)  # once
        scope = {"jaxmp": jaxmp, "model": TwoHeads()}
        assert counts(eval(remedy, scope), variables, X) == {"bfloat16": 3}


@pytest.mark.filterwarnings("ignore:wrap. 2 layers")
def test_explain_and_audit_name_the_layers() -> None:
    wrapped, variables = jaxmp.wrap(TwoHeads(), BF16), variables_of(TwoHeads(), X)
    rows = jaxmp.explain(wrapped.apply)(variables, X).rows
    kept = [
        r for r in rows if r.reason == "float32: the layer's own dtype" and r.op == "dot_general"
    ]
    assert [r.path for r in kept] == ["TwoHeads/value", "TwoHeads/policy"]
    report = jaxmp.audit(wrapped.apply)(variables, X).to_text(verbose=True)
    assert "TwoHeads/value: float32: the layer's own dtype" in report


@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
def test_nnx_explain_names_the_layers() -> None:
    wrapped = jaxmp.wrap(NNXModel(Config(None, head=jnp.float32)), BF16)
    rows = jaxmp.explain(lambda t: wrapped(t))(TOKENS).rows
    assert [r.path for r in rows if r.op == "dot_general" and r.dtype == "float32"] == [
        "head/btd,dv->btv"
    ]


def test_a_map_is_told_where_to_overrule() -> None:
    wrapped = jaxmp.wrap(TwoHeads(), PolicyMap({"trunk": "mixed_float16"}, default=BF16))
    with pytest.warns(UserWarning, match="their paths in the PolicyMap"):
        wrapped.apply(variables_of(TwoHeads(), X), X)


def test_a_trace_is_done_once_where_no_layer_is_singled_out() -> None:
    traces = []

    class Traced(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            traces.append(1)
            return nn.Dense(8, dtype=self.dtype)(nn.Dense(8)(x))

    class Around(nn.Module):
        given: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8)(Traced(self.given)(x))

    variables = variables_of(Around(None), SEQUENCE)
    traces.clear()
    jax.make_jaxpr(jaxmp.wrap(Around(None), BF16).apply)(variables, SEQUENCE)
    assert len(traces) == 1
    wrapped = jaxmp.wrap(Around("float32"), BF16)
    traces.clear()
    with pytest.warns(UserWarning, match="stay float32"):
        jax.make_jaxpr(wrapped.apply)(variables, SEQUENCE)
    assert len(traces) <= 2
    traces.clear()
    jax.make_jaxpr(wrapped.apply)(variables, SEQUENCE)
    assert len(traces) == 1, "the second trace knows the layers"


@pytest.mark.parametrize("given", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("policy", [BF16, "mixed_float16"])
def test_layers_of_16_bits_keep_them_and_their_result(given: Any, policy: str) -> None:
    """What docs/coming_from/flax_dynamic_scale.md says of them."""
    low = jnp.dtype(given).name
    linen = nn.Sequential([nn.Dense(8, dtype=given), nn.Dense(8, dtype=given)])
    variables = variables_of(linen, X)
    wrapped = jaxmp.wrap(linen, policy)
    nnx_model = jaxmp.wrap(nnx.Linear(8, 8, dtype=given, rngs=nnx.Rngs(0)), policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert wrapped.apply(variables, X).dtype == low
            assert nnx_model(X).dtype == low
        assert counts(wrapped, variables, X) == {low: 2}
    said = [str(warning.message) for warning in caught]
    if policy == f"mixed_{low}":
        assert said == []
    else:
        assert {warning.filename for warning in caught} == {__file__}
        assert [text.partition(": modules")[0] for text in said] == ["wrap", "wrap"]
        assert "layers_0, layers_1. Leave" in said[0]
        assert "Linear. Leave" in said[1]


def test_layers_of_16_bits_that_some_policy_computes_in_are_not_remarked() -> None:
    model = nn.Sequential([nn.Dense(8, dtype=jnp.float16), nn.Dense(8)])
    wrapped = jaxmp.wrap(model, PolicyMap({"layers_0": "mixed_float16"}, default=BF16))
    assert counts(wrapped, variables_of(model, X), X) == {"float16": 1, "bfloat16": 1}
