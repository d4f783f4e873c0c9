"""Gradients that tell of float16 overflow, where a training step asks for it.

An infinity may vanish on its way to the loss: `x / inf` is 0, `min(inf, 6)` is 6, `tanh(inf)` is 1.
The loss is then finite, wrong, and its derivative by the infinite value is 0. So what tells of it
is the gradient: where the forward pass makes an infinity of finite operands in float16, the
cotangent of that array is multiplied by NaN. It needs no extra result, so that it works through
every transformation and loop, and its residual is one number per array.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxmp._core.execute.bind import Drop
from jaxmp._core.execute.environment import Environment
from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.jaxprs.source import is_backward
from jaxmp._core.plan.plan import Op, Plan, Step
from jaxmp._core.plan.primitives import LOW, MAY_OVERFLOW
from jaxmp._core.plan.rules import FLOAT16

# Part of the key of every jit cache: what is traced with it is not reused without.
_WATCHED = jax.make_user_context(default_value=None)

# float32 numbers from here on round to infinity in float16, whose largest number is 65504.
_BEYOND = 65520.0


def overflow_watched() -> AbstractContextManager[Any]:
    """Enters a trace in which autocast marks gradients of what overflows float16."""
    return _WATCHED("on")  # type: ignore[no-any-return]


def is_overflow_watched() -> bool:
    """Returns whether this is in such a trace."""
    return _WATCHED.value is not None


def watch_overflow(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan whose steps in float16 mark their gradients where they overflow."""
    if not is_overflow_watched():
        return plan
    steps = tuple(
        dataclasses.replace(step, op=Watched(step.op)) if _is_watched(step) else step
        for step in plan.steps
    )
    return plan if steps == plan.steps else dataclasses.replace(plan, steps=steps, built={})


def _is_watched(step: Step) -> bool:
    """Returns whether a step of the forward pass may make infinities in float16."""
    if step.plans or step.linear or isinstance(step.op, Drop) or is_backward(step.eqn):
        return False
    return FLOAT16 in step.outs or any(
        read.dtype == FLOAT16 and dtype_of(atom) != FLOAT16
        for atom, read in zip(step.eqn.invars, step.casts, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Watched(Op):
    """The op of a step whose operands and result are watched.

    Attributes:
      op: the op that runs the step.
    """

    op: Op
    as_is = False

    @property
    def parameters(self) -> tuple[int, ...]:  # type: ignore[override]
        """See `Op`."""
        return self.op.parameters

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """See `Op`."""
        return self.op.moves

    def reads(self, step: Step) -> list[Any]:
        return self.op.reads(step)

    def run(self, step: Step, env: Environment) -> list[Any]:
        for atom, read in zip(step.eqn.invars, step.casts, strict=True):
            if isinstance(atom, Literal) or read.dtype != FLOAT16 or read.saturate:
                continue
            x = env.arrays[atom]
            if x.dtype.itemsize > FLOAT16.itemsize and env.copied(atom, read) is None:
                env.arrays[atom] = _marked(x, jnp.any(jnp.isfinite(x) & (jnp.abs(x) >= _BEYOND)))
        outs = self.op.run(step, env)
        if step.eqn.primitive.name not in LOW | MAY_OVERFLOW or step.outs[0] != FLOAT16:
            return outs
        made = jnp.isinf(outs[0])
        if step.eqn.primitive.name not in LOW:  # a product of infinities is one, or NaN
            given = [lax.stop_gradient(x) for x in env.operands(step)]
            made &= functools.reduce(operator.and_, (~jnp.isinf(x) for x in given))
        return [_marked(outs[0], jnp.any(made)), *outs[1:]]


@jax.custom_jvp
def _marked(x: Any, _overflows: Any) -> Any:
    return x


@_marked.defjvp
def _marked_jvp(primals: Any, tangents: Any) -> Any:
    x, overflows = primals
    factor = jnp.where(overflows, jnp.nan, 1.0).astype(x.dtype)
    return x, tangents[0] * factor
