"""What a contraction costs in floating-point operations, and how much of that a plan keeps."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._autocast.plan import Plan
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs.attributes import name_stack
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.equation_parameters import layout, product_axes, window
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.scopes import OWN, REGION
from jaxmp._jaxprs.source import plain_path


def contraction_flops(eqn: JaxprEqn) -> int:
    """The operations of one run of a contraction, a multiply-add counted as two.

    Counted as XLA does: positions of a convolution's window that lie in the padding are not
    multiplied. Zero for primitives that are no contraction.
    """
    count = _FLOPS.get(eqn.primitive.name)
    return 0 if count is None else count(eqn)


# What a size counts as that `jax.export` left open.
_OPEN_SIZE = 64


def _sizes(atom: Any) -> tuple[int, ...]:
    return tuple(map(_known, shape_of(atom)))


def _known(size: Any) -> int:
    return size if isinstance(size, int) else _OPEN_SIZE


_OPEN = re.compile(r"\w+\((?=[^()]*$)")  # ``vmap(``, whose end is not there


class Kept(NamedTuple):
    """What of a plan stays float32 because layers were given that dtype.

    Attributes:
      flops: of its contractions, by the path of the layer that keeps them.
      total: of all contractions.
    """

    flops: Counter[str]
    total: int


def kept_by_layers(plan: Plan) -> Kept:
    """The contractions that stay float32 by the own dtype of their layers."""
    flops: Counter[str] = Counter()
    return Kept(flops, _add_kept(plan, 1, "", flops))


def _add_kept(plan: Plan, times: int, around: str, flops: Counter[str]) -> int:
    total = 0
    for step in plan.steps:
        path = "/".join(filter(None, (around, str(name_stack(step.eqn)))))
        if step.plans:
            for inner, its_plan in zip(inside(step.eqn), step.plans, strict=True):
                total += _add_kept(its_plan, times * _known(inner.times), path, flops)
        else:
            cost = contraction_flops(step.eqn) * times
            total += cost
            if cost and step.why.kind == Kind.LAYERS_OWN:
                layer = path.partition(f"{REGION}{OWN}")[0]
                flops[plain_path(_OPEN.sub("", layer))] += cost
    return total


def _dot_general(eqn: JaxprEqn) -> int:
    (contract, _), _ = product_axes(eqn)
    lhs = _sizes(eqn.invars[0])
    contracted: int = math.prod(lhs[i] for i in contract)
    return 2 * math.prod(_sizes(eqn.outvars[0])) * contracted


def _ragged_dot(eqn: JaxprEqn) -> int:
    # Each row of the operand meets the matrix of its own group: as a plain product.
    return 2 * math.prod(_sizes(eqn.invars[0])) * _sizes(eqn.invars[1])[-1]


def _convolution(eqn: JaxprEqn) -> int:
    numbers, moved = layout(eqn), window(eqn)
    lhs, rhs, out = (_sizes(v) for v in (*eqn.invars[:2], *eqn.outvars))
    batch, features = (out[i] for i in numbers.out_spec[:2])
    per_group: int = rhs[numbers.rhs_spec[1]]
    positions = 1
    for i, (low, _) in enumerate(moved.padding):
        positions *= _valid_positions(
            size=lhs[numbers.lhs_spec[2 + i]],
            window=rhs[numbers.rhs_spec[2 + i]],
            out=out[numbers.out_spec[2 + i]],
            stride=moved.strides[i],
            padding=low if isinstance(low, int) else 0,
            lhs_dilation=moved.lhs_dilation[i],
            rhs_dilation=moved.rhs_dilation[i],
        )
    flops: int = 2 * positions * batch * features * per_group
    return flops


def _valid_positions(
    *,
    size: int,
    window: int,
    out: int,
    stride: int,
    padding: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """How many pairs of an output and a window position along one axis meet an input element."""
    at = np.arange(out)[:, None] * stride + np.arange(window) * rhs_dilation - padding
    inside = (at >= 0) & (at < (size - 1) * lhs_dilation + 1) & (at % lhs_dilation == 0)
    return int(inside.sum())


_FLOPS = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}
