"""A whole program: traced, planned, and run with casts at its boundary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._core.autocast.eager import Run
from jaxmp._core.decide.planner import Planner
from jaxmp._core.decide.planning import Pass, PlansOfJits
from jaxmp._core.execute.environment import cast
from jaxmp._core.execute.execute import Execute, execute
from jaxmp._core.execute.program_key import with_equal_bodies
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_weak, with_weak_type
from jaxmp._core.jaxprs.split_layers import split_layers
from jaxmp._core.jaxprs.trace import Traced, trace
from jaxmp._core.passes.order import PASSES
from jaxmp._core.passes.rematerialize import recompute
from jaxmp._core.plan.demand import CONTRACTION, FULL
from jaxmp._core.plan.plan import Plan, Value
from jaxmp._core.plan.provenance import DATA, PARAMETER
from jaxmp._core.plan.regions import inside_autocast
from jaxmp._core.plan.roots import OTHER, WEIGHTS
from jaxmp._core.plan.rules import rules_for
from jaxmp._core.quantize.sink_dequantize import sink_dequantize
from jaxmp.policy import Policy


def trace_program(fn: Callable[..., Any], args: Any, kwargs: Any, policy: Policy) -> Traced:
    """Traces a call of `fn`, to be planned."""
    with inside_autocast(policy):
        traced = trace(fn, args, kwargs)
        return traced._replace(jaxpr=with_equal_bodies(sink_dequantize(split_layers(traced.jaxpr))))


def plan_program(
    jaxpr: Any,
    policy: Policy,
    parameters: Sequence[bool],
    passes: Sequence[Pass] = PASSES,
    jits: PlansOfJits | None = None,
) -> Plan:
    """Plans a whole program under a policy, given which of its operands are parameters.

    The passes are applied, in order, to the plan of each jaxpr. `jits` are those of earlier
    programs under the same policy, with the same passes, on the same device.
    """
    rules = rules_for(policy)
    planner = Planner(passes, jits=jits)
    stored, output = np.dtype(policy.param_dtype), np.dtype(policy.output_dtype)
    open_jaxpr = compat.closed(jaxpr).jaxpr
    ins = [
        None
        if not rules.governs(var)
        else Value(
            rules.low if stored == rules.low else None,
            argument=True,
            provenance=PARAMETER if parameter else DATA,
        )
        for var, parameter in zip(open_jaxpr.invars, parameters, strict=True)
    ]
    low_output = output == rules.low
    wanted = [CONTRACTION if low_output else FULL] * len(open_jaxpr.outvars)
    outs = [rules.low if low_output and rules.governs(var) else None for var in open_jaxpr.outvars]
    roots = [WEIGHTS if parameter else OTHER for parameter in parameters]
    plan = planner.plan(jaxpr, ins, wanted, rules, outs=outs, roots=roots)
    recomputes = any(t.step.rules.policy.residuals != "save" for t in plan.tally())
    return recompute(plan) if recomputes else plan


def run_program(
    plan: Plan, arrays: Sequence[Any], policy: Policy, run: Execute = execute
) -> list[Any]:
    """Runs a planned program on arrays, concrete or traced, with casts at its boundary."""
    stored, output = np.dtype(policy.param_dtype), np.dtype(policy.output_dtype)
    args = []
    for var, array, dtype in zip(plan.jaxpr.invars, arrays, plan.ins, strict=True):
        # This makes its gradient weakly typed, as in the program as written.
        array = with_weak_type(array, weak=False)
        if plan.rules.governs(var):
            # An argument is kept finite, as a literal is; a computed value is not.
            array = cast(jnp.asarray(array), stored, saturate=True)
            array = cast(array, dtype or plan.rules.wide, saturate=True)
        args.append(array)
    outs = run(plan, args)
    clip = plan.rules.saturate
    return [
        with_weak_type(
            cast(x, output, saturate=clip) if plan.rules.governs(var) else x,
            weak=is_weak(var.aval),
        )
        for var, x in zip(plan.jaxpr.outvars, outs, strict=True)
    ]


def runner(plan: Plan, policy: Policy) -> Run:
    """Returns a function that runs a planned program on arrays and constants; it keeps neither."""
    bare = dataclasses.replace(plan, jaxpr=compat.without_values(plan.jaxpr), consts=())

    def run(arrays: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        return run_program(dataclasses.replace(bare, consts=tuple(consts)), arrays, policy)

    return run
