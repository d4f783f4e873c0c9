"""Whether the policies of a loss and the scaler of its optimizer go together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax.numpy as jnp

from jaxmp._autocast.regions import policies_traced
from jaxmp.policy import Policy


def float16_in(policies: Iterable[Policy]) -> Policy | None:
    """The first of some policies that has float16 in it, whose gradients need a loss scale."""
    for policy in policies:
        if jnp.float16 in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
            return policy
    return None


@contextmanager
def policies_checked(name: str, *, has_scaler: bool) -> Iterator[None]:
    """Warns if what is traced meanwhile needs a scaler that is not there, or the other way round.

    Args:
      name: the function that speaks in the message.
      has_scaler: whether the optimizer's state has a loss scale.

    Warns:
      UserWarning: if a policy has float16 in it, and there is no scaler; or if there is one, and
        policies, none of which has float16 in it. Policies of what `jax.jit` has traced before are
        not known.
    """
    with policies_traced() as policies:
        yield
    scaled = float16_in(policies)
    if scaled is not None and not has_scaler:
        said = (
            f"the loss computes under {str(scaled)!r}, and the optimizer has no loss scale: "
            "gradients that are too small for float16 become 0. Make the optimizer "
            "jaxmp.dynamic_loss_scale(tx), or both by jaxmp.prepare(model, tx, policy)."
        )
    elif policies and scaled is None and has_scaler:
        said = (
            f"the optimizer has a loss scale, and the loss computes under {str(policies[0])!r}, "
            "which has no float16 in it and needs none. Make the optimizer "
            "jaxmp.loss_scale_for(policy, tx), or both by jaxmp.prepare(model, tx, policy)."
        )
    else:
        return
    warnings.warn(f"{name}: {said}", UserWarning, stacklevel=4)
