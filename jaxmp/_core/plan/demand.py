"""Backward pass of the planner: the demand on each value, that is, what it is wanted for.

A value may be wanted by a contraction (through `promote` and `move` ops), by something that
runs in float32 (a `full_precision` op, an op run as written, the function's result), by both, or
neither; and a float32 value computed from it may be wanted by a contraction later. A value that
becomes an index (it is rounded to whole numbers, or compared with one) is a position. Errors of a
value are amplified if it becomes an angle, the matrix of a linear system, or the operand of a
logarithm or a root near the end of its domain. Only values that the rules govern have a demand:
float32 ones.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.callers import in_associative_scan
from jaxmp._core.jaxprs.compat import dtype_of, variables
from jaxmp._core.jaxprs.dataflow import demand_fixpoint, demanded
from jaxmp._core.jaxprs.equation_parameters import converted_dtype
from jaxmp._core.jaxprs.higher_order import Inner, inside
from jaxmp._core.plan.primitives import (
    AMPLIFYING,
    BOUNDED_DOMAIN,
    COMPARING,
    LOW,
    MOVING,
    POOLING,
    ROUNDING,
)
from jaxmp._core.plan.roots import ITERATED, OTHER, Roots, geometry, roots_of
from jaxmp._core.plan.rules import FLOAT16, Rules, author_keeps, region_rules

# Bits of a demand. OPERAND: a contraction reads the value itself, at most moved. STEEP: a function
# whose domain ends somewhere reads it, such as a logarithm. PRODUCT: some contraction reads a value
# computed from it (tracked under policies with a recipe only). ITERATION: a product goes on from it
# that multiplies one parameter with itself again.
NOTHING, CONTRACTION, FULL, CONTRACTION_LATER, INDEX, ANGLE, OPERAND, STEEP = (
    0,
    1,
    2,
    4,
    8,
    16,
    32,
    64,
)
PRODUCT, ITERATION = 128, 256


class Demand(NamedTuple):
    """The demand on each operand of a jaxpr, `ins`, and on each of its variables, `of`."""

    ins: tuple[int, ...]
    of: dict[Any, int]


class Demands:
    """The demands on variables of jaxprs, computed once per jaxpr and demand on its results."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._cached = functools.cache(self._of)

    def __call__(
        self, jaxpr: Any, outs: Sequence[int], rules: Rules, roots: Sequence[str]
    ) -> Demand:
        """Returns the demand on every variable of a jaxpr.

        Args:
          jaxpr: the jaxpr, open or closed.
          outs: the demand on each result.
          rules: the policy in force.
          roots: the roots of its operands.
        """
        return self._cached(jaxpr, tuple(outs), rules, tuple(roots))

    def _of(self, jaxpr: Any, outs: Sequence[int], rules: Rules, roots: Sequence[str]) -> Demand:
        of: dict[Any, int] = {}
        rooted = self._roots(jaxpr, roots)
        jaxpr = compat.closed(jaxpr).jaxpr
        whole = whole_numbers(jaxpr)

        def want(atom: Any, demand: int) -> None:
            if demand and not isinstance(atom, Literal) and rules.governs(atom):
                of[atom] = of.get(atom, NOTHING) | demand

        for atom, demand in zip(jaxpr.outvars, outs, strict=True):
            want(atom, demand)
        for eqn in reversed(jaxpr.eqns):
            wanted = [of.get(v, NOTHING) for v in eqn.outvars]
            operands = self._of_operands(eqn, wanted, rules, roots_of(eqn.invars, rooted))
            for atom, demand in zip(eqn.invars, operands, strict=True):
                want(atom, demand)
            if is_position(eqn, whole):
                for atom in eqn.invars:
                    want(atom, INDEX)
        return Demand(tuple(of.get(v, NOTHING) for v in jaxpr.invars), of)

    def _of_operands(
        self, eqn: JaxprEqn, wanted: list[int], rules: Rules, roots: Sequence[str]
    ) -> Sequence[int]:
        name = compat.kind(eqn)
        rules = region_rules(eqn, rules) or rules
        if rules.looks_inside(eqn):
            inner = demanded(eqn, wanted, self._inner(rules, roots), operator.or_, NOTHING)
            if inner and any(each.open_ended for each in inside(eqn)):
                return [FULL | demand & PRODUCT for demand in inner]  # its carry is float32
            if inner is not None:
                return inner
        kind = rules.op_class(eqn)
        kept = name in LOW and author_keeps(eqn, rules)
        if kind == "compute" and rules.low is not None and not kept:
            if name in LOW and ITERATED in roots[:2] and OTHER not in roots[:2]:
                return [FULL | ITERATION] * len(eqn.invars)
            exact = name in LOW and geometry(eqn, roots) is not None
            product = NOTHING if rules.policy.matmul is None else PRODUCT
            return [OPERAND | product | (FULL if exact else CONTRACTION)] * len(eqn.invars)
        demand = functools.reduce(operator.or_, wanted, NOTHING)
        combines = kind == "promote" and demand & CONTRACTION and in_associative_scan(eqn)
        if kind in ("promote", "softmax") and not combines:
            demand &= ~OPERAND
        elif kind != "move":
            amplified = name in AMPLIFYING or is_angle(demand)
            here = ANGLE if amplified else FULL | (STEEP if name in BOUNDED_DOMAIN else NOTHING)
            if name in POOLING:
                here |= demand & CONTRACTION
            later = CONTRACTION_LATER if demand & (CONTRACTION | CONTRACTION_LATER) else NOTHING
            demand = here | later | demand & PRODUCT
        found = [demand] * len(eqn.invars)
        if name == "div" and kind == "promote" and rules.low == FLOAT16 and demand & CONTRACTION:
            found[1] = (
                demand & ~CONTRACTION | FULL | CONTRACTION_LATER
            )  # the divisor is read in float32
        return found

    def of_loop(
        self, body: Inner, wanted: Sequence[int], rules: Rules, roots: Sequence[str]
    ) -> Sequence[int]:
        """Returns the demand on the operands of a loop's body, given the roots of the loop's."""
        return demand_fixpoint(body, wanted, self._inner(rules, roots), operator.or_)

    def _inner(
        self, rules: Rules, roots: Sequence[str]
    ) -> Callable[[Inner, Sequence[int]], Sequence[int]]:
        """Returns the map from demands on an inner jaxpr's results to those on its operands."""

        def run(inner: Inner, wanted: Sequence[int]) -> Sequence[int]:
            entering = self._roots.of_operands(inner, roots)
            return self(inner.jaxpr, wanted, rules, entering).ins

        return run


def is_angle(demand: int) -> bool:
    """Returns whether only angles, or a linear solver, want a value directly."""
    return demand & ~(CONTRACTION_LATER | PRODUCT) == ANGLE


def whole_numbers(jaxpr: Any) -> set[Any]:
    """Returns the variables of a jaxpr that are converted integers or an iota, moved or not."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        name, read = eqn.primitive.name, variables(eqn.invars)
        converts = name == "convert_element_type" and np.issubdtype(
            dtype_of(eqn.invars[0]) or bool, np.integer
        )
        moves = name in MOVING and bool(read) and all(v in found for v in read)
        if name == "iota" or converts or moves:
            found.update(eqn.outvars)
    return found


def is_position(eqn: JaxprEqn, whole: set[Any]) -> bool:
    """Returns whether an equation makes an index of its operand, or compares it with one."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return np.issubdtype(converted_dtype(eqn), np.integer)
    if name in COMPARING:
        return not whole.isdisjoint(variables(eqn.invars))
    return name in ROUNDING
