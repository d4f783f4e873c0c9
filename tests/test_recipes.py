"""Recipes as data: what they may say, and that their strings read back."""

from __future__ import annotations

import itertools
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.policy import Policy, get_policy
from jaxmp.recipes import (
    FORMATS,
    GRANULARITIES,
    Recipe,
    blockwise_float8,
    float8,
    int8,
    mxfp4,
    mxfp8,
    nvfp4,
    parse_recipe,
    products,
)


def every_recipe():
    found = []
    for formats in itertools.product(FORMATS, repeat=3):
        for granularity in GRANULARITIES:
            try:
                found.append(Recipe(*formats, granularity))
            except ValueError:
                continue
    return found


def compute_dtype(recipe):
    """One that goes with a recipe, if the recipe goes with any."""
    if not FORMATS[recipe.forward].scaled:
        return recipe.forward
    return "f16" if "f16" in recipe.formats.values() else "bf16"


def goes_with(recipe, compute):
    try:
        Policy("f32", compute, "f32", matmul=recipe)
    except ValueError:
        return False
    return True


def test_formats_go_with_the_compute_dtype():
    """8 bits with 16, forward as computed otherwise, and no two kinds of 16 bits."""
    for recipe in every_recipe():
        kinds = {FORMATS[f].bits for f in recipe.formats.values()}
        sixteen = {"f16", "bf16"} & set(recipe.formats.values())
        for compute in ("f16", "bf16", "f32"):
            forward = FORMATS[recipe.forward].scaled or recipe.forward == compute
            low = compute != "f32" and sixteen <= {compute}
            assert goes_with(recipe, compute) == (
                forward and (low or (compute == "f32" and kinds.isdisjoint({4, 8})))
            )


def test_strings_read_back_and_policies_keep_recipes():
    recipes = [r for r in every_recipe() if goes_with(r, compute_dtype(r))]
    assert len(recipes) > 100
    for recipe in recipes:
        assert parse_recipe(str(recipe)) == recipe
        policy = Policy("f32", compute_dtype(recipe), "f32", matmul=recipe)
        assert get_policy(str(policy)) == policy
        assert eval(repr(policy), {"get_policy": get_policy}) == policy
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert len({policy, get_policy(str(policy))}) == 1


def test_names():
    for recipe, text in (
        (float8(), "float8"),
        (float8("e5m2"), "float8:e5m2:e5m2"),
        (products("e4m3", "e5m2"), "e4m3:e5m2:e5m2"),
        (products("e4m3"), "e4m3"),
        (float8(granularity="row"), "float8@row"),
        (products("e4m3", granularity="row"), "e4m3@row"),
        (products("e4m3b11fnuz", "e4m3b11", "bf16"), "e4m3b11:e4m3b11:bf16"),
        (products("e4m3fnuz", "e5m2fnuz"), "e4m3fnuz:e5m2fnuz:e5m2fnuz"),
        (int8(), "int8"),
        (mxfp8(), "mxfp8"),
        (blockwise_float8(), "blockwise_float8"),
        (nvfp4(), "nvfp4"),
        (mxfp4(), "mxfp4"),
        (nvfp4(rounding="nearest", hadamard="none"), "nvfp4+nearest+no_hadamard"),
        (mxfp4(hadamard="plain"), "mxfp4+plain_hadamard"),
        (products("bf16", "e2m1", granularity="nv"), "bf16:e2m1:e2m1@nv"),
        (products("e2m1", "bf16", granularity="mx"), "e2m1:bf16:bf16@mx"),
        (
            products("e2m1", "e2m1", "bf16", granularity="nv", rounding="nearest"),
            "e2m1:e2m1:bf16@nv+nearest",
        ),
        (products("f32", "bf16"), "f32:bf16:bf16"),
        (products("bf16", "f32", "bf16"), "bf16:f32:bf16"),
        (products("float8_e4m3fn", "FLOAT8_E5M2", "bfloat16"), "e4m3:e5m2:bf16"),
    ):
        assert str(recipe) == text
        assert parse_recipe(text.upper()) == recipe
    assert products(jnp.float8_e4m3fn, np.dtype("bfloat16")) == products("e4m3", "bf16")
    assert parse_recipe("float8@mx") == mxfp8()
    assert parse_recipe("e2m1@nv") == parse_recipe("float4_e2m1fn@nv") == nvfp4()
    assert parse_recipe("nvfp4+no-hadamard") == nvfp4(hadamard="none")
    assert parse_recipe("float8@block") == blockwise_float8()
    assert parse_recipe("float8@row") == parse_recipe("fp8@row") == float8(granularity="row")


