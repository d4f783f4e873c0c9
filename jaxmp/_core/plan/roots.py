"""Roots of arrays: literals of the program, parameters, or anything else.

They tell the products of layers from those of geometry and signal processing. Multiplying the
latter in 16 bits saves no time, and their results (coordinates, angles, norms, filtered signals)
are differenced, squared and turned into indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import has_effects
from jaxmp._core.jaxprs.compat import is_at_most
from jaxmp._core.jaxprs.dataflow import fixpoint, transfer_inner
from jaxmp._core.jaxprs.equation_parameters import contracted, free_sizes, widens_8_bits
from jaxmp._core.jaxprs.higher_order import Inner
from jaxmp._core.jaxprs.scopes import DEQUANTIZE, PARAMETER, ROWS
from jaxmp._core.jaxprs.source import in_scope, is_backward
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.plan.primitives import LOOKING_UP, LOW, RANDOM, REORDERING
from jaxmp._core.plan.provenance import is_basis
from jaxmp._core.plan.why import Kind, Why

# LITERALS: windows, stencils, bases, masks and grids. WEIGHTS: parameters, and values computed from
# them alone, except by a product or a lookup. ITERATED: computed from one parameter alone, by
# products of it with itself (an orthonormalization).
LITERALS, WEIGHTS, ITERATED, OTHER = "literals", "weights", "iterated", "other"


class Roots:
    """The roots of the variables of jaxprs, computed once per jaxpr and roots of its operands."""

    def __init__(self) -> None:
        self._cached = functools.cache(self._of)

    def __call__(self, jaxpr: Any, ins: Sequence[str]) -> Mapping[Any, str]:
        """Returns the root of each variable of a jaxpr, given the roots of its operands."""
        return self._cached(jaxpr, tuple(ins))

    def of_operands(self, inner: Inner, roots: Sequence[str]) -> list[str]:
        """Returns the roots of an inner jaxpr's operands, given the roots of the equation's."""
        return fixpoint(inner, roots, self._results, _either)

    def _of(self, jaxpr: Any, ins: Sequence[str]) -> dict[Any, str]:
        opened, consts = compat.closed(jaxpr)
        of = dict(zip(opened.invars, ins, strict=True))
        for var, const in zip(opened.constvars, consts, strict=bool(consts)):
            of[var] = LITERALS if is_basis(const) else WEIGHTS
        dequantizes = any(map(widens_8_bits, opened.eqns))
        moved: dict[Any, Any] = {}  # the variable that each result is, in another order
        for eqn in opened.eqns:
            roots = roots_of(eqn.invars, of)
            sources = [moved.get(v, v) for v in eqn.invars if not isinstance(v, Literal)]
            if eqn.primitive.name in REORDERING and len(sources) == 1:
                moved[eqn.outvars[0]] = sources[0]
            if dequantizes and in_scope(eqn, DEQUANTIZE):
                found = [OTHER if in_scope(eqn, ROWS) else WEIGHTS] * len(eqn.outvars)
            elif says_parameter(eqn):
                found = [WEIGHTS]
            elif eqn.primitive.name in LOW and _is_iterated(roots, sources):
                found = [ITERATED]
            else:
                found = self._of_results(eqn, roots)
            of.update(zip(eqn.outvars, found, strict=True))
        return of

    def _results(self, jaxpr: Any, ins: Sequence[str]) -> list[str]:
        return roots_of(compat.closed(jaxpr).jaxpr.outvars, self(jaxpr, ins))

    def _of_results(self, eqn: JaxprEqn, roots: list[str]) -> list[str]:
        if set(roots) <= {LITERALS}:
            fixed = not (has_effects(eqn) or is_zeros(eqn) or _draws(eqn))
            return [LITERALS if fixed else OTHER] * len(eqn.outvars)
        inner = transfer_inner(eqn, roots, self._results, _either)
        if inner is not None:
            return inner
        if ITERATED in roots and OTHER not in roots and eqn.primitive.name not in LOOKING_UP:
            return [ITERATED] * len(eqn.outvars)
        weights = OTHER not in roots and eqn.primitive.name not in LOW | LOOKING_UP
        return [WEIGHTS if weights else OTHER] * len(eqn.outvars)


def roots_of(atoms: Sequence[Any], of: Mapping[Any, str]) -> list[str]:
    """Returns the roots of variables and literals, given those of known variables."""
    return [LITERALS if isinstance(v, Literal) else of.get(v, OTHER) for v in atoms]


def says_parameter(eqn: JaxprEqn) -> bool:
    """Returns whether an equation only marks its operand as a parameter."""
    return eqn.primitive.name == "squeeze" and in_scope(eqn, PARAMETER)


def _either(a: str, b: str) -> str:
    return a if a == b else ITERATED if {a, b} == {WEIGHTS, ITERATED} else OTHER


def _is_iterated(roots: Sequence[str], sources: Sequence[Any]) -> bool:
    """Returns whether a product is of one parameter with itself, or goes on from such a product."""
    alone = set(roots[:2]) <= {WEIGHTS, ITERATED}
    return alone and (ITERATED in roots[:2] or len({*sources}) == 1)


def is_zeros(eqn: JaxprEqn) -> bool:
    """Returns whether an equation fills an array with zeros: an initial state, a zero tangent."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    [filling] = eqn.invars[:1]
    return isinstance(filling, Literal) and not np.any(filling.val)


def _draws(eqn: JaxprEqn) -> bool:
    """Returns whether an equation, or one inside it, draws random numbers."""
    return any(each.primitive.name.startswith(RANDOM) for each in equations([eqn]))


# Geometry.

# A product without weights that contracts at most so many elements rotates, projects or mixes
# coordinates. With two results of layers as operands, it may be attention with heads of size 8.
COORDINATES, OF_LAYERS = 8, 4
# So does a product with a matrix of at most so many rows and columns, even a trained one: a pose, a
# camera. A matrix of data must be square; if it is not, it is a batch of few examples.
SMALL = 4


def geometry(eqn: JaxprEqn, roots: Sequence[str], *, of_layers: bool = True) -> Why | None:
    """Returns why a product is geometry or signal processing, not a layer; None if it may be one.

    Args:
      eqn: the product, a matmul or convolution.
      roots: the roots of its operands.
      of_layers: whether both operands may be results of layers.
    """
    backward = is_backward(eqn)
    # A backward pass starts from literals too, but its products are those of layers.
    if LITERALS in roots[:2] and not backward:
        return Kind.SIGNAL.of()
    if not any(free := free_sizes(eqn)):
        return Kind.SCALAR_PRODUCT.of()
    count = contracted(eqn)
    if WEIGHTS not in roots[:2]:
        if is_at_most(count, OF_LAYERS if of_layers or backward else COORDINATES):
            return Kind.COORDINATES.of(count)
    elif is_at_most(count, SMALL) and any(map(functools.partial(_is_pose, count), roots, free)):
        return Kind.POSE.of(count)
    return None


def _is_pose(rows: int, kind: str, columns: Sequence[int]) -> bool:
    """Returns whether an operand of few rows is a small matrix, and not data of a small batch."""
    count = math.prod(columns)
    return is_at_most(count, SMALL) and (kind == WEIGHTS or count == rows)
