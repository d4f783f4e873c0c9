"""Forward pass over equations without jaxprs inside: one function per class of op."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._autocast.bind import Bind, Move
from jaxmp._autocast.contract import Dot, QuantizedDot
from jaxmp._autocast.contractions import geometry
from jaxmp._autocast.demand import is_angle
from jaxmp._autocast.eligible import by_recipe
from jaxmp._autocast.follow import follow
from jaxmp._autocast.frame import Frame
from jaxmp._autocast.licences import (
    COMPUTED,
    CONSTANT,
    DATA,
    LARGE,
    SHARED,
    joined,
    of_converted,
    of_wave,
)
from jaxmp._autocast.plan import DType, Read, Step, Value
from jaxmp._autocast.primitives import (
    CROSSING,
    CUMULATIVE,
    LOOKING_UP,
    LOW,
    REORDERING,
    REPEATING,
    SOLVING,
    TO_CONTRACTIONS,
    WAVES,
    WRITING,
)
from jaxmp._autocast.provenance import LITERALS
from jaxmp._autocast.rules import FLOAT16, FLOAT32, author_keeps, is_mask
from jaxmp._autocast.why import Kind, Why
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import broadcast_axes, converted_dtype, takes_result_dtype
from jaxmp._jaxprs.source import is_promotion


def decide(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """The step of one equation, by the class of its primitive."""
    name, rules = compat.kind(eqn), frame.rules
    if rules.low is None:
        is_float32 = any(map(rules.governs, [*eqn.invars, *eqn.outvars]))
        why = rules.why_float32 if is_float32 else Kind.AS_WRITTEN
        step = frame.as_written(eqn, values, why)
        recipe = rules.policy.matmul is not None and name in LOW and _exempt(frame, eqn, values)
        return _by_recipe(frame, step, values, None) if recipe is None else step
    kind = rules.op_class(eqn)
    if name == "convert_element_type" and kind == "own":
        return _convert(frame, eqn, values)
    if not any(v is not None for v in values):
        licence = LARGE if name == "iota" else DATA
        return frame.as_written(eqn, values, Kind.NOT_FLOAT32, licence)
    match kind:
        case "low":
            return _contraction(frame, eqn, values)
        case "follow" | "softmax":
            step = follow(frame, eqn, values, exponential=name == "exp")
            moves = name in TO_CONTRACTIONS or (name == "mul" and _masks(frame, values))
            return dataclasses.replace(step, op=Move()) if moves else step
        case "transparent":
            return _transparent(frame, eqn, values)
        case "full":
            return frame.as_written(eqn, values, Kind.SENSITIVE, _of_full(name, values))
    return _opaque(frame, eqn, values, kind)


def _masks(frame: Frame, values: Sequence[Value | None]) -> bool:
    """Whether a product masks a float32 value, and 16 bits hold both: infinity by 0 is no 0."""
    of = [v for v in values if v and not v.mask]
    return len(of) == 1 and not (of[0].dtype or of[0].is_weight) and frame.rules.low != FLOAT16


def _contraction(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """Low operands and a low result, accumulated in float32.

    A float32 result of low operands would be exact to the accumulation, but costs twice the
    memory where it hurts most (logits, attention scores), and its cotangent would make the
    backward contractions float32.
    """
    kept = _exempt(frame, eqn, values)
    if kept is not None:
        # Of low values it is made of nothing else; of arguments, it is data.
        mine = [v for v in values if v is not None]
        derived = any(v.dtype or v.licence == COMPUTED for v in mine)
        licence = COMPUTED if derived and all(v.licence != DATA for v in mine) else DATA
        return frame.as_written(eqn, values, kept, licence)
    low = frame.rules.low
    for atom in (*eqn.outvars, *eqn.invars[:2]):  # an author's 16-bit operand or result decides
        dtype = dtype_of(atom)
        if dtype in frame.rules.lower:
            low = dtype
    tangent = any(v.tangent for v in values if v is not None)
    if low == frame.rules.low:
        out = Value(low, frozenset({frame.planning.fresh()}), tangent=tangent)
    else:
        out = Value(None, tangent=tangent)
    known = eqn.primitive.name in LOW
    why = Kind.CONTRACTION.of() if known else Kind.ASKED.of(eqn.primitive.name)
    wide_gradients = low == frame.rules.low and frame.rules.wide_gradients
    op = Dot(_parameters(eqn, values) if wide_gradients else ())
    step = frame.step(eqn, values, [low] * len(values), [out] * len(eqn.outvars), why, op=op)
    if known and any(is_mask(dtype_of(v)) for v in eqn.invars[:2]):
        reads = [
            Read(low) if i < 2 and is_mask(dtype_of(v)) else read
            for i, (v, read) in enumerate(zip(eqn.invars, step.reads, strict=True))
        ]
        step = dataclasses.replace(step, reads=tuple(reads))
    return step if frame.rules.policy.matmul is None else _by_recipe(frame, step, values, low)


def _parameters(eqn: JaxprEqn, values: Sequence[Value | None]) -> tuple[int, ...]:
    """The operands of a contraction that are float32 parameters, or made of them alone.

    Or of a lookup that a policy's `ops` makes one.
    """
    if any(v is not None and v.tangent for v in values):
        return ()  # a tangent must stay linear, and be transposed
    if not takes_result_dtype(eqn) and eqn.primitive.name not in LOOKING_UP:
        return ()
    return tuple(
        i
        for i, (atom, v) in enumerate(zip(eqn.invars, values, strict=True))
        if v is not None and v.is_weight and v.dtype is None and dtype_of(atom) == FLOAT32
    )


def _by_recipe(frame: Frame, step: Step, values: Sequence[Value | None], low: DType | None) -> Step:
    """The step of a contraction, multiplied as the recipe of the policy says, or saying why not."""
    verdict = by_recipe(frame, step.eqn, values, low)
    why = verdict.noted(step.why, frame.rules.policy.matmul)
    if verdict.product is None:
        return dataclasses.replace(step, why=why)
    op = QuantizedDot(step.op.parameters, product=verdict.product)
    return dataclasses.replace(step, op=op, why=why)


def _exempt(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None]) -> Why | None:
    """Why a contraction stays in float32, or None."""
    known = eqn.primitive.name in LOW  # else a user's override says that it is a contraction
    if known and (kept := author_keeps(eqn, frame.rules)) is not None:
        return kept
    if pinned := next((v.pinned for v in values if v and v.pinned), None):
        return pinned
    if not known:
        return None
    operands = values[:2]
    derived = not all(operands) or any(v and v.tangent for v in operands)
    of_layers = derived or not any(v and v.wins for v in operands)
    if (kept := geometry(eqn, frame.kinds(eqn), of_layers=of_layers)) is not None:
        return kept
    if is_angle(frame.demanded(eqn)[0]):
        return Kind.ANGLES.of()
    return None


def _transparent(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """Runs in the dtype the operands are kept in; float32 if they differ."""
    name, mine = eqn.primitive.name, [v for v in values if v is not None]
    if len(eqn.outvars) == len(values) > 1:  # optimization_barrier: one to one
        dtypes = [v.dtype if v else None for v in values]
        return frame.step(eqn, values, dtypes, values, Kind.MOVES)
    if name in WRITING:
        dtype = values[0].dtype if values[0] and not any(v.wins for v in mine) else None
    else:
        dtype = mine[0].dtype if len({v.dtype for v in mine}) == 1 else None
    same = len({v.origins for v in mine}) == 1 and dtype == mine[0].dtype
    out = mine[0]._replace(argument=False) if same else frame.planning.kept(dtype, values)
    licence = joined([v.licence for v in mine])
    repeats = name in REPEATING and _repeats(eqn)
    if licence == COMPUTED and dtype is None and repeats and name == "broadcast_in_dim":
        licence = SHARED
    out = out._replace(licence=licence)
    widen = dtype is not None and repeats
    return frame.step(
        eqn,
        values,
        [None if widen else dtype] * len(values),
        [out] * len(eqn.outvars),
        Kind.REPEATS if widen else Kind.MOVES,
        op=Move() if name in REORDERING | CROSSING else Bind(),
    )


def _convert(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """A conversion that the program as written makes."""
    [value], [var], rules = values, eqn.outvars, frame.rules
    if value is None:
        upcast = rules.governs(var) and dtype_of(eqn.invars[0]) in rules.lower
        if upcast and not is_promotion(eqn, frame.readers[var]):
            out = Value(pinned=Kind.UPCAST_OPERAND.of(), licence=DATA)
            return frame.step(eqn, values, [None], [out], Kind.UPCAST)
        made = frame.kinds(eqn) == [LITERALS] and not shape_of(var)
        licence = CONSTANT if made else of_converted(eqn.invars[0], rules.low)
        if dtype_of(eqn.invars[0]) == np.bool_:
            mask = Value(licence=licence, mask=True)
            return frame.step(eqn, [None], [None], [mask], Kind.NOT_FLOAT32, op=Move())
        return frame.as_written(eqn, values, Kind.NOT_FLOAT32, licence)
    if rules.governs(var):  # float32 to float32: a change of weak type
        return _transparent(frame, eqn, values)
    # A narrowing conversion of a low value reads it as it is kept: nothing is lost twice.
    narrows = converted_dtype(eqn).itemsize <= rules.low.itemsize  # type: ignore[union-attr]
    dtype = value.dtype if narrows else None
    return frame.step(eqn, values, [dtype], [None], Kind.CONVERSION)


def _opaque(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None], kind: str | None) -> Step:
    """What runs as written because it is listed so, or not listed: its results are data."""
    if kind == "own":
        step = frame.as_written(eqn, values, Kind.AS_WRITTEN, DATA)
        if eqn.primitive.name in SOLVING:
            for var in filter(frame.rules.governs, eqn.outvars):
                frame.kept_as[var] = Value(pinned=Kind.SOLUTION.of(), licence=DATA)
        return step
    if any(True for _ in compat.inner_jaxprs(eqn)):
        return frame.as_written(eqn, values, Kind.NOT_LOOKED_INSIDE, DATA)
    return frame.as_written(eqn, values, Kind.UNLISTED, DATA)


def _of_full(name: str, values: Sequence[Value | None]) -> str | None:
    """The licence of what a sensitive op returns, where it is not that of its operands."""
    if name in CUMULATIVE:
        return DATA
    if name in WAVES:
        return of_wave(joined([v.licence for v in values if v is not None]))
    return None


def _repeats(eqn: JaxprEqn) -> bool:
    """Whether an op of `REPEATING` really repeats or merges elements."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    axes = dict(zip(broadcast_axes(eqn), shape_of(eqn.invars[0]), strict=True))
    return any(axes.get(i, 1) != n for i, n in enumerate(shape_of(eqn.outvars[0])))