def test_mixed_float8_and_mixed_int8_are_values_of_it():
    for name, recipe in (("mixed_float8", float8()), ("mixed_int8", int8())):
        policy = get_policy(name)
        assert policy.matmul == recipe
        assert policy == get_policy(f"mixed_bfloat16,matmul={recipe}")
    assert get_policy("mixed_bfloat16").matmul is None
    # One that rounds nothing is one all the same.
    assert get_policy("float32,matmul=f32/bf16/bf16") != get_policy("float32")


def test_what_is_refused():
    for text, says in (
        ("int8@tensor", "granularity='row'"),
        ("int8@mx", "granularity='row'"),
        ("e5m2", "'e5m2' for gradients alone"),
        ("e4m3/e5m2@block", "blocks are e4m3 throughout"),
        ("e4m3@rows", "granularity must be one of 'tensor', 'row', 'block', 'mx', 'nv'; got"),
        ("e4m3:int8@row", "grad_input is 'int8' and forward 'e4m3', and nothing multiplies"),
        ("int8:bf16:e5m2@row", "say grad_weight='int8' or 'bf16'"),
        ("e4m3b11:e4m3", "grad_input is 'e4m3' and forward 'e4m3b11', and nothing multiplies"),
        ("e4m3fnuz:e5m2", "say grad_input='e4m3fnuz' or 'bf16'"),
        ("e5m2fnuz", "use 'e4m3fnuz', and 'e5m2fnuz' for gradients alone"),
        ("e4m3b11@mx", "blocks are e4m3 throughout"),
        ("e4m4", "did you mean 'e4m3'"),
        ("e4m3/e4m3/e4m3/e4m3", "a layer has three products, and 4 formats are given"),
        ("e4m3/nf4", "grad_input is 'nf4', which names no format"),
        ("", "names no recipe"),
        ("e2m1", "4 bits need a scale for every few values; use granularity='nv' or 'mx'"),
        ("e2m1@row", "forward is 'e2m1' with granularity 'row'"),
        ("e2m1@block", "forward is 'e2m1' with granularity 'block'"),
        ("e4m3@nv", "which is of 'e2m1' alone; use granularity='mx'"),
        ("float8@nv", "which is of 'e2m1' alone; use granularity='mx'"),
        ("int8@nv", "granularity='row'"),
        ("e2m1:e4m3@mx", "say grad_input='e2m1' or 'bf16'"),
        ("nvfp4+neerest", "has the option 'neerest' (did you mean 'nearest'?); the options are"),
        ("nvfp4+plain_hadamard+no_hadamard", "says hadamard twice: say it once"),
        ("e2m1:e2m1:bf16@nv+plain_hadamard", "say grad_weight='e2m1', or leave hadamard out"),
    ):
        with pytest.raises(ValueError, match="products: ") as error:
            parse_recipe(text)
        assert says in str(error.value)


def test_what_is_no_recipe_no_format_and_no_policy():
    for value in (("e4m3",), float8):
        with pytest.raises(TypeError, match="Policy: matmul takes a recipe"):
            Policy("f32", "bf16", "f32", matmul=value)
    for value in (("e4m3",), float8, None):
        with pytest.raises(TypeError, match="products: forward takes a format"):
            products(value)
    with pytest.raises(TypeError, match=r"'int8' is a recipe.*say 'mixed_bfloat16,matmul=int8'"):
        get_policy(int8())


def test_options_of_4_bits():
    for options, says in (
        ({"rounding": "up"}, "rounding must be one of 'stochastic', 'nearest'; got 'up'"),
        ({"hadamard": "yes"}, "hadamard must be one of 'random', 'plain', 'none'; got 'yes'"),
        ({"rounding": "stochastic"}, "rounding is 'stochastic', which is of gradients in 4 bits"),
        ({"hadamard": "random"}, "hadamard is 'random', which is of gradients in 4 bits"),
    ):
        with pytest.raises(ValueError, match="products: ") as error:
            products("e2m1", "bf16", granularity="nv", **options)
        assert says in str(error.value)
    # What they are where nothing reads them may be said.
    assert products("e4m3", rounding="nearest", hadamard="none") == products("e4m3")
    assert nvfp4() == nvfp4(rounding="stochastic", hadamard="random")
