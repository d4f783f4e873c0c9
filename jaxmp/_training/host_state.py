"""An optimizer's state in the memory of the host, moved a few arrays at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Literal

from jaxmp._core.host_memory import HOST, check_host_memory
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.compat import variables
from jaxmp._core.jaxprs.walk import evaluate
from jaxmp._training.leaves import SMALLEST

__all__ = ["in_memory"]

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# Of so many arrays the last ones are on the device: one is updated while another one moves.
_AT_ONCE: Final = 2


def in_memory(
    function: str, tx: optax.GradientTransformationExtraArgs, memory: str | None
) -> optax.GradientTransformationExtraArgs:
    """Keeps the large arrays of a transformation's state in a memory; with None, where they are.

    The state has the same structure, and an update the same bits; its sum with the parameters is
    rounded once more than where XLA fuses both. In a compiled step an array is moved to the device
    when the update of its parameter is computed, after all gradients, and back before the one after
    the next is moved: what is on the device at one time is a few arrays. That order is given by
    barriers, and by a loop around the update (`_once`).

    Raises:
      ValueError: If the memory is neither None nor "pinned_host".
      NotImplementedError: From `init`, if the default device has no such memory.
    """
    if memory is None:
        return tx
    if memory != HOST:
        raise ValueError(f"{function}: memory must be {HOST!r} or None; got {memory!r}.")

    def init(params: Any) -> Any:
        check_host_memory(f"{function}: memory={HOST!r}", "memory=None")
        return jax.tree.map(_to_host, tx.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def moved(updates: Any, state: Any) -> tuple[Any, Any]:
            out, new = tx.update(updates, jax.tree.map(_to_device, state), params, **extra)
            return out, jax.tree.map(_to_host, new)

        arrays = jax.tree.leaves((updates, state))
        if not any(map(is_tracer, arrays)):
            return moved(updates, state)
        new: tuple[Any, Any] = _in_turn(moved, updates, state)
        return new

    return optax.GradientTransformationExtraArgs(init, update)


def _to_device(x: Any) -> Any:
    return jax.device_put(x, _DEVICE) if _is_moved(x) else x


def _to_host(x: Any) -> Any:
    return jax.device_put(x, _HOST) if _is_moved(x) else x


def _is_moved(x: Any) -> bool:
    """Returns whether an array belongs in host memory; where it is, its type may not say."""
    is_large = isinstance(x, jax.Array) and x.size >= SMALLEST
    return is_large and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _in_turn(moved: Callable[[Any, Any], tuple[Any, Any]], updates: Any, state: Any) -> Any:
    """Returns `moved(updates, state)`, which reads the state's arrays in host memory in turn.

    Args:
      moved: the update, traced here: a function that returns the updates and the new state.
      updates: the gradients, which are computed before anything is moved.
      state: the state.
    """
    arrays = jax.tree.leaves((updates, state))
    closed, shapes = jax.make_jaxpr(moved, return_shape=True)(updates, state)
    # optax computes some of all moments in one jitted function.
    inlined = jax.make_jaxpr(lambda *arrays: evaluate(closed, arrays, _bind_inlined))(*arrays)
    jaxpr, consts = compat.closed(inlined)
    outs = jaxpr.outvars
    given, count = len(jax.tree.leaves(updates)), len(jax.tree.leaves(shapes[0]))

    def run(consts: list[Any], arrays: list[Any]) -> list[Any]:
        program = _Program(jaxpr, consts, arrays, given)
        for update in outs[:count]:
            program.compute([update])
            program.move_back([v for v in outs[count:] if program.could_compute(v)])
        return program.results(outs)

    def differentiable(consts: list[Any], arrays: list[Any]) -> list[Any]:
        """Computes the same in no order: JAX transposes no barrier with constants in it."""
        return _Program(jaxpr, consts, arrays, len(arrays)).results(outs)

    results = _once(run, differentiable, list(consts), arrays, [out.aval for out in outs])
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _once(
    run: Callable[[list[Any], list[Any]], list[Any]],
    differentiable: Callable[[list[Any], list[Any]], list[Any]],
    consts: list[Any],
    arrays: list[Any],
    avals: list[Any],
) -> list[Any]:
    """Returns `run(consts, arrays)`, in a loop of one iteration where the results allow that.

    XLA schedules a loop's body by itself. In one computation with a backward pass, XLA for TPUs
    moves the state in before the gradients are there, and XLA for GPUs, whose scheduler of least
    memory gives way to one that hides latency wherever something moves, keeps logits to the end.

    Args:
      run: what reads and returns arrays in host memory.
      differentiable: the same, whose derivatives are taken: a loop has none in reverse mode.
      consts: its other operands.
      arrays: its operands, which the results of the loop replace in place.
      avals: the types of its results.
    """
    if len(arrays) != len(avals) or not all(map(_has_type, arrays, avals)):
        return run(consts, arrays)

    @jax.custom_jvp
    def looped(consts: list[Any], arrays: list[Any]) -> list[Any]:
        def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            return jnp.zeros((), bool), *run(consts, list(carry[1:]))

        # Behind a barrier: a loop that is known to end after one iteration is removed.
        again = lax.optimization_barrier(jnp.ones((), bool))
        return list(lax.while_loop(lambda carry: carry[0], body, (again, *arrays))[1:])

    looped.defjvp(functools.partial(jax.jvp, differentiable))
    return list(looped(consts, arrays))


def _has_type(x: Any, aval: Any) -> bool:
    """Returns whether an array may become a result in place.

    That an argument is in host memory its type may not say: a `jax.ShapeDtypeStruct`'s does not.
    """
    typed = jax.typeof(x)
    if typed.sharding.spec != aval.sharding.spec:  # their meshes may differ in what they are for
        return False
    same: bool = typed.update(weak_type=False, sharding=aval.sharding) == aval.update(
        weak_type=False
    )
    return same


def _bind_inlined(eqn: Any, operands: list[Any]) -> list[Any]:
    if compat.kind(eqn) != "jit":
        return compat.bind(eqn, operands)
    [inner] = compat.inner_jaxprs(eqn)
    return evaluate(inner, operands, _bind_inlined)


class _Program:
    """A traced update, run equation by equation in the order in which results are asked for."""

    def __init__(self, jaxpr: Any, consts: list[Any], arrays: list[Any], given: int) -> None:
        """Starts with operands; the first `given` are computed before anything moves."""
        self.eqns, self.arrays = jaxpr.eqns, dict(zip(jaxpr.constvars, consts, strict=True))
        self.arrays |= zip(jaxpr.invars, arrays, strict=True)
        self.made_by = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.left = set(range(len(self.eqns)))
        # What each equation reads of the arrays in host memory, sooner or later.
        self.on_host = {v for v in jaxpr.invars[given:] if _is_moved(self.arrays[v])}
        self.reads: dict[Any, frozenset[Any]] = {v: frozenset([v]) for v in self.on_host}
        for eqn in self.eqns:
            read = frozenset[Any]().union(*map(self._reads, variables(eqn.invars)))
            self.reads |= dict.fromkeys(eqn.outvars, read)
        self.moved: set[Any] = set()
        # What was moved back, by turns; what is moved next waits for the last but one.
        self.turns = [arrays[:given]] * _AT_ONCE

    def _reads(self, var: Any) -> frozenset[Any]:
        return self.reads.get(var, frozenset())

    def could_compute(self, var: Any) -> bool:
        """Returns whether a result is not computed yet, and all that it reads was moved."""
        return self.made_by.get(var) in self.left and self._reads(var) <= self.moved

    def move_back(self, outs: list[Any]) -> None:
        """Computes results, the last of a turn."""
        self.compute(outs)
        # Small arrays, which stay, are no turn: nothing would wait for those before them.
        if back := [self.arrays[v] for v in outs if _is_moved(self.arrays[v])]:
            self.turns.append(back)

    def compute(self, outs: Iterable[Any]) -> None:
        """Runs the equations that lead to variables, in the program's order."""
        needed, todo = set[int](), list(variables(outs))
        while todo:
            i = self.made_by.get(todo.pop())
            if i in self.left and i not in needed:
                needed.add(i)
                todo += variables(self.eqns[i].invars)
        for i in sorted(needed):
            self._run(self.eqns[i])
        self.left -= needed

    def _run(self, eqn: Any) -> None:
        for var in self.on_host.difference(self.moved).intersection(variables(eqn.invars)):
            self.moved.add(var)
            *_, self.arrays[var] = lax.optimization_barrier(
                (*self.turns[-_AT_ONCE], self.arrays[var])
            )
        with compat.source_of(eqn):
            outs = compat.bind(eqn, [self._array(atom) for atom in eqn.invars])
        self.arrays |= zip(eqn.outvars, outs, strict=True)

    def _array(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.arrays[atom]

    def results(self, outs: list[Any]) -> list[Any]:
        """Returns all results; runs what is left, which may have effects."""
        for i in sorted(self.left):
            self._run(self.eqns[i])
        return [self._array(atom) for atom in outs]
