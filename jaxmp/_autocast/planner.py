"""Forward pass: decides for each equation in which dtype it runs, and why.

A low value has an identity. A float32 value remembers the low values it derives from since the last
contraction (its origins). That is what tells `x - mean(x)` (a normalization: float32) from `x - y`
(an elementwise op: low).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmp._autocast.control_flow import plan_inside
from jaxmp._autocast.first_order import decide
from jaxmp._autocast.frame import Frame, stays_finite
from jaxmp._autocast.plan import NO_ORIGINS, DType, OriginId, Plan, Value
from jaxmp._autocast.planning import Planning
from jaxmp._autocast.rules import Rules

Pass = Callable[[Plan, "Planner"], Plan]


class Planner(Planning):
    """Plans a jaxpr and those inside it, one plan per inner jaxpr and way of calling it.

    Args:
      passes: from a plan, and the planner that made it, to another; run in order on the plan of
        each jaxpr, those inside first.
      tangents: see `Planning`.
    """

    def __init__(self, passes: Sequence[Pass] = (), tangents: frozenset[Any] = frozenset()) -> None:
        super().__init__(tangents)
        self.passes = tuple(passes)
        self._memo: dict[Any, Plan] = {}

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
    ) -> Plan:
        """See `Planning.plan`."""
        # Identities are renumbered, and those that came in with the same operands are one: nothing
        # inside tells them apart. So calls that differ only in them, such as the layers on one
        # residual stream, share one plan, and what is traced from it.
        names = _renumbered(ins)
        local = tuple(_renamed(value, names) for value in ins)
        key = (jaxpr, local, tuple(wanted), rules, tuple(summed), tuple(roots))
        if key not in self._memo:
            frame = Frame(self, jaxpr, local, wanted, rules, summed, roots)
            self._memo[key] = self._passed(_decided(frame))
        plan = self._memo[key]
        if outs is not None:
            leaving = (key, tuple(outs))
            if leaving not in self._memo:
                self._memo[leaving] = self._leaving(plan, outs)
            plan = self._memo[leaving]
        if not plan.values or all(v is None or not v.origins for v in plan.values):
            return plan
        back: dict[OriginId, set[OriginId]] = {}
        for here, [there] in names.items():
            back.setdefault(there, set()).add(here)
        for value in plan.values:
            for origin in value.origins if value else ():
                if origin not in back:
                    back[origin] = {self.fresh(exponential=origin.exponential)}
        return dataclasses.replace(plan, values=tuple(_renamed(v, back) for v in plan.values))

    def _passed(self, plan: Plan) -> Plan:
        for each in self.passes:
            plan = each(plan, self)
        return plan

    def _leaving(self, plan: Plan, outs: Sequence[DType | None]) -> Plan:
        """A plan whose results leave in other dtypes than they are kept in."""
        pairs = list(zip(plan.values, outs, strict=True))
        differs = [value is not None and value.dtype != dtype for value, dtype in pairs]
        if not any(differs):
            return plan
        return dataclasses.replace(
            plan,
            values=tuple(
                self.kept(dtype, [value]) if other else value
                for (value, dtype), other in zip(pairs, differs, strict=True)
            ),
            clip=tuple(
                other and stays_finite(value, plan.rules)
                for (value, _), other in zip(pairs, differs, strict=True)
            ),
            built={},
        )


def _renumbered(ins: Sequence[Value | None]) -> dict[OriginId, set[OriginId]]:
    """For each identity that operands have, the one it is in a plan of its own."""
    where: dict[OriginId, tuple[int, ...]] = {}
    for i, value in enumerate(ins):
        for origin in value.origins if value else ():
            where[origin] = (*where.get(origin, ()), i)
    places = sorted({(at, origin.exponential) for origin, at in where.items()})
    numbers = {place: -1 - i for i, place in enumerate(places)}
    return {
        origin: {origin._replace(number=numbers[at, origin.exponential])}
        for origin, at in where.items()
    }


def _renamed(value: Value | None, names: Mapping[OriginId, set[OriginId]]) -> Value | None:
    if value is None or not value.origins:
        return value
    return value._replace(origins=NO_ORIGINS.union(*map(names.__getitem__, value.origins)))


def _decided(frame: Frame) -> Plan:
    """The plan of the jaxpr of a frame, every equation in order."""
    steps = []
    for eqn in frame.jaxpr.eqns:
        facts = frame.facts(eqn)
        decision = plan_inside(facts) if facts.inners else decide(facts)
        steps.append(frame.record(facts, decision))
    results = tuple(map(frame.read, frame.jaxpr.outvars))
    return Plan(
        jaxpr=frame.jaxpr,
        consts=frame.consts,
        rules=frame.rules,
        steps=tuple(steps),
        arguments=frame.ins,
        values=results,
        clip=(False,) * len(results),
    )
