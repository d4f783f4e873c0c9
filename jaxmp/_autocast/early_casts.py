"""Narrows float32 values before they are transposed or reshaped for contractions, not after.

The values are the same. But `convert(w).T` is what a hand-written model says, and what compilers
know: its gradient is one transposed product, and that of `convert(w.T)` a product transposed twice,
in two dtypes. A transposed copy, where one is made, has half the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxmp._autocast.plan import DType, Step
from jaxmp._autocast.rules import FLOAT32


def narrow_early(steps: Sequence[Step], results: Sequence[Any]) -> tuple[Step, ...]:
    """The steps of a plan, where a move that only contractions read runs in the dtype they read.

    Args:
      steps: the steps in order, as decided equation by equation.
      results: the variables that the jaxpr returns.
    """
    # The dtypes in which each variable is read by contractions and moves; None: by anything else.
    read: dict[Any, set[DType | None]] = {var: {None} for var in results if _is_variable(var)}
    planned = []
    for step in reversed(steps):
        if step.action == "reorder" and step.ins == step.outs == (FLOAT32,):
            [var] = step.eqn.outvars
            match tuple(read.get(var, ())):
                case (dtype,) if dtype not in (None, FLOAT32):
                    step = dataclasses.replace(
                        step, ins=(dtype,), outs=(dtype,), reason="moves what a contraction reads"
                    )
        for atom, dtype in zip(step.eqn.invars, step.ins, strict=True):
            if _is_variable(atom):
                known = step.action in ("contract", "reorder")
                read.setdefault(atom, set()).add(dtype if known else None)
        planned.append(step)
    return tuple(reversed(planned))


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)
