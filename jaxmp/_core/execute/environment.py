"""Casts of values from the dtype they are kept in to the one that a step reads them in.

The cotangents of a copy that several steps share are summed in its own dtype. The gradients of an
argument, and of a broadcast operand, are sums of many terms, and are summed in float32, on either
side of the cast: `OperandCast` records which; `bind.Scale` does the same for products.
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

from jaxmp._core.jaxprs.compat import INLINE, dtype_of
from jaxmp._core.jaxprs.parameter_products import Parameter
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.plan.plan import DType, OperandCast, Plan, Step
from jaxmp._core.plan.primitives import LOW
from jaxmp._core.plan.rules import FLOAT32


class Environment:
    """The arrays of a planned jaxpr computed so far, and their copies as steps read them."""

    def __init__(self, plan: Plan, args: Sequence[Any], *, looped: bool = False) -> None:
        self.arrays: MutableMapping[Any, Any] = dict(zip(plan.jaxpr.invars, args, strict=True))
        self.arrays.update(zip(plan.jaxpr.constvars, plan.consts, strict=True))
        self.moved_by = plan.moved_by
        # Whether gradients that are added up in float32 cross devices in the low dtype.
        self.low_reduce_scatter = np.dtype(plan.rules.policy.reduce_scatter_dtype) != FLOAT32
        self.looped = looped  # whether a loop runs the jaxpr
        self.crossed: dict[Any, Parameter] = {}  # float32 parameters whose copies were sent
        self.copies: dict[Any, dict[Any, Any]] = {}  # by variable, and by how it is read

    def within(self) -> Environment:
        """Returns a nested environment, for a segment: its additions are not added to this one."""
        inner = copy.copy(self)
        inner.arrays = ChainMap({}, self.arrays)
        inner.crossed, inner.copies = dict(self.crossed), {}
        return inner

    def array(self, atom: Any) -> Any:
        """Returns a variable or literal of the jaxpr, in the dtype it is kept in."""
        return atom.val if isinstance(atom, Literal) else self.arrays[atom]

    def operands(self, step: Step) -> list[Any]:
        """Returns the operands of a step, cast as it reads them."""
        return [self.read(v, read) for v, read in zip(step.eqn.invars, step.casts, strict=True)]

    def read(self, atom: Any, read: OperandCast) -> Any:
        """Returns a variable or literal of the jaxpr, cast as it is read."""
        if isinstance(atom, Literal):
            return constant(atom, read)
        array = self.copied(atom, read)
        if array is None:
            array = read_as(self.arrays[atom], read)
            self.keep(atom, read, array)
        return array

    def copied(self, atom: Any, read: OperandCast) -> Any:
        """Returns a variable as it is read, if that takes no new copy; else None."""
        array, dtype = self.arrays[atom], read.dtype
        if dtype is None or (read.shape is None and array.dtype == dtype):
            return array
        if read.private_copy or atom not in self.copies:
            return None
        return self.copies[atom].get((dtype, read.saturate, read.shape))

    def keep(self, atom: Any, read: OperandCast, array: Any) -> None:
        """Stores an array as the copy of a variable, for steps that read it with the same cast."""
        self.copies.setdefault(atom, {})[read.dtype, read.saturate, read.shape] = array

    def drop(self, variables: Iterable[Any]) -> None:
        """Drops variables that nothing reads any more, so that their arrays may be freed."""
        for var in variables:
            for kept in (self.arrays, self.copies, self.crossed):
                kept.pop(var, None)


def read_as(array: Any, read: OperandCast) -> Any:
    """Returns a copy of an array, cast as a step reads it."""
    return cast(array, read.dtype, saturate=read.saturate, shape=read.shape)  # type: ignore[arg-type]


def cast(array: Any, dtype: DType, *, saturate: bool = False, shape: Any = None) -> Any:
    """Casts an array to a dtype.

    Args:
      array: a floating array.
      dtype: the dtype to convert to.
      saturate: whether finite values stay finite where `dtype` has a smaller range.
      shape: a shape to broadcast to, in float32, so that the gradient is summed in float32.
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

    # Straight-through: its derivative is a conversion.
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
    """Replaces the elements of a float16 result that overflowed by the largest finite numbers.

    An infinity stays if an operand is infinite there, or if it is a division by zero. In the result
    of a contraction none stays: checking its operands would take another pass over them.
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


# Straight-through, as above: clipped elements keep their gradients, so that they can recover.
_clip.defjvps(lambda tangent, _out, _x, _exempt: tangent, None)


def constant(atom: Literal, read: OperandCast) -> Any:
    """Returns a literal of the jaxpr as it is read: in a narrower dtype, finite if it was."""
    dtype, value = read.dtype, np.asarray(atom.val)
    if dtype is None or dtype == dtype_of(atom):
        return atom.val
    limit = value.dtype.type(jnp.finfo(dtype).max)
    return np.where(np.isinf(value), value, np.clip(value, -limit, limit)).astype(dtype)
