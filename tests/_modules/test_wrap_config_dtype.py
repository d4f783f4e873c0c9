"""`wrap` on models that hand one dtype to every layer, and on those that single a layer out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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

from linen_models import BF16, SEQUENCE, TOKENS, X, compiled, counts, over_layers, variables_of
from support import assert_same, case, contraction_dtypes, gaussian, random_key, slow_when

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


Dense = functools.partial(nn.Dense, use_bias=False)  # less to trace


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        dtype = self.config.dtype
        y = nn.LayerNorm(dtype=dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(1, dtype=dtype, use_bias=False)(y)
        y = nn.LayerNorm(dtype=dtype)(x)
        gate = Dense(2, dtype=self.config.router or dtype, name="router")(y)
        y = Dense(8, dtype=dtype)(nn.gelu(Dense(16, dtype=dtype)(y)))
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


@functools.cache
def lm_variables(layers: int = 2, scanned: bool = False) -> Any:
    """Which are the same whatever the dtypes."""
    return variables_of(LM(Config(layers=layers, scanned=scanned)), TOKENS)


def lm_counts(config: Config, policy: Any = BF16) -> dict[str, int]:
    return counts(jaxmp.wrap(LM(config), policy), lm_variables(config.layers), TOKENS)


@slow_when(lambda dtype, scanned: isinstance(dtype, str | np.dtype) or (dtype is None and scanned))
@pytest.mark.parametrize(
    ("dtype", "scanned"),
    [
        (jnp.float32, False),
        ("float32", False),
        (np.dtype("float32"), False),
        (None, False),
        (jnp.float32, True),
        (None, True),
    ],
)
def test_a_dtype_for_every_layer_says_nothing(dtype: Any, scanned: bool) -> None:
    model = LM(Config(dtype, layers=1, scanned=scanned))
    variables = lm_variables(1, scanned)
    plain = contraction_dtypes(jaxmp.autocast(model.apply, BF16), variables, TOKENS)
    wrapped = contraction_dtypes(jaxmp.wrap(model, BF16).apply, variables, TOKENS)
    assert wrapped == plain
    assert set(plain) == {"bfloat16"}


def test_float32_of_one_layer_is_meant_where_the_others_say_otherwise() -> None:
    """And is little: a warning would be an error."""
    router = Config(None, router=jnp.float32, layers=1)
    two = dataclasses.replace(router, layers=2)
    over_one = PolicyMap({"block_0/router": BF16}, default=BF16)
    for config, policy, expected in [
        (Config(jnp.float32, router=jnp.float32, layers=1), BF16, {"bfloat16": 10}),
        (router, BF16, {"float32": 1, "bfloat16": 9}),
        (Config(None, router="float32", layers=1), BF16, {"float32": 1, "bfloat16": 9}),
        # They have the wrapped class and the parameter tree of the one before.
        (Config(None, layers=1), BF16, {"bfloat16": 10}),
        (Config(jnp.float32, layers=1), BF16, {"bfloat16": 10}),
        (Config(None, router="float32", layers=1), BF16, {"float32": 1, "bfloat16": 9}),
        (Config(jnp.bfloat16, head=jnp.float32), BF16, {"bfloat16": 18, "float32": 1}),
        (two, BF16, {"float32": 2, "bfloat16": 17}),
        # A map goes before the layer's word, which goes before the default.
        (router, EVERYWHERE, {"bfloat16": 10}),
        (two, over_one, {"float32": 1, "bfloat16": 18}),
    ]:
        assert lm_counts(config, policy) == expected, (config, policy)


class Classed(nn.Module):
    """A dense layer whose class says float32, as those of t5x do."""

    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.ones, (x.shape[-1], self.features))
        return jnp.asarray(x, self.dtype) @ jnp.asarray(kernel, self.dtype)


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


@pytest.mark.filterwarnings("ignore:wrap. 1 layer with 11%")
def test_random_keys_and_variables_are_those_of_one_trace() -> None:
    """The first trace of a model with a layer singled out is done twice."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            count = self.variable("state", "count", lambda: jnp.zeros(()))
            count.value += 1
            self.sow("intermediates", "seen", x)
            noise = jax.random.normal(self.make_rng("noise"), x.shape)
            x = nn.Dense(64)(nn.Dense(1, dtype=jnp.float32)(x))
            dropped = nn.Dropout(0.5, deterministic=False)(jnp.ones_like(x))
            return noise, dropped, self.make_rng("noise")

    rngs = {"noise": random_key(1), "dropout": random_key(2)}
    variables = compiled(Noisy().init)({"params": random_key(0), **rngs}, X)
    options = {"rngs": rngs, "mutable": ["state", "intermediates"]}
    wrapped = jaxmp.wrap(Noisy(), BF16)
    applies = Noisy().apply, wrapped.apply, jaxmp.autocast(wrapped.apply, BF16)
    want, *others = compiled(lambda v: [apply(v, X, **options) for apply in applies])(variables)
    for got in others:
        assert_same(got, want)
        assert got[1]["state"]["count"] == variables["state"]["count"] + 1
        assert len(got[1]["intermediates"]["seen"]) == 1


