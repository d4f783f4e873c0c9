"""Follows values forward through a program: why they are float32, and which cast made them.

A 16-bit value becomes float32 in one of two ways: the author upcasts it, or it meets a float32
value (an array, a NumPy constant, a parameter) and JAX promotes it. Either is a `Cause`, with the
line where it happened. Values computed from it have the same cause, until they are narrowed again.
A value that was float32 from the start has none.

A value that a conversion made, and that was only moved since, has that conversion as its `Cast`; a
16-bit value records whether autocast narrowed it or a value that it was computed from.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import numpy as np

from jaxmp._audit.loss_scale_power import Degree, alike, degree_of, degree_of_literal
from jaxmp._audit.place import AuditPlace, is_ours
from jaxmp._autocast.annotations import contracts
from jaxmp._autocast.primitives import CROSSING, IN_PARTS, RANDOM, classify
from jaxmp._autocast.provenance import is_basis
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import has_effects, short_type
from jaxmp._jaxprs.compat import closed, dtype_of
from jaxmp._jaxprs.dataflow import readers_of, settled
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.source import is_promotion

FLOAT32 = np.dtype("float32")
LOW = frozenset(np.dtype(name) for name in ("float16", "bfloat16"))
FLOATS = LOW | {FLOAT32, np.dtype("float64")}


class ValueKind(enum.Enum):
    """Where a value comes from, as far as the fix for a promotion depends on it."""

    ARGUMENT = enum.auto()
    ARRAY = enum.auto()  # a constant that is not a scalar
    OTHER = enum.auto()


class ValueName(NamedTuple):
    """The name of a value in messages, and its kind."""

    text: str
    kind: ValueKind = ValueKind.OTHER

    def __str__(self) -> str:
        return self.text


class Cause(NamedTuple):
    """The cause of a value's float32 dtype.

    Attributes:
      source: the line, ``file.py:line``.
      path: the module path.
      what: the cause in words.
      promoted: the float32 operand for which JAX promoted a 16-bit one; None if it was upcast.
      by_policy: whether autocast upcast it, rather than the author.
    """

    source: str
    path: str
    what: str
    promoted: ValueName | None = None
    by_policy: bool = False


class Cast(NamedTuple):
    """The conversion that made a value.

    Attributes:
      before: the dtype that it was converted from.
      source: the line, ``file.py:line``.
      ours: whether autocast added it.
      only: whether the converted value has no other use.
    """

    before: str
    source: str
    ours: bool
    only: bool


class Promoted(NamedTuple):
    """A 16-bit value that JAX promoted, before it meets the operand that it was promoted for.

    Attributes:
      dtype: its dtype before.
      fresh: whether it was only moved since.
    """

    dtype: str
    fresh: bool = True


class Known(NamedTuple):
    """The facts about a value.

    Attributes:
      why: why it is float32.
      cast: the conversion that made it, if it was only moved since.
      narrowed: whether it is a 16-bit value that autocast narrowed, or computed from one.
      fixed: whether it is computed in the program from literals alone, or a small constant.
      scaled: whether it is computed from the scale of a loss.
      degree: the power of that scale in it: see `loss_scale_power.py`.
      origin: the variable that it is, or is moved or cast from.
      name: its name in messages.
    """

    why: Cause | Promoted | None = None
    cast: Cast | None = None
    narrowed: bool = False
    fixed: bool = False
    scaled: bool = False
    degree: Degree = None
    origin: Any = None
    name: ValueName = ValueName("a value")

    @property
    def cause(self) -> Cause | None:
        """The cause of its float32 dtype, if it is known."""
        return self.why if isinstance(self.why, Cause) else None


class Observed(NamedTuple):
    """An equation that is visited.

    Attributes:
      eqn: the equation.
      place: its place.
      known: the facts about its operands.
      out: the facts about its results.
    """

    eqn: jex_core.JaxprEqn
    place: AuditPlace
    known: list[Known]
    out: Known


# Primitives that return their first operand, or a part of it, in some dtype and layout.
_SAME = {"convert_element_type", "name", "stop_gradient", *CROSSING, *IN_PARTS}
_SAME -= {"concatenate", "gather", "split"}
NOTHING = Known()
Visit = Callable[[Observed], None]


def follow(jaxpr: Any, labels: Sequence[str], scales: Sequence[bool], visit: Visit) -> None:
    """Calls `visit(seen)` for every equation that is not looked inside.

    Args:
      jaxpr: the closed jaxpr of a program.
      labels: the arguments that its operands are, in messages.
      scales: whether each operand is the scale of a loss.
      visit: called in program order; once for the body of a scan.
    """
    known = [
        Known(scaled=scale, degree=int(scale), name=ValueName(label, ValueKind.ARGUMENT))
        for label, scale in zip(labels, scales, strict=True)
    ]
    _run(jaxpr, known, AuditPlace(), visit)


def _run(jaxpr: Any, ins: Sequence[Known], around: AuditPlace, visit: Visit | None) -> list[Known]:
    """Returns the facts about the results of a jaxpr, given those about its operands."""
    opened = closed(jaxpr).jaxpr
    consts = dict(zip(opened.constvars, closed(jaxpr).consts, strict=False))
    env: dict[Any, Known] = dict(zip(opened.invars, ins, strict=True))
    env |= {var: _constant(var, consts.get(var)) for var in opened.constvars}
    env = {var: fact._replace(origin=fact.origin or var) for var, fact in env.items()}
    readers = readers_of(opened)

    def read(atom: Any) -> Known:
        if isinstance(atom, jex_core.Literal):
            degree = degree_of_literal(atom.val)
            return Known(fixed=True, degree=degree, name=ValueName(f"the constant {atom.val}"))
        found = env.get(atom, NOTHING)
        if found.cast is None or len(readers[atom]) + opened.outvars.count(atom) <= 1:
            return found
        return found._replace(cast=found.cast._replace(only=False))

    for eqn in opened.eqns:
        place = around.at(eqn)
        known = [read(v) for v in eqn.invars]
        # A scatter has a jaxpr too, which adds two numbers, but is visited as an operation.
        unknown = any(True for _ in compat.inner_jaxprs(eqn)) and contracts(eqn)
        if unknown or inside(eqn):
            outs = _inside(eqn, known, place, visit)
        else:
            out = Known(
                why=_why(eqn, known, place, readers),
                cast=_cast(eqn, known, place),
                narrowed=_narrowed(eqn, known),
                fixed=_is_made(eqn, known),
                scaled=any(k.scaled for k in known),
                degree=degree_of(eqn, [k.degree for k in known]),
                origin=known[0].origin if eqn.primitive.name in _SAME else None,
            )
            outs = [out] * len(eqn.outvars)
            if visit is not None:
                visit(Observed(eqn, place, known, out))
        name = _name(eqn, known, place)
        for var, out in zip(eqn.outvars, outs, strict=True):
            why = out.why if dtype_of(var) == FLOAT32 else None
            env[var] = out._replace(why=why, origin=out.origin or var, name=name)
    return [read(v) for v in opened.outvars]


def _inside(
    eqn: jex_core.JaxprEqn, known: list[Known], place: AuditPlace, visit: Visit | None
) -> list[Known]:
    found: dict[int, Known] = {}
    for inner in inside(eqn):
        where = place.inside(inner)
        quiet = functools.partial(_run, around=where, visit=None)
        carried = {inner.operands[i] for i in inner.carries}  # each iteration has its own
        ins = [k._replace(origin=None) if i in carried else k for i, k in enumerate(known)]
        facts = settled(inner, ins, quiet, lambda a, b: _either((a, b)))
        outs = _run(inner.jaxpr, facts, where, visit)
        for result, out in zip(inner.results, outs, strict=True):
            if result is not None:
                found[result] = _either((found[result], out)) if result in found else out
    if found or inside(eqn):
        return [found[i] for i in range(len(eqn.outvars))]
    unknown = NOTHING._replace(scaled=any(k.scaled for k in known))
    for jaxpr in compat.jaxprs_run(eqn):
        count = len(closed(jaxpr).jaxpr.invars)
        _run(jaxpr, [unknown] * count, place.unknown(eqn), visit)
    return [unknown] * len(eqn.outvars)


def _constant(var: Any, value: Any) -> Known:
    """Returns the facts about a constant of a program."""
    fixed = hasattr(value, "size") and is_basis(value)
    name = ValueName(f"the constant {short_type(var)}")
    if getattr(var.aval, "ndim", 0):
        name = ValueName(f"the constant array {short_type(var)}", ValueKind.ARRAY)
    return Known(fixed=fixed, degree=0, name=name)


def _why(
    eqn: jex_core.JaxprEqn,
    known: list[Known],
    place: AuditPlace,
    readers: Mapping[Any, Sequence[jex_core.JaxprEqn]],
) -> Cause | Promoted | None:
    """Returns why the result is float32, if it is."""
    if eqn.primitive.name == "convert_element_type":
        before = dtype_of(eqn.invars[0])
        if before in LOW and dtype_of(eqn.outvars[0]) == FLOAT32:
            if is_ours(eqn) or not is_promotion(eqn, readers.get(eqn.outvars[0], ())):
                what = f"an upcast from {before} to float32"
                return Cause(place.source, place.path, what, by_policy=is_ours(eqn))
            return Promoted(str(before))
    ours = [i for i, v in enumerate(eqn.invars) if dtype_of(v) == FLOAT32]
    causes = [cause for i in ours if (cause := known[i].cause) is not None]
    if causes:  # the author's upcasts before autocast's
        return min(causes, key=lambda cause: cause.by_policy)
    promoted = [why for i in ours if isinstance(why := known[i].why, Promoted)]
    # A Python number that meets an earlier promotion is float32 as well, but did not cause it.
    fresh = any(why.fresh for why in promoted)
    partners = [
        known[i].name
        for i in ours
        if known[i].why is None and (fresh or not isinstance(eqn.invars[i], jex_core.Literal))
    ]
    if promoted and partners:
        what = f"{partners[0]} is float32 and meets a {promoted[0].dtype} value"
        return Cause(place.source, place.path, what, promoted=partners[0])
    if not promoted:
        return None
    moved = classify(eqn.primitive.name, eqn.params) == "transparent"
    return promoted[0] if moved else promoted[0]._replace(fresh=False)


def _narrowed(eqn: jex_core.JaxprEqn, known: list[Known]) -> bool:
    """Returns whether the results, if of 16 bits, are so because autocast narrowed a value."""
    if eqn.primitive.name == "convert_element_type" and dtype_of(eqn.invars[0]) not in LOW:
        return is_ours(eqn)
    return any(k.narrowed and dtype_of(v) in LOW for k, v in zip(known, eqn.invars, strict=True))


def _is_made(eqn: jex_core.JaxprEqn, known: list[Known]) -> bool:
    """Returns whether the results are computed from literals alone, and not at random."""
    made = all(k.fixed for k in known) and not has_effects(eqn)
    return made and not eqn.primitive.name.startswith(RANDOM)


def _cast(eqn: jex_core.JaxprEqn, known: list[Known], place: AuditPlace) -> Cast | None:
    """Returns the conversion between floats that made the result, apart from moves."""
    if eqn.primitive.name == "convert_element_type":
        before, after = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
        if before in FLOATS and after in FLOATS and before != after:
            return Cast(str(before), place.source, is_ours(eqn), only=True)
        return None
    moves = known and classify(eqn.primitive.name, eqn.params) == "transparent"
    return known[0].cast if moves else None


def _either(known: Sequence[Known]) -> Known:
    """Joins the facts about a value that is one of several."""
    casts, origins = ({getattr(k, name) for k in known} for name in ("cast", "origin"))
    return Known(
        why=next((k.why for k in known if k.why is not None), None),
        cast=casts.pop() if len(casts) == 1 else None,
        narrowed=any(k.narrowed for k in known),
        fixed=all(k.fixed for k in known),
        scaled=any(k.scaled for k in known),
        degree=alike(k.degree for k in known),
        origin=origins.pop() if len(origins) == 1 else None,
        name=known[0].name,
    )


def _name(eqn: jex_core.JaxprEqn, known: list[Known], place: AuditPlace) -> ValueName:
    """Returns the name of an equation's results in messages."""
    if len(known) == 1 and classify(eqn.primitive.name, eqn.params) == "transparent":
        return known[0].name  # only moved
    return ValueName(f"the {eqn.primitive.name} at {place.source}")
