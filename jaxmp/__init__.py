"""Mixed precision for JAX and Flax: a policy, and one transformation that applies it."""

from jaxmp import devices, policies, testing
from jaxmp.autocast import autocast, explain, full_precision, reduced_precision
from jaxmp.inspect import audit, preflight
from jaxmp.modules import wrap
from jaxmp.policy import Policy, PolicyMap, get_policy
from jaxmp.tree import all_finite

__all__ = [
    "Policy",
    "PolicyMap",
    "__version__",
    "all_finite",
    "audit",
    "autocast",
    "devices",
    "explain",
    "full_precision",
    "get_policy",
    "policies",
    "preflight",
    "reduced_precision",
    "testing",
    "wrap",
]

__version__ = "0.1.0"
