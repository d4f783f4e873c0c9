"""Forward pass over equations without jaxprs inside: one function per class of op."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.decide.follow import follow
from jaxmp._core.decide.frame import Decision, Facts
from jaxmp._core.execute.bind import Bind, Dot, Move
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.callers import is_promotion
from jaxmp._core.jaxprs.compat import dtype_of, is_at_most, shape_of
from jaxmp._core.jaxprs.equation_parameters import (
    broadcast_axes,
    converted_dtype,
    free_sizes,
    takes_result_dtype,
)
from jaxmp._core.jaxprs.source import is_backward
from jaxmp._core.plan.demand import CONTRACTION, ITERATION, is_angle
from jaxmp._core.plan.plan import NO_ORIGINS, OriginId, Value, dtypes_of
from jaxmp._core.plan.primitives import (
    CROSSING,
    CUMULATIVE,
    LOOKING_UP,
    LOW,
    REORDERING,
    REPEATING,
    SINUSOID,
    SOLVING,
    TO_CONTRACTIONS,
    WRITING,
)
from jaxmp._core.plan.provenance import (
    COMPUTED,
    CONSTANT,
    DATA,
    LARGE,
    SHARED,
    joined,
    of_converted,
)
from jaxmp._core.plan.roots import ITERATED, LITERALS, WEIGHTS, geometry
from jaxmp._core.plan.rules import FLOAT16, author_keeps, is_mask
from jaxmp._core.plan.why import Kind, Why


def decide(facts: Facts) -> Decision:
    """Decides one equation, by the class of its primitive."""
    eqn, rules = facts.eqn, facts.rules
    name = compat.kind(eqn)
    if rules.low is None:
        is_float32 = any(map(rules.governs, [*eqn.invars, *eqn.outvars]))
        why = rules.why_float32 if is_float32 else Kind.AS_WRITTEN
        asked = rules.policy.matmul is not None and name in LOW
        return Decision(why.of(), multiplies=asked and _exempt(facts) is None)
    kind = rules.op_class(eqn)
    if name == "convert_element_type" and kind == "as_written":
        return _convert(facts)
    if not any(v is not None for v in facts.values):
        provenance = LARGE if name == "iota" else DATA
        return Decision(Kind.NOT_FLOAT32.of(), provenance=provenance)
    match kind:
        case "compute":
            return _contraction(facts)
        case "promote" | "softmax":
            decision = follow(facts, exponential=name == "exp")
            moves = name in TO_CONTRACTIONS or (name == "mul" and _masks(facts))
            return decision._replace(op=Move()) if moves else decision
        case "move":
            return _transparent(facts)
        case "full_precision":
            return Decision(Kind.SENSITIVE.of(), provenance=_of_full(name, facts.values))
        case "as_written":
            return _own(facts)
    # Not in the table: its results are data.
    inner = any(True for _ in compat.inner_jaxprs(eqn))
    why = Kind.NOT_LOOKED_INSIDE if inner else Kind.UNLISTED
    return Decision(why.of(), provenance=DATA)


def _masks(facts: Facts) -> bool:
    """Returns whether a product masks a float32 value, other than in float16: inf * 0 is NaN."""
    of = [v for v in facts.values if v and not v.mask]
    return len(of) == 1 and not (of[0].dtype or of[0].is_weight) and facts.rules.low != FLOAT16


def _contraction(facts: Facts) -> Decision:
    """Decides a contraction: low operands and a low result, accumulated in float32.

    A float32 result of low operands would not round the accumulated sums, but takes twice the
    memory where that matters most (logits, attention scores), and its cotangent would make the
    backward contractions float32.
    """
    eqn, rules = facts.eqn, facts.rules
    mine = [v for v in facts.values if v is not None]
    kept = _exempt(facts)
    if kept is not None:
        # Computed from low values, without data, it may be narrowed; of arguments, it is data.
        derived = any(v.dtype or v.provenance == COMPUTED for v in mine)
        provenance = COMPUTED if derived and all(v.provenance != DATA for v in mine) else DATA
        return Decision(kept, provenance=provenance)
    low = rules.low
    for atom in (*eqn.outvars, *eqn.invars[:2]):  # an author's 16-bit operand or result decides
        dtype = dtype_of(atom)
        if dtype in rules.lower:
            low = dtype
    own = low == rules.low
    origins = frozenset({OriginId((facts.number,))}) if own else NO_ORIGINS
    out = Value(low if own else None, origins, tangent=any(v.tangent for v in mine))
    known = eqn.primitive.name in LOW
    dtypes = [v and low for v in facts.values]
    for i, atom in enumerate(eqn.invars[:2] if known else ()):
        dtypes[i] = low if is_mask(dtype_of(atom)) else dtypes[i]
    return Decision(
        Kind.CONTRACTION.of() if known else Kind.ASKED.of(eqn.primitive.name),
        dtypes=dtypes,
        outs=[out] * len(eqn.outvars),
        op=Dot(_parameters(facts) if own and rules.wide_gradients else ()),
        multiplies=rules.policy.matmul is not None,
    )


def _parameters(facts: Facts) -> tuple[int, ...]:
    """Returns the operands of a contraction that are float32 parameters, or of those alone.

    Also those of a lookup that a policy's `ops` class as a contraction.
    """
    eqn, values = facts.eqn, facts.values
    if any(v is not None and v.tangent for v in values):
        return ()  # a tangent must stay linear, and be transposed
    if not takes_result_dtype(eqn) and eqn.primitive.name not in LOOKING_UP:
        return ()
    return tuple(
        i
        for i, (atom, v) in enumerate(zip(eqn.invars, values, strict=True))
        if v is not None and v.is_weight and v.dtype is None and dtype_of(atom) == facts.rules.wide
    )


def _exempt(facts: Facts) -> Why | None:
    """Returns why a contraction stays in float32, or None."""
    eqn, values = facts.eqn, facts.values
    known = eqn.primitive.name in LOW  # else the policy's `ops` class it as a contraction
    if known and (kept := author_keeps(eqn, facts.rules)) is not None:
        return kept
    if pinned := next((v.pinned for v in values if v and v.pinned), None):
        return pinned
    if not known:
        return None
    operands = values[:2]
    derived = not all(operands) or any(v and v.tangent for v in operands)
    of_layers = derived or not any(v and v.blocks_narrowing for v in operands)
    if (kept := geometry(eqn, facts.roots, of_layers=of_layers)) is not None:
        return kept
    if is_angle(facts.demanded[0]):
        return Kind.ANGLES.of()
    iterated = facts.frame.roots[eqn.outvars[0]] == ITERATED and not is_backward(eqn)
    if iterated and (ITERATED in facts.roots[:2] or facts.is_wanted_by(ITERATION)):
        return Kind.ITERATED.of()
    return Kind.NORMALIZER.of() if _is_normalizer(facts) else None


def _is_normalizer(facts: Facts) -> bool:
    """Returns whether a float16 product by one float32 vector has float32 readers alone.

    The vector is a sum or a carry, and so the product is long: what float16 cannot hold would
    become infinite, and vanish where it divides. Multiplying by one vector takes no matrix unit.
    """
    if facts.rules.low != FLOAT16 or WEIGHTS in facts.roots[:2] or facts.is_wanted_by(CONTRACTION):
        return False
    return any(
        v is not None and v.dtype is None and is_at_most(math.prod(free), 1)
        for v, free in zip(facts.values[:2], free_sizes(facts.eqn), strict=True)
    )


def _transparent(facts: Facts) -> Decision:
    """Decides an op that moves values: in the dtype its operands are kept in, or float32."""
    eqn, values = facts.eqn, facts.values
    name, mine = eqn.primitive.name, [v for v in values if v is not None]
    if len(eqn.outvars) == len(values) > 1:  # optimization_barrier: one to one
        return Decision(Kind.MOVES.of(), dtypes=dtypes_of(values), outs=values)
    if name in WRITING:
        dtype = values[0].dtype if values[0] and not any(v.blocks_narrowing for v in mine) else None
    else:
        dtype = mine[0].dtype if len({v.dtype for v in mine}) == 1 else None
    same = len({v.origins for v in mine}) == 1 and dtype == mine[0].dtype
    provenance = joined([v.provenance for v in mine])
    repeats = name in REPEATING and _repeats(eqn)
    if provenance == COMPUTED and dtype is None and repeats and name == "broadcast_in_dim":
        provenance = SHARED
    out = mine[0]._replace(argument=False, provenance=provenance)
    sums = dtype is not None and repeats  # the gradient is a sum
    return Decision(
        Kind.REPEATS.of() if sums else Kind.MOVES.of(),
        dtype=None if sums else dtype,
        kept=dtype,
        provenance=provenance,
        outs=[out] * len(eqn.outvars) if same else (),
        op=Move() if name in REORDERING | CROSSING else Bind(),
    )


def _convert(facts: Facts) -> Decision:
    """Decides a conversion that is part of the program as written."""
    eqn, rules = facts.eqn, facts.rules
    [value], [atom], [var] = facts.values, eqn.invars, eqn.outvars
    if value is None:
        upcast = rules.governs(var) and dtype_of(atom) in rules.lower
        if upcast and not is_promotion(eqn, facts.frame.readers[var]):
            out = Value(pinned=Kind.UPCAST_OPERAND.of(), provenance=DATA)
            return Decision(Kind.UPCAST.of(), outs=[out])
        from_literals = facts.roots == [LITERALS] and not shape_of(var)
        provenance = CONSTANT if from_literals else of_converted(atom, rules.low)
        if dtype_of(atom) == np.bool_:
            mask = Value(provenance=provenance, mask=True)
            return Decision(Kind.NOT_FLOAT32.of(), outs=[mask], op=Move())
        return Decision(Kind.NOT_FLOAT32.of(), provenance=provenance)
    if rules.governs(var):  # float32 to float32: a change of weak type
        return _transparent(facts)
    # A narrowing conversion of a low value reads it as it is kept: widening it changes nothing.
    narrows = converted_dtype(eqn).itemsize <= rules.low.itemsize  # type: ignore[union-attr]
    return Decision(Kind.CONVERSION.of(), dtype=value.dtype if narrows else None, outs=[None])


def _own(facts: Facts) -> Decision:
    """Decides an op that the table says runs as written: its results are data."""
    outs = [Value(pinned=Kind.SOLUTION.of(), provenance=DATA)] * len(facts.eqn.outvars)
    solves = facts.eqn.primitive.name in SOLVING
    return Decision(Kind.AS_WRITTEN.of(), provenance=DATA, outs=outs if solves else ())


def _of_full(name: str, values: Sequence[Value | None]) -> str | None:
    """Returns the provenance of a sensitive op's result; None if it is its operands'."""
    if name in CUMULATIVE:
        return DATA
    if name in SINUSOID:
        provenance = joined([v.provenance for v in values if v is not None])
        # The sine of a whole number is an entry of a table.
        return CONSTANT if provenance in (LARGE, CONSTANT) else provenance
    return None


def _repeats(eqn: JaxprEqn) -> bool:
    """Returns whether an op of `REPEATING` really repeats or merges elements."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    axes = dict(zip(broadcast_axes(eqn), shape_of(eqn.invars[0]), strict=True))
    return any(axes.get(i, 1) != n for i, n in enumerate(shape_of(eqn.outvars[0])))
