"""Sets of primitives by class and flag, from the table in `jaxmp._core.jaxprs.primitive_table`.

A policy's ``ops`` overrides the class of a primitive by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmp._core.jaxprs.equation_parameters import exponent
from jaxmp._core.jaxprs.primitive_table import TABLE, Flag, flagged, of_kind

LOW = of_kind("compute")

NORMALIZING = flagged(Flag.NORMALIZING)
AFFINE = flagged(Flag.AFFINE)
CHOOSING = flagged(Flag.CHOOSING)
SCALING = flagged(Flag.SCALING)
SUMMING = flagged(Flag.SUMMING)
BROADCASTING = flagged(Flag.BROADCASTING)
MAY_OVERFLOW = flagged(Flag.MAY_OVERFLOW)

ROUNDING = flagged(Flag.ROUNDING)
COMPARING = flagged(Flag.COMPARING)
SOLVING = flagged(Flag.SOLVING)
AMPLIFYING = flagged(Flag.SOLVING | Flag.PERIODIC)
SINUSOID = flagged(Flag.SINUSOID)
BOUNDED_DOMAIN = flagged(Flag.BOUNDED_DOMAIN)
CUMULATIVE = flagged(Flag.CUMULATIVE)
POOLING = flagged(Flag.POOLING)

LOOKING_UP = flagged(Flag.LOOKING_UP)
MOVING = flagged(Flag.MOVING)
REORDERING = flagged(Flag.REORDERING)
CROSSING = flagged(Flag.CROSSING)
SENDING = flagged(Flag.SENDING)
REPEATING = flagged(Flag.REPEATING)
WRITING = flagged(Flag.WRITING)
IN_PARTS = flagged(Flag.IN_PARTS)
# Data movement in front of a contraction, which runs in the contraction's dtype.
TO_CONTRACTIONS = flagged(Flag.REORDERING | Flag.CROSSING | Flag.JOINING)

# Primitives that `bind.apply` may trace once and reuse.
TRACED_ONCE = of_kind("compute", "full_precision", "promote", "move") - flagged(Flag.UNCACHED)

# Prefixes of primitives that draw random numbers, which are data whatever their key is.
RANDOM = ("random_", "threefry", "rng_")

# JAX functions that bind another primitive for some operands, or under another name.
CALLED = {
    "psum": ("psum_invariant", "unreduced_psum"),
    "pmean": ("psum", "psum_invariant", "unreduced_psum"),
    "psum_scatter": ("reduce_scatter", "unreduced_reduce_scatter"),
    "reduce_scatter": ("unreduced_reduce_scatter",),
    "all_gather": ("all_gather_invariant", "all_gather_reduced"),
}


def classify(name: str, params: Mapping[str, Any]) -> str | None:
    """Returns the class of a primitive, or None if it is not in the table (it runs as written).

    Args:
      name: the primitive's name, as printed in a jaxpr.
      params: the equation's parameters: `x ** -2` is a division in disguise and runs in float32.

    Example:
      >>> classify("dot_general", {}), classify("integer_pow", {"y": -2}), classify("hash", {})
      ('compute', 'full_precision', None)
    """
    if name == "integer_pow" and exponent(params) < 0:
        return "full_precision"
    return TABLE[name].kind if name in TABLE else None
