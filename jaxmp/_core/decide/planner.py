"""Forward pass: decides for each equation in which dtype it runs, and why."""

from __future__ import annotations

from typing import Any

from jaxmp._core.decide.by_recipe import by_recipe
from jaxmp._core.decide.control_flow import plan_inside
from jaxmp._core.decide.first_order import decide
from jaxmp._core.decide.frame import Frame
from jaxmp._core.decide.planning import Planning
from jaxmp._core.plan.plan import Plan


class Planner(Planning):
    """A planner of jaxprs and those inside them: one plan per inner jaxpr and way of calling it."""

    def decided(self, *called: Any) -> Plan:
        """Returns a plan in which every equation is decided, in order."""
        frame = Frame(self, *called)
        steps = []
        for number, eqn in enumerate(frame.jaxpr.eqns):
            facts = frame.facts(number, eqn)
            decision = plan_inside(facts) if facts.inners else decide(facts)
            if decision.multiplies:
                decision = by_recipe(facts, decision)
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
