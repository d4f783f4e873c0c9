"""`PolicyMap`: policies by module path and class, and a layer's own word, in wrapped modules."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections import defaultdict
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_reference import reference

import jaxmp
from jaxmp import PolicyMap
from jaxmp.policies import keep_float32

from linen_models import (
    BF16,
    F16,
    KEY,
    Transformer,
    X,
    abstract_variables,
    all_counts,
    assert_close,
    counts,
    gradient_of,
    over_layers,
    variables_of,
)
from support import CONTRACTIONS, case, iter_eqns, jaxpr_of, ones, primitives, slow_when

Dense = functools.partial(nn.Dense, use_bias=False)  # less to trace


class Block(nn.Module):
    """Its width, which no other block has, tells its contractions from the others."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(use_bias=False, name="norm")(x)
        return Dense(8, name="down")(nn.tanh(Dense(self.width, name="up")(x)))


class Encoder(nn.Module):
    def setup(self) -> None:
        self.block_0 = Block(10)
        self.block_1 = Block(11)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.block_0(x)
        return x + self.block_1(x)


class Model(nn.Module):
    def setup(self) -> None:
        self.encoder = Encoder()
        self.block_0 = Block(12)
        self.head = Dense(13)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.block_0(self.encoder(x)))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.encoder(x)


WIDTHS = {10: "encoder/block_0", 11: "encoder/block_1", 12: "block_0", 13: "head"}
MODEL = Model()
VARIABLES = variables_of(MODEL, X)


def mapped(overrides: Any, default: str = BF16, model: nn.Module = MODEL) -> Any:
    return jaxmp.wrap(model, PolicyMap(overrides, default=default))


def dtypes_by_block(model: nn.Module, variables: Any = VARIABLES) -> dict[str, str]:
    """What each block multiplies in, forward and backward: "a+b" if not all in one dtype."""
    found: dict[str, set[str]] = defaultdict(set)
    for eqn in iter_eqns(jaxpr_of(gradient_of(model, X), variables)):
        if eqn.primitive.name in CONTRACTIONS:
            operands = [v.aval for v in eqn.invars[:2]]
            [width] = {d for aval in operands for d in aval.shape} & set(WIDTHS)
            found[WIDTHS[width]] |= {str(aval.dtype) for aval in operands}
    return {block: "+".join(sorted(dtypes)) for block, dtypes in found.items()}


def all_but(**different: str) -> dict[str, str]:
    """Every block in bfloat16 but these; `__` stands for the slash."""
    return dict.fromkeys(WIDTHS.values(), "bfloat16") | {
        name.replace("__", "/"): dtype for name, dtype in different.items()
    }


# --- Which modules a key matches -----------------------------------------------------------------


INSIDE = "encoder/block_0 encoder/block_1"


@slow_when(lambda pattern: pattern in ("head", "encoder", "encoder/block_1", "encoder/*", "**"))
@slow_when(lambda pattern: pattern in ("*/block_0", Encoder, nn.Module))
@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("head", "head"),
        ("block_0", "block_0"),  # not the encoder's
        ("encoder", INSIDE),
        ("encoder/block_1", "encoder/block_1"),
        ("encoder/*", INSIDE),
        ("encoder/block_[!0]", "encoder/block_1"),
        ("*", f"{INSIDE} block_0 head"),
        ("*/block_0", "encoder/block_0"),
        ("**/block_0", "encoder/block_0 block_0"),
        ("**", f"{INSIDE} block_0 head"),
        ("encoder/**", INSIDE),
        (Encoder, INSIDE),
        (Block, f"{INSIDE} block_0"),
        (nn.Module, f"{INSIDE} block_0 head"),
    ],
)
def test_a_key_matches_whole_components_and_covers_what_is_inside(
    pattern: Any, blocks: str
) -> None:
    """In exactly those blocks, forward and backward."""
    want = all_but() | dict.fromkeys(blocks.split(), "float32")
    assert dtypes_by_block(mapped({pattern: "float32"})) == want


def test_a_layer_inside_a_block() -> None:
    found = dtypes_by_block(mapped({"**/up": "float32", "encoder/block_1/norm": "float32"}))
    mixed = "bfloat16+float32"
    assert found == all_but(block_0=mixed, encoder__block_0=mixed, encoder__block_1=mixed)
    # `up` has three of the six contractions of each block.
    assert all_counts(mapped({"**/up": "float32"}), VARIABLES, X) == {"float32": 9, "bfloat16": 12}


