"""Why is this value float32? Follows float32 forward from where it enters 16-bit computation.

A 16-bit value becomes float32 in one of two ways: the author upcasts it, or it meets a float32
value (an array, a NumPy constant, a parameter) and JAX promotes it. Either is a `Cause`, with the
line where it happened. What is computed from such a value has the cause too, until it is narrowed
again. A value that was float32 from the start has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import numpy as np

from jaxmp.autocast import jaxpr_compat
from jaxmp.autocast.jaxpr_compat import closed, dtype_of
from jaxmp.autocast.ops import classify
from jaxmp.inspect.place import Place, inner_jaxprs, is_ours, place_inside, place_of

FLOAT32 = np.dtype("float32")
LOW = frozenset(np.dtype(name) for name in ("float16", "bfloat16"))


class Cause(NamedTuple):
    """Why a value is float32.

    Attributes:
      source: the line, ``file.py:line``.
      path: the module path.
      what: in words: what brought float32 in.
      promoted: whether JAX promoted a 16-bit value; otherwise the author upcast it.
    """

    source: str
    path: str
    what: str
    promoted: bool


class _Promoted(NamedTuple):
    """A 16-bit value that JAX widened, before it meets what it was widened for."""

    dtype: str


State = Cause | _Promoted | None
Visit = Callable[[jex_core.JaxprEqn, Place, "list[Cause | None]", "Cause | None"], None]


def follow_float32(jaxpr: Any, labels: Sequence[str], visit: Visit) -> None:
    """Calls `visit(eqn, place, operand causes, cause of the result)` for each equation.

    Args:
      jaxpr: the closed jaxpr of a program.
      labels: what to call each operand of it.
      visit: is called in order; for the body of a scan once.
    """
    _Follower(visit).run(jaxpr, [None] * len(labels), list(labels), Place())


class _Follower:
    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    def run(
        self,
        jaxpr: Any,
        states: Sequence[State],
        labels: Sequence[str],
        around: Place,
        *,
        silent: bool = False,
    ) -> list[State]:
        """The states of the results of a jaxpr whose operands have `states`."""
        opened = closed(jaxpr).jaxpr
        env: dict[Any, State] = dict(zip(opened.invars, states, strict=True))
        label: dict[Any, str] = dict(zip(opened.invars, labels, strict=True))
        for var in opened.constvars:
            label[var] = f"the constant {var.aval.str_short()}"
        for eqn in opened.eqns:
            place = place_of(eqn, around)
            operands = [None if _is_literal(v) else env.get(v) for v in eqn.invars]
            names = [_label(v, label) for v in eqn.invars]
            inner = inner_jaxprs(eqn)
            if inner:
                outs = self._inside(eqn, inner, operands, names, place, silent=silent)
            else:
                out = self._first_order(eqn, operands, names, place)
                outs = [out] * len(eqn.outvars)
                if not silent:
                    known = [s if isinstance(s, Cause) else None for s in operands]
                    self.visit(eqn, place, known, out if isinstance(out, Cause) else None)
            for var, state in zip(eqn.outvars, outs, strict=True):
                env[var] = state if dtype_of(var) == FLOAT32 else None
                label[var] = _result_label(eqn, names, place)
        return [None if _is_literal(v) else env.get(v) for v in opened.outvars]

    def _first_order(
        self, eqn: jex_core.JaxprEqn, states: list[State], names: list[str], place: Place
    ) -> State:
        if eqn.primitive.name == "convert_element_type":
            before = dtype_of(eqn.invars[0])
            if before in LOW and dtype_of(eqn.outvars[0]) == FLOAT32:
                if is_ours(eqn) or jaxpr_compat.wrote_dtype(eqn.source_info):
                    by = " by the policy" if is_ours(eqn) else ""
                    what = f"an upcast from {before} to float32{by}"
                    return Cause(place.source, place.path, what, promoted=False)
                return _Promoted(str(before))
        ours = [i for i, v in enumerate(eqn.invars) if dtype_of(v) == FLOAT32]
        for i in ours:
            if isinstance(states[i], Cause):
                return states[i]
        promoted = [s for i in ours if isinstance(s := states[i], _Promoted)]
        partners = [names[i] for i in ours if states[i] is None]
        if promoted and partners:
            what = f"{partners[0]} is float32 and meets a {promoted[0].dtype} value"
            return Cause(place.source, place.path, what, promoted=True)
        return promoted[0] if promoted else None

    def _inside(
        self,
        eqn: jex_core.JaxprEqn,
        inner: list[Any],
        states: list[State],
        names: list[str],
        place: Place,
        *,
        silent: bool,
    ) -> list[State]:
        place = place_inside(eqn, place)
        name = eqn.primitive.name
        if name == "cond":
            branches = [
                self.run(b, states[1:], names[1:], place, silent=silent)
                for b in eqn.params["branches"]
            ]
            return [_first(states) for states in zip(*branches, strict=True)]
        if name == "scan":
            n_consts, n_carry = jaxpr_compat.scan_split(eqn)
            carried = slice(n_consts, n_consts + n_carry)
            body = eqn.params["jaxpr"]
            outs = self.run(body, states, names, place, silent=True)
            # What an iteration makes of the carry is what the next one finds.
            states[carried] = [
                before or after for before, after in zip(states[carried], outs, strict=False)
            ]
            return self.run(body, states, names, place, silent=silent)
        if name == "while":
            n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = slice(n_cond + n_body, None)
            self.run(
                eqn.params["cond_jaxpr"],
                [*states[:n_cond], *states[carry]],
                [*names[:n_cond], *names[carry]],
                place,
                silent=silent,
            )
            return self.run(
                eqn.params["body_jaxpr"], states[n_cond:], names[n_cond:], place, silent=silent
            )
        if len(inner[0].invars) == len(states):  # jit, remat, custom rules, shard_map, …
            outs = self.run(inner[0], states, names, place, silent=silent)
            if len(outs) == len(eqn.outvars):
                return outs
        return [None] * len(eqn.outvars)


def _first(states: Sequence[State]) -> State:
    return next((s for s in states if s is not None), None)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def _result_label(eqn: jex_core.JaxprEqn, names: list[str], place: Place) -> str:
    if len(names) == 1 and classify(eqn.primitive.name, eqn.params) == "transparent":
        return names[0]  # only moved
    return f"the {eqn.primitive.name} at {place.source}"


def _label(atom: Any, labels: dict[Any, str]) -> str:
    if _is_literal(atom):
        return f"the constant {atom.val}"
    return labels.get(atom, "a value")
