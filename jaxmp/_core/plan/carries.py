"""Carries of a scan: those that go through layers, and those that are states.

A state accumulates the contribution of each iteration (an integral over time, a running average, an
optimizer's parameters), or converges to a solution: in 16 bits its error grows with the iterations.
A stack of layers (`x + mlp(x)`) multiplies by different weights in each iteration: its carry may be
low, as in hand-written code. A carry that is only passed around the devices, as keys and values are
in ring attention, is rounded once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.dataflow import Inside, forward
from jaxmp._core.jaxprs.higher_order import Inner, steering
from jaxmp._core.plan.primitives import LOW, MOVING, SENDING
from jaxmp._core.plan.roots import OTHER, WEIGHTS, geometry


class Flow(NamedTuple):
    """The carries and weights that a value depends on. Carries are bits of an integer.

    Attributes:
      itself: carries it depends on other than through a product.
      layered: carries it depends on through a product with weights of the iteration's own.
      own: whether it is computed from such weights alone.
      stack: whether it is an argument that every iteration sees whole; a part of it, at an index
        that changes, is the iteration's own.
      moved: whether it is a carry, at most moved.
      sent: whether it is one that another device sent.
    """

    itself: int = 0
    layered: int = 0
    own: bool = False
    stack: bool = False
    moved: bool = False
    sent: bool = False


_NOTHING = Flow()


class Recurrence(NamedTuple):
    """The dependence of the carries of a scan on themselves.

    Attributes:
      layered: for each carry, whether it comes back through a product with the iteration's weights.
      sent: for each carry, whether it is only passed around the devices.
    """

    layered: tuple[bool, ...]
    sent: tuple[bool, ...]


def recurrence(body: Inner, weights: Sequence[bool]) -> Recurrence:
    """Returns how a loop's carries depend on themselves, given which operands are weights."""
    carry, n_carry = body.carries, body.carried
    ins = [
        Flow(stack=weight)
        if i < carry.start
        else Flow(itself=1 << (i - carry.start), moved=True)
        if i < carry.stop
        else Flow(own=weight)
        for i, weight in enumerate(weights)
    ]
    outs = forward(body.jaxpr, ins, _equation, _either, _NOTHING)[:n_carry]
    # A state may depend on itself through others: (x, v) -> (v, x + v).
    reached = [out.itself for out in outs]
    for _ in range(n_carry):
        reached = [
            bits | _union(reached[j] for j in range(n_carry) if bits >> j & 1) for bits in reached
        ]
    sent = [
        bool(bits) and all(outs[j].moved and outs[j].sent for j in range(n_carry) if bits >> j & 1)
        for bits in reached
    ]
    return Recurrence(
        layered=tuple(bool(out.layered >> i & 1) for i, out in enumerate(outs)),
        sent=tuple(sent),
    )


def _equation(eqn: JaxprEqn, ins: list[Flow], inside: Inside[Flow]) -> list[Flow]:
    name = compat.kind(eqn)
    roots = [WEIGHTS if flow.own or flow.stack else OTHER for flow in ins]
    if name in LOW and geometry(eqn, roots) is None:  # else it is arithmetic of float32
        return [_product(ins)]
    if (outs := inside(ins)) is not None:
        steers = [Flow(itself=ins[i].itself) for i in steering(eqn)]
        return [_merged([out, *steers])._replace(moved=out.moved, sent=out.sent) for out in outs]
    if name in ("gather", "dynamic_slice") and ins[0].stack:
        indexed = any(not isinstance(v, Literal) for v in eqn.invars[1:])
        return [Flow(own=indexed, stack=not indexed)]
    if name in MOVING | SENDING and len(ins) == 1:
        return [ins[0]._replace(sent=ins[0].sent or name in SENDING)] * len(eqn.outvars)
    return [_merged(ins)] * len(eqn.outvars)


def _product(ins: Sequence[Flow]) -> Flow:
    """Returns the flow of a product: a dependence through the iteration's own weights, or none."""
    left, right = ins[:2]
    if left.own and right.own:
        return Flow(own=True)
    weighed = (right.itself if left.own else 0) | (left.itself if right.own else 0)
    return Flow(layered=weighed | left.layered | right.layered)


def _merged(flows: Sequence[Flow]) -> Flow:
    """Returns the flow of the result of an op other than a product."""
    known = [f for f in flows if f != _NOTHING]
    return Flow(
        itself=_union(f.itself for f in flows),
        layered=_union(f.layered for f in flows),
        own=bool(known) and all(f.own for f in known),
        stack=bool(known) and all(f.stack for f in known),
    )


def _either(a: Flow, b: Flow) -> Flow:
    """Returns the flow of a value that is one of two."""
    return _merged([a, b])._replace(moved=a.moved and b.moved, sent=a.sent and b.sent)


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)
