"""Losses of large vocabularies, computed without an array of all logits.

Example:
  >>> import jax, jax.numpy as jnp
  >>> x, table = jnp.ones((2, 512, 64)), jnp.zeros((64, 4096))
  >>> labels = jnp.zeros((2, 512), "int32")
  >>> losses = linear_cross_entropy(x, table, labels)
  >>> losses.shape, round(float(losses.mean()), 4)
  ((2, 512), 8.3178)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmp._core.jaxprs.attributes import (
    device_count,
    explicit_sharding,
    filled,
    varying_axes,
    with_dtype,
)
from jaxmp._core.plan.regions import in_region, policy_in_force
from jaxmp._core.plan.rules import governed
from jaxmp.policy import get_policy

__all__ = ["linear_cross_entropy"]

_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
# Up to so many bytes of float32, all logits are one chunk: a loop would cost more than they do.
_SMALL: Final = 2**26
# How much larger than `x`, in float32, the logits of a chunk are with `chunks="auto"`. It is the
# same on each device, however tokens are sharded; products of 8,192 columns at 2,048 features.
_TIMES_X: Final = 4


def linear_cross_entropy(
    x: ArrayLike,
    table: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    chunks: int | Literal["auto"] = "auto",
    where: ArrayLike | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> jax.Array:
    """Returns the cross-entropy of each token's logits, ``x @ table + bias``, without storing them.

    The logits are computed in chunks of the vocabulary, and rematerialized in the backward pass,
    which costs a third more FLOPs of this layer. In float32 the losses are those of
    `optax.softmax_cross_entropy_with_integer_labels(x @ table + bias, labels)`.

    Under a policy, or of 16-bit `x` and `table`, the products multiply 16 bits in both passes. All
    else is float32: logits, softmax, sums, and the sums in products; the gradient of the
    logits is rounded to 16 bits where a product reads it. Second derivatives by `jax.grad` are
    right; forward mode (`jax.jvp`, `jax.hessian`) is refused by JAX.

    Under `jax.jit`, `x` and `table` may be sharded over the devices of a mesh in any way in which
    they could be multiplied. In `jax.shard_map`, tokens may be sharded; a sharded vocabulary needs
    `axis_name`.

    Args:
      x: float[..., features], the last layer's output.
      table: float[features, vocab]. Of an embedding [vocab, features], give ``embedding.T``.
      labels: int[...], from 0 to vocab - 1. Others make the loss and all gradients NaN, unless
        `where` is False there.
      bias: float[vocab]. Columns where it is -inf have no part in the softmax.
      chunks: Their number. By default as many as make a chunk's logits about four times as large as
        `x` in float32, or one, if all logits take at most 64 MiB. The table is padded, which copies
        it, where an int does not divide the vocabulary.
      where: bool[...], of the shape of `labels`: which tokens count. Others have a loss of 0, and
        no gradient, whatever `x` and `labels` are there.
      z_loss: Adds ``z_loss * logsumexp(logits)**2``, which keeps logits from drifting.
      label_smoothing: From 0 up to 1: the part of the target that is spread over the vocabulary.
      soft_cap: Logits become ``soft_cap * tanh(logits / soft_cap)``; -inf stays.
      axis_name: In `jax.shard_map`, the mesh axis that the vocabulary is sharded over, or several:
        `table` and `bias` are those of a device, `labels` count over all of the vocabulary.

    Returns:
      float32[...] (float64 of float64), the loss of each token. The mean of those that count is
      ``losses.sum() / where.sum()``.

    Raises:
      ValueError: If shapes do not match, or an option is out of its range.
      TypeError: If `x`, `table` or `bias` is not floating, `labels` not an integer array, or
        `where` not a boolean one.

    References:
      Chowdhery et al., 2022, "PaLM", https://arxiv.org/abs/2204.02311 (z_loss); Gemma Team, 2024,
      https://arxiv.org/abs/2408.00118 (soft_cap); Wijmans et al., 2024, "Cut Your Losses in
      Large-Vocabulary Language Models", https://arxiv.org/abs/2411.09009.
    """
    x, table, labels = jnp.asarray(x), jnp.asarray(table), jnp.asarray(labels)
    bias = None if bias is None else jnp.asarray(bias)
    where = None if where is None else jnp.asarray(where)
    _check_arrays(x, table, labels, bias, where)
    _check_options(chunks, z_loss, label_smoothing, soft_cap)

    operands, sums = _dtypes(x, table)  # not in the region below, whose policy is float32

    def as_written(x: Any, table: Any, labels: Any, bias: Any, where: Any) -> jax.Array:
        labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
        if where is not None:  # NaN times 0 is NaN: tokens that do not count are not read
            x, labels = jnp.where(where[..., None], x, 0), jnp.where(where, labels, 0)
        local, shards = table.shape[1], 1 if axis_name is None else lax.axis_size(axis_name)
        here = labels - (0 if axis_name is None else local * lax.axis_index(axis_name))
        here = jnp.where((here >= 0) & (here < local), here, -1)
        count = _chunk_count(labels.size, *table.shape) if chunks == "auto" else chunks
        pad = -local % count
        pieces = math.gcd((local + pad) // count, device_count(table))
        vocab = local * shards
        options = _Options(label_smoothing, soft_cap, vocab, local, count, pieces, operands, sums)
        if pad:
            bias = jnp.zeros(local, sums) if bias is None else bias
            bias = jnp.pad(bias, (0, pad), constant_values=-jnp.inf)
            table = jnp.pad(table, ((0, 0), (0, pad)))

        x, table, bias, here = _varying_alike((x, table, bias, here))
        normalizer, target = _statistics(options, x.astype(operands), table, bias, here)
        if axis_name is not None:
            largest = _finite(lax.pmax(lax.stop_gradient(normalizer), axis_name))
            normalizer = largest + jnp.log(lax.psum(jnp.exp(normalizer - largest), axis_name))
            target = lax.psum(target, axis_name)
        losses = normalizer - target
        if z_loss:
            losses += z_loss * jnp.square(normalizer)
        known = (labels >= 0) & (labels < vocab)
        losses *= jnp.where(known, 1, jnp.nan).astype(sums)
        return losses if where is None else jnp.where(where, losses, 0)

    # The casts are here: under a policy, nothing is to be narrowed.
    marked = in_region(as_written, get_policy("float32"), keep_outer=True)
    return marked(x, table, labels, bias, where)


class _Options(NamedTuple):
    """Options that are known at trace time.

    Attributes:
      label_smoothing: As it was given, and `soft_cap`.
      vocab: The size of the vocabulary, and `local`, the size of this device's part.
      chunks: The number of chunks, and `pieces`, the number of pieces of each.
      operands: The dtype that the products multiply.
      sums: The dtype of logits, and of all else.
    """

    label_smoothing: float
    soft_cap: float | None
    vocab: int
    local: int
    chunks: int
    pieces: int
    operands: Any
    sums: Any


def _dtypes(x: Any, table: Any) -> tuple[Any, Any]:
    """Returns the dtypes of products' operands, by the policy if any, and of their sums."""
    dtype, policy = jnp.result_type(x, table), policy_in_force()
    sums = jnp.promote_types(dtype, jnp.float32)
    if policy is None or dtype != governed(policy):
        return dtype, sums
    compute = jnp.dtype(policy.compute_dtype)
    return compute, jnp.promote_types(compute, jnp.float32)


