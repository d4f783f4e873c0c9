"""Mixed precision for JAX and Flax: a policy, and one transformation that applies it."""

import typing

from jaxmp import (
    checkpoint_policies,
    devices,
    dtypes,
    loss_scaling,
    losses,
    numerics,
    policies,
    quantized,
    recipes,
    testing,
    tree,
)
from jaxmp._audit.audit import audit
from jaxmp._autocast import autocast, explain, full_precision, reduced_precision
from jaxmp._modules import wrap
from jaxmp._numerics.diagnose import diagnose
from jaxmp._numerics.tune import tune
from jaxmp._numerics.validate import validate
from jaxmp._parity.parity import parity
from jaxmp._preflight.preflight import preflight
from jaxmp._prepare import prepare
from jaxmp._quantize.trees import dequantize, quantize
from jaxmp._training.accumulate import accumulate_gradients
from jaxmp._training.loss_scale import dynamic_loss_scale, loss_scale_for, static_loss_scale
from jaxmp._training.master_weights import master_weights
from jaxmp._training.scaled_grad import value_and_grad
from jaxmp._training.store_state import store_state
from jaxmp._training.train_state import TrainState
from jaxmp.policy import Policy, PolicyLike, PolicyMap, get_policy

__all__ = [
    "Policy",
    "PolicyLike",
    "PolicyMap",
    "TrainState",
    "__version__",
    "accumulate_gradients",
    "audit",
    "autocast",
    "checkpoint_policies",
    "dequantize",
    "devices",
    "diagnose",
    "dtypes",
    "dynamic_loss_scale",
    "explain",
    "full_precision",
    "get_policy",
    "loss_scale_for",
    "loss_scaling",
    "losses",
    "master_weights",
    "numerics",
    "parity",
    "policies",
    "preflight",
    "prepare",
    "quantize",
    "quantized",
    "recipes",
    "reduced_precision",
    "static_loss_scale",
    "store_state",
    "testing",
    "tree",
    "tune",
    "validate",
    "value_and_grad",
    "wrap",
]

__version__ = "0.1.0"

# The modules of names that used to be at the root.
_MOVED = {
    "jaxmp.loss_scaling": (
        "LossScaleState check_not_stuck loss_scale scale_loss skipped_count step_was_finite unscale"
    ),
    "jaxmp.losses": "linear_cross_entropy",
    "jaxmp.numerics": "capture monitor read_monitor",
    "jaxmp.quantized": "QuantizedArray",
    "jaxmp.recipes": "Recipe float8 int8 mxfp8 products",
    "jaxmp.tree": "all_finite cast_floating stochastic_round",
}
_RENAMED = {
    "GradScaler": "jaxmp.dynamic_loss_scale(tx)",
    "assert_contractions_in": "jaxmp.testing.assert_products_in",
    "deepseek": "jaxmp.recipes.blockwise_float8",
    "grad": "jaxmp.value_and_grad, which returns the loss as well",
}

if not typing.TYPE_CHECKING:  # a type checker knows what is there

    def __getattr__(name: str) -> object:
        moved = {old: f"{module}.{old}" for module, olds in _MOVED.items() for old in olds.split()}
        place = (moved | _RENAMED).get(name)
        hint = f"; it is {place}" if place else ""
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}{hint}", name=name)
