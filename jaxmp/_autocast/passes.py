"""What happens to a plan between its decisions and its execution, in order.

A pass takes the plan of a jaxpr, and the planner that made it, and returns a plan.
"""

from jaxmp._autocast.attention import attend, attend_in_loops
from jaxmp._autocast.derivatives import derive
from jaxmp._autocast.early_casts import narrow_early, widen_early
from jaxmp._autocast.fused import fuse
from jaxmp._autocast.planner import Pass
from jaxmp._autocast.scale_after import scale_after
from jaxmp._autocast.take_along_axis import take_by_comparison

CASTS: tuple[Pass, ...] = (narrow_early, widen_early, scale_after)
PASSES: tuple[Pass, ...] = (*CASTS, take_by_comparison, fuse, attend, attend_in_loops, derive)
