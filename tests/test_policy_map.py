"""`PolicyMap`: policies by module path and class, and a layer's own word, in wrapped modules."""

from __future__ import annotations

import dataclasses
import pickle
from collections import defaultdict
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import PolicyMap
from jaxmp.policies import keep_float32

from linen_models import (
    BF16,
    F16,
    Transformer,
    X,
    abstract_variables,
    all_counts,
    assert_close,
    assert_same,
    compiled,
    counts,
    gradient_of,
    over_layers,
    run,
    variables_of,
)
from support import CONTRACTIONS, iter_eqns, jaxpr_of, primitives, slow_when


class Block(nn.Module):
    """Its width, which no other block has, tells its contractions from the others."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(8, name="down")(nn.tanh(nn.Dense(self.width, name="up")(x)))


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
        self.head = nn.Dense(13)

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


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("head", "head"),
        ("block_0", "block_0"),  # not the encoder's
        ("encoder", "encoder/block_0 encoder/block_1"),
        ("encoder/block_1", "encoder/block_1"),
        ("encoder/*", "encoder/block_0 encoder/block_1"),
        ("encoder/block_[!0]", "encoder/block_1"),
        ("*", "encoder/block_0 encoder/block_1 block_0 head"),
        ("*/block_0", "encoder/block_0"),
        ("**/block_0", "encoder/block_0 block_0"),
        ("**", "encoder/block_0 encoder/block_1 block_0 head"),
        ("encoder/**", "encoder/block_0 encoder/block_1"),
        (Encoder, "encoder/block_0 encoder/block_1"),
        (Block, "encoder/block_0 encoder/block_1 block_0"),
        (nn.Module, "encoder/block_0 encoder/block_1 block_0 head"),
    ],
    ids=str,
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


def test_the_first_key_that_matches_wins() -> None:
    general, special = ("encoder/*", "float32"), ("encoder/block_1", F16)
    assert dtypes_by_block(mapped(dict([general, special]))) == all_but(
        encoder__block_0="float32", encoder__block_1="float32"
    )
    assert dtypes_by_block(mapped(dict([special, general]))) == all_but(
        encoder__block_0="float32", encoder__block_1="float16"
    )


def test_a_match_further_inside_wins_over_one_around_it() -> None:
    found = dtypes_by_block(mapped({"encoder": "float32", "encoder/block_1": BF16}))
    assert found == all_but(encoder__block_0="float32")


@pytest.mark.slow
def test_float16_in_one_block_and_bfloat16_in_another() -> None:
    wrapped = mapped({"encoder/block_0": F16, "head": "float32"})
    assert dtypes_by_block(wrapped) == all_but(encoder__block_0="float16", head="float32")
    assert_close(run(wrapped, VARIABLES, X), run(MODEL, VARIABLES, X))
    got = compiled(gradient_of(wrapped, X))(VARIABLES)
    assert_close(got, compiled(gradient_of(MODEL, X))(VARIABLES))


def test_low_overrides_in_a_float32_default() -> None:
    wrapped = mapped({"encoder": BF16}, default="float32")
    assert dtypes_by_block(wrapped) == {
        "encoder/block_0": "bfloat16",
        "encoder/block_1": "bfloat16",
        "block_0": "float32",
        "head": "float32",
    }


def test_refinements_of_an_override_hold_inside_it() -> None:
    policy = "mixed_bfloat16,ops=tanh:full"
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
        Outer(PolicyMap({"model/encoder": "float32"}, default=BF16)).apply(variables, X)


def test_other_methods_by_name() -> None:
    wrapped = mapped({"encoder/block_0": "float32"})
    assert counts(wrapped, VARIABLES, X, method="encode") == {"float32": 2, "bfloat16": 2}


def test_a_map_without_overrides_is_its_default() -> None:
    single = jaxmp.wrap(MODEL, BF16)
    assert str(jaxpr_of(mapped({}).apply, VARIABLES, X)) == str(
        jaxpr_of(single.apply, VARIABLES, X)
    )


def test_a_map_of_float32_alone_is_bitwise_the_identity() -> None:
    wrapped = mapped({"head": "float32"}, default="float32")
    got = compiled(gradient_of(wrapped, X))(VARIABLES)
    assert_same(got, compiled(gradient_of(MODEL, X))(VARIABLES))


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
    got = compiled(gradient_of(wrapped, X))(variables)
    assert_close(got, compiled(gradient_of(Scanned(), X))(variables))


@pytest.mark.parametrize("lift", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_inside_lifted_modules(lift: Any) -> None:
    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + lift(Block)(10, name="a")(x)
            return x + lift(Block)(11, name="b")(x)

    variables = variables_of(Lifted(), X)
    for key in ("b", "b/*"):
        wrapped = mapped({key: "float32"}, model=Lifted())
        assert dtypes_by_block(wrapped, variables) == {
            "encoder/block_0": "bfloat16",
            "encoder/block_1": "float32",
        }


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
        assert (block["up"]["bias"].dtype, block["down"]["bias"].dtype) == (jnp.bfloat16, X.dtype)


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


@pytest.mark.parametrize("key", ["head", nn.Dense, "**"], ids=str)
def test_a_wrapped_module_keeps_its_policy_under_a_map_around_it(key: Any) -> None:
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(13, name="head")(self.inner(x))

    model = Outer(jaxmp.wrap(Block(10), F16))
    variables = variables_of(model, X)
    found = dtypes_by_block(mapped({key: "float32"}, model=model), variables)
    assert found == {"encoder/block_0": "float16", "head": "float32"}


@pytest.mark.parametrize("policy", [BF16, PolicyMap({"up": "c=f16,o=f32"}, default=BF16)])
def test_a_wrapped_module_stores_its_parameters_by_its_own_policy(policy: Any) -> None:
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(13, name="head")(self.inner(x))

    model = jaxmp.wrap(Outer(jaxmp.wrap(Block(10), policy)), "bfloat16")
    params = abstract_variables(model, X)["params"]
    assert {str(p.dtype) for p in jax.tree.leaves(params["inner"])} == {"float32"}
    assert {str(p.dtype) for p in jax.tree.leaves(params["head"])} == {"bfloat16"}


@pytest.mark.slow
def test_one_block_of_a_language_model() -> None:
    class LM(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for i, width in enumerate((10, 11, 12)):
                y = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(1, name=f"attention_{i}")(y)
                x = x + Block(width, name=f"block_{i}")(x)
            return nn.Dense(13, name="head")(x)

    variables = variables_of(LM(), X[None])
    everything = all_counts(jaxmp.wrap(LM(), BF16), variables, X[None])
    wrapped = mapped({"block_1/**": "float32"}, model=LM())
    [(_, total)] = everything.items()
    assert all_counts(wrapped, variables, X[None]) == {"float32": 6, "bfloat16": total - 6}
    wrapped = mapped({nn.MultiHeadDotProductAttention: "float32"}, model=LM())
    attention = all_counts(wrapped, variables, X[None])
    assert attention == {"float32": total - 3 * 6 - 3, "bfloat16": 3 * 6 + 3}


# --- Parameters ----------------------------------------------------------------------------------


def test_each_module_stores_its_parameters_as_its_policy_says() -> None:
    low = "p=bf16,c=bf16,o=f32"
    wrapped = mapped({"head": BF16, "encoder/block_1/norm": "p=f16,c=f16,o=f32"}, default=low)
    rngs = jax.random.key(0)
    created, plain = compiled(wrapped.init)(rngs, X), compiled(MODEL.init)(rngs, X)

    def want(path: Any, leaf: Any) -> Any:
        names = "/".join(str(k.key) for k in path)
        if names.startswith("params/head"):
            return leaf
        norm = names.startswith("params/encoder/block_1/norm")
        return leaf.astype(jnp.float16 if norm else jnp.bfloat16)

    assert_same(created, jax.tree_util.tree_map_with_path(want, plain))
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


@pytest.mark.parametrize("entry", ["init", "apply"])
def test_a_pattern_that_matches_nothing(entry: str) -> None:
    wrapped = mapped({"head": "float32", "encoder/blok_1": "float32"})
    argument = jax.random.key(0) if entry == "init" else VARIABLES
    with pytest.raises(ValueError, match="'encoder/blok_1' matches no module") as caught:
        jax.eval_shape(getattr(wrapped, entry), argument, X)
    nearest = str(caught.value).split("nearest paths: ")[1]
    assert nearest.startswith(("'encoder/block_1'", "'encoder/block_0'"))


def test_a_pattern_that_begins_above_the_wrapped_module():
    """As reports of whole programs print a path."""
    with pytest.raises(ValueError, match="Paths begin below the wrapped module"):
        mapped({"Model/head": "float32"}).init(jax.random.key(0), X)


@pytest.mark.parametrize("entry", ["init", "apply"])
def test_a_class_that_is_not_there(entry: str) -> None:
    wrapped = mapped({nn.Conv: "float32"})
    argument = jax.random.key(0) if entry == "init" else VARIABLES
    with pytest.raises(ValueError, match=r"class Conv .*Block, Dense, Encoder, LayerNorm, Model"):
        jax.eval_shape(getattr(wrapped, entry), argument, X)


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


def test_a_pattern_like_nothing_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"Paths there are: 'block_0', .*'encoder'"):
        jax.eval_shape(mapped({"qqq": "float32"}).apply, VARIABLES, X)


def test_a_key_that_is_shadowed_by_another_is_no_mistake() -> None:
    wrapped = mapped({"encoder/*": "float32", "encoder/block_1": BF16})
    jax.eval_shape(wrapped.apply, VARIABLES, X)


def test_a_method_that_does_not_enter_a_module_is_no_mistake() -> None:
    wrapped = mapped({"head": "float32", "block_0/up": "float32"})
    assert counts(wrapped, VARIABLES, X, method="encode") == {"bfloat16": 4}


# --- A layer's own word --------------------------------------------------------------------------

MUCH_STAYS_FLOAT32 = pytest.mark.filterwarnings("ignore:wrap. 1 layer with .* stay float32")


class Routed(nn.Module):
    """The router has 3 of the 8 contractions; `handed` hands its dtype to all three layers."""

    dtype: Any = None
    router: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> jax.Array:
        x = nn.tanh(nn.Dense(10, dtype=self.dtype)(x))
        x = nn.tanh(nn.Dense(11, dtype=self.router, name="router")(x))
        return nn.Dense(8, dtype=self.dtype)(x)


class Holder(nn.Module):
    dtype: Any
    inner: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Routed(dtype=self.inner, router=jnp.float32)(x)


def of_routed(model: nn.Module, policy: Any = BF16) -> dict[str, int]:
    return all_counts(jaxmp.wrap(model, policy), variables_of(model, X), X)


@MUCH_STAYS_FLOAT32
@pytest.mark.parametrize("dtype", [jnp.float32, "float32", np.float32, jnp.dtype("float32")])
def test_a_layers_own_float32_is_honoured_forward_and_backward(dtype: Any) -> None:
    assert of_routed(Routed(router=dtype)) == {"float32": 3, "bfloat16": 5}


@MUCH_STAYS_FLOAT32
def test_a_layers_own_float32_in_scanned_and_rematerialized_layers() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> Any:
            return nn.tanh(Routed()(x)), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return over_layers(nn.remat(Layer))()(x, None)[0]

    # A third of all: one forward, the same once more in the backward pass, and two of that.
    assert of_routed(Scanned()) == {"float32": 4, "bfloat16": 8}


def test_a_path_pattern_overrules_a_layers_own_word() -> None:
    assert of_routed(Routed(), PolicyMap({"router": BF16}, default=BF16)) == {"bfloat16": 8}
    assert of_routed(Routed(), PolicyMap({nn.Dense: F16}, default=BF16)) == {"float16": 8}


def test_a_dtype_that_is_handed_down_is_not_the_layers_own() -> None:
    """The wrapped module's dtype is what the policy replaces, and so is what it hands on."""
    assert of_routed(Routed(dtype=jnp.float32)) == {"bfloat16": 8}
    assert of_routed(Holder(dtype=jnp.float32, inner=jnp.float32)) == {"bfloat16": 8}


