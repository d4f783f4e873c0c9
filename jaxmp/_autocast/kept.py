"""A mark on the contractions that autocast keeps in float32: why, for `jaxmp.audit` to read.

It is a named scope, so it holds for their derivatives as well, and profiles show it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmp._autocast.plan import Step
from jaxmp._autocast.primitives import LOW
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs.compat import closed, inner_jaxprs
from jaxmp._jaxprs.scopes import KEPT

# How the planner's reason for an operation that nobody listed begins.
UNKNOWN = "not classified"
_MARK = re.compile(rf"{KEPT}([^/()]+)")
_STRUCTURE = re.compile(r"[/()]+")  # what name stacks are made of


def kept_scope(step: Step) -> AbstractContextManager[Any]:
    """The scope to bind a step in: one that says why, if contractions in it stay float32."""
    reason = _reason(step)
    if not reason:
        return contextlib.nullcontext()
    return jax.named_scope(KEPT + _STRUCTURE.sub(" ", reason).strip())


@functools.lru_cache(maxsize=4096)
def kept_reason(name_stack: Any) -> str:
    """Why autocast kept what stands under a name stack in float32; empty if it did not."""
    reasons = _MARK.findall(str(name_stack))
    return reasons[-1] if reasons else ""


def _reason(step: Step) -> str:
    """Why a step's contraction, or one in what it binds as it is, stays float32."""
    if step.plans:
        if not all(plan.unchanged for plan in step.plans):
            return ""  # each of its steps is marked by itself
        return next(filter(None, (_reason(s) for plan in step.plans for s in plan.steps)), "")
    if step.action != "bind" or FLOAT32 not in step.ins:
        return ""
    unknown = step.reason.startswith(UNKNOWN)  # whatever may be in it
    return step.reason if unknown or contracts(step.eqn) else ""


def contracts(eqn: jex_core.JaxprEqn) -> bool:
    """Whether an equation is a contraction or has one inside."""
    if eqn.primitive.name in LOW:
        return True
    inner = inner_jaxprs(eqn)
    return any(contracts(e) for jaxpr in inner for e in closed(jaxpr).jaxpr.eqns)
