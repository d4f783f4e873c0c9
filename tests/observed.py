"""A walk through a program that threads what a probe says of its equations out of any depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import bind, closed
from jaxmp._jaxprs.higher_order import inside, rebuild
from jaxmp._jaxprs.threaded import Extra, Extras, Join

Probe = Callable[[Any, Sequence[Any]], Any]  # an equation, its results -> an Extra, or None

MAX = Join(0.0, jnp.maximum)
SUM = Join(0, jnp.add)


def largest(eqn: Any, results: Sequence[Any]) -> Extra | None:
    """max |result| of a matrix product."""
    if eqn.primitive.name != "dot_general":
        return None
    return Extra(jnp.max(jnp.abs(results[0])), MAX)


def seen(jaxpr: Any, probe: Probe) -> bool:
    """Whether a probe has anything to say of a jaxpr, or of those inside it."""
    return any(
        any(seen(inner.jaxpr, probe) for inner in inside(eqn))
        or (not inside(eqn) and jax.eval_shape(lambda e=eqn: _probed(probe, e)) is not None)
        for eqn in closed(jaxpr).jaxpr.eqns
    )


def _probed(probe: Probe, eqn: Any) -> Any:
    return probe(eqn, [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars])


def observed(
    jaxpr: Any, probe: Probe, args: Sequence[Any], extra_in: Sequence[Any] = (), at: str = ""
) -> tuple[list[Any], Extras]:
    """The results of a closed jaxpr, and what a probe says of it: by path, ``2.scan/0.dot_general``."""
    opened, consts = closed(jaxpr)
    env = dict(zip((*opened.constvars, *opened.invars), (*consts, *args), strict=True))
    found: Extras = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for i, eqn in enumerate(opened.eqns):
        operands, inners = [read(v) for v in eqn.invars], inside(eqn)
        name = f"{at}{i}.{compat.kind(eqn)}"
        with compat.source_of(eqn), eqn.ctx.manager:
            if any(seen(inner.jaxpr, probe) for inner in inners):
                new = [walker(x.jaxpr, probe, f"{name}{n or ''}/") for n, x in enumerate(inners)]
                outs, extras = rebuild(eqn, operands, new, extra_in)
                found |= extras
            else:
                outs = bind(eqn, operands)
                said = None if inners else probe(eqn, lax.stop_gradient(outs), *extra_in)
                found |= {} if said is None else {name: said}
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in opened.outvars], found


def walker(jaxpr: Any, probe: Probe, at: str) -> Any:
    return lambda extra_in, *arrays: observed(jaxpr, probe, arrays, extra_in, at)


def observe(fn: Callable[..., Any], probe: Probe = largest, extra_in: Sequence[Any] = ()) -> Any:
    """`fn` of arrays, which returns what the probe found besides."""

    def run(*args: Any) -> tuple[Any, Extras]:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs, extras = observed(jaxpr, probe, jax.tree.leaves(args), extra_in)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs), extras

    return run
