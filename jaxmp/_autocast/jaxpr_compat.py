"""Everything that differs between the JAX versions we support (0.10 to 0.12), and nothing else.

* Inner jaxprs are `ClosedJaxpr` in some parameters and open `Jaxpr` in others up to 0.11; one
  merged class from 0.12 on.
* scan says how its operands split with ``num_consts``/``num_carry`` (0.10) or with the trees
  ``ft_in``/``ft_out`` (0.12).
* What `inline=True` means to `jax.jit`.
* The primitives that merely call a jaxpr have come and gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util

# Primitives that run one jaxpr once, operands and results one to one → the parameter it is in.
CALLS = {
    "jit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "shard_map": "jaxpr",
}

# `inline` of a jit that is to leave no trace in the jaxpr that calls it: an enum from 0.12 on,
# where True came to mean "inlined when lowered".
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


class Closed(NamedTuple):
    """A jaxpr with its constants, whichever class this JAX keeps them in."""

    jaxpr: Any
    consts: tuple[Any, ...]


def closed(jaxpr: Any) -> Closed:
    """The open jaxpr and the constants of an inner jaxpr."""
    return Closed(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


def dtype_of(atom: Any) -> np.dtype[Any] | None:
    """The dtype of a variable or literal; None if NumPy knows none for it (keys, tokens)."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) else None


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(atom.aval.shape)


def like(new: Any, old: Any) -> Any:
    """`new` (as traced) in the class in which the equation held `old`.

    Raises:
      TypeError: if `old` is open and `new` needs constants; autocast creates none.
    """
    if isinstance(new, type(old)):
        return new
    if closed(new).consts:
        raise TypeError("autocast: a transformed inner jaxpr needs constants where JAX allows none")
    return closed(new).jaxpr


def trace(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of `fn` (flat arrays to flat arrays) at `avals`, through jit's trace cache.

    The cache is JAX's own, so it is keyed on everything a trace depends on: avals, mesh, axis
    names, x64, matmul precision. `fn` may be a `jax.jit` function, which keeps its cache between
    calls.
    """
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    return jitted.trace(*avals).jaxpr


def call_jaxpr(eqn: jex_core.JaxprEqn) -> Any:
    """The inner jaxpr of a primitive in `CALLS`."""
    return eqn.params[CALLS[eqn.primitive.name]]


def scan_split(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants and how many are the carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def wrote_dtype(source_info: Any) -> bool:
    """Whether a conversion was written by the author (`x.astype(…)`), not by type promotion.

    jnp's promotion happens inside jnp's own jitted functions: it leaves no `astype` or
    `convert_element_type` frame next to the equation. Flax's happens in `promote_dtype`, ours in
    `region.widen`.
    """
    traceback = getattr(source_info, "traceback", None)
    if traceback is None:
        return True
    frames = [
        (frame.function_name.rsplit(".", 1)[-1], frame.file_name) for frame in traceback.frames[:24]
    ]
    if any(file.startswith(_PROMOTING.get(name, "\0")) for name, file in frames):
        return False
    return any(name in _CONVERTING for name, _ in frames)


_CONVERTING = ("astype", "_astype", "convert_element_type", "asarray")
# Functions that promote, not their author → where: a user's function may have the same name.
_PROMOTING = {
    "promote_dtype": str(Path(flax.__file__).parent) + os.sep,
    "widen": str(Path(__file__).with_name("region.py")),
}


def source_of(eqn: jex_core.JaxprEqn) -> AbstractContextManager[Any]:
    """A context in which what is bound carries the source line and name stack of `eqn`."""
    return source_info_util.user_context(
        eqn.source_info.traceback,
        name_stack=source_info_util.current_name_stack() + eqn.source_info.name_stack,
    )
