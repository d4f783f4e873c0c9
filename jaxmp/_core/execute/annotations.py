"""Marks on contractions for `jaxmp.audit` to read: why in float32, in no few bits, or not fused.

They are named scopes, so derivatives inherit them, and profiles show them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmp._core.execute.bind import Bind
from jaxmp._core.jaxprs.attributes import name_stack
from jaxmp._core.jaxprs.scopes import EMULATED, KEPT, MISSED, SKIPPED, UNFUSED
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.plan.plan import Step
from jaxmp._core.plan.primitives import LOW
from jaxmp._core.plan.why import Kind, Skipped, Why, is_unknown, skipped, unfused

_MARK = re.compile(rf"({KEPT}|{SKIPPED}|{MISSED}|{EMULATED}|{UNFUSED})([^/()]+)")
_STRUCTURE = re.compile(r"[/()]+")  # the structure of name stacks


def marked(step: Step) -> AbstractContextManager[Any]:
    """Returns the named scope to bind a step in, with why its contractions are not narrower.

    Or with why no kernel computes the attention that it is part of.
    """
    marks = _marks(step)
    return jax.named_scope("/".join(marks)) if marks else contextlib.nullcontext()


def is_marked(step: Step) -> bool:
    """Returns whether a step is bound in such a scope."""
    return bool(_marks(step))


def keeps(why: Why) -> str:
    """Returns the name of the scope of a step that stays float32."""
    return _mark(KEPT, ";".join([why.kind.name, *why.details]))


def _marks(step: Step) -> list[str]:
    marks = []
    if fused := unfused(step.why):
        marks.append(_mark(UNFUSED, fused))
    if product := skipped(step.why):
        mark = SKIPPED if product.intended else MISSED
        marks.append(_mark(mark, f"{product.bits};{product.why}"))
    elif why := _kept(step):
        marks.append(keeps(why))
    return marks


def _mark(mark: str, text: str) -> str:
    return mark + _STRUCTURE.sub(" ", text).strip()


@functools.lru_cache(maxsize=4096)
def _innermost(stack: Any, *marks: str) -> tuple[str, str]:
    """Returns the innermost of some marks in a name stack, and its text; empty if it has none."""
    found = [each for each in _MARK.findall(str(stack)) if each[0] in marks]
    return found[-1] if found else ("", "")


def kept_at(eqn: jex_core.JaxprEqn) -> Why | None:
    """Returns why autocast kept an equation in float32, by its name stack; None if it did not."""
    kind, *details = _innermost(name_stack(eqn), KEPT)[1].split(";")
    return Kind[kind].of(*details) if kind else None


def emulated_at(eqn: jex_core.JaxprEqn) -> str:
    """Returns the format that a product emulates in a wider one, by its name stack; or empty."""
    return _innermost(name_stack(eqn), EMULATED)[1]


def unfused_at(eqn: jex_core.JaxprEqn) -> str:
    """Returns why no kernel computes an equation's attention, by its name stack; or empty."""
    return _innermost(name_stack(eqn), UNFUSED)[1]


def skipped_at(eqn: jex_core.JaxprEqn) -> Skipped | None:
    """Returns why a policy's recipe did not multiply a contraction, by its name stack; or None."""
    mark, text = _innermost(name_stack(eqn), SKIPPED, MISSED)
    bits, _, reason = text.partition(";")
    return Skipped(reason, intended=mark == SKIPPED, bits=bits) if mark else None


def _kept(step: Step) -> Why | None:
    """Returns why a step's contraction, or one in jaxprs that it binds as written, is float32."""
    if step.plans:
        if not all(plan.unchanged for plan in step.plans):
            return None  # each of its steps is marked by itself
        return next(filter(None, (_kept(s) for plan in step.plans for s in plan.steps)), None)
    if not isinstance(step.op, Bind) or all(dtype is None for dtype in step.ins):
        return None
    return step.why if is_unknown(step.why) or contracts(step.eqn) else None


def contracts(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether an equation is a contraction or has one inside."""
    return any(each.primitive.name in LOW for each in equations([eqn]))
