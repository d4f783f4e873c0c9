"""Warnings of the parts of a program that autocast, a recipe or a policy's `ops` do not reach.

Each `warn_` function takes the plan of a program and `known`, the keys of earlier warnings, and
adds its own to these.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import known_primitives, setting
from jaxmp._core.jaxprs.higher_order import HIGHER_ORDER
from jaxmp._core.jaxprs.primitive_table import TABLE
from jaxmp._core.jaxprs.scopes import DEQUANTIZE
from jaxmp._core.jaxprs.source import in_scope, level_of_user, library_line, user_line
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.passes.fused_attention.find import FusedAttention
from jaxmp._core.passes.stored_weights import DequantizedDot, StoredDot
from jaxmp._core.plan.flops import contraction_flops
from jaxmp._core.plan.parameters import overlooked
from jaxmp._core.plan.plan import DType, Plan, Step
from jaxmp._core.plan.primitives import CALLED, LOW
from jaxmp._core.plan.rules import FLOAT32, FLOAT64, Rules, author_keeps
from jaxmp._core.plan.why import Kind, skipped, unfused
from jaxmp._core.printable import printable
from jaxmp._core.products.derivative import QuantizedDot
from jaxmp._core.speed import chip_of, traced_for, warning
from jaxmp._core.weight_format import activation_format
from jaxmp.recipes import Recipe


def _say(text: str, known: set[str], key: str = "") -> None:
    """Warns, unless a warning with the same key, by default its text, was given before."""
    key = key or text
    if key not in known:
        known.add(key)
        warnings.warn(printable(f"autocast: {text}"), UserWarning, stacklevel=level_of_user())


def warn_unseen(plan: Plan, known: set[str]) -> None:
    """Warns of each primitive in a program that hides float32 products."""
    counts: Counter[str] = Counter()
    first: dict[str, JaxprEqn] = {}
    for step, places, _ in plan.tally():
        if step.why.kind != Kind.NOT_LOOKED_INSIDE:
            continue
        eqn = step.eqn
        products = sum(map(_would_narrow, equations([eqn])))
        if products:
            counts[compat.called(eqn)] += products * places
            first.setdefault(compat.called(eqn), eqn)
    for name, count in counts.items():
        line = user_line(first[name])
        where = f"{name} ({line})" if line else name
        _say(
            f"{where} is not looked inside, and runs {count} float32 product"
            f"{'s' if count > 1 else ''} as written. Mark the function that calls it with "
            "jaxmp.reduced_precision to hand it 16-bit operands; if float32 is meant, with "
            "jaxmp.full_precision, or say 'ops="
            f"{first[name].primitive.name}:as_written' in the policy.",
            known,
            where,
        )


def warn_closing(calls: Sequence[JaxprEqn], known: set[str]) -> None:
    """Warns that a program runs as written: rules of `calls` close over traced values."""
    names = [f"{compat.custom_rule(e).name} ({user_line(e) or library_line(e)})" for e in calls]
    where = ", ".join(dict.fromkeys(names)) or "a function"
    _say(
        f"this program runs as written, in float32: the derivative rule of {where} "
        "closes over a traced value, which is gone where autocast derives the rule. Pass the value "
        "as an argument of the function that has the rule (see jax.closure_convert).",
        known,
    )


def warn_emulated(plan: Plan, known: set[str]) -> None:
    """Warns of an 8-bit recipe that the chip emulates."""
    recipe = plan.rules.policy.matmul
    if isinstance(recipe, Recipe) and recipe.quantizes:
        slow = warning(recipe, chip_of(traced_for()))
        if slow:
            _say(f"{slow}. matmul=auto takes what pays.", known)


class Asked(NamedTuple):
    """A request of a policy for the products of a program.

    Attributes:
      done: returns whether a step fulfills it.
      why_not: returns why a step that should does not; None for one that need not.
      text: the warning if most do not: ``{share}`` of the FLOPs, and ``{why}``.
    """

    done: Callable[[Step], bool]
    why_not: Callable[[Step], str | None]
    text: str


def warn_missed(plan: Plan, known: set[str]) -> None:
    """Warns of each request of the policy that less than half of the FLOPs fulfill."""
    for asked in filter(None, (ask(plan) for ask in ASKED)):
        did, missed, reasons = 0, 0, Counter[str]()
        for step, places, runs in plan.tally():
            flops = contraction_flops(step.eqn) * runs
            if asked.done(step):
                did += flops
            elif reason := asked.why_not(step):
                missed += flops
                reasons[reason] += places
        if missed > did:
            why = "; ".join(f"{n} because {reason}" for reason, n in reasons.most_common())
            text = asked.text.format(share=f"{missed / (did + missed):.0%}", why=why)
            _say(text, known, why)


def _to_quantize(plan: Plan) -> Asked | None:
    policy = plan.rules.policy
    if not isinstance(policy.matmul, Recipe) or not policy.matmul.quantizes:
        return None

    def why_not(step: Step) -> str | None:
        dtypes = {compat.dtype_of(operand) for operand in step.eqn.invars[:2]}
        here = step.eqn.primitive.name in LOW and step.rules.policy == policy  # in no other region
        if here and dtypes <= {*plan.rules.lower}:
            return "the author chose the dtype of the operands (a layer's dtype=, for example)"
        product = skipped(step.why)
        return product.why if product and not product.intended else None

    return Asked(
        lambda step: isinstance(step.op, QuantizedDot),
        why_not,
        f"{policy.matmul} products: {{share}} of the FLOPs of layers stay in "
        f"{np.dtype(policy.compute_dtype).name}: {{why}}. jaxmp.explain lists them.",
    )


def _to_fuse(_plan: Plan) -> Asked:
    # Not on a chip without a kernel: programs that will run on others are tried out there.
    return Asked(
        lambda step: isinstance(step.op, FusedAttention),
        lambda step: None if step.why.note(Kind.NO_KERNEL) else unfused(step.why),
        "attention=fused: {share} of the FLOPs of attention are not fused: {why}. jaxmp.explain "
        "lists them.",
    )


def _to_narrow(plan: Plan) -> Asked | None:
    """Asks for low products where JAX's default precision, the author's choice, is float32."""
    default = setting("jax_default_matmul_precision")
    if plan.rules.low is None or default is None:
        return None
    one = jax.ShapeDtypeStruct((1, 1), plan.rules.wide)
    unsaid = jax.make_jaxpr(lax.dot)(one, one).eqns[-1]
    kept = author_keeps(unsaid, plan.rules)
    return kept and Asked(
        lambda step: step.eqn.primitive.name in LOW and step.why != kept,
        lambda step: str(kept) if step.why == kept else None,
        "{share} of the FLOPs of products stay float32: JAX's default precision is "
        f"{default!r}, which jaxmp honors like precision= in a call. Unset "
        "jax_default_matmul_precision, or put `with jax.default_matmul_precision(...)` around only "
        "the part that must stay float32. jaxmp.explain lists them.",
    )


def _to_govern(plan: Plan) -> Asked:
    """Asks for products of the governed dtype: not float64 for a float32 policy, or vice versa."""
    wide, policy = plan.rules.wide, "p=f64,c=f32,o=f64"
    other: DType = FLOAT64
    if wide == FLOAT64:
        other, policy = FLOAT32, "mixed_bfloat16"

    def is_other(step: Step) -> bool:
        dtypes = set(map(compat.dtype_of, step.eqn.invars))
        return other in dtypes and wide not in dtypes

    return Asked(
        lambda step: step.eqn.primitive.name in LOW and not is_other(step),
        lambda step: f"operands are {other.name}" if is_other(step) else None,
        f"{{share}} of the FLOPs of products are {other.name} and stay so: the policy casts "
        f"{wide.name} values only, its param_dtype. Give {wide.name} arrays, or a policy for "
        f"{other.name}, such as {policy!r}.",
    )


def _to_round_activations(plan: Plan) -> Asked | None:
    activations = plan.rules.policy.activations
    if activations is None:
        return None

    def why_not(step: Step) -> str | None:
        if not isinstance(step.op, StoredDot) or step.op.activations is not None:
            return None
        if isinstance(step.op, DequantizedDot):
            return "the weight has several scales in a sum, or is a convolution's"
        return "the weight is of the other kind, integers or floats"

    return Asked(
        lambda step: isinstance(step.op, StoredDot) and step.op.activations is not None,
        why_not,
        f"activations={activations}: {{share}} of the FLOPs of stored weights multiply 16 bits: "
        "{why}.",
    )


def _to_read_ranges(plan: Plan) -> Asked | None:
    activations = plan.rules.policy.activations
    if activations is None or not activation_format(activations)[1]:
        return None

    def rounds(step: Step) -> bool:
        return isinstance(step.op, StoredDot) and step.op.activations is not None

    return Asked(
        lambda step: isinstance(step.op, StoredDot) and step.op.weight.input_scale is not None,
        lambda step: "no scale is stored with the weight" if rounds(step) else None,
        f"activations={activations}: {{share}} of the FLOPs of stored weights find a scale for "
        "each row as it comes: {why}. Store one: jaxmp.quantize(params, policy, "
        "calibrate=(fn, batches)).",
    )


ASKED = (_to_round_activations, _to_read_ranges, _to_quantize, _to_fuse, _to_narrow, _to_govern)


def warn_overlooked(
    plan: Plan,
    parameters: Sequence[bool],
    place: Callable[[int], str],
    name: str,
    known: set[str],
    advice: str = "",
) -> None:
    """Warns if most of what layers multiply by is in no argument that holds parameters.

    Args:
      plan: the plan of the program.
      parameters: which of its operands are parameters.
      place: describes where in the call an operand is.
      name: the name of the function.
      known: the keys of earlier warnings.
      advice: how parameters are said, where that is not by `argnums`.
    """
    if plan.rules.low is None or "overlooked" in plan.built:
        return
    plan.built["overlooked"] = found = overlooked(plan.jaxpr, parameters)
    if found is None:
        return
    operands, share = found
    if advice:
        _say(
            f"{share:.0%} of the FLOPs of the layers of {name} read arrays that are not known as "
            f"parameters: what meets float32 data stays float32. {advice}",
            known,
            name,
        )
        return
    more = f" and {len(operands) - 3} more" if len(operands) > 3 else ""
    _say(
        f"{share:.0%} of the FLOPs of the layers of {name} read "
        f"{', '.join(map(place, operands[:3]))}{more}, which argnums does not name as parameters: "
        "what meets float32 data stays float32. Give the positions of all parameters, as in "
        "jaxmp.autocast(fn, policy, argnums=(0, 1)); if there are none, argnums=().",
        known,
        name,
    )


def warn_unknown(plan: Plan, known: set[str]) -> None:
    """Warns of names in a policy's `ops` of no primitive of the program or of JAX."""
    steps = [each.step for each in plan.tally()]
    asked = {
        name
        for each in {plan.rules, *(step.rules for step in steps)}
        for name, _ in each.policy.ops
    }
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


