"""Follows what an audit knows of values through a program: facts, each an analysis of its own.

A 16-bit value becomes float32 in one of two ways: the author upcasts it, or it meets a float32
value (an array, a NumPy constant, a parameter) and JAX promotes it. Either is a `Cause`, with the
line where it happened. Values computed from it have the same cause, until they are narrowed again.
A value that was float32 from the start has none.

A value that a conversion made, and that was only moved since, has that conversion as its `Cast`; a
16-bit value records whether autocast narrowed it or a value that it was computed from.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.execute.annotations import contracts
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import has_effects, short_type
from jaxmp._core.jaxprs.callers import is_promotion
from jaxmp._core.jaxprs.compat import closed, dtype_of
from jaxmp._core.jaxprs.follow import Follower
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.plan.primitives import CROSSING, IN_PARTS, RANDOM, classify
from jaxmp._core.plan.provenance import is_basis
from jaxmp._core.plan.rules import Rules, region_rules
from jaxmp._tools.audit.scale_power import Degree, degree_of, degree_of_literal, of_either

FLOAT32 = np.dtype("float32")
LOW = frozenset(np.dtype(name) for name in ("float16", "bfloat16"))
FLOATS = LOW | {FLOAT32, np.dtype("float64")}


def float32_region(place: Place) -> Rules | None:
    """Returns the rules of the autocast region around an equation, if they are float32's."""
    region = place.first(region_rules)
    return region if region is not None and region.low is None else None


def is_ours(eqn: JaxprEqn) -> bool:
    """Returns whether autocast added an equation."""
    return in_scope(eqn, CAST)


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


# Each fact of an equation's results, given what is known of its operands.


def _why(at: Place, known: list[Known]) -> Cause | Promoted | None:
    eqn = at.eqn
    if eqn.primitive.name == "convert_element_type":
        before = dtype_of(eqn.invars[0])
        if before in LOW and dtype_of(eqn.outvars[0]) == FLOAT32:
            if is_ours(eqn) or not is_promotion(eqn, at.around.readers.get(eqn.outvars[0], ())):
                what = f"an upcast from {before} to float32"
                return Cause(at.source, at.path, what, by_policy=is_ours(eqn))
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
        if known[i].why is None and (fresh or not isinstance(eqn.invars[i], Literal))
    ]
    if promoted and partners:
        what = f"{partners[0]} is float32 and meets a {promoted[0].dtype} value"
        return Cause(at.source, at.path, what, promoted=partners[0])
    if not promoted:
        return None
    return promoted[0] if _moves(at) else promoted[0]._replace(fresh=False)


def _cast(at: Place, known: list[Known]) -> Cast | None:
    eqn = at.eqn
    if eqn.primitive.name == "convert_element_type":
        before, after = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
        if before in FLOATS and after in FLOATS and before != after:
            return Cast(str(before), at.source, is_ours(eqn), only=True)
        return None
    return known[0].cast if known and _moves(at) else None


def _narrowed(at: Place, known: list[Known]) -> bool:
    operands = at.eqn.invars
    if at.eqn.primitive.name == "convert_element_type" and dtype_of(operands[0]) not in LOW:
        return is_ours(at.eqn)
    return any(k.narrowed and dtype_of(v) in LOW for k, v in zip(known, operands, strict=True))


def _fixed(at: Place, known: list[Known]) -> bool:
    made = all(k.fixed for k in known) and not has_effects(at.eqn)
    return made and not at.eqn.primitive.name.startswith(RANDOM)


# Primitives that return their first operand, or a part of it, in some dtype and layout.
_SAME = {"convert_element_type", "name", "stop_gradient", *CROSSING, *IN_PARTS}
_SAME -= {"concatenate", "gather", "split"}


def _origin(at: Place, known: list[Known]) -> Any:
    return known[0].origin if at.eqn.primitive.name in _SAME else None


def name_of(at: Place, known: list[Known]) -> ValueName:
    """Returns the name of an equation's results in messages."""
    if len(known) == 1 and _moves(at):
        return known[0].name
    return ValueName(f"the {at.eqn.primitive.name} at {at.source}")


def _moves(at: Place) -> bool:
    """Returns whether an equation only moves values."""
    return classify(at.eqn.primitive.name, at.eqn.params) == "move"


# Each fact of a value that is one of two.


def _first(a: Any, b: Any) -> Any:
    return b if a is None else a