def _varying_alike(tree: Any) -> Any:
    """Casts arrays to vary over the same manual mesh axes, under `jax.shard_map`.

    The transpose of that is the sum of gradients over devices, in the dtype of the parameter.
    """
    axes = {axis for x in jax.tree.leaves(tree) for axis in varying_axes(jax.typeof(x))}

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes.difference(varying_axes(jax.typeof(x))))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


# Chunks of the vocabulary. On a mesh, one is made of a piece of each device's columns, if these are
# sharded: no device needs another's for it. Where rows are (FSDP), they are gathered by chunks.


def _chunk_count(tokens: int, features: int, vocab: int) -> int:
    """Returns the number of chunks: a divisor of the vocabulary, if one is near enough."""
    if 4 * tokens * vocab <= _SMALL:
        return 1
    wanted = math.ceil(vocab / (_TIMES_X * max(features, 1)))
    divisors = (count for count in range(wanted, 2 * wanted) if vocab % count == 0)
    return next(divisors, wanted)


def _take(array: jax.Array, options: _Options, chunk: jax.Array) -> jax.Array:
    """Returns a chunk along the last axis."""
    columns = array.shape[-1] // options.chunks
    if options.pieces == 1:  # in one piece, for which no compiler copies the whole
        return lax.dynamic_slice_in_dim(array, chunk * columns, columns, axis=array.ndim - 1)
    taken: jax.Array = lax.dynamic_index_in_dim(
        _split(array, options), chunk, array.ndim, keepdims=False
    )
    return taken.reshape(*array.shape[:-1], columns)


