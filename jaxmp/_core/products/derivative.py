"""A contraction under a recipe: its 8-bit operands, the products of its gradient, and its op."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from jaxmp._core.execute.bind import Dot
from jaxmp._core.execute.environment import Environment
from jaxmp._core.jaxprs.attributes import explicit_sharding, refuses_forward_mode
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.plan.plan import Step
from jaxmp._core.products.scaled import Scaled, nearest, round_to
from jaxmp._core.speed import chip_for
from jaxmp.formats import Format
from jaxmp.recipes import FORMATS, Recipe

Pair = tuple[Any, Any]


def quantize(x: Any, fmt: Format, axes: Sequence[int]) -> Scaled:
    """Rounds an array to the nearest one in a format, with one scale for all that `axes` span.

    The scale brings the largest magnitude of the array itself into the range of the format: no
    state is carried from step to step; see `scale_of`.

    If all elements are zero, or so small that the scale would be subnormal, it is the smallest
    normal one. An infinity or NaN makes the scale NaN, and so all products with it: a loss scaler
    detects that.

    Args:
      x: a floating array.
      fmt: an 8-bit format.
      axes: the axes of `x` that share a scale.
    """
    block = [size if i in axes else 1 for i, size in enumerate(x.shape)]
    return quantize_blocks(x, fmt, block, widened=not chip_for().multiplies("float8_e4m3fn"))


def quantize_blocks(x: Any, fmt: Format, block: Sequence[int], *, widened: bool = True) -> Scaled:
    """Quantizes as `quantize` does, with a scale for each block of an array.

    If its reader widens values, XLA would drop the casts to 8 bits and back, in favor of excess
    precision (``xla_allow_excess_precision``): then they are `widened`, and kept.
    """
    with jax.named_scope(CAST):
        copy = round_to(x.astype(jnp.float32), fmt, block)
    return copy._replace(values=lax.optimization_barrier(copy.values)) if widened else copy


def quantize_within(x: Any, fmt: Format, scale: Any) -> Any:
    """Returns the values of an array in a format, at a scale known before: those beyond it clipped.

    No maximum is computed. A NaN stays one in a float format, and becomes 0 in an integer format.
    """
    with jax.named_scope(CAST):
        values = nearest(x.astype(jnp.float32) * (1 / scale), fmt)
    widened = not chip_for().multiplies("float8_e4m3fn")
    return lax.optimization_barrier(values) if widened else values


class Copy(NamedTuple):
    """An operand in 8 bits or 4.

    Attributes:
      array: the copy that is multiplied.
      kept: the copy that is saved for the backward pass: made once, whatever reads it.
      mark: a zero that is differentiated if the operand is; see `_once`.
    """

    array: Any
    kept: Any
    mark: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction(abc.ABC):
    """A contraction of two operands under a recipe.

    Attributes:
      recipe: the recipe.
      weight: which operand is the weight: 0 or 1.
      dtype: the dtype of the result, or of the gradient that `gradient` gives.
      name: its name in errors.
      sharding: the sharding of that, if it is explicit in its type.
    """

    recipe: Recipe
    weight: int
    dtype: Any
    name: str = "a product"
    sharding: Any = None

    @property
    def forward(self) -> Format:
        """The format of both operands in the forward pass."""
        return FORMATS[self.recipe.forward]

    def backward(self, of: int) -> Format:
        """Returns the format of the product that computes the gradient of an operand."""
        recipe = self.recipe
        return FORMATS[recipe.grad_weight if of == self.weight else recipe.grad_input]

    @abc.abstractmethod
    def shared(self, of: int) -> Any:
        """Returns the axes of an operand that share a scale in the forward pass."""

    @abc.abstractmethod
    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        """Computes the contraction, of the 8-bit copies if there are any.

        Args:
          operands: both, in the compute dtype or float32.
          copies: both in 8 bits; None where they are not.
          sizes: its other operands, of integers.
        """

    @abc.abstractmethod
    def gradient(self, of: int, g: Any, other: Any, sizes: Sequence[Any]) -> Any:
        """Computes the gradient of an operand, from the result's and the other operand as saved.

        Args:
          of: which operand.
          g: the gradient of the result.
          other: the other operand, in 8 bits if it was.
          sizes: as for `multiply`.
        """

    def quantize(self, x: Any, of: int) -> Copy | None:
        """Returns the 8-bit copy of an operand for its products; None if they read none."""
        if not self.forward.scaled:
            return None
        copy = self.copy(lax.stop_gradient(x), of)
        mark = jnp.sum(x[:0], dtype=jnp.float32)  # of no elements: zero, differentiated if x is
        return Copy(copy, self.kept(x, copy, of), mark)

    def copy(self, x: Any, of: int) -> Any:
        """Quantizes an operand to 8 bits."""
        return quantize(x, self.forward, self.shared(of))

    def kept(self, _x: Any, copy: Any, of: int) -> Any:
        """Returns the copy that is saved for the backward pass, of an operand and its `copy`."""
        return self.as_bits(copy, of)

    def as_bits(self, copy: Any, _of: int) -> Any:
        """Returns the copy of an operand as it is saved for the backward pass: as integers.

        `jax.checkpoint` rounds the floats that it saves to their own format, to keep XLA from
        computing with more precision; but the e4m3 of `lax.reduce_precision` ends at 240, and
        larger values become NaN.
        """
        if self.forward.integer:
            return copy
        bits = lax.bitcast_convert_type(copy.values, f"uint{self.forward.bits}")
        return copy._replace(values=bits)

    def of_bits(self, kept: Any, _of: int) -> Any:
        """Returns the copy of an operand that `as_bits` was given."""
        if self.forward.integer:
            return kept
        return kept._replace(values=lax.bitcast_convert_type(kept.values, self.forward.dtype))

    def saved(self, x: Any, copy: Copy | None, of: int) -> Any:
        """Returns the residual of an operand: in the format that its reader needs, if narrower."""
        fmt = self.backward(1 - of)
        if fmt.scaled:
            return x if copy is None else (copy.kept, copy.mark)
        return x.astype(fmt.name) if fmt.bits < 8 * x.dtype.itemsize else x


def contract(
    product: Contraction,
    operands: Pair,
    copies: Pair,
    sizes: Sequence[Any] = (),
    parameters: Mapping[int, Any] | None = None,
) -> Any:
    """Computes a contraction, with a derivative rule for the two products of its gradient.

    Args:
      product: the contraction.
      operands: both, in the compute dtype or float32.
      copies: the copy of each that `quantize` returned; several products may share one.
      sizes: its other operands, of integers.
      parameters: the float32 parameters that operands are low copies of, and with respect to which
        the contraction is differentiated: their gradients are float32.
    """
    # Computed outside of the rule, where the policies of `jax.checkpoint` see it and may save it.
    plain = lax.stop_gradient(operands)
    eight = lax.stop_gradient(tuple(copy and copy.array for copy in copies))
    by = tuple((parameters or {}).get(k, operands[k]) for k in range(2))
    out = product.multiply(plain, eight, sizes)
    try:
        return _rule(product)(out, by, operands, copies, tuple(sizes))
    except TypeError as error:
        if not refuses_forward_mode(error):
            raise
        raise TypeError(
            f"autocast: the forward-mode derivative (jax.jvp, jax.jacfwd, jax.hessian) of "
            f"{product.name}, which multiplies as {product.recipe}: recipes say how a gradient "
            "multiplies, and no more. Use reverse mode (jax.grad, jax.vjp, jax.jacrev), or give "
            "this part a policy without `matmul`"
        ) from error


@functools.lru_cache(maxsize=1024)
def _rule(product: Contraction) -> Callable[..., Any]:
    """Returns the identity on a product of two operands, with the product's derivative."""

    @jax.custom_vjp
    def of_operands(out: Any, _by: Any, _operands: Any, _copies: Any, _sizes: Any) -> Any:
        return out

    def forward(out: Any, by: Any, operands: Any, copies: Any, sizes: Any) -> Any:
        saved = tuple(product.saved(operands[k], copies[k], k) for k in range(2))
        types = tuple(_Type(x.dtype, explicit_sharding(x)) for x in by)
        return of_operands(out, by, operands, copies, sizes), (saved, types, sizes)

    def backward(residuals: Any, g: Any) -> Any:
        saved, types, sizes = residuals

        def gradient(of: int) -> Any:
            made = dataclasses.replace(product, **types[of]._asdict())
            return _once(made, of)(g, saved[1 - of], sizes)

        return None, (gradient(0), gradient(1)), None, None, None

    of_operands.defvjp(forward, backward)
    return of_operands


