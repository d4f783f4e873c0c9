"""Calibration: a function is run on a few batches, and weights are rounded for what it computes."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.compat import closed, shape_of, without_consts
from jaxmp._core.jaxprs.primitive_table import Flag, flagged
from jaxmp._core.jaxprs.trace import holds_modules, is_array, name_of, trace
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.products.scaled import Scaled, scale_of
from jaxmp._core.quantize.gptq import round_for, shrunk
from jaxmp._core.quantize.moments import Gatherer
from jaxmp._core.quantize.reads import Moments, by_weight
from jaxmp.formats import Format

# Where the head is tied, a row of a table is read by a product with the last layer's results, and
# by lookups, whose errors later layers read.
_LOOKED_UP = flagged(Flag.LOOKING_UP) | {"dynamic_slice"}
_NAMED = 5  # of the weights that are not calibrated


class ToRound(NamedTuple):
    """A weight that is to be rounded.

    Attributes:
      path: its path, for messages.
      array: the weight.
      format: the format that it is rounded to.
      counts: the shape of its scales.
      activations: the format of its inputs, if their range is to be stored with it.
    """

    path: str
    array: Any
    format: Format
    counts: tuple[int, ...]
    activations: Format | None = None


class Calibrated(NamedTuple):
    """What calibration found for a weight.

    Attributes:
      rounded: its values and scales; None if it is rounded as without calibration.
      input_scale: the scale of its inputs, float32, of as many axes as the weight, each as long as
        the weight's or 1; None if they are scaled as they come.
    """

    rounded: Scaled | None
    input_scale: Any


def calibrated(
    calibrate: Any, selected: Sequence[ToRound], placed: Callable[[Sequence[Any]], Any]
) -> list[Calibrated]:
    """Rounds weights for the inputs that a function multiplies them by.

    Args:
      calibrate: a function of parameters and a batch, and an iterable of batches.
      selected: the weights.
      placed: returns the parameters with other arrays in place of the weights.

    Returns:
      What is known of each. One warning names those that are rounded as without calibration.

    Raises:
      TypeError: if `calibrate` is something else, or a weight is traced or abstract.
      ValueError: if there is no batch, one has another shape than the first, an input is not
        finite, or the function multiplies by none of the weights.
    """
    fn, batches = _pair(calibrate)
    for weight in selected:
        _check_concrete(weight)
    arrays = [jnp.asarray(weight.array) for weight in selected]
    found, gradients, others = _moments(fn, batches, arrays, placed)
    results: list[Calibrated] = []
    why: dict[str, str] = {}
    for i, weight in enumerate(selected):
        moments, path = found.get(i, []), weight.path
        if others.get(i, set()) & _LOOKED_UP:
            moments = [_with_lookups(one, gradients.get((i, one.contracted))) for one in moments]
        for one in moments:
            if not bool(jnp.isfinite(one.array).all()):
                raise ValueError(
                    f"quantize: calibrate: inputs that {name_of(fn)} multiplies by {path} are not "
                    "finite, or their squares are beyond float32's range: look for it with "
                    "jaxmp.diagnose, or leave such batches out."
                )
        rounded = _rounded(weight, moments[0]) if len(moments) == 1 else None
        if not moments:
            read = ", ".join(sorted(others.get(i, ())))
            why[path] = f"read by {read}" if read else "not read"
        elif len(moments) > 1:
            why[path] = "multiplied along several axes"
        elif rounded is None:
            why[path] = "with scales that several products share"
        results.append(Calibrated(rounded, _input_scale(weight, moments)))
    if not any(one.rounded for one in results):
        raise ValueError(
            f"quantize: calibrate: {name_of(fn)} multiplies by none of the weights that are "
            f"quantized: {_listed(why)}. Give a function of the parameters and a batch that runs "
            "the model: (lambda params, batch: model.apply(params, batch), batches)."
        )
    if why:
        warnings.warn(
            f"quantize: rounded to the nearest, without calibration: {_listed(why)}.",
            UserWarning,
            stacklevel=3,
        )
    return results


def _input_scale(weight: ToRound, moments: Sequence[Moments]) -> Any:
    """Returns the scale that brings the largest of a weight's inputs into range, if asked for.

    The largest: where 4 of 512 columns are a hundred times the others, a product in int8 is 9.4 %
    off by it, 8.6 % by the percentile 99.99 and 21 % by 99.9, which clips the columns.
    """
    if weight.activations is None or len(moments) != 1:
        return None
    [one] = moments
    shape = weight.array.shape
    counts = [size if axis in one.batch else 1 for axis, size in enumerate(shape)]
    return scale_of(one.largest, weight.activations).reshape(counts)


def _with_lookups(moments: Moments, gradients: Any) -> Moments:
    """Adds those of a table's lookups, as much again: by its gradients, or in all directions.

    A loss of tokens depends on errors of its logits by the probabilities of tokens, and on those of
    a row as often as that is looked up, which are about as large: so one matrix is for all rows.
    """
    size = moments.array.shape[-1]
    shape = jnp.eye(size)
    if gradients is not None and bool(jnp.isfinite(gradients).all() & (jnp.trace(gradients) > 0)):
        shape = gradients / jnp.trace(gradients) * size
    mean = jnp.trace(moments.array, axis1=-2, axis2=-1)[:, None, None] / size
    return moments._replace(array=moments.array + mean * shape)


def _listed(why: Mapping[str, str]) -> str:
    shown = [f"{path} ({reason})" for path, reason in [*why.items()][:_NAMED]]
    more = len(why) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def _pair(calibrate: Any) -> tuple[Callable[..., Any], Iterable[Any]]:
    """Returns a function and batches, or raises."""
    is_pair = isinstance(calibrate, (tuple, list)) and len(calibrate) == 2
    if not is_pair or not callable(calibrate[0]):
        kind = type(calibrate).__name__
        got = (
            [type(x).__name__ for x in calibrate] if isinstance(calibrate, (tuple, list)) else kind
        )
        raise TypeError(
            "quantize: calibrate is a pair of a function of the parameters and a batch, and the "
            f"batches: (fn, batches); got {got}."
        )
    fn, batches = calibrate
    if is_array(batches) or isinstance(batches, (Mapping, str)) or not hasattr(batches, "__iter__"):
        raise TypeError(
            "quantize: calibrate's batches are an iterable, such as a list, of what is given to "
            f"the function one by one; got {type(batches).__name__!r}: give [batch] for one batch."
        )
    return fn, batches


def _check_concrete(weight: ToRound) -> None:
    if is_tracer(weight.array) or isinstance(weight.array, jax.ShapeDtypeStruct):
        kind = "traced" if is_tracer(weight.array) else "a shape without numbers"
        raise TypeError(
            "quantize: calibrate runs its function on the weights, and "
            f"{weight.path or 'the leaf'} is {kind}: call quantize with arrays, outside of jax.jit."
        )


def _moments(
    fn: Callable[..., Any],
    batches: Iterable[Any],
    weights: list[Any],
    placed: Callable[[Sequence[Any]], Any],
) -> tuple[dict[int, list[Moments]], dict[Any, Any], Mapping[int, set[str]]]:
    """Runs a function on batches; returns the moments of each weight, and its other readers.

    Between them, moments of the gradients of a loss with respect to rows of a table, by the number
    of that weight and the axes of a row.
    """
    gatherer = Gatherer()
    first: Any = None
    program: Any = None
    consts: list[Any] = []
    sums: Any = None

    def of_weights(weights: list[Any], batch: Any) -> Any:
        params = placed(weights)
        # Modules that may be changed, by averages of a BatchNorm for one, in this trace.
        return fn(nnx.clone(params) if holds_modules(params) else params, batch)

    @functools.partial(jax.jit, donate_argnums=0)
    def merge(old: Any, new: Any) -> Any:
        return gatherer.merged(old[0], new[0]), jax.tree.map(jnp.add, old[1], new[1])

    of_weights.__name__ = name_of(fn)
    for number, batch in enumerate(batches):
        if number == 0:
            first = batch
            # Constants, such as weights that stay as they are, are arguments of what is compiled.
            jaxpr, consts = without_consts(trace(of_weights, (weights, batch), {}).jaxpr)
            places = range(len(consts), len(consts) + len(weights))
            program = _program(gatherer, jaxpr, places)
        else:
            _check_alike(number, first, batch)
        arrays = filter(is_array, jax.tree.leaves(batch))
        new = program(*consts, *weights, *arrays)
        sums = new if sums is None else merge(sums, new)
    if sums is None:
        raise ValueError(
            "quantize: calibrate's batches are empty: give one or more. An iterator that was used "
            "up before gives none."
        )
    moments, of_gradients = sums
    reads = {name: lookup.read for name, lookup in gatherer.lookups.items()}
    gradients = {
        (weight, one.contracted): one.array[0]
        for weight, several in by_weight(reads, of_gradients).items()
        for one in several
    }
    return by_weight(gatherer.reads, moments), gradients, gatherer.others


def _program(gatherer: Gatherer, jaxpr: Any, weights: range) -> Callable[..., Any]:
    """Returns a compiled function of the operands of a program, with the moments of a run.

    Those of gradients as well, if the program returns a loss, and can be differentiated.
    """
    outs = closed(jaxpr).jaxpr.outvars
    alone = len(outs) == 1 and shape_of(outs[0]) == ()
    floating = alone and jnp.issubdtype(outs[0].aval.dtype, jnp.floating)
    loops = (eqn.primitive.name == "while" for eqn in equations(closed(jaxpr).jaxpr.eqns))
    if floating and not any(loops):
        return jax.jit(lambda *arrays: gatherer.run_loss(jaxpr, arrays, weights))
    return jax.jit(lambda *arrays: (gatherer.run(jaxpr, arrays, weights), {}))


def _check_alike(number: int, first: Any, batch: Any) -> None:
    """Raises unless a batch has the structure, shapes and dtypes of the first."""
    olds, old_tree = jax.tree_util.tree_flatten_with_path(first)
    news, tree = jax.tree_util.tree_flatten_with_path(batch)
    if [path for path, _ in olds] != [path for path, _ in news]:
        raise ValueError(
            f"quantize: calibrate's batch {number} is a {tree}, and the first is a {old_tree}: "
            "give all the same structure."
        )
    for (path, old), (_, new) in zip(olds, news, strict=True):
        kinds = [_kind(x) for x in (new, old)]
        if kinds[0] != kinds[1]:
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"quantize: calibrate's batch {number}{f' at {where}' if where else ''} is "
                f"{kinds[0]}, and the first is {kinds[1]}: give batches of one shape, without a "
                "shorter last one."
            )


def _kind(leaf: Any) -> Any:
    """Returns the dtype and shape of an array; of anything else, its `repr`."""
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf)


def _rounded(weight: ToRound, moments: Moments) -> Scaled | None:
    """Rounds a weight; returns None if scales are shared along an axis of several moments."""
    array, shape, counts = _on_one_device(weight.array), weight.array.shape, weight.counts
    batch, contracted, found = moments.batch, moments.contracted, _on_one_device(moments.array)
    if any(counts[a] != shape[a] for a in batch):
        return None

    def shared(axis: int) -> int:
        return 0 if counts[axis] == shape[axis] else 2 if counts[axis] == 1 else 1

    # What shares a scale has to be a part of a row or column of the matrix: whole axes last.
    rows = sorted(contracted, key=shared)
    columns = sorted({*range(array.ndim)} - {*batch, *contracted}, key=lambda a: (shared(a), a))
    order = (*batch, *rows, *columns)
    size, into, out = (math.prod(shape[a] for a in axes) for axes in (batch, rows, columns))
    blocks = (
        into // math.prod(counts[a] for a in rows),
        out // math.prod(counts[a] for a in columns),
    )
    by_axis = found.reshape(-1, *[shape[a] for a in contracted] * 2)
    ahead = [1 + contracted.index(a) for a in rows]
    by_axis = jnp.transpose(by_axis, (0, *ahead, *(i + len(rows) for i in ahead)))
    matrices = jnp.transpose(array, order).reshape(size, into, out).astype(jnp.float32)
    by_axis = by_axis.reshape(size, into, into)
    count = _on_one_device(moments.count)
    values, scale = _each(matrices, by_axis, count, weight.format, blocks)
    back = [order.index(a) for a in range(array.ndim)]
    values = jnp.transpose(values.reshape([shape[a] for a in order]), back)
    return Scaled(values, jnp.transpose(scale.reshape([counts[a] for a in order]), back))


def _on_one_device(x: Any) -> jax.Array:
    """Gathers what is sharded: rows are rounded one by one."""
    sharded = isinstance(getattr(x, "sharding", None), NamedSharding) and x.is_fully_addressable
    return jnp.asarray(np.asarray(x) if sharded else x)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _each(weights: Any, moments: Any, count: Any, fmt: Format, block: tuple[int, int]) -> Scaled:
    def one(each: tuple[Any, Any, Any]) -> Any:
        w, moments, count = each
        return round_for(w, shrunk(moments, count), fmt=fmt, block=block)

    rounded: Scaled = lax.map(one, (weights, moments, count))
    return rounded
