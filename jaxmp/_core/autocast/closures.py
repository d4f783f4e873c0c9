"""Programs with a derivative rule that closes over a value of an enclosing function.

`autocast` plans a program from its trace. JAX keeps rules in it as Python functions and runs them
when it differentiates, after the trace is over; a rule that reads a traced value of the program by
closure (implicit differentiation of an objective that closes over an argument of the loss) then
reads a leaked tracer. Without autocast it does not, because `jax.grad` runs rules while the program
is traced. So such a program runs as written, in float32, with a warning.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax.extend.core import JaxprEqn

from jaxmp._core.autocast.coverage_warnings import warn_closing
from jaxmp._core.execute.annotations import keeps
from jaxmp._core.execute.environment import cast
from jaxmp._core.execute.execute import CustomCall, Execute, execute
from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.jaxprs.dataflow import Inside, forward
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.passes.derivative_rules import ClosedOverError, Pattern, call_of, trace_rule
from jaxmp._core.plan.plan import Plan, Step
from jaxmp._core.plan.provenance import PARAMETER
from jaxmp._core.plan.rules import runs_as_written
from jaxmp._core.plan.why import Kind


def perturbed(plan: Plan) -> dict[int, Pattern]:
    """Returns the operands that JAX differentiates equations with respect to, by the equation's id.

    They depend on parameters; on any operand, in a program that has no parameters.
    """
    found = defaultdict[int, set[int]](set)

    def transfer(eqn: JaxprEqn, read: list[bool], inside: Inside[bool]) -> list[bool]:
        found[id(eqn)].update(i for i, active in enumerate(read) if active)
        if not any(read) or eqn.primitive.name == "stop_gradient":
            return [False] * len(eqn.outvars)
        outs = inside(read) or [True] * len(eqn.outvars)
        return [x and is_inexact(var.aval) for x, var in zip(outs, eqn.outvars, strict=True)]

    parameters = [v is not None and v.provenance == PARAMETER for v in plan.arguments]
    given = parameters if any(parameters) else [True] * len(parameters)
    forward(plan.jaxpr, given, transfer, operator.or_, nothing=False)
    return {eqn: tuple(sorted(active)) for eqn, active in found.items()}


def closing(plan: Plan) -> list[Step]:
    """Returns the steps whose derivative rule uses a traced value that is not an operand.

    Rules are traced for the operands that JAX differentiates with respect to, as far as can be
    known before: where JAX refuses a pattern, the equation cannot be differentiated afterwards
    (the stores of its transformed rules are emptied), and may be in the caches of JAX's jits.
    """
    active = perturbed(plan)
    return [step for step in _custom_calls(plan) if _closes_over(step, active)]


def _custom_calls(plan: Plan) -> Iterator[Step]:
    """Yields the steps that call a function with a custom derivative rule."""
    return (step for step, *_ in plan.tally() if isinstance(step.op, CustomCall))


def _closes_over(step: Step, perturbed: Mapping[int, Pattern]) -> bool:
    call, rules = call_of(step.eqn), step.plans[0].rules
    active = tuple(i for i in call.active if i in perturbed.get(id(step.eqn), ())) or call.active
    [inner] = inside(step.eqn)

    def derivative(*args: Any) -> Any:
        fn, primals = call.by(args, active), [args[i] for i in active]
        if inner.rule == "custom_jvp":
            return jax.jvp(fn, primals, primals)[1]
        out, pullback = jax.vjp(fn, *primals)
        return pullback(
            [
                x if i in call.results else np.zeros(x.shape, dtypes.float0)
                for i, x in enumerate(out)
            ]
        )

    if runs_as_written(step.plans[0].jaxpr, rules):
        return False
    try:
        trace_rule(call, derivative, call.ins, step.plans[0])
    except ClosedOverError:
        return True
    except Exception:  # noqa: BLE001
        return False  # a rule for other patterns than this, or a wrong one: JAX raises later
    return False


def run(
    flat: Callable[..., list[Any]],
    plan: Plan,
    program: Callable[[Execute], list[Any]],
    known: set[str],
) -> list[Any]:
    """Runs a program; as written, with a warning, if its derivative rules close over its values.

    Args:
      flat: the program as a function of its flat arrays, as written.
      plan: its plan.
      program: runs the whole program, given the function that executes its plan.
      known: see `coverage_warnings`.
    """
    try:
        return program(execute)
    except ClosedOverError:
        warn_closing([step.eqn for step in closing(plan)], known)
    return program(_as_written(flat))


def _as_written(flat: Callable[..., list[Any]]) -> Execute:
    """Returns a function that runs the program as written, on operands in float32."""

    @jax.named_scope(keeps(Kind.CLOSES_OVER.of()))
    def run_flat(plan: Plan, args: Sequence[Any]) -> list[Any]:
        kept = zip(args, plan.ins, strict=True)
        return flat(*(x if low is None else cast(x, plan.rules.wide) for x, low in kept))

    return run_flat
