"""Presets: policies for whole models, as values.

Example:
  >>> import flax.linen as nn, jaxmp
  >>> policy = jaxmp.policies.keep_float32("head", nn.Embed, policy="mixed_bfloat16")
  >>> model = jaxmp.wrap(nn.Sequential([nn.Embed(8, 4), nn.Dense(2, name="head")]), policy)
"""

from __future__ import annotations

import dataclasses

from jaxmp.policy import PolicyLike, PolicyMap, get_policy

__all__ = ["keep_float32"]


def keep_float32(*keys: str | type, policy: PolicyLike) -> PolicyMap:
    """Returns `policy` with the modules that any of the keys match kept in float32.

    Args:
      *keys: Path patterns and module classes, as in `PolicyMap`.
      policy: The policy of the others. The keys go before those of a `PolicyMap`, and
        replace equal ones. Its `residuals`
        hold for all.

    Example:
      >>> keep_float32("head", "**/router", policy="mixed_bfloat16")
      PolicyMap({'head': 'float32', '**/router': 'float32'}, default='mixed_bfloat16')
    """
    if not keys:
        raise TypeError(
            "keep_float32: give patterns or classes of the modules to keep in float32, as in "
            "keep_float32('head', policy='mixed_bfloat16')."
        )
    resolved = get_policy(policy)
    default = resolved.default if isinstance(resolved, PolicyMap) else resolved
    exact = dataclasses.replace(get_policy("float32"), residuals=default.residuals)
    float32 = [(key, exact) for key in keys]
    if isinstance(resolved, PolicyMap):
        others = [pair for pair in resolved.overrides if pair[0] not in keys]
        return PolicyMap((*float32, *others), default=resolved.default)
    return PolicyMap(tuple(float32), default=resolved)
