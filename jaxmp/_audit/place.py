"""Autocast's part in an equation."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from jaxmp._autocast.rules import Rules, region_rules
from jaxmp._jaxprs.place import Place
from jaxmp._jaxprs.scopes import CAST
from jaxmp._jaxprs.source import in_scope


def float32_region(place: Place) -> Rules | None:
    """Returns the rules of the autocast region around an equation, if they are float32's."""
    region = place.first(region_rules)
    return region if region is not None and region.low is None else None


def is_ours(eqn: JaxprEqn) -> bool:
    """Returns whether autocast added an equation."""
    return in_scope(eqn, CAST)
