"""Follows what an audit knows of values forward through a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core

from jaxmp._audit.facts import ANALYSES, FLOAT32, Known, ValueKind, ValueName, name_of
from jaxmp._audit.loss_scale_power import degree_of_literal
from jaxmp._autocast.annotations import contracts
from jaxmp._autocast.provenance import is_basis
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import short_type
from jaxmp._jaxprs.compat import closed, dtype_of
from jaxmp._jaxprs.follow import Follower
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.place import Place


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
