"""How near results must be, and where each number comes from.

A test that derives its tolerance from what it runs says so where it stands: so many roundings of
`eps`. Here is what several modules ask for, and what whole collections of programs are held to.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp

import jaxmp


def eps(of: Any) -> float:
    """The spacing of numbers at 1 in a dtype, or in the compute dtype of a policy.

    Rounding to nearest is off by at most half of it, relative.
    """
    return float(jnp.finfo(jaxmp.get_policy(of).compute_dtype).eps)


# --- numeric programs, and layers over devices, against float64 ----------------------------------

# Relative errors of loss and gradient that no one would call wrong, whatever they are compared
# with: a loss to three digits, a gradient to two.
NEGLIGIBLE: Final = (1e-3, 1e-2)

# A relative error of what one would no longer call a result: of code written by hand that is this
# far off, a multiple excuses nothing, and the floor alone decides.
MEANINGLESS: Final = 0.3

# How many times the error of rounded operands alone (the floor), or of 16 bits by hand, is allowed:
# results are rounded as well as operands, and each figure is the root mean square of three draws.
TIMES_FLOOR: Final = 3.0

# --- random programs -----------------------------------------------------------------------------

# Of the error of a program that rounds every value as badly as it can. Autocast's should be below
# one; the spread is an estimate, from eight draws, and errors may happen to agree.
SPREADS: Final = 4.0

# Of the floor, where all elements of a result have one rounding in common, and errors do agree.
FLOORS: Final = 1.5

# float32's own error, relative: sums of a few thousand terms in another order; 84 eps.
FLOAT32_ORDER: Final = 1e-5

# --- public models -------------------------------------------------------------------------------

# Of either floor, unless `public_models.expected` has a model's own ratio, measured.
TARGET: Final = 1.5

# A measured ratio moves by a few per cent between compilers.
HEADROOM: Final = 1.1

# The floor already holds one rounding of every parameter and input. A weight's gradient is moreover
# the product of an activation and a cotangent which are each rounded once more when they enter the
# backward contraction, and where the floor is small (little depth, no kinks) that is what remains.
# Rounding to bfloat16 is off by at most eps / 2 relative, so a gradient within eps / 2 in relative
# L2 norm is as close as its own representation in bfloat16 is guaranteed to be.
ROUNDING: Final = eps("bfloat16") / 2
