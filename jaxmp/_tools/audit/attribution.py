"""The attribution of products in float32: the line to blame, the reason, and the fix."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import NamedTuple

from jaxmp._core.execute.annotations import kept_at
from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.plan.primitives import classify
from jaxmp._core.plan.roots import LITERALS, OTHER, geometry
from jaxmp._core.plan.rules import author_keeps
from jaxmp._core.plan.why import Kind, is_unknown
from jaxmp._tools.audit.follow import (
    FLOAT32,
    LOW,
    Observed,
    Promoted,
    ValueKind,
    ValueName,
    float32_region,
)

INTENDED = "intended-float32"
FAULT = "float32-product"
UPCAST = "remove the upcast, or cast back before the next layer"
DEMOTE = "make the float32 side a Python number, or cast it to the other's dtype"
NARROW = "cast it to the other's dtype; a parameter, by giving its layer dtype=jnp.{}"
OUTSIDE = (
    "call a method of the wrapped model, model.f(x) and not Model.f(model, x), which computes it; "
    "or jaxmp.autocast for the function that does"
)
OPAQUE = "narrow what it is given: jaxmp.reduced_precision around the function it is in"


class Blame(NamedTuple):
    """The reason that a product is float32, and the line to blame.

    Attributes:
      kind: the kind of finding.
      source: the line to blame.
      path: the module path there.
      what: the reason, in words.
      fix: what to do; "intended" if that is nothing.
      kept: why autocast keeps it float32 of its own accord; empty if it does not.
    """

    kind: str
    source: str
    path: str
    what: str
    fix: str = "intended"
    kept: str = ""


class Judge:
    """The judge of a program's float32 products, which sees them in order.

    A derivative is float32 for the same reason as its function, so a product of the backward pass
    gets the blame of the forward products of the same line and module, if they have only one.

    Args:
      low: the 16-bit dtype to recommend.
      has_wrapped: whether a wrapped module is among the arguments.

    Attributes:
      has_policy: whether a policy transformed a part of the program, as far as it was seen, or
        would, if the wrapped module were called.
    """

    def __init__(self, low: str, *, has_wrapped: bool) -> None:
        self.has_policy = has_wrapped
        self.wrap = f"jaxmp.wrap(model, 'mixed_{low}'), or jaxmp.autocast for a function"
        self.parameter = (
            f"give the layer dtype=jnp.{low}, in which it then reads its parameters, or leave the "
            f"model in float32: {self.wrap}"
        )
        self.constant = NARROW.format(low)
        self._forward: dict[tuple[str, str], set[Blame | None]] = defaultdict(set)

    def contraction(self, seen: Observed) -> Blame | None:
        """Returns the blame for a float32 product; None if there is nothing to report."""
        at = seen.place.source, seen.place.path
        if seen.place.backward:
            said = self._forward.get(at, set())
            return next(iter(said)) if len(said) == 1 else self._judge(seen)
        blame = self._judge(seen)
        self._forward[at].add(blame)
        return blame

    def promotion(self, met: ValueName) -> str:
        """Returns the fix for 16-bit values that JAX promoted for the operand `met`."""
        fixes = {ValueKind.ARGUMENT: self.parameter, ValueKind.ARRAY: self.constant}
        return fixes.get(met.kind, DEMOTE)

    def _judge(self, seen: Observed) -> Blame | None:
        place, eqn = seen.place, seen.eqn
        here = place.source, place.path
        region, why = float32_region(place), place.first(kept_at)
        kept = why.kind if why else None
        upcasts = [c for k in seen.known if (c := k.cause) is not None and not c.by_policy]
        intended = functools.partial(Blame, INTENDED, *here)
        if Kind.LAYERS_OWN in (kept, region and region.why_float32):
            return intended(str(Kind.LAYERS_OWN.of()))
        if kept == Kind.REGION or region:
            return intended("in a region that a policy or the author keeps float32")
        if (asked := author_keeps(eqn)) is not None:
            return intended(str(asked))
        if place.within and classify(place.within, {}) == "as_written":
            return intended(f"inside {place.within}, which autocast leaves as written")
        if place.within and not upcasts:
            what = f"inside {place.within}, which autocast does not know and leaves as written"
            return Blame(FAULT, *here, what, OPAQUE)
        if kept == Kind.AS_WRITTEN:  # a derivative of such an equation
            what = "it belongs to what autocast leaves as written, a linear solver for example"
            return intended(what)
        if why and is_unknown(why) and not upcasts:
            what = "it belongs to an operation that autocast does not know and leaves as written"
            return Blame(FAULT, *here, what, OPAQUE)
        if kept == Kind.UPCAST_OPERAND or (place.within and upcasts):  # which autocast honored
            if not upcasts:
                return Blame(FAULT, *here, str(Kind.UPCAST_OPERAND.of()), UPCAST)
            return Blame(FAULT, upcasts[0].source, upcasts[0].path, upcasts[0].what, UPCAST)
        if why:
            return intended(f"autocast keeps it float32: {why}", kept=str(why))
        why = geometry(eqn, [LITERALS if k.fixed else OTHER for k in seen.known[:2]])
        if why is not None:  # nothing to gain, and autocast would not narrow it either
            outside = f"outside the wrapped module, and float32 inside as well: {why}"
            return intended(outside) if self.has_policy else None
        return self._operands(seen)

    def _operands(self, seen: Observed) -> Blame:
        """Returns the blame for float32 operands that neither a policy nor the author asks for."""
        here = seen.place.source, seen.place.path
        operands = list(zip(seen.eqn.invars[:2], seen.known, strict=False))
        plain = [k.name for v, k in operands if dtype_of(v) == FLOAT32 and k.why is None]
        promoted = [k.why.dtype for _, k in operands if isinstance(k.why, Promoted)]
        low = [str(dtype_of(v)) for v, _ in operands if dtype_of(v) in LOW]
        causes = [k.cause for _, k in operands if k.cause is not None]
        causes.sort(key=lambda cause: cause.by_policy)
        if low and seen.place.backward:
            what = "its gradient arrives in float32: the product in the forward pass returns that"
            fix = "leave out preferred_element_type (sums are float32 anyway), and use astype; "
            fix += "before a cross-entropy, narrow the gradient in a jax.custom_vjp"
            return Blame(FAULT, *here, what, fix)
        if plain and (promoted or low):
            what = f"{plain[0]} is float32 and meets a {(promoted or low)[0]} value"
            return Blame(FAULT, *here, what, self.promotion(plain[0]))
        if causes and causes[0].by_policy:
            what = "what autocast returns in float32 is multiplied outside of it"
            return Blame(FAULT, *here, what, "make the product part of the function it is given")
        if plain and causes and plain[0].kind == ValueKind.ARGUMENT:
            what = f"{plain[0]} is float32, and so is what it meets: {causes[0].what}"
            elsewhere = f" at {causes[0].source}" if causes[0].source != here[0] else ""
            return Blame(FAULT, *here, what + elsewhere, self.parameter)
        if causes:
            fix = self.promotion(causes[0].promoted) if causes[0].promoted else UPCAST
            return Blame(FAULT, causes[0].source, causes[0].path, causes[0].what, fix)
        fix = OUTSIDE if self.has_policy else self.wrap
        return Blame(FAULT, *here, "nothing in the program narrows its operands", fix)
