"""Every construct of JAX under `autocast`: one contract for all, then what is particular to each.

The contract (`CONSTRUCTS`): under a 16-bit policy values and gradients agree with float32 within
the rounding of that type, gradients have their primal's dtype, every contraction that the author
did not pin multiplies in the compute dtype, forward and backward; under the float32 policy both
are bitwise the plain function's.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp

from support import CONTRACTIONS, contraction_dtypes, contractions, iter_eqns, jaxpr_of, primitives

BF16, F16 = "mixed_bfloat16", "mixed_float16"
COMPUTE = {BF16: "bfloat16", F16: "float16"}


def _normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


X = _normal(0, 4, 8)
W = _normal(1, 8, 8, scale=8**-0.5)
V = _normal(2, 8, 8, scale=8**-0.5)
STACK = _normal(3, 3, 8, 8, scale=8**-0.5)
XWV = (X, W, V)
SYMMETRIC = jnp.asarray(np.eye(8) * 3 + np.asarray(W @ W.T), jnp.float32)


def _project(tree: Any) -> jax.Array:
    """A scalar with a different, non-zero cotangent for every element of every inexact leaf."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = jnp.real(leaf).astype(jnp.float32)
            total += jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape))
    return total


def _loss(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *args: _project(fn(*args))


def _assert_close(got: Any, want: Any, *, dtype: str, depth: int) -> None:
    """Compares every leaf in the 2-norm.

    A contraction rounds two operands and one result, each by at most eps/2 relative, and
    the point-wise operation next to it rounds once more: 2 eps for each of `depth` contractions
    in a row. Twice that allows for condition numbers up to 2.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    tolerance = 4 * depth * float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert jnp.result_type(a) == jnp.result_type(b)
        if not jnp.issubdtype(jnp.result_type(b), jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-30


def _assert_bitwise(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Auto,))


# --- the functions under test ----------------------------------------------------------------


@jax.jit
def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def transposed_result(x, w, v):
    # XLA folds the transposition into the contraction, in a layout its CPU backend cannot run.
    return (x @ w).T, jnp.moveaxis((x @ v)[None], 0, -1)


def jit_nested(x, w, v):
    return _dense(jax.jit(lambda a: _dense(a, w))(x), v)


def jit_shared(x, w, v):
    return _dense(_dense(_dense(x, w), v), w)


def jit_inline(x, w, v):
    return jax.jit(lambda a, b: a @ b, inline=True)(jnp.tanh(x @ w), v)


def jit_static(x, w, v):
    @partial(jax.jit, static_argnames=("activation", "times"))
    def layer(a, b, *, activation, times):
        for _ in range(times):
            a = getattr(jnp, activation)(a @ b)
        return a

    return layer(layer(x, w, activation="tanh", times=1), v, activation="sin", times=2)


def jit_donated(x, w, v):
    return jax.jit(lambda a, b: a @ b, donate_argnums=0)(jnp.tanh(x @ w), v)


def scan(x, w, v):
    def body(h, u):
        h = jnp.tanh(h @ w + u)
        return h, h @ v

    return lax.scan(body, x, jnp.stack([x, 2 * x, -x]))


def scan_reverse(x, w, v):
    def body(h, u):
        h = jnp.tanh(h @ w + u)
        return h, h @ v

    return lax.scan(body, x, jnp.stack([x, 2 * x, -x]), reverse=True)


def scan_unrolled(x, w, v):
    def body(h, u):
        h = jnp.tanh(h @ w + u)
        return h, h @ v

    return lax.scan(body, x, jnp.stack([x, 2 * x, -x]), unroll=2)


def scan_no_carry(x, w, v):
    return lax.scan(lambda _, u: (None, jnp.tanh(u @ w) @ v), None, jnp.stack([x, -x]))[1]


def scan_no_xs(x, w, v):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w) @ v, None), x, None, length=3)[0]


def scan_layers(x, stack):
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), h.sum()), x, stack)


def scan_accumulator(x, w, v):
    def body(acc, u):
        return acc + u @ w, None

    return lax.scan(body, jnp.zeros_like(x), jnp.stack([x, 2 * x, -x]))[0] @ v


def scan_in_scan(x, w, v):
    def outer(h, _):
        h, ys = lax.scan(lambda c, u: (jnp.tanh(c @ w), c * u), h, jnp.arange(2.0))
        return h @ v, ys.sum(0)

    return lax.scan(outer, x, None, length=2)


def scan_integers_in_carry(x, w, v):
    def body(carry, key):
        step, flag, h = carry
        h = jnp.tanh(h @ w) * jnp.where(flag, 1.0, 0.5) + 0.1 * jax.random.normal(key, h.shape)
        return (step + 1, ~flag, h), step

    keys = jax.random.split(jax.random.key(0), 3)
    (step, flag, h), steps = lax.scan(body, (jnp.int32(0), jnp.bool_(True), x), keys)
    return step, flag, h @ v, steps


def while_loop(x, w, v):
    def body(state):
        i, h = state
        return i + 1, jnp.tanh(h @ w)

    return lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1] @ v


def while_predicate_on_float(x, w, v):
    # The predicate closes over a float32 value and reads a carry that contractions feed.
    limit = jnp.float32(1e4) + w[0, 0]
    counter, h = lax.while_loop(
        lambda s: jnp.sum(s[1] ** 2) * 0 + s[0] < limit, lambda s: (s[0] * 10, s[1] @ w), (1.0, x)
    )
    return counter, h @ v


def fori_loop_static(x, w, v):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) * (i + 1), x) @ v


def fori_loop_dynamic(x, w, v, n):
    return lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ w), x) @ v


def cond(x, w, v, flag):
    return lax.cond(flag, lambda a: jnp.tanh(a @ w), lambda a: a @ v @ w, x)


def cond_closures(x, w, v, flag):
    h = x @ w
    return lax.cond(flag, lambda: jnp.tanh(h) @ v, lambda: h)


def cond_on_value(x, w, v):
    h = x @ w
    return lax.cond(jnp.sum(h) > 1e6, lambda: h, lambda: jnp.sin(h) @ v)


def switch(x, w, v, index):
    branches = (lambda a: a @ w, lambda a: jnp.tanh(a @ v), lambda a: jnp.zeros_like(a))
    return lax.switch(index, branches, x)


def platform_dependent(x, w, v):
    h = lax.platform_dependent(x, tpu=lambda a: jnp.sin(a @ w), default=lambda a: jnp.tanh(a @ w))
    return h @ v


def remat(x, w, v):
    return jax.checkpoint(lambda a: jnp.tanh(jnp.tanh(a @ w) @ v))(x)


def remat_policy(x, w, v):
    block = jax.checkpoint(
        lambda a: jnp.tanh(jnp.tanh(a @ w) @ v), policy=jax.checkpoint_policies.dots_saveable
    )
    return block(block(x))


def remat_in_scan(x, stack):
    body = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None), prevent_cse=False)
    return lax.scan(body, x, stack)[0]


def remat_names(x, w, v):
    def block(a):
        return jnp.tanh(checkpoint_name(jnp.sin(a @ w), "kept") @ v)

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(block, policy=policy)(x)


@jax.custom_jvp
def _doubled_tangent(x, w):
    return jnp.tanh(x @ w)


@_doubled_tangent.defjvp
def _doubled_tangent_jvp(primals, tangents):
    x, w = primals
    dx, dw = tangents
    y = _doubled_tangent(x, w)
    return y, 2 * (1 - y**2) * (dx @ w + x @ dw)


def custom_jvp(x, w, v):
    return _doubled_tangent(x, w) @ v


@partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def _apply_twice(activation, x, times):
    return activation(x) * times


@_apply_twice.defjvp
def _apply_twice_jvp(activation, times, primals, tangents):
    (x,), (dx,) = primals, tangents
    return _apply_twice(activation, x, times), 3 * dx * jnp.cos(x)


def custom_jvp_nondiff(x, w, v):
    return _apply_twice(jnp.tanh, x @ w, 2) @ v


@jax.custom_vjp
def _reversed(x):
    return x


_reversed.defvjp(lambda x: (x, None), lambda _, g: (-g,))


def gradient_reversal(x, w, v):
    return _reversed(jnp.tanh(x @ w)) @ v


@jax.custom_vjp
def _dense_tripled(x, w):
    return x @ w


def _dense_tripled_fwd(x, w):
    return x @ w, (x, w)


def _dense_tripled_bwd(residuals, g):
    x, w = residuals
    return 3 * (g @ w.T), 3 * (x.T @ g)


_dense_tripled.defvjp(_dense_tripled_fwd, _dense_tripled_bwd)


def custom_vjp(x, w, v):
    return jnp.tanh(_dense_tripled(x, w)) @ v


def custom_vjp_in_scan(x, stack):
    return lax.scan(lambda h, w: (jnp.tanh(_dense_tripled(h, w)), None), x, stack)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _scaled_dense(activation, x, w, scale):
    return activation(x @ w) * scale


def _scaled_dense_fwd(activation, x, w, scale):
    return _scaled_dense(activation, x, w, scale), (x, w)


def _scaled_dense_bwd(activation, scale, residuals, g):
    x, w = residuals
    _, pull = jax.vjp(lambda a, b: activation(a @ b) * scale * 0.5, x, w)
    return pull(g)


_scaled_dense.defvjp(_scaled_dense_fwd, _scaled_dense_bwd)


def custom_vjp_nondiff(x, w, v):
    return _scaled_dense(jnp.tanh, x, w, 2.0) @ v


@jax.custom_vjp
def _rows(table, indices):
    return table[indices] @ table.T


def _rows_bwd(residuals, g):
    table, indices = residuals
    rows = g @ table
    return jnp.zeros_like(table).at[indices].add(5 * rows), np.zeros(
        indices.shape, jax.dtypes.float0
    )


_rows.defvjp(lambda table, indices: (_rows(table, indices), (table, indices)), _rows_bwd)


def custom_vjp_integers(x, w, v):
    return x[:2] @ _rows(w, jnp.array([1, 3, 1, 0, 0, 2, 2, 7])) @ v


OFFSET = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def custom_vjp_closure(x, w, v):
    # A constant: a value computed in here is one that JAX cannot differentiate under jit either.
    @jax.custom_vjp
    def shifted(a):
        return jnp.tanh(a @ V + OFFSET)

    shifted.defvjp(lambda a: (shifted(a), a), lambda a, g: (7 * (g * jnp.cos(a + OFFSET)) @ V.T,))
    return shifted(x @ w) @ v


def custom_rules_with_numpy_constants(x, w, v):
    mask, table = np.arange(8) > 2, np.linspace(-1, 1, 8, dtype=np.float32)

    @jax.custom_jvp
    def masked(a):
        return jnp.where(mask, a, 0.5 * a) + table

    @masked.defjvp
    def rule(primals, tangents):
        return masked(*primals), jnp.where(mask, 3.0, 0.5) * tangents[0]

    @jax.custom_vjp
    def tabled(a):
        return jnp.where(mask, a, 0.5 * a) + table

    tabled.defvjp(lambda a: (tabled(a), None), lambda _, g: (jnp.where(mask, 2.0, 0.5) * g,))
    return tabled(masked(x @ w)) @ v


def custom_gradient(x, w, v):
    @jax.custom_gradient
    def clipped(a):
        y = jnp.tanh(a)
        return y, lambda g: (g * jnp.exp(-(y**2)),)

    return clipped(x @ w) @ v


def shard_map_psum(x, w, v):
    mesh = _mesh()
    n = mesh.devices.size

    def local(a, b):
        return lax.psum(jnp.tanh(a @ b), "d")

    rows = jnp.tile(x, (n, 1))
    spec = PartitionSpec
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec())
    return mapped(rows, w) @ v / n


def shard_map_all_gather(x, w, v):
    mesh = _mesh()
    n = mesh.devices.size
    spec = PartitionSpec

    def local(a, b):
        # Fully sharded weights: gathered where they are used.
        full = lax.all_gather(b, "d", axis=0, tiled=True)
        return jnp.tanh(a @ full)

    wide = jnp.tile(w, (n, 1)) / n
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec("d"), spec("d")), out_specs=spec("d"))
    return mapped(jnp.tile(x, (n, n)), wide) @ v


def shard_map_collectives(x, w, v):
    mesh = _mesh()
    n = mesh.devices.size
    spec = PartitionSpec

    def local(a):
        h = jnp.tanh(a @ w)
        h = lax.ppermute(h, "d", [(i, (i + 1) % n) for i in range(n)])
        scattered = lax.psum_scatter(jnp.tile(h, (n, 1)), "d", scatter_dimension=0, tiled=True)
        return scattered + lax.pmean(h, "d") + lax.axis_index("d") * 0.0

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec("d"), out_specs=spec("d"))
    return mapped(jnp.tile(x, (n, 1))) @ v / n


def custom_linear_solve(x, a):
    def solve(matvec, b):
        # Jacobi iterations: the matrix is diagonally dominant, so 30 of them reach rounding.
        h = b / 3
        for _ in range(30):
            h = h + (b - matvec(h)) / 5
        return h

    return lax.custom_linear_solve(
        lambda b: jnp.einsum("ij,j->i", a, b, precision="highest"), x[0], solve, symmetric=True
    )


def linalg_solve(x, a, v):
    return jnp.linalg.solve(a, x.T).T @ v


def linalg_cholesky(x, a, v):
    return jnp.linalg.cholesky(a) @ v


def custom_root(x, w, v):
    target = jnp.tanh(x @ w)

    def solve(f, guess):
        # Bisection of a monotone function, element by element.
        def step(_, bounds):
            low, high = bounds
            middle = (low + high) / 2
            above = f(middle) > 0
            return jnp.where(above, low, middle), jnp.where(above, middle, high)

        low, high = lax.fori_loop(0, 30, step, (guess - 4, guess + 4))
        return (low + high) / 2

    def tangent_solve(g, y):
        return y / g(jnp.ones_like(y))

    root = lax.custom_root(
        lambda h: h + 0.1 * h**3 - target, jnp.zeros_like(target), solve, tangent_solve
    )
    return root @ v


def associative_scan(x, w, v):
    def combine(left, right):
        (a, b), (c, d) = left, right
        return a * c, b * c + d

    h = x @ w
    return lax.associative_scan(combine, (jax.nn.sigmoid(h), h))[1] @ v


def associative_scan_of_matrices(x, stack):
    return x @ lax.associative_scan(jnp.matmul, stack)[-1]


def lax_map(x, w, v):
    return lax.map(lambda row: jnp.tanh(row @ w) @ v, x)


def lax_map_batched(x, w, v):
    return lax.map(lambda row: jnp.tanh(row @ w) @ v, x, batch_size=2)


def named_call(x, w, v):
    return jax.named_call(lambda a: jnp.tanh(a @ w), name="encoder")(x) @ v


@jax.custom_batching.custom_vmap
def _normalised(x):
    return x / (1 + jnp.abs(x).max())


@_normalised.def_vmap
def _normalised_vmap(axis_size, in_batched, x):
    return x / (1 + jnp.abs(x).max(axis=tuple(range(1, x.ndim)), keepdims=True)), in_batched[0]


def custom_vmap(x, w, v):
    return _normalised(x @ w) @ v


def composite(x, w, v):
    act = lax.composite(lambda a: a * jnp.tanh(a), name="test.gate")
    return act(x @ w) @ v


def linear_call(x, w, v):
    def rotate(_, a):
        return jnp.roll(a, 1, axis=-1)

    def rotate_back(_, g):
        return jnp.roll(g, -1, axis=-1)

    return jax.custom_derivatives.linear_call(rotate, rotate_back, (), jnp.tanh(x @ w)) @ v


def closure_convert(x, w, v):
    converted, constants = jax.closure_convert(lambda a: jnp.tanh(a @ w), x)
    return converted(x, *constants) @ v


def ragged_dot(x, stack):
    return jnp.tanh(lax.ragged_dot(x, stack, jnp.array([1, 0, 3])))


def convolution(x, w, v):
    images, kernel = x.reshape(1, 4, 4, 2), w[:4].reshape(2, 2, 2, 4)
    y = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.tanh(y).reshape(8, 8) @ v


def attention(x, w, v):
    q, k, u = (x @ w).reshape(1, 4, 2, 4), (x @ v).reshape(1, 4, 2, 4), x.reshape(1, 4, 2, 4)
    return jax.nn.dot_product_attention(q, k, u, is_causal=True)


def reductions(x, w, v):
    h = x @ w
    total = lax.reduce(h, jnp.float32(0), lax.add, (1,))
    window = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME")
    mean = jax.nn.standardize(window)
    return (mean + total[:, None]) @ v


def sorting(x, w, v):
    values, indices = lax.top_k(x, 4)
    keys, carried = lax.sort_key_val(x[0], jnp.arange(8))
    return (x @ w)[:, carried] @ v, values, indices, keys


def gather_scatter(x, w, v):
    table = jnp.zeros((5, 8)).at[jnp.array([0, 3, 3, 1])].add(x @ w)
    return table[jnp.array([3, 0])] @ v, jax.ops.segment_sum(x, jnp.array([0, 1, 1, 0]), 2)


def barrier(x, w, v):
    h, v = lax.optimization_barrier((jnp.tanh(x @ w), v))
    return h @ v


def vmap_inside(x, w, v):
    def row(a):
        h = jnp.tanh(a @ w)
        return (h - lax.pmean(h, "rows")) @ v

    return jax.vmap(row, axis_name="rows")(x)


def jvp_inside(x, w, v):
    return jax.jvp(lambda a: jnp.tanh(a @ w) @ v, (x,), (jnp.sin(x),))


def linearize_inside(x, w, v):
    y, f_jvp = jax.linearize(lambda a: jnp.tanh(a @ w) @ v, x)
    return y, f_jvp(jnp.cos(x))


def grad_inside(x, w, v):
    return jax.grad(lambda a, b: jnp.sum(jnp.tanh(jnp.tanh(a @ b) @ v)), argnums=(0, 1))(x, w)


def grad_of_scan_inside(x, stack):
    return jax.grad(lambda a, b: jnp.sum(jnp.sin(scan_layers(a, b)[0])), argnums=(0, 1))(x, stack)


def grad_of_remat_scan_inside(x, stack):
    return jax.grad(lambda a, b: jnp.sum(jnp.sin(remat_in_scan(a, b))), argnums=(0, 1))(x, stack)


def grad_of_cond_inside(x, w, v, flag):
    return jax.grad(lambda a, b: jnp.sum(jnp.sin(cond(a, b, v, flag))), argnums=(0, 1))(x, w)


def grad_of_custom_rules_inside(x, w, v):
    def loss(a, b):
        return jnp.sum(jnp.sin(custom_vjp(a, b, v) + custom_jvp(a, b, v)))

    return jax.grad(loss, argnums=(0, 1))(x, w)


def hvp_inside(x, w, v):
    gradient = jax.grad(lambda b: jnp.sum(jnp.tanh(jnp.tanh(x @ b) @ v)))
    return jax.jvp(gradient, (w,), (jnp.cos(w),))[1]


def jacfwd_inside(x, w, v):
    return jax.jacfwd(lambda a: jnp.tanh(a @ w) @ v)(x[0])


def jacrev_inside(x, w, v):
    return jax.jacrev(lambda a: jnp.tanh(a @ w) @ v)(x[0])


def dropout(x, w, v):
    key = jax.random.key(3)
    kept = jax.random.bernoulli(key, 0.5, (4, 8))
    return jnp.where(kept, jnp.tanh(x @ w) / 0.5, 0) @ v


def fourier(x, w, v):
    return jnp.fft.irfft(jnp.fft.rfft(x @ w) * jnp.exp(1j * jnp.arange(5)), 8) @ v


def deep_nest(x, stack, flag):
    def body(h, w):
        step = jax.checkpoint(lambda a: jax.jit(_doubled_tangent)(a, w))
        return lax.cond(flag, step, lambda a: a * 0.5, h), None

    return lax.fori_loop(0, 2, lambda _, h: lax.scan(body, h, stack)[0], x)


@dataclasses.dataclass(frozen=True, eq=False)
class Construct:
    """One row of the contract.

    `low` counts the forward contractions, all expected in the compute dtype; `low=None` leaves the
    counts open (linear algebra keeps float32 where it is).
    `diff` names the differentiated arguments (none where JAX has no derivative of the construct);
    `forward_only` marks what JAX itself cannot transpose, checked through `jvp`.
    """

    fn: Callable[..., Any]
    low: int | None
    args: tuple[Any, ...] = XWV
    depth: int = 2
    diff: tuple[int, ...] = (0, 1, 2)
    forward_only: bool = False
    vmappable: bool = True


_XS = dict(args=(X, STACK), diff=(0, 1), depth=3)
_SOLVE = dict(args=(X, SYMMETRIC), diff=(0, 1))
_FLAG = dict(args=(X, W, V, jnp.bool_(True)))

CONSTRUCTS = [
    Construct(transposed_result, 2),
    Construct(jit_nested, 2),
    Construct(jit_shared, 3, depth=3),
    Construct(jit_inline, 2),
    Construct(jit_static, 3, depth=3),
    Construct(jit_donated, 2),
    Construct(scan, 2, depth=4),
    Construct(scan_reverse, 2, depth=4),
    Construct(scan_unrolled, 2, depth=4),
    Construct(scan_no_carry, 2),
    Construct(scan_no_xs, 2, depth=6),
    Construct(scan_layers, 1, **_XS),
    Construct(scan_accumulator, 2, depth=3),
    Construct(scan_in_scan, 2, depth=6),
    Construct(scan_integers_in_carry, 2, depth=4),
    Construct(while_loop, 2, depth=4, forward_only=True),
    Construct(while_predicate_on_float, 2, depth=6, forward_only=True),
    Construct(fori_loop_static, 2, depth=4),
    Construct(fori_loop_dynamic, 2, args=(X, W, V, jnp.int32(3)), depth=4, forward_only=True),
    Construct(cond, 3, **_FLAG),
    Construct(cond_closures, 2, **_FLAG),
    Construct(cond_on_value, 2),
    Construct(switch, 2, args=(X, W, V, jnp.int32(1))),
    Construct(platform_dependent, 3),
    Construct(remat, 2),
    Construct(remat_policy, 4, depth=4),
    Construct(remat_in_scan, 1, **_XS),
    Construct(remat_names, 2),
    Construct(custom_jvp, 2),
    Construct(custom_jvp_nondiff, 2),
    Construct(gradient_reversal, 2),
    Construct(custom_vjp, 2),
    Construct(custom_vjp_in_scan, 1, **_XS),
    Construct(custom_vjp_nondiff, 2),
    Construct(custom_vjp_integers, 3, depth=3),
    Construct(custom_vjp_closure, 3, depth=3),
    Construct(custom_rules_with_numpy_constants, 2),
    Construct(custom_gradient, 2),
    Construct(shard_map_psum, 2, vmappable=False),
    Construct(shard_map_all_gather, 2, vmappable=False),
    Construct(shard_map_collectives, 2, vmappable=False),
    Construct(custom_linear_solve, None, **_SOLVE),
    Construct(linalg_solve, None, args=(X, SYMMETRIC, V)),
    Construct(linalg_cholesky, None, args=(X, SYMMETRIC, V)),
    Construct(custom_root, 2),
    Construct(associative_scan, 2, depth=4),
    Construct(associative_scan_of_matrices, 3, **_XS),
    Construct(lax_map, 2),
    Construct(lax_map_batched, 2),
    Construct(named_call, 2),
    Construct(custom_vmap, 2, forward_only=True),
    Construct(composite, 2, diff=(), vmappable=False),
    Construct(linear_call, 2, vmappable=False),
    Construct(closure_convert, 2),
    Construct(ragged_dot, 1, args=(X, STACK), diff=(0, 1), vmappable=False),
    Construct(convolution, 2),
    Construct(attention, 4, depth=4),
    Construct(reductions, 2, depth=3),
    Construct(sorting, 2),
    Construct(gather_scatter, 2),
    Construct(barrier, 2),
    Construct(vmap_inside, 2, depth=3),
    Construct(jvp_inside, 4, depth=3),
    Construct(linearize_inside, 4, depth=3),
    Construct(grad_inside, 5, depth=4),
    Construct(grad_of_scan_inside, 3, args=(X, STACK), diff=(0, 1), depth=6),
    Construct(grad_of_remat_scan_inside, 4, args=(X, STACK), diff=(0, 1), depth=6),
    Construct(grad_of_cond_inside, 8, args=(X, W, V, jnp.bool_(True)), depth=6),
    Construct(grad_of_custom_rules_inside, 10, depth=6),
    Construct(hvp_inside, 8, depth=6),
    Construct(jacfwd_inside, 4, depth=3),
    Construct(jacrev_inside, 4, depth=3),
    Construct(dropout, 2),
    Construct(fourier, 2),
    Construct(deep_nest, 1, args=(X, STACK, jnp.bool_(True)), diff=(0, 1), depth=6),
]


def _cases(keep: Callable[[Construct], bool]) -> pytest.MarkDecorator:
    kept = [pytest.param(c, id=c.fn.__name__) for c in CONSTRUCTS if keep(c)]
    return pytest.mark.parametrize("case", kept)


constructs = _cases(lambda case: True)
policies = pytest.mark.parametrize("policy", [BF16, F16])


def _differentiated(fn: Callable[..., Any], case: Construct) -> Callable[..., Any]:
    """The results of `fn` and their derivative: gradients, or tangents where JAX has no more."""
    if not case.diff:
        return lambda *args: (fn(*args), ())

    def reverse(*args: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = fn(*args)
            return _project(out), out

        gradients, out = jax.grad(loss, argnums=case.diff, has_aux=True)(*args)
        return out, gradients

    def forward(*args: Any) -> Any:
        def of(*moved: Any) -> Any:
            full = list(args)
            for i, value in zip(case.diff, moved, strict=True):
                full[i] = value
            return fn(*full)

        primals = tuple(args[i] for i in case.diff)
        return jax.jvp(of, primals, tuple(jnp.cos(p) for p in primals))

    return forward if case.forward_only else reverse


@functools.cache
def _expected(index: int) -> Any:
    case = CONSTRUCTS[index]
    return jax.jit(_differentiated(case.fn, case))(*case.args)


def _assert_low(fn: Callable[..., Any], args: tuple[Any, ...], compute: str) -> None:
    """Every contraction that nobody pinned multiplies in `compute`."""
    left = [c for c in contractions(fn, *args) if not c.exempt and set(c.in_dtypes) != {compute}]
    assert not left


@constructs
@policies
def test_values_and_derivatives(case: Construct, policy: str) -> None:
    want = _expected(CONSTRUCTS.index(case))
    got = jax.jit(_differentiated(jaxmp.autocast(case.fn, policy), case))(*case.args)
    _assert_close(got[0], want[0], dtype=COMPUTE[policy], depth=case.depth)
    _assert_close(got[1], want[1], dtype=COMPUTE[policy], depth=2 * case.depth)


@constructs
def test_values_without_jit(case: Construct) -> None:
    got = jaxmp.autocast(case.fn, BF16)(*case.args)
    want = _expected(CONSTRUCTS.index(case))[0]
    _assert_close(got, want, dtype="bfloat16", depth=case.depth)


@constructs
@policies
def test_contractions(case: Construct, policy: str) -> None:
    cast = jaxmp.autocast(case.fn, policy)
    if case.low is None:
        assert "*" not in "".join(contraction_dtypes(cast, *case.args))
        return
    assert contraction_dtypes(case.fn, *case.args) == Counter(float32=case.low)
    assert contraction_dtypes(cast, *case.args) == Counter({COMPUTE[policy]: case.low})
    _assert_low(_differentiated(cast, case), case.args, COMPUTE[policy])


@constructs
def test_float32_policy_is_the_identity(case: Construct) -> None:
    got = jax.jit(_differentiated(jaxmp.autocast(case.fn, "float32"), case))(*case.args)
    _assert_bitwise(got, _expected(CONSTRUCTS.index(case)))


@_cases(lambda case: case.vmappable)
@pytest.mark.parametrize("order", ["vmap of autocast", "autocast of vmap"])
def test_vmap(case: Construct, order: str) -> None:
    axes = (0,) + (None,) * (len(case.args) - 1)
    args = (jnp.stack([case.args[0], -case.args[0]]), *case.args[1:])
    if order == "vmap of autocast":
        fn = jax.vmap(jaxmp.autocast(case.fn, BF16), in_axes=axes)
    else:
        fn = jaxmp.autocast(jax.vmap(case.fn, in_axes=axes), BF16)
    want = jax.jit(jax.vmap(case.fn, in_axes=axes))(*args)
    _assert_close(jax.jit(fn)(*args), want, dtype="bfloat16", depth=case.depth)
    if case.low is not None:
        _assert_low(fn, args, "bfloat16")


@_cases(lambda case: case.low is not None)
def test_explain_agrees_with_the_jaxpr(case: Construct) -> None:
    plan = jaxmp.explain(case.fn, BF16)(*case.args)
    rows = [row for row in plan.rows if row.op in CONTRACTIONS]
    assert rows
    assert all(row.reason for row in plan.rows)
    assert {row.dtype for row in rows} == {"bfloat16"}
    assert set(plan.contractions()) == {"bfloat16"}
    assert plan.contractions()["bfloat16"] == sum(row.count for row in rows)


# --- transformations around autocast ---------------------------------------------------------


def _mlp(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)


AROUND = {
    "jit": lambda f: jax.jit(f),
    "value_and_grad": lambda f: jax.value_and_grad(_loss(f), argnums=(0, 1, 2)),
    "jvp": lambda f: lambda *a: jax.jvp(f, a, tuple(jnp.cos(t) for t in a)),
    "vjp": lambda f: lambda *a: jax.vjp(f, *a)[1](jnp.cos(a[0])),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*(jnp.cos(t) for t in a)),
    "jacfwd": lambda f: lambda x, w, v: jax.jacfwd(f)(x[:1], w, v),
    "jacrev": lambda f: lambda x, w, v: jax.jacrev(f)(x[:1], w, v),
    "hvp": lambda f: (
        lambda x, w, v: jax.jvp(jax.grad(lambda b: _loss(f)(x, b, v)), (w,), (jnp.cos(w),))[1]
    ),
    "reverse_over_reverse": lambda f: (
        lambda x, w, v: jax.grad(lambda b: jnp.sum(jax.grad(_loss(f), argnums=1)(x, b, v) ** 2))(w)
    ),
    "scan": lambda f: lambda x, w, v: lax.scan(lambda h, _: (f(h, w, v), None), x, length=2)[0],
    "while_loop": lambda f: (
        lambda x, w, v: lax.fori_loop(0, jnp.int32(2), lambda _, h: f(h, w, v), x)
    ),
    "cond": lambda f: lambda x, w, v: lax.cond(x[0, 0] < 1e3, f, lambda x, w, v: x, x, w, v),
    "remat": lambda f: jax.grad(_loss(jax.checkpoint(f)), argnums=(0, 1, 2)),
    "remat_policy": lambda f: jax.grad(
        _loss(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)), argnums=(1, 2)
    ),
    "vmap": lambda f: lambda x, w, v: jax.vmap(f, in_axes=(0, None, None))(x, w, v),
    "vmap_of_grad": lambda f: (
        lambda x, w, v: jax.vmap(jax.grad(_loss(f), argnums=1), in_axes=(0, None, None))(x, w, v)
    ),
    "vmap_axis_name": lambda f: (
        lambda x, w, v: jax.vmap(lambda a: lax.psum(f(a, w, v), "i"), axis_name="i")(x)
    ),
    "shard_map": lambda f: (
        lambda x, w, v: jax.shard_map(
            f,
            mesh=_mesh(),
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
        )(x, w, v)
    ),
    "custom_vjp": lambda f: _in_custom_vjp(f),
    "custom_jvp": lambda f: _in_custom_jvp(f),
    "eval_shape_then_call": lambda f: lambda *a: (jax.eval_shape(f, *a), f(*a))[1],
    "associative_scan": lambda f: (
        lambda x, w, v: lax.associative_scan(lambda a, b: f(a, w, v) + b, jnp.stack([x, x, -x]))
    ),
}


def _in_custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *a: (f(*a), a), lambda a, g: tuple(-2 * t for t in jax.vjp(f, *a)[1](g)))
    return jax.grad(_loss(wrapped), argnums=(0, 1, 2))


def _in_custom_jvp(f):
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def rule(primals, tangents):
        y, dy = jax.jvp(f, primals, tangents)
        return y, 3 * dy

    return jax.grad(_loss(wrapped), argnums=(0, 1, 2))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
@policies
def test_around_autocast(around: Callable[..., Any], policy: str) -> None:
    want = jax.jit(around(_mlp))(X, W, V)
    fn = around(jaxmp.autocast(_mlp, policy))
    _assert_close(jax.jit(fn)(X, W, V), want, dtype=COMPUTE[policy], depth=6)
    _assert_low(fn, (X, W, V), COMPUTE[policy])


INSIDE = {k: v for k, v in AROUND.items() if k != "eval_shape_then_call"}


@pytest.mark.parametrize("around", INSIDE.values(), ids=INSIDE.keys())
def test_transformations_inside_autocast(around: Callable[..., Any]) -> None:
    want = jax.jit(around(_mlp))(X, W, V)
    fn = jaxmp.autocast(around(_mlp), BF16)
    _assert_close(jax.jit(fn)(X, W, V), want, dtype="bfloat16", depth=6)
    _assert_low(fn, (X, W, V), "bfloat16")


# --- nested autocast: the inner policy wins --------------------------------------------------

# The nested part multiplies (8, 5) matrices, so that its contractions are told by their shape.
NARROW = _normal(7, 8, 5, scale=8**-0.5)


def _dtypes_by_place(fn: Callable[..., Any], *args: Any) -> tuple[set[str], set[str]]:
    """Operand dtypes of the contractions that touch a dimension of 5, and of the others."""
    inside: set[str] = set()
    outside: set[str] = set()
    for eqn in iter_eqns(jaxpr_of(fn, *args)):
        if eqn.primitive.name == "dot_general":
            touches = any(5 in v.aval.shape for v in (*eqn.invars, *eqn.outvars))
            (inside if touches else outside).update(str(v.aval.dtype) for v in eqn.invars)
    return inside, outside


def _part(h: jax.Array, n: jax.Array) -> jax.Array:
    return jnp.tanh(h @ n) @ n.T


def _placed(part: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """`part` inside every construct, each between two ordinary contractions."""

    def around(place):
        return lambda x, w, n: place(jnp.tanh(x @ w), n) @ w

    @jax.custom_jvp
    def with_jvp(h, n):
        return part(h, n)

    @with_jvp.defjvp
    def rule(primals, tangents):
        return jax.jvp(part, primals, tangents)

    @jax.custom_vjp
    def with_vjp(h, n):
        return part(h, n)

    with_vjp.defvjp(lambda h, n: (part(h, n), (h, n)), lambda res, g: jax.vjp(part, *res)[1](g))

    places = {
        "plain": part,
        "jit": jax.jit(part),
        "scan": lambda h, n: lax.scan(lambda c, _: (part(c, n), None), h, length=2)[0],
        "remat": jax.checkpoint(part),
        "vmap": jax.vmap(part, in_axes=(0, None)),
        "cond": lambda h, n: lax.cond(h[0, 0] < 1e3, part, lambda h, n: h, h, n),
        "switch": lambda h, n: lax.switch(1, (lambda h, n: h, part), h, n),
        "grad": jax.grad(lambda h, n: jnp.sum(jnp.sin(part(h, n)))),
        "linearize": lambda h, n: jax.linearize(partial(part, n=n), h)[1](h),
        "custom_jvp": with_jvp,
        "custom_vjp": with_vjp,
        "scan_of_remat": lambda h, n: lax.scan(
            jax.checkpoint(lambda c, _: (part(c, n), None)), h, length=2
        )[0],
    }
    return {name: around(place) for name, place in places.items()}


PLACES = list(_placed(_part))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "backward"])
def test_full_precision_region_stays_float32(place: str, derivative: bool) -> None:
    plain, fn = _placed(_part)[place], _placed(jaxmp.full_precision(_part))[place]
    fn = jaxmp.autocast(fn, BF16)
    if derivative:
        plain, fn = (jax.grad(_loss(f), argnums=(0, 1, 2)) for f in (plain, fn))
    inside, outside = _dtypes_by_place(fn, X, W, NARROW)
    assert inside == {"float32"}
    assert outside == {"bfloat16"}
    _assert_close(
        jax.jit(fn)(X, W, NARROW), jax.jit(plain)(X, W, NARROW), dtype="bfloat16", depth=8
    )


@pytest.mark.parametrize("place", PLACES)
def test_full_precision_alone_changes_nothing(place: str) -> None:
    plain, fn = _placed(_part)[place], _placed(jaxmp.full_precision(_part))[place]
    _assert_bitwise(jax.jit(fn)(X, W, NARROW), jax.jit(plain)(X, W, NARROW))


@pytest.mark.parametrize("place", PLACES)
def test_constructs_inside_a_full_precision_region(place: str) -> None:
    fn = jaxmp.full_precision(_placed(_part)[place])
    whole = jaxmp.autocast(lambda x, w, n: fn(x, w, n) @ w, BF16)
    counts = contraction_dtypes(whole, X, W, NARROW)
    assert counts["bfloat16"] == 1
    assert counts["float32"] == sum(counts.values()) - 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "backward"])
def test_nested_autocast_inner_wins(place: str, derivative: bool) -> None:
    fn = jaxmp.autocast(_placed(jaxmp.autocast(_part, F16))[place], BF16)
    plain = _placed(_part)[place]
    if derivative:
        plain, fn = (jax.grad(_loss(f), argnums=(0, 1, 2)) for f in (plain, fn))
    inside, outside = _dtypes_by_place(fn, X, W, NARROW)
    assert inside == {"float16"}
    assert outside == {"bfloat16"}
    _assert_close(
        jax.jit(fn)(X, W, NARROW), jax.jit(plain)(X, W, NARROW), dtype="bfloat16", depth=8
    )


def test_nested_float32_policy_is_a_float32_region() -> None:
    fn = jaxmp.autocast(_placed(jaxmp.autocast(_part, "float32"))["jit"], BF16)
    assert _dtypes_by_place(fn, X, W, NARROW) == ({"float32"}, {"bfloat16"})


def test_nested_same_policy_pins_nothing() -> None:
    """The inner function's float32 result must not read as the author's upcast."""
    inner = jaxmp.autocast(lambda x, w: jnp.tanh(x @ w), BF16)
    outer = jaxmp.autocast(lambda x, w, v: inner(inner(x, w), v) @ w, BF16)
    assert contraction_dtypes(outer, X, W, V) == Counter(bfloat16=3)


def test_shared_jit_inside_and_outside_autocast() -> None:
    """A jit traced under autocast must not be reused outside, nor the other way round."""
    fn = jaxmp.autocast(lambda x, w: _dense(x, w), BF16)
    for _ in range(2):
        assert contraction_dtypes(_dense, X, W) == Counter(float32=1)
        assert contraction_dtypes(fn, X, W) == Counter(bfloat16=1)
    _assert_bitwise(_dense(X, W), jnp.tanh(X @ W))


# --- the author's word -----------------------------------------------------------------------


def test_explicit_round_trip_cast_stays_float32_and_says_why() -> None:
    def fn(x, w, v):
        kept = x.astype(jnp.bfloat16).astype(jnp.float32) @ w
        return jnp.tanh(x @ v), kept

    assert contraction_dtypes(jaxmp.autocast(fn, BF16), X, W, V) == Counter(float32=1, bfloat16=1)
    rows = [r for r in jaxmp.explain(fn, BF16)(X, W, V).rows if r.op == "dot_general"]
    (kept,) = [r for r in rows if r.dtype == "float32"]
    assert re.search("cast|author|explicit|written", kept.reason)
    want = X.astype(jnp.bfloat16).astype(jnp.float32) @ W
    np.testing.assert_allclose(jaxmp.autocast(fn, BF16)(X, W, V)[1], want, rtol=1e-5, atol=1e-6)


def test_upcast_of_a_16_bit_argument_is_honoured() -> None:
    def fn(x, w):
        return x.astype(jnp.float32) @ w

    assert contraction_dtypes(jaxmp.autocast(fn, BF16), X.astype(jnp.bfloat16), W) == Counter(
        float32=1
    )


def test_downcast_is_honoured() -> None:
    def fn(x, w):
        return x.astype(jnp.float16) @ w.astype(jnp.float16)

    out = jaxmp.autocast(fn, BF16)(X, W)
    assert out.dtype == jnp.float16
    assert contraction_dtypes(jaxmp.autocast(fn, BF16), X, W) == Counter(float16=1)
    _assert_bitwise(jax.jit(jaxmp.autocast(fn, BF16))(X, W), jax.jit(fn)(X, W))


@pytest.mark.parametrize("precision", ["highest", lax.Precision.HIGHEST, ("highest", "highest")])
def test_highest_precision_stays_float32(precision: Any) -> None:
    def fn(x, w, v):
        return jnp.matmul(jnp.tanh(x @ w), v, precision=precision) @ w

    cast = jaxmp.autocast(fn, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2, float32=1)
    backward = contraction_dtypes(jax.grad(_loss(cast), argnums=(0, 1, 2)), X, W, V)
    assert backward == Counter(bfloat16=6, float32=3)


def test_highest_precision_by_context() -> None:
    def fn(x, w, v):
        with jax.default_matmul_precision("highest"):
            h = x @ w
        return h @ v

    assert contraction_dtypes(jaxmp.autocast(fn, BF16), X, W, V) == Counter(bfloat16=1, float32=1)


@pytest.mark.parametrize("preferred", [jnp.float32, None])
def test_preferred_element_type(preferred: Any) -> None:
    def fn(x, w, v):
        h = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=preferred)
        return jnp.tanh(h) @ v

    cast = jaxmp.autocast(fn, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2)
    _assert_close(cast(X, W, V), fn(X, W, V), dtype="bfloat16", depth=2)


def test_contractions_accumulate_in_float32() -> None:
    """A sum of 4096 equal terms stalls at 256 when it is accumulated in bfloat16."""
    ones = jnp.ones((1, 4096))
    out = jaxmp.autocast(lambda a, b: a @ b.T, BF16)(ones, ones)
    assert float(out[0, 0]) == 4096.0


def test_custom_rules_are_kept() -> None:
    """The gradient is the author's, not autodiff's: its sign and its factor show it."""
    for fn in (gradient_reversal, custom_vjp, custom_jvp, custom_vjp_closure, custom_gradient):
        want = jax.grad(_loss(fn), argnums=1)(X, W, V)
        got = jax.grad(_loss(jaxmp.autocast(fn, BF16)), argnums=1)(X, W, V)
        assert float(jnp.vdot(got, want) / jnp.vdot(want, want)) == pytest.approx(1, abs=0.05)


def test_custom_rules_survive_in_the_jaxpr() -> None:
    assert primitives(jaxmp.autocast(custom_jvp, BF16), X, W, V).keys() & {
        ("custom_jvp_call", d) for d in ("float32", "bfloat16")
    }
    assert primitives(jaxmp.autocast(custom_vjp, BF16), X, W, V).keys() & {
        (name, d)
        for name in ("custom_vjp_call", "custom_vjp_call_jaxpr")
        for d in ("float32", "bfloat16")
    }


def test_scan_accumulator_stays_float32() -> None:
    """`acc += x @ w` is not carried in 16 bits: 300 additions of 1 stall at 256 in bfloat16."""

    def fn(x, w):
        def body(acc, u):
            return acc + u @ w, None

        return lax.scan(body, jnp.zeros((1, 1)), x)[0] @ jnp.ones((1, 1))

    out = jaxmp.autocast(fn, BF16)(jnp.ones((300, 1, 1)), jnp.ones((1, 1)))
    # The last contraction rounds the sum once: 300 is a bfloat16 number.
    assert float(out[0, 0]) == 300.0


def test_weight_gradient_of_a_scan_accumulates_in_float32() -> None:
    def fn(w, xs):
        return jnp.sum(lax.scan(lambda c, x: (c, x @ w), None, xs)[1])

    gradient = jax.grad(jaxmp.autocast(fn, BF16))(jnp.ones((1, 1)), jnp.ones((300, 1, 1)))
    assert gradient.dtype == jnp.float32
    assert float(gradient[0, 0]) == 300.0


# --- dtypes that are not ours ----------------------------------------------------------------


def test_float64_is_left_alone() -> None:
    with jax.enable_x64(True):
        x, w = (np.asarray(a, np.float64) for a in (X, W))
        cast = jaxmp.autocast(lambda a, b: jnp.tanh(a @ b), BF16)
        out = cast(jnp.asarray(x), jnp.asarray(w))
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, np.tanh(x @ w), rtol=1e-14)
        gradient = jax.grad(lambda a, b: cast(a, b).sum())(jnp.asarray(x), jnp.asarray(w))
        assert gradient.dtype == jnp.float64


def test_float32_under_x64_is_cast() -> None:
    with jax.enable_x64(True):
        cast = jaxmp.autocast(_mlp, BF16)
        assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2)
        assert cast(X, W, V).dtype == jnp.float32
        # An author's float64 next to float32 stays float64.
        wide = jaxmp.autocast(lambda a, b: a.astype(jnp.float64) @ b, BF16)
        assert wide(X, W).dtype == jnp.float64


def test_complex_is_left_alone() -> None:
    def fn(x, w):
        z = lax.complex(x, -x) @ lax.complex(w, w)
        return z, jnp.abs(z)

    want, got = jax.jit(fn)(X, W), jax.jit(jaxmp.autocast(fn, BF16))(X, W)
    assert got[0].dtype == jnp.complex64
    _assert_bitwise(got, want)
    gradient = jax.grad(lambda x: jaxmp.autocast(fn, BF16)(x, W)[1].sum())(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: fn(x, W)[1].sum())(X), rtol=1e-5)


def test_integers_and_bools_are_left_alone() -> None:
    a, b = jnp.arange(12).reshape(3, 4), jnp.arange(8, dtype=jnp.int8).reshape(4, 2)

    def fn(a, b, mask):
        return a @ b.astype(jnp.int32), mask & (a.sum() > 3), a // 2, a.astype(jnp.uint8)

    got = jaxmp.autocast(fn, BF16)(a, b, jnp.bool_(True))
    _assert_bitwise(got, fn(a, b, jnp.bool_(True)))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_prng_keys(key: jax.Array) -> None:
    """Random numbers are the same bits as without the transformation, and keys come back."""

    def fn(key, w):
        key, a, b = jax.random.split(key, 3)
        noise = jax.random.normal(a, (4, 8))
        return key, noise, jax.random.bernoulli(b, 0.5, (16,)), noise @ w

    got, want = jaxmp.autocast(fn, BF16)(key, W), fn(key, W)
    _assert_bitwise(
        jax.random.key_data(got[0])
        if jnp.issubdtype(got[0].dtype, jax.dtypes.prng_key)
        else got[0],
        jax.random.key_data(want[0])
        if jnp.issubdtype(want[0].dtype, jax.dtypes.prng_key)
        else want[0],
    )
    assert got[0].dtype == want[0].dtype
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    _assert_close(got[3], want[3], dtype="bfloat16", depth=1)


def test_16_bit_arguments_are_seen_as_given() -> None:
    seen = []

    def fn(x, w):
        seen.append((x.dtype, w.dtype))
        return x @ w

    out = jaxmp.autocast(fn, BF16)(X.astype(jnp.float16), W.astype(jnp.float16))
    assert seen == [(jnp.float16, jnp.float16)]
    assert out.dtype == jnp.float16


def test_a_16_bit_operand_beside_a_float32_one() -> None:
    """One-hot dispatch in bfloat16 times float32 weights must not leave the contraction mixed."""
    cast = jaxmp.autocast(lambda x, w: x @ w, BF16)
    assert contraction_dtypes(cast, X.astype(jnp.bfloat16), W) == Counter(bfloat16=1)
    assert cast(X.astype(jnp.bfloat16), W).dtype == jnp.float32
    gradients = jax.grad(lambda x, w: cast(x, w).sum(), argnums=(0, 1))(X.astype(jnp.bfloat16), W)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_numpy_arguments_and_scalars() -> None:
    cast = jaxmp.autocast(lambda x, w, s: (x @ w) * s, BF16)
    out = cast(np.asarray(X), np.asarray(W), np.float32(2))
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.float32
    _assert_close(out, 2 * (X @ W), dtype="bfloat16", depth=1)


# --- arguments and results -------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@partial(jax.tree_util.register_dataclass, data_fields=["w", "count"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    w: Any
    count: Any
    name: str


def test_pytrees_in_and_out() -> None:
    def fn(batch, params, *, scale):
        h = batch["x"] @ params.first.w * scale
        return {"out": Pair(h, None), "count": params.first.count + 1, "name": params.first}

    params = Pair(Layer(W, jnp.int32(4), "dense"), None)
    got = jaxmp.autocast(fn, BF16)({"x": X}, params, scale=2.0)
    want = fn({"x": X}, params, scale=2.0)
    assert got["name"].name == "dense"
    _assert_close(got, want, dtype="bfloat16", depth=1)
    gradient = jax.grad(
        lambda p: jaxmp.autocast(fn, BF16)({"x": X}, p, scale=2.0)["out"].first.sum(),
        allow_int=True,
    )(params)
    assert gradient.first.w.dtype == jnp.float32


def test_static_keyword_string_and_callable_arguments() -> None:
    def fn(x, w, activation, mode, *, train, steps=1, key=None, names=("a", "b")):
        assert isinstance(train, bool)
        assert isinstance(steps, int)
        assert isinstance(mode, str)
        assert key is None
        if mode == "deep":
            for _ in range(steps):
                x = activation(x @ w)
        return x if train else -x

    cast = jaxmp.autocast(fn, BF16)
    for mode, train, steps in [("deep", True, 2), ("deep", False, 3), ("flat", True, 1)]:
        got = cast(X, W, jnp.tanh, mode, train=train, steps=steps)
        _assert_close(
            got, fn(X, W, jnp.tanh, mode, train=train, steps=steps), dtype="bfloat16", depth=3
        )


def test_static_python_scalars_do_not_collide_in_the_cache() -> None:
    """`1`, `1.0` and `True` are equal and hash alike, yet they are different arguments."""
    cast = jaxmp.autocast(lambda x, s: (x * s, type(s).__name__), BF16)
    assert [cast(X, s)[1] for s in (1, 1.0, True, 1)] == ["int", "float", "bool", "int"]


def test_negative_zero_is_its_own_static_argument() -> None:
    cast = jaxmp.autocast(lambda x, s: x * s, BF16)
    one = jnp.ones(())
    assert [bool(jnp.signbit(cast(one, s))) for s in (0.0, -0.0)] == [False, True]


def test_results_that_are_not_arrays() -> None:
    def fn(x, w):
        return x @ w, "label", None, 3, 2.5, True, jnp.tanh

    got = jaxmp.autocast(fn, BF16)(X, W)
    assert got[1:] == ("label", None, 3, 2.5, True, jnp.tanh)
    assert type(got[3]) is int
    assert type(got[4]) is float
    assert type(got[5]) is bool


def test_has_aux() -> None:
    def fn(w, x):
        h = x @ w
        return jnp.mean(h**2), {"hidden": h, "steps": jnp.int32(3)}

    cast = jaxmp.autocast(fn, BF16)
    (loss, aux), gradient = jax.value_and_grad(cast, has_aux=True)(W, X)
    assert loss.dtype == jnp.float32
    assert aux["steps"].dtype == jnp.int32
    _assert_close(
        (loss, aux, gradient),
        (*fn(W, X), jax.grad(lambda w: fn(w, X)[0])(W)),
        dtype="bfloat16",
        depth=2,
    )


def test_argument_returned_unchanged() -> None:
    """A float32 argument that only passes through is returned bit for bit."""
    got = jaxmp.autocast(lambda x, w: (x, w, x @ w), BF16)(X, W)
    _assert_bitwise(got[:2], (X, W))


@pytest.mark.parametrize("index", [0, 1])
def test_argument_returned_by_a_branch_is_exact(index: int) -> None:
    """Another branch's low result is widened; where a contraction reads both, all are low."""

    def branches(x, w, index):
        return lax.switch(index, [lambda a: a, lambda a: a @ w], x)

    fn = jaxmp.autocast(branches, BF16)
    got = jax.jit(fn)(X, W, index)
    if index == 0:
        np.testing.assert_array_equal(got, X)
    else:
        np.testing.assert_allclose(got, X @ W, rtol=2**-6, atol=2**-6)

    def then_multiply(x, w, index):
        return branches(x, w, index) @ w

    [step] = [
        e
        for e in iter_eqns(jaxpr_of(jaxmp.autocast(then_multiply, BF16), X, W, index))
        if e.primitive.name == "cond"
    ]
    assert step.outvars[0].aval.dtype == jnp.bfloat16


def test_a_constant_returned_by_a_branch_widens_nothing() -> None:
    def fn(x, w, flag):
        h = lax.cond(flag, lambda: x @ w, lambda: jnp.zeros_like(x))
        return jnp.sum(h)

    [step] = [
        e
        for e in iter_eqns(jaxpr_of(jaxmp.autocast(fn, BF16), X, W, True))
        if e.primitive.name == "cond"
    ]
    assert step.outvars[0].aval.dtype == jnp.bfloat16


def test_shape_dtype_structs() -> None:
    spec = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W, V)]
    for case in CONSTRUCTS:
        if case.args is XWV:
            got = jax.eval_shape(jaxmp.autocast(case.fn, BF16), *spec)
            want = jax.eval_shape(case.fn, *spec)
            assert jax.tree.structure(got) == jax.tree.structure(want)
            assert [(a.shape, a.dtype) for a in jax.tree.leaves(got)] == [
                (a.shape, a.dtype) for a in jax.tree.leaves(want)
            ], case.fn.__name__


