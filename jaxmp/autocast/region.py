"""Regions of a program with a policy of their own, and knowing that one is being traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# Part of JAX's trace context and so of the key of every jit cache: what is traced inside an
# autocast (where an inner autocast only leaves a marker) is never reused outside of one.
_INSIDE = jax.make_user_context(default_value=False)


@contextmanager
def inside_autocast() -> Iterator[None]:
    """While a function is traced to be planned: an autocast within it only marks its region."""
    with _INSIDE(True):  # noqa: FBT003 (JAX's signature)
        yield


def is_inside_autocast() -> bool:
    """Whether the current trace belongs to an enclosing autocast."""
    return bool(_INSIDE.value)
