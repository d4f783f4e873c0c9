"""What no 16-bit contraction can avoid: float32 programs whose contractions read rounded operands.

`rounded_contractions(fn)` is `fn` with every float32 operand of every contraction rounded to
bfloat16 (or float16) and everything else as it was: products summed and returned in float32, every
elementwise operation, normalization and loss in float32. Given a gradient function it rounds the
operands of the forward and of the backward contractions alike, each where it is read. Contractions
that the author wants exact, and those of other dtypes, are left alone.

`rounded_everywhere(fn)` is the opposite: arguments, and the result of every operation, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core.jaxprs import compat

from support import CONTRACTIONS


def rounded_contractions(fn: Callable[..., Any], dtype: str = "bfloat16") -> Callable[..., Any]:
    """`fn` with the operands of its contractions rounded to `dtype`; arrays in, arrays out."""
    return _transformed(fn, Rounding(jnp.finfo(dtype)))


def rounded_everywhere(fn: Callable[..., Any], dtype: str = "bfloat16") -> Callable[..., Any]:
    """`fn` with its arguments and every float32 result rounded to `dtype`, products' too."""
    return _transformed(fn, Rounding(jnp.finfo(dtype), everywhere=True))


class Rounding(NamedTuple):
    """To which format values are rounded, and whether all results are."""

    info: Any
    everywhere: bool = False

    def of(self, x: Any) -> Any:
        """A float32 array rounded; not by a pair of conversions: compilers may remove one."""
        if x.dtype != jnp.float32:
            return x
        return lax.reduce_precision(x, exponent_bits=self.info.nexp, mantissa_bits=self.info.nmant)


def _transformed(fn: Callable[..., Any], rounding: Rounding) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(args)]
        if rounding.everywhere:
            leaves = [rounding.of(x) for x in leaves]
        outs = _evaluate(rounding, jaxpr, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return wrapped


def _evaluate(rounding: Rounding, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr, consts = compat.closed(jaxpr)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        with eqn.ctx.manager:
            outs = _equation(rounding, eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(rounding: Rounding, eqn: Any, operands: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in compat.CALLS and name != "shard_map":
        return _evaluate(rounding, compat.call_jaxpr(eqn), operands)
    if name == "cond":
        params = params | {"branches": tuple(_rounded(rounding, b) for b in params["branches"])}
    elif name in ("scan", "while", "shard_map"):
        inner = {k: _rounded(rounding, v) for k, v in params.items() if k in _INNER}
        params = params | inner
    elif name in CONTRACTIONS and "HIGH" not in str(params.get("precision")):
        operands = [rounding.of(x) for x in operands]
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    outs = list(out) if eqn.primitive.multiple_results else [out]
    return [rounding.of(x) for x in outs] if rounding.everywhere else outs


_INNER = ("jaxpr", "cond_jaxpr", "body_jaxpr")


def _rounded(rounding: Rounding, jaxpr: Any) -> Any:
    """An inner jaxpr with the operands of its contractions rounded."""
    avals = [v.aval for v in compat.closed(jaxpr).jaxpr.invars]
    new = compat.trace(jax.jit(lambda *args: _evaluate(rounding, jaxpr, args)), avals)
    return compat.like(new, jaxpr)