def _same(a: Any, b: Any) -> Any:
    return a if a == b else None


# Each analysis, by the field of `Known`: the fact of an equation's results, given its place and
# what is known of its operands, and that of a value that is one of two, given theirs.
Analysis = tuple[Callable[[Place, list[Known]], Any], Callable[[Any, Any], Any]]
ANALYSES: dict[str, Analysis] = {
    "why": (_why, _first),
    "cast": (_cast, _same),
    "narrowed": (_narrowed, operator.or_),
    "fixed": (_fixed, operator.and_),
    "scaled": (lambda _, known: any(k.scaled for k in known), operator.or_),
    "degree": (
        lambda at, known: degree_of(at.eqn, [k.degree for k in known]),
        lambda a, b: of_either((a, b)),
    ),
    "origin": (_origin, _same),
    "name": (name_of, lambda a, _: a),
}


class Observed(NamedTuple):
    """An equation that is visited.

    Attributes:
      place: its place.
      known: the facts about its operands.
      out: the facts about its results.
    """

    place: Place
    known: list[Known]
    out: Known

    @property
    def eqn(self) -> Any:
        """The equation."""
        return self.place.eqn


def follow(
    jaxpr: Any, labels: Sequence[str], scales: Sequence[bool], visit: Callable[[Observed], None]
) -> None:
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
    _Follower(visit).run(Place(jaxpr), known)


class _Follower(Follower[Known]):
    nothing = Known()

    def __init__(self, visit: Callable[[Observed], None]) -> None:
        self._visit = visit

    def literal(self, literal: jex_core.Literal) -> Known:
        name = ValueName(f"the constant {literal.val}")
        return Known(fixed=True, degree=degree_of_literal(literal.val), name=name)

    def constant(self, var: Any, value: Any) -> Known:
        fixed = hasattr(value, "size") and is_basis(value)
        name = ValueName(f"the constant {short_type(var)}")
        if getattr(var.aval, "ndim", 0):
            name = ValueName(f"the constant array {short_type(var)}", ValueKind.ARRAY)
        return Known(fixed=fixed, degree=0, origin=var, name=name)

    def operand(self, at: Place, var: Any, fact: Known) -> Known:
        """Names the variable that a value is, and records whether it has several readers."""
        fact = fact._replace(origin=fact.origin or var)
        if fact.cast is None:
            return fact
        jaxpr = closed(at.jaxpr).jaxpr
        only = len(at.readers[var]) + jaxpr.outvars.count(var) <= 1
        return fact._replace(cast=fact.cast._replace(only=only and fact.cast.only))

    def inner(self, at: Place, ins: list[Known], *, last: bool) -> list[Known]:
        carried = {at.inner.operands[i] for i in at.inner.carries}  # each iteration has its own
        ins = [k._replace(origin=None) if i in carried else k for i, k in enumerate(ins)]
        return super().inner(at, ins, last=last)

    def equation(self, at: Place, ins: list[Known], *, last: bool) -> list[Known]:
        eqn, outs = at.eqn, super().equation(at, ins, last=last)
        if inside(eqn):
            outs = [out._replace(name=name_of(at, ins)) for out in outs]
        found = []
        for var, out in zip(eqn.outvars, outs, strict=True):
            why = out.why if dtype_of(var) == FLOAT32 else None
            found.append(self.operand(at.around, var, out._replace(why=why)))
        return found

    def transfer(self, at: Place, ins: list[Known], *, last: bool) -> list[Known]:
        eqn = at.eqn
        # A scatter has a jaxpr too, which adds two numbers, but is visited as an operation.
        unknown = compat.jaxprs_run(eqn) if contracts(eqn) else []
        if not unknown:
            out = Known(**{name: transfer(at, ins) for name, (transfer, _) in ANALYSES.items()})
            if last:
                self._visit(Observed(at, ins, out))
            return [out] * len(eqn.outvars)
        out = Known(scaled=any(k.scaled for k in ins))
        for jaxpr in unknown:
            self.run(at.unknown(jaxpr), [out] * len(closed(jaxpr).jaxpr.invars), last=last)
        return [out._replace(name=name_of(at, ins))] * len(eqn.outvars)

    def join(self, a: Known, b: Known) -> Known:
        each = {name: (getattr(a, name), getattr(b, name)) for name in ANALYSES}
        return Known(**{name: join(*each[name]) for name, (_, join) in ANALYSES.items()})
