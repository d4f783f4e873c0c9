"""The rules of custom_jvp and custom_vjp functions, traced to jaxprs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.jaxprs.dataflow import Inside, forward
from jaxmp._core.jaxprs.split_layers import split_layers
from jaxmp._core.passes.by_hand import refuse_by_hand, rule_policy
from jaxmp._core.plan.plan import Plan
from jaxmp._core.plan.regions import in_region, inside_rule
from jaxmp._core.plan.rules import Rules

Pattern = tuple[int, ...]


class ClosedOverError(ValueError):
    """A derivative rule uses a traced value of an enclosing function that is not an operand.

    That trace is over by the time the rule runs. `closures` runs such a program as written.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"autocast: the derivative rule of {name} closes over a traced value of the function "
            "that calls it, and that function is traced before it is differentiated: pass the "
            "value as an argument."
        )


class Call(NamedTuple):
    """A function of flat operands with a custom derivative rule.

    Attributes:
      name: its author's name for it.
      run: the function, which JAX can differentiate.
      ins: the avals of its operands, and `outs` those of its results.
      active: the operands it may be differentiated with respect to.
      symbolic: whether the rule depends on which operands are differentiated, and on which
        cotangents are zero.
    """

    name: str
    run: Callable[[Sequence[Any]], list[Any]]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    active: Pattern
    symbolic: bool

    @property
    def results(self) -> Pattern:
        """The results that have tangents."""
        return tuple(i for i, aval in enumerate(self.outs) if is_inexact(aval))

    def by(self, args: Sequence[Any], active: Pattern) -> Callable[..., list[Any]]:
        """Returns the function of its `active` operands alone; the others are those in `args`."""

        def call(*differentiable: Any) -> list[Any]:
            full = list(args)
            for i, x in zip(active, differentiable, strict=True):
                full[i] = x
            return self.run(full)

        return call


def call_of(eqn: JaxprEqn) -> Call:
    """Returns the function that an equation calls."""
    rule = compat.custom_rule(eqn)
    ins = tuple(v.aval for v in eqn.invars)
    return Call(
        name=rule.name,
        run=lambda args: compat.bind(eqn, args),
        ins=ins,
        outs=tuple(v.aval for v in eqn.outvars),
        # JAX does not differentiate with respect to closed-over values.
        active=tuple(i for i, a in enumerate(ins) if i >= rule.n_consts and is_inexact(a)),
        symbolic=rule.symbolic_zeros,
    )


def trace_rule(
    call: Call,
    rule: Callable[..., Any],
    avals: Sequence[Any],
    plan: Plan,
    *,
    backward: bool = False,
) -> tuple[Any, Any]:
    """Traces a derivative rule to its jaxpr, and the pytree of shapes and dtypes that it returns.

    What it computes in no region of its own has the policy of `rule_policy`.

    Args:
      call: the function whose rule it is.
      rule: the rule, a function of arrays.
      avals: their types.
      plan: the plan of the function.
      backward: whether the rule is the backward pass of a vjp.

    Raises:
      ClosedOverError: if the rule uses values of an enclosing function that are not its operands.
      ValueError: see `refuse_by_hand`.
    """
    own = rule_policy(plan)
    policy = own.policy
    # A trace begins with no scopes: the region is entered inside.
    marked = rule if policy == plan.rules.policy else in_region(rule, policy)
    with inside_rule(policy, mark_all=bool(own.keys)):
        try:
            jaxpr, shapes = compat.trace_of_tree(marked, avals)
        except jax.errors.UnexpectedTracerError as error:
            raise ClosedOverError(call.name) from error
    if len(compat.closed(jaxpr).jaxpr.invars) != len(avals):
        raise ClosedOverError(call.name)
    if backward:
        refuse_by_hand(call.name, jaxpr, own)
    return split_layers(jaxpr, rule_of=call.name), shapes


def hidden_tangents(jaxpr: Any, tangents: Sequence[bool], rules: Rules) -> frozenset[Any]:
    """Finds the float32 results, at any depth, of equations that read a tangent in another dtype.

    A plan records of every float32 value whether it is a tangent: narrowing one must stay linear.
    It does not of values in other dtypes (complex64, an author's bfloat16), so tangents that become
    float32 again are found here, before a derivative rule is planned.
    """
    found: set[Any] = set()

    def transfer(eqn: JaxprEqn, read: list[bool], inside: Inside[bool]) -> list[bool]:
        """Returns which results of an equation are tangents; if it is of unknown kind, all."""
        if not any(read):
            return [False] * len(eqn.outvars)
        outs = inside(read) or [True] * len(eqn.outvars)
        if any(x and not rules.governs(v) for x, v in zip(read, eqn.invars, strict=True)):
            results = zip(eqn.outvars, outs, strict=True)
            found.update(var for var, out in results if out and rules.governs(var))
        return outs

    forward(jaxpr, tangents, transfer, operator.or_, nothing=False)
    return frozenset(found)
