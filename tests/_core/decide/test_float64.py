"""A policy whose param dtype is float64 is about float64 values, by the same law."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from flax import nnx
from numpy_reference import reference

import jaxmp

from constructs import BF16, CONSTRUCTS, loss_of
from linen_models import variables_of
from support import assert_same_program, contraction_dtypes

POLICY = "p=f64,c=f32,o=f64"
# In float64 and float32, what float32 and bfloat16 are to the usual policy.
DTYPES = ("float64", "float32", "bfloat16")
LOWER = {"float32": "bfloat16", "float64": "float32"}


def in_float64(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return jnp.asarray(np.asarray(x, np.float64)) if x.dtype == np.float32 else x

    return jax.tree.map(one, tree)


def decided(fn: Callable[..., Any], policy: str, args: Any, argnums: Any) -> list[tuple[str, str]]:
    rows = jaxmp.explain(fn, policy, argnums)(*args).rows
    converts = "convert_element_type"  # which changes of weak types are, too, of other equations
    return [(r.op, r.dtype) for r in rows if r.dtype in DTYPES and r.op != converts]


# What they close over, ask for or draw is float32.
OTHERS = {
    "attention",
    "custom_rules_with_numpy_constants",
    "custom_vjp_closure",
    "dropout",
    "reductions",
    "scan_in_scan",
    "scan_integers_in_carry",
}


def test_the_plan_is_that_of_float32_with_the_names_changed() -> None:
    for case in CONSTRUCTS:
        if case.fn.__name__ in OTHERS:
            continue
        argnums = tuple(range(1, len(case.args)))
        usual = decided(case.fn, BF16, case.args, argnums)
        with jax.enable_x64(True):
            mine = decided(case.fn, POLICY, in_float64(case.args), argnums)
        assert [(op, LOWER[dtype]) for op, dtype in mine] == usual, case.fn.__name__


def model(w: Any, x: jax.Array) -> jax.Array:
    def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(h @ w + 0.1), None

    x, _ = jax.lax.scan(jax.checkpoint(block), x, w)
    return -jnp.mean(jax.nn.log_softmax(x)[:, 0])


def biased(w: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w[0] + w[0, 0]) @ w[1]


def weights() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return jnp.asarray(draw.normal(size=(3, 32, 32)) / 6), jnp.asarray(draw.normal(size=(8, 32)))


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": lambda fn: lambda w, x: jax.vmap(fn, (None, 0))(w, x[:, None]).mean(),
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_to_the_rounding_of_float32(transform: str) -> None:
    with jax.enable_x64(True):
        args = weights()
        fn = TRANSFORMS[transform](jaxmp.autocast(model, POLICY))
        (value, gradient), (exact, exact_gradient) = (
            reference(jax.value_and_grad(f))(*args) for f in (fn, model)
        )
        assert value.dtype == gradient.dtype == np.float64
        assert 0 < abs(value - exact) < 8 * eps("float32")  # of 3 products in a row, and not equal
        error = np.linalg.norm(gradient - exact_gradient) / np.linalg.norm(exact_gradient)
        assert 0 < error < 16 * eps("float32")
        assert set(contraction_dtypes(fn, *args)) == {"float32"}


def test_16_bits_under_float64() -> None:
    with jax.enable_x64(True):
        assert set(contraction_dtypes(jaxmp.autocast(model, "p=f64,c=bf16,o=f64"), *weights())) == {
            "bfloat16"
        }


def test_16_bits_under_float64_sum_gradients_of_parameters_in_float32() -> None:
    """They were returned by their products in bfloat16."""
    with jax.enable_x64(True):
        for policy, rounded in (
            ("p=f64,c=bf16,o=f64", False),
            ("p=f64,c=bf16,o=f64,reduce=bf16", True),
        ):
            found = reference(jax.grad(jaxmp.autocast(model, policy)))(*weights())
            assert found.dtype == jnp.float64
            assert np.array_equal(found.astype(jnp.bfloat16), found) == rounded


def test_float64_throughout_is_the_identity() -> None:
    with jax.enable_x64(True):
        same = jax.grad(jaxmp.autocast(model, "float64"))
        assert_same_program(same, jax.grad(model), *weights())


def test_regions_are_about_the_dtype_of_the_program() -> None:
    with jax.enable_x64(True):
        w, x = weights()

        def fn(w: Any, x: jax.Array, region: Callable[[Any], Any]) -> jax.Array:
            return jnp.tanh(region(lambda x: x @ w[0])(x)) @ w[1]

        def kept(w: Any, x: jax.Array) -> jax.Array:
            return fn(w, x, jaxmp.full_precision)

        def lower(w: Any, x: jax.Array) -> jax.Array:
            return fn(w, x, lambda f: jaxmp.autocast(f, BF16))

        for program, first in ((kept, "float64"), (lower, "bfloat16")):
            counts = contraction_dtypes(jaxmp.autocast(program, POLICY), w, x)
            assert dict(counts) == {first: 1, "float32": 1}


def test_an_authors_float32_is_his() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).astype(jnp.float64) @ w  # upcast: float64 is meant

    with jax.enable_x64(True):
        w, x = weights()
        assert dict(contraction_dtypes(jaxmp.autocast(fn, POLICY), w[0], x)) == {"float64": 1}


def test_masks_stay_finite() -> None:
    with jax.enable_x64(True):
        w, x = weights()

        def fn(w: jax.Array, x: jax.Array) -> jax.Array:
            low = jnp.finfo(jnp.float64).min
            return jnp.where(jnp.arange(32) < 31, x @ w, low) @ w

        w = np.asarray(w)[0] * 1e-3
        assert np.isfinite(reference(jaxmp.autocast(fn, POLICY))(w, x)).all()


def test_linen_and_nnx() -> None:
    with jax.enable_x64(True):
        x = weights()[1]
        linen = nn.Sequential([nn.Dense(16, param_dtype=jnp.float64), nn.relu, nn.Dense(4)])
        variables = in_float64(variables_of(linen, x))
        wrapped = jaxmp.wrap(linen, POLICY)
        gradient = jax.eval_shape(jax.grad(loss_of(lambda v: wrapped.apply(v, x))), variables)
        assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(np.float64)}
        assert dict(contraction_dtypes(wrapped.apply, variables, x)) == {"float32": 2}
        dense = nnx.Linear(32, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        narrow = jaxmp.wrap(dense, POLICY)
        got, want = (reference(lambda x, f=f: f(x))(x) for f in (narrow, dense))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
        assert dict(contraction_dtypes(narrow, x)) == {"float32": 1}


def test_a_policy_about_the_other_dtype_says_so() -> None:
    with jax.enable_x64(True):
        args = weights()
        single = jax.tree.map(jnp.float32, args)
        said = "are {} and stay so: the policy casts {} values only"
        with pytest.warns(UserWarning, match=said.format("float64", "float32")):
            jax.eval_shape(jaxmp.autocast(model, BF16), *args)
        with pytest.warns(UserWarning, match=said.format("float32", "float64")):
            jax.eval_shape(jaxmp.autocast(model, POLICY), *single)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(jaxmp.autocast(model, POLICY), *args)


def test_recipes_are_for_float32() -> None:
    with pytest.raises(ValueError, match="matmul=float8 is for float32 parameters"):
        jaxmp.autocast(model, "p=f64,c=bf16,o=f64,matmul=float8")


def test_explain_says_the_dtype_that_it_is_about() -> None:
    with jax.enable_x64(True):
        said = str(jaxmp.explain(model, POLICY)(*weights()))
        beside = str(jaxmp.explain(biased, POLICY)(*weights()))
    assert "only float64 ops want the result" in said
    assert "a parameter beside a float32 value" in beside
