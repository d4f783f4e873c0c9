"""FLOPs of contractions, and how many of them stay float32 by their layers' own dtype."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.attributes import name_stack
from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.jaxprs.equation_parameters import block_format, layout, product_axes, window
from jaxmp._core.jaxprs.scopes import OWN, REGION
from jaxmp._core.jaxprs.source import plain_path
from jaxmp._core.plan.plan import Plan
from jaxmp._core.plan.why import Kind


def contraction_flops(eqn: JaxprEqn) -> int:
    """Returns the FLOPs of one run of a contraction, a multiply-add counted as two.

    Counted as XLA does: positions of a convolution's window that lie in the padding are not
    multiplied. Zero for primitives that are not contractions.
    """
    count = _FLOPS.get(eqn.primitive.name)
    return 0 if count is None else count(eqn)


def product_flops(eqn: JaxprEqn) -> int:
    """Returns the FLOPs of one run of a contraction, or of `jax.nn.scaled_matmul`; else zero."""
    if block_format(eqn):  # [batch, rows, summed]
        return 2 * math.prod(sizes(eqn.outvars[0])) * sizes(eqn.invars[0])[-1]
    return contraction_flops(eqn)


# The size assumed for a symbolic dimension of `jax.export`.
_OPEN_SIZE = 64


def sizes(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a value, with 64 for symbolic dimensions."""
    return tuple(map(known_size, shape_of(atom)))


def known_size(size: Any) -> int:
    """Returns a size, or 64 if it is symbolic."""
    return size if isinstance(size, int) else _OPEN_SIZE


_OPEN = re.compile(r"\w+\((?=[^()]*$)")  # ``vmap(`` without its end


def kept_by_layers(plan: Plan) -> tuple[Counter[str], int]:
    """Counts the FLOPs of contractions that stay float32 by the own dtype of their layers.

    Returns:
      These FLOPs, by the path of the layer; and the FLOPs of all contractions.
    """
    kept: Counter[str] = Counter()

    def total(plan: Plan, times: int, around: str) -> int:
        flops = 0
        for step in plan.steps:
            path = "/".join(filter(None, (around, str(name_stack(step.eqn)))))
            for inner, called in step.inner_plans:
                flops += total(called, times * known_size(inner.times), path)
            if not step.plans and (cost := contraction_flops(step.eqn) * times):
                flops += cost
                if step.why.kind == Kind.LAYERS_OWN:
                    layer = path.partition(f"{REGION}{OWN}")[0]
                    kept[plain_path(_OPEN.sub("", layer))] += cost
        return flops

    return kept, total(plan, 1, "")


def _dot_general(eqn: JaxprEqn) -> int:
    (contract, _), _ = product_axes(eqn)
    lhs = sizes(eqn.invars[0])
    contracted: int = math.prod(lhs[i] for i in contract)
    return 2 * math.prod(sizes(eqn.outvars[0])) * contracted


def _ragged_dot(eqn: JaxprEqn) -> int:
    # Each row of the operand meets the matrix of its own group: as a plain product.
    return 2 * math.prod(sizes(eqn.invars[0])) * sizes(eqn.invars[1])[-1]


def _convolution(eqn: JaxprEqn) -> int:
    """Counts along each axis the pairs of output and window position that meet an element."""
    numbers, (strides, padding, lhs_dilations, rhs_dilations) = layout(eqn), window(eqn)
    lhs, rhs, out = (sizes(v) for v in (*eqn.invars[:2], *eqn.outvars))
    batch, features, *_ = (out[i] for i in numbers.out_spec)
    flops: int = 2 * batch * features * rhs[numbers.rhs_spec[1]]
    for i, (low, _) in enumerate(padding):
        size, width, count = (
            shape[spec[2 + i]] for shape, spec in zip((lhs, rhs, out), numbers, strict=True)
        )
        starts = np.arange(count) * strides[i] - (low if isinstance(low, int) else 0)
        at = starts[:, None] + np.arange(width) * rhs_dilations[i]
        dilation = lhs_dilations[i]
        inside = (at >= 0) & (at < (size - 1) * dilation + 1) & (at % dilation == 0)
        flops *= int(inside.sum())
    return flops


_FLOPS = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}
