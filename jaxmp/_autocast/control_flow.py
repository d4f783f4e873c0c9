"""Forward pass over equations with jaxprs inside: calls, cond, while, scan.

Each function plans the inner jaxprs for the values that enter them and returns the equation's step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.extend.core import JaxprEqn

from jaxmp._autocast.carries import recurrence
from jaxmp._autocast.demand import CONTRACTION, FULL, INDEX, LATER, NOTHING
from jaxmp._autocast.licences import CONSTANT, DATA, GIVEN, PARAMETER
from jaxmp._autocast.plan import DType, Plan, Step, Value
from jaxmp._autocast.rules import FLOAT32, Rules
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.higher_order import Inner


class Pass(Protocol):
    """What these functions need of the pass that calls them: `planner.JaxprPlanner`."""

    planner: Any
    rules: Rules
    whole: dict[Any, Any]  # variable → what it is a part of

    def demanded(self, eqn: JaxprEqn) -> list[int]:
        """The demand on each result of an equation."""

    def kept(self, dtype: DType | None, operands: Sequence[Value | None]) -> Value:
        """A result kept in `dtype`, made from `operands`."""

    def are_made(self, atoms: Sequence[Any]) -> list[bool]:
        """Which operands are made from literals alone."""

    @property
    def step(self) -> Callable[..., Step]:
        """Records an equation's results and returns its step."""


LOOKED_INSIDE = "looked inside"


def plan_inside(
    here: Pass, eqn: JaxprEqn, values: Sequence[Value | None], inners: Sequence[Inner]
) -> Step:
    """The step of an equation with jaxprs inside, by what they are."""
    *tests, body = inners
    if not body.loops:
        planned = _branches if tests else _call
        return planned(here, eqn, values, inners)
    if body.trips is None:
        return _while(here, eqn, values, tests, body)
    return _scan(here, eqn, values, body)


def _call(
    here: Pass, eqn: JaxprEqn, values: Sequence[Value | None], inners: Sequence[Inner]
) -> Step:
    """One inner jaxpr, called once."""
    [inner] = inners
    name = compat.kind(eqn)
    entering = [values[i] for i in inner.operands]
    wanted = _wanted(here, eqn, inner)
    if name == "custom_jvp_call" and here.rules.low is not None:
        entering, wanted = _at_the_door(here, inner.jaxpr, entering, wanted)
    made = here.are_made([eqn.invars[i] for i in inner.operands])
    plan = here.planner.plan(inner.jaxpr, entering, wanted, here.rules, made=made)
    dtypes = [v.dtype if v else None for v in values]
    for i, dtype in zip(inner.operands, plan.ins, strict=True):
        dtypes[i] = dtype
    action = {"custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp"}.get(name, "inside")
    return here.step(
        eqn,
        values,
        dtypes,
        _returned(eqn, inner, plan.values),
        LOOKED_INSIDE,
        action=action,
        saturate=True,
        plans=(plan,),
    )


def _wanted(here: Pass, eqn: JaxprEqn, inner: Inner) -> list[int]:
    """The demand on each result of an inner jaxpr."""
    wanted = here.demanded(eqn)
    return [NOTHING if result is None else wanted[result] for result in inner.results]


def _returned(eqn: JaxprEqn, inner: Inner, values: Sequence[Value | None]) -> list[Value | None]:
    """How the results of an equation are kept, given how those of its inner jaxpr are."""
    returned: list[Value | None] = [None] * len(eqn.outvars)
    for result, value in zip(inner.results, values, strict=True):
        if result is not None:
            returned[result] = value
    return returned


