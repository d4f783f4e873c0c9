"""The entry of an equation in a lock: the kind of operation, and its dtypes in words.

The primitives that a function consists of, and their number, change from one JAX to the next. So
a lock counts what is written out (products, casts, collectives), and of all other operations
records only the dtypes that occur, by kind.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxmp._audit.place import float32_region
from jaxmp._autocast.annotations import kept_at
from jaxmp._autocast.primitives import CALLED, LOW
from jaxmp._autocast.rules import author_keeps
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs.attributes import is_inexact
from jaxmp._jaxprs.compat import called, dtype_of
from jaxmp._jaxprs.equation_parameters import precision
from jaxmp._jaxprs.place import Place
from jaxmp._jaxprs.primitive_table import TABLE, Flag, flagged, of_kind

PRODUCTS = {
    "dot_general": "matmul",
    "conv_general_dilated": "conv",
    "ragged_dot_general": "ragged_matmul",
}
CASTS, COLLECTIVES, SAVED, SUMS = "casts", "collectives", "saved", "sums"
COUNTED = frozenset({*PRODUCTS.values(), CASTS, COLLECTIVES})

# Primitive → the name of the JAX function that binds it.
_COLLECTIVES = {
    **{name: name for name in (*flagged(Flag.SENDING), "psum", "pmax", "pmin", "all_gather")},
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "psum_scatter",
    **dict.fromkeys(CALLED["psum"], "psum"),
    **dict.fromkeys(CALLED["all_gather"], "all_gather"),
    **dict.fromkeys(CALLED["reduce_scatter"], "psum_scatter"),
}
_SUMS = flagged(Flag.SUMMING | Flag.STATISTIC | Flag.CUMULATIVE | Flag.POOLING)
_SUMS = (_SUMS & of_kind("full_precision")) | {"reduce_window_sum", "select_and_scatter_add"}
_FUNCTIONS = (
    (of_kind("full_precision") - _SUMS - {"reduce_precision"}) | flagged(Flag.SOLVING) | {"fft"}
)
_ARITHMETIC = of_kind("promote") - flagged(Flag.MOVING | Flag.JOINING)


def of_equation(eqn: JaxprEqn, place: Place) -> tuple[str, str] | None:
    """Returns the kind of an equation, and what it does in words; None if a lock omits it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((2, 2), jnp.bfloat16)
      >>> [eqn] = jax.make_jaxpr(lambda x: x @ x)(x).jaxpr.eqns
      >>> of_equation(eqn, Place())
      ('matmul', 'bfloat16*bfloat16 -> bfloat16')
    """
    name = eqn.primitive.name
    ins, outs = ([str(v.aval.dtype) for v in vs if is_inexact(v.aval)] for vs in _atoms(eqn))
    if name in LOW:
        said = f"{'*'.join(str(dtype_of(v)) for v in eqn.invars[:2])} -> {dtype_of(eqn.outvars[0])}"
        return PRODUCTS[name], said + _precision(eqn) + _reason(eqn, place)
    if name == "convert_element_type":
        return (CASTS, f"{ins[0]} -> {outs[0]}") if ins and outs and ins != outs else None
    if name == "reduce_precision" and ins:
        bits, kept = eqn.params, jnp.finfo(ins[0])
        lossy = bits["exponent_bits"] < kept.nexp or bits["mantissa_bits"] < kept.nmant
        to = f"e{bits['exponent_bits']}m{bits['mantissa_bits']}"
        return (CASTS, f"{ins[0]} -> {to}") if lossy else None
    if name in _COLLECTIVES:
        return (COLLECTIVES, f"{_COLLECTIVES[name]} {ins[0]}") if ins else None
    if not outs:
        return None
    for kind, names in ((SUMS, _SUMS), ("functions", _FUNCTIONS), ("arithmetic", _ARITHMETIC)):
        if name in names:
            return kind, outs[0]
    if name in TABLE or not ins:
        return None
    return "kernels", f"{called(eqn)} {'*'.join(dict.fromkeys(ins))} -> {outs[0]}"


def count(eqn: JaxprEqn) -> int:
    """Returns how many operations an equation counts as: a collective, one per floating operand."""
    if eqn.primitive.name not in _COLLECTIVES:
        return 1
    return sum(is_inexact(v.aval) for v in eqn.invars)


def _atoms(eqn: JaxprEqn) -> tuple[Any, Any]:
    return eqn.invars, eqn.outvars


def _precision(eqn: JaxprEqn) -> str:
    """Returns the precision, or the preset with its accumulation dtype, that a product asks for."""
    asked = precision(eqn)
    several = asked if isinstance(asked, tuple) else (asked,)
    names = dict.fromkeys(str(getattr(p, "name", p)) for p in several if p is not None)
    return "".join(f", precision={name}" for name in names if name != "DEFAULT")


def _reason(eqn: JaxprEqn, place: Place) -> str:
    """Returns why a product is float32, in parentheses, if a policy or the author asks for it."""
    if "float32" not in map(str, map(dtype_of, eqn.invars[:2])):
        return ""
    region, kept = float32_region(place), place.first(kept_at)
    why = kept.kind if kept else None
    if why is None and region is not None:
        why = region.why_float32 or Kind.REGION
    if why is None and (asked := author_keeps(eqn)) is not None:
        why = asked.kind
    return f" ({why.name.lower()})" if why else ""
