"""Products with quantized weights: two passes over a plan.

Where a weight's scale can be multiplied after the sums, it is: the values then enter the product as
they are stored, a cast that XLA fuses into it on every chip. A scale multiplied before it does not
fuse on GPUs, where the whole weight is written in 16 bits first. And it is more accurate: 8-bit
values are exact in every 16-bit dtype, their multiples not.

For the backward pass every weight is saved as it is stored, and dequantized there again. On GPUs a
barrier keeps XLA from saving what it computed before; on TPUs it decides by itself, and a barrier
was seen to cost a fifth of a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, cast

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.execute.bind import Dot, contract, low_of
from jaxmp._core.execute.environment import Environment
from jaxmp._core.jaxprs import parameter_products
from jaxmp._core.jaxprs.attributes import explicit_sharding
from jaxmp._core.jaxprs.compat import dtype_of, shape_of, variables
from jaxmp._core.jaxprs.compiler_hints import no_excess_precision
from jaxmp._core.jaxprs.equation_parameters import permutation, product_axes, widens_8_bits
from jaxmp._core.jaxprs.scopes import CAST, DEQUANTIZE
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.plan.plan import DType, Op, Plan, Step
from jaxmp._core.plan.rules import FLOAT32
from jaxmp._core.plan.why import Kind
from jaxmp._core.products.derivative import quantize, quantize_within
from jaxmp._core.products.product import Sides, sums_in
from jaxmp._core.products.scaled import Scaled, dequantize
from jaxmp._core.quantized_parts import parts_of
from jaxmp._core.weight_format import activation_format
from jaxmp.formats import Format, format_of

_LINEAR: Final = ("dot_general", "conv_general_dilated")


class Stored(NamedTuple):
    """A quantized weight, as values and scales with equally many axes.

    No `Scaled`, which has arrays: these are variables of the jaxpr that a plan is of.

    Attributes:
      values: the variable of its values.
      scale: the variable of its scales.
      order: for each axis of the weight as it is read, the axis of values and scales.
      side: which operand of a product it is.
      trained: whether the product has a derivative with respect to it.
      input_scale: the variable of the scale of what it is multiplied by, if that is stored.
    """

    values: Any
    scale: Any
    order: tuple[int, ...]
    side: int = 0
    trained: bool = False
    input_scale: Any = None


@dataclasses.dataclass(frozen=True)
class StoredDot(Op):
    """The op of a product with a weight as it is stored, scaled after the sums, in float32.

    Attributes:
      weight: the weight.
      dot: the op of the product as it is written, whose derivative it has if the weight is trained.
      activations: the format that the other operand is rounded to, if it is: by the scale that the
        weight has for it, else by a scale of each row.
    """

    weight: Stored
    dot: Dot
    activations: Format | None = None

    @property
    def parameters(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `Op`."""
        return self.dot.parameters if self.weight.trained else ()

    def run(self, step: Step, env: Environment) -> list[Any]:
        weight, eqn, other = self.weight, step.eqn, 1 - self.weight.side
        x = env.read(eqn.invars[other], step.casts[other])
        sides = Sides.of(product_axes(eqn), *(len(shape_of(v)) for v in eqn.invars))
        product = _stored_product(sides, weight.side, weight.order, x.dtype, self.activations)
        known = [] if weight.input_scale is None else [env.arrays[weight.input_scale]]
        out = product(x, *known, env.arrays[weight.values], env.arrays[weight.scale])
        if not weight.trained:
            return [out]
        parameters, low = self.dot.given(step, env), low_of(step)
        operands = env.operands(step)
        contract = parameter_products.contract
        return [contract(eqn, operands, parameters, low, without=other, out=out)]

    def reads(self, step: Step) -> list[Any]:
        known = [] if self.weight.input_scale is None else [self.weight.input_scale]
        return [*super().reads(step), *known, self.weight.values, self.weight.scale]