# --- A default is no word ------------------------------------------------------------------------


class Part(nn.Module):
    """Layers with a dtype, and one without: its class tells it from them."""

    dtype_mm: Any
    convert: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.convert(self.dtype_mm) if self.convert else self.dtype_mm
        for _ in range(3):
            x = Dense(8, dtype=dtype)(x)
        return Dense(8)(x)


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


FLOAT32S = ["float32", jnp.float32, np.float32, np.dtype("float32")]


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


def of(*layers: Any) -> nn.Module:
    return nn.Sequential(layers)


def convolutions(dtype: Any, head: Any) -> nn.Module:
    layers = [nn.BatchNorm(use_running_average=True), nn.relu]
    layers = [layer for _ in range(6) for layer in (nn.Conv(8, (3, 3), dtype=dtype), *layers)]
    return of(*layers, lambda x: x.mean((1, 2)), nn.Dense(2, dtype=head))


class Told(nn.Module):
    """It converts its input by itself; the layers in it were given no dtype."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.Dense(8)(jnp.asarray(x, self.dtype)))


class Root(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.DenseGeneral(8, dtype=self.dtype)(nn.DenseGeneral(8, dtype=self.dtype)(x))
        return nn.Dense(8, dtype=jnp.float32)(x)


class Adapter(nn.Module):
    """Low-rank weights in the scope of the layer that they are added to."""

    inner: nn.Module
    dtype: Any = None

    def setup(self) -> None:
        nn.share_scope(self, self.inner)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        down = self.param("down", nn.initializers.ones, (8, 6))
        up = self.param("up", nn.initializers.ones, (6, 8))
        return self.inner(x) + x @ down @ up


class Adapted(nn.Module):
    inner: Any
    adapter: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Adapter(nn.Dense(8, dtype=self.inner), self.adapter)(nn.Dense(8)(x))


class Defaults(nn.Module):
    """The trunk has the default of a field, the head was told."""

    trunk: Any = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, dtype=self.trunk)(nn.Dense(8, dtype=self.trunk)(x))
        return nn.Dense(8, dtype=jnp.float32)(x)


class LowTrunk(nn.Module):
    trunk: Any = jnp.bfloat16
    head: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dtype=self.head)(nn.Dense(8, dtype=self.trunk)(x))


F32 = jnp.float32
FLOAT32S = ["float32", F32, np.float32, np.dtype("float32")]
NoDefault = dataclasses.make_dataclass("config", ["compute"])
# How many of the products stay float32, and of how many.
ROWS: dict[str, tuple[nn.Module, int, int]] = {
    "float32 in a class that says it anyway": (of(Classed(8, "float32"), Classed(8, F32)), 0, 2),
    "the same, where another was given 16 bits": (
        of(Classed(8, jnp.bfloat16), Classed(8, F32)),
        1,
        2,
    ),
    "of a class of its own, the exception": (convolutions(None, F32), 1, 7),
    "the rule, which the head was not told": (convolutions(F32, None), 0, 7),
    "the rule, which the head was told": (convolutions(F32, F32), 0, 7),
    "no dtype inside of a float32 module is no other": (
        of(Told(F32), Told(F32), nn.Dense(8, dtype=F32)),
        0,
        5,
    ),
    "a root that hands none on": (Root(None), 1, 3),
    "a root that hands another on": (Root(jnp.bfloat16), 1, 3),
    "a scope that is shared": (Adapted(None, None), 0, 4),
    "its layer is float32": (Adapted(F32, None), 1, 4),
    "and its adapter": (Adapted(F32, F32), 3, 4),
    "float32 of norms": (of(*[nn.LayerNorm(dtype=F32), nn.tanh, nn.Dense(8)] * 3), 0, 3),
    # The default of a field is no word, whatever the field is called and the default is written.
    **{f"a default of {d!r}": (with_default(d)(), 0, 5) for d in FLOAT32S},
    **{
        f"a default of {d!r}, converted": (with_default(d)(convert=jnp.dtype), 0, 5)
        for d in FLOAT32S
    },
    # A field that was given its default cannot be told from one that was not.
    **{f"the default, given as {d!r}": (with_default("float32")(d), 0, 5) for d in FLOAT32S},
    "given, where the default is None": (with_default(None)("float32"), 3, 5),
    "given, where the default is 16 bits": (with_default("bfloat16")(F32), 3, 5),
    # It says another thing than the default; the one of `param_dtype` goes to `param_dtype`.
    "a head where others have a default": (with_default("float32")(head=F32), 1, 5),
    "a head where others have None": (with_default(None)(head=F32), 1, 5),
    "a head where all others have a default": (Defaults(), 1, 3),
    "a default of float32 among layers of 16 bits": (LowTrunk(), 1, 2),
    # The default of a configuration is no word either.
    **{c.__name__: (Configured(c()), 0, 5) for c in (Plain, Slots, Struct, Nested)},
    "a configuration without defaults": (Configured(NoDefault("float32")), 3, 5),
}


def _is_a_twin(name: str) -> bool:
    """Of a row that writes float32, or a configuration, in another way."""
    ways = [repr(d) for d in FLOAT32S[1:]]
    return name in ("Plain", "Slots", "Struct") or any(way in name for way in ways)


@pytest.mark.filterwarnings("always:wrap. . layers? with")
@slow_when(_is_a_twin)
@pytest.mark.parametrize("name", ROWS)
def test_which_float32_is_meant(name: str) -> None:
    model, kept, total = ROWS[name]
    x = gaussian(3, 2, 6, 6, 8) if total == 7 else X
    with warnings.catch_warnings(record=True) as caught:
        found = counts(jaxmp.wrap(model, BF16), variables_of(model, x), x)
    assert found == {"bfloat16": total - kept} | ({"float32": kept} if kept else {})
    assert kept or not caught


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


def test_nnx_a_dtype_for_every_layer_says_nothing() -> None:
    for dtype in (jnp.float32, "float32"):
        model = NNXModel(Config(dtype))
        plain = contraction_dtypes(jaxmp.autocast(lambda t: model(t), BF16), TOKENS)  # noqa: B023
        assert contraction_dtypes(jaxmp.wrap(model, BF16), TOKENS) == plain == {"bfloat16": 13}
    assert nnx_counts(Config(jnp.float32, router=jnp.float32)) == {"bfloat16": 13}
    # A router is little: a warning would be an error.
    assert nnx_counts(Config(None, router=jnp.float32)) == {"float32": 2, "bfloat16": 11}
    assert nnx_counts(Config(None, router=jnp.float32), EVERYWHERE) == {"bfloat16": 13}


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


@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
def test_nnx_which_float32_is_meant() -> None:
    rngs, kept, low = nnx.Rngs(0), {"bfloat16": 2, "float32": 1}, {"bfloat16": 3}
    for model, expected in [
        (NNXPart(rngs), low),
        (NNXPart(rngs, "float32"), low),
        (NNXPart(rngs, head=F32), kept),
        *((NNXAround(config()), low) for config in (Plain, Slots, Struct, Nested)),
        (NNXAround(Plain(), head=F32), kept),
        (NNXAround(Plain(None), head=F32), kept),
    ]:
        assert contraction_dtypes(jaxmp.wrap(model, BF16), X) == expected, model
    model = Config(jnp.bfloat16, head=F32)
    assert nnx_counts(model) == {"float32": 1, "bfloat16": 12}


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
    remedy = said.split("To override that: ")[1].rstrip(".")
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
    assert [r.path for r in rows if r.op == "dot_general" and r.dtype == "float32"] == ["head"]


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


def test_layers_of_16_bits_keep_them_and_their_result() -> None:
    """What docs/coming_from/flax_dynamic_scale.md says of them."""
    for low, policy in itertools.product(("float16", "bfloat16"), ("mixed_float16", BF16)):
        linen = nn.Sequential([nn.Dense(8, dtype=low), nn.Dense(8, dtype=low)])
        variables = variables_of(linen, X)
        wrapped = jaxmp.wrap(linen, policy)
        nnx_model = jaxmp.wrap(nnx.Linear(8, 8, dtype=low, rngs=nnx.Rngs(0)), policy)
        with case((low, policy)), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert jax.eval_shape(wrapped.apply, variables, X).dtype == low
                assert jax.eval_shape(nnx_model, X).dtype == low
            assert counts(wrapped, variables, X) == {low: 2}
        said = [str(warning.message) for warning in caught]
        if policy == f"mixed_{low}":
            assert said == []
        else:
            assert {warning.filename for warning in caught} == {__file__}
            assert [text.partition(": modules")[0] for text in said] == ["wrap", "wrap"]
            assert "layers_0, layers_1. Leave" in said[0]
            assert "Linear. Leave" in said[1]
    model = nn.Sequential([nn.Dense(8, dtype=jnp.float16), nn.Dense(8)])
    # Those that some policy computes in are not remarked.
    wrapped = jaxmp.wrap(model, PolicyMap({"layers_0": "mixed_float16"}, default=BF16))
    assert counts(wrapped, variables_of(model, X), X) == {"float16": 1, "bfloat16": 1}


def test_layers_in_16_bits_under_float32_are_warned_of_once() -> None:
    """A configuration's bfloat16 is not what a policy of float32 says; nothing is changed."""

    class NNXLayers(nnx.Module):
        def __init__(self, dtype: Any) -> None:
            layers = [nnx.Linear(8, 8, dtype=dtype, rngs=nnx.Rngs(0)) for _ in range(2)]
            self.a, self.b = layers

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(self.a(x))

    def linen(dtype: Any) -> None:
        wrapped = jaxmp.wrap(nn.Sequential([nn.Dense(8, dtype=dtype)] * 2), "float32")
        for _ in range(2):
            jax.eval_shape(wrapped.init, jax.random.key(0), X)

    for run in (linen, lambda dtype: jaxmp.wrap(NNXLayers(dtype), "float32")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(jnp.float32), run(None), run("bfloat16")
        [warned] = caught
        assert "dtype=bfloat16 compute in it, under the policy 'float32'" in str(warned.message)