def test_the_first_key_that_matches_wins_and_a_match_further_inside() -> None:
    general, special = ("encoder/*", "float32"), ("encoder/block_1", F16)
    with pytest.raises(ValueError, match="'encoder/block_1' would have no effect"):
        mapped(dict([general, special]))
    assert dtypes_by_block(mapped(dict([special, general]))) == all_but(
        encoder__block_0="float32", encoder__block_1="float16"
    )
    found = dtypes_by_block(mapped({"encoder": "float32", "encoder/block_1": BF16}))
    assert found == all_but(encoder__block_0="float32")


def test_float16_in_one_block_and_bfloat16_in_another() -> None:
    wrapped = mapped({"encoder/block_0": F16, "head": "float32"})
    assert dtypes_by_block(wrapped) == all_but(encoder__block_0="float16", head="float32")
    got, want = reference(lambda v: [gradient_of(m, X)(v) for m in (wrapped, MODEL)])(VARIABLES)
    assert_close(got, want)
    # Low ones in a default of float32.
    want = dict.fromkeys(WIDTHS.values(), "float32")
    want |= {"encoder/block_0": "bfloat16", "encoder/block_1": "bfloat16"}
    assert dtypes_by_block(mapped({"encoder": BF16}, default="float32")) == want


def test_refinements_of_an_override_hold_inside_it() -> None:
    policy = "mixed_bfloat16,ops=tanh:full_precision"
    tanhs = primitives(mapped({"block_0": policy}).apply, VARIABLES, X)
    assert (tanhs["tanh", "float32"], tanhs["tanh", "bfloat16"]) == (1, 2)


def test_paths_are_relative_to_the_wrapped_module() -> None:
    class Outer(nn.Module):
        policy: Any

        def setup(self) -> None:
            self.model = jaxmp.wrap(Model(), self.policy)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.model(x)

    outer = Outer(PolicyMap({"encoder": "float32"}, default=BF16))
    variables = {"params": {"model": VARIABLES["params"]}}
    want = all_but(encoder__block_0="float32", encoder__block_1="float32")
    assert dtypes_by_block(outer, variables) == want
    with pytest.raises(ValueError, match="'model/encoder' matches no module"):
        counts(Outer(PolicyMap({"model/encoder": "float32"}, default=BF16)), variables, X)


def test_other_methods_by_name() -> None:
    """A method that does not enter a module of a key is no mistake."""
    wrapped = mapped({"encoder/block_0": "float32", "head": F16, "block_0/up": "float32"})
    assert counts(wrapped, VARIABLES, X, method="encode") == {"float32": 2, "bfloat16": 2}


def test_a_map_without_overrides_is_its_default_and_float32_the_module_as_written() -> None:
    def program(model: nn.Module) -> str:
        return str(jaxpr_of(gradient_of(model, X), VARIABLES))

    assert program(mapped({})) == program(jaxmp.wrap(MODEL, BF16))
    assert program(mapped({"head": "float32"}, default="float32")) == program(MODEL)


# --- Inside transforms, autocasts and wrapped modules --------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        x = x + Block(10, name="early")(x)
        return x + Block(11, name="late")(x), None


@slow_when(lambda layer: layer is Layer)
@pytest.mark.parametrize("layer", [Layer, nn.remat(Layer)], ids=["scan", "scan_of_remat"])
def test_inside_scan_and_remat_and_in_the_backward_pass(layer: Any) -> None:
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x, _ = over_layers(layer)(name="layers")(x, None)
            return nn.Dense(13, name="head")(x)

    variables = variables_of(Scanned(), X)
    wrapped = mapped({"layers/late": "float32"}, model=Scanned())
    assert abstract_variables(wrapped, X) == abstract_variables(Scanned(), X)
    assert dtypes_by_block(wrapped, variables) == {
        "encoder/block_0": "bfloat16",  # the widths 10 and 11
        "encoder/block_1": "float32",
        "head": "bfloat16",
    }