def _at_the_door(
    here: Pass, inner: Any, values: Sequence[Value | None], wanted: list[int]
) -> tuple[list[Value | None], list[int]]:
    """Narrows what would leave a normalisation inside a function with its own derivative (relu).

    The derivative rule then works in 16 bits, and saves 16 bits, as in a hand-written model. That
    is worth it as well where a contraction comes only after float32 ops (relu, then a mean).
    """
    if not any(demand & (CONTRACTION | LATER) for demand in wanted):
        return list(values), wanted
    asked = [CONTRACTION] * len(wanted)
    narrowed = [
        here.kept(here.rules.low, [v])
        if v and not v.dtype and v.origins and not v.wins and d == CONTRACTION
        else v
        for v, d in zip(
            values,
            here.planner.demands(compat.closed(inner).jaxpr, asked, here.rules).ins,
            strict=True,
        )
    ]
    if any(here.planner.plan(inner, narrowed, asked, here.rules).outs):
        return narrowed, asked
    return list(values), wanted


def _branches(
    here: Pass, eqn: JaxprEqn, values: Sequence[Value | None], inners: Sequence[Inner]
) -> Step:
    """Branches agree: a result is low if any branch makes it low and no other is rounded in vain.

    That is, where all branches make it low, or a constant, or a contraction wants it. What only
    float32 ops want leaves in float32: a branch may return its operand, exactly.
    """

    def planned(outs: Sequence[DType | None] | None = None) -> tuple[Plan, ...]:
        return tuple(
            here.planner.plan(
                inner.jaxpr,
                [values[i] for i in inner.operands],
                _wanted(here, eqn, inner),
                here.rules,
                outs,
                here.are_made([eqn.invars[i] for i in inner.operands]),
            )
            for inner in inners
        )

    results = zip(*(p.values for p in planned()), strict=True)
    outs = [_agreed(*result) for result in zip(results, here.demanded(eqn), strict=True)]
    plans = planned(outs)
    joined = [
        here.kept(dtype, kept) if kept[0] is not None else None
        for dtype, kept in zip(outs, zip(*(p.values for p in plans), strict=True), strict=True)
    ]
    dtypes = [v.dtype if v else None for v in values]
    return here.step(eqn, values, dtypes, joined, LOOKED_INSIDE, action="inside", plans=plans)


def _agreed(results: Sequence[Value | None], demand: int) -> DType | None:
    """The dtype in which a result leaves every branch, given how each would keep it."""
    low = next((v.dtype for v in results if v and v.dtype), None)
    if all(v and (v.dtype or v.constant) for v in results):
        return low
    licensed = all(v and not v.wins for v in results)
    return low if licensed and demand & CONTRACTION and not demand & INDEX else None


def _while(
    here: Pass,
    eqn: JaxprEqn,
    values: Sequence[Value | None],
    tests: Sequence[Inner],
    body: Inner,
) -> Step:
    """The carry stays float32: a solver's tolerance may be finer than 16 bits can meet."""
    carry = {body.operands[i] for i in body.carries}
    entering = [
        Value(argument=True, licence=DATA) if v and i in carry else v for i, v in enumerate(values)
    ]

    def planned(inner: Inner, wanted: int, outs: Sequence[None] | None) -> Plan:
        ins = [entering[i] for i in inner.operands]
        wants = [wanted] * len(inner.results)
        plan: Plan = here.planner.plan(inner.jaxpr, ins, wants, here.rules, outs)
        return plan

    plans = [planned(test, NOTHING, None) for test in tests]
    plans.append(planned(body, FULL, [None] * len(body.results)))
    dtypes = [v.dtype if v else None for v in entering]
    outs = [
        here.kept(None, [v])._replace(licence=DATA) if v else None
        for v in (values[body.operands[i]] for i in body.carries)
    ]
    return here.step(
        eqn,
        values,
        dtypes,
        outs,
        f"{LOOKED_INSIDE}; a while loop carries float32",
        action="inside",
        plans=tuple(plans),
    )


