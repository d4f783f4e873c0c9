"""What autocast, a recipe or a policy's `ops` cannot reach, said out loud.

Each `warn_` function takes the plan of a program and `known`, what was said already: what is said
now is added.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._autocast.first_order import NOT_LOOKED_INSIDE
from jaxmp._autocast.flops import contraction_flops
from jaxmp._autocast.fused import NO_KERNEL
from jaxmp._autocast.parameters import overlooked
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.primitives import CALLED, LOW, TABLE
from jaxmp._autocast.recipes.native import traced_for
from jaxmp._autocast.rules import FLOAT32, Rules, author_keeps, region_rules
from jaxmp._autocast.tally import tally
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import known_primitives, setting
from jaxmp._jaxprs.higher_order import HIGHER_ORDER
from jaxmp._jaxprs.source import level_of_user, library_line, user_line
from jaxmp._speed import chip_of, warning
from jaxmp.recipes import Recipe


def _say(text: str, known: set[str], key: str = "") -> None:
    """Warns once of what is known by its text, or by a key."""
    key = key or text
    if key not in known:
        known.add(key)
        warnings.warn(f"autocast: {text}", UserWarning, stacklevel=level_of_user())


def warn_unseen(plan: Plan, known: set[str]) -> None:
    """Warns of each primitive in a program that hides float32 contractions."""
    counts: Counter[str] = Counter()
    first: dict[str, JaxprEqn] = {}
    for step, places, _ in tally(plan):
        if step.reason != NOT_LOOKED_INSIDE:
            continue
        eqn = step.eqn
        contractions = sum(map(_contractions, compat.inner_jaxprs(eqn)))
        if contractions:
            counts[compat.called(eqn)] += contractions * places
            first.setdefault(compat.called(eqn), eqn)
    for name, count in counts.items():
        line = user_line(first[name])
        where = f"{name} ({line})" if line else name
        _say(
            f"{where} is not looked inside, and runs {count} float32 contraction"
            f"{'s' if count > 1 else ''} as written. Mark the function that calls it with "
            "jaxmp.reduced_precision to hand it 16-bit operands; if float32 is meant, with "
            "jaxmp.full_precision, or say 'ops="
            f"{first[name].primitive.name}:own' in the policy.",
            known,
            where,
        )


def warn_closing(calls: Sequence[JaxprEqn], known: set[str]) -> None:
    """Warns that a program runs as written, because derivative rules close over traced values.

    Args:
      calls: what calls the functions that have these rules.
      known: what was said already.
    """
    names = [f"{compat.custom_rule(e).name} ({user_line(e) or library_line(e)})" for e in calls]
    where = ", ".join(dict.fromkeys(names)) or "a function"
    _say(
        f"this program runs as written, in float32: the derivative rule of {where} "
        "closes over a traced value, which is gone where autocast derives the rule. Pass the value "
        "as an argument of the function that has the rule (see jax.closure_convert).",
        known,
    )


def warn_unquantized(plan: Plan, known: set[str]) -> None:
    """Warns of an 8-bit recipe that is emulated here, or multiplies less than half of layers."""
    recipe = plan.rules.policy.matmul
    if not isinstance(recipe, Recipe) or not recipe.quantizes:
        return
    slow = warning(recipe, chip_of(traced_for()))
    if slow:
        _say(f"{slow}. matmul=auto takes what pays.", known)
    missed = _missed(
        plan,
        done=lambda step: step.product is not None,
        why=lambda step: step.skipped.why if step.skipped and not step.skipped.intended else None,
    )
    if missed is None:
        return
    _say(
        f"{recipe} products: {missed.share:.0%} of what layers multiply stays in "
        f"{np.dtype(plan.rules.policy.compute_dtype).name}: {missed.why}. jaxmp.explain lists "
        "them.",
        known,
        missed.why,
    )


def warn_unfused(plan: Plan, known: set[str]) -> None:
    """Warns where a policy asks for fused attention, and a kernel computes less than half of it.

    Not where the chip has no kernel: a program is tried out there that runs elsewhere.
    """
    missed = _missed(
        plan,
        done=lambda step: step.fused is not None,
        why=lambda step: None if step.unfused.startswith(NO_KERNEL) else step.unfused,
    )
    if missed is None:
        return
    _say(
        f"attention=fused: {missed.share:.0%} of what attention multiplies is not fused: "
        f"{missed.why}. jaxmp.explain lists them.",
        known,
        missed.why,
    )


def warn_precision(plan: Plan, known: set[str]) -> None:
    """Warns where JAX's default precision, the author's word, keeps most of a program float32."""
    default = setting("jax_default_matmul_precision")
    if plan.rules.low is None or default is None:
        return
    one = jax.ShapeDtypeStruct((1, 1), plan.rules.wide)
    unsaid = jax.make_jaxpr(lax.dot)(one, one).eqns[-1]
    kept = author_keeps(unsaid, plan.rules)
    if kept is None:
        return
    missed = _missed(
        plan,
        done=lambda step: step.eqn.primitive.name in LOW and step.reason != kept,
        why=lambda step: kept if step.reason == kept else None,
    )
    if missed is None:
        return
    _say(
        f"{missed.share:.0%} of what contractions multiply stays float32: JAX's default "
        f"precision is {default!r}, which asks for that like precision= in a call. Unset "
        "jax_default_matmul_precision, or put `with jax.default_matmul_precision(...)` around only "
        "what is to stay float32. jaxmp.explain lists it.",
        known,
        missed.why,
    )


def warn_ungoverned(plan: Plan, known: set[str]) -> None:
    """Warns where a program multiplies float64 and the policy is about float32, or vice versa."""
    wide = plan.rules.wide
    other: Any = np.dtype("float64")
    policy = "p=f64,c=f32,o=f64"
    if wide == other:
        other, policy = np.dtype("float32"), "mixed_bfloat16"

    def is_other(step: Step) -> bool:
        dtypes = set(map(compat.dtype_of, step.eqn.invars))
        return other in dtypes and wide not in dtypes

    missed = _missed(
        plan,
        done=lambda step: step.eqn.primitive.name in LOW and not is_other(step),
        why=lambda step: f"operands are {other.name}" if is_other(step) else None,
    )
    if missed is None:
        return
    _say(
        f"{missed.share:.0%} of what contractions multiply is {other.name}, and stays so: the "
        f"policy is about {wide.name} values, as its param_dtype says. Give {wide.name} arrays, or "
        f"a policy about {other.name}, such as {policy!r}.",
        known,
        missed.why,
    )


def warn_overlooked(
    plan: Plan,
    parameters: Sequence[bool],
    place: Callable[[int], str],
    name: str,
    known: set[str],
) -> None:
    """Warns where most of what layers multiply is in no argument that holds parameters.

    Args:
      plan: the plan of the program.
      parameters: which of its operands are parameters.
      place: where in the call an operand is, in words.
      name: what the function is called.
      known: what was said already; what is said now is added.
    """
    if plan.rules.low is None or "overlooked" in plan.built:
        return
    plan.built["overlooked"] = found = overlooked(plan.jaxpr, parameters)
    if found is None:
        return
    operand, share = found
    _say(
        f"{share:.0%} of what layers of {name} multiply is in "
        f"{place(operand)}, which argnums does not name as parameters: it is data, beside "
        "which nothing is narrowed. Give its position, as in jaxmp.autocast(fn, policy, "
        "argnums=1); if there are no parameters, argnums=().",
        known,
        name,
    )


def warn_unknown(plan: Plan, known: set[str]) -> None:
    """Warns of names in a policy's `ops` that no primitive has, of the program or of JAX."""
    steps = [each.step for each in tally(plan)]
    rules = {plan.rules, *(region_rules(step.eqn, plan.rules) or plan.rules for step in steps)}
    asked = {name for each in rules for name, _ in each.policy.ops}
    if not asked:
        return
    names = {*TABLE, *HIGHER_ORDER, *CALLED, *(compat.kind(step.eqn) for step in steps)}
    for name in sorted(asked - names - known_primitives()):
        near = difflib.get_close_matches(name, sorted(names))
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        _say(
            f"the policy's ops name {name!r}, but no primitive of this program or of JAX "
            f"is called that: it changes nothing.{hint} jaxmp.explain lists those of a program.",
            known,
        )


