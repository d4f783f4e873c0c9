"""Tables are looked up before they are dequantised: the rows that are read, and no others.

XLA dequantises a table as a whole where a product reads it too (a tied head), and on TPU always.
The values are the same either way: a lookup takes whole rows, with the scales that they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import in_context, jitted_name, looked_up, widens_8_bits
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.scopes import DEQUANTISE, ROWS
from jaxmp._jaxprs.source import in_scope
from jaxmp.quantized import QuantizedArray


def rows_first(jaxpr: Any) -> Any:
    """A closed jaxpr that computes the same, but dequantises only the rows that it looks up.

    That holds outside of loops, where the tables of most models are read.
    """
    opened, consts = compat.closed(jaxpr)
    if not any(widens_8_bits(eqn) and is_dequantising(eqn) for eqn in opened.eqns):
        return jaxpr
    return compat.trace(
        lambda *args: _run(opened, consts, args, {}), [v.aval for v in opened.invars]
    )


def is_dequantising(eqn: JaxprEqn) -> bool:
    """Whether an equation is part of turning a quantised weight into an array."""
    return in_scope(eqn, DEQUANTISE)


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], given: Mapping[Any, QuantizedArray]
) -> list[Any]:
    """The results of an open jaxpr; `given` are the operands that are dequantised weights."""
    variables = (*jaxpr.constvars, *jaxpr.invars)
    env: dict[Any, Any] = dict(zip(variables, (*consts, *args), strict=True))
    tables = dict(given)
    made_of: dict[Any, tuple[Any, ...]] = {}  # dequantised weights → the variables they are from

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        known = [None if isinstance(v, Literal) else tables.get(v) for v in eqn.invars]
        with compat.source_of(eqn), in_context(eqn):
            outs = None
            if any(known) and not is_dequantising(eqn):
                outs = _of_table(eqn, operands, known)
            outs = compat.bind(eqn, operands) if outs is None else outs
        env.update(zip(eqn.outvars, outs, strict=True))
        if is_dequantising(eqn):
            atoms = [v for v in eqn.invars if not isinstance(v, Literal)]
            origins = tuple(dict.fromkeys(o for v in atoms for o in made_of.get(v, (v,))))
            made_of.update(dict.fromkeys(eqn.outvars, origins))
            weight = _weight(eqn, [env[o] for o in origins])
            if weight is not None:
                tables[eqn.outvars[0]] = weight
    return [read(v) for v in jaxpr.outvars]


def _weight(eqn: JaxprEqn, arrays: Sequence[Any]) -> QuantizedArray | None:
    """What an equation dequantises, if its result is made of these arrays and is whole."""
    shape = compat.shape_of(eqn.outvars[0])
    if len(arrays) != 2 or any(len(np.shape(a)) != len(shape) for a in arrays):
        return None
    scale, values = sorted(arrays, key=lambda a: a.dtype == np.float32, reverse=True)
    if values.shape != shape or scale.dtype != np.float32 or values.dtype.itemsize > 1:
        return None
    return QuantizedArray(values, scale, np.dtype(compat.dtype_of(eqn.outvars[0]) or np.float32))


def _of_table(
    eqn: JaxprEqn, operands: Sequence[Any], known: Sequence[QuantizedArray | None]
) -> list[Any] | None:
    """The results of an equation that looks a dequantised table up, or None for any other."""
    table = known[0]
    if eqn.primitive.name == "gather" and table is not None:
        return _rows(eqn, table, operands[1])
    name = jitted_name(eqn)
    if not name.startswith("_take"):  # `jnp.take`, which is not inlined
        return None
    [call] = inside(eqn)
    inner, consts = compat.closed(call.jaxpr)
    given = {v: t for v, t in zip(inner.invars, known, strict=True) if t is not None}
    return _run(inner, consts, operands, given)


def _rows(eqn: JaxprEqn, table: QuantizedArray, indices: Any) -> list[Any] | None:
    """The rows that a gather takes of a table, dequantised; None if they are not whole."""
    axes, sizes = looked_up(eqn)
    of_scale = []
    for i, (size, length, groups) in enumerate(
        zip(sizes, table.shape, table.scale.shape, strict=True)
    ):
        if groups == length:
            of_scale.append(size)
        elif i not in axes and size == length:
            of_scale.append(groups)
        else:
            return None
    # Beyond the end of the table is what is asked for there: 1 times that.
    [values] = compat.bind(eqn, [table.values, indices], fill_value=1)
    [scale] = compat.bind(eqn, [table.scale, indices], slice_sizes=tuple(of_scale))
    with jax.named_scope(ROWS):
        return [QuantizedArray(values, scale, table.dtype).dequantize()]