@pytest.mark.parametrize(
    ("policy", "output"),
    [
        (BF16, "float32"),
        ("p=f32,c=bf16,o=bf16", "bfloat16"),
        ("p=f32,c=bf16,o=f16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_output_dtype(policy: str, output: str) -> None:
    def fn(x, w):
        return x @ w, x.astype(jnp.float16), jnp.argmax(x), {"loss": jnp.mean(x)}

    for run in (lambda f: f, jax.jit):
        out, half, index, metrics = run(jaxmp.autocast(fn, policy))(X, W)
        assert out.dtype == metrics["loss"].dtype == output
        assert half.dtype == jnp.float16
        assert index.dtype == jnp.int32
    gradient = jax.grad(lambda w: jaxmp.autocast(fn, policy)(X, w)[0].astype(jnp.float32).sum())(W)
    assert gradient.dtype == jnp.float32


def test_16_bit_param_dtype_narrows_float32_arguments() -> None:
    x = jnp.float32(1 + 2.0**-12) * jnp.ones((2, 2))
    ints = jnp.arange(3)
    out, passed = jaxmp.autocast(lambda x, i: (x, i), "bfloat16")(x, ints)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    assert passed.dtype == ints.dtype
    # Values beyond the range of the narrow type must not become infinite.
    huge = jaxmp.autocast(lambda x: x, "float16")(jnp.full((2,), jnp.finfo(jnp.float32).min))
    assert np.isfinite(np.asarray(huge, np.float32)).all()


def test_weak_types_do_not_appear() -> None:
    def fn(x, w):
        return x @ w * 2.0, jnp.where(x > 0, 1.0, 0.0) * x, x.sum() / 3

    got = jax.eval_shape(jaxmp.autocast(fn, BF16), X, W)
    want = jax.eval_shape(fn, X, W)
    assert [(a.shape, a.dtype, a.weak_type) for a in got] == [
        (a.shape, a.dtype, a.weak_type) for a in want
    ]


# --- effects, callbacks ----------------------------------------------------------------------


def test_pure_callback_sees_float32() -> None:
    seen = []

    def host(h):
        seen.append(np.asarray(h).dtype)
        return np.asarray(h) * 2

    def fn(x, w, v):
        h = x @ w
        return jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h) @ v

    got = jax.jit(jaxmp.autocast(fn, BF16))(X, W, V)
    _assert_close(got, 2 * (X @ W) @ V, dtype="bfloat16", depth=2)
    assert set(seen) == {np.dtype(np.float32)}


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", ["debug", "io", "io_ordered"])
def test_effects_run_once_and_in_order(run: Callable[..., Any], kind: str) -> None:
    seen: list[int] = []

    def note(i):
        seen.append(int(i))

    def emit(i):
        if kind == "debug":
            jax.debug.callback(note, i, ordered=True)
        else:
            io_callback(note, None, i, ordered=kind == "io_ordered")

    def fn(x, w):
        emit(0)
        h = x @ w

        def body(h, i):
            emit(i)
            return jnp.tanh(h @ w), None

        h = lax.scan(body, h, jnp.arange(1, 4))[0]
        emit(4)
        return h @ w

    cast = run(jaxmp.autocast(fn, BF16))
    jax.block_until_ready(cast(X, W))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4]
    if kind != "io":
        assert seen == [0, 1, 2, 3, 4]
    seen.clear()
    jax.block_until_ready(cast(X, W))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_debug_print(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x, w):
        h = x @ w
        jax.debug.print("sum {s} of {n}", s=jnp.sum(h) * 0, n=3)
        return h @ w

    jax.block_until_ready(jax.jit(jaxmp.autocast(fn, BF16))(X, W))
    jax.effects_barrier()
    assert len(re.findall(r"sum -?0\.0 of 3", capfd.readouterr().out)) == 1


def test_unused_effect_is_not_dropped() -> None:
    """A callback whose result nobody reads runs all the same, also inside cond and remat."""
    seen: list[float] = []

    def inner(h):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(h))
        return h

    def fn(x, w):
        h = lax.cond(x[0, 0] < 1e3, inner, lambda h: h, x @ w)
        return h @ w

    jax.block_until_ready(jax.jit(jaxmp.autocast(fn, BF16))(X, W))
    jax.effects_barrier()
    assert len(seen) == 1
    jax.block_until_ready(jaxmp.autocast(jax.grad(lambda x: _project(fn(x, W))), BF16)(X))
    jax.effects_barrier()
    assert len(seen) >= 2


