"""Eager calls, outside of every transformation: each program is compiled once, and runs as one.

Such a call is traced as any other. If its trace is equal to an earlier one, what was compiled for
that runs; else the planned program is compiled, by a `jax.jit`. Nothing differentiates it, so that
traces are equal that differ in derivative rules alone: JAX makes a new one for each call of
`nn.relu`. Arrays that the program closes over are arguments of what is compiled, which keeps none
of them.

Programs run step by step where the difference would show: with effects, references and callbacks,
if values or arguments are on devices of their own, and where JAX is set to look at each operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._core.execute.program_key import run_key
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import evaluates_now, is_committed, is_tracer, setting
from jaxmp._core.jaxprs.trace import Traced

Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]

_LOOKS_AT_EACH = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit", "jax_check_tracer_leaks")

# A function's programs may differ at each call, as with a step number that is not an array. After
# so many that were called once, a program is compiled when it is called again.
_CALLED_ONCE = 4


class EagerProgram:
    """A program that runs as one.

    Attributes:
      calls: how often it was called.
      run: runs it, compiled, on its arrays and its constants; None until `compile`.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.run: Run | None = None

    def compile(self, run: Run) -> Run:
        """Returns `run` compiled, and keeps it."""
        given: dict[int, int] = {}  # results that are arguments, which a jit would copy

        @jax.jit
        def computed(arrays: list[Any], consts: list[Any]) -> list[Any]:
            outs = run(arrays, consts)
            numbers = {id(x): i for i, x in enumerate((*arrays, *consts))}
            given.update({i: numbers[id(x)] for i, x in enumerate(outs) if id(x) in numbers})
            return [x for i, x in enumerate(outs) if i not in given]

        def compiled(arrays: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
            outs: list[Any] = computed(list(arrays), list(consts))
            for i, number in sorted(given.items()):
                outs.insert(i, jnp.asarray((*arrays, *consts)[number]))
            return outs

        self.run = compiled
        return compiled


class EagerPrograms:
    """The latest programs of a function that is called eagerly."""

    def __init__(self) -> None:
        self._programs = functools.lru_cache(maxsize=64)(lambda _key: EagerProgram())
        self._called_once = 0

    def find(self, traced: Traced, called: Hashable) -> EagerProgram | None:
        """Returns the program of a call; None if it runs step by step.

        Args:
          traced: the trace of the call.
          called: what its plan depends on, apart from its trace.
        """
        arrays = (*traced.arrays, *compat.closed(traced.jaxpr).consts)
        if not evaluates_now() or any(map(is_tracer, arrays)) or any(map(setting, _LOOKS_AT_EACH)):
            return None
        if len({frozenset(x.devices()) for x in arrays if is_committed(x)}) > 1:
            return None
        key = run_key(traced.jaxpr)
        if key is None:
            return None
        program = self._programs((key, called))
        program.calls += 1
        if program.calls < 3:
            self._called_once += 1 if program.calls == 1 else -1
        return program if program.calls > 1 or self._called_once <= _CALLED_ONCE else None
