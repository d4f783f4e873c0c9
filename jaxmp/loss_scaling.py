"""The scale of the loss in an optimizer's state: to read it, and to differentiate without `jaxmp`.

Example:
  >>> import jax, jax.numpy as jnp, jaxmp, optax
  >>> state = jaxmp.static_loss_scale(optax.sgd(0.1), 1024.0).init(jnp.ones(2))
  >>> grads = jax.grad(lambda w: scale_loss(jnp.sum(w**2), state))(jnp.ones(2))
  >>> grads, unscale(grads, state)
  (Array([2048., 2048.], dtype=float32), Array([2., 2.], dtype=float32))
"""

from jaxmp._training.scale_rule import LossScaleState
from jaxmp._training.scaled_grad import (
    check_not_stuck,
    loss_scale,
    scale_loss,
    skipped_count,
    step_was_finite,
    unscale,
)

__all__ = [
    "LossScaleState",
    "check_not_stuck",
    "loss_scale",
    "scale_loss",
    "skipped_count",
    "step_was_finite",
    "unscale",
]
