"""A zoo of architectures that are not ours, rebuilt small from public layers.

Each builder returns a `PublicModel` written the way its authors would write it for float32: not one
dtype in it, or a configuration's `dtype=float32` in every layer, whatever the library (Flax Linen,
Flax NNX, Haiku, Equinox or plain JAX). The tests run
every entry under every policy; sizes are chosen so that a forward and backward compiles in seconds
and still has the structure that makes the architecture difficult (a scan with a hand-written
derivative, a routing decision, a log-domain recurrence, an integrator, a normalization, ...).
"""

from public_models import (
    attention,
    configured,
    decisions,
    decoders,
    flow,
    generative,
    graphs,
    implicit,
    libraries,
    molecules,
    proteins,
    recurrent,
    solvers,
    state_space,
    vision,
)
from public_models.registry import BUILDERS, REQUIRES, PublicModel, build

__all__ = [
    "BUILDERS",
    "REQUIRES",
    "PublicModel",
    "attention",
    "build",
    "configured",
    "decisions",
    "decoders",
    "flow",
    "generative",
    "graphs",
    "implicit",
    "libraries",
    "molecules",
    "proteins",
    "recurrent",
    "solvers",
    "state_space",
    "vision",
]
