"""custom_jvp and custom_vjp functions, whose rules are preserved, and autocast as well.

The rule of the new function is the derivative of the *original call*, itself autocast: JAX applies
the author's rule when it differentiates the call, whatever it computes. Calls are never inlined: a
gradient-reversal layer would return the wrong sign, and a rematerializing attention would lose its
memory saving.

A rule is traced once per pattern of operands that are differentiated, and of cotangents that are
zero: with ``symbolic_zeros=True`` it may compute something else for each, and JAX refuses some
patterns. Any other jvp is traced for all operands that may be differentiated at once. Cotangents
known to be zero stay symbolic for every rule: under `jax.vmap` JAX accepts no others for some
results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from jaxmp._core.decide.planning import Planning
from jaxmp._core.execute.execute import CustomCall, execute
from jaxmp._core.execute.program_key import comparable
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import tangent_type
from jaxmp._core.passes.derivative_rules import (
    Call,
    ClosedOverError,
    Pattern,
    call_of,
    hidden_tangents,
    trace_rule,
)
from jaxmp._core.plan.demand import CONTRACTION, FULL, NOTHING, PRODUCT
from jaxmp._core.plan.plan import DType, Plan, Step, Value
from jaxmp._core.plan.roots import OTHER, is_zeros
from jaxmp._core.plan.rules import Rules, runs_as_written
from jaxmp._core.products.derivative import QuantizedDot

NewPlanner = Callable[..., Planning]


def derive(plan: Plan, planner: Planning) -> Plan:
    """Gives each step that calls a function with derivative rules a factory of it; a pass.

    The rules are planned with the same passes, and plans of jits, when it is first called.
    """
    another = planner.another

    def derived(step: Step) -> Step:
        op = step.op
        if not isinstance(op, CustomCall):
            return step
        if runs_as_written(step.plans[0].jaxpr, step.plans[0].rules):
            return step
        make = reverse_mode if op.reverse else forward_mode
        planned = functools.cache(lambda: make(call_of(step.eqn), step.plans[0], another))
        return dataclasses.replace(step, op=dataclasses.replace(op, derived=planned))

    return dataclasses.replace(plan, steps=tuple(map(derived, plan.steps)))


# Forward mode.


def forward_mode(call: Call, plan: Plan, another: NewPlanner) -> Callable[..., Any]:
    """Returns `call` planned, with its jvp planned when it is first differentiated."""
    planned = functools.cache(functools.partial(_plan_jvp, call, plan, another))
    fn = jax.custom_jvp(_named(call.name, lambda *args: execute(plan, args)))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        active = tuple(i for i in call.active if not isinstance(tangents[i], SymbolicZero))
        active = active or call.active
        rule, zeros = planned(active)
        outs = execute(rule, [*primals, *(_instantiated(tangents[i]) for i in active)])
        out = outs[: len(call.outs)]
        out_tangents: list[Any] = [np.zeros(x.shape, dtypes.float0) for x in out]
        for i, tangent, zero in zip(call.results, outs[len(out) :], zeros, strict=True):
            symbolic = zero and call.symbolic
            out_tangents[i] = SymbolicZero(jax.typeof(tangent)) if symbolic else tangent
        return out, out_tangents

    fn.defjvp(jvp, symbolic_zeros=call.symbolic)
    return fn


def _plan_jvp(
    call: Call, plan: Plan, another: NewPlanner, active: Pattern
) -> tuple[Plan, list[bool]]:
    """Plans the jvp with respect to `active` operands; also returns which tangents are zero."""

    def jvp(*args: Any) -> list[Any]:
        primals, tangents = args[: len(call.ins)], args[len(call.ins) :]
        fn = call.by(primals, active)
        out, out_tangents = jax.jvp(fn, [primals[i] for i in active], list(tangents))
        return [*out, *(out_tangents[i] for i in call.results)]

    avals = [*call.ins, *(tangent_type(call.ins[i]) for i in active)]
    jaxpr, _ = trace_rule(call, jvp, avals, plan)
    linear = [False] * len(call.ins) + [True] * len(active)
    rules = plan.rules
    planner = another(tangents=hidden_tangents(jaxpr, linear, rules))
    ins = [_kept(rules, *operand) for operand in zip(call.ins, plan.arguments, strict=True)]
    ins += [_kept(rules, call.ins[i], plan.arguments[i], tangent=True) for i in active]
    outs = [*plan.outs, *(plan.outs[i] for i in call.results)]
    zeros = _zeros(jaxpr)[len(call.outs) :]
    wanted = [*_wanted(plan.outs, plan), *_wanted(outs[len(plan.outs) :])]
    return planner.plan(jaxpr, ins, wanted, rules, outs=outs), zeros


# Reverse mode.


def reverse_mode(call: Call, plan: Plan, another: NewPlanner) -> Callable[..., Any]:
    """Returns `call` planned, with its passes of reverse mode planned when first differentiated."""
    rule = functools.cache(functools.partial(_Pullback, call, plan, another))
    fn = jax.custom_vjp(_named(call.name, lambda *args: execute(plan, args)))

    def forward(*args: Any) -> tuple[list[Any], tuple[_Pullback, list[Any]]]:
        # JAX may refuse a rule for more operands than it differentiates with respect to: `jax.vmap`
        # of a jit turns values that a function closes over into operands.
        pullback = rule(tuple(i for i in call.active if args[i].perturbed) or call.active)
        outs = execute(pullback.forward, [x.value for x in args])
        return outs[: len(call.outs)], (pullback, outs[len(call.outs) :])

    def backward(saved: tuple[_Pullback, list[Any]], cotangents: list[Any]) -> tuple[Any, ...]:
        pullback, residuals = saved
        given = tuple(i for i in call.results if not isinstance(cotangents[i], SymbolicZero))
        plan, zeros = pullback.backward(given)
        out = execute(plan, [*residuals, *(_instantiated(cotangents[i]) for i in given)])
        grads: list[Any] = [None] * len(call.ins)
        for i, grad, zero in zip(pullback.active, out, zeros, strict=True):
            grads[i] = None if zero and call.symbolic else grad
        return tuple(grads)

    fn.defvjp(forward, backward, symbolic_zeros=True)
    return fn


@jax.tree_util.register_static
class _Pullback:
    """The plans of a rule: of the forward pass, and of the backward pass per pattern.

    Attributes:
      active: the operands it differentiates with respect to.
      forward: the plan that computes the results and the residuals.
      backward: cotangents that are not known to be zero → the plan, and which gradients are zero.
    """

    def __init__(self, call: Call, plan: Plan, another: NewPlanner, active: Pattern) -> None:
        self.active = active
        self.backward = functools.cache(self._plan_backward)
        self._call, self._plan = call, plan
        self._grads = [plan.ins[i] for i in active]
        self._planner = another()
        self._compared: set[Any] = set()  # jaxprs that later traces share
        self._trace_backward: Callable[[Pattern], Any] = functools.cache(self._backward_jaxpr)
        n_out = len(call.outs)
        jaxpr, (_, pullback) = self._traced(self._vjp, call.ins)
        self._tree = jax.tree.structure(pullback)
        self._saved = [v.aval for v in compat.closed(jaxpr).jaxpr.outvars[n_out:]]
        wanted = [*_wanted(plan.outs, plan), *self._saved_for()]
        operands = zip(call.ins, plan.arguments, strict=True)
        ins = [_kept(plan.rules, *operand) for operand in operands]
        free = self._planned(jaxpr, ins, wanted)
        outs = [*plan.outs, *free.outs[n_out:]]
        self.forward = self._planned(jaxpr, ins, wanted, outs)

    def _traced(
        self, rule: Callable[..., Any], avals: Sequence[Any], *, backward: bool = False
    ) -> tuple[Any, Any]:
        """Traces a rule; equal jaxprs are one object, so that `_planned` finds an earlier plan."""
        jaxpr, shapes = trace_rule(self._call, rule, avals, self._plan, backward=backward)
        program = comparable(jaxpr, lines=True)
        if program is not None:
            first = self._planner.jits((program,))
            if not first:
                first.append(jaxpr)
            [jaxpr] = first
            self._compared.add(jaxpr)
        return jaxpr, shapes

    def _planned(
        self,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        outs: Sequence[DType | None] | None = None,
    ) -> Plan:
        rules, compared = self._plan.rules, jaxpr in self._compared
        return self._planner.plan(jaxpr, ins, wanted, rules, outs=outs, shared=compared)

    def _vjp(self, *args: Any) -> tuple[list[Any], Any]:
        return jax.vjp(self._call.by(args, self.active), *(args[i] for i in self.active))

    def _saved_for(self) -> Sequence[int]:
        """Returns the demand of the backward pass on each residual."""
        try:
            jaxpr = self._trace_backward(self._call.results)
        except ClosedOverError:
            raise
        except Exception:  # noqa: BLE001 (whatever the author's rule, or JAX for it, says)
            # It does not accept all cotangents at once. Later it only gets those that are not zero.
            return [FULL] * len(self._saved)
        operands = compat.closed(jaxpr).jaxpr.invars
        roots = [OTHER] * len(operands)
        rules = self._plan.rules
        demand = self._planner.demands(jaxpr, _wanted(self._grads), rules, roots)
        return demand.ins[: len(self._saved)]

    def _backward_jaxpr(self, given: Pattern) -> Any:
        """Traces the backward pass of the cotangents that are not known to be zero."""

        def bwd(*args: Any) -> list[Any]:
            residuals, cotangents = args[: len(self._saved)], iter(args[len(self._saved) :])
            pullback = jax.tree.unflatten(self._tree, residuals)
            return list(pullback(self._cotangents(cotangents, given)))

        avals = [tangent_type(self._call.outs[i]) for i in given]
        jaxpr, _ = self._traced(bwd, [*self._saved, *avals], backward=True)
        linear = [False] * len(self._saved) + [True] * len(avals)
        self._planner.tangents |= hidden_tangents(jaxpr, linear, self._plan.rules)
        return jaxpr

    def _cotangents(self, arrays: Iterator[Any], given: Pattern) -> list[Any]:
        """Returns one cotangent per result: an array for those in `given`, else a symbolic zero."""
        return [
            next(arrays) if i in given else compat.symbolic_zero(aval)
            for i, aval in enumerate(self._call.outs)
        ]

    def _plan_backward(self, given: Pattern) -> tuple[Plan, list[bool]]:
        jaxpr, outs = self._trace_backward(given), self._call.outs
        ins = [
            value._replace(tangent=False) if value is not None else None
            for value in self.forward.values[len(outs) :]
        ]
        kept, rules = [Value(dtype) for dtype in self._plan.outs], self._plan.rules
        ins += [_kept(rules, outs[i], kept[i], tangent=True) for i in given]
        plan = self._planned(jaxpr, ins, _wanted(self._grads), self._grads)
        return plan, _zeros(jaxpr)


def _named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Names a function as its author did, for jaxprs and profiles to show."""
    fn.__name__ = name
    return fn


