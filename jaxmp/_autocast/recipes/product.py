"""A contraction with a weight, whose three products multiply as a recipe says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast.recipes.multiply import Axes, Dims, Sides, gradient_sides, multiply
from jaxmp._autocast.recipes.quantise import Quantised, as_bits, of_bits, quantise
from jaxmp._jaxprs.scopes import CAST
from jaxmp.recipes import FORMATS, Format, Recipe


class Product(NamedTuple):
    """A contraction under a recipe.

    Attributes:
      dims: its ``dimension_numbers``.
      ranks: how many axes its operands have.
      weight: which operand is the weight: 0 or 1.
      recipe: the recipe: per tensor or per row.
      dtype: the dtype of the result.
      name: what an error calls it.
    """

    dims: Dims
    ranks: tuple[int, int]
    weight: int
    recipe: Recipe
    dtype: Any
    name: str = "a product"

    @property
    def sides(self) -> Sides:
        """The axes of its operands."""
        return Sides.of(self.dims, self.ranks)

    @property
    def forward(self) -> Format:
        """The format of both operands, forward."""
        return FORMATS[self.recipe.forward]

    def backward(self, of: int) -> Format:
        """The format of the product that gives the gradient of an operand."""
        recipe = self.recipe
        return FORMATS[recipe.grad_weight if of == self.weight else recipe.grad_input]

    def shared(self, of: int) -> Axes:
        """The axes of an operand that share a scale, forward."""
        if self.recipe.granularity == "tensor":
            return tuple(range(self.ranks[of]))
        return self.sides.contracted[of]

    def saved(self, x: Any, copy: Quantised | None, of: int) -> Any:
        """What is kept of an operand for the backward pass: what is read there, if narrower."""
        fmt = self.backward(1 - of)
        if fmt.scaled:
            return x if copy is None else as_bits(copy)
        return x.astype(fmt.name) if fmt.bits < 8 * x.dtype.itemsize else x

    def quantise(self, x: Any, of: int) -> Quantised | None:
        """An operand as its products read it: in 8 bits; None where none does."""
        if not self.forward.scaled:
            return None
        copy = quantise(lax.stop_gradient(x), self.forward, self.shared(of))
        return copy._replace(scale=_derived(copy.scale, x))


@jax.custom_jvp
def _derived(scale: Any, _x: Any) -> Any:
    """A scale of `x`. Its derivative is zero; but it is seen that it has one (see `_once`)."""
    return scale


def _nothing(dx: Any, scale: Any, *_: Any) -> Any:
    """Zero, as a function of `dx`: the sum of none of it."""
    return jnp.broadcast_to(jnp.sum(dx[:0], dtype=scale.dtype), scale.shape)


_derived.defjvps(None, _nothing)


def contract(product: Product, operands: tuple[Any, Any], copies: tuple[Any, Any]) -> Any:
    """The contraction, and by its derivative rule the two products of its gradient.

    Args:
      product: what it is.
      operands: both, in the compute dtype or float32.
      copies: of each what `Product.quantise` made of it; several products may share one.
    """
    # Computed in the open, where the policies of `jax.checkpoint` see a product that they may save.
    out = _forward(product, lax.stop_gradient(operands), lax.stop_gradient(copies))
    return _rule(product)(out, operands, copies)


@functools.lru_cache(maxsize=1024)
def _rule(product: Product) -> Callable[..., Any]:
    """The identity on a product of two operands, with the product's derivative."""

    @jax.custom_vjp
    def of_operands(out: Any, _operands: Any, _copies: Any) -> Any:
        return out

    def forward(out: Any, operands: Any, copies: Any) -> Any:
        saved = tuple(product.saved(operands[k], copies[k], k) for k in range(2))
        dtypes = tuple(_Static(x.dtype) for x in operands)
        return of_operands(out, operands, copies), (saved, dtypes)

    def backward(residuals: Any, g: Any) -> Any:
        saved, dtypes = residuals
        once = _once(product)
        return None, tuple(once(k, g, saved[1 - k]).astype(dtypes[k].value) for k in range(2)), None

    of_operands.defvjp(forward, backward)
    return of_operands


@jax.tree_util.register_static
class _Static(NamedTuple):
    """Part of a tree's structure."""

    value: Any


def _forward(product: Product, operands: Any, copies: Any) -> Any:
    if product.forward.scaled:
        a, b = copies
        return multiply(a, b, product.sides, product.dtype, exact=False)
    a, b = operands
    return _plain(a, b, product.forward, product.sides, product.dtype)


def _plain(a: Any, b: Any, fmt: Format, sides: Sides, dtype: Any) -> Any:
    """A product in 16 bits or float32."""
    a, b = (x.astype(fmt.name) for x in (a, b))
    out = lax.dot_general(
        a, b, (sides.contracted, sides.batch), preferred_element_type=np.dtype(fmt.name)
    )
    return out.astype(dtype)


@functools.lru_cache(maxsize=1024)
def _once(product: Product) -> Callable[..., Any]:
    """The products of the gradient, which cannot be differentiated again.

    That an operand of them is differentiated shows in the scale of its 8-bit copy.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def gradient(of: int, g: Any, other: Any) -> Any:
        return _gradient(product, of, g, other)

    def refused(_of: int, _primals: Any, _tangents: Any) -> Any:
        raise TypeError(
            f"autocast: the second derivative of {product.name}, which multiplies as "
            f"{product.recipe}: it is a derivative through rounding to 8 bits, which is zero or "
            "infinite. Differentiate once, or give this part a policy without `matmul`"
        )

    gradient.defjvp(refused)
    return gradient


def _gradient(product: Product, of: int, g: Any, other: Any) -> Any:
    """The gradient of an operand, from that of the result and the other operand as it was saved."""
    sides, order = gradient_sides(product.sides, of)
    fmt = product.backward(of)
    if not fmt.scaled:
        if isinstance(other, Quantised):  # pragma: no cover - `forward` saves the operand then
            raise AssertionError
        return jnp.transpose(_plain(g, other, fmt, sides, g.dtype), order)
    if isinstance(other, Quantised):
        other = of_bits(other, product.forward)
    else:
        other = quantise(other, FORMATS["e4m3"], sides.contracted[1])
    if product.recipe.granularity == "row":
        # The saved scale varies along what is contracted here: it goes into the gradient.
        with jax.named_scope(CAST):
            g = g.astype(jnp.float32) * product.sides.laid_out(other.scale, 1 - of)
        other = Quantised(other.values, _ones(other.scale, sides.contracted[1]))
        copy = quantise(g, fmt, sides.contracted[0])
    else:
        copy = quantise(g, fmt, range(g.ndim))
    return jnp.transpose(multiply(copy, other, sides, product.dtype, exact=True), order)


def _ones(scale: Any, axes: Axes) -> Any:
    shape = [1 if i in axes else n for i, n in enumerate(scale.shape)]
    return jnp.ones(shape, scale.dtype)