def _put(array: jax.Array, options: _Options, chunk: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the array with a chunk replaced."""
    new, last = new.astype(array.dtype), array.ndim - 1
    if options.pieces == 1:
        return lax.dynamic_update_slice_in_dim(array, new, chunk * new.shape[-1], axis=last)
    new = new.reshape(*new.shape[:-1], options.pieces, -1)
    split: jax.Array = lax.dynamic_update_index_in_dim(
        _split(array, options), new, chunk, array.ndim
    )
    return split.reshape(array.shape)


def _split(array: jax.Array, options: _Options) -> jax.Array:
    """Splits the last axis into three: pieces of a chunk, chunks, columns of a piece."""
    return array.reshape(*array.shape[:-1], options.pieces, options.chunks, -1)


# The statistics that a loss needs of logits, without storing these.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    options: _Options, x: jax.Array, table: jax.Array, bias: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes two sums over the vocabulary, for each token.

    Returns:
      The logarithm of the sum of the logits' exponentials, and the mean of the logits, weighted
      with the target's probabilities: of those that this device has.
    """

    def add(sums: Any, chunk: jax.Array) -> tuple[Any, None]:
        before, total, target = sums
        logits, _ = _logits(options, x, table, bias, chunk)
        largest = lax.stop_gradient(jnp.maximum(before, jnp.max(logits, axis=-1)))
        total *= jnp.exp(before - largest)
        total += jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)
        hit, ids = _is_label(options, logits, labels, chunk)
        label = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
        if smoothing := options.label_smoothing:
            every = jnp.sum(jnp.where(ids < options.local, logits, 0), axis=-1)
            label = (1 - smoothing) * label + smoothing / options.vocab * every
        return (largest, total, target + label), None

    zeros = filled(with_dtype(jax.typeof(labels), options.sums), 0)
    start = (_finite(zeros - jnp.inf), zeros, zeros)
    (largest, total, target), _ = lax.scan(add, start, jnp.arange(options.chunks))
    return largest + jnp.log(total), target


def _forward(options: _Options, x: Any, table: Any, bias: Any, labels: Any) -> tuple[Any, Any]:
    out = _statistics(options, x, table, bias, labels)
    return out, (x, table, bias, labels, out[0])


