"""How values are read in another dtype than they are kept in.

A copy that several steps share has its cotangents added in its own dtype; the gradients of an
argument, and of what is repeated, are sums of many terms, and are added up in float32, on either
side of the conversion. `OperandCast` says which; `bind.Scale` does so for products.
"""

from __future__ import annotations

import copy
import functools
from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxmp._autocast.plan import DType, OperandCast, Plan, Step
from jaxmp._autocast.primitives import LOW
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs.compat import INLINE, dtype_of
from jaxmp._jaxprs.parameter_products import Parameter
from jaxmp._jaxprs.scopes import CAST


class Environment:
    """The arrays of a planned jaxpr computed so far, and their copies as steps read them."""

    def __init__(self, plan: Plan, args: Sequence[Any], *, looped: bool = False) -> None:
        self.arrays: MutableMapping[Any, Any] = dict(zip(plan.jaxpr.invars, args, strict=True))
        self.arrays.update(zip(plan.jaxpr.constvars, plan.consts, strict=True))
        self.moved_by = plan.moved_by
        # Whether gradients that are added up in float32 cross devices in the low dtype.
        self.low_reduce_scatter = np.dtype(plan.rules.policy.reduce_scatter_dtype) != FLOAT32
        self.looped = looped  # whether a loop runs the jaxpr
        self.crossed: dict[Any, Parameter] = {}  # parameters that came in 16 bits, in float32
        self.copies: dict[Any, dict[Any, Any]] = {}  # by variable, and by how it is read

    def within(self) -> Environment:
        """One for steps that are differentiated together: what it gets does not come back here."""
        inner = copy.copy(self)
        inner.arrays = ChainMap({}, self.arrays)
        inner.crossed, inner.copies = dict(self.crossed), {}
        return inner

    def array(self, atom: Any) -> Any:
        """A variable or literal of the jaxpr, as it is kept."""
        return atom.val if isinstance(atom, Literal) else self.arrays[atom]

    def operands(self, step: Step) -> list[Any]:
        """The operands of a step, as it reads them."""
        return [self.read(v, read) for v, read in zip(step.eqn.invars, step.casts, strict=True)]

    def read(self, atom: Any, read: OperandCast) -> Any:
        """A variable or literal of the jaxpr, as it is read."""
        if isinstance(atom, Literal):
            return constant(atom, read)
        array = self.copied(atom, read)
        if array is None:
            array = read_as(self.arrays[atom], read)
            self.keep(atom, read, array)
        return array

    def copied(self, atom: Any, read: OperandCast) -> Any:
        """A variable as it is read, if no copy has to be made for it; else None."""
        array, dtype = self.arrays[atom], read.dtype
        if dtype is None or (read.shape is None and array.dtype == dtype):
            return array
        if read.private_copy or atom not in self.copies:
            return None
        return self.copies[atom].get((dtype, read.saturate, read.shape))

    def keep(self, atom: Any, read: OperandCast, array: Any) -> None:
        """Keeps an array as the copy of a variable, for those that read it so."""
        self.copies.setdefault(atom, {})[read.dtype, read.saturate, read.shape] = array

    def drop(self, variables: Iterable[Any]) -> None:
        """Forgets variables that nothing will read, so that their arrays may be freed."""
        for var in variables:
            for kept in (self.arrays, self.copies, self.crossed):
                kept.pop(var, None)


def read_as(array: Any, read: OperandCast) -> Any:
    """A copy of an array."""
    return cast(array, read.dtype, saturate=read.saturate, shape=read.shape)  # type: ignore[arg-type]


def cast(array: Any, dtype: DType, *, saturate: bool = False, shape: Any = None) -> Any:
    """`array` in `dtype`.

    Args:
      array: a floating array.
      dtype: the dtype to convert to.
      saturate: whether finite values stay finite where `dtype` has a smaller range.
      shape: a shape to broadcast to. Done in float32, so that the gradient is summed in float32.
    """
    if array.dtype == dtype and shape is None:
        return array
    limit = dtype if saturate and dtype.itemsize < array.dtype.itemsize else None
    return _caster(dtype, limit, shape)(array)


@functools.lru_cache(maxsize=4096)
def _caster(dtype: DType, range_of: DType | None, shape: Any) -> Callable[[Any], Any]:
    largest = jnp.finfo(dtype).max

    @jax.custom_jvp
    def saturate(x: Any) -> Any:
        # Infinities and NaN pass. finfo(float32).min, the usual attention mask, is -inf in
        # bfloat16, and a row of nothing but -inf is NaN after softmax.
        limit = x.dtype.type(largest)
        infinite = lax.eq(lax.abs(x), x.dtype.type(np.inf))
        return lax.select(infinite, x, lax.clamp(-limit, x, limit))

    # Straight through: to the gradient this is a conversion.
    saturate.defjvps(lambda tangent, _out, _x: tangent)

    @jax.named_scope(CAST)
    def convert(x: Any) -> Any:
        if range_of is not None:
            x = saturate(x)
        if shape is not None:
            full = x if x.dtype.itemsize > 4 else lax.convert_element_type(x, FLOAT32)
            x = jnp.broadcast_to(full, shape)
        return lax.convert_element_type(x, dtype)

    return jax.jit(convert, inline=INLINE)


def clip(step: Step, out: Any, env: Environment) -> Any:
    """A float16 result with the largest finite numbers in the place of those that overflowed.

    An infinity that comes of one among the operands, or of a division by zero, stays. Of a
    contraction's, whose operands it would take another pass to look at, none does.
    """
    eqn = step.eqn
    exempt = jnp.zeros([], bool)
    if eqn.primitive.name not in LOW:
        operands = [lax.stop_gradient(x) for x in env.operands(step)]
        for x in operands:
            exempt |= jnp.isinf(x)
        if eqn.primitive.name in ("div", "integer_pow"):
            exempt |= operands[-1] == 0
    return _clip(out, jnp.broadcast_to(exempt, out.shape))


@jax.custom_jvp
def _clip(x: Any, exempt: Any) -> Any:
    limit = jnp.finfo(x.dtype).max
    return lax.select(jnp.isinf(x) & ~exempt, lax.clamp(-limit, x, limit), x)


# Straight through, as above: what was clipped keeps its gradient, so that it can come back.
_clip.defjvps(lambda tangent, _out, _x, _exempt: tangent, None)


def constant(atom: Literal, read: OperandCast) -> Any:
    """A literal of the jaxpr, as it is read: in a narrower dtype, finite if it was."""
    dtype, value = read.dtype, np.asarray(atom.val)
    if dtype is None or dtype == dtype_of(atom):
        return atom.val
    limit = value.dtype.type(jnp.finfo(dtype).max)
    return np.where(np.isinf(value), value, np.clip(value, -limit, limit)).astype(dtype)
