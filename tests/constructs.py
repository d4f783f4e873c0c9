"""The constructs of JAX that autocast is tested with, and how results are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import eps
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from support import contractions, gaussian

BF16, F16 = "mixed_bfloat16", "mixed_float16"
COMPUTE = {BF16: "bfloat16", F16: "float16"}


X = gaussian(0, 6, 8)
W = gaussian(1, 8, 8, scale=8**-0.5)
V = gaussian(2, 8, 8, scale=8**-0.5)
STACK = gaussian(3, 3, 8, 8, scale=8**-0.5)
XWV = (X, W, V)
OLD = 2 * (jax.__version_info__ < (0, 11))  # of rows and of columns: both contract few elements
SYMMETRIC = jax.device_put(np.eye(8, dtype=np.float32) * 3 + np.asarray(W) @ np.asarray(W).T)


def project(tree: Any) -> jax.Array:
    """A scalar with a different, non-zero cotangent for every element of every inexact leaf."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = jnp.real(leaf).astype(jnp.float32)
            total += jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape))
    return total


def loss_of(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *args: project(fn(*args))


def assert_close(got: Any, want: Any, *, dtype: str, depth: int) -> None:
    """Compares every leaf in the 2-norm.

    A contraction rounds two operands and one result, each by at most eps/2 relative, and
    the point-wise operation next to it rounds once more: 2 eps for each of `depth` contractions
    in a row. Twice that allows for condition numbers up to 2.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    tolerance = 4 * depth * eps(dtype)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert jnp.result_type(a) == jnp.result_type(b)
        if not jnp.issubdtype(jnp.result_type(b), jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-30


def assert_bitwise(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def data_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Auto,))


# --- the functions under test ----------------------------------------------------------------


@jax.jit
def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def transposed_result(x, w, v):
    # XLA folds the transposition into the contraction, in a layout its CPU backend cannot run.
    return (x @ w).T, jnp.moveaxis((x @ v)[None], 0, -1)


def jit_nested(x, w, v):
    return dense(jax.jit(lambda a: dense(a, w))(x), v)


def jit_shared(x, w, v):
    return dense(dense(dense(x, w), v), w)


def jit_inline(x, w, v):
    return jax.jit(lambda a, b: a @ b, inline=True)(jnp.tanh(x @ w), v)


def jit_static(x, w, v):
    @partial(jax.jit, static_argnames=("activation", "times"))
    def layer(a, b, *, activation, times):
        for _ in range(times):
            a = getattr(jnp, activation)(a @ b)
        return a

    return layer(layer(x, w, activation="tanh", times=1), v, activation="arctan", times=2)


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
    h = lax.platform_dependent(
        x, tpu=lambda a: jnp.arctan(a @ w), default=lambda a: jnp.tanh(a @ w)
    )
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
        return jnp.tanh(checkpoint_name(jnp.arctan(a @ w), "kept") @ v)

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(block, policy=policy)(x)


@jax.custom_jvp
def tanh_times_seven(x):
    return jnp.tanh(x)


@tanh_times_seven.defjvp
def _tanh_times_seven_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.tanh(x), 7 * dx * (1 - jnp.tanh(x) ** 2)


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
    mesh = data_mesh()
    n = mesh.devices.size

    def local(a, b):
        return lax.psum(jnp.tanh(a @ b), "d")

    rows = jnp.tile(x, (n, 1))
    spec = PartitionSpec
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec())
    return mapped(rows, w) @ v / n


def shard_map_all_gather(x, w, v):
    mesh = data_mesh()
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
    mesh = data_mesh()
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


def named_call(x, w, v):
    return jax.named_call(lambda a: jnp.tanh(a @ w), name="encoder")(x) @ v


@jax.custom_batching.custom_vmap
def _normalized(x):
    return x / (1 + jnp.abs(x).max())


@_normalized.def_vmap
def _normalized_vmap(axis_size, in_batched, x):
    return x / (1 + jnp.abs(x).max(axis=tuple(range(1, x.ndim)), keepdims=True)), in_batched[0]


def custom_vmap(x, w, v):
    return _normalized(x @ w) @ v


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
    return jnp.tanh(lax.ragged_dot(x, stack, jnp.array([2, 0, 4])))


def convolution(x, w, v):
    images, kernel = x.reshape(1, 6, 4, 2), w[:4].reshape(2, 2, 2, 4)
    y = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.tanh(y).reshape(12, 8) @ v


def attention(x, w, v):
    q, k, u = (a.reshape(1, 6, 1, 8) for a in (x @ w, x @ v, x))
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
    table = jnp.zeros((5, 8)).at[jnp.array([0, 3, 3, 1, 2, 0])].add(x @ w)
    return table[jnp.array([3, 0])] @ v, jax.ops.segment_sum(x, jnp.array([0, 1, 1, 0, 1, 0]), 2)


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
    return jax.grad(lambda a, b: jnp.sum(jnp.arctan(cond(a, b, v, flag))), argnums=(0, 1))(x, w)


def grad_of_custom_rules_inside(x, w, v):
    def loss(a, b):
        return jnp.sum(jnp.arctan(custom_vjp(a, b, v) + custom_jvp(a, b, v)))

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
    kept = jax.random.bernoulli(key, 0.5, x.shape)
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
    counts open (linear algebra keeps float32 where it is). `full` counts those that the law keeps
    in float32: the product of a Jacobian's basis, which is made of literals.
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
    full: int = 0


_XS = dict(args=(X, STACK), diff=(0, 1), depth=3)
_SOLVE = dict(args=(X, SYMMETRIC), diff=(0, 1))
_TRUE, _ONE, _THREE = jax.device_put((np.bool_(True), np.int32(1), np.int32(3)))
_FLAG = dict(args=(X, W, V, _TRUE))

CONSTRUCTS = [
    Construct(transposed_result, 2),
    Construct(jit_nested, 2),
    Construct(jit_shared, 3, depth=3),
    Construct(jit_inline, 2),
    Construct(jit_static, 3, depth=3),
    Construct(jit_donated, 2),
    Construct(scan, 2, depth=4),
    Construct(scan_reverse, 2, depth=4),
    Construct(scan_no_carry, 2),
    Construct(scan_no_xs, 2, depth=6),
    Construct(scan_layers, 1, **_XS),
    Construct(scan_accumulator, 2, depth=3),
    Construct(scan_in_scan, 2, depth=6),
    Construct(scan_integers_in_carry, 2, depth=4),
    Construct(while_loop, 2, depth=4, forward_only=True),
    Construct(while_predicate_on_float, 2, depth=6, forward_only=True),
    Construct(fori_loop_static, 2, depth=4),
    Construct(fori_loop_dynamic, 2, args=(X, W, V, _THREE), depth=4, forward_only=True),
    Construct(cond, 3, **_FLAG),
    Construct(cond_closures, 2, **_FLAG),
    Construct(cond_on_value, 2),
    Construct(switch, 2, args=(X, W, V, _ONE)),
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
    # In JAX 0.10 a weight that only one branch keeps for the backward pass is none there.
    Construct(grad_of_cond_inside, 8 - OLD, full=OLD, args=(X, W, V, _TRUE), depth=6),
    Construct(grad_of_custom_rules_inside, 10, depth=6),
    Construct(hvp_inside, 8, depth=6),
    Construct(jacfwd_inside, 3, depth=3, full=1),
    Construct(jacrev_inside, 4, depth=3),
    Construct(dropout, 2),
    Construct(fourier, 2),
    Construct(deep_nest, 1, args=(X, STACK, _TRUE), diff=(0, 1), depth=6),
]


def assert_low(fn: Callable[..., Any], args: tuple[Any, ...], compute: str) -> None:
    """Every contraction that nobody pinned multiplies in `compute`."""
    left = [c for c in contractions(fn, *args) if not c.exempt and set(c.in_dtypes) != {compute}]
    assert not left


def mlp(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)