def warn_precise(plan: Plan, known: set[str]) -> None:
    """Warns if no product is narrowed, since those that could be have a precision of their own."""
    products = [each.step for each in plan.tally() if each.step.eqn.primitive.name in LOW]
    default = setting("jax_default_matmul_precision")  # see `_to_narrow`
    if default is not None or any(d in step.rules.lower for step in products for d in step.ins):
        return
    kinds = {step.why.kind for step in products}
    if Kind.PRECISION not in kinds or kinds & {Kind.REGION, Kind.LAYERS_OWN}:
        return  # a region is float32 on purpose, as jaxmp.full_precision says
    visits = [visit for visit in plan.walk() if visit.step.why.kind == Kind.PRECISION]
    places = list(dict.fromkeys(v.place.path or v.place.source for v in visits))
    first, low = visits[0].step, np.dtype(plan.rules.policy.compute_dtype).name
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    _say(
        f"no matmul or convolution runs in {low}: {', '.join(places[:3])}{more} asked for "
        f"precision={first.why.details[0]}, which jaxmp honors. Leave precision= out where the "
        "layer or product is written, and the policy decides.",
        known,
    )


def warn_unrounded(plan: Plan, known: set[str]) -> None:
    """Warns of ``weights`` or ``activations`` where layers read no weight in few bits."""
    policy = plan.rules.policy
    if policy.weights is None and policy.activations is None:
        return
    steps = [each.step.eqn for each in plan.tally()]
    layers = any(eqn.primitive.name in LOW for eqn in steps)
    if not layers or any(in_scope(eqn, DEQUANTIZE) for eqn in steps):
        return
    if policy.weights is None:
        _say(
            f"activations={policy.activations} changes nothing: no product of this program reads a "
            "weight in few bits. Give it what jaxmp.quantize returns, or say weights= as well.",
            known,
        )
        return
    _say(
        f"weights={policy.weights} rounds no parameter of this program: matrices of at least 4,096 "
        "elements are, in the arguments that argnums names and in the params of modules.",
        known,
    )


COVERAGE = (warn_unseen, warn_emulated, warn_missed, warn_unknown, warn_precise, warn_unrounded)


def overruled(plan: Plan) -> str:
    """Returns a sentence if other policies decide every product of a program; else empty.

    Modules that were wrapped under a policy, and functions marked by `full_precision`, keep it.
    """
    asked = plan.rules
    found = Counter[Rules]()
    for step, places, _ in plan.tally():
        if step.eqn.primitive.name in LOW:
            found[step.rules] += places
    if not found or any(rules.low == asked.low for rules in found):
        return ""
    others = sorted({str(rules.policy) for rules in found})
    return (
        f"{str(asked.policy)!r} decides no product here: the {found.total()} of them are in "
        f"modules or functions under a policy of their own ({', '.join(map(repr, others))}), which "
        "stays in force. For another one, start from what was not wrapped yet"
    )


def _would_narrow(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a product that autocast would have narrowed."""
    if eqn.primitive.name not in LOW:
        return False
    return any(compat.dtype_of(v) == FLOAT32 for v in eqn.invars) and author_keeps(eqn) is None
