"""Decisions on `promote` ops: elementwise arithmetic of low and float32 operands.

With a low operand it runs low if a contraction wants the result, unless a float32 one blocks that:
see `provenance`. With float32 operands alone, only from a normalization towards a contraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxmp._core.decide.frame import Decision, Facts
from jaxmp._core.execute.bind import Bind, Dot, Scale
from jaxmp._core.jaxprs.callers import in_associative_scan
from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.plan.demand import ANGLE, CONTRACTION, FULL, INDEX, OPERAND, STEEP
from jaxmp._core.plan.plan import NO_ORIGINS, OriginId, Value, dtypes_of
from jaxmp._core.plan.primitives import AFFINE, CHOOSING, LOW, NORMALIZING, SCALING
from jaxmp._core.plan.provenance import (
    COMPUTED,
    CONSTANT,
    DATA,
    LARGE,
    PARAMETER,
    SHARED,
    is_exact,
    joined,
)
from jaxmp._core.plan.rules import FLOAT16
from jaxmp._core.plan.why import Kind, Why


def follow(facts: Facts, *, exponential: bool = False) -> Decision:
    """Decides an elementwise op; `exponential`: one of a softmax that may run low."""
    eqn, rules = facts.eqn, facts.rules
    mine = [v for v in facts.used if v is not None]
    low = [v for v in mine if v.dtype is not None]
    full = [v for v in mine if v.dtype is None]
    name = "mul" if eqn.primitive.name in LOW else eqn.primitive.name
    if not facts.frame.summed.isdisjoint(eqn.outvars):
        return Decision(Kind.SUMMED.of())
    if low and in_associative_scan(eqn):
        return Decision(Kind.RECURRENCE.of())
    chooses = name in CHOOSING and low and all(v.dtype or v.constant for v in mine)
    if not chooses:
        if facts.is_wanted_by(INDEX):
            return Decision(Kind.POSITION.of())
        if not facts.is_wanted_by(CONTRACTION):
            return Decision(Kind.FLOAT32_READERS.of())
    if not low:
        decision = _in_full(facts, name, full)
        if decision is not None:
            return decision
        why = Kind.LEAVES_NORMALIZATION
    else:
        refusal = _refusal(facts, name, low, full)
        divisor = facts.values[1] if name == "div" else None
        if rules.low == FLOAT16 and divisor and divisor.dtype:
            refusal = Kind.DIVIDES, COMPUTED
        if refusal is not None:
            why, provenance = refusal
            return Decision(why.of(), provenance=provenance)
        provenances = {v.provenance for v in full}
        narrowed = (kind for each, kind in _NARROWABLE.items() if each in provenances)
        why = Kind.CHOOSES if chooses else next(narrowed, Kind.LOW)
    literal = _out_of_range(facts)
    if literal is not None:
        return Decision(literal)
    origins = frozenset({OriginId((facts.number,), exponential=True)})
    out = Value(rules.low, origins, tangent=any(v.tangent for v in mine))
    exact = _has_exact_factor(facts)
    # A contraction that sums nothing returns 16 bits, so that its gradient is 16 bits.
    op = Dot() if eqn.primitive.name in LOW else Bind()
    return Decision(
        why.of().noted(Kind.EXACTLY) if exact else why.of(),
        dtype=rules.low,
        kept=rules.low,
        dtypes=dtypes_of(facts.values) if exact else (),
        outs=[out] if exponential else (),
        op=Scale() if exact else op,
        saturate=True,
    )


def _in_full(facts: Facts, name: str, full: Sequence[Value]) -> Decision | None:
    """Decides a `promote` op of float32 operands alone; None where it leaves a normalization.

    The last affine op does, and what masks the result; a function of it, such as a softplus, if
    only contractions want it: what else reads it would read the rounded function, and its
    derivative likewise.
    """
    derived = any(v.origins for v in full) and not any(v.blocks_narrowing for v in full)
    if derived and name != "exp" and not facts.is_wanted_by(STEEP):
        masks = name == "select_n" and sum(not v.constant for v in full) == 1
        leaves = _is_end(full) if name in AFFINE else masks or not facts.is_wanted_by(FULL | ANGLE)
        if leaves:
            return None
        if name == "add" and any(v.provenance == PARAMETER for v in full):
            return Decision(Kind.ENDS_NORMALIZATION.of(), kept=facts.rules.low)
    written = [v.pinned for v in full if not v.constant]
    pinned = written[0] if written and all(written) else None
    return Decision(Kind.NO_LOW_OPERAND.of(), pinned=pinned)


def _is_end(full: Sequence[Value]) -> bool:
    """Returns whether an affine float32 op ends a normalization: it joins two, or masks one."""
    if len(full) == 1:
        return True
    derived = [v.origins for v in full if v.provenance == COMPUTED and v.origins]
    return len(derived) > 1 and len(frozenset().union(*derived)) == sum(map(len, derived))


def _refusal(
    facts: Facts, name: str, low: list[Value], full: list[Value]
) -> tuple[Kind, str] | None:
    """Returns why float32 operands are not narrowed with low ones, and the result's provenance."""
    provenances = {v.provenance for v in full}
    if name in NORMALIZING and _normalizes(name, low, full):
        return Kind.NORMALIZES, joined([*provenances, COMPUTED])
    if DATA in provenances:
        return Kind.DATA, DATA
    if name not in SCALING and any(
        v.provenance == LARGE and not (v.constant and name in CHOOSING) for v in full
    ):
        return Kind.LARGE_SUMMAND, LARGE
    if name not in SCALING and SHARED in provenances:
        return Kind.SHARED_SUMMAND, COMPUTED
    if provenances & {PARAMETER, LARGE} and facts.is_wanted_by(ANGLE | STEEP):
        return Kind.STEEP, COMPUTED
    return None


