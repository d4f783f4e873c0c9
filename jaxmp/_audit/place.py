"""The place of an equation: its line and module, and autocast's decisions there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax.extend.core as jex_core

from jaxmp._autocast.annotations import emulated_at, kept_at, skipped_at, unfused_at
from jaxmp._autocast.rules import Rules, region_rules
from jaxmp._autocast.why import Skipped, Why
from jaxmp._jaxprs.attributes import name_stack
from jaxmp._jaxprs.compat import called, closed, inner_jaxprs
from jaxmp._jaxprs.higher_order import Inner, inside
from jaxmp._jaxprs.scopes import CAST
from jaxmp._jaxprs.source import in_scope
from jaxmp._jaxprs.walk import Place


@dataclasses.dataclass(frozen=True)
class AuditPlace(Place):
    """The place of an equation, and autocast's decisions there; branches count by their share.

    Attributes:
      region: the rules of the autocast region around it, or None.
      kept: why autocast keeps its products in float32; None if it does not.
      skipped: why a policy's recipe does not apply to its products; None if it does.
      emulates: the format whose values its products multiply in a wider one; or empty.
      unfused: why no kernel computes its attention, although a policy asks for one; or empty.
      within: the innermost primitive around it that autocast does not look inside; or empty.
    """

    region: Rules | None = None
    kept: Why | None = None
    skipped: Skipped | None = None
    emulates: str = ""
    unfused: str = ""
    within: str = ""

    def at(self, eqn: jex_core.JaxprEqn) -> Self:
        """See `Place.at`."""
        stack = name_stack(eqn)
        return dataclasses.replace(
            super().at(eqn),
            region=region_rules(eqn) or self.region,
            kept=kept_at(stack) or self.kept,
            skipped=skipped_at(stack) or self.skipped,
            emulates=emulated_at(stack) or self.emulates,
            unfused=unfused_at(stack) or self.unfused,
        )

    def inside(self, inner: Inner) -> Self:
        """See `Place.inside`."""
        return dataclasses.replace(self, times=self.times * inner.times * inner.chance)

    def unknown(self, eqn: jex_core.JaxprEqn) -> Self:
        """Returns the place of an equation's jaxprs that autocast does not look inside."""
        return dataclasses.replace(self, within=called(eqn))


def places_inside(eqn: jex_core.JaxprEqn, place: AuditPlace) -> Iterator[tuple[Any, AuditPlace]]:
    """Yields the open jaxprs inside an equation at `place`, each with its own place."""
    inners = inside(eqn)
    for inner in inners:
        yield closed(inner.jaxpr).jaxpr, place.inside(inner)
    for jaxpr in () if inners else inner_jaxprs(eqn):
        yield closed(jaxpr).jaxpr, place.unknown(eqn)


def is_ours(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether autocast added an equation."""
    return in_scope(eqn, CAST)
