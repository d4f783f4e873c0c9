"""Where an equation stands: its line and module, how often it runs, and in which pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.extend.core as jex_core

from jaxmp._autocast.annotations import emulated_at, kept_at, skipped_at, unfused_at
from jaxmp._autocast.rules import Rules, region_rules
from jaxmp._autocast.why import Skipped, Why
from jaxmp._jaxprs.attributes import name_stack
from jaxmp._jaxprs.compat import called, closed, inner_jaxprs
from jaxmp._jaxprs.higher_order import Inner, inside
from jaxmp._jaxprs.scopes import CAST
from jaxmp._jaxprs.source import (
    in_scope,
    is_backward,
    is_rematerialized,
    library_line,
    module_path,
    user_line,
)


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      path: the module path and named scopes around it, without those of transformations.
      source: ``file.py:line`` of the user's code.
      times: how often it runs per call: lengths of scans multiplied; a while loop's body counts
        once, a branch of a cond by its share.
      backward: whether it belongs to a backward pass.
      again: whether it computes again what a `jax.checkpoint` did not keep.
      region: the rules of the autocast region it stands in, or None.
      kept: why autocast keeps its contractions in float32; None where it does not.
      skipped: why a policy's recipe does not multiply its contractions; None where it does.
      emulates: the format whose values its contractions multiply in a wider one; or empty.
      unfused: why no kernel computes its attention, where a policy asks for it; or empty.
      inside: the innermost primitive around it that autocast does not look inside; or empty.
    """

    path: str = ""
    source: str = ""
    times: float = 1
    backward: bool = False
    again: bool = False
    region: Rules | None = None
    kept: Why | None = None
    skipped: Skipped | None = None
    emulates: str = ""
    unfused: str = ""
    inside: str = ""


def place_of(eqn: jex_core.JaxprEqn, around: Place) -> Place:
    """The place of an equation in a jaxpr that stands at `around`."""
    here = "/".join(filter(None, (around.path, module_path(eqn))))
    return around._replace(
        path=here,
        source=user_line(eqn) or around.source or library_line(eqn),
        backward=around.backward or is_backward(eqn),
        again=around.again or is_rematerialized(eqn),
        region=region_rules(eqn) or around.region,
        kept=kept_at(name_stack(eqn)) or around.kept,
        skipped=skipped_at(name_stack(eqn)) or around.skipped,
        emulates=emulated_at(name_stack(eqn)) or around.emulates,
        unfused=unfused_at(name_stack(eqn)) or around.unfused,
    )


def place_inside(inner: Inner, place: Place) -> Place:
    """The place of a jaxpr inside an equation that stands at `place`."""
    return place._replace(times=place.times * inner.times * inner.chance)


def place_unknown(eqn: jex_core.JaxprEqn, place: Place) -> Place:
    """The place of the jaxprs of an equation that autocast does not look inside."""
    return place._replace(inside=called(eqn))


def places_inside(eqn: jex_core.JaxprEqn, place: Place) -> Iterator[tuple[Any, Place]]:
    """The open jaxprs inside an equation that stands at `place`, and the places of them."""
    inners = inside(eqn)
    for inner in inners:
        yield closed(inner.jaxpr).jaxpr, place_inside(inner, place)
    for jaxpr in () if inners else inner_jaxprs(eqn):
        yield closed(jaxpr).jaxpr, place_unknown(eqn, place)


def is_ours(eqn: jex_core.JaxprEqn) -> bool:
    """Whether autocast added an equation."""
    return in_scope(eqn, CAST)