@dataclasses.dataclass(frozen=True)
class DequantizedDot(StoredDot):
    """The op of a product with a dequantized weight, dequantized again in the backward pass."""

    def run(self, step: Step, env: Environment) -> list[Any]:
        order, side = self.weight.order, self.weight.side

        def product(x: Any, weight: Any, *_: Any) -> Any:
            [out] = contract(step, (x, weight) if side else (weight, x))
            return out

        def again(x: Any, values: Any, scale: Any) -> Any:
            weight = dequantize(Scaled(values, scale))
            weight = lax.convert_element_type(lax.transpose(weight, order), low_of(step))
            return product(x, weight)

        x, weight = env.operands(step)[:: 1 if side else -1]
        stored = env.arrays[self.weight.values], env.arrays[self.weight.scale]
        return [_saving_stored(product, again)(x, weight, *stored)]


def scale_after(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which products read quantized weights as stored, if each sum has one scale.

    That is, if a weight is dequantized in the jaxpr that multiplies it.
    """
    return _with_weights(plan, _scaled_after)


def save_as_stored(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which products save quantized weights for the backward pass as stored.

    That is, if a weight is dequantized in the jaxpr that multiplies it.
    """
    return _with_weights(plan, _dequantized_again)


def _with_weights(plan: Plan, with_weight: Callable[[Step, Mapping[Any, Stored]], Step]) -> Plan:
    """Returns a plan of other steps, given the weights that are dequantized before each."""
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
            step = with_weight(step, stored)
        if found is not None:
            stored[eqn.outvars[0]] = found
        steps.append(step)
    return dataclasses.replace(plan, steps=tuple(steps))


def _stored(eqn: JaxprEqn, origins: tuple[Any, ...]) -> Stored | None:
    """Returns the weight that an equation dequantizes, if it is whole."""
    shape = shape_of(eqn.outvars[0])
    parts = parts_of(origins, dtype_of)
    if parts is None or any(len(shape_of(v)) != len(shape) for v in origins):
        return None
    values, scale, master, known = parts
    if shape_of(values) != shape:
        return None
    order = tuple(range(len(shape)))
    return Stored(values, scale, order, trained=master is not None, input_scale=known)


def _scaled_after(step: Step, stored: Mapping[Any, Stored]) -> Step:
    """Returns a step with its weight read as stored, if it is a product that allows for that."""
    weight = _multiplied(step, stored)
    if weight is None or step.eqn.primitive.name != "dot_general":
        return step
    contracted, _ = product_axes(step.eqn)
    sizes = shape_of(step.eqn.invars[weight.side])
    scales = [shape_of(weight.scale)[i] for i in weight.order]
    one = all(scales[i] == 1 for i in contracted[weight.side])
    if not one or not all(n in (1, size) for n, size in zip(scales, sizes, strict=True)):
        return step
    said = step.rules.policy.activations
    fmt, static = (None, False) if said is None else activation_format(said)
    if fmt is not None and fmt.integer != format_of(dtype_of(weight.values)).integer:
        fmt = None
    if fmt is not None and static and weight.trained:
        raise ValueError(
            f"autocast: activations={said} takes scales that are stored with a weight, and weights "
            "that are trained (weights= in the policy) have none: train with "
            f"activations={fmt.short}, and find the scales afterwards, by "
            "jaxmp.quantize(params, policy, calibrate=(fn, batches))."
        )
    ranged = fmt is not None and static and _has_range(weight, step)
    weight = weight if ranged else weight._replace(input_scale=None)
    op = StoredDot(weight, cast(Dot, step.op), fmt)
    with_format = Kind.STORED_RANGE if ranged else Kind.STORED_WITH
    noted = (Kind.STORED,) if fmt is None else (with_format, fmt.name)
    return dataclasses.replace(step, op=op, why=step.why.noted(*noted))


def _has_range(weight: Stored, step: Step) -> bool:
    """Returns whether the inputs of each matrix have one stored scale."""
    if weight.input_scale is None:
        return False
    _, batch = product_axes(step.eqn)
    counts = [shape_of(weight.input_scale)[i] for i in weight.order]
    return all(count == 1 for i, count in enumerate(counts) if i not in batch[weight.side])


def _dequantized_again(step: Step, stored: Mapping[Any, Stored]) -> Step:
    """Returns a step that saves its weight as stored, if it is a product with one."""
    weight = _multiplied(step, stored)
    if weight is None or weight.trained:
        return step
    return dataclasses.replace(step, op=DequantizedDot(weight, cast(Dot, step.op)))


def _multiplied(step: Step, stored: Mapping[Any, Stored]) -> Stored | None:
    """Returns the weight that a product in 16 bits reads, the right one if both operands are."""
    eqn = step.eqn
    if type(step.op) is not Dot or eqn.primitive.name not in _LINEAR:
        return None
    low = step.outs[0]
    if low in (None, FLOAT32) or set(step.ins) != {low} or any(map(explicit_sharding, eqn.invars)):
        return None
    for side in (1, 0):
        if weight := stored.get(eqn.invars[side]):
            return weight._replace(side=side)
    return None


@functools.lru_cache(maxsize=1024)
def _stored_product(
    sides: Sides, side: int, order: tuple[int, ...], low: DType, activations: Format | None
) -> Callable[..., Any]:
    def rounded(x: Any, fmt: Format, known: Any) -> Scaled:
        """Rounds `x`, by the scale that is known for a weight's inputs, or scales of its rows."""
        if known is None:
            return quantize(x, fmt, sides.contracted[1 - side])
        # One scale, or one along each axis that both operands have.
        along, of_weight = (sides.batch[1 - side], sides.batch[side])
        known = lax.transpose(known, order)
        known = lax.reshape(known, [known.shape[i] for i in of_weight])
        shape = [known.shape[along.index(i)] if i in along else 1 for i in range(x.ndim)]
        known = lax.broadcast_in_dim(known, shape, along)
        return Scaled(quantize_within(x, fmt, known), known)

    def product(x: Any, *stored: Any, fmt: Format | None, sums: DType) -> Any:
        """Computes the product, summed in dtype `sums`; of `x` in a format if one is given."""
        *known, values, scale = stored
        copy = Scaled(x, None) if fmt is None else rounded(x, fmt, known[0] if known else None)
        with jax.named_scope(CAST):
            weight = lax.convert_element_type(lax.transpose(values, order), copy.values.dtype)
        left, right = (copy.values, weight) if side else (weight, copy.values)
        dims = sides.contracted, sides.batch
        out = lax.dot_general(left, right, dims, preferred_element_type=sums)
        with jax.named_scope(CAST):
            out = lax.convert_element_type(out, FLOAT32)
            if copy.scale is not None:
                out = out * sides.laid_out(copy.scale, 1 - side)
            scale = sides.laid_out(lax.transpose(scale, order), side)
            return lax.convert_element_type(out * scale, low)

    exact = np.dtype(np.int32) if activations and activations.integer else sums_in(low)
    # Summed in 16 bits, so that its transpose multiplies a gradient of 16 bits.
    tangent = functools.partial(product, fmt=None, sums=low)
    # Not jitted: it would be traced once, with the source line of its first caller.
    return _saving_stored(functools.partial(product, fmt=activations, sums=exact), tangent)


def _saving_stored(product: Callable[..., Any], tangent: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a product whose weight is saved for the backward pass as it is stored.

    Args:
      product: a function of an array, of what else it reads, and last a weight's values and scale.
      tangent: its linear function of a tangent of the array, and of values and scale.
    """

    @jax.custom_jvp
    def multiplied(*operands: Any) -> Any:
        return product(*operands)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def again(x: Any, values: Any, scale: Any) -> Any:
        return tangent(x, no_excess_precision(values), no_excess_precision(scale))

    @multiplied.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return product(*primals), again(tangents[0], *primals[-2:])

    return multiplied