@MUCH_STAYS_FLOAT32
def test_a_module_with_a_word_of_its_own_hands_it_on() -> None:
    """The author set float32 for the inner module: for all that is in it."""

    class Beside(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Holder(dtype=None, inner=jnp.float32)(nn.Dense(8)(x))

    assert of_routed(Beside()) == {"float32": 9, "bfloat16": 2}
    assert of_routed(Holder(dtype=jnp.bfloat16, inner=jnp.float32)) == {"float32": 8}
    # Nothing is beside it: its float32 is all that there is, and what the policy replaces.
    assert of_routed(Holder(dtype=None, inner=jnp.float32)) == {"bfloat16": 8}


@MUCH_STAYS_FLOAT32
def test_float32_in_a_module_whose_dtype_is_another_is_its_own() -> None:
    assert of_routed(Holder(dtype=None)) == {"float32": 3, "bfloat16": 5}
    assert of_routed(Holder(dtype=jnp.bfloat16)) == {"float32": 3, "bfloat16": 5}


def test_a_default_of_the_class_is_no_word_of_the_author() -> None:
    class Always(nn.Module):
        dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8, dtype=self.dtype)(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Always()(x)

    assert of_routed(Outer()) == {"bfloat16": 2}


def test_a_layers_own_16_bits_are_its_own() -> None:
    assert of_routed(Routed(router=jnp.float16)) == {"float16": 3, "bfloat16": 5}


@MUCH_STAYS_FLOAT32
def test_a_layers_own_float32_is_honoured_under_autocast_of_a_wrapped_module() -> None:
    model = jaxmp.wrap(Routed(), BF16)
    variables = variables_of(model, X)

    class Autocast:
        apply = staticmethod(jaxmp.autocast(model.apply, BF16))

    assert all_counts(Autocast, variables, X) == {"float32": 3, "bfloat16": 5}


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


def test_keep_float32_goes_before_the_keys_of_a_map() -> None:
    policies = PolicyMap({"block_0": F16, "head": F16}, default=BF16)
    wrapped = jaxmp.wrap(MODEL, keep_float32("block_0", policy=policies))
    assert dtypes_by_block(wrapped) == all_but(block_0="float32", head="float16")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"": "float32"}, ValueError, "empty component"),
        ({"/head": "float32"}, ValueError, "'/head' has an empty component"),
        ({3: "float32"}, TypeError, "got 3 of type 'int'"),
        ({"head": "float23"}, ValueError, "float23"),
        ({"head": PolicyMap({}, default=BF16)}, TypeError, "takes one policy"),
        ("head", TypeError, "overrides takes a mapping"),
    ],
)
def test_overrides_that_cannot_be_read(overrides: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        PolicyMap(overrides, default=BF16)


def test_a_map_is_for_modules() -> None:
    policies = PolicyMap({"head": "float32"}, default=BF16)
    for given in (lambda: jaxmp.autocast(jnp.sin, policies), lambda: jaxmp.wrap(jnp.sin, policies)):
        with pytest.raises(TypeError, match="autocast: takes one policy; a PolicyMap is for"):
            given()
