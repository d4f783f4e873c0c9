"""JAX programs in NumPy: what a jaxpr computes, with no compiler in between.

`reference(fn)(*args)` traces `fn` and evaluates its equations one by one. Each result is rounded
once, to nearest even, to the dtype that the jaxpr says; sums and products of 16 and 8 bits are in
float32, as on any accelerator. Nothing is fused, and nothing is kept in more bits than it has, so
that a program has one result on every JAX and machine. Tests compare with it what `autocast` makes
of a program: it is a truth of its own, and takes a tenth of the time of a first compilation.

Random bits, decompositions of matrices and a few others are JAX's own (`AS_JAX`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.dataflow import interpret
from jaxmp._core.jaxprs.higher_order import inside

RULES: dict[str, Callable[..., Any]] = {}

# Integers that JAX defines, what LAPACK computes for JAX, and what has no short rule.
AS_JAX = frozenset(
    {
        *("random_seed", "random_bits", "random_wrap", "random_unwrap", "random_fold_in"),
        *("random_split", "random_clone", "threefry2x32"),
        *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "svd"),
        *("lu_pivots_to_permutation", "triangular_solve", "fft", "digamma", "lgamma"),
        *("polygamma", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
    }
)


def reference(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, computed in NumPy: traced once for each kind of arguments; its results are of NumPy."""
    traced: dict[Any, Any] = {}

    def call(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        key = jax.tree.structure(args), tuple(map(jax.typeof, leaves))
        if key not in traced:
            traced[key] = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, shapes = traced[key]
        return jax.tree.unflatten(jax.tree.structure(shapes), run(jaxpr, leaves))

    return call


class Rounding(Protocol):
    """What an evaluation does to numbers, beside computing them."""

    def constant(self, x: Any) -> Any:
        """A literal, or an array that the program has captured."""

    def results(self, eqn: Any, outs: list[Any]) -> list[Any]:
        """What an equation without jaxprs inside returns."""

    def branch(self, jaxpr: Any, outs: list[Any]) -> list[Any]:
        """What a branch returns."""


def run(jaxpr: Any, args: Sequence[Any], rounding: Rounding | None = None) -> list[Any]:
    """The results of a closed jaxpr; what overflows or is no number says so itself."""
    with np.errstate(all="ignore"):
        return _run(jaxpr, [_array(x) for x in args], rounding)


def _array(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    if isinstance(x, (bool, int, float, complex)):
        return np.asarray(x, jax.dtypes.result_type(type(x)))
    return np.asarray(x)


def _run(jaxpr: Any, args: Sequence[Any], rounding: Rounding | None = None) -> list[Any]:
    jaxpr, consts = compat.closed(jaxpr)
    constant = rounding.constant if rounding else _array
    env: dict[Any, Any] = {
        v: constant(_array(x)) for v, x in zip(jaxpr.constvars, consts, strict=True)
    }
    env.update(zip(jaxpr.invars, args, strict=True))

    def literal(atom: Any) -> Any:
        return constant(np.asarray(atom.val, atom.aval.dtype))

    return interpret(jaxpr, env, literal, lambda eqn, ins: _equation(eqn, ins, rounding))


def _equation(eqn: Any, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    name = eqn.primitive.name
    if name in compat.CALLS:
        return _run(compat.call_jaxpr(eqn), operands, rounding)
    if name in LOOPS_AND_BRANCHES:
        return LOOPS_AND_BRANCHES[name](eqn, operands, rounding)
    if name in AS_JAX:
        outs = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params)
        outs = [_array(x) for x in (outs if eqn.primitive.multiple_results else [outs])]
    elif name in RULES:
        outs = RULES[name](eqn, *operands, **eqn.params)
        outs = list(outs) if eqn.primitive.multiple_results else [outs]
        outs = [_as_said(x, v.aval, eqn) for x, v in zip(outs, eqn.outvars, strict=True)]
    else:
        raise NotImplementedError(f"{name} is not in numpy_reference: {eqn}")
    return rounding.results(eqn, outs) if rounding else outs


def _as_said(out: Any, aval: Any, eqn: Any) -> Any:
    out = _array(out)
    if out.dtype != aval.dtype or out.shape != tuple(aval.shape):
        raise TypeError(f"{eqn.primitive}: {out.dtype}{out.shape} in place of {aval}")
    return out


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of an equation, its operands and parameters."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


# Loops, branches and rules.


def _scan(eqn: Any, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    [inner] = inside(eqn)
    first = inner.shared + inner.carried
    shared, carry, xs = operands[: inner.shared], operands[inner.shared : first], operands[first:]
    stacked: list[Any] = [None] * inner.trips
    for i in range(inner.trips)[:: -1 if inner.reverse else 1]:
        outs = _run(inner.jaxpr, [*shared, *carry, *(x[i] for x in xs)], rounding)
        carry, stacked[i] = outs[: inner.carried], outs[inner.carried :]
    if not stacked:
        of_none = eqn.outvars[inner.carried :]
        return [*carry, *(np.zeros(v.aval.shape, v.aval.dtype) for v in of_none)]
    return [*carry, *map(np.stack, zip(*stacked, strict=True))]


def _while(eqn: Any, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    for_condition, for_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_condition, rest = operands[:for_condition], operands[for_condition:]
    of_body, carry = rest[:for_body], rest[for_body:]
    while _run(eqn.params["cond_jaxpr"], [*of_condition, *carry])[0]:
        carry = _run(eqn.params["body_jaxpr"], [*of_body, *carry], rounding)
    return carry


def _cond(eqn: Any, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    branches = eqn.params["branches"]
    taken = branches[int(np.clip(int(operands[0]), 0, len(branches) - 1))]
    outs = _run(taken, operands[1:], rounding)
    return rounding.branch(taken, outs) if rounding else outs


LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}


@rule("platform_index")
def _platform_index(_: Any, *, platforms: Any, **_params: Any) -> Any:
    of_cpu = [i for i, names in enumerate(platforms) if names is None or "cpu" in names]
    return np.asarray(of_cpu[0], np.int32)


@rule("custom_linear_solve")
def _linear_solve(_: Any, *operands: Any, const_lengths: Any, jaxprs: Any) -> list[Any]:
    start = const_lengths.matvec + const_lengths.vecmat
    consts = operands[start : start + const_lengths.solve]
    right = operands[sum(const_lengths) :]
    return _run(jaxprs.solve, [*consts, *right])


@rule("product_in_float32")
def _in_float32(_: Any, *operands: Any, jaxpr: Any) -> Any:
    return _run(jaxpr, [x if x.dtype.kind in "iub" else x.astype(np.float32) for x in operands])[0]


# Elementwise: NumPy's, of 16 bits in float32 with one rounding of the result.


def _elementwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(eqn: Any, *operands: Any, **params: Any) -> Any:
        dtype = eqn.outvars[0].aval.dtype
        wide = [_widened(x) for x in operands]
        return np.asarray(fn(*wide, **params)).astype(dtype)

    return call


def _widened(x: Any) -> Any:
    is_small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(np.float32) if is_small else x


def _divided(a: Any, b: Any) -> Any:
    if a.dtype.kind not in "iu":
        return a / b
    safe = np.where(b == 0, 1, b)
    return np.where(b == 0, -1, np.trunc(a / safe.astype(np.float64)).astype(a.dtype))


def _remainder(a: Any, b: Any) -> Any:
    return (
        np.fmod(a, b)
        if a.dtype.kind == "f"
        else np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))
    )


def _integer_power(x: Any, y: int) -> Any:
    return np.power(x, y) if y >= 0 else 1 / np.power(x, -y)


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Without the parameters: of accuracy, which NumPy has no choice of."""
    return _elementwise(lambda *operands, **_: fn(*operands))


for _name, _fn in {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divided,
    "rem": _remainder,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "max": np.maximum,
    "min": np.minimum,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "pow": lambda x, y: np.power(x, y.astype(x.dtype) if y.dtype.kind in "iu" else y),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "logistic": special.expit,
    "erf": special.erf,
    "erfc": special.erfc,
    "erf_inv": special.erfinv,
    "one_minus_square": lambda x: 1 - x * x,
    "nextafter": np.nextafter,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_finite": np.isfinite,
    "real": np.real,
    "imag": np.imag,
    "conj": np.conj,
    "complex": lambda a, b: a + 1j * b,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}.items():
    RULES[_name] = _plain(_fn)


@rule("shift_right_logical")
def _shift_right(_: Any, x: Any, by: Any) -> Any:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.view(unsigned), by.view(unsigned)).view(x.dtype)


@rule("population_count")
def _population_count(_: Any, x: Any) -> Any:
    in_bytes = np.ascontiguousarray(x)[..., None].view(np.uint8)
    return np.unpackbits(in_bytes, axis=-1).sum(-1).astype(x.dtype)


@rule("integer_pow")
def _integer_pow(eqn: Any, x: Any, *, y: int, **_: Any) -> Any:
    return _elementwise(functools.partial(_integer_power, y=y))(eqn, x)


@rule("polynomial")
def _polynomial(eqn: Any, x: Any, *coefficients: Any, **_: Any) -> Any:
    def horner(x: Any, *coefficients: Any) -> Any:
        return functools.reduce(lambda sum_, c: sum_ * x + c, reversed(coefficients))

    return _elementwise(horner)(eqn, x, *coefficients)


@rule("round")
def _round(_: Any, x: Any, *, rounding_method: Any) -> Any:
    wide = _widened(x)
    if "EVEN" in str(rounding_method.name):
        return np.rint(wide).astype(x.dtype)
    return (np.sign(wide) * np.floor(np.abs(wide) + 0.5)).astype(x.dtype)


@rule("stop_gradient", "optimization_barrier", "no_excess_precision", "laid_out", "copy", "name")
def _same(eqn: Any, *operands: Any, **_: Any) -> Any:
    return list(operands) if eqn.primitive.multiple_results else operands[0]


@rule("convert_element_type")
def _convert(_: Any, x: Any, *, new_dtype: Any, **_params: Any) -> Any:
    new, is_float = np.dtype(new_dtype), jnp.issubdtype(x.dtype, jnp.floating)
    if new == np.bool_:
        return x != 0
    if is_float and new.kind in "iu":
        info = jnp.iinfo(new)
        inside = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), info.min, info.max)
        # The largest integers are no floats: they are what is beyond them.
        return np.where(inside >= info.max, info.max, inside.astype(new)).astype(new)
    if x.dtype.kind == "c" and new.kind != "c":
        x = x.real
    return x.astype(new)


@rule("bitcast_convert_type")
def _bitcast(eqn: Any, x: Any, *, new_dtype: Any) -> Any:
    """Numbers of 4 bits are bytes in NumPy, and two to a byte where they are packed."""
    shape, new = eqn.outvars[0].aval.shape, np.dtype(new_dtype)
    if x.dtype.itemsize == new.itemsize == 1 and x.ndim > len(shape):
        low, high = np.moveaxis(x.view(np.uint8) & 15, -1, 0)
        return (low | high << 4).view(new)
    if x.dtype.itemsize == new.itemsize == 1 and x.ndim < len(shape):
        both = x.view(np.uint8)
        return np.stack([both & 15, both >> 4], -1).view(new)
    return np.ascontiguousarray(x).view(new).reshape(shape)


@rule("reduce_precision")
def _reduce_precision(_: Any, x: Any, *, exponent_bits: int, mantissa_bits: int) -> Any:
    """In bits of float64, of which a float32 number uses a part; subnormals become zero."""
    wide = x.astype(np.float64)
    mantissa, exponent = np.frexp(wide)
    rounded = np.ldexp(np.rint(np.ldexp(mantissa, mantissa_bits + 1)), exponent - mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    largest = (2 - 2.0**-mantissa_bits) * 2.0**bias
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, wide), rounded)
    rounded = np.where(np.abs(rounded) < 2.0 ** (1 - bias), np.copysign(0.0, wide), rounded)
    return np.where(np.isfinite(wide), rounded, wide).astype(x.dtype)


@rule("select_n")
def _select(_: Any, which: Any, *cases: Any) -> Any:
    index = which.astype(np.int32)
    if index.ndim == 0:
        return cases[int(index)]
    return np.choose(index, cases) if len(cases) > 2 else np.where(index, cases[-1], cases[0])


# What moves values.


@rule("broadcast_in_dim")
def _broadcast(
    _: Any, x: Any, *__: Any, shape: Any, broadcast_dimensions: Any, **_params: Any
) -> Any:
    full = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        full[axis] = size
    return np.broadcast_to(x.reshape(full), shape)


@rule("reshape")
def _reshape(_: Any, x: Any, *, new_sizes: Any, dimensions: Any = None, **_params: Any) -> Any:
    return (x if dimensions is None else x.transpose(dimensions)).reshape(new_sizes)


@rule("squeeze")
def _squeeze(_: Any, x: Any, *, dimensions: Any) -> Any:
    return np.squeeze(x, tuple(dimensions))


@rule("transpose")
def _transpose(_: Any, x: Any, *, permutation: Any) -> Any:
    return x.transpose(permutation)


@rule("rev")
def _rev(_: Any, x: Any, *, dimensions: Any) -> Any:
    return np.flip(x, tuple(dimensions))


@rule("slice")
def _slice(_: Any, x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


@rule("split")
def _split(_: Any, x: Any, *, sizes: Any, axis: int) -> list[Any]:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@rule("concatenate")
def _concatenate(_: Any, *operands: Any, dimension: int) -> Any:
    return np.concatenate(operands, dimension)


@rule("stack")
def _stack(_: Any, *operands: Any, axis: int = 0) -> Any:
    return np.stack(operands, axis)


@rule("unstack")
def _unstack(_: Any, x: Any, *, axis: int = 0) -> list[Any]:
    return list(np.moveaxis(x, axis, 0))


@rule("tile")
def _tile(_: Any, x: Any, *, reps: Any) -> Any:
    return np.tile(x, reps)


@rule("iota")
def _iota(_: Any, *__: Any, dtype: Any, shape: Any, dimension: int, **_params: Any) -> Any:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(sizes), shape)


@rule("empty", "empty2")
def _empty(eqn: Any, **_: Any) -> Any:
    aval = eqn.outvars[0].aval
    return np.zeros(aval.shape, aval.dtype)


@rule("pad")
def _pad(_: Any, x: Any, value: Any, *, padding_config: Any) -> Any:
    for axis, (low, high, between) in enumerate(padding_config):
        size = x.shape[axis]
        full = size + max(size - 1, 0) * between
        spread = np.full([*x.shape[:axis], full, *x.shape[axis + 1 :]], value, x.dtype)
        spread[(slice(None),) * axis + (slice(None, None, between + 1),)] = x
        cut = spread[(slice(None),) * axis + (slice(max(-low, 0), full - max(-high, 0)),)]
        widths = [(0, 0)] * x.ndim
        widths[axis] = (max(low, 0), max(high, 0))
        x = np.pad(cut, widths, constant_values=value)
    return x


def _starts(x: Any, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    first = (int(np.clip(int(s), 0, n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True))
    return tuple(slice(s, s + k) for s, k in zip(first, sizes, strict=True))


@rule("dynamic_slice")
def _dynamic_slice(_: Any, x: Any, *starts: Any, slice_sizes: Any) -> Any:
    return x[_starts(x, slice_sizes, starts)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(_: Any, x: Any, update: Any, *starts: Any) -> Any:
    out = x.copy()
    out[_starts(x, update.shape, starts)] = update
    return out


# Gather and scatter.


def _windows(
    of: Sequence[int],
    indices: Any,
    window: Sequence[int],
    axes: Any,
    batched: Any,
    shared: Any,
    mode: Any,
) -> tuple[list[Any], Any]:
    """For each axis of an array of shape `of`, the indices of windows: batch axes, then the
    window's; and which windows are inside of the array."""
    batch = indices.shape[:-1]
    starts = [np.zeros(batch, np.int64) for _ in of]
    for k, axis in enumerate(axes):
        starts[axis] = indices[..., k].astype(np.int64)
    for axis, at in zip(batched, shared, strict=True):
        sizes = [1] * len(batch)
        sizes[at] = batch[at]
        starts[axis] = np.broadcast_to(np.arange(batch[at]).reshape(sizes), batch)
    largest = [n - k for n, k in zip(of, window, strict=True)]
    inside = np.ones(batch, bool)
    for start, most in zip(starts, largest, strict=True):
        inside &= (start >= 0) & (start <= most)
    grids = []
    for axis, (start, most) in enumerate(zip(starts, largest, strict=True)):
        offset = [1] * len(of)
        offset[axis] = window[axis]
        start = np.clip(start, 0, most).reshape(batch + (1,) * len(of))
        grids.append(start + np.arange(window[axis]).reshape(offset))
    if "FILL_OR_DROP" not in str(mode):
        inside = np.ones_like(inside)
    return grids, inside


@rule("gather")
def _gather(
    eqn: Any,
    x: Any,
    indices: Any,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> Any:
    dims = dimension_numbers
    grids, inside = _windows(
        x.shape,
        indices,
        slice_sizes,
        dims.start_index_map,
        dims.operand_batching_dims,
        dims.start_indices_batching_dims,
        mode,
    )
    batch = indices.ndim - 1
    taken = x[tuple(grids)]
    if not inside.all():
        kept = inside.reshape(inside.shape + (1,) * x.ndim)
        taken = np.where(kept, taken, _filling(x.dtype, fill_value))
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    taken = np.squeeze(taken, tuple(batch + axis for axis in sorted(gone)))
    # Batch axes come first in `taken`: the offsets go where they are said to be.
    rank = len(eqn.outvars[0].aval.shape)
    order = [0] * rank
    of_batch = [axis for axis in range(rank) if axis not in dims.offset_dims]
    for i, axis in enumerate([*of_batch, *sorted(dims.offset_dims)]):
        order[axis] = i
    return taken.transpose(order)


def _filling(dtype: Any, value: Any) -> Any:
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif dtype == np.bool_:
            value = True
        else:
            value = jnp.iinfo(dtype).min if dtype.kind == "i" else jnp.iinfo(dtype).max
    return np.asarray(value, dtype)


def _scatter(combine: Any) -> Callable[..., Any]:
    def call(_: Any, x: Any, indices: Any, updates: Any, **params: Any) -> Any:
        dims = params["dimension_numbers"]
        rank, batch = x.ndim, indices.ndim - 1
        inserted = {*dims.inserted_window_dims, *dims.operand_batching_dims}
        of_window = sorted(dims.update_window_dims)
        of_batch = [axis for axis in range(updates.ndim) if axis not in of_window]
        moved = updates.transpose([*of_batch, *of_window])
        window = iter(moved.shape[batch:])
        sizes = [1 if axis in inserted else next(window) for axis in range(rank)]
        moved = moved.reshape(moved.shape[:batch] + tuple(sizes))
        grids, inside = _windows(
            x.shape,
            indices,
            sizes,
            dims.scatter_dims_to_operand_dims,
            dims.operand_batching_dims,
            dims.scatter_indices_batching_dims,
            params["mode"],
        )
        full = np.broadcast_shapes(*(g.shape for g in grids))
        kept = np.broadcast_to(inside.reshape(inside.shape + (1,) * rank), full)
        at = tuple(np.broadcast_to(g, full)[kept] for g in grids)
        out = x.copy()
        if combine is None:
            out[at] = np.broadcast_to(moved, full)[kept]
        else:
            combine.at(out, at, np.broadcast_to(moved, full)[kept])
        return out

    return call


RULES |= {
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter-mul": _scatter(np.multiply),
    "scatter-min": _scatter(np.minimum),
    "scatter-max": _scatter(np.maximum),
}


# Reductions and products.


def _summed(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(eqn: Any, x: Any, *, axes: Any, **_: Any) -> Any:
        return np.asarray(fn(_widened(x), axis=tuple(axes))).astype(eqn.outvars[0].aval.dtype)

    return call


RULES |= {
    "reduce_sum": _summed(np.sum),
    "reduce_prod": _summed(np.prod),
    "reduce_max": _summed(np.max),
    "reduce_min": _summed(np.min),
    "reduce_and": _summed(np.all),
    "reduce_or": _summed(np.any),
}


@rule("argmax", "argmin")
def _arg(eqn: Any, x: Any, *, axes: Any, index_dtype: Any) -> Any:
    [axis] = axes
    best = np.argmax if eqn.primitive.name == "argmax" else np.argmin
    return best(_widened(x), axis).astype(index_dtype)


def _running(fn: Any) -> Callable[..., Any]:
    def call(_: Any, x: Any, *, axis: int, reverse: bool, **_params: Any) -> Any:
        given = np.flip(x, axis) if reverse else x
        out = fn(_widened(given), axis).astype(x.dtype)
        return np.flip(out, axis) if reverse else out

    return call


RULES |= {
    "cumsum": _running(np.cumsum),
    "cumprod": _running(np.cumprod),
    "cummax": _running(np.maximum.accumulate),
    "cummin": _running(np.minimum.accumulate),
    "cumlogsumexp": _running(np.logaddexp.accumulate),
}


@rule("sort")
def _sort(_: Any, *operands: Any, dimension: int, num_keys: int, **_params: Any) -> list[Any]:
    def key(x: Any) -> Any:
        return np.moveaxis(_widened(x), dimension, -1)

    order = np.lexsort([key(x) for x in reversed(operands[:num_keys])], axis=-1)
    order = np.moveaxis(order, -1, dimension)
    return [np.take_along_axis(x, order, dimension) for x in operands]


@rule("top_k")
def _top_k(eqn: Any, x: Any, *, k: int, **_: Any) -> list[Any]:
    order = np.argsort(-_widened(x), axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(x, order, -1), order.astype(eqn.outvars[1].aval.dtype)]


def _multiplied(*operands: Any) -> list[Any]:
    """Operands in the dtype of their product's sum: 16 and 8 bits in float32, integers in 32."""
    out = np.result_type(*(_widened(x).dtype for x in operands))
    if out.kind in "iu" and out.itemsize < 4:
        out = np.dtype(np.int32)
    if out == np.bool_:
        out = np.dtype(np.int32)
    return [x.astype(out) for x in operands]


@rule("dot_general")
def _dot(eqn: Any, a: Any, b: Any, *, dimension_numbers: Any, **_: Any) -> Any:
    (of_a, of_b), (batch_a, batch_b) = dimension_numbers
    a, b = _multiplied(a, b)
    free_a = [i for i in range(a.ndim) if i not in {*of_a, *batch_a}]
    free_b = [i for i in range(b.ndim) if i not in {*of_b, *batch_b}]
    batch, summed = [a.shape[i] for i in batch_a], math.prod(a.shape[i] for i in of_a)
    rows, columns = [a.shape[i] for i in free_a], [b.shape[i] for i in free_b]
    left = a.transpose([*batch_a, *free_a, *of_a]).reshape([*batch, math.prod(rows), summed])
    right = b.transpose([*batch_b, *of_b, *free_b]).reshape([*batch, summed, math.prod(columns)])
    out = np.matmul(left, right).reshape([*batch, *rows, *columns])
    return out.astype(eqn.outvars[0].aval.dtype)


@rule("conv_general_dilated")
def _conv(eqn: Any, x: Any, kernel: Any, **params: Any) -> Any:
    dims = params["dimension_numbers"]
    x, kernel = _multiplied(x, kernel)
    x, kernel = x.transpose(dims.lhs_spec), kernel.transpose(dims.rhs_spec)
    dilation, strides = params["rhs_dilation"], params["window_strides"]
    padding = [
        (low, high, d - 1)
        for (low, high), d in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = _pad(None, x, np.zeros((), x.dtype), padding_config=[(0, 0, 0), (0, 0, 0), *padding])
    spread = [(0, 0, 0), (0, 0, 0), *((0, 0, d - 1) for d in dilation)]
    kernel = _pad(None, kernel, np.zeros((), kernel.dtype), padding_config=spread)
    axes = tuple(range(2, x.ndim))
    seen = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axes)
    seen = seen[(slice(None), slice(None), *(slice(None, None, s) for s in strides))]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    outs = []
    for i, part in enumerate(np.split(kernel, max(groups, batches), 0)):
        each = seen.shape[1 if groups > 1 else 0] // max(groups, batches)
        mine = slice(i * each, (i + 1) * each)
        view = seen[:, mine] if groups > 1 else seen[mine] if batches > 1 else seen
        # Channels and the window are summed over: axes 1 and the last of `view`.
        window = [1, *range(x.ndim, view.ndim)]
        outs.append(np.tensordot(view, part, (window, list(range(1, part.ndim)))))
    out = np.moveaxis(np.concatenate(outs, -1), -1, 1)
    back = [0] * out.ndim
    for i, axis in enumerate(dims.out_spec):
        back[axis] = i
    return out.transpose(back).astype(eqn.outvars[0].aval.dtype)
