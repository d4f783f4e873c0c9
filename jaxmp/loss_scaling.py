"""The loss scale in an optimizer's state, for who differentiates or looks himself."""

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
