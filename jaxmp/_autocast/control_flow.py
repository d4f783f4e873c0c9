"""Forward pass over equations with jaxprs inside: calls, cond, while, scan.

Each function plans the inner jaxprs for the values that enter them and decides the equation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jaxmp._autocast.carries import recurrence
from jaxmp._autocast.demand import CONTRACTION, FULL, INDEX, LATER, NOTHING, OPERAND, PRODUCT
from jaxmp._autocast.execute import CustomCall, Inside
from jaxmp._autocast.frame import Decision, Facts
from jaxmp._autocast.plan import NO_ORIGINS, DType, Plan, Value
from jaxmp._autocast.provenance import CONSTANT, DATA
from jaxmp._autocast.roots import WEIGHTS
from jaxmp._autocast.rules import with_whole_tables
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs.higher_order import Inner, sums_as_given


def plan_inside(facts: Facts) -> Decision:
    """Decides an equation with jaxprs inside, by what they are."""
    *tests, body = facts.inners
    if not body.loops:
        return _branches(facts) if tests else _call(facts, body)
    return _while(facts, tests, body) if body.open_ended else _scan(facts, body)


def _call(facts: Facts, inner: Inner) -> Decision:
    """One inner jaxpr, called once."""
    rules = facts.rules
    entering = [facts.values[i] for i in inner.operands]
    wanted = _wanted(facts, inner)
    if inner.rule == "custom_jvp" and rules.low is not None:
        entering, wanted = _at_the_door(facts, inner, entering, wanted)
    if sums_as_given(facts.eqn) and rules.low is not None and not rules.wide_gradients:
        entering = _weights_narrowed(facts, inner, entering, wanted)
    roots = facts.roots_inside(inner)
    plan = facts.planning.plan(inner.jaxpr, entering, wanted, rules, roots=roots)
    dtypes = [v.dtype if v else None for v in facts.values]
    for i, dtype in zip(inner.operands, plan.ins, strict=True):
        dtypes[i] = dtype
    outs = _returned(facts.eqn, inner, plan.values)
    op = CustomCall(inner.rule) if inner.rule else Inside()
    return Decision(dtypes, outs, Kind.INSIDE.of(), op, saturate=True, plans=(plan,))


def _wanted(facts: Facts, inner: Inner) -> list[int]:
    """The demand on each result of an inner jaxpr."""
    wanted = facts.demanded
    return [NOTHING if result is None else wanted[result] for result in inner.results]


def _returned(eqn: JaxprEqn, inner: Inner, values: Sequence[Value | None]) -> list[Value | None]:
    """How the results of an equation are kept, given how those of its inner jaxpr are."""
    returned: list[Value | None] = [None] * len(eqn.outvars)
    for result, value in zip(inner.results, values, strict=True):
        if result is not None:
            returned[result] = value
    return returned


def _at_the_door(
    facts: Facts, inner: Inner, values: Sequence[Value | None], wanted: list[int]
) -> tuple[list[Value | None], list[int]]:
    """Narrows what would leave a normalization inside a function with its own derivative (relu).

    The derivative rule then works in 16 bits, and saves 16 bits, as in a hand-written model. That
    is worth it as well where a contraction comes only after float32 ops (relu, then a mean).
    """
    if not any(demand & (CONTRACTION | LATER) for demand in wanted):
        return list(values), wanted
    asked = [CONTRACTION | demand & PRODUCT for demand in wanted]
    roots = facts.roots_inside(inner)
    narrowed = [
        facts.planning.kept(facts.rules.low, [v])
        if v
        and not v.dtype
        and v.origins
        and not v.blocks_narrowing
        and d & ~PRODUCT == CONTRACTION
        else v
        for v, d in zip(
            values,
            facts.planning.demands(inner.jaxpr, asked, facts.rules, roots).ins,
            strict=True,
        )
    ]
    if any(facts.planning.plan(inner.jaxpr, narrowed, asked, facts.rules, roots=roots).outs):
        return narrowed, asked
    return list(values), wanted


def _weights_narrowed(
    facts: Facts, inner: Inner, values: Sequence[Value | None], wanted: list[int]
) -> list[Value | None]:
    """Narrows the parameters that only contractions read inside, so that their gradients leave low.

    For a `shard_map` that adds up gradients itself: in the dtype in which the parameters come in.
    """
    rules = with_whole_tables(facts.rules)
    roots = facts.roots_inside(inner)
    demands = facts.planning.demands(inner.jaxpr, wanted, rules, roots).ins
    return [
        facts.planning.kept(facts.rules.low, [v])
        if v and v.is_weight and v.dtype is None and d & ~PRODUCT == CONTRACTION | OPERAND
        else v
        for v, d in zip(values, demands, strict=True)
    ]


def _branches(facts: Facts) -> Decision:
    """Branches agree: a result is low if any branch makes it low and no other is rounded in vain.

    That is, where all branches make it low, or a constant, or a contraction wants it. What only
    float32 ops want leaves in float32: a branch may return its operand, exactly.
    """

    def planned(outs: Sequence[DType | None] | None = None) -> tuple[Plan, ...]:
        return tuple(
            facts.planning.plan(
                inner.jaxpr,
                [facts.values[i] for i in inner.operands],
                _wanted(facts, inner),
                facts.rules,
                outs=outs,
                roots=facts.roots_inside(inner),
            )
            for inner in facts.inners
        )

    results = zip(*(p.values for p in planned()), strict=True)
    outs = [_agreed(*result) for result in zip(results, facts.demanded, strict=True)]
    plans = planned(outs)
    joined = [
        facts.planning.kept(dtype, kept) if kept[0] is not None else None
        for dtype, kept in zip(outs, zip(*(p.values for p in plans), strict=True), strict=True)
    ]
    dtypes = [v.dtype if v else None for v in facts.values]
    return Decision(dtypes, joined, Kind.INSIDE.of(), Inside(), plans=plans)


def _agreed(results: Sequence[Value | None], demand: int) -> DType | None:
    """The dtype in which a result leaves every branch, given how each would keep it."""
    low = next((v.dtype for v in results if v and v.dtype), None)
    if all(v and (v.dtype or v.constant) for v in results):
        return low
    narrowable = all(v and not v.blocks_narrowing for v in results)
    return low if narrowable and demand & CONTRACTION and not demand & INDEX else None


def _while(facts: Facts, tests: Sequence[Inner], body: Inner) -> Decision:
    """The carry stays float32: a solver's tolerance may be finer than 16 bits can meet."""
    carry = {body.operands[i] for i in body.carries}
    entering = [
        Value(argument=True, provenance=DATA) if v and i in carry else v
        for i, v in enumerate(facts.values)
    ]

    def planned(inner: Inner, wanted: Sequence[int], outs: Sequence[None] | None) -> Plan:
        ins, roots = [entering[i] for i in inner.operands], facts.roots_inside(inner)
        return facts.planning.plan(inner.jaxpr, ins, wanted, facts.rules, outs=outs, roots=roots)

    roots = facts.roots
    demand = facts.planning.demands.of_loop(body, facts.demanded, facts.rules, roots)
    carried = [FULL | demand[i] & PRODUCT for i in body.carries]
    plans = [planned(test, [NOTHING] * len(test.results), None) for test in tests]
    plans.append(planned(body, carried, [None] * len(body.results)))
    dtypes = [v.dtype if v else None for v in entering]
    outs = [
        facts.planning.kept(None, [v])._replace(provenance=DATA) if v else None
        for v in (facts.values[body.operands[i]] for i in body.carries)
    ]
    return Decision(dtypes, outs, Kind.WHILE.of(), Inside(), plans=tuple(plans))