def test_checkify_inside_and_outside() -> None:
    from jax.experimental import checkify

    def fn(x, w):
        h = x @ w
        checkify.check(jnp.all(h < 1e6), "too large")
        return jnp.tanh(h) @ w

    for checked in (
        checkify.checkify(jaxmp.autocast(fn, BF16)),
        jaxmp.autocast(checkify.checkify(fn), BF16),
    ):
        error, out = jax.jit(checked)(X, W)
        assert error.get() is None
        _assert_close(
            out,
            fn.__wrapped__(X, W) if hasattr(fn, "__wrapped__") else jnp.tanh(X @ W) @ W,
            dtype="bfloat16",
            depth=2,
        )
        error, _ = jax.jit(checked)(1e8 * jnp.abs(X), jnp.abs(W))
        assert "too large" in str(error.get())


# --- what inner jits and equations carry ------------------------------------------------------


def _jits(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [e for e in iter_eqns(jaxpr_of(fn, *args)) if e.primitive.name in ("pjit", "jit")]


def test_donation_of_inner_jits_is_kept() -> None:
    (eqn,) = [
        e
        for e in _jits(jaxmp.autocast(jit_donated, BF16), X, W, V)
        if any(e.params["donated_invars"])
    ]
    assert eqn.params["donated_invars"].count(True) == 1
    donated = [v for v, d in zip(eqn.invars, eqn.params["donated_invars"], strict=True) if d]
    assert donated[0].aval.shape == X.shape


def test_donated_buffers_around_autocast() -> None:
    step = jax.jit(jaxmp.autocast(lambda w, x: w - 0.1 * (x.T @ (x @ w)), BF16), donate_argnums=0)
    w = W + 0
    out = step(w, X)
    assert w.is_deleted()
    _assert_close(out, W - 0.1 * (X.T @ (X @ W)), dtype="bfloat16", depth=2)


def test_shardings_of_inner_jits_and_constraints_are_kept() -> None:
    mesh = _mesh()
    rows = NamedSharding(mesh, PartitionSpec("d"))
    whole = NamedSharding(mesh, PartitionSpec())

    def fn(x, w):
        h = jax.jit(jnp.matmul, in_shardings=(rows, whole), out_shardings=rows)(x, w)
        return lax.with_sharding_constraint(jnp.tanh(h), rows) @ w

    x = jnp.tile(X, (2, 1))
    cast = jaxmp.autocast(fn, BF16)
    want = {str(e.params["in_shardings"]) + str(e.params["out_shardings"]) for e in _jits(fn, x, W)}
    got = {
        str(e.params["in_shardings"]) + str(e.params["out_shardings"]) for e in _jits(cast, x, W)
    }
    assert any("'d'" in s for s in want)
    assert {s for s in want if "'d'" in s} == {s for s in got if "'d'" in s}
    constraints = [
        e for e in iter_eqns(jaxpr_of(cast, x, W)) if e.primitive.name == "sharding_constraint"
    ]
    assert [e.params["sharding"].spec for e in constraints] == [PartitionSpec("d")]
    _assert_close(jax.jit(cast)(x, W), jnp.tanh(x @ W) @ W, dtype="bfloat16", depth=2)


def test_names_of_inner_jits_are_kept() -> None:
    names = {e.params["name"] for e in _jits(jaxmp.autocast(jit_shared, BF16), X, W, V)}
    assert "_dense" in names


def _saved(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of the residuals that the backward pass of `fn` holds."""
    _, pullback = jax.eval_shape(lambda *a: jax.vjp(fn, *a), *args)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pullback))


def test_checkpoint_policy_by_name_is_kept() -> None:
    """Saving by name still works, and what is saved is the 16-bit value."""
    cast = jaxmp.autocast(remat_names, BF16)
    tags = [e for e in iter_eqns(jaxpr_of(cast, X, W, V)) if e.primitive.name == "name"]
    assert [e.params["name"] for e in tags] == ["kept"]
    assert _saved(cast, X, W, V) <= _saved(remat_names, X, W, V)
    nothing = jaxmp.autocast(remat, BF16)
    assert _saved(nothing, X, W, V) <= _saved(remat, X, W, V)


def test_remat_parameters_are_kept() -> None:
    for fn in (remat_policy, remat_in_scan):
        args = (X, STACK) if fn is remat_in_scan else (X, W, V)

        def found(f, args=args):
            return [
                (e.params["prevent_cse"], e.params["policy"])
                for e in iter_eqns(jaxpr_of(f, *args))
                if e.primitive.name in ("checkpoint", "remat", "remat2")
            ]

        assert found(fn)
        assert found(jaxmp.autocast(fn, BF16)) == found(fn)


def test_scan_parameters_are_kept() -> None:
    for fn, key, value in (
        (scan_reverse, "reverse", True),
        (scan_unrolled, "unroll", 2),
        (scan_no_xs, "length", 3),
    ):
        (eqn,) = [
            e
            for e in iter_eqns(jaxpr_of(jaxmp.autocast(fn, BF16), X, W, V))
            if e.primitive.name == "scan"
        ]
        assert eqn.params[key] == value


def _scoped(x, w, v):
    with jax.named_scope("encoder"):
        h = x @ w
        with jax.named_scope("gate"):
            h = jnp.tanh(h)
    return h @ v


def test_named_scopes_and_source_lines_are_kept() -> None:
    for build in (
        lambda f: f,
        lambda f: lambda x, w, v: lax.scan(lambda h, _: (f(h, w, v), None), x, length=2)[0],
        jax.checkpoint,
        jax.jit,
    ):
        eqns = list(iter_eqns(jaxpr_of(jaxmp.autocast(build(_scoped), BF16), X, W, V)))
        dots = [e for e in eqns if e.primitive.name == "dot_general"]
        (tanh,) = [e for e in eqns if e.primitive.name == "tanh"]
        assert ["encoder" in str(e.source_info.name_stack) for e in dots] == [True, False]
        assert "encoder/gate" in str(tanh.source_info.name_stack)
        for eqn in (*dots, tanh):
            frames = eqn.source_info.traceback.frames
            assert any(f.function_name.endswith("_scoped") for f in frames)


def test_explain_names_scope_and_line() -> None:
    rows = jaxmp.explain(_scoped, BF16)(X, W, V).rows
    first, second = (r for r in rows if r.op == "dot_general")
    assert "encoder" in first.path
    assert "encoder" not in second.path
    start = _scoped.__code__.co_firstlineno
    assert first.source == f"test_constructs.py:{start + 2}"
    assert second.source == f"test_constructs.py:{start + 5}"


def test_explain_counts_loop_lengths() -> None:
    plan = jaxmp.explain(scan_in_scan, BF16)(X, W, V)
    # The inner contraction runs 2 x 2 times, the outer one twice.
    assert plan.contractions() == {"bfloat16": 6}
    assert str(plan)
    assert plan.summary()


# --- caches, closures, sharing ---------------------------------------------------------------


def test_eager_calls_do_not_retrace() -> None:
    calls = []

    def fn(x, w, *, scale):
        calls.append(1)
        return jnp.tanh(x @ w) * scale

    cast = jaxmp.autocast(fn, BF16)
    for i in range(5):
        cast(X + i, W, scale=2.0)
    assert len(calls) == 1
    cast(X[:2], W, scale=2.0)
    cast(X, W, scale=3.0)
    assert len(calls) == 3
    for _ in range(3):
        cast(X, W, scale=2.0)
    assert len(calls) == 3


@pytest.mark.parametrize("transform", ["jit", "grad", "scan", "vmap"])
def test_closing_over_tracers(transform: str) -> None:
    def outer(x, w, cast):
        local = cast(lambda a: jnp.tanh(a @ w) @ w)
        return local(x) + local(2 * x)

    def build(cast):
        if transform == "jit":
            return jax.jit(lambda x, w: outer(x, w, cast))
        if transform == "grad":
            return jax.grad(lambda x, w: _project(outer(x, w, cast)), argnums=(0, 1))
        if transform == "scan":
            return lambda x, w: lax.scan(
                lambda h, s: (outer(h, s * w, cast), None), x, jnp.array([1.0, 0.5])
            )[0]
        return jax.vmap(lambda x, w: outer(x, w, cast), in_axes=(0, None))

    fn = build(lambda f: jaxmp.autocast(f, BF16))
    want = build(lambda f: f)(X, W)
    for _ in range(2):
        _assert_close(fn(X, W), want, dtype="bfloat16", depth=5)
    _assert_low(fn, (X, W), "bfloat16")
    with jax.checking_leaks():
        jax.jit(build(lambda f: jaxmp.autocast(f, BF16)))(X, W)


def test_one_wrapped_function_under_changing_closures() -> None:
    """A closure that is traced differently the second time must not meet a stale plan."""
    box = {}
    cast = jaxmp.autocast(lambda x: x @ box["w"], BF16)

    def outer(x, w):
        box["w"] = w
        return cast(x)

    for w in (W, 2 * W):
        out = jax.jit(lambda x, w: outer(x, w))(X, w)
        _assert_close(out, X @ w, dtype="bfloat16", depth=1)
        gradient = jax.grad(lambda w: _project(outer(X, w)))(w)
        assert float(jnp.abs(gradient).max()) > 0


def test_shared_jaxpr_in_different_colours() -> None:
    """One jitted function, called with a low value, a float32 one and another dtype."""
    double = jax.jit(lambda a: a * 2.0 + 1.0)

    def fn(x, w):
        low = double(x @ w) @ w
        full = double(jnp.exp(x).sum(axis=1, keepdims=True))
        half = double(x.astype(jnp.float16))
        return low, full, half

    got, want = jaxmp.autocast(fn, BF16)(X, W), fn(X, W)
    assert [a.dtype for a in got] == [jnp.float32, jnp.float32, jnp.float16]
    _assert_close(got[0], want[0], dtype="bfloat16", depth=2)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    _assert_bitwise(got[2], want[2])


def test_shared_scan_body_in_different_colours() -> None:
    def loop(h, w):
        return lax.scan(lambda c, _: (jnp.tanh(c * 0.5) + 0.1, None), h, length=2)[0]

    shared = jax.jit(loop)

    def fn(x, w):
        return shared(x @ w, w) @ w, jnp.sum(shared(x, w), axis=0)

    got, want = jaxmp.autocast(fn, BF16)(X, W), fn(X, W)
    _assert_close(got[0], want[0], dtype="bfloat16", depth=2)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)


def test_large_captured_constant() -> None:
    table = _normal(11, 512, 8)

    def fn(x):
        return x @ table.T

    cast = jaxmp.autocast(fn, BF16)
    assert contraction_dtypes(cast, X) == Counter(bfloat16=1)
    _assert_close(jax.jit(cast)(X), fn(X), dtype="bfloat16", depth=1)


def test_numpy_constant_does_not_promote() -> None:
    """A NumPy float32 table added in the middle keeps what follows low."""
    table = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    cast = jaxmp.autocast(lambda x, w, v: jnp.tanh(x @ w + table) @ v, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2)


def test_saved_partials_and_pullbacks() -> None:
    bound = jax.tree_util.Partial(jaxmp.autocast(lambda w, x: jnp.tanh(x @ w) @ w, BF16), W)
    want = jnp.tanh(X @ W) @ W
    _assert_close(jax.jit(lambda f, x: f(x))(bound, X), want, dtype="bfloat16", depth=2)
    # A Partial as an argument of the transformed function is a pytree whose arrays are cast.
    plain = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w) @ w, W)
    cast = jaxmp.autocast(lambda f, x: f(x), BF16)
    assert contraction_dtypes(cast, plain, X) == Counter(bfloat16=2)
    _, pullback = jax.jit(lambda x: jax.vjp(jaxmp.autocast(_mlp, BF16), x, W, V))(X)
    gradients = jax.jit(lambda f, g: f(g))(pullback, X)
    _assert_close(gradients, jax.vjp(_mlp, X, W, V)[1](X), dtype="bfloat16", depth=4)


def test_two_threads_with_two_policies() -> None:
    start = threading.Barrier(2)
    found: dict[str, list[Counter[str]]] = {BF16: [], F16: []}

    def work(policy: str) -> None:
        start.wait()
        for _ in range(10):
            found[policy].append(contraction_dtypes(jaxmp.autocast(jit_shared, policy), X, W, V))

    threads = [threading.Thread(target=work, args=(p,)) for p in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[BF16] == [Counter(bfloat16=3)] * 10
    assert found[F16] == [Counter(float16=3)] * 10


def test_policies_are_accepted_in_every_form() -> None:
    for policy in (BF16, jaxmp.get_policy(BF16), jaxmp.Policy("float32", "bfloat16", "float32")):
        assert contraction_dtypes(jaxmp.autocast(_mlp, policy), X, W, V) == Counter(bfloat16=2)


def test_metadata_of_the_wrapped_function() -> None:
    def documented(x):
        """Says what it does."""
        return x

    cast = jaxmp.autocast(documented, BF16)
    assert cast.__name__ == "documented"
    assert cast.__doc__ == "Says what it does."
    assert cast.__wrapped__ is documented


def test_exceptions_come_through() -> None:
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jaxmp.autocast(fn, BF16)(X)