def _scan(here: Pass, eqn: JaxprEqn, values: Sequence[Value | None], body: Inner) -> Step:
    """Constants enter in float32, the carry as `_low_carry` decides, the rest as it is kept."""
    wanted = here.demanded(eqn)
    demand = here.planner.demands.of_loop(body, wanted, here.rules)
    low = _low_carry(here, body, values) if here.rules.low is not None else frozenset()
    values = _widened_parts(here, eqn, values, demand, body)
    carry = body.carries
    made = here.are_made(eqn.invars[: carry.start])
    while True:
        ins = [
            _entering(here, v, shared=i < carry.start, carried=i < carry.stop, low=i in low)
            for i, v in enumerate(values)
        ]
        # A float32 carry wants its summands in float32, whoever wants the sum.
        carried = [demand[i] | CONTRACTION if i in low else FULL for i in carry]
        inner_wanted = [*carried, *wanted[body.carried :]]
        natural = here.planner.plan(body.jaxpr, ins, inner_wanted, here.rules, made=made)
        # What float32 arithmetic makes of a low carry stays float32.
        updated = {i for i, out in zip(carry, natural.outs, strict=False) if out == here.rules.low}
        if low <= updated:
            break
        low &= updated
    outs = [
        *(v and (v.dtype or FLOAT32) for v in map(ins.__getitem__, carry)),
        *natural.outs[body.carried :],
    ]
    plan = here.planner.plan(body.jaxpr, ins, inner_wanted, here.rules, outs, made)
    kept = [
        v
        and here.kept(v.dtype, [v])._replace(
            licence=v.licence if v.dtype or i >= body.carried else DATA
        )
        for i, v in enumerate(plan.values)
    ]
    return here.step(
        eqn,
        values,
        [v.dtype if v else None for v in ins],
        kept,
        LOOKED_INSIDE,
        action="inside",
        saturate=True,
        plans=(plan,),
    )


def _widened_parts(
    here: Pass,
    eqn: JaxprEqn,
    values: Sequence[Value | None],
    wanted: Sequence[int],
    body: Inner,
) -> list[Value | None]:
    """Parts of one low value that the body reads in float32 enter in it, widened as a whole.

    Widened one by one in every iteration, each would round its cotangent before they are added.
    """
    parts = range(body.carries.stop, len(values))
    wholes = Counter(here.whole.get(eqn.invars[i]) for i in parts)
    return [
        v._replace(dtype=None)
        if v
        and v.dtype
        and i in parts
        and not wanted[i] & CONTRACTION
        and wholes[here.whole.get(eqn.invars[i])] > 1
        and eqn.invars[i] in here.whole
        else v
        for i, v in enumerate(values)
    ]


def _entering(
    here: Pass, value: Value | None, *, shared: bool, carried: bool, low: bool
) -> Value | None:
    """How an operand of a scan is seen by its body."""
    if value is None or not carried:
        return value
    if shared:  # float32: every iteration adds a gradient to it
        return Value(argument=True, tangent=value.tangent, licence=value.licence, fixed=value.fixed)
    if low:
        return Value(here.rules.low, frozenset({here.planner.fresh()}), tangent=value.tangent)
    return Value(argument=True, tangent=value.tangent, licence=DATA)


def _low_carry(here: Pass, body: Inner, values: Sequence[Value | None]) -> frozenset[int]:
    """Which operands of a scan are carries that may be low: the body feeds them to a contraction.

    They start low, or from what may be narrowed, and do not come back as themselves plus something;
    unless they run through layers.
    """
    jaxpr = compat.closed(body.jaxpr).jaxpr
    own = here.planner.demands(jaxpr, [NOTHING] * len(jaxpr.outvars), here.rules).ins
    loop = recurrence(body, [v is not None and v.licence in (GIVEN, PARAMETER) for v in values])
    low = set()
    for i, operand in enumerate(body.carries):
        value, demand = values[operand], own[operand]
        if value is None or not demand & CONTRACTION or demand & INDEX:
            continue
        if value.wins:
            continue
        layer = loop.layered[i] and value.licence != CONSTANT
        if layer or not loop.summed[i]:
            low.add(operand)
    return frozenset(low)
