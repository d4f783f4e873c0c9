"""A model and its optimizer under one policy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import optax

from jaxmp._modules.wrap import wrap
from jaxmp._training.checks import as_transformation
from jaxmp._training.loss_scale import loss_scale_for
from jaxmp.policy import PolicyLike, policy_or_default

__all__ = ["prepare"]

T = TypeVar("T")


def prepare(
    model: T,
    tx: optax.GradientTransformation,
    policy: PolicyLike | None = None,
    *,
    params: str | Collection[str] = "params",
    **options: Any,
) -> tuple[T, optax.GradientTransformation]:
    """Puts a model and its optimizer under one policy.

    It is `wrap` of the model and `loss_scale_for` of the optimizer, which cannot disagree then.

    Args:
      model: What `wrap` takes: a Linen or NNX module, or a function whose first argument is its
        parameters.
      tx: The optimizer.
      policy: What `get_policy` takes, a `PolicyMap` included. By default "mixed_half",
        the 16-bit format that the default device multiplies natively; a line of log says which.
      params: As for `wrap`.
      **options: Those of `dynamic_loss_scale`.

    Returns:
      The wrapped model; and the optimizer, in a `dynamic_loss_scale` if the policy has float16 in
      it, and as it is otherwise. Gradients come from `value_and_grad` or a `TrainState`'s.

    Raises:
      TypeError: As `wrap` and `loss_scale_for`, or if the two are in each other's place.
      ValueError: As `wrap` and `loss_scale_for`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxmp, optax
      >>> model, tx = jaxmp.prepare(nn.Dense(8), optax.adamw(1e-3), "mixed_float16")
      >>> x = jnp.ones((1, 16))
      >>> params = model.init(jax.random.key(0), x)
      >>> float(jaxmp.loss_scaling.loss_scale(tx.init(params)))
      65536.0
      >>> jaxmp.explain(model.apply)(params, x).products()
      {'float16': 1}
    """
    if isinstance(model, (optax.GradientTransformation, optax.MultiSteps)):
        raise TypeError(
            "prepare: the model comes first, and then the optimizer: prepare(model, tx, policy)."
        )
    as_transformation("prepare", tx, "tx")
    resolved = policy_or_default("prepare", policy)
    return wrap(model, resolved, params=params), loss_scale_for(resolved, tx, **options)
