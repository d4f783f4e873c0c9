"""Forward pass over equations with jaxprs inside: calls, cond, while, scan.

Each function plans the inner jaxprs for the values that enter them and decides the equation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from jaxmp._core.decide.frame import Decision, Facts
from jaxmp._core.execute.execute import CustomCall, Inside
from jaxmp._core.jaxprs.higher_order import Inner, sums_as_given
from jaxmp._core.plan.carries import recurrence
from jaxmp._core.plan.demand import (
    CONTRACTION,
    CONTRACTION_LATER,
    FULL,
    INDEX,
    NOTHING,
    OPERAND,
    PRODUCT,
)
from jaxmp._core.plan.plan import NO_ORIGINS, DType, Plan, Value, dtypes_of
from jaxmp._core.plan.provenance import CONSTANT, DATA
from jaxmp._core.plan.roots import WEIGHTS
from jaxmp._core.plan.rules import with_whole_tables
from jaxmp._core.plan.why import Kind


def plan_inside(facts: Facts) -> Decision:
    """Decides a higher-order equation: a call, a cond, a while loop or a scan."""
    *tests, body = facts.inners
    if not body.loops:
        return _branches(facts) if tests else _call(facts, body)
    return _while(facts, body) if body.open_ended else _scan(facts, body)


def _call(facts: Facts, inner: Inner) -> Decision:
    """Decides a call of one inner jaxpr."""
    rules = facts.rules
    entering = [facts.values[i] for i in inner.operands]
    wanted = _wanted(facts, inner)
    if inner.rule == "custom_jvp" and rules.low is not None:
        entering, wanted = _narrowed_on_entry(facts, inner, entering, wanted)
    if sums_as_given(facts.eqn) and rules.low is not None and not rules.wide_gradients:
        entering = _weights_narrowed(facts, inner, entering, wanted)
    plan = facts.plan(inner, entering, wanted)
    dtypes = list(dtypes_of(facts.values))
    for i, dtype in zip(inner.operands, plan.ins, strict=True):
        dtypes[i] = dtype
    outs: list[Value | None] = [None] * len(facts.eqn.outvars)
    for result, value in zip(inner.results, plan.values, strict=True):
        if result is not None:
            outs[result] = value
    op = CustomCall(reverse=inner.rule == "custom_vjp") if inner.rule else Inside()
    return Decision(Kind.INSIDE.of(), dtypes=dtypes, outs=outs, op=op, saturate=True, plans=(plan,))


def _wanted(facts: Facts, inner: Inner) -> list[int]:
    """Returns the demand on each result of an inner jaxpr."""
    wanted = facts.demanded
    return [NOTHING if result is None else wanted[result] for result in inner.results]


def _narrowed(
    facts: Facts,
    values: Sequence[Value | None],
    demands: Sequence[int],
    narrows: Callable[[Value, int], bool],
) -> list[Value | None]:
    """Returns the values, with float32 ones kept low where `narrows` of value and demand holds."""
    return [
        facts.kept(facts.rules.low, [v], i) if v and v.dtype is None and narrows(v, demand) else v
        for i, (v, demand) in enumerate(zip(values, demands, strict=True))
    ]


def _narrowed_on_entry(
    facts: Facts, inner: Inner, values: list[Value | None], wanted: list[int]
) -> tuple[list[Value | None], list[int]]:
    """Narrows values that would leave a normalization inside a function with its own rule (relu).

    The derivative rule then works in 16 bits, and saves 16 bits, as in a hand-written model. That
    pays off even where a contraction comes only after float32 ops (relu, then a mean). A function
    that reads them in float32 (softplus) is planned for what wants its results, as any other.
    """
    if not any(demand & (CONTRACTION | CONTRACTION_LATER) for demand in wanted):
        return values, wanted
    asked = [CONTRACTION | demand & PRODUCT for demand in wanted]

    def narrows(value: Value, demand: int) -> bool:
        leaves = bool(value.origins) and not value.blocks_narrowing
        return leaves and demand & ~PRODUCT == CONTRACTION

    narrowed = _narrowed(facts, values, facts.demands(inner, asked), narrows)
    if narrowed != values and any(facts.plan(inner, narrowed, asked).outs):
        return narrowed, asked
    return values, wanted


def _weights_narrowed(
    facts: Facts, inner: Inner, values: Sequence[Value | None], wanted: list[int]
) -> list[Value | None]:
    """Narrows parameters that only contractions read inside, so that their gradients are low.

    For a `shard_map`, which sums gradients over devices itself: in the dtype of its operands.
    """

    def narrows(value: Value, demand: int) -> bool:
        return value.is_weight and demand & ~PRODUCT == CONTRACTION | OPERAND

    demands = facts.demands(inner, wanted, with_whole_tables(facts.rules))
    return _narrowed(facts, values, demands, narrows)


def _branches(facts: Facts) -> Decision:
    """Decides a cond: a result is low if it is in any branch and no other is rounded in vain.

    That is, if every branch makes it low, or a constant, or a contraction wants it. A result that
    only float32 ops want is returned in float32: a branch may return its operand, exactly.
    """

    def planned(outs: Sequence[DType | None] | None = None) -> tuple[Plan, ...]:
        return tuple(
            facts.plan(
                inner, [facts.values[i] for i in inner.operands], _wanted(facts, inner), outs=outs
            )
            for inner in facts.inners
        )

    results = zip(*(p.values for p in planned()), strict=True)
    outs = [_agreed(*result) for result in zip(results, facts.demanded, strict=True)]
    plans = planned(outs)
    joined = [
        facts.kept(dtype, kept, i) if kept[0] is not None else None
        for i, (dtype, *kept) in enumerate(zip(outs, *(p.values for p in plans), strict=True))
    ]
    dtypes = dtypes_of(facts.values)
    return Decision(Kind.INSIDE.of(), dtypes=dtypes, outs=joined, op=Inside(), plans=plans)


def _agreed(results: Sequence[Value | None], demand: int) -> DType | None:
    """Returns the dtype in which every branch returns a result, given how each would keep it."""
    low = next((v.dtype for v in results if v and v.dtype), None)
    if all(v and (v.dtype or v.constant) for v in results):
        return low
    narrowable = all(v and not v.blocks_narrowing for v in results)
    return low if narrowable and demand & CONTRACTION and not demand & INDEX else None


def _while(facts: Facts, body: Inner) -> Decision:
    """Decides a while loop. Its carry stays float32: 16 bits may not meet a solver's tolerance."""
    carry = {body.operands[i] for i in body.carries}
    entering = [
        Value(argument=True, provenance=DATA) if v and i in carry else v
        for i, v in enumerate(facts.values)
    ]
    demand = facts.planning.demands.of_loop(body, facts.demanded, facts.rules, facts.roots)
    carried = [FULL | demand[i] & PRODUCT for i in body.carries]
    plans = tuple(
        facts.plan(
            inner,
            [entering[i] for i in inner.operands],
            carried if inner is body else [NOTHING] * len(inner.results),
            outs=[None] * len(inner.results) if inner is body else None,
        )
        for inner in facts.inners
    )
    outs = [
        facts.kept(None, [v])._replace(provenance=DATA) if v else None
        for v in (facts.values[body.operands[i]] for i in body.carries)
    ]
    dtypes = dtypes_of(entering)
    return Decision(Kind.WHILE.of(), dtypes=dtypes, outs=outs, op=Inside(), plans=plans)


