"""Marks on contractions for `jaxmp.audit` to read: why in float32, not in 8 bits, or not fused.

They are named scopes, so they hold for their derivatives as well, and profiles show them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmp._autocast.bind import Bind
from jaxmp._autocast.plan import Skipped, Step
from jaxmp._autocast.primitives import LOW
from jaxmp._jaxprs.compat import closed, inner_jaxprs
from jaxmp._jaxprs.scopes import EMULATED, KEPT, MISSED, SKIPPED, UNFUSED

# How the planner's reason for an operation that nobody listed begins.
UNKNOWN = "not classified"
_MARK = re.compile(rf"({KEPT}|{SKIPPED}|{MISSED})([^/()]+)")
_EMULATED = re.compile(rf"{EMULATED}([^/()]+)")
_UNFUSED = re.compile(rf"{UNFUSED}([^/()]+)")
_STRUCTURE = re.compile(r"[/()]+")  # what name stacks are made of


def marked(step: Step) -> AbstractContextManager[Any]:
    """The scope to bind a step in: it says why contractions in it are wider than they may be.

    Or why a kernel does not compute it, with the attention that it is part of.
    """
    if step.unfused:
        wide = marked(dataclasses.replace(step, unfused=""))
        unfused = _scope(UNFUSED, step.unfused)
        return _both(unfused, wide)
    if step.skipped is not None:
        return _scope(SKIPPED if step.skipped.intended else MISSED, step.skipped.why)
    reason = _reason(step)
    return _scope(KEPT, reason) if reason else contextlib.nullcontext()


def is_marked(step: Step) -> bool:
    """Whether a step is bound in such a scope."""
    return bool(step.unfused) or step.skipped is not None or bool(_reason(step))


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _scope(mark: str, reason: str) -> AbstractContextManager[Any]:
    return jax.named_scope(mark + _STRUCTURE.sub(" ", reason).strip())


@functools.lru_cache(maxsize=4096)
def kept_reason(name_stack: Any) -> str:
    """Why autocast kept what stands under a name stack in float32; empty if it did not."""
    reasons = [reason for mark, reason in _MARK.findall(str(name_stack)) if mark == KEPT]
    return reasons[-1] if reasons else ""


@functools.lru_cache(maxsize=4096)
def emulated(name_stack: Any) -> str:
    """The format whose values a product under a name stack multiplies in a wider one; or empty."""
    formats = _EMULATED.findall(str(name_stack))
    return formats[-1] if formats else ""


@functools.lru_cache(maxsize=4096)
def unfused(name_stack: Any) -> str:
    """Why no kernel computes the attention that stands under a name stack; empty if not so."""
    reasons = _UNFUSED.findall(str(name_stack))
    return reasons[-1] if reasons else ""


@functools.lru_cache(maxsize=4096)
def skipped(name_stack: Any) -> Skipped | None:
    """Why the recipe of a policy did not multiply what stands under a name stack, if so."""
    for mark, reason in reversed(_MARK.findall(str(name_stack))):
        if mark != KEPT:
            return Skipped(reason, intended=mark == SKIPPED)
    return None


def _reason(step: Step) -> str:
    """Why a step's contraction, or one in what it binds as it is, stays float32."""
    if step.plans:
        if not all(plan.unchanged for plan in step.plans):
            return ""  # each of its steps is marked by itself
        return next(filter(None, (_reason(s) for plan in step.plans for s in plan.steps)), "")
    if not isinstance(step.op, Bind) or all(dtype is None for dtype in step.ins):
        return ""
    unknown = step.reason.startswith(UNKNOWN)  # whatever may be in it
    return step.reason if unknown or contracts(step.eqn) else ""


def contracts(eqn: jex_core.JaxprEqn) -> bool:
    """Whether an equation is a contraction or has one inside."""
    if eqn.primitive.name in LOW:
        return True
    inner = inner_jaxprs(eqn)
    return any(contracts(e) for jaxpr in inner for e in closed(jaxpr).jaxpr.eqns)
