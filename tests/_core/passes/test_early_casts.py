"""Transposing or reshaping for a contraction: float32 values are narrowed before it, not after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_reference import reference

import jaxmp

from linen_models import variables_of
from support import float16_is_slow, gaussian, iter_eqns, jaxpr_of

X, W, Y = gaussian(0, 6, 8), gaussian(1, 4, 8), gaussian(2, 8, 4)


def dtypes(op: str, fn: Callable[..., Any], *args: Any) -> list[str]:
    """The dtypes of the results of every equation of a primitive, in order."""
    eqns = iter_eqns(jaxpr_of(fn, *args))
    return [str(e.outvars[0].aval.dtype) for e in eqns if e.primitive.name == op]


MOVES: dict[str, tuple[list[str], Callable[[jax.Array], jax.Array]]] = {
    "transpose": (["transpose"], lambda w: w.T),
    "rev": (["rev"], lambda w: lax.rev(w, (0,)).reshape(8, 4)),
    "squeeze": (["squeeze"], lambda w: lax.squeeze(w[None], (0,)).T),
    "chain": (
        ["reshape", "transpose"],
        lambda w: w.reshape(2, 2, 8).transpose(2, 0, 1).reshape(8, 4),
    ),
}


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", MOVES)
def test_is_what_a_hand_written_program_does(name: str, policy: str) -> None:
    ops, move = MOVES[name]
    low = jaxmp.get_policy(policy).compute_dtype

    def hand(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.astype(low) @ move(w.astype(low))).astype(jnp.float32)

    # Whose gradients are 16 bits wide, too.
    as_hand = f"{policy},reduce={jnp.dtype(low).name}"
    ours = jaxmp.autocast(lambda x, w: x @ move(w), as_hand)
    for op in ops:
        assert set(dtypes(op, ours, X, W)) == {jnp.dtype(low).name}

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        loss = jax.grad(lambda *a: jnp.sum(f(*a) * gaussian(2, 6, 4)), (0, 1))
        return reference(lambda *a: (f(*a), *loss(*a)))

    for got, want in zip(both(ours)(X, W), both(hand)(X, W), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


def test_the_gradient_of_a_tied_embedding_is_transposed_in_16_bits() -> None:
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(16, 8)
            return embed.attend(nn.Dense(8)(embed(tokens)))

    tokens = np.arange(12).reshape(3, 4)
    model = jaxmp.wrap(Tied(), "mixed_bfloat16,reduce=bf16")
    params = variables_of(Tied(), tokens)
    grad = jax.grad(lambda p: jnp.sum(model.apply(p, tokens) ** 2))
    assert set(dtypes("transpose", grad, params)) == {"bfloat16"}


def rows_times(x: jax.Array, t: jax.Array) -> jax.Array:
    """`x @ t`, row by row."""
    return lax.scan(lambda carry, row: (carry, row @ t), jnp.float32(0), x)[1]


KEPT: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "returned": lambda x, w: (x @ (t := w.T), t),
    "summed": lambda x, w: (x @ (t := w.T)) * jnp.sum(t, 0),
    "added to a float32 value": lambda x, w: x @ (w.T + 1),
    "added to a 16-bit value": lambda x, w: (jnp.eye(8) @ Y + w.T) @ jnp.eye(4),
    "at HIGHEST": lambda x, w: lax.dot(x, w.T, precision=lax.Precision.HIGHEST),
    "at both": lambda x, w: lax.dot(x, t := w.T, precision=lax.Precision.HIGHEST) + x @ t,
    "upcast partner": lambda x, w: x.astype(jnp.bfloat16).astype(jnp.float32) @ w.T,
    "constant of a scan": lambda x, w: rows_times(x, w.T),
    "full_precision": lambda x, w: jaxmp.full_precision(lambda x, w: x @ w)(x, w.T),
    "a move that is summed as well": lambda x, w: (x @ (t := w.T[::-1])) * jnp.sum(t, 0),
}


@pytest.mark.filterwarnings("ignore:autocast. no matmul or convolution runs in bfloat16")
def test_stays_float32_where_anything_but_a_low_contraction_reads_it() -> None:
    for name, fn in KEPT.items():
        rows = jaxmp.explain(fn, "mixed_bfloat16")(X, W).rows
        found = {(r.dtype, r.reason) for r in rows if r.op in ("transpose", "rev")}
        assert found == {("float32", "moves values: as they are")}, name
        fast = jaxmp.autocast(fn, "mixed_bfloat16")
        assert set(dtypes("transpose", fast, X, W)) == {"float32"}, name


def test_what_repeats_values_stays_float32() -> None:
    repeating = {
        "broadcast_in_dim": lambda x, w: x @ jnp.broadcast_to(w[0, :, None], (8, 4)),
        "gather": lambda x, w: w[jnp.array([0, 0, 1])] @ x.T,
    }
    for op, fn in repeating.items():
        rows = jaxmp.explain(fn, "mixed_bfloat16")(X, W).rows
        assert {r.dtype for r in rows if r.op == op} == {"float32"}


MASK = jax.device_put(np.random.default_rng(3).uniform(size=(6, 5)) < 0.5)


def gated(x: jax.Array, w: jax.Array, mask: jax.Array = MASK) -> jax.Array:
    """A mixture of experts: places of tokens, times what the router says of them."""
    h = x @ w.T
    return jnp.einsum("tc,td->cd", jax.nn.softmax(h)[:, :1] * mask, h) @ w


def padded(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x * MASK[:, :1]) @ w.T


MASKED: dict[str, tuple[Callable[..., Any], str]] = {
    "a gate": (gated, "bfloat16"),
    "padding": (padded, "bfloat16"),
    "a mask of the same shape": (lambda x, w: (x * (x > 0)) @ w.T, "bfloat16"),
    "read by others": (lambda x, w: ((y := x * MASK[:, :1]) @ w.T, y), "float32"),
    "a number": (lambda x, w: (x * MASK.sum(1, keepdims=True, dtype=x.dtype)) @ w.T, "float32"),
    "a weight": (lambda x, w: x @ (w.T * (w.T > 0)), "float32"),
}


def test_masking_what_a_contraction_reads_is_a_move() -> None:
    for name, (fn, dtype) in MASKED.items():
        # In float16 infinity times 0 is not 0.
        for policy, want in (("mixed_bfloat16", dtype), ("mixed_float16", "float32")):
            rows = jaxmp.explain(fn, policy, argnums=1)(X, W).rows
            assert [row.dtype for row in rows if row.op == "mul"][-1] == want, name


def test_a_mask_is_saved_once_in_16_bits_and_the_gradient_of_a_gate_is_summed_in_float32() -> None:
    def loss(w: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.mean(jnp.einsum("tc,td->cd", mask, X @ w.T) @ w) * jnp.mean(gated(X, w, mask))

    fast = jaxmp.autocast(loss, "mixed_bfloat16")
    saved = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fast, *args)[1], W, MASK))
    # The mask, and its product with the gate.
    assert [str(leaf.dtype) for leaf in saved if leaf.shape == MASK.shape] == ["bfloat16"] * 2
    assert set(dtypes("reduce_sum", jax.grad(fast), W, MASK)) == {"float32"}


def test_stays_float32_where_the_policy_says_so() -> None:
    fn = jaxmp.autocast(lambda x, w: x @ w.T, "mixed_bfloat16,ops=transpose:full_precision")
    assert dtypes("transpose", fn, X, W) == ["float32"]


def test_an_authors_16_bit_operand_decides_for_the_move_as_well() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot(x.astype(jnp.float16), w.T)

    assert dtypes("transpose", jaxmp.autocast(fn, "mixed_bfloat16"), X, W) == ["float16"]


def test_for_contractions_in_two_dtypes_it_stays_float32() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ (t := w.T) + lax.dot(x.astype(jnp.float16), t)

    assert dtypes("transpose", jaxmp.autocast(fn, "mixed_bfloat16"), X, W) == ["float32"]


def test_the_gradients_of_two_uses_are_added_in_float32() -> None:
    fn = jaxmp.autocast(lambda w: jnp.sum(X @ w.T + jnp.exp(X @ w.T)), "mixed_bfloat16")
    assert dtypes("transpose", fn, W) == ["bfloat16", "bfloat16"]
    assert set(dtypes("add_any", jax.grad(fn), W)) == {"float32"}


def test_explain_says_so() -> None:
    rows = jaxmp.explain(lambda x, w: x @ w.T, "mixed_bfloat16")(X, W).rows
    assert [(r.op, r.dtype, r.reason) for r in rows] == [
        ("transpose", "bfloat16", "moves what a matmul or convolution reads"),
        ("dot_general", "bfloat16", "matmul or convolution"),
    ]


WIDENED, AS_THEY_ARE = "moves what float32 ops read: widened once", "moves values: as they are"
PARTS: dict[str, tuple[Callable[[jax.Array], Any], str, str]] = {
    "two slices": (lambda h: jnp.exp(h[1:] - h[:-1]), "slice", WIDENED),
    "a value rolled": (
        lambda h: jnp.exp(h - jnp.concatenate([h[1:], h[:1]])),
        "slice",
        WIDENED,
    ),
    "slices of a reshaped one": (
        lambda h: jnp.exp((r := h.reshape(3, 2, 4))[1:] - r[:-1]),
        "slice",
        WIDENED,
    ),
    "one slice": (lambda h: jnp.exp(h[1:]), "slice", AS_THEY_ARE),
    "one that is multiplied, too": (
        lambda h: (jnp.exp((s := h[1:]) - h[:-1]), s.T @ s),
        "slice",
        AS_THEY_ARE,
    ),
    "slices that are multiplied": (lambda h: h[1:].T @ h[:-1], "slice", AS_THEY_ARE),
}


def test_a_jit_that_reads_float32_alone_is_given_it_as_other_readers_are() -> None:
    """Cotangents of a mean, a deviation and the value itself, which nearly cancel, are summed."""

    def standardized(h: jax.Array) -> jax.Array:
        return jnp.sum((h - jnp.mean(h)) / jnp.std(h))  # a jit in a jit

    @jax.jit
    def multiplied(h: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(h)) + jnp.sum(h @ W)

    def product_then(fn: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        return jaxmp.autocast(lambda x, y: fn(x @ y), "mixed_bfloat16")

    def given(name: str, fn: Callable[[jax.Array], jax.Array]) -> set[str]:
        eqns = iter_eqns(jaxpr_of(product_then(fn), X, Y))
        calls = [eqn for eqn in eqns if eqn.params.get("name") == name]
        return {str(call.invars[0].aval.dtype) for call in calls}

    assert given("_std", standardized) == given("_var", standardized) == {"float32"}
    assert set(dtypes("add_any", jax.grad(product_then(standardized)), X, Y)) == {"float32"}
    assert given("_std", jnp.std) == {"bfloat16"}  # nothing else reads it
    assert given("multiplied", lambda h: multiplied(h) + jnp.max(jnp.exp(h))) == {"bfloat16"}


def test_parts_that_float32_operations_read_are_widened_as_a_whole() -> None:
    for name, (fn, op, reason) in PARTS.items():
        rows = jaxmp.explain(lambda x, y, fn=fn: fn(x @ y), "mixed_bfloat16")(X, Y).rows
        assert next(row.reason for row in rows if row.op == op) == reason, name
