"""A primitive that hides float32 contractions is reported once, by name."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from jax.custom_derivatives import linear_call
from jax.extend.core import Primitive

import jaxmp

from support import contraction_dtypes, ones, relative

X, W = ones(4, 8), jax.device_put(np.full((8, 8), 1 / 8))
BF16 = "mixed_bfloat16"


@jax.custom_batching.custom_vmap
def own_batching(x, w):
    return x @ w @ w


@own_batching.def_vmap
def own_batching_rule(_size, in_batched, x, w):
    return jnp.einsum("bij,jk->bik", x, w), in_batched[0]


def own_transpose(x, w):
    return linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)


def composite(x, w):
    return lax.composite(lambda x, w: x @ w, "my.product")(x, w)


def solver(x, w):
    return lax.custom_linear_solve(
        lambda v: v + v @ w / 9, x, lambda matvec, b: 2 * b - matvec(b), symmetric=True
    )


HIDING = {"custom_vmap_call": own_batching, "linear_call": own_transpose, "composite": composite}


@pytest.mark.parametrize("name", HIDING)
def test_it_warns_once_by_name_and_explain_says_so(name: str) -> None:
    hiding: Any = HIDING[name]

    def fn(x, w):
        return jnp.sum(hiding(hiding(x, w), w) @ w)

    fast = jaxmp.autocast(fn, BF16, argnums=1)
    count = 4 if hiding is own_batching else 2
    with pytest.warns(UserWarning, match=rf"{name} \(test_coverage_warnings.py:\d+\)") as record:
        fast(X, W)
    assert len(record) == 1
    message = str(record[0].message)
    assert f"runs {count} float32 products as written" in message
    assert f"ops={name}:as_written" in message
    plan = jaxmp.explain(fn, BF16, 1)(X, W)
    assert [r.reason for r in plan.rows if r.op == name] == [
        "not classified, not looked inside: runs as written"
    ] * 2
    assert name in plan.summary()
    assert contraction_dtypes(fast, X, W) == {"float32": count, "bfloat16": 1}
    assert relative(fast(X, W), fn(X, W)) < 6 * eps(BF16)
    with pytest.warns(UserWarning, match=name):
        jaxmp.wrap(lambda w, x: fn(x, w), BF16)(W, X)
    # Warnings are errors: not twice, and not of what the author decided.
    fast(X, W)
    for silent in (
        jaxmp.autocast(jaxmp.full_precision(hiding), BF16, 1),
        jaxmp.autocast(jaxmp.reduced_precision(hiding), BF16, 1),
        jaxmp.autocast(hiding, f"{BF16},ops={name}:as_written", 1),
        jaxmp.autocast(hiding, "float32"),
        jaxmp.autocast(solver, BF16),  # meant to be float32
    ):
        jax.eval_shape(silent, X, W)
    low = (np.asarray(a, jnp.bfloat16) for a in (X, W))
    jax.eval_shape(jaxmp.autocast(hiding, BF16, 1), *low)


# Names in a policy's `ops`.


def test_a_name_that_no_primitive_has_is_said_once() -> None:
    for name, near in (
        ("psums", " Did you mean 'psum'?"),
        ("dot-general", " Did you mean 'dot_general'"),
        ("my_kernel_of_yesterday", ""),
    ):
        fast = jaxmp.autocast(lambda x, w: x @ w, f"{BF16},ops=exp:promote|{name}:full_precision")
        with pytest.warns(UserWarning, match=f"the policy's ops name '{name}'") as record:
            fast(X, W)
        [warning] = record
        assert f"it changes nothing.{near}" in str(warning.message)
        fast(np.asarray(X) + 1, W)

    def of_a_region(x, w):
        return jaxmp.autocast(jnp.matmul, f"{BF16},ops=tanhs:full_precision")(x, w)

    with pytest.warns(UserWarning, match="'tanhs'.* mean 'tanh'"):
        jaxmp.autocast(of_a_region, BF16)(X, W)


def test_a_primitive_that_a_program_has_not_or_has_itself_is_no_mistake() -> None:
    for name in [
        "psum",
        "psum_invariant",
        "psum_scatter",
        "pmean",
        "scan",
        "pallas_call",
        "ffi_call",
    ]:
        jax.make_jaxpr(jaxmp.autocast(jnp.matmul, f"{BF16},ops={name}:full_precision"))(X, W)
    own_p = Primitive("own_of_the_program")
    own_p.def_abstract_eval(lambda x: x)

    def fn(x, w):
        return jax.jit(lambda x: own_p.bind(x))(x) @ w

    jax.make_jaxpr(jaxmp.autocast(fn, f"{BF16},ops=own_of_the_program:as_written"))(X, W)


def test_a_default_precision_that_keeps_products_float32_is_said_once() -> None:
    fast = jax.jit(jaxmp.autocast(lambda x, w: jnp.tanh(x @ w) @ w, BF16, argnums=1))
    with jax.default_matmul_precision("tensorfloat32"):
        with pytest.warns(
            UserWarning, match="100% .* default precision is 'tensorfloat32'"
        ) as record:
            fast(X, W)
        assert len(record) == 1
        fast(ones(2, 8), W)
    assert jaxmp.explain(fast, argnums=1)(X, W).products() == {"bfloat16": 2}


def _precise_where_it_matters(x: Any, w: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        x = x @ w
    return jnp.matmul(x @ w, w, precision="highest")


def _precise_everywhere(x: Any, w: Any) -> Any:
    return jnp.matmul(jnp.tanh(jnp.matmul(x, w, precision="highest")), w, precision="highest")


def _is_about_precision(said: Any) -> bool:
    text = str(said.message)
    return "no matmul or convolution runs in bfloat16" in text and "precision=HIGHEST" in text


def test_a_policy_that_narrows_nothing_says_so_once() -> None:
    """Every product asks for a precision: it was all float32, without a word."""
    fast = jaxmp.autocast(_precise_everywhere, BF16, argnums=1)
    with pytest.warns(UserWarning, match=r"test_coverage_warnings.py:\d+ asked") as record:
        fast(X, W)
    fast(np.asarray(X)[:2], W)
    assert len(record) == 1
    assert _is_about_precision(record[0])


def test_a_wrapped_model_that_stays_float32_says_which_layers() -> None:
    dense = functools.partial(nn.Dense, 8, precision="highest")
    model = jaxmp.wrap(nn.Sequential([dense(), nn.tanh, dense()]), BF16)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    with pytest.warns(UserWarning, match="Sequential/layers_0, Sequential/layers_2") as record:
        report = jaxmp.audit(jax.grad(lambda v: jnp.sum(model.apply(v, X))))(variables)
    assert len(record) == 1
    assert _is_about_precision(record[0])
    faults = [f for f in report.findings if f.kind == "overruled"]
    assert {f.path for f in faults} == {"Sequential/layers_0", "Sequential/layers_2"}
    assert all("precision" in f.fix for f in faults)
    partly = jaxmp.wrap(nn.Sequential([dense(), nn.tanh, nn.Dense(8)]), BF16)
    loss = jax.grad(lambda v: jnp.sum(partly.apply(v, X)))
    jaxmp.audit(loss)(variables).assert_no()


def test_nothing_is_said_where_the_other_products_are_in_a_float32_region() -> None:
    """A solver has precise products of its own, and the field is float32 on purpose."""
    exactly = jaxmp.full_precision(jnp.matmul)

    def fn(x: Any, w: Any) -> Any:
        return jnp.matmul(exactly(x, w), w, precision="highest")

    jaxmp.autocast(fn, BF16, argnums=1)(X, W)
    report = jaxmp.audit(fn, BF16, argnums=1)(X, W)
    assert "overruled" not in {f.kind for f in report.findings}


def test_nothing_is_said_of_a_precision_that_is_asked_for() -> None:
    for default, fn, policy in (
        ("bfloat16", jnp.matmul, BF16),
        ("highest", jnp.matmul, "float32"),
        ("highest", jnp.add, BF16),
        (None, _precise_where_it_matters, BF16),
    ):
        with jax.default_matmul_precision(default):
            jax.make_jaxpr(jaxmp.autocast(fn, policy, (0, 1)))(W, W)


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit, jax.vmap])
def test_a_warning_is_at_the_users_line(transform: Any) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(own_batching(x[None] if x.ndim == 1 else x, jnp.eye(8)))

    called = transform(jaxmp.autocast(fn, "mixed_bfloat16", argnums=()))
    with pytest.warns(UserWarning, match="is not looked inside") as said:
        called(ones(4, 8))
    assert {warning.filename for warning in said} == {__file__}


def test_layers_with_a_16_bit_dtype_of_their_own_are_not_in_8_bits_without_a_word() -> None:
    """Of a model, and of a function; where half of the FLOPs or more are in 8 bits, it is meant."""
    x = ones(16, 64)

    def called(*dtypes: Any) -> None:
        layers = [nn.Dense(64, dtype=dtype) for dtype in (*dtypes, jnp.bfloat16)]
        model = jaxmp.wrap(nn.Sequential(layers), "mixed_float8")
        jax.eval_shape(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)

    with pytest.warns(UserWarning, match=r"2 because the author chose the dtype of the operands"):
        called(jnp.bfloat16)
    called(None, None)

    def fn(w: Any, x: Any) -> Any:
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    with pytest.warns(UserWarning, match=r"float8 products: 100% .* stay in bfloat16: 1 because"):
        jax.eval_shape(jaxmp.autocast(fn, "mixed_float8"), ones(64, 64), x)
    jax.eval_shape(jaxmp.autocast(fn, "mixed_bfloat16"), ones(64, 64), x)
