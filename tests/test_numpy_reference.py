"""`numpy_reference` against XLA, primitive by primitive: the same to float32's own rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from numeric_kit import EXACT
from numpy_reference import RULES, reference

from support import case, iter_eqns, slow_when

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
Y = RNG.normal(size=(3, 4, 5)).astype(np.float32)
SQUARE = RNG.normal(size=(5, 5)).astype(np.float32)
ROWS = RNG.integers(-2, 6, size=(7, 1)).astype(np.int32)
IMAGE = RNG.normal(size=(2, 9, 8, 4)).astype(np.float32)
N = RNG.integers(-9, 9, size=(3, 4)).astype(np.int32)

# Of numbers in (0, 1) where the function wants that, and in each floating dtype.
ELEMENTWISE = [
    *(lax.abs, lax.acos, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.cbrt, lax.ceil, lax.cos),
    *(lax.cosh, lax.erf, lax.erf_inv, lax.erfc, lax.exp, lax.exp2, lax.expm1, lax.floor),
    *(lax.is_finite, lax.log, lax.log1p, lax.logistic, lax.neg, lax.round, lax.rsqrt, lax.sign),
    *(lax.sin, lax.sinh, lax.sqrt, lax.square, lax.tan, lax.tanh, lambda x: lax.acosh(1 + x)),
]
OF_TWO = [
    *(lax.add, lax.atan2, lax.div, lax.max, lax.min, lax.mul, lax.nextafter, lax.pow, lax.rem),
    *(lax.sub, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge),
]
OF_INTEGERS = [
    *(lax.div, lax.rem, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor),
    lambda a, b: lax.shift_left(a, b & 7),
    lambda a, b: lax.shift_right_arithmetic(a, b & 7),
    lambda a, b: lax.shift_right_logical(a, b & 7),
    lambda a, _: (lax.bitwise_not(a), lax.population_count(a), lax.sign(a), lax.integer_pow(a, 3)),
]


def _take(mode: str) -> Callable[..., Any]:
    return lambda x, rows: jnp.take(x, rows[:, 0], axis=0, mode=mode)


def _loop(x: Any) -> Any:
    return lax.while_loop(lambda c: jnp.sum(c) < 99, lambda c: c * 1.5 + 1, x)


def _scan(x: Any, y: Any, *, reverse: bool = False) -> Any:
    def body(c: Any, xs: Any) -> Any:
        return jnp.tanh(c + xs[0]), c * xs[1]

    return lax.scan(body, x[0], (x, y), reverse=reverse)


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (g * (jnp.abs(x) < 2),))


def _solved(a: Any) -> Any:
    spd = a @ a.T + 5 * jnp.eye(5)
    right = jnp.sum(a, 0)
    return lax.custom_linear_solve(
        lambda x: spd @ x, right, lambda _, b: jnp.linalg.solve(spd, b), symmetric=True
    )


def _conv(**options: Any) -> Callable[..., Any]:
    groups = options.get("feature_group_count", 1), options.get("batch_group_count", 1)

    def fn(x: Any, y: Any) -> Any:
        kernel = jnp.resize(y, (3, 2, 4 // groups[0], 6))
        options_ = {"window_strides": (1, 1), "padding": "SAME", **options}
        return lax.conv_general_dilated(
            x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options_
        )

    return fn


STRUCTURED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dot_general": (lambda x, y: jnp.einsum("bik,bjk->bij", x, y), (X, Y)),
    "dot of two axes": (lambda x, y: jnp.einsum("bik,bik->b", x, y), (X, Y)),
    "outer": (lambda x, y: jnp.einsum("i,j->ij", x[0, 0], y[0, 0]), (X, Y)),
    "dot of integers": (lambda a: a @ a.T, (N,)),
    "reductions": (
        lambda x: [f(x, axis=(0, 2)) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.mean)],
        (X,),
    ),
    "any, all": (lambda x: (jnp.any(x > 1, 1), jnp.all(x > -1, 1)), (X,)),
    "argmax": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 2)), (X,)),
    "sort": (lambda x: (jnp.sort(x, 1), jnp.argsort(x, -1)), (X,)),
    "sort by two": (lambda x, y: lax.sort((jnp.round(x), y, x * y), num_keys=2), (X, Y)),
    "top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "running": (
        lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 1), lax.cummax(x, 2), lax.cummin(x, 0)),
        (X,),
    ),
    "running backwards": (lambda x: (lax.cumsum(x, 1, True), lax.cumlogsumexp(x, 1)), (X,)),
    "moves": (
        lambda x: (x.T, x[::2, 1:3], jnp.flip(x, 1), x.reshape(4, 15), x[None], jnp.tile(x, 2)),
        (X,),
    ),
    "joined": (
        lambda x, y: (jnp.concatenate([x, y], 1), jnp.stack([x, y]), jnp.split(x, [1, 3], 2), *x),
        (X, Y),
    ),
    "pad": (lambda x: lax.pad(x, 2.0, [(1, -1, 2), (-1, 2, 0), (-2, -1, 1)]), (X,)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (3, 2, 4, 5)) + jnp.arange(5.0), (X,)),
    "select": (lambda x, y: (jnp.where(x > y, x, y), lax.clamp(-0.5, x, 0.5)), (X, Y)),
    "select of three": (lambda n: lax.select_n(jnp.abs(n) % 3, n, n + 1, n * n), (N,)),
    "a slice where it is told": (
        lambda x, n: lax.dynamic_slice(x, (n[0, 0], 1, n[0, 1]), (2, 2, 3)),
        (X, N),
    ),
    "an update where it is told": (
        lambda x, n: lax.dynamic_update_slice(x, x[:2, :2] * 2, (n[0, 0], 1, n[0, 1])),
        (X, N),
    ),
    "gather, fill": (_take("fill"), (X, ROWS)),
    "gather, clip": (_take("clip"), (X, ROWS)),
    "gather, wrap": (_take("wrap"), (X, ROWS)),
    "gather of integers": (_take("fill"), (N, ROWS)),
    "gather along an axis": (
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1)[:, :2], 1),
        (X,),
    ),
    "gather of two axes": (lambda x, r: x[r[:3, 0] % 3, :, r[:3, 0] % 5], (X, ROWS)),
    "gather under vmap": (
        lambda x, r: jax.vmap(lambda x, i: x[i], (0, 0))(x, r[:3, 0] % 4),
        (X, ROWS),
    ),
    "scatter": (lambda x, r: x.at[r[:3, 0]].set(1.5 * x), (X, ROWS)),
    "scatter, add": (lambda x, r: x.at[r[:, 0]].add(0.5), (X, ROWS)),
    "scatter, multiply": (lambda x, r: x.at[r[:, 0], 1].multiply(2.0), (X, ROWS)),
    "scatter, min and max": (
        lambda x, r: (x.at[r[:, 0]].min(0.1), x.at[:, 1].max(0.1)),
        (X, ROWS),
    ),
    "scatter, dropped": (lambda x, r: x.at[r[:, 0] + 2].add(1.0, mode="drop"), (X, ROWS)),
    "scatter, clipped": (lambda x, r: x.at[r[:, 0]].add(1.0, mode="clip"), (X, ROWS)),
    "gradient of a gather": (
        jax.grad(lambda x, r: jnp.sum(jnp.sin(_take("clip")(x, r)))),
        (X, ROWS),
    ),
    "convolution": (_conv(), (IMAGE, X)),
    "convolution, strided": (_conv(window_strides=(2, 3), padding="VALID"), (IMAGE, X)),
    "convolution, dilated": (
        _conv(rhs_dilation=(2, 1), lhs_dilation=(1, 3), padding=[(1, 2), (-1, 3)]),
        (IMAGE, X),
    ),
    "convolution, grouped": (_conv(feature_group_count=2), (IMAGE, X)),
    "convolution, by batches": (_conv(batch_group_count=2), (IMAGE, X)),
    "gradient of a convolution": (
        jax.grad(lambda x, y: jnp.sum(jnp.sin(_conv(window_strides=(2, 1))(x, y))), (0, 1)),
        (IMAGE, X),
    ),
    "scan": (_scan, (X, Y)),
    "scan, backwards": (functools.partial(_scan, reverse=True), (X, Y)),
    "scan of nothing": (lambda x: lax.scan(lambda c, v: (c + v, c), x[0], x[:0]), (X,)),
    "gradient of a scan": (jax.grad(lambda x, y: jnp.sum(_scan(x, y)[1])), (X, Y)),
    "while": (_loop, (X,)),
    "cond": (lambda x: lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x), (X,)),
    "switch": (lambda x, n: lax.switch(n[0, 0], [jnp.sin, jnp.cos, jnp.exp], x), (X, N)),
    "checkpoint": (jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))), (X,)),
    "custom_vjp": (jax.grad(lambda x: jnp.sum(_clipped(3 * x) ** 2)), (X,)),
    "custom_jvp": (jax.grad(lambda x: jnp.sum(jax.nn.relu(x) * jax.nn.silu(x))), (X,)),
    "linear solve": (_solved, (SQUARE,)),
    "decompositions": (
        lambda a: (jnp.linalg.inv(a), jnp.linalg.cholesky(a @ a.T + jnp.eye(5))),
        (SQUARE,),
    ),
    "complex": (
        lambda x, y: (
            jnp.abs(lax.complex(x, y)),
            jnp.imag(lax.conj(lax.complex(x, y)) ** 2),
            lax.real(lax.complex(x, y)),
        ),
        (X, Y),
    ),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), (X,)),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (X,)),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32) >> 3, (X,)),
    "two numbers in a byte": (
        lambda x: [
            lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int4), jnp.uint8),
            lax.bitcast_convert_type(x, jnp.int4).astype(jnp.int8),
        ],
        (np.arange(256, dtype=np.uint8),),
    ),
    "converted": (
        lambda x: [(1000 * x).astype(d) for d in (jnp.int8, jnp.uint8, jnp.bool_, jnp.int32)],
        (np.array([np.nan, np.inf, -np.inf, 0.1, 3e6, -0.7, 1e9], np.float32),),
    ),
    "fewer bits": (
        lambda x: [lax.reduce_precision(x, e, m) for e, m in ((8, 7), (5, 10), (4, 3))],
        (np.array([1e-7, -3e-5, 70000, 65519, 1.2345, np.nan, -np.inf, 0], np.float32),),
    ),
    "8 bits": (
        lambda x: [x.astype(d).astype("float32") for d in (jnp.float8_e4m3fn, jnp.float8_e5m2)],
        (X,),
    ),
    "powers": (lambda x: (lax.integer_pow(x, -3), x**2, 1 / x**2), (X,)),
    "names and copies": (lambda x: checkpoint_name(jnp.copy(x), "kept") + 1, (X,)),
    "by platform": (
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.exp),
        (X,),
    ),
    "a barrier": (lambda x: lax.optimization_barrier((x, lax.stop_gradient(x))), (X,)),
}

if hasattr(lax, "polynomial"):  # not of JAX 0.10
    STRUCTURED["polynomial"] = (lambda x: lax.polynomial(x, [1.0, x, 3.0]), (X,))


def agree(fn: Callable[..., Any], args: Any, rounding: float) -> None:
    assert_close(reference(fn)(*args), jax.jit(fn, compiler_options=EXACT)(*args), rounding)


def assert_close(got: Any, want: Any, rounding: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, of_xla in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == of_xla.dtype
        if jnp.issubdtype(mine.dtype, jnp.inexact):
            wide = np.complex128 if mine.dtype.kind == "c" else np.float64
            mine, of_xla = np.asarray(mine, wide), np.asarray(of_xla, wide)
            scale = np.max(np.abs(of_xla), initial=0, where=np.isfinite(of_xla))
            np.testing.assert_allclose(mine, of_xla, rtol=rounding, atol=rounding * (scale + 1e-6))
        else:
            np.testing.assert_array_equal(mine, of_xla)


DTYPES = {"float32": 5e-6, "bfloat16": 2**-8, "float16": 2**-10}


@slow_when(lambda dtype: dtype == "float16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(dtype: str) -> None:
    rounding = DTYPES[dtype]
    x = (np.abs(X[0]) / 4 + 0.01).astype(dtype)
    y = (Y[0] / 4).astype(dtype)
    # One program of all: a compilation apiece would take minutes.
    agree(lambda x: [fn(x) for fn in ELEMENTWISE], (x,), 4 * rounding)
    agree(lambda x, y: [fn(x, y) for fn in OF_TWO], (x, y), rounding)


def test_integers() -> None:
    agree(lambda a, b: [fn(a, b) for fn in OF_INTEGERS], (N, N.T.reshape(N.shape)), 0)


def test_what_has_a_structure() -> None:
    every_fn, every_args = zip(*STRUCTURED.values(), strict=True)

    def together(every_args: Any) -> Any:
        return [fn(*args) for fn, args in zip(every_fn, every_args, strict=True)]

    every_want = jax.jit(together, compiler_options=EXACT)(every_args)
    for name, want in zip(STRUCTURED, every_want, strict=True):
        fn, args = STRUCTURED[name]
        with case(name):
            assert_close(reference(fn)(*args), want, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_and_sums_of_16_bits_are_rounded_once(dtype: str) -> None:
    wide = RNG.normal(size=(40, 600)).astype(dtype)
    product = reference(lambda a: a @ a.T)(wide)
    exact = wide.astype(np.float64) @ wide.astype(np.float64).T
    assert product.dtype == dtype
    # Of sums near a tie float32 may choose the neighbor.
    off = np.abs(product.astype(np.float64) - exact) / np.maximum(np.abs(exact), 1)
    assert np.max(off) <= float(jnp.finfo(dtype).eps) * 0.51
    sums = reference(lambda a: lax.reduce_sum_p.bind(a, axes=(1,), out_sharding=None))(wide)
    np.testing.assert_array_equal(sums, wide.astype(np.float32).sum(1).astype(dtype))


def test_an_unknown_primitive_is_named() -> None:
    known = RULES.pop("tan")
    try:
        with pytest.raises(NotImplementedError, match="tan is not in numpy_reference"):
            reference(jnp.tan)(X)
    finally:
        RULES["tan"] = known


def test_every_rule_is_seen() -> None:
    """A rule that no case above uses is not tested."""
    used: set[str] = set()
    for fn, args in (
        *STRUCTURED.values(),
        *((f, (X,)) for f in ELEMENTWISE),
        *((f, (X, Y)) for f in OF_TWO),
        *((f, (N, N)) for f in OF_INTEGERS),
    ):
        used |= {eqn.primitive.name for eqn in iter_eqns(jax.make_jaxpr(fn)(*args).jaxpr)}
    assert RULES.keys() - used <= OTHER_VERSIONS | OF_JAXMP


# Of JAX 0.12 alone, or of what it makes of a loop.
OTHER_VERSIONS = {"one_minus_square", "polynomial", "unstack", "stack", "empty", "empty2"}
# Made by autocast alone, and seen in `test_numeric_programs`.
OF_JAXMP = {"product_in_float32", "no_excess_precision", "laid_out"}