@jax.tree_util.register_static
class _Type(NamedTuple):
    """The dtype and sharding of an operand's gradient, as part of a pytree's structure."""

    dtype: Any
    sharding: NamedSharding | None


@functools.lru_cache(maxsize=1024)
def _once(product: Contraction, of: int) -> Callable[..., Any]:
    """Returns the product that computes the gradient of an operand.

    In few bits it cannot be differentiated again. The mark of an operand's 8-bit copy shows whether
    that operand is differentiated.
    """

    def gradient(g: Any, other: Any, sizes: Any) -> Any:
        if isinstance(other, tuple):
            other = product.of_bits(other[0], 1 - of)
        return product.gradient(of, g, other, sizes)

    few = product.backward(of).bits

    def refused(_primals: Any, _tangents: Any) -> Any:
        raise TypeError(
            f"autocast: the second derivative of {product.name}, which multiplies as "
            f"{product.recipe}: it is a derivative through rounding to {few} bits, which is zero "
            "or infinite. Differentiate once, or give this part a policy without `matmul`"
        )

    if not product.backward(of).scaled:
        return gradient
    guarded = jax.custom_jvp(gradient)
    guarded.defjvp(refused)
    return guarded


@dataclasses.dataclass(frozen=True)
class QuantizedDot(Dot):
    """The op of a contraction that multiplies as a recipe says."""

    product: Contraction = dataclasses.field(kw_only=True)
    as_is = False

    def run(self, step: Step, env: Environment) -> list[Any]:
        left, right, *sizes = env.operands(step)
        copies = (self._copy(step, left, 0, env), self._copy(step, right, 1, env))
        by = {i: given.moved() for i, given in self.given(step, env).items()}
        return [contract(self.product, (left, right), copies, sizes, by)]

    def _copy(self, step: Step, operand: Any, of: int, env: Environment) -> Any:
        """Returns the recipe's copy of an operand, shared by all steps that read the same one."""
        atom = step.eqn.invars[of]
        if isinstance(atom, Literal):
            return self.product.quantize(operand, of)
        key = (operand.dtype, self.product.forward, self.product.shared(of))
        copies = env.copies.setdefault(atom, {})
        if key not in copies:
            copies[key] = self.product.quantize(operand, of)
        return copies[key]
