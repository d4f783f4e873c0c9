"""A matrix product with a weight, whose three products multiply as a recipe says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._autocast.products.derivative import Contraction, Pair
from jaxmp._autocast.products.multiply import Axes, Dims, Sides, gradient_sides, multiply
from jaxmp._autocast.products.quantize import QuantizedOperand, quantize
from jaxmp._jaxprs.float32_dot import dot_in_float32
from jaxmp._jaxprs.scopes import CAST
from jaxmp.recipes import FORMATS, Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledProduct(Contraction):
    """A `lax.dot_general` under a recipe.

    Attributes:
      dims: its ``dimension_numbers``.
      ranks: how many axes its operands have.
    """

    dims: Dims
    ranks: tuple[int, int]

    @property
    def sides(self) -> Sides:
        """The axes of its operands."""
        return Sides.of(self.dims, self.ranks)

    @property
    def folds(self) -> bool:
        """Whether each operand has one scale; see `multiply`."""
        return self.recipe.granularity == "tensor"

    def shared(self, of: int) -> Any:
        """See `Contraction`."""
        if self.recipe.granularity == "tensor":
            return tuple(range(self.ranks[of]))
        return self.sides.contracted[of]

    def multiply(self, operands: Pair, copies: Pair, _sizes: Sequence[Any]) -> Any:
        """See `Contraction`."""
        if self.forward.scaled:
            a, b = copies
            return self._multiply(a, b, self.sides, self.sharding, exact=False)
        a, b = operands
        return _plain(a, b, self.forward, self.sides, self.dtype, self.sharding)

    def gradient(
        self, of: int, g: Any, other: Any, _sizes: Sequence[Any], sharding: NamedSharding | None
    ) -> Any:
        """See `Contraction`."""
        sides, order = gradient_sides(self.sides, of)
        sharding = sharding and _before(sharding, order)
        fmt = self.backward(of)
        if not fmt.scaled:
            return jnp.transpose(_plain(g, other, fmt, sides, self.dtype, sharding), order)
        shared = range(g.ndim) if self.folds else sides.contracted[0]
        if not isinstance(other, QuantizedOperand):
            axes = range(other.ndim) if self.folds else sides.contracted[1]
            other = quantize(other, FORMATS[self.recipe.operand_of(fmt.short)], axes)
        elif not self.folds:
            # The saved scale varies along what is contracted here: it goes into the gradient.
            with jax.named_scope(CAST):
                g = g.astype(jnp.float32) * self.sides.laid_out(other.scale, 1 - of)
            other = QuantizedOperand(other.values, _ones(other.scale, sides.contracted[1]))
        copy = quantize(g, fmt, shared)
        return jnp.transpose(self._multiply(copy, other, sides, sharding, exact=True), order)

    def _multiply(
        self, a: QuantizedOperand, b: QuantizedOperand, sides: Sides, sharding: Any, *, exact: bool
    ) -> Any:
        return multiply(a, b, sides, self.dtype, exact=exact, folds=self.folds, sharding=sharding)


def _plain(a: Any, b: Any, fmt: Format, sides: Sides, dtype: Any, sharding: Any) -> Any:
    """A product of 16 bits or float32."""
    a, b = (x.astype(fmt.name) for x in (a, b))
    dims = sides.contracted, sides.batch
    if a.dtype != dtype == np.float32:
        return dot_in_float32(a, b, dims, sharding)
    out = lax.dot_general(
        a, b, dims, preferred_element_type=np.dtype(fmt.name), out_sharding=sharding
    )
    return out.astype(dtype)


def _before(sharding: NamedSharding, order: Axes) -> NamedSharding:
    """How an array is sharded that has a sharding when it is transposed."""
    spec: list[Any] = [None] * len(order)
    for i, names in zip(order, (*sharding.spec, *spec), strict=False):
        spec[i] = names
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _ones(scale: Any, axes: Axes) -> Any:
    shape = [1 if i in axes else n for i, n in enumerate(scale.shape)]
    return jnp.ones(shape, scale.dtype)
