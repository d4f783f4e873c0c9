"""A warning about losses that are traced under float16 without a loss scale."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax.numpy as jnp

from jaxmp._autocast.regions import policies_traced
from jaxmp.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])


def float16_in(policies: Iterable[Policy]) -> Policy | None:
    """Returns the first policy that has float16 in it, whose gradients need a loss scale."""
    for policy in policies:
        if jnp.float16 in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
            return policy
    return None


def policies_checked(fn: F, name: str, *, has_scaler: bool, skip_overflow: bool = False) -> F:
    """Wraps `fn` to warn if something in it is traced under float16, and there is no scaler.

    A scaler without float16 is used on purpose: it skips the steps that are not finite.

    Args:
      fn: a function that differentiates a loss.
      name: the function that the message names.
      has_scaler: whether the optimizer's state has a loss scale.
      skip_overflow: whether it skips steps in which float16 overflowed.

    Warns:
      UserWarning: if a policy has float16 in it, and there is no scaler; if none has, and
        `skip_overflow` has nothing to watch. The policies of functions that `jax.jit` has traced
        before are not known.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with policies_traced() as policies:
            out = fn(*args, **kwargs)
        if not has_scaler and (policy := float16_in(policies)) is not None:
            warnings.warn(
                f"{name}: the loss computes under {str(policy)!r}, and the optimizer has no loss "
                "scale: gradients that are too small for float16 become 0. Make the optimizer "
                "jaxmp.dynamic_loss_scale(tx), or both by jaxmp.prepare(model, tx, policy).",
                UserWarning,
                stacklevel=2,
            )
        if skip_overflow and policies and float16_in(policies) is None:
            warnings.warn(
                f"{name}: skip_overflow=True has no effect: the loss computes under "
                f"{str(policies[0])!r}, and only float16 overflows. Leave it out.",
                UserWarning,
                stacklevel=2,
            )
        return out

    return checked  # type: ignore[return-value]
