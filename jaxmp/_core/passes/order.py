"""The passes over a plan between its decisions and its execution, in order.

A pass takes the plan of a jaxpr, and the planner that made it, and returns a plan.
"""

from jaxmp._core.decide.planning import Pass
from jaxmp._core.passes.derivatives import derive
from jaxmp._core.passes.early_casts import narrow_early, widen_early
from jaxmp._core.passes.fused_attention.find import fuse
from jaxmp._core.passes.softmax_vjp import fuse_softmax_vjp
from jaxmp._core.passes.stored_weights import save_as_stored, scale_after
from jaxmp._core.passes.take_along_axis import take_by_comparison
from jaxmp._core.passes.watch_overflow import watch_overflow

CASTS: tuple[Pass, ...] = (narrow_early, widen_early, scale_after)
PASSES: tuple[Pass, ...] = (
    *CASTS,
    take_by_comparison,
    fuse,
    fuse_softmax_vjp,
    save_as_stored,
    watch_overflow,
    derive,
)