def _backward(options: _Options, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    x, table, bias, labels, normalizer = saved
    by_normalizer, by_target = (g[..., None] for g in cotangents)
    normalizer, tokens = _finite(normalizer)[..., None], list(range(labels.ndim))
    smoothing = options.label_smoothing

    def add(sums: Any, chunk: jax.Array) -> tuple[Any, None]:
        by_x, by_table, by_bias = sums
        logits, uncapped = _logits(options, x, table, bias, chunk)
        hit, _ = _is_label(options, logits, labels, chunk)
        target = jnp.where(hit, 1 - smoothing, 0) + smoothing / options.vocab
        by_logits = by_normalizer * jnp.exp(logits - normalizer) + by_target * target
        by_logits = uncapped(by_logits)
        rounded = by_logits.astype(options.operands)
        columns = _take(table, options, chunk).astype(options.operands)
        by_x += _dot(rounded, columns, [labels.ndim], [1], options.sums, like=x)
        by_columns = _dot(x, rounded, tokens, tokens, options.sums, like=table)
        by_table = _put(by_table, options, chunk, by_columns)
        if by_bias is not None:
            by_bias = _put(by_bias, options, chunk, jnp.sum(by_logits, axis=tokens))
        return (by_x, by_table, by_bias), None

    start = (filled(with_dtype(jax.typeof(x), options.sums), 0), table, bias)
    start = (start[0], *jax.tree.map(lambda p: filled(jax.typeof(p), 0), start[1:]))
    (by_x, by_table, by_bias), _ = lax.scan(add, start, jnp.arange(options.chunks))
    return by_x.astype(x.dtype), by_table, by_bias, None


_statistics.defvjp(_forward, _backward)


def _logits(
    options: _Options, x: jax.Array, table: jax.Array, bias: jax.Array | None, chunk: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns a chunk of logits, and a function from their cotangents to those before the cap."""
    columns = _take(table, options, chunk).astype(options.operands)
    logits = _dot(x, columns, [x.ndim - 1], [0], options.sums)
    if bias is not None:
        logits += _take(bias, options, chunk).astype(options.sums)
    if options.soft_cap is None:
        return logits, lambda cotangent: cotangent
    tanh = jnp.tanh(logits / options.soft_cap)
    capped = jnp.where(jnp.isneginf(logits), logits, options.soft_cap * tanh)
    return capped, lambda cotangent: cotangent * (1 - jnp.square(tanh))


def _dot(lhs: Any, rhs: Any, lhs_axes: Any, rhs_axes: Any, sums: Any, like: Any = None) -> Any:
    """Computes a product, with the explicit sharding, if any, of `like`, whose gradient it is."""
    return lax.dot_general(
        lhs,
        rhs,
        ((lhs_axes, rhs_axes), ((), ())),
        preferred_element_type=sums,
        out_sharding=None if like is None else explicit_sharding(like),
    )


def _is_label(
    options: _Options, logits: jax.Array, labels: jax.Array, chunk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns where a chunk has the logits of the labels, and the indices of its columns."""
    vocab = logits.shape[-1] * options.chunks
    ids = _take(jnp.arange(vocab, dtype=labels.dtype), options, chunk)
    return labels[..., None] == ids, ids


def _finite(x: jax.Array) -> jax.Array:
    """Clips -inf to a finite number, so that an exponential of -inf minus it is 0, and not NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


# Checks.


def _check_arrays(x: Any, table: Any, labels: Any, bias: Any, where: Any) -> None:
    for name, array in (("x", x), ("table", table), ("bias", bias)):
        if array is not None and array.dtype.name not in _FLOATS:
            raise TypeError(
                f"linear_cross_entropy: {name} is {array.dtype}; it must be {', '.join(_FLOATS)}."
            )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"linear_cross_entropy: labels is {labels.dtype}; it must be class numbers, integers."
        )
    if x.ndim < 1 or table.ndim != 2 or table.shape[0] != x.shape[-1]:
        turned = table.ndim == 2 and x.ndim > 0 and table.shape[1] == x.shape[-1]
        raise ValueError(
            f"linear_cross_entropy: table has shape {table.shape} and x {x.shape}; they must be "
            f"[features, vocab] and [..., features].{' Give table.T.' if turned else ''}"
        )
    wants = [("labels", labels, x.shape[:-1]), ("where", where, labels.shape)]
    for name, array, shape in [*wants, ("bias", bias, table.shape[1:])]:
        if array is not None and array.shape != shape:
            raise ValueError(
                f"linear_cross_entropy: {name} has shape {array.shape}; with x {x.shape} and table "
                f"{table.shape} it must be {shape}."
            )
    if where is not None and where.dtype != jnp.bool:
        raise TypeError(
            f"linear_cross_entropy: where is {where.dtype}; it must be bool: give where != 0."
        )


def _check_options(chunks: Any, z_loss: Any, label_smoothing: Any, soft_cap: Any) -> None:
    if chunks != "auto" and not (type(chunks) is int and chunks > 0):
        raise ValueError(
            f"linear_cross_entropy: chunks must be 'auto' or an int of at least 1; got {chunks!r}."
        )
    ranges: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {
        "z_loss": (z_loss, "at least 0", lambda x: x >= 0),
        "label_smoothing": (label_smoothing, "at least 0 and below 1", lambda x: 0 <= x < 1),
        "soft_cap": (1 if soft_cap is None else soft_cap, "above 0", lambda x: x > 0),
    }
    for name, (value, words, is_right) in ranges.items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or not is_right(value):
            raise ValueError(
                f"linear_cross_entropy: {name} must be a number {words}; got {value!r}."
            )
