"""What a plan is: plain Python data, made by `planner` and run by `execute`.

Every float32 value of the program as written is *kept* either in float32 or in the low dtype. A
plan says for each equation in which dtype its operands are read and its results are kept, and why.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._autocast.licences import COMPUTED, DATA, GIVEN, POSITION
from jaxmp._autocast.rules import Rules

DType = np.dtype[Any]
NO_ORIGINS: frozenset[int] = frozenset()


class Value(NamedTuple):
    """How a float32 value of the program is kept.

    Attributes:
      dtype: the low dtype it is kept in, or None for float32.
      origins: identities of the low values it derives from since the last contraction; a low value
        counts itself.
      pinned: why contractions of it stay float32, if they do: the author upcast it from 16 bits
        himself, or it solves a linear system.
      argument: it came into the program as it is; its uses narrow it one by one, so that their
        gradients are added up in float32.
      constant: it is a literal of the program, or one broadcast.
      tangent: it is a tangent or cotangent: narrowing it must stay linear.
      licence: what allows it to be narrowed, or forbids it; see `licences`.
      fixed: it is made in the program from literals alone, or a small constant.
    """

    dtype: DType | None = None
    origins: frozenset[int] = NO_ORIGINS
    pinned: str = ""
    argument: bool = False
    constant: bool = False
    tangent: bool = False
    licence: str = COMPUTED
    fixed: bool = False

    @property
    def wins(self) -> bool:
        """Whether it is float32 that no licence allows to narrow: it wins over low values."""
        return self.dtype is None and self.licence in (DATA, GIVEN, POSITION)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What to do with one equation.

    Attributes:
      eqn: the equation as written.
      action: which handler of `execute` runs it: ``bind``, ``reorder``, ``contract``, ``inside``,
        ``custom_jvp``, ``custom_vjp``.
      ins: the dtype each operand is read in; None leaves it as it is (not float32, not ours).
      outs: the dtype each result is kept in; None for what is not ours.
      reason: why, in words.
      saturate: which operands are clipped to the finite range when narrowed.
      share: which operands' narrowed copies serve other equations too.
      plans: the plans of the jaxprs inside, in the order of `higher_order.inside`.
    """

    eqn: JaxprEqn
    action: str
    ins: tuple[DType | None, ...]
    outs: tuple[DType | None, ...]
    reason: str
    saturate: tuple[bool, ...] = ()
    share: tuple[bool, ...] = ()
    plans: tuple[Plan, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to do with a jaxpr.

    Attributes:
      jaxpr: the open jaxpr as written, and `consts` its constants.
      steps: one per equation.
      ins: the dtype each operand arrives in; None for what is not ours.
      licences: the licence each operand arrives with; likewise.
      outs: the dtype each result leaves in; likewise.
      values: how each result is kept, for the plan of the caller.
      clip: which results are clipped to the finite range when they leave narrower than they are.
      unchanged: whether executing the plan is evaluating the jaxpr.
      built: a place for `execute` to keep what it traces once per plan.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    rules: Rules
    steps: tuple[Step, ...]
    ins: tuple[DType | None, ...]
    licences: tuple[str | None, ...]
    outs: tuple[DType | None, ...]
    values: tuple[Value | None, ...]
    clip: tuple[bool, ...]
    unchanged: bool
    built: dict[str, Any] = dataclasses.field(default_factory=dict)