def _scan(facts: Facts, body: Inner) -> Decision:
    """Constants enter in float32, the carry as `_low_carry` decides, the rest as it is kept."""
    wanted = facts.demanded
    roots = facts.roots_inside(body)
    demand = facts.planning.demands.of_loop(body, wanted, facts.rules, facts.roots)
    low: frozenset[int] = frozenset()
    if facts.rules.low is not None:
        low = _low_carry(facts, body, demand, roots)
    carry = body.carries
    while True:
        ins = [
            _entering(facts, v, shared=i < carry.start, carried=i < carry.stop, low=i in low)
            for i, v in enumerate(facts.values)
        ]
        # A float32 carry wants its summands in float32, whoever wants the sum.
        carried = [
            demand[i] | CONTRACTION if i in low else FULL | demand[i] & PRODUCT for i in carry
        ]
        planned = functools.partial(
            facts.planning.plan,
            body.jaxpr,
            ins,
            [*carried, *wanted[body.carried :]],
            facts.rules,
            summed=[facts.values[i] is not None and i not in low for i in carry],
            roots=roots,
        )
        natural = planned()
        # What float32 arithmetic makes of a low carry stays float32.
        updated = {i for i, out in zip(carry, natural.outs, strict=False) if out is not None}
        if low <= updated:
            break
        low &= updated
    outs = [v.dtype if v else None for v in map(ins.__getitem__, carry)]
    plan = planned(outs=[*outs, *natural.outs[body.carried :]])
    kept = [
        v
        and facts.planning.kept(v.dtype, [v])._replace(
            provenance=v.provenance if v.dtype or i >= body.carried else DATA
        )
        for i, v in enumerate(plan.values)
    ]
    dtypes = [v.dtype if v else None for v in ins]
    return Decision(dtypes, kept, Kind.INSIDE.of(), Inside(), saturate=True, plans=(plan,))


def _entering(
    facts: Facts, value: Value | None, *, shared: bool, carried: bool, low: bool
) -> Value | None:
    """How an operand of a scan is seen by its body."""
    if value is None or not carried:
        return value
    if shared:  # float32: every iteration adds a gradient to it
        return value._replace(
            dtype=None, origins=NO_ORIGINS, pinned=None, argument=True, constant=False
        )
    if low:
        return Value(facts.rules.low, frozenset({facts.planning.fresh()}), tangent=value.tangent)
    return Value(argument=True, tangent=value.tangent, provenance=DATA)


def _low_carry(
    facts: Facts,
    body: Inner,
    wanted: Sequence[int],
    roots: Sequence[str],
) -> frozenset[int]:
    """Which operands of a scan are carries that may be low: the body feeds them to a contraction.

    They start low, or from what may be narrowed, and run through layers: every iteration multiplies
    them by weights of its own. And what goes round the devices for contractions alone is an operand
    of theirs, and may start from anything.
    """
    nothing = [NOTHING] * len(body.results)
    own = facts.planning.demands(body.jaxpr, nothing, facts.rules, roots).ins
    loop = recurrence(body, [root == WEIGHTS for root in roots])
    low = set()
    for i, operand in enumerate(body.carries):
        value, demand = facts.values[operand], own[operand]
        if value is None or not demand & CONTRACTION or demand & INDEX:
            continue
        operand_alone = wanted[operand] & ~PRODUCT == CONTRACTION | OPERAND
        starts_low = not value.blocks_narrowing and value.provenance != CONSTANT
        if (loop.sent[i] and operand_alone) or (loop.layered[i] and starts_low):
            low.add(operand)
    return frozenset(low)
