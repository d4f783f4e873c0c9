"""Products whose results are rounded before a loss, or recomputed in another dtype."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs.compat import closed, dtype_of
from jaxmp._core.jaxprs.dataflow import demanded
from jaxmp._core.jaxprs.higher_order import Inner
from jaxmp._core.jaxprs.source import is_backward
from jaxmp._core.plan.primitives import classify
from jaxmp._tools.audit.follow import FLOATS, LOW, Observed
from jaxmp._tools.audit.report import Operation

ROUNDED = "rounded-result"
INCONSISTENT = "inconsistent-recompute"

# The readers of a value, as flags: a logarithm; one of its sum; one of the sum of its exponentials,
# as in a cross-entropy; any other that takes 16 bits, such as a product in the forward pass.
_LOG, _LOG_OF_SUM, _LOSS, _OTHER = 1, 2, 4, 8


class Rounding:
    """The findings on the dtypes of products' results, collected while a program is walked.

    Only logits of a cross-entropy are reported as rounded: compared with float32 results of the
    same operands, the error of the gradient is 1.4 to 18 times as large, growing with the logits.
    For a normalization or a sigmoid it is 1.2 to 1.5 times, for the softmax of attention 1.4 to 6:
    that is usual. (For least squares it is 1.4 times, and 100 close to the target, but they look
    like a norm.) Results that autocast narrows are not judged.
    """

    def __init__(self, program: Any) -> None:
        self._readers = _readers(program)
        self._forward: dict[Any, dict[str, str]] = defaultdict(dict)  # dtype → line

    def visit(self, seen: Observed, operation: Operation) -> tuple[str, str, str] | None:
        """Checks whether a product's result is rounded, or has another dtype in the forward pass.

        Two products are the same if they have the same operands, apart from moves and casts.

        Returns:
          The kind of finding, the line to blame, and the finding in words; None if there is none.
        """
        [var], [dtype] = seen.eqn.outvars, operation.out_dtypes
        forward = self._forward[frozenset(k.origin for k in seen.known[:2]), operation.flops]
        if not operation.backward:
            forward[dtype] = operation.source
        elif forward and dtype not in forward and dtype_of(var) in FLOATS:
            before, line = next(iter(forward.items()))
            what = f"{before} in the forward pass, recomputed in {dtype} in the backward pass"
            return INCONSISTENT, line, f"{what}: the gradient is not the loss's"
        low = dtype_of(var) in LOW and not operation.backward and not seen.out.narrowed
        if not low or not self.only_in_a_loss(var):
            return None
        what = f"its result is rounded to {dtype}, and widened for a cross-entropy"
        return ROUNDED, operation.source, what

    def only_in_a_loss(self, var: Any) -> bool:
        """Returns whether a value is read by a cross-entropy alone."""
        return self._readers[var] == _LOSS


def _readers(program: Any) -> dict[Any, int]:
    """Finds the readers of each variable of a closed jaxpr and its inner jaxprs."""
    found: dict[Any, int] = defaultdict(int)

    @functools.cache
    def run(jaxpr: Any, wanted: tuple[int, ...], *, backward: bool) -> list[int]:
        opened = closed(jaxpr).jaxpr
        of: dict[Any, int] = defaultdict(int)

        def want(atoms: Sequence[Any], facts: Sequence[int]) -> None:
            for atom, fact in zip(atoms, facts, strict=True):
                if dtype_of(atom) in FLOATS and not isinstance(atom, Literal):
                    of[atom] |= fact
                    found[atom] |= fact

        want(opened.outvars, wanted)
        for eqn in reversed(opened.eqns):
            outs, back = [of[v] for v in eqn.outvars], backward or is_backward(eqn)
            run_inner = functools.partial(run_inside, backward=back)
            ins = demanded(eqn, outs, run_inner, operator.or_, 0)
            want(eqn.invars, ins or [_read_by(eqn, outs, backward=back)] * len(eqn.invars))
        return [of[v] for v in opened.invars]

    def run_inside(inner: Inner, wanted: Sequence[int], *, backward: bool) -> list[int]:
        return run(inner.jaxpr, tuple(wanted), backward=backward)

    results = closed(program).jaxpr.outvars
    run(program, tuple(_OTHER if dtype_of(v) in LOW else 0 for v in results), backward=False)
    return found


def _read_by(eqn: JaxprEqn, outs: Sequence[int], *, backward: bool) -> int:
    """Returns the readers of an equation's operands, given those of its results."""
    name, read = eqn.primitive.name, functools.reduce(operator.or_, outs, 0)
    match name, classify(name, eqn.params):
        case "convert_element_type", _:
            low, narrows = (dtype_of(v) in LOW for v in (eqn.invars[0], eqn.outvars[0]))
            return read if low == narrows else read & (_LOSS if low else _OTHER)
        case (("log" | "log1p" | "log2"), _):
            return _LOG
        case (("exp" | "exp2"), _):
            return _LOSS if read & (_LOG_OF_SUM | _LOSS) and not read & _OTHER else 0
        case (("reduce_sum" | "psum" | "psum_invariant"), _) if read & _LOG:
            return read | _LOG_OF_SUM
        case _, "full_precision" | "promote" | "move":
            return read
    return 0 if backward else _OTHER
