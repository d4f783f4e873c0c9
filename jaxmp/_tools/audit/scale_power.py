"""The power of the loss scale in a value, by dimensional analysis.

A gradient of a scaled loss has it to the power of 1, since the backward pass is linear; an unscaled
gradient to the power of 0. A value of zeros has any power.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax.extend.core as jex_core

from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.jaxprs.equation_parameters import exponent
from jaxmp._core.jaxprs.primitive_table import Flag, flagged, of_kind

ZEROS: Final = "zeros"
# None: unknown.
Degree = int | typing.Literal["zeros"] | None
# Primitives whose results have the same power as each of their operands.
_LINEAR = flagged(Flag.LINEAR) | of_kind("move")
_PRODUCTS = frozenset(["mul", "integer_pow", "square", "div", *of_kind("compute")])


def of_either(degrees: Iterable[Degree]) -> Degree:
    """Returns the power of a value that is one of several, or their sum.

    Example:
      >>> of_either([1, ZEROS, 1]), of_either([1, 0])
      (1, None)
    """
    several = {degree for degree in degrees if degree != ZEROS}
    if len(several) > 1:
        return None
    return several.pop() if several else ZEROS


def degree_of(eqn: jex_core.JaxprEqn, degrees: Sequence[Degree]) -> Degree:
    """Returns the power of an equation's results, given those of its operands."""
    name = eqn.primitive.name
    if name in _LINEAR:
        # Indices and predicates have no power.
        floating = [d for d, v in zip(degrees, eqn.invars, strict=True) if is_inexact(v.aval)]
        return of_either(floating or degrees)
    if name in _PRODUCTS:
        return _of_product(eqn, degrees)
    return 0 if all(degree in (0, ZEROS) for degree in degrees) else None


def degree_of_literal(value: Any) -> Degree:
    """Returns the power of a number that is written in the program."""
    return 0 if value else ZEROS


def _of_product(eqn: jex_core.JaxprEqn, degrees: Sequence[Degree]) -> Degree:
    known = [degree for degree in degrees if isinstance(degree, int)]
    if len(known) < len(degrees):
        return ZEROS if ZEROS in degrees and None not in degrees else None
    match eqn.primitive.name:
        case "div":
            return known[0] - known[1]
        case "square":
            return 2 * known[0]
        case "integer_pow":
            return exponent(eqn.params) * known[0]
        case _:
            return sum(known)
