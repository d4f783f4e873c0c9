"""The values that a program computes: `capture`, `monitor`, and the functions that read these.

Example:
  >>> import jax.numpy as jnp, jaxmp
  >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w))
  >>> run = jaxmp.numerics.capture(loss, "mixed_bfloat16")(jnp.ones((4, 4)), jnp.ones((2, 4)))
  >>> products = [m for m in run.sites.values() if m.site.op == "dot_general"]
  >>> float(products[0].statistics.largest)
  4.0
"""

from jaxmp._tools.numerics.capture import Capture, capture
from jaxmp._tools.numerics.diagnose import Fault, NumericsReport
from jaxmp._tools.numerics.monitor import monitor, read_monitor
from jaxmp._tools.numerics.origins import Origin
from jaxmp._tools.numerics.plots import plot_scale
from jaxmp._tools.numerics.statistics import Measured, Record, Statistics
from jaxmp._tools.numerics.survey import Site

__all__ = [
    "Capture",
    "Fault",
    "Measured",
    "NumericsReport",
    "Origin",
    "Record",
    "Site",
    "Statistics",
    "capture",
    "monitor",
    "plot_scale",
    "read_monitor",
]
