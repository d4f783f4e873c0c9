"""A contraction with a weight, whose three products multiply as a recipe says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast.recipes.blockwise import (
    BLOCKS,
    Operand,
    block_operands,
    contract_blocks,
    gradient_blocks,
)
from jaxmp._autocast.recipes.multiply import Axes, Dims, Sides, gradient_sides, multiply
from jaxmp._autocast.recipes.quantise import Quantised, quantise
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

    @property
    def blocks(self) -> tuple[Operand, Operand] | None:
        """How its operands are quantised in blocks, or None where they are not."""
        if self.recipe.granularity not in BLOCKS:
            return None
        return block_operands(self.sides, self.recipe.granularity, self.weight)

    def shared(self, of: int) -> Axes | Operand:
        """What of an operand shares a scale, forward: axes, or blocks."""
        if self.blocks is not None:
            return self.blocks[of]
        if self.recipe.granularity == "tensor":
            return tuple(range(self.ranks[of]))
        return self.sides.contracted[of]

    def quantise(self, x: Any, of: int) -> Quantised | None:
        """An operand as its products read it: in 8 bits; None where none does."""
        if not self.forward.scaled:
            return None
        # It is no function of `x` to be differentiated: to the gradient it is `x` itself.
        x, shared = lax.stop_gradient(x), self.shared(of)
        if isinstance(shared, Operand):
            return shared.quantise(x, self.forward)
        return quantise(x, self.forward, shared)


def contract(product: Product, operands: tuple[Any, Any], copies: tuple[Any, Any]) -> Any:
    """The contraction, and by its derivative rule the two products of its gradient.

    Args:
      product: what it is.
      operands: both, in the compute dtype or float32.
      copies: of each what `Product.quantise` made of it; several products may share one.
    """
    return _rule(product)(operands, copies)


@functools.lru_cache(maxsize=1024)
def _rule(product: Product) -> Callable[..., Any]:
    @jax.custom_vjp
    def run(operands: Any, copies: Any) -> Any:
        return _forward(product, operands, copies)

    def forward(operands: Any, copies: Any) -> Any:
        saved = tuple(
            copies[k] if copies[k] is not None and product.backward(1 - k).scaled else operands[k]
            for k in range(2)
        )
        return run(operands, copies), (
            saved,
            tuple(_Like.of(x) for x in operands),
            copies_like(copies),
        )

    def copies_like(copies: Any) -> Any:
        return tuple(None if c is None else Quantised(*map(_Like.of, c)) for c in copies)

    def backward(residuals: Any, g: Any) -> Any:
        saved, operands, copies = residuals
        once = _once(product)
        gradients = tuple(once(k, g, saved[1 - k]).astype(operands[k].dtype) for k in range(2))
        zeros = jax.tree.map(lambda like: like.zeros(), copies, is_leaf=_is_like)
        return gradients, zeros

    run.defvjp(forward, backward)
    return run


@jax.tree_util.register_static
class _Like(NamedTuple):
    """The shape and dtype of an array, as a part of a tree's structure."""

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, x: Any) -> _Like:
        return cls(tuple(x.shape), np.dtype(x.dtype))

    def zeros(self) -> Any:
        integers = np.issubdtype(self.dtype, np.integer)
        return np.zeros(self.shape, jax.dtypes.float0 if integers else self.dtype)


def _is_like(x: Any) -> bool:
    return isinstance(x, _Like)


def _forward(product: Product, operands: Any, copies: Any) -> Any:
    sides = product.sides
    if product.forward.scaled and product.blocks is not None:
        return contract_blocks(copies, product.blocks, product.dtype)
    if product.forward.scaled:
        folds = product.recipe.granularity == "tensor"
        return multiply(*copies, sides, product.dtype, exact=False, folds=folds)
    return _plain(*operands, product.forward, sides, product.dtype)


def _plain(a: Any, b: Any, fmt: Format, sides: Sides, dtype: Any) -> Any:
    """A product in 16 bits or float32."""
    a, b = (x.astype(fmt.name) for x in (a, b))
    out = lax.dot_general(
        a, b, (sides.contracted, sides.batch), preferred_element_type=np.dtype(fmt.name)
    )
    return out.astype(dtype)


@functools.lru_cache(maxsize=1024)
def _once(product: Product) -> Callable[..., Any]:
    """The products of the gradient, which cannot be differentiated again."""

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
    if product.blocks is not None:
        return gradient_blocks(g, other, product.blocks, of, fmt, product.dtype)
    if not isinstance(other, Quantised):
        other = quantise(other, FORMATS["e4m3"], sides.contracted[1])
    g = g.astype(jnp.float32)
    if product.recipe.granularity == "row":
        # The saved scale varies along what is contracted here: it goes into the gradient.
        g = g * product.sides.laid_out(other.scale, 1 - of)
        other = Quantised(other.values, _ones(other.scale, sides.contracted[1]))
        copy = quantise(g, fmt, sides.contracted[0])
    else:
        copy = quantise(g, fmt, range(g.ndim))
    folds = product.recipe.granularity == "tensor" and of != product.weight
    out = multiply(copy, other, sides, product.dtype, exact=True, folds=folds)
    return jnp.transpose(out, order)


def _ones(scale: Any, axes: Axes) -> Any:
    shape = [1 if i in axes else n for i, n in enumerate(scale.shape)]
    return jnp.ones(shape, scale.dtype)