def _scan(facts: Facts, body: Inner) -> Decision:
    """Decides a scan: constants in float32, carries by `_low_carry`, the rest as it is kept."""
    wanted = facts.demanded
    demand = facts.planning.demands.of_loop(body, wanted, facts.rules, facts.roots)
    low = _low_carry(facts, body, demand) if facts.rules.low is not None else frozenset()
    carry = body.carries
    while True:
        ins = [
            _entering(facts, v, shared=i < carry.start, carried=i < carry.stop, low=i in low)
            for i, v in enumerate(facts.values)
        ]
        # A float32 carry wants its summands in float32, whatever wants the sum.
        carried = [
            demand[i] | CONTRACTION if i in low else FULL | demand[i] & PRODUCT for i in carry
        ]
        planned = functools.partial(
            facts.plan,
            body,
            ins,
            [*carried, *wanted[body.carried :]],
            summed=[facts.values[i] is not None and i not in low for i in carry],
        )
        natural = planned()
        # A low carry that float32 arithmetic updates stays float32.
        updated = {i for i, out in zip(carry, natural.outs, strict=False) if out is not None}
        if low <= updated:
            break
        low &= updated
    outs = dtypes_of(ins[i] for i in carry)
    plan = planned(outs=[*outs, *natural.outs[body.carried :]])
    kept = [
        v
        and facts.kept(v.dtype, [v], i)._replace(
            provenance=v.provenance if v.dtype or i >= body.carried else DATA
        )
        for i, v in enumerate(plan.values)
    ]
    return Decision(
        Kind.INSIDE.of(),
        dtypes=dtypes_of(ins),
        outs=kept,
        op=Inside(),
        saturate=True,
        plans=(plan,),
    )


def _entering(
    facts: Facts, value: Value | None, *, shared: bool, carried: bool, low: bool
) -> Value | None:
    """Returns how an operand of a scan is kept inside its body."""
    if value is None or not carried:
        return value
    if shared:  # float32: every iteration adds a gradient to it
        return value._replace(
            dtype=None, origins=NO_ORIGINS, pinned=None, argument=True, constant=False
        )
    if low:
        return Value(facts.rules.low, tangent=value.tangent)
    return Value(argument=True, tangent=value.tangent, provenance=DATA)


def _low_carry(facts: Facts, body: Inner, wanted: Sequence[int]) -> frozenset[int]:
    """Returns which operands of a scan are carries that may be low: contractions read them.

    They start low, or from a value that may be narrowed, and go through layers: every iteration
    multiplies them by weights of its own. A carry that is passed around the devices only for
    contractions is an operand of theirs, and may start from anything.
    """
    own = facts.demands(body, [NOTHING] * len(body.results))
    loop = recurrence(body, [root == WEIGHTS for root in facts.roots_inside(body)])
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