def _normalizes(name: str, low: list[Value], full: list[Value]) -> bool:
    """Returns whether a low operand meets a float32 operand derived from that same low value."""
    statistics: frozenset[OriginId] = NO_ORIGINS.union(*(v.origins for v in full))
    if name == "div":
        statistics = frozenset(origin for origin in statistics if not origin.exponential)
    return any(v.origins & statistics for v in low)


def _has_exact_factor(facts: Facts) -> bool:
    """Returns whether a product or quotient of a low value has a float32 operand to keep exact.

    A number whose rounding, of one sign for all, a reader would keep: a sum takes the product, or a
    contraction the multiple of a literal. Multiplying in float32 and narrowing the result costs
    nothing there. In float16 also a computed factor and any divisor: a sum and an epsilon, the
    reciprocal of a norm, which may be out of its range where the result is not.
    """
    eqn, low = facts.eqn, facts.rules.low
    full = [(a, v) for a, v in zip(eqn.invars, facts.used, strict=True) if v and not v.dtype]
    if eqn.primitive.name not in SCALING or len(full) != 1 or low is None:
        return False
    [(atom, value)] = full
    if value.mask or (isinstance(atom, Literal) and is_exact(np.asarray(atom.val), low)):
        return False
    if low == FLOAT16 and (eqn.primitive.name == "div" or value.provenance in (COMPUTED, SHARED)):
        return True
    if value.provenance not in (CONSTANT, LARGE) or math.prod(shape_of(atom)) != 1:
        return False
    literal = isinstance(atom, Literal)
    return eqn.outvars[0] in facts.frame.summands or (literal and facts.is_wanted_by(OPERAND))


def _out_of_range(facts: Facts) -> Why | None:
    """Returns why a literal cannot be narrowed: it would underflow, or overflow as a factor.

    A literal that is added or chosen, a mask, is clipped instead.
    """
    low = facts.rules.low
    for atom in facts.eqn.invars:
        if isinstance(atom, Literal) and facts.rules.governs(atom):
            value, limits = abs(float(atom.val)), jnp.finfo(low)
            if 0.0 < value < float(limits.tiny):
                return Kind.VANISHES.of(f"{atom.val:g}", low)
            scales = facts.eqn.primitive.name in ("mul", "div")
            if scales and float(limits.max) < value < float("inf"):
                return Kind.OUT_OF_RANGE.of(f"{atom.val:g}", low)
    return None


# Why float32 operands are narrowed next to low ones: by the first of these provenances among them.
_NARROWABLE = {
    PARAMETER: Kind.PARAMETER,
    COMPUTED: Kind.COMPUTED,
    SHARED: Kind.SHARED_FACTOR,
    CONSTANT: Kind.CONSTANT,
    LARGE: Kind.LARGE_FACTOR,
}
