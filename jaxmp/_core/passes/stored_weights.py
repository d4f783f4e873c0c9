"""Products with quantized weights, scaled after they are summed: a pass over a plan.

The values then enter the product as they are stored, a cast that XLA fuses into it on every chip. A
scale multiplied before it does not fuse on GPUs, where the whole weight is written in 16 bits
first. And it is more accurate: 8-bit values are exact in every 16-bit dtype, their multiples not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.execute.bind import Dot
from jaxmp._core.execute.environment import Environment
from jaxmp._core.jaxprs.attributes import explicit_sharding
from jaxmp._core.jaxprs.compat import dtype_of, shape_of, variables
from jaxmp._core.jaxprs.equation_parameters import permutation, product_axes, widens_8_bits
from jaxmp._core.jaxprs.scopes import DEQUANTIZE
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.plan.plan import DType, Op, Plan, Step
from jaxmp._core.plan.rules import FLOAT32
from jaxmp._core.plan.why import Kind
from jaxmp._core.products.product import Sides, sums_in


class Stored(NamedTuple):
    """A quantized weight, as values and scales with equally many axes.

    No `Scaled`, which has arrays: these are variables of the jaxpr that a plan is of.

    Attributes:
      values: the variable of its values.
      scale: the variable of its scales.
      order: for each axis of the weight as it is read, the axis of values and scales.
      side: which operand of a product it is.
    """

    values: Any
    scale: Any
    order: tuple[int, ...]
    side: int = 0


@dataclasses.dataclass(frozen=True)
class StoredDot(Op):
    """The op of a product with a weight as it is stored, scaled after the sums, in float32."""

    weight: Stored

    def run(self, step: Step, env: Environment) -> list[Any]:
        weight, eqn, other = self.weight, step.eqn, 1 - self.weight.side
        x = env.read(eqn.invars[other], step.casts[other])
        sides = Sides.of(product_axes(eqn), *(len(shape_of(v)) for v in eqn.invars))
        product = _stored_product(sides, weight.side, weight.order, x.dtype)
        return [product(x, env.arrays[weight.values], env.arrays[weight.scale])]

    def reads(self, step: Step) -> list[Any]:
        return [*super().reads(step), self.weight.values, self.weight.scale]


def scale_after(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which products read quantized weights as stored, if each sum has one scale.

    That is, if a weight is dequantized in the jaxpr that multiplies it.
    """
    if not any(widens_8_bits(step.eqn) for step in plan.steps):
        return plan
    made_of: dict[Any, tuple[Any, ...]] = {}  # dequantized variable → what it is computed from
    stored: dict[Any, Stored] = {}
    steps = []
    for step in plan.steps:
        eqn = step.eqn
        atoms = variables(eqn.invars)
        if in_scope(eqn, DEQUANTIZE):
            origins = tuple(dict.fromkeys(o for v in atoms for o in made_of.get(v, (v,))))
            made_of.update(dict.fromkeys(eqn.outvars, origins))
            found = _stored(eqn, origins)
        elif eqn.primitive.name == "transpose" and atoms[0] in stored:
            before = stored[atoms[0]]
            found = before._replace(order=tuple(before.order[i] for i in permutation(eqn)))
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
    """Returns the weight that an equation dequantizes, if it is whole and from two variables."""
    shape = shape_of(eqn.outvars[0])
    if len(origins) != 2 or any(len(shape_of(v)) != len(shape) for v in origins):
        return None
    scale, values = sorted(origins, key=lambda v: dtype_of(v) == FLOAT32, reverse=True)
    if shape_of(values) != shape or dtype_of(scale) != FLOAT32:
        return None
    return Stored(values, scale, tuple(range(len(shape))))


def _scaled_after(step: Step, stored: dict[Any, Stored]) -> Step:
    """Returns a step with its weight read as stored, if it is a product that allows for that."""
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
        sizes = shape_of(eqn.invars[side])
        scales = [shape_of(weight.scale)[i] for i in weight.order]
        one = all(scales[i] == 1 for i in contracted[side])
        if one and all(n in (1, size) for n, size in zip(scales, sizes, strict=True)):
            op = StoredDot(weight._replace(side=side))
            return dataclasses.replace(step, op=op, why=step.why.noted(Kind.STORED))
    return step


@functools.lru_cache(maxsize=1024)
def _stored_product(
    sides: Sides, side: int, order: tuple[int, ...], low: DType
) -> Callable[..., Any]:
    def product(x: Any, values: Any, scale: Any, sums: DType) -> Any:
        """Computes the product, summed in dtype `sums`."""
        weight = lax.convert_element_type(lax.transpose(values, order), low)
        left, right = (x, weight) if side else (weight, x)
        dims = sides.contracted, sides.batch
        out = lax.dot_general(left, right, dims, preferred_element_type=sums)
        scale = sides.laid_out(lax.transpose(scale, order), side)
        return lax.convert_element_type(lax.convert_element_type(out, FLOAT32) * scale, low)

    @jax.custom_jvp
    def scaled(x: Any, values: Any, scale: Any) -> Any:
        return product(x, values, scale, sums_in(low))

    @scaled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Summed in 16 bits, so that its transpose multiplies a gradient of 16 bits.
        x, values, scale = primals
        out = product(x, values, scale, sums_in(low))
        return out, product(tangents[0], values, scale, low)

    return scaled  # not jitted: it would be traced once, with the source line of its first caller
