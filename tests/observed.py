"""A walk through a program that threads what a probe says of its equations out of any depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.aux_outputs import Extra, Extras, Join
from jaxmp._core.jaxprs.compat import bind, closed
from jaxmp._core.jaxprs.higher_order import inside, rebuild

# Primitive → what to say of its result, given the extra operands as well.
Probe = Mapping[str, Callable[..., Extra]]

MAX = Join(0.0, jnp.maximum)
SUM = Join(0, jnp.add)

# max |result| of each matrix product.
LARGEST: Probe = {"dot_general": lambda x: Extra(jnp.max(jnp.abs(x)), MAX)}


def seen(jaxpr: Any, probe: Probe) -> bool:
    """Whether a probe has anything to say of a jaxpr, or of those inside it."""
    return any(
        compat.kind(eqn) in probe or any(seen(inner.jaxpr, probe) for inner in inside(eqn))
        for eqn in closed(jaxpr).jaxpr.eqns
    )


def observed(
    jaxpr: Any, probe: Probe, args: Sequence[Any], extra_in: Sequence[Any] = (), at: str = ""
) -> tuple[list[Any], Extras]:
    """The results of a jaxpr, and what a probe says of it by path: ``2.scan/0.dot_general``."""
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
                new = [walk(x.jaxpr, probe, f"{name}{n or ''}/") for n, x in enumerate(inners)]
                outs, extras = rebuild(eqn, operands, new, extra_in)
                found |= extras
            else:
                outs = bind(eqn, operands)
                if (say := probe.get(compat.kind(eqn))) is not None:
                    found[name] = say(lax.stop_gradient(outs[0]), *extra_in)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in opened.outvars], found


def walk(jaxpr: Any, probe: Probe, at: str) -> Callable[..., tuple[list[Any], Extras]]:
    """What takes the place of an inner jaxpr."""
    return lambda extra_in, *arrays: observed(jaxpr, probe, arrays, extra_in, at)


def observe(
    fn: Callable[..., Any], probe: Probe = LARGEST, extra_in: Sequence[Any] = ()
) -> Callable[..., tuple[Any, Extras]]:
    """`fn` of pytrees of arrays, which returns what the probe found besides."""

    def run(*args: Any) -> tuple[Any, Extras]:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs, extras = observed(jaxpr, probe, jax.tree.leaves(args), extra_in)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs), extras

    return run
