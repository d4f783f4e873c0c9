"""Which contractions are layers, and which are geometry or signal processing: one table.

A program, and why its last contraction is not a layer. Nothing is planned or run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._core.jaxprs.equation_parameters import contracted
from jaxmp._core.plan.roots import LITERALS, OTHER, WEIGHTS, geometry
from jaxmp._core.plan.why import Kind, Why

from support import CONTRACTIONS, contraction_dtypes, iter_eqns, ones

X, W, B = ones(6, 8), ones(8, 8), ones(8)
IMAGE = ones(1, 9, 9, 8)
GROUPS = jax.device_put(np.array([2, 4]))
Made = Callable[[], Any]  # an equation, when it is wanted


def contraction(fn: Callable[..., Any], *args: Any) -> Any:
    """The last contraction of a program."""
    eqns = iter_eqns(jax.make_jaxpr(fn)(*args))
    return [eqn for eqn in eqns if eqn.primitive.name in CONTRACTIONS][-1]


def product(equation: str, *shapes: tuple[int, ...]) -> Made:
    return lambda: contraction(
        lambda a, b: jnp.einsum(equation, a, b), *(ones(*shape) for shape in shapes)
    )


def convolution(*kernel: int, groups: int = 1) -> Made:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups
        )

    features = kernel[-2] * groups
    return lambda: contraction(fn, np.asarray(IMAGE)[..., :features], ones(*kernel))


LAYER = None
SIGNAL = str(Kind.SIGNAL.of())
SCALAR = Kind.SCALAR_PRODUCT.of()


def few_rows(count: int) -> Why:
    return Kind.POSE.of(count)


def few(count: int) -> Why:
    return Kind.COORDINATES.of(count)


CONTRACTED: dict[str, tuple[Made, Why | None, int]] = {
    "a layer": (product("ij,jk->ik", (6, 8), (8, 3)), LAYER, 8),
    "a layer of one output": (product("ij,j->i", (6, 8), (8,)), LAYER, 8),
    "of one example": (product("j,jk->k", (8,), (8, 3)), LAYER, 8),
    "heads": (product("bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 5, 3, 8)), LAYER, 8),
    "outer": (product("i,j->ij", (6,), (8,)), few(1), 1),
    "outer, of a batch": (product("bi,bj->bij", (4, 6), (4, 8)), few(1), 1),
    "one element": (product("ij,jk->ik", (6, 1), (1, 8)), few(1), 1),
    "a rotation": (product("ij,nj->ni", (3, 3), (9, 3)), few(3), 3),
    "homogeneous coordinates": (product("ij,nj->ni", (4, 4), (9, 4)), few(4), 4),
    "five": (product("ij,nj->ni", (5, 5), (9, 5)), LAYER, 5),
    "two axes of two": (product("ijk,jkl->il", (6, 2, 2), (2, 2, 8)), few(4), 4),
    "two axes of three": (product("ijk,jkl->il", (6, 3, 3), (3, 3, 8)), LAYER, 9),
    "a dot": (product("i,i->", (8,), (8,)), SCALAR, 8),
    "a dot per example": (product("bi,bi->b", (6, 8), (6, 8)), SCALAR, 8),
    "a trace": (product("ij,ij->", (6, 8), (6, 8)), SCALAR, 48),
    "a short dot": (product("i,i->", (3,), (3,)), SCALAR, 3),
    "a convolution": (convolution(3, 3, 8, 5), LAYER, 72),
    "a convolution of points": (convolution(1, 1, 8, 5), LAYER, 8),
    "of few points": (convolution(1, 1, 3, 5), few(3), 3),
    "of one channel": (convolution(2, 2, 1, 5), few(4), 4),
    "depthwise": (convolution(3, 3, 1, 8, groups=8), LAYER, 9),
    "depthwise of points": (convolution(1, 1, 1, 8, groups=8), few(1), 1),
    "ragged": (
        lambda: contraction(lax.ragged_dot, X, ones(2, 8, 3), GROUPS),
        LAYER,
        8,
    ),
    "ragged, of few": (
        lambda: contraction(lax.ragged_dot, np.asarray(X)[:, :4], ones(2, 4, 3), GROUPS),
        few(4),
        4,
    ),
}


def test_what_is_contracted() -> None:
    for name, (made, reason, count) in CONTRACTED.items():
        eqn = made()
        assert geometry(eqn, [OTHER, OTHER]) == reason, name
        assert contracted(eqn) == count, name


@pytest.mark.parametrize(
    ("made", "data", "layers"),
    [
        (product("ij,nj->ni", (5, 5), (9, 5)), few(5), LAYER),
        (product("bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 5, 3, 8)), few(8), LAYER),
        (product("ij,jk->ik", (6, 9), (9, 9)), LAYER, LAYER),
        (product("ij,jk->ik", (6, 4), (4, 8)), few(4), few(4)),
    ],
)
def test_of_data_eight_elements_are_geometry_and_of_layers_four(
    made: Made, data: Why | None, layers: Why | None
) -> None:
    assert geometry(made(), [OTHER, OTHER], of_layers=False) == data
    assert geometry(made(), [OTHER, OTHER]) == layers


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (product("ij,jk->ik", (6, 3), (3, 8)), LAYER),
        (product("ij,nj->ni", (3, 3), (9, 3)), few_rows(3)),
        (product("ij,nj->ni", (4, 4), (9, 4)), few_rows(4)),
        (product("ij,nj->ni", (5, 5), (9, 5)), LAYER),
        (convolution(4, 1, 1, 8, groups=8), LAYER),
        (convolution(2, 1, 1, 8, groups=8), LAYER),
        (convolution(1, 1, 3, 3), few_rows(3)),
        (product("i,i->", (8,), (8,)), SCALAR),
    ],
)
def test_a_product_with_a_parameter_is_a_layer_unless_it_is_a_small_matrix(
    made: Made, reason: Why | None
) -> None:
    for kinds in ([OTHER, WEIGHTS], [WEIGHTS, OTHER]):
        assert geometry(made(), kinds) == reason


@pytest.mark.parametrize("made", [product("ij,jk->ik", (6, 8), (8, 3)), convolution(3, 3, 8, 5)])
def test_what_is_fixed_is_signal_processing(made: Made) -> None:
    assert geometry(made(), [OTHER, LITERALS]) == Kind.SIGNAL.of()


def test_but_not_in_a_backward_pass_whose_cotangents_start_from_literals() -> None:
    eqn = contraction(jax.grad(lambda w, x: (x @ w).sum()), W, X)
    assert geometry(eqn, [LITERALS, OTHER]) is LAYER


def reason(fn: Callable[..., Any]) -> str:
    """Why the last product runs in its dtype."""
    rows = jaxmp.explain(fn, "mixed_bfloat16", argnums=1)(X, W, B, jax.random.key(0)).rows
    return [row.reason for row in rows if row.op in CONTRACTIONS][-1]


def wide(x: jax.Array) -> jax.Array:
    """More elements than geometry has."""
    return jnp.concatenate([x, x], -1)


BASIS = np.cos(np.outer(np.arange(8), np.arange(8))).astype(np.float32)
FIXED = {
    "ones": (lambda x, w, b, k: x @ jnp.ones((8, 8)), SIGNAL),
    "a Fourier basis": (lambda x, w, b, k: x @ jnp.sin(jnp.outer(*[jnp.arange(8.0)] * 2)), SIGNAL),
    "a given basis": (lambda x, w, b, k: x @ BASIS, SIGNAL),
    "a stencil": (lambda x, w, b, k: jnp.convolve(x[0], np.array([1.0, -2.0, 1, 0, 0])), SIGNAL),
    "made inside a jit": (lambda x, w, b, k: x @ jax.jit(lambda: jnp.eye(8) * 2)(), SIGNAL),
    "handed to a jit": (lambda x, w, b, k: jax.jit(jnp.matmul)(x, jnp.eye(8) * 2), SIGNAL),
    "counted, handed to a jit": (
        lambda x, w, b, k: jax.jit(lambda x, n: x @ jnp.cos(n[:, None] * n))(x, jnp.arange(8)),
        SIGNAL,
    ),
    "on the left": (lambda x, w, b, k: (jnp.tri(6) * 0.5) @ x, SIGNAL),
    "zeros, the start of a state": (
        lambda x, w, b, k: jnp.zeros((6, 8)) @ w,
        "matmul or convolution",
    ),
    "a weight": (lambda x, w, b, k: x @ w, "matmul or convolution"),
    "made of a weight": (lambda x, w, b, k: x @ (w * jnp.eye(8)), "matmul or convolution"),
    "random": (lambda x, w, b, k: wide(x) @ jax.random.normal(k, (16, 8)), "matmul or convolution"),
    "random by a literal key": (
        lambda x, w, b, k: wide(x) @ jax.random.normal(jax.random.key(0), (16, 8)),
        "matmul or convolution",
    ),
    "frozen weights": (lambda x, w, b, k: x @ FROZEN, "matmul or convolution"),
}
FROZEN = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def test_what_counts_as_made_of_constants() -> None:
    for name, (fn, expected) in FIXED.items():
        assert reason(fn) == expected, name


@pytest.mark.parametrize("inputs", [3, 4])
def test_a_layer_of_few_inputs_is_one_whatever_its_batch(inputs: int) -> None:
    w = jnp.ones((inputs, 16))

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    for rows in (1, 2, 5, 16):
        counts = contraction_dtypes(
            jaxmp.autocast(layer, "mixed_bfloat16"), w, jnp.ones((rows, inputs))
        )
        assert dict(counts) == {"bfloat16": 1}
    # As many rows as inputs may be a pose, by which points are turned.
    counts = contraction_dtypes(
        jaxmp.autocast(layer, "mixed_bfloat16"), w, jnp.ones((inputs, inputs))
    )
    assert dict(counts) == {"float32": 1}


def test_a_product_that_sums_nothing_has_a_gradient_of_one_dtype() -> None:
    """Returned in float32 and narrowed, its cotangent would meet 16 bits in a product."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        return jnp.sum((jnp.einsum("bi,bj->bij", h, h).reshape(4, -1) @ jnp.tile(w, (8, 1))) ** 2)

    cast = jaxmp.autocast(fn, "mixed_bfloat16")
    found = contraction_dtypes(jax.grad(cast), jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert set(found) <= {"bfloat16", "float32"}
