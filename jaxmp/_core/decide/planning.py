"""Planning of jaxprs, each once per way of calling it, independent of how equations are decided."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from jaxmp._core.plan.demand import Demands
from jaxmp._core.plan.plan import NO_ORIGINS, DType, OriginId, Plan, Value
from jaxmp._core.plan.provenance import COMPUTED, joined
from jaxmp._core.plan.roots import Roots
from jaxmp._core.plan.rules import Rules

Pass = Callable[[Plan, "Planning"], Plan]
PlansOfJits = Callable[[tuple[Any, ...]], list[Any]]


def plans_of_jits() -> PlansOfJits:
    """Returns a cache of the latest plans of jits, by how they are called.

    JAX keeps the jaxprs of jits, so that programs traced one after the other share them. If they
    share their plans as well, JAX finds what it traced, differentiated and compiled for them. An
    entry is a list: empty, or of one plan. By a `ComparableProgram`, of a derivative rule, it is
    the first jaxpr that is equal to it.
    """
    return functools.lru_cache(maxsize=1024)(lambda _called: [])


class Planning:
    """The state that the plans of a program and of all jaxprs inside it share.

    Args:
      passes: functions from a plan, and its planner, to a plan; run in order on the plan of each
        jaxpr, inner ones first.
      tangents: values that are tangents though no governed operand is one; see `rule_calls`.
      jits: the plans of jits in earlier programs; see `plans_of_jits`.
    """

    def __init__(
        self,
        passes: Sequence[Pass] = (),
        tangents: frozenset[Any] = frozenset(),
        jits: PlansOfJits | None = None,
    ) -> None:
        self.passes = tuple(passes)
        self.tangents = tangents
        self.jits = jits or plans_of_jits()
        self.roots = Roots()
        self.demands = Demands(self.roots)
        self._planned = functools.cache(self._plan)
        self._leaving = functools.cache(self._leave)

    @property
    def another(self) -> Callable[..., Self]:
        """Makes a planner with the same passes and plans of jits, and nothing else of it.

        JAX's caches keep rules that call it.
        """
        return functools.partial(type(self), self.passes, jits=self.jits)

    def decided(self, *_called: Any) -> Plan:
        """Returns the plan of a jaxpr before any pass; `Planner` builds it with a `Frame`."""
        raise NotImplementedError

    def plan(
        self,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        *,
        outs: Sequence[DType | None] | None = None,
        summed: Sequence[bool] = (),
        roots: Sequence[str] = (),
        shared: bool = False,
        at: tuple[int, ...] = (),
    ) -> Plan:
        """Returns the plan of a jaxpr (open or closed).

        Args:
          jaxpr: the jaxpr.
          ins: how each operand is kept; a low one without origins is a low value of its own.
          wanted: the demand on each result.
          rules: the policy in force.
          outs: the dtype each result must be returned in, None for float32 or not governed; by
            default, the dtype it is kept in.
          summed: which results are sums carried through a loop, to be computed in float32.
          roots: the roots of the operands, of any dtype; by default, those of their values.
          shared: whether later programs have the same jaxpr: of a jit, which JAX keeps, or of a
            derivative rule that is equal to an earlier one.
          at: where the jaxpr that calls it does so; what it makes is named after that.
        """
        # Origins are renumbered, and those that came in with the same operands are merged: nothing
        # inside distinguishes them. So calls that differ only in origins, such as the layers on one
        # residual stream, share one plan, and the traces made from it.
        ins = [
            v._replace(origins=frozenset({OriginId((*at, -1 - i))}))
            if v and v.dtype and not v.origins
            else v
            for i, v in enumerate(ins)
        ]
        names = _renumbered(ins)
        local = tuple(_renamed(value, names) for value in ins)
        called = (jaxpr, local, tuple(wanted), rules, tuple(summed), tuple(roots))
        plan = self._planned(called, shared=shared)
        if outs is not None:
            plan = self._leaving(plan, tuple(outs))
        if all(v is None or not v.origins for v in plan.values):
            return plan
        back: dict[OriginId, set[OriginId]] = {}
        for here, [there] in names.items():
            back.setdefault(there, set()).add(here)
        for value in plan.values:
            for origin in value.origins if value else ():
                back.setdefault(origin, {origin._replace(at=(*at, *origin.at))})
        return dataclasses.replace(plan, values=tuple(_renamed(v, back) for v in plan.values))

    def _plan(self, called: tuple[Any, ...], *, shared: bool) -> Plan:
        known: list[Plan] = []
        if shared and not self.tangents:
            known = self.jits(called)
        if not known:
            plan = self.decided(*called)
            for each in self.passes:
                plan = each(plan, self)
            known.append(plan)
        return known[0]

    def _leave(self, plan: Plan, outs: Sequence[DType | None]) -> Plan:
        """Returns the plan with its results returned in other dtypes than they are kept in."""
        values, clip = list(plan.values), list(plan.clip)
        for i, (value, dtype) in enumerate(zip(plan.values, outs, strict=True)):
            if value is not None and value.dtype != dtype:
                values[i] = kept(dtype, [value], (len(plan.steps), i))
                clip[i] = value.stays_finite(plan.rules)
        if values == list(plan.values):
            return plan
        return dataclasses.replace(plan, values=tuple(values), clip=tuple(clip), built={})


def kept(dtype: DType | None, operands: Sequence[Value | None], at: tuple[int, ...]) -> Value:
    """Returns the value of a result, made `at` a place, that is kept in `dtype`."""
    values = [v for v in operands if v is not None]
    origins: frozenset[OriginId] = NO_ORIGINS
    low = [v for v in values if v.dtype is not None]
    if dtype is None:
        origins = origins.union(*(v.origins for v in values))
    else:
        # Of one low operand: a masked or scaled copy of it, which shares its statistics. Of
        # several: a new value (a residual sum).
        if len({v.origins for v in low}) == 1:
            origins = low[0].origins
        origins |= {OriginId(at)}
    provenance = COMPUTED if dtype else joined([v.provenance for v in values])
    return Value(dtype, origins, tangent=any(v.tangent for v in values), provenance=provenance)


def _renumbered(ins: Sequence[Value | None]) -> dict[OriginId, set[OriginId]]:
    """Maps each origin of the operands to the one that replaces it in the shared plan."""
    where: dict[OriginId, tuple[int, ...]] = {}
    for i, value in enumerate(ins):
        for origin in value.origins if value else ():
            where[origin] = (*where.get(origin, ()), i)
    places = sorted({(at, origin.exponential) for origin, at in where.items()})
    numbers = {place: (-1 - i,) for i, place in enumerate(places)}
    return {
        origin: {origin._replace(at=numbers[at, origin.exponential])}
        for origin, at in where.items()
    }


def _renamed(value: Value | None, names: Mapping[OriginId, set[OriginId]]) -> Value | None:
    if value is None or not value.origins:
        return value
    return value._replace(origins=NO_ORIGINS.union(*map(names.__getitem__, value.origins)))