COVERAGE = (
    warn_unseen, warn_unquantized, warn_unfused, warn_unknown, warn_precision, warn_ungoverned,
)  # fmt: skip


def overruled(plan: Plan) -> str:
    """What to say if a policy decides no product, each being another policy's; else empty.

    What was wrapped under a policy, or marked by `full_precision`, stays under it.
    """
    asked = plan.rules
    found = list(_governed(plan))
    if not found or any(rules.low == asked.low for rules in found):
        return ""
    others = sorted({str(rules.policy) for rules in found})
    return (
        f"{str(asked.policy)!r} decides no product here: the {len(found)} of them are in modules "
        f"or functions under a policy of their own ({', '.join(map(repr, others))}), which stays "
        "in force. For another one, start from what was not wrapped yet"
    )


def _governed(plan: Plan) -> Iterator[Rules]:
    """The rules that each contraction of a program is under."""
    for step in plan.steps:
        if step.eqn.primitive.name in LOW:
            yield region_rules(step.eqn, plan.rules) or plan.rules
        for inner in step.plans:
            yield from _governed(inner)


class _Missed(NamedTuple):
    """Which share of the FLOPs that a policy is about it missed, and why, in words."""

    share: float
    why: str


def _missed(
    plan: Plan, done: Callable[[Step], bool], why: Callable[[Step], str | None]
) -> _Missed | None:
    """What steps missed, by their FLOPs; None unless it is more than what they did."""
    did, missed, reasons = 0, 0, Counter[str]()
    for step, places, runs in tally(plan):
        flops = contraction_flops(step.eqn) * runs
        if done(step):
            did += flops
        elif reason := why(step):
            missed += flops
            reasons[reason] += places
    if missed <= did:
        return None
    said = "; ".join(f"{n} because {reason}" for reason, n in reasons.most_common())
    return _Missed(missed / (did + missed), said)


def _contractions(jaxpr: Any) -> int:
    """How many contractions of a jaxpr, at any depth, autocast would have narrowed."""
    count = 0
    for eqn in compat.closed(jaxpr).jaxpr.eqns:
        if eqn.primitive.name in LOW:
            mine = any(compat.dtype_of(v) == FLOAT32 for v in eqn.invars)
            count += mine and author_keeps(eqn) is None
        count += sum(map(_contractions, compat.inner_jaxprs(eqn)))
    return count