def test_inside_lifted_modules() -> None:
    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + nn.remat(Block)(10, name="a")(x)
            x = x + nn.remat(Block)(11, name="b")(x)
            x = x + nn.jit(Block)(12, name="c")(x)
            return x + nn.jit(Block)(13, name="d")(x)

    variables = variables_of(Lifted(), X)
    for inside in ("", "/*"):
        wrapped = mapped(dict.fromkeys([f"b{inside}", f"d{inside}"], "float32"), model=Lifted())
        assert dtypes_by_block(wrapped, variables) == all_but(
            encoder__block_1="float32", head="float32"
        )


Jitted = nn.jit(Block)


class HoldsJitted(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Jitted(10, name="block")(x)


def test_a_trace_that_jit_has_kept_is_not_used_under_another_map() -> None:
    variables = variables_of(HoldsJitted(), X)
    maps: list[tuple[Any, dict[str, int]]] = [
        ({}, {"bfloat16": 2}),
        ({"block/up": "float32"}, {"bfloat16": 1, "float32": 1}),
        ({nn.Dense: F16}, {"float16": 2}),
        ({nn.Dense: F16}, {"float16": 2}),
        ({}, {"bfloat16": 2}),
    ]
    for overrides, low in maps:
        assert counts(mapped(overrides, model=HoldsJitted()), variables, X) == low
    assert counts(HoldsJitted(), variables, X) == {"float32": 2}
    stored = mapped({"block/up": "p=bf16,c=bf16,o=f32"}, model=HoldsJitted())
    for _ in range(2):
        block = abstract_variables(stored, X)["params"]["block"]
        dtypes = [block[name]["kernel"].dtype for name in ("up", "down")]
        assert dtypes == [jnp.bfloat16, X.dtype]


def test_inside_cond_and_vmap() -> None:
    class Branches(nn.Module):
        def setup(self) -> None:
            self.a = Block(10)
            self.b = Block(11)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.a(x)
            x = nn.cond(x.sum() > 0, lambda m, x: m.b(x), lambda m, x: m.a(m.b(x)), self, x)
            mapped = nn.vmap(
                lambda m, x: m.b(x), variable_axes={"params": None}, split_rngs={"params": False}
            )
            return mapped(self, x)

    variables = variables_of(Branches(), X)
    wrapped = mapped({"b": "float32"}, model=Branches())
    assert dtypes_by_block(wrapped, variables) == {
        "encoder/block_0": "bfloat16",
        "encoder/block_1": "float32",
    }


def test_under_jit_vmap_and_grad_of_apply() -> None:
    wrapped = mapped({"head": "float32"})

    class Transformed:
        @staticmethod
        def apply(variables: Any, x: jax.Array) -> jax.Array:
            return jax.vmap(jax.jit(jax.checkpoint(wrapped.apply)), in_axes=(None, 0))(variables, x)

    assert dtypes_by_block(Transformed) == all_but(head="float32")


def test_a_map_inside_an_autocast_and_inside_a_wrapped_module() -> None:
    want = all_but(encoder__block_0="float32", encoder__block_1="float16")
    wrapped = mapped({"encoder/block_0": "float32", "encoder/block_1": F16})

    class Autocast:
        apply = staticmethod(jaxmp.autocast(wrapped.apply, F16))

    assert dtypes_by_block(Autocast) == want

    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    outer = jaxmp.wrap(Outer(wrapped), "float32")
    assert dtypes_by_block(outer, {"params": {"inner": VARIABLES["params"]}}) == want


class WithHead(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(13, name="head")(self.inner(x))


def test_a_wrapped_module_keeps_its_policy_under_a_map_around_it() -> None:
    model = WithHead(jaxmp.wrap(Block(10), F16))
    variables = variables_of(model, X)
    for key in ("head", nn.Dense, "**"):
        found = dtypes_by_block(mapped({key: "float32"}, model=model), variables)
        assert found == {"encoder/block_0": "float16", "head": "float32"}, key


def test_a_wrapped_module_stores_its_parameters_by_its_own_policy() -> None:
    for policy in (BF16, PolicyMap({"up": "c=f16,o=f32"}, default=BF16)):
        model = jaxmp.wrap(WithHead(jaxmp.wrap(Block(10), policy)), "bfloat16")
        params = abstract_variables(model, X)["params"]
        assert {str(p.dtype) for p in jax.tree.leaves(params["inner"])} == {"float32"}
        assert {str(p.dtype) for p in jax.tree.leaves(params["head"])} == {"bfloat16"}


# --- Parameters ----------------------------------------------------------------------------------


def test_each_module_stores_its_parameters_as_its_policy_says() -> None:
    low = "p=bf16,c=bf16,o=f32"
    wrapped = mapped({"head": BF16, "encoder/block_1/norm": "p=f16,c=f16,o=f32"}, default=low)
    created = variables_of(wrapped, X)

    def want(path: Any, _: Any) -> str:
        names = "/".join(str(k.key) for k in path)
        if names.startswith("params/head"):
            return "float32"
        return "float16" if names.startswith("params/encoder/block_1/norm") else "bfloat16"

    found = jax.tree.map(lambda leaf: str(leaf.dtype), created)
    assert found == jax.tree_util.tree_map_with_path(want, VARIABLES)
    assert dtypes_by_block(wrapped, created) == all_but()
    grads, _ = jax.eval_shape(gradient_of(wrapped, X), created)
    same = jax.tree.map(lambda g, p: g.dtype == p.dtype, grads, created)
    assert all(jax.tree.leaves(same))


def test_parameters_created_in_scanned_layers() -> None:
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return over_layers(Layer)(name="layers")(x, None)[0]

    wrapped = mapped({"layers/late": "p=bf16,c=bf16,o=f32"}, model=Scanned())
    params = abstract_variables(wrapped, X)["params"]["layers"]
    assert {str(p.dtype) for p in jax.tree.leaves(params["late"])} == {"bfloat16"}
    assert {str(p.dtype) for p in jax.tree.leaves(params["early"])} == {"float32"}


# --- Keys that match nothing ---------------------------------------------------------------------


def test_a_key_that_matches_nothing() -> None:
    for entry, argument in (("init", KEY), ("apply", VARIABLES)):
        wrapped = mapped({"head": "float32", "encoder/blok_1": "float32"})
        with pytest.raises(ValueError, match="'encoder/blok_1' matches no module") as caught:
            jax.eval_shape(getattr(wrapped, entry), argument, X)
        nearest = str(caught.value).split("nearest paths: ")[1]
        assert nearest.startswith(("'encoder/block_1'", "'encoder/block_0'"))
        message = r"class Conv .*Block, Dense, Encoder, LayerNorm, Model"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(getattr(mapped({nn.Conv: "float32"}), entry), argument, X)
    # As reports of whole programs print a path.
    with pytest.raises(ValueError, match="Paths begin below the wrapped module"):
        abstract_variables(mapped({"Model/head": "float32"}), X)
    with pytest.raises(ValueError, match=r"Paths there are: 'block_0', .*'encoder'"):
        jax.eval_shape(mapped({"qqq": "float32"}).apply, VARIABLES, X)


def test_what_one_model_of_a_class_has_another_may_lack() -> None:
    class Stack(nn.Module):
        depth: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for i in range(self.depth):
                x = nn.Dense(8, name=f"layer_{i}")(x)
            return x

    deep = mapped({"layer_2": "float32"}, model=Stack(3))
    assert counts(deep, variables_of(deep, X), X) == {"bfloat16": 2, "float32": 1}
    shallow = mapped({"layer_2": "float32"}, model=Stack(1))
    with pytest.raises(ValueError, match="'layer_2' matches no module"):
        jax.eval_shape(shallow.apply, variables_of(Stack(1), X), X)


# --- A layer's own word --------------------------------------------------------------------------

MUCH_STAYS_FLOAT32 = pytest.mark.filterwarnings("ignore:wrap. 1 layer with .* stay float32")


class Routed(nn.Module):
    """The router has 3 of the 8 contractions; `handed` hands its dtype to all three layers."""

    dtype: Any = None
    router: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> jax.Array:
        x = nn.tanh(Dense(10, dtype=self.dtype)(x))
        x = nn.tanh(Dense(11, dtype=self.router, name="router")(x))
        return Dense(8, dtype=self.dtype)(x)


class Holder(nn.Module):
    dtype: Any
    inner: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Routed(dtype=self.inner, router=jnp.float32)(x)


class Beside(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Holder(dtype=None, inner=jnp.float32)(nn.Dense(8)(x))


class RoutedLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        return nn.tanh(Routed()(x)), None


class ScannedRouters(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return over_layers(nn.remat(RoutedLayer))()(x, None)[0]


class Always(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dtype=self.dtype)(x)


F32, LOW, MIXED = jnp.float32, {"bfloat16": 8}, {"float32": 3, "bfloat16": 5}
# Forward and backward; `test_wrap_config_dtype.py` has more of what is a word, and what is not.
OWN_WORDS: list[Any] = [
    (Routed(), BF16, MIXED),
    *(
        pytest.param(Routed(router=d), BF16, MIXED, marks=pytest.mark.slow)
        for d in ("float32", np.float32, jnp.dtype("float32"))
    ),
    (Routed(router=jnp.float16), BF16, {"float16": 3, "bfloat16": 5}),
    # A third of all: one forward, the same once more in the backward pass, and two of that.
    (ScannedRouters(), BF16, {"float32": 4, "bfloat16": 8}),
    # A key overrules it.
    (Routed(), PolicyMap({"router": BF16}, default=BF16), LOW),
    pytest.param(
        *(Routed(), PolicyMap({nn.Dense: F16}, default=BF16), {"float16": 8}),
        marks=pytest.mark.slow,
    ),
    # The wrapped module's dtype is what the policy replaces, and so is what it hands on.
    (Routed(dtype=F32), BF16, LOW),
    pytest.param(Holder(dtype=F32, inner=F32), BF16, LOW, marks=pytest.mark.slow),
    # The author set float32 for the inner module: for all that is in it.
    (Beside(), BF16, {"float32": 9, "bfloat16": 2}),
    (Holder(dtype=jnp.bfloat16, inner=F32), BF16, {"float32": 8}),
    # Nothing is beside it: its float32 is all that there is, and what the policy replaces.
    (Holder(dtype=None, inner=F32), BF16, LOW),
    # Its dtype is another than that of the module around it.
    (Holder(dtype=None), BF16, MIXED),
    pytest.param(Holder(dtype=jnp.bfloat16), BF16, MIXED, marks=pytest.mark.slow),
    # The default of a class is no word of the author.
    (nn.Sequential([Always()]), BF16, {"bfloat16": 2}),
]


@MUCH_STAYS_FLOAT32
@pytest.mark.parametrize(("model", "policy", "expected"), OWN_WORDS)
def test_a_layers_own_word(model: nn.Module, policy: Any, expected: dict[str, int]) -> None:
    assert all_counts(jaxmp.wrap(model, policy), variables_of(model, X), X) == expected


@MUCH_STAYS_FLOAT32
def test_a_layers_own_word_inside_an_autocast() -> None:
    class Autocast:
        apply = staticmethod(jaxmp.autocast(jaxmp.wrap(Routed(), BF16).apply, BF16))

    assert all_counts(Autocast, variables_of(Routed(), X), X) == MIXED


# --- Maps as values ------------------------------------------------------------------------------


def test_a_map_is_a_value() -> None:
    policies = PolicyMap({"head": "float32", nn.LayerNorm: F16}, default=BF16)
    same = PolicyMap({"head": jnp.float32, nn.LayerNorm: F16}, default="c=bf16,o=f32")
    assert policies == same
    assert hash(policies) == hash(same)
    assert pickle.loads(pickle.dumps(policies)) == policies
    assert dataclasses.replace(policies, default=F16).overrides == policies.overrides
    assert policies != PolicyMap(dict(reversed(policies.overrides)), default=BF16)
    assert jaxmp.get_policy(policies) is policies


def test_modules_wrapped_in_equal_maps_are_equal_and_pickle() -> None:
    wrapped = mapped({"head": "float32"}, model=Transformer())
    assert wrapped == mapped({"head": jnp.float32}, model=Transformer())
    assert wrapped != mapped({"head": F16}, model=Transformer())
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped


def test_keep_float32() -> None:
    wrapped = jaxmp.wrap(MODEL, keep_float32("head", "encoder/block_0", policy=BF16))
    assert dtypes_by_block(wrapped) == all_but(head="float32", encoder__block_0="float32")
    wrapped = jaxmp.wrap(MODEL, keep_float32(Encoder, policy=F16))
    assert dtypes_by_block(wrapped)["block_0"] == "float16"
    assert dtypes_by_block(wrapped)["encoder/block_1"] == "float32"
    # It goes before the keys of a map.
    policies = PolicyMap({"block_0": F16, "head": F16}, default=BF16)
    wrapped = jaxmp.wrap(MODEL, keep_float32("block_0", policy=policies))
    assert dtypes_by_block(wrapped) == all_but(block_0="float32", head="float16")


def test_overrides_that_cannot_be_read() -> None:
    for overrides, error, message in [
        ({"": "float32"}, ValueError, "empty component"),
        ({"/head": "float32"}, ValueError, "'/head' has an empty component"),
        ({3: "float32"}, TypeError, "got 3 of type 'int'"),
        ({"head": "float23"}, ValueError, "float23"),
        ({"head": PolicyMap({}, default=BF16)}, TypeError, "takes one policy"),
        ("head", TypeError, "overrides takes a mapping"),
    ]:
        with case(overrides), pytest.raises(error, match=message):
            PolicyMap(overrides, default=BF16)


def test_a_key_that_keys_before_it_shadow_is_refused() -> None:
    """Like a typo: the policy would silently not apply."""
    at_construction: list[tuple[Any, str]] = [
        ({"**": BF16, "head": "float32"}, "'head' would have no effect: '\\*\\*', before it"),
        ({"encoder/**": BF16, "encoder": "float32"}, "'encoder'"),
        ({"encoder/**": BF16, "encoder/block_*": "float32"}, r"'encoder/block_\*'"),
        ({"block_*": BF16, "block_0": "float32"}, "'block_0'"),
        ({"*": BF16, "head": "float32"}, "'head'"),
        ({nn.Module: BF16, nn.Dense: "float32"}, "key Dense would have no effect: Module,"),
    ]
    for overrides, message in at_construction:
        with case(overrides), pytest.raises(ValueError, match=f"PolicyMap: .*{message}.*first"):
            PolicyMap(overrides, default=BF16)
    x = ones(2, 4)
    of_linen = nn.Sequential([nn.Dense(4), nn.Dense(4)])
    of_nnx = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
    for overrides in ({"layers_*": F16, "layers_[01]": BF16}, {"**": F16, nn.Dense: BF16}):
        wrapped = jaxmp.wrap(of_linen, PolicyMap(overrides, default=BF16))
        variables = variables_of(of_linen, x)
        with (
            case(overrides),
            pytest.raises(ValueError, match=r"wrap: the key .* would have no effe"),
        ):
            jax.eval_shape(wrapped.apply, variables, x)
    by_index: list[dict[Any, Any]] = [
        {"layers/*": F16, "layers/[01]": BF16},
        {"**": F16, nnx.Linear: BF16},
    ]
    for overrides in by_index:
        with (
            case(overrides),
            pytest.raises(ValueError, match=r"wrap: the key .* would have no effe"),
        ):
            jaxmp.wrap(of_nnx, PolicyMap(overrides, default=BF16))


def test_a_key_that_has_an_effect_somewhere_or_means_the_same_is_accepted() -> None:
    x = ones(2, 4)
    model = nn.Sequential([nn.Dense(4), nn.Dense(4)])
    variables = variables_of(model, x)
    accepted: list[dict[Any, Any]] = [
        {"layers_0": F16, "**": BF16},
        {"layers_0": F16, "layers_*": "float32"},
        {"**": F16, "layers_0": F16},
        {"layers_0": F16, nn.Dense: "float32"},
        {"layers_?": F16, "**/layers_*": F16},
        {nn.Dense: F16, nn.Module: BF16},
    ]
    for overrides in accepted:
        with case(overrides):
            counts(jaxmp.wrap(model, PolicyMap(overrides, default=BF16)), variables, x)


def test_a_map_is_for_modules() -> None:
    policies = PolicyMap({"head": "float32"}, default=BF16)
    for given in (lambda: jaxmp.autocast(jnp.sin, policies), lambda: jaxmp.wrap(jnp.sin, policies)):
        with pytest.raises(TypeError, match="autocast: takes one policy; a PolicyMap is for"):
            given()
