"""Programs with a derivative rule that closes over a value of an enclosing function.

`autocast` plans a program from its trace. JAX keeps rules in it as Python functions and runs them
when it differentiates, after the trace is over; a rule that reads a traced value of the program by
closure (implicit differentiation of an objective that closes over an argument of the loss) then
reads a leaked tracer. Without autocast it does not, because `jax.grad` runs rules while the program
is traced. So such a program is differentiated while it is traced, as by JAX, and the result is
planned: a forward and a backward pass for the whole program.
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

from jaxmp._autocast import derivatives
from jaxmp._autocast.annotations import keeps
from jaxmp._autocast.coverage_warnings import warn_closing
from jaxmp._autocast.derivatives import Execute
from jaxmp._autocast.environment import cast
from jaxmp._autocast.execute import CustomCall, execute
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.planner import Planner
from jaxmp._autocast.planning import Pass
from jaxmp._autocast.provenance import PARAMETER
from jaxmp._autocast.rule_calls import Call, ClosedOverError, Pattern, call_of, trace_rule
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import function_name, is_inexact, is_tracer
from jaxmp._jaxprs.dataflow import Inside, forward
from jaxmp._jaxprs.higher_order import inside

REASON = "its derivative rule closes over a traced value: the whole program is differentiated first"


def custom_calls(plan: Plan, *, looped: bool = False) -> Iterator[tuple[Step, CustomCall, bool]]:
    """Yields each step that calls a function with a custom rule, its op, and if a scan runs it."""
    for step in plan.steps:
        if isinstance(step.op, CustomCall):
            yield step, step.op, looped
        for inner, called in step.inner_plans:
            scan = inner.loops and not inner.open_ended
            yield from custom_calls(called, looped=looped or scan)


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
    return [step for step, *_ in custom_calls(plan) if _closes_over(step, active)]


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

    if rules.as_written:
        return False
    try:
        trace_rule(call, derivative, call.ins, rules.policy)
    except ClosedOverError:
        return True
    except Exception:  # noqa: BLE001
        return False  # a rule for other patterns than this, or a wrong one: JAX raises later
    return False


def likely(plan: Plan) -> bool:
    """Returns whether a program has such a rule, as far as is known before differentiation.

    Only calls that themselves close over something are checked; a rule that alone does so is found
    when it is differentiated, by `ClosedOverError`.
    """
    if "closing" not in plan.built:
        candidates = [s for s, *_ in custom_calls(plan) if compat.custom_rule(s.eqn).n_consts]
        active = perturbed(plan) if candidates else {}
        plan.built["closing"] = any(_closes_over(step, active) for step in candidates)
    return bool(plan.built["closing"])


def run(
    flat: Callable[..., list[Any]],
    plan: Plan,
    passes: Sequence[Pass],
    program: Callable[[Execute], list[Any]],
    known: set[str],
) -> list[Any]:
    """Runs a program, whatever its derivative rules close over.

    Args:
      flat: the program as a function of its flat arrays, as written.
      plan: its plan.
      passes: those of its planner.
      program: runs the whole program, given the function that executes its plan.
      known: see `coverage_warnings`.
    """
    if not likely(plan):
        try:
            return program(execute)
        except ClosedOverError:
            plan.built["closing"] = True
    # Which of these constants is being differentiated cannot be known here.
    if not any(map(is_tracer, plan.consts)):
        try:
            return program(_whole(flat, plan, passes))
        except ClosedOverError:
            pass  # a second derivative, or a rule inside a loop: only JAX itself may handle it
    warn_closing([step.eqn for step in closing(plan)], known)
    return program(_as_written(flat))


def _as_written(flat: Callable[..., list[Any]]) -> Execute:
    """Returns a function that runs the program as written, on operands in float32."""

    @jax.named_scope(keeps(Kind.CLOSES_OVER.of()))
    def run_flat(plan: Plan, args: Sequence[Any]) -> list[Any]:
        kept = zip(args, plan.ins, strict=True)
        return flat(*(x if low is None else cast(x, plan.rules.wide) for x, low in kept))

    return run_flat


def _whole(flat: Callable[..., list[Any]], plan: Plan, passes: Sequence[Pass]) -> Execute:
    """Returns a function that runs a program, differentiated before it is planned, as one call.

    Its rules see the same perturbations as without autocast.
    """
    # JAX cannot partially evaluate the jvp of a scan over such a rule; it can compute a vjp.
    reverse = any(looped or op.reverse for _, op, looped in custom_calls(plan))
    make = derivatives.reverse_mode if reverse else derivatives.forward_mode
    ins = tuple(v.aval for v in plan.jaxpr.invars)
    call = Call(
        name=function_name(plan.jaxpr),
        run=lambda args: flat(*args),
        ins=ins,
        outs=tuple(v.aval for v in plan.jaxpr.outvars),
        active=tuple(i for i, aval in enumerate(ins) if is_inexact(aval)),
        symbolic=True,
        closes=True,
    )
    return lambda _plan, args: list(make(call, plan, Planner(passes).another)(*args))
