"""Decisions by the function that made an equation, where the equation itself does not tell.

JAX has no primitive for these functions, and no mark on what they trace. Each is recognized in one
place, here, by its file and name in JAX or Flax; the tests hold what is relied on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.attributes import frames, traceback
from jaxmp._core.jaxprs.equation_parameters import jitted_name
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.jaxprs.source import PROMOTING, in_scope

_JAX = str(Path(jax.__file__).parent) + os.sep


def in_associative_scan(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is part of `jax.lax.associative_scan`: a recurrence, unrolled."""
    return _in_associative_scan(traceback(eqn))


@functools.lru_cache(maxsize=4096)
def _in_associative_scan(where: Any) -> bool:
    return any(
        code.co_name == "associative_scan" and code.co_filename.startswith(_JAX)
        for code, _ in frames(where)
    )


def is_take(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is `jax.numpy.take`, which is jitted: a lookup of rows."""
    return jitted_name(eqn).startswith("_take")


def is_promotion(eqn: JaxprEqn, readers: Sequence[JaxprEqn]) -> bool:
    """Returns whether JAX or Flax made a conversion to promote types, and no author wrote it.

    A function that promotes a value also reads it: both equations come from one instruction outside
    of JAX and Flax. An author's conversion (`x.astype(...)`) is an instruction of its own.
    """
    if in_scope(eqn, CAST):
        return True
    here = _instruction(eqn)
    return here is not None and any(_instruction(reader) == here for reader in readers)


def _instruction(eqn: JaxprEqn) -> tuple[Any, int] | None:
    """Returns the innermost instruction outside of JAX and Flax that made an equation, if known."""
    return next(
        (f for f in frames(traceback(eqn)) if not f[0].co_filename.startswith(PROMOTING)), None
    )