def _instantiated(tangent: Any) -> Any:
    """Returns a tangent as an array, filled with zeros if it is a symbolic zero."""
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _zeros(jaxpr: Any) -> list[bool]:
    """Returns which results of a jaxpr are zeros, as JAX instantiates symbolic zeros."""
    opened = compat.closed(jaxpr).jaxpr
    zeros = {eqn.outvars[0] for eqn in opened.eqns if is_zeros(eqn)}
    return [
        not np.any(atom.val) if isinstance(atom, Literal) else atom in zeros
        for atom in opened.outvars
    ]


def _kept(rules: Rules, aval: Any, value: Value | None, *, tangent: bool = False) -> Value | None:
    """Returns how a rule's operand is kept: like the call's operand or result it belongs to."""
    if not rules.governs(SimpleNamespace(aval=aval)):
        return None
    value = value or Value()
    root = OTHER if tangent else value.root
    if value.dtype is None:
        return Value(tangent=tangent, provenance=value.provenance, root=root)
    return Value(value.dtype, tangent=tangent, root=root)


def _wanted(outs: Sequence[DType | None], plan: Plan | None = None) -> list[int]:
    """Returns the demand that keeps each result in the dtype it must be returned in.

    It also keeps products in 8 bits, if the plan of the call has any in 8 bits.
    """
    products = plan is not None and any(isinstance(s.op, QuantizedDot) for s, *_ in plan.tally())
    later = PRODUCT if products else NOTHING
    return [later | (FULL if dtype is None else CONTRACTION) for dtype in outs]
