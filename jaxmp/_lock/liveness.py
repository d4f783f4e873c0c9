"""The equations that a program's results depend on: not prints, nor what only prints read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxmp._jaxprs.attributes import has_effects
from jaxmp._jaxprs.compat import closed, inner_jaxprs
from jaxmp._jaxprs.dataflow import demanded
from jaxmp._jaxprs.higher_order import Inner, inside, steering
from jaxmp._jaxprs.walk import equations

# Primitives that only show values: a metric that is only printed is not part of the computation.
_PRINTS = frozenset({"debug_callback", "debug_print"})


def live_equations(program: Any) -> set[int]:
    """Returns the `id`s of a closed jaxpr's equations, at any depth, that a result or effect needs.

    Example:
      >>> import jax
      >>> jaxpr = jax.make_jaxpr(lambda x: (jax.debug.print("{}", x + 1), x * 2)[1])(1.0)
      >>> [eqn.primitive.name for eqn in jaxpr.eqns if id(eqn) in live_equations(jaxpr)]
      ['mul']
    """
    found: set[int] = set()

    @functools.cache
    def run(jaxpr: Any, wanted: tuple[bool, ...]) -> list[bool]:
        opened = closed(jaxpr).jaxpr
        live = {v for v, w in zip(opened.outvars, wanted, strict=True) if w and not _literal(v)}
        for eqn in reversed(opened.eqns):
            outs = [v in live for v in eqn.outvars]
            effect = has_effects(eqn) and eqn.primitive.name not in _PRINTS
            ins = demanded(eqn, outs, run_inside, operator.or_, nothing=False)
            needed = any(outs) or (effect and not inside(eqn)) or any(ins or ())
            if not needed:
                continue
            found.add(id(eqn))
            unknown = () if inside(eqn) else inner_jaxprs(eqn)
            found.update(id(e) for each in unknown for e in equations(closed(each).jaxpr.eqns))
            ins = ins or [True] * len(eqn.invars)
            for i in steering(eqn) if inside(eqn) else ():
                ins[i] = True
            live.update(v for v, w in zip(eqn.invars, ins, strict=True) if w and not _literal(v))
        return [v in live for v in opened.invars]

    def run_inside(inner: Inner, wanted: Sequence[bool]) -> list[bool]:
        steers = (w or r is None for w, r in zip(wanted, inner.results, strict=True))
        return run(inner.jaxpr, tuple(steers))

    run(program, (True,) * len(closed(program).jaxpr.outvars))
    return found


def _literal(atom: Any) -> bool:
    return isinstance(atom, Literal)
