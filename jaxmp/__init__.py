"""Mixed precision for JAX and Flax: a policy, and one transformation that applies it."""

from jaxmp import checkpoint_policies, devices, loss_scaling, numerics, policies, testing
from jaxmp._audit.audit import audit
from jaxmp._autocast import autocast, explain, full_precision, reduced_precision
from jaxmp._modules import wrap
from jaxmp._numerics.diagnose import diagnose
from jaxmp._numerics.monitor import monitor, read_monitor
from jaxmp._numerics.tune import tune
from jaxmp._numerics.validate import validate
from jaxmp._preflight.preflight import preflight
from jaxmp._prepare import prepare
from jaxmp._quantize.trees import dequantize, quantize
from jaxmp._training.accumulate import accumulate_gradients
from jaxmp._training.loss_scale import dynamic_loss_scale, loss_scale_for, static_loss_scale
from jaxmp._training.master_weights import master_weights, stochastic_round
from jaxmp._training.scale_rule import LossScaleState
from jaxmp._training.scaled_grad import (
    check_not_stuck,
    loss_scale,
    scale_loss,
    skipped_count,
    step_was_finite,
    value_and_grad,
)
from jaxmp._training.train_state import TrainState
from jaxmp.policy import Policy, PolicyMap, get_policy
from jaxmp.quantized import QuantizedArray
from jaxmp.recipes import Recipe, deepseek, float8, int8, mxfp8, products
from jaxmp.tree import all_finite

__all__ = [
    "LossScaleState",
    "Policy",
    "PolicyMap",
    "QuantizedArray",
    "Recipe",
    "TrainState",
    "__version__",
    "accumulate_gradients",
    "all_finite",
    "audit",
    "autocast",
    "check_not_stuck",
    "checkpoint_policies",
    "deepseek",
    "dequantize",
    "devices",
    "diagnose",
    "dynamic_loss_scale",
    "explain",
    "float8",
    "full_precision",
    "get_policy",
    "int8",
    "loss_scale",
    "loss_scale_for",
    "loss_scaling",
    "master_weights",
    "monitor",
    "mxfp8",
    "numerics",
    "policies",
    "preflight",
    "prepare",
    "products",
    "quantize",
    "read_monitor",
    "reduced_precision",
    "scale_loss",
    "skipped_count",
    "static_loss_scale",
    "step_was_finite",
    "stochastic_round",
    "testing",
    "tune",
    "validate",
    "value_and_grad",
    "wrap",
]

__version__ = "0.1.0"
