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
from jaxmp._autocast.plan import DType, Step, Value
from jaxmp._autocast.rules import FLOAT32, Rules
from jaxmp._jaxprs import compat


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


def _call(here: Pass, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """One inner jaxpr, called once."""
    entering = values
    wanted = here.demanded(eqn)
    inner = compat.call_jaxpr(eqn)
    name = compat.kind(eqn)
    if name == "custom_jvp_call" and here.rules.low is not None:
        entering, wanted = _at_the_door(here, inner, entering, wanted)
    made = here.are_made(eqn.invars)
    plan = here.planner.plan(inner, entering, wanted, here.rules, made=made)
    action = {"custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp"}.get(
        name, name if name == "shard_map" else "call"
    )
    return here.step(
        eqn,
        values,
        plan.ins,
        plan.values,
        LOOKED_INSIDE,
        action=action,
        saturate=True,
        plans=(plan,),
    )


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


def _cond(here: Pass, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """Branches agree: a result is low if any branch makes it low and no other is rounded in vain.

    That is, where all branches make it low, or a constant, or a contraction wants it. What only
    float32 ops want leaves in float32: a branch may return its operand, exactly.
    """
    wanted = here.demanded(eqn)
    branches = eqn.params["branches"]
    made = here.are_made(eqn.invars[1:])
    plans = [here.planner.plan(b, values[1:], wanted, here.rules, made=made) for b in branches]
    outs = [
        _agreed(results, demand)
        for results, demand in zip(
            zip(*(p.values for p in plans), strict=True), wanted, strict=True
        )
    ]
    plans = [here.planner.plan(b, values[1:], wanted, here.rules, outs, made) for b in branches]
    joined = [
        here.kept(dtype, kept) if kept[0] is not None else None
        for dtype, kept in zip(outs, zip(*(p.values for p in plans), strict=True), strict=True)
    ]
    dtypes = [v.dtype if v else None for v in values]
    return here.step(eqn, values, dtypes, joined, LOOKED_INSIDE, action="cond", plans=tuple(plans))


def _agreed(results: Sequence[Value | None], demand: int) -> DType | None:
    """The dtype in which a result leaves every branch, given how each would keep it."""
    low = next((v.dtype for v in results if v and v.dtype), None)
    if all(v and (v.dtype or v.constant) for v in results):
        return low
    licensed = all(v and not v.wins for v in results)
    return low if licensed and demand & CONTRACTION and not demand & INDEX else None


def _while(here: Pass, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """The carry stays float32: a solver's tolerance may be finer than 16 bits can meet."""
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, init = values[: n_cond + n_body], values[n_cond + n_body :]
    carry = [Value(argument=True, licence=DATA) if v else None for v in init]
    cond = here.planner.plan(
        eqn.params["cond_jaxpr"], [*consts[:n_cond], *carry], [NOTHING], here.rules
    )
    body = here.planner.plan(
        eqn.params["body_jaxpr"],
        [*consts[n_cond:], *carry],
        [FULL] * len(carry),
        here.rules,
        [None] * len(carry),
    )
    dtypes = [*(v.dtype if v else None for v in consts), *(None for _ in init)]
    outs = [here.kept(None, [v])._replace(licence=DATA) if v else None for v in init]
    return here.step(
        eqn,
        values,
        dtypes,
        outs,
        f"{LOOKED_INSIDE}; a while loop carries float32",
        action="while",
        plans=(cond, body),
    )


def _scan(here: Pass, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
    """Constants enter in float32, the carry as `_low_carry` decides, the rest as it is kept."""
    body = eqn.params["jaxpr"]
    n_consts, n_carry = compat.scan_split(eqn)
    wanted = here.demanded(eqn)
    inner = here.planner.demands.of_scan(eqn, wanted, here.rules)
    low = _low_carry(here, eqn, values) if here.rules.low is not None else frozenset()
    values = _widened_parts(here, eqn, values, inner)
    made = here.are_made(eqn.invars[:n_consts])
    while True:
        ins = [
            _entering(here, v, shared=i < n_consts, carried=i < n_consts + n_carry, low=i in low)
            for i, v in enumerate(values)
        ]
        carry = range(n_consts, n_consts + n_carry)
        # A float32 carry wants its summands in float32, whoever wants the sum.
        carried = [inner[i] | CONTRACTION if i in low else FULL for i in carry]
        inner_wanted = [*carried, *wanted[n_carry:]]
        natural = here.planner.plan(body, ins, inner_wanted, here.rules, made=made)
        # What float32 arithmetic makes of a low carry stays float32.
        updated = {i for i, out in zip(carry, natural.outs, strict=False) if out == here.rules.low}
        if low <= updated:
            break
        low &= updated
    outs = [
        *(v and (v.dtype or FLOAT32) for v in map(ins.__getitem__, carry)),
        *natural.outs[n_carry:],
    ]
    plan = here.planner.plan(body, ins, inner_wanted, here.rules, outs, made)
    kept = [
        v
        and here.kept(v.dtype, [v])._replace(licence=v.licence if v.dtype or i >= n_carry else DATA)
        for i, v in enumerate(plan.values)
    ]
    return here.step(
        eqn,
        values,
        [v.dtype if v else None for v in ins],
        kept,
        LOOKED_INSIDE,
        action="scan",
        saturate=True,
        plans=(plan,),
    )


def _widened_parts(
    here: Pass, eqn: JaxprEqn, values: Sequence[Value | None], wanted: Sequence[int]
) -> list[Value | None]:
    """Parts of one low value that the body reads in float32 enter in it, widened as a whole.

    Widened one by one in every iteration, each would round its cotangent before they are added.
    """
    parts = range(sum(compat.scan_split(eqn)), len(values))
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


def _low_carry(here: Pass, eqn: JaxprEqn, values: Sequence[Value | None]) -> frozenset[int]:
    """Which operands of a scan are carries that may be low: the body feeds them to a contraction.

    They start low, or from what may be narrowed, and do not come back as themselves plus something;
    unless they run through layers.
    """
    body = compat.closed(eqn.params["jaxpr"]).jaxpr
    n_consts, n_carry = compat.scan_split(eqn)
    own = here.planner.demands(body, [NOTHING] * len(body.outvars), here.rules).ins
    loop = recurrence(eqn, [v is not None and v.licence in (GIVEN, PARAMETER) for v in values])
    low = set()
    for i in range(n_carry):
        value, demand = values[n_consts + i], own[n_consts + i]
        if value is None or not demand & CONTRACTION or demand & INDEX:
            continue
        if value.wins:
            continue
        layer = loop.layered[i] and value.licence != CONSTANT
        if layer or not loop.summed[i]:
            low.add(n_consts + i)
    return frozenset(low)


HIGHER_ORDER: dict[str, Callable[[Pass, JaxprEqn, Sequence[Value | None]], Step]] = {
    **dict.fromkeys(compat.CALLS, _call),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
