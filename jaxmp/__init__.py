"""Mixed precision for JAX and Flax: a policy, and one transformation that applies it."""

from jaxmp.autocast import autocast, explain, full_precision
from jaxmp.master_weights import master_weights, stochastic_round
from jaxmp.policy import Policy, get_policy
from jaxmp.tree import all_finite

__all__ = [
    "Policy",
    "__version__",
    "all_finite",
    "autocast",
    "explain",
    "full_precision",
    "get_policy",
    "master_weights",
    "stochastic_round",
]

__version__ = "0.1.0"
