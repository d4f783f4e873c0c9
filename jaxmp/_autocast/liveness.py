"""What steps read, and which of them is the last to read a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxmp._autocast.plan import Plan, Step


def moves(plan: Plan) -> dict[Any, Step]:
    """For each variable that a move makes, the step."""
    return {v: s for s in plan.steps if s.op.moves for v in s.eqn.outvars}


def reads(step: Step, moved_by: Mapping[Any, Step]) -> Iterator[Any]:
    """Finds the variables that running a step reads.

    Args:
      step: the step.
      moved_by: what `moves` returns: gradients of parameters go to what these were given.
    """
    yield from step.op.reads(step)
    way = [step.eqn.invars[i] for i in step.op.parameters]
    while way:
        atom = way.pop()
        if not isinstance(atom, Literal):
            yield atom
            way += moved_by[atom].eqn.invars if atom in moved_by else ()


def last_reads(plan: Plan) -> Sequence[tuple[Any, ...]]:
    """Finds for each step the variables that nothing reads after it; once per plan."""
    if "last_reads" not in plan.built:
        moved_by = moves(plan)
        later = {v for v in plan.jaxpr.outvars if not isinstance(v, Literal)}
        found = []
        for step in reversed(plan.steps):
            here = {*reads(step, moved_by), *step.eqn.outvars} - later
            found.append(tuple(here))
            later |= here
        plan.built["last_reads"] = found[::-1]
    return plan.built["last_reads"]  # type: ignore[no-any-return]
