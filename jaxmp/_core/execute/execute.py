"""Runs a jaxpr under a plan: each step by its op. Nothing is decided here.

Equations are bound again one by one, under their own source line, name stack and context, so the
transformed program differs from the one as written only in dtypes and conversions. Higher-order
primitives are bound again with their inner jaxprs replaced and every other parameter as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmp._core.execute.annotations import marked
from jaxmp._core.execute.bind import Drop
from jaxmp._core.execute.environment import Environment, cast, clip
from jaxmp._core.execute.jit_groups import jit_groups, run_group
from jaxmp._core.execute.program_key import Bodies
from jaxmp._core.host_memory import check_host_memory
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import in_context, is_abstract, under, with_dtype
from jaxmp._core.jaxprs.compat import bind, dtype_of, rematerialize
from jaxmp._core.jaxprs.higher_order import inside, rebind
from jaxmp._core.plan.plan import Op, OperandCast, Plan, Segment, Step
from jaxmp._core.plan.rules import FLOAT16
from jaxmp.checkpoint_policies import OFFLOADED, long_products, offload_long_products

Execute = Callable[[Plan, Sequence[Any]], list[Any]]


def execute(plan: Plan, args: Sequence[Any], *, looped: bool = False) -> list[Any]:
    """Runs a planned jaxpr.

    Args:
      plan: the plan.
      args: one array per operand, in the dtypes `plan.ins`.
      looped: whether it is run by a loop.

    Returns:
      One array per result, in the dtypes `plan.outs`.
    """
    env = Environment(plan, args, looped=looped)
    # Concrete arrays are computed step by step, so to the same bits as without autocast.
    together = any(map(is_abstract, args))
    done = 0
    for segment in plan.segments:
        _run(plan, slice(done, segment.start), env, together=together)
        _run_again(plan, segment, env)
        for dead in plan.last_reads[segment.start : segment.stop]:
            env.drop(dead)
        done = segment.stop
    _run(plan, slice(done, None), env, together=together)
    results = []
    for atom, dtype, saturate in zip(plan.jaxpr.outvars, plan.outs, plan.clip, strict=True):
        in_full = dtype is None and dtype_of(atom) == plan.rules.wide
        read = OperandCast(plan.rules.wide if in_full else dtype, saturate)
        results.append(env.read(atom, read))
    return results


def _run(plan: Plan, part: slice, env: Environment, *, together: bool) -> None:
    """Runs a slice of the steps, those of one source line `together` or one by one."""
    ends = iter(plan.last_reads[part])
    steps = plan.steps[part]
    for group in jit_groups(steps) if together else ((step,) for step in steps):
        step = group[0]
        if not isinstance(step.op, Drop):
            with compat.source_of(step.eqn), in_context(step.eqn), marked(step):
                run_group(group, env) if len(group) > 1 else _run_step(step, env)
        for _ in group:
            env.drop(next(ends))


def _run_step(step: Step, env: Environment) -> None:
    outs = step.op.run(step, env)
    for var, out, dtype in zip(step.eqn.outvars, outs, step.outs, strict=True):
        if dtype is not None:
            out = cast(out, dtype, saturate=step.clips)
        if step.clips and out.dtype == FLOAT16:
            out = clip(step, out, env)
        env.arrays[var] = out


def _run_again(plan: Plan, segment: Segment, env: Environment) -> None:
    """Runs a segment, whose cheap values are rematerialized in the backward pass."""
    policy = offload_long_products if segment.offloads else long_products
    if segment.offloads:
        check_host_memory("residuals=offload", "residuals=recompute")

    def run() -> list[Any]:
        inner = env.within()
        for var in segment.copied:
            inner.arrays[var] = checkpoint_name(env.arrays[var], OFFLOADED)
        _run(plan, slice(segment.start, segment.stop), inner, together=True)
        return [inner.arrays[var] for var in segment.results]

    whole, operands = compat.without_consts(jax.make_jaxpr(run)())
    bodies = plan.built.setdefault("bodies", Bodies())
    body, names = bodies.one(compat.closed(whole).jaxpr)
    with under(names):
        # The backward pass of a loop is a loop of its own, with no forward values to share by CSE.
        again = rematerialize(body, operands, policy, prevent_cse=not env.looped)
    env.arrays.update(zip(segment.results, again, strict=True))


# Higher-order equations.


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A plan in place of the jaxpr that it plans, to be called or traced."""

    plan: Plan
    looped: bool

    def __call__(self, *arrays: Any) -> list[Any]:
        return execute(self.plan, arrays, looped=self.looped)

    def trace(self) -> Any:
        plan, looped, key = self.plan, self.looped, ("jit", self.looped)
        if key not in plan.built:
            plan.built[key] = jax.jit(lambda *args: execute(plan, args, looped=looped))
        avals = [
            v.aval if dtype is None else with_dtype(v.aval, dtype)
            for v, dtype in zip(plan.jaxpr.invars, plan.ins, strict=True)
        ]
        return compat.trace(plan.built[key], avals)


class Inside(Op):
    """The op that binds an equation with plans in place of its jaxprs."""

    def run(self, step: Step, env: Environment) -> list[Any]:
        operands = env.operands(step)
        if all(inner.unchanged for inner in step.plans):
            return bind(step.eqn, operands)
        looped = env.looped or any(inner.loops for inner in inside(step.eqn))
        return rebind(step.eqn, operands, [_Planned(plan, looped) for plan in step.plans])


@dataclasses.dataclass(frozen=True)
class CustomCall(Op):
    """The op that calls a function with a custom derivative rule.

    Attributes:
      reverse: whether it has a `jax.custom_vjp` rule.
      derived: makes the function, with its rules transformed; None binds it as written.
    """

    reverse: bool
    derived: Callable[[], Callable[..., Any]] | None = None

    @property
    def as_is(self) -> bool:  # type: ignore[override]
        """See `Op`. The derivative rule, not traced yet, may contain contractions."""
        return self.derived is None

    def run(self, step: Step, env: Environment) -> list[Any]:
        operands = env.operands(step)
        if self.derived is None:
            return bind(step.eqn, operands)
        return list(self.derived()(*operands))
