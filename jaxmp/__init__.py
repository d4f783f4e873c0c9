"""Mixed precision for JAX and Flax: a policy, and one transformation that applies it."""

import importlib
import typing

from jaxmp import dtypes, policies, quantized, recipes, tree
from jaxmp._core.autocast import autocast, full_precision, reduced_precision
from jaxmp._modules import wrap
from jaxmp._modules.prepare import prepare
from jaxmp._training.loss_scale import dynamic_loss_scale, loss_scale_for, static_loss_scale
from jaxmp._training.scaled_grad import value_and_grad
from jaxmp._training.train_state import TrainState
from jaxmp.policy import Policy, PolicyLike, PolicyMap, get_policy

# What a train step does not need is loaded when it is first used.
if typing.TYPE_CHECKING:
    from jaxmp import checkpoint_policies, devices, loss_scaling, losses, numerics, testing
    from jaxmp._core.quantize.trees import dequantize, quantize
    from jaxmp._tools.audit.audit import audit
    from jaxmp._tools.explain.explain import explain
    from jaxmp._tools.numerics.diagnose import diagnose
    from jaxmp._tools.parity.parity import parity
    from jaxmp._tools.preflight.preflight import preflight
    from jaxmp._tools.tune.tune import tune
    from jaxmp._tools.validate.validate import validate
    from jaxmp._training.accumulate import accumulate_gradients
    from jaxmp._training.master_weights import master_weights
    from jaxmp._training.store_state import store_state

_SUBMODULES = ("checkpoint_policies", "devices", "loss_scaling", "losses", "numerics", "testing")
_FUNCTIONS = {
    "accumulate_gradients": "_training.accumulate",
    "audit": "_tools.audit.audit",
    "dequantize": "_core.quantize.trees",
    "diagnose": "_tools.numerics.diagnose",
    "explain": "_tools.explain.explain",
    "master_weights": "_training.master_weights",
    "parity": "_tools.parity.parity",
    "preflight": "_tools.preflight.preflight",
    "quantize": "_core.quantize.trees",
    "store_state": "_training.store_state",
    "tune": "_tools.tune.tune",
    "validate": "_tools.validate.validate",
}

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
    "jaxmp.recipes": "Recipe float8 int8 mxfp4 mxfp8 nvfp4 products",
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
        if name in _SUBMODULES:
            return importlib.import_module(f"jaxmp.{name}")
        if name in _FUNCTIONS:
            found = getattr(importlib.import_module(f"jaxmp.{_FUNCTIONS[name]}"), name)
            return globals().setdefault(name, found)
        moved = {old: f"{module}.{old}" for module, olds in _MOVED.items() for old in olds.split()}
        place = (moved | _RENAMED).get(name)
        hint = f"; it is {place}" if place else ""
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}{hint}", name=name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
