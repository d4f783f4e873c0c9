"""Mixed precision for JAX and Flax: a policy, and one transformation that applies it."""

from jaxmp.accumulate import accumulate_gradients
from jaxmp.autocast import autocast, explain, full_precision
from jaxmp.loss_scale import (
    dynamic_loss_scale,
    loss_scale_for,
    static_loss_scale,
)
from jaxmp.master_weights import master_weights, stochastic_round
from jaxmp.policy import Policy, get_policy
from jaxmp.scale_rule import LossScaleState
from jaxmp.scaled_grad import (
    check_not_stuck,
    grad,
    loss_scale,
    scale_loss,
    skipped_count,
    step_was_finite,
    value_and_grad,
)
from jaxmp.train_state import TrainState
from jaxmp.tree import all_finite

__all__ = [
    "LossScaleState",
    "Policy",
    "TrainState",
    "__version__",
    "accumulate_gradients",
    "all_finite",
    "autocast",
    "check_not_stuck",
    "dynamic_loss_scale",
    "explain",
    "full_precision",
    "get_policy",
    "grad",
    "loss_scale",
    "loss_scale_for",
    "master_weights",
    "scale_loss",
    "skipped_count",
    "static_loss_scale",
    "step_was_finite",
    "stochastic_round",
    "value_and_grad",
]

__version__ = "0.1.0"
