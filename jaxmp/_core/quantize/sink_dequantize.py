"""Dequantization as late as possible: of rows of a table, slices of a stack, and inside loops.

XLA dequantizes a table as a whole where a product reads it too (a tied head), and on TPU always;
and the weights that a loop reads, before the loop. The values are the same either way: a part of a
weight keeps its scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import explicit_sharding, filled, in_context
from jaxmp._core.jaxprs.callers import is_take
from jaxmp._core.jaxprs.equation_parameters import gather, widens_8_bits
from jaxmp._core.jaxprs.higher_order import inside, rebuild
from jaxmp._core.jaxprs.scopes import DEQUANTIZE, ROWS
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.quantized_array import QuantizedArray, array_of, is_quantized
from jaxmp._core.quantized_parts import parts_of

Known = Sequence[QuantizedArray | None]

# The primitives that take a part, and their parameters that say which part.
_SLICED: Final = {
    "slice": ("start_indices", "limit_indices", "strides"),
    "dynamic_slice": ("slice_sizes",),
}
# The primitives that are bound again with extra operands, which all their jaxprs share.
_SHARING: Final = frozenset({"cond", "jit", "remat2"})


def sink_dequantize(jaxpr: Any) -> Any:
    """Returns an equivalent closed jaxpr that dequantizes only what it reads, where it reads it.

    Of a table, the rows that it looks up; of stacked weights, the slice that it takes. The weights
    that a loop, branch, checkpoint or jitted function reads are dequantized inside.
    """
    opened, consts = compat.closed(jaxpr)
    if not any(widens_8_bits(eqn) and is_dequantizing(eqn) for eqn in opened.eqns):
        return jaxpr
    return compat.trace(lambda *args: _run(opened, consts, args), [v.aval for v in opened.invars])


def is_dequantizing(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is part of the dequantization of a weight."""
    return in_scope(eqn, DEQUANTIZE)


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], given: Known | None = None
) -> list[Any]:
    """Evaluates an open jaxpr, dequantizing weights where they are read; returns its results.

    Args:
      jaxpr: the jaxpr.
      consts: its constants.
      args: its operands; None where one is a weight in `given`.
      given: for each operand the quantized weight that it stands for, or None.
    """
    variables = (*jaxpr.constvars, *jaxpr.invars)
    env: dict[Any, Any] = dict(zip(variables, (*consts, *args), strict=True))
    tables = {v: q for v, q in zip(jaxpr.invars, given or [None] * len(args), strict=True) if q}
    # Dequantized where they are read, and never if they are not.
    later: dict[Any, Callable[[], list[Any]]] = {v: _of(q) for v, q in tables.items()}
    made_of: dict[Any, tuple[Any, ...]] = {}  # dequantized weights → the variables they are from

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom in later:
            [env[atom]] = later.pop(atom)()
        return env[atom]

    def bound(eqn: JaxprEqn) -> list[Any]:
        operands = [read(v) for v in eqn.invars]
        with compat.source_of(eqn), in_context(eqn):
            return compat.bind(eqn, operands)

    for eqn in jaxpr.eqns:
        if is_dequantizing(eqn) and len(eqn.outvars) == 1:
            atoms = [v for v in eqn.invars if not isinstance(v, Literal)]
            origins = tuple(dict.fromkeys(o for v in atoms for o in made_of.get(v, (v,))))
            [out] = eqn.outvars
            made_of[out], later[out] = origins, functools.partial(bound, eqn)
            weight = _weight(eqn, [read(o) for o in origins])
            if weight is not None:
                tables[out] = weight
            continue
        known = [None if isinstance(v, Literal) else tables.get(v) for v in eqn.invars]
        outs = None
        if any(known):
            operands = [None if q else read(v) for v, q in zip(eqn.invars, known, strict=True)]
            with compat.source_of(eqn), in_context(eqn):
                outs = _of_weights(eqn, operands, known)
        if isinstance(outs, QuantizedArray):
            tables[eqn.outvars[0]], later[eqn.outvars[0]] = outs, _of(outs)
        else:
            env.update(zip(eqn.outvars, bound(eqn) if outs is None else outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _of(stored: QuantizedArray) -> Callable[[], list[Any]]:
    return lambda: [array_of(stored)]


def _weight(eqn: JaxprEqn, arrays: Sequence[Any]) -> QuantizedArray | None:
    """Returns the quantized weight of these arrays if an equation dequantizes all of it."""
    shape = compat.shape_of(eqn.outvars[0])
    parts = parts_of(arrays, lambda a: a.dtype)
    if parts is None or any(len(np.shape(a)) != len(shape) for a in arrays):
        return None
    if parts.values.shape != shape:
        return None
    dtype = np.dtype(compat.dtype_of(eqn.outvars[0]) or np.float32)
    values, scale, master, known = parts
    return QuantizedArray(values, scale, dtype, master=master, input_scale=known)


def _of_weights(
    eqn: JaxprEqn, operands: Sequence[Any], known: Known
) -> list[Any] | QuantizedArray | None:
    """Returns the results of an equation that takes a part of a weight, or reads one inside.

    A `QuantizedArray` is its only result, as it is stored; None: it reads the weight as a whole.
    """
    weight = known[0]
    if eqn.primitive.name == "gather" and weight is not None:
        return _rows(eqn, weight, operands[1])
    if weight is not None and (part := _part(eqn, weight, operands[1:])) is not None:
        return part
    if not is_take(eqn):  # which is not inlined
        return _inside(eqn, operands, known)
    [call] = inside(eqn)
    inner, consts = compat.closed(call.jaxpr)
    return _run(inner, consts, operands, known)


def _part(eqn: JaxprEqn, table: QuantizedArray, starts: Sequence[Any]) -> QuantizedArray | None:
    """Returns what a slice or squeeze takes of a weight, as it is stored; None if it cannot be."""
    name = eqn.primitive.name
    if name == "squeeze":
        squeezed: QuantizedArray = jax.tree.map(lambda x: compat.bind(eqn, [x])[0], table)
        return squeezed
    if name not in _SLICED:
        return None
    sizes = compat.shape_of(eqn.outvars[0])
    split = [groups not in (1, n) for groups, n in zip(table.scale.shape, table.shape, strict=True)]
    if any(s and size != n for s, size, n in zip(split, sizes, table.shape, strict=True)):
        return None
    said = {key: eqn.params[key] for key in _SLICED[name]}
    strides = said.get("strides", 1) or 1

    def of_scale(scale: Any) -> Any:
        # Along an axis with one scale per index, scales are sliced like values; else all are taken.
        alike, groups = np.equal(scale.shape, table.shape), scale.shape
        params = {
            "slice_sizes": np.where(alike, sizes, groups),  # starts are clamped to fit
            "start_indices": np.where(alike, said.get("start_indices", 0), 0),
            "limit_indices": np.where(alike, said.get("limit_indices", 0), groups),
            "strides": np.where(alike, strides, 1),
        }
        params = {key: tuple(params[key].tolist()) for key in said}
        return compat.bind(eqn, [scale, *starts], **params)[0]

    known = None if table.input_scale is None else of_scale(table.input_scale)
    part = _with_scale(table, lambda x: compat.bind(eqn, [x, *starts])[0], of_scale(table.scale))
    return dataclasses.replace(part, input_scale=known)


def _rows(eqn: JaxprEqn, table: QuantizedArray, indices: Any) -> list[Any] | None:
    """Returns the rows that a gather takes of a table, dequantized; None if they are not whole."""
    rows = gather(eqn)
    of_scale = []
    for i, (size, length, groups) in enumerate(
        zip(rows.sizes, table.shape, table.scale.shape, strict=True)
    ):
        if groups == length:
            of_scale.append(size)
        elif i not in (*rows.axes, *rows.shared) and size == length:
            of_scale.append(groups)
        else:
            return None
    # Out of bounds, the result is the fill value of the gather: 1 times that.
    [scale] = compat.bind(eqn, [table.scale, indices], slice_sizes=tuple(of_scale))
    taken = _with_scale(table, lambda x: compat.bind(eqn, [x, indices], fill_value=1)[0], scale)
    with jax.named_scope(ROWS):
        return [array_of(taken)]


def _with_scale(table: QuantizedArray, taken: Callable[[Any], Any], scale: Any) -> QuantizedArray:
    """Returns a part of a weight: of its values, and of its master if it is trained."""
    master = None if table.master is None else taken(table.master)
    return QuantizedArray(taken(table.values), scale, table.dtype, table.stored, master)


def _inside(eqn: JaxprEqn, operands: Sequence[Any], known: Known) -> list[Any] | None:
    """Runs an equation whose inner jaxprs dequantize the weights that they read.

    Dequantized before a loop, a stack of layers would be in 16 bits as a whole while it runs.

    Args:
      eqn: the equation.
      operands: its operands; None for a weight.
      known: for each operand, the weight that it stands for; None for others.

    Returns:
      Its results; None where it has no jaxprs, or they do not get a weight as it is stored.
    """
    kind = compat.kind(eqn)
    stored = [x if q is None else q for x, q in zip(operands, known, strict=True)]
    if kind == "scan":
        return _scan(eqn, stored)
    if kind == "while":
        return _while(eqn, stored)
    return _sharing(eqn, stored) if kind in _SHARING else None


def _body(jaxpr: Any) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function of its operands, some of them weights as they are stored."""
    opened, consts = compat.closed(jaxpr)

    def body(*operands: Any) -> list[Any]:
        known = [x if is_quantized(x) else None for x in operands]
        return _run(opened, consts, [None if is_quantized(x) else x for x in operands], known)

    return body


def _array(x: Any) -> Any:
    return array_of(x) if is_quantized(x) else x


def _scan(eqn: JaxprEqn, stored: Sequence[Any]) -> list[Any] | None:
    """Runs a scan whose iterations get their slice of a stack's values and scales."""
    n_consts, n_carry = compat.scan_split(eqn)
    first = n_consts + n_carry
    consts, carry = stored[:n_consts], list(map(_array, stored[n_consts:first]))
    slices = [x if _sliced_alike(x) else _array(x) for x in stored[first:]]
    if not any(map(is_quantized, (*consts, *slices))):
        return None
    body = _body(inside(eqn)[0].jaxpr)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*consts, *carry, *slices)
        return results[:n_carry], results[n_carry:]

    carry, stacked = lax.scan(step, carry, slices, **compat.scan_options(eqn))
    return [*carry, *stacked]


def _sliced_alike(x: Any) -> bool:
    """Returns whether slices along the first axis have their own scales, if they have any."""
    scales = (x.scale, x.input_scale) if is_quantized(x) else ()
    return all(scale is None or scale.shape[0] == x.shape[0] for scale in scales)


def _while(eqn: JaxprEqn, stored: Sequence[Any]) -> list[Any] | None:
    test, body = inside(eqn)
    n_test, n_body = test.shared or 0, body.shared or 0
    given, start = stored[: n_test + n_body], list(map(_array, stored[n_test + n_body :]))
    if not any(map(is_quantized, given)):
        return None
    goes_on, step = _body(test.jaxpr), _body(body.jaxpr)
    return list(
        lax.while_loop(
            lambda carry: goes_on(*given[:n_test], *carry)[0],
            lambda carry: step(*given[n_test:], *carry),
            start,
        )
    )


def _sharing(eqn: JaxprEqn, stored: Sequence[Any]) -> list[Any] | None:
    """Rebinds an equation with the weights as extra operands, and unread zeros in their place."""
    extra = {i: q for i, q in enumerate(stored) if is_quantized(q)}
    if any(explicit_sharding(eqn.invars[i]) for i in extra):
        return None
    operands = [filled(v.aval, 0) if i in extra else stored[i] for i, v in enumerate(eqn.invars)]

    def of(inner: Any) -> Any:
        body = _body(inner.jaxpr)

        def replaced(weights: Sequence[Any], *arrays: Any) -> tuple[list[Any], dict[str, Any]]:
            given = dict(zip(extra, weights, strict=True))
            pairs = zip(inner.operands, arrays, strict=True)
            return body(*(given.get(i, x) for i, x in pairs)), {}

        return replaced

    replacements = [of(inner) for inner in inside(eqn)]
    flat, tree = jax.tree.flatten(list(extra.values()))
    unflat = [
        lambda parts, *arrays, r=r: r(jax.tree.unflatten(tree, parts), *arrays)
        for r in replacements
    ]
    return rebuild(eqn, operands, unflat, flat)[0]
