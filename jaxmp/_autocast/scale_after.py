"""Products with weights stored in few bits are scaled after they are summed: a pass over a plan.

The values then enter the product as they are stored, which XLA fuses into it on every chip. A scale
multiplied before it does not fuse on GPUs, where the whole weight is written in 16 bits first. And
it is more accurate: values of 8 bits are numbers of every 16-bit dtype, their multiples are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.contract import Dot, Stored, StoredDot
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.rules import FLOAT32
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs.attributes import explicit_sharding
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import permutation, product_axes, widens_8_bits
from jaxmp._jaxprs.scopes import DEQUANTIZE
from jaxmp._jaxprs.source import in_scope


def scale_after(plan: Plan, _planner: object = None) -> Plan:
    """A plan in which products read stored weights as they are, where one scale goes for each sum.

    That is where a weight is dequantized in the jaxpr that multiplies it.
    """
    if not any(widens_8_bits(step.eqn) for step in plan.steps):
        return plan
    made_of: dict[Any, tuple[Any, ...]] = {}  # what dequantizing makes → the variables it is from
    stored: dict[Any, Stored] = {}
    steps = []
    for step in plan.steps:
        eqn = step.eqn
        atoms = [v for v in eqn.invars if not isinstance(v, Literal)]
        if in_scope(eqn, DEQUANTIZE):
            origins = tuple(dict.fromkeys(o for v in atoms for o in made_of.get(v, (v,))))
            made_of.update(dict.fromkeys(eqn.outvars, origins))
            found = _stored(eqn, origins)
        elif eqn.primitive.name == "transpose" and atoms[0] in stored:
            found = stored[atoms[0]].transposed(permutation(eqn))
        elif eqn.primitive.name == "convert_element_type" and atoms:
            found = stored.get(atoms[0])
        else:
            found = None
            step = _scaled_after(step, stored)
        if found is not None:
            stored[eqn.outvars[0]] = found
        steps.append(step)
    return dataclasses.replace(plan, steps=tuple(steps))


def _stored(eqn: JaxprEqn, origins: tuple[Any, ...]) -> Stored | None:
    """What an equation dequantizes, if its result is a whole weight made of two variables."""
    shape = shape_of(eqn.outvars[0])
    if len(origins) != 2 or any(len(shape_of(v)) != len(shape) for v in origins):
        return None
    scale, values = sorted(origins, key=lambda v: dtype_of(v) == FLOAT32, reverse=True)
    if shape_of(values) != shape or dtype_of(scale) != FLOAT32:
        return None
    return Stored(values, scale, tuple(range(len(shape))))


def _scaled_after(step: Step, stored: dict[Any, Stored]) -> Step:
    """A step whose weight is read as it is stored, if it is a product that allows for that."""
    eqn = step.eqn
    if type(step.op) is not Dot or eqn.primitive.name != "dot_general":
        return step
    low = step.outs[0]
    if low in (None, FLOAT32) or set(step.ins) != {low} or any(map(explicit_sharding, eqn.invars)):
        return step
    contracted, _ = product_axes(eqn)
    for side in (1, 0):
        weight = stored.get(eqn.invars[side])
        if weight is None:
            continue
        sizes, scales = shape_of(eqn.invars[side]), weight.scale_shape
        one = all(scales[i] == 1 for i in contracted[side])
        if one and all(n in (1, size) for n, size in zip(scales, sizes, strict=True)):
            op = StoredDot(weight._replace(side=side))
            return dataclasses.replace(step, op=op, why=step.why.noted(Kind.STORED))
    return step
