"""Traces a function to the program that is compiled, with the bytes of its arguments by purpose."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jaxmp._core.flax import is_graph_node
from jaxmp._core.host_memory import is_on_host
from jaxmp._core.jaxprs.attributes import filled
from jaxmp._core.jaxprs.compat import closed, trace, with_changed_equations
from jaxmp._core.jaxprs.dataflow import Inside, forward
from jaxmp._core.jaxprs.equation_parameters import for_platform, multiplied, on_abstract_meshes
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.trace import flatten_call, is_array
from jaxmp._core.jaxprs.walk import equations, walk
from jaxmp._core.plan.flops import product_flops
from jaxmp._tools.preflight.size_search import sharding_of

# Primitives that call Python, which cannot be compiled where the device is not present.
_CALLBACKS = frozenset(
    {"debug_callback", "debug_print", "inspect_sharding", "io_callback", "pure_callback"}
)
PARAMETERS: Final = "parameters"
MASTERS: Final = "master weights"
OPTIMIZER: Final = "optimizer state"
BATCH: Final = "batch"
OTHERS: Final = "other arguments"

# The purpose of what a field or key of this name holds; below, inside an optimizer's state.
_NAMED: Final = {"params": PARAMETERS, "opt_state": OPTIMIZER}
_OF_STATES: Final = {"masters": MASTERS, "remainders": MASTERS}
# The modules that define the states of optimizers.
_STATES: Final = ("optax.", "jaxmp._training.")


class TracedProgram(NamedTuple):
    """A function as it is compiled.

    Attributes:
      run: the jitted function, of flat arrays.
      arguments: its arguments, as shapes.
      flops: the FLOPs of matmuls and convolutions by the dtype that they multiply, most first.
      callbacks: the number of callbacks to Python that it omits, by primitive.
    """

    run: Any
    arguments: list[jax.ShapeDtypeStruct]
    flops: dict[str, float]
    callbacks: dict[str, int]


def traced_program(fn: Callable[..., Any], args: tuple[Any, ...], platform: str) -> TracedProgram:
    """Traces a function of any pytrees, to be lowered for a platform.

    The results are those of `fn` and the state that it changes in the NNX modules in its arguments:
    otherwise an update would be removed as unused, and with it the gradients.
    """

    def called(*args: Any) -> Any:
        out = [leaf for leaf in jax.tree.leaves(fn(*args)) if is_array(leaf)]
        leaves = jax.tree.leaves(args, is_leaf=is_graph_node)
        return out, jax.tree.leaves([leaf for leaf in leaves if is_graph_node(leaf)])

    flat, arrays, returned = flatten_call(called, args, {})
    structs = [
        jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.result_type(x), sharding=sharding_of(x))
        for x in arrays
    ]
    typed = [
        _on_host(x) if is_on_host(given) else x for x, given in zip(structs, arrays, strict=True)
    ]
    traced = jax.jit(flat).trace(*typed)
    results, _ = returned[0].tree.children()
    kept = _distinct(traced.jaxpr, results.num_leaves)
    jaxpr, callbacks = without_callbacks(traced.jaxpr)
    jaxpr = with_changed_equations(jaxpr, on_abstract_meshes)
    run = jaxpr_as_fun(jaxpr)
    jitted = jax.jit(lambda *arrays: [out for out, k in zip(run(*arrays), kept, strict=True) if k])
    return TracedProgram(jitted, structs, _flops(traced.jaxpr, platform), callbacks)


def _on_host(struct: jax.ShapeDtypeStruct) -> Any:
    """Returns the type of an argument in host memory, which a struct with a sharding lacks."""
    [aval] = jax.jit(lambda x: x).trace(struct).jaxpr.in_avals
    return aval.update(memory_space=jax.memory.Space.Host)


def without_callbacks(jaxpr: Any) -> tuple[Any, dict[str, int]]:
    """Replaces the callbacks in a closed jaxpr; also returns how many there were, by primitive.

    Arrays of zeros or ones stand for their results, and depend on the operands, so that these are
    computed. A callback without results is omitted, and with it what nothing else reads.

    Example:
      >>> import jax
      >>> jaxpr = jax.make_jaxpr(lambda x: (jax.debug.print("{}", x), x * 2)[1])(1.0)
      >>> jaxpr, callbacks = without_callbacks(jaxpr)
      >>> [eqn.primitive.name for eqn in jaxpr.eqns], callbacks
      (['mul'], {'debug_print': 1})
    """
    found = [eqn for eqn in equations(closed(jaxpr).jaxpr.eqns) if _calls_python(eqn)]
    if not found:
        return jaxpr, {}

    def change(eqn: Any) -> Any:
        if not _calls_python(eqn):
            return eqn
        return _stand_in(eqn) if eqn.outvars else None

    replaced = with_changed_equations(jaxpr, change, without=found)
    return replaced, dict(Counter(eqn.primitive.name for eqn in found))


def _calls_python(eqn: Any) -> bool:
    return eqn.primitive.name in _CALLBACKS


def _stand_in(eqn: Any) -> Any:
    """Returns an equation whose results have the types of a callback's, and need its operands."""
    avals = [var.aval for var in eqn.outvars]

    @jax.jit
    def stand_in(*operands: Any) -> Any:
        # Behind a barrier: of what is only compared, the compiler would compute less.
        held = jax.lax.optimization_barrier(operands)
        nonzero = sum(jnp.any(_numbers(x) != 0) for x in held) > 0
        return [jnp.where(nonzero, filled(aval, 1), filled(aval, 0)) for aval in avals]

    def called(*operands: Any) -> Any:
        return stand_in(*operands)

    [call] = trace(called, [atom.aval for atom in eqn.invars]).eqns
    return call.replace(invars=list(eqn.invars), outvars=list(eqn.outvars))


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _flops(jaxpr: Any, platform: str) -> dict[str, float]:
    """Returns the FLOPs of matmuls and convolutions by the dtype they multiply, most first.

    Of `jax.lax.platform_dependent`, those of the platform's branch.
    """
    one = with_changed_equations(jaxpr, lambda eqn: for_platform(eqn, platform))
    flops: Counter[str] = Counter()
    for place in walk(Place(one), _inside):
        eqn = place.eqn
        if count := product_flops(eqn):
            flops[multiplied(eqn)] += count * place.mean_times
    return dict(flops.most_common())


def _inside(place: Place) -> Iterator[Place]:
    """Returns the places of the jaxprs inside an equation, if it is not a kernel of Pallas."""
    return iter(()) if place.eqn.primitive.name == "pallas_call" else place.all_jaxprs()


def _distinct(jaxpr: Any, own: int) -> list[bool]:
    """Returns which results to keep: the first `own`; of others, no operands and no repeats."""

    def transfer(eqn: Any, ins: list[int | None], inside: Inside[int | None]) -> list[int | None]:
        return inside(ins) or [None] * len(eqn.outvars)

    opened = closed(jaxpr).jaxpr
    given = range(len(opened.invars))
    same_as = forward(jaxpr, given, transfer, lambda a, b: a if a == b else None, None)
    return [
        i < own
        or (
            atom not in opened.outvars[:i]
            and (same is None or atom.aval.shape != opened.invars[same].aval.shape)
        )
        for i, (atom, same) in enumerate(zip(opened.outvars, same_as, strict=True))
    ]


def bytes_by_purpose(
    args: Sequence[Any], params: Collection[int], batch: Collection[int]
) -> dict[str, dict[str, int]]:
    """Adds up the bytes of arguments on one device, not its host, by purpose and dtype.

    The parameters are the arguments `params`, or their parts of the name `params`; an optimizer's
    state is recognized by its class, or by the name `opt_state`.

    Args:
      args: arrays, `jax.ShapeDtypeStruct`s, NNX modules, and pytrees of those.
      params: the arguments that hold parameters; below zero, counted from the end.
      batch: the arguments that hold the batch, likewise.

    Example:
      >>> import optax
      >>> w = jax.ShapeDtypeStruct((256, 256), "bfloat16")
      >>> state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, w)
      >>> bytes_by_purpose([w, state], [0], [])
      {'parameters': {'bfloat16': 131072}, 'optimizer state': {'bfloat16': 131072}}
    """
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for i, arg in enumerate(args):
        at = {i, i - len(args)}
        purpose = PARAMETERS if at & {*params} else BATCH if at & {*batch} else OTHERS
        for inside, leaf in _leaves(arg, purpose):
            if is_on_host(leaf):
                continue
            sharding = sharding_of(leaf)
            shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
            sizes[inside][str(leaf.dtype)] += math.prod(shape) * leaf.dtype.itemsize
    order = (PARAMETERS, MASTERS, OPTIMIZER, BATCH, OTHERS)
    return {purpose: dict(sizes[purpose].most_common()) for purpose in order if sizes[purpose]}


def _leaves(node: Any, purpose: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays in a pytree, each with its purpose."""
    if is_array(node):
        yield purpose, node
        return
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    below = [(path, child) for path, child in below if path]  # a leaf is inside itself
    names = [str(getattr(path[0], "name", getattr(path[0], "key", ""))) for path, _ in below]
    named = _NAMED
    if isinstance(node, tuple) and type(node).__module__.startswith(_STATES):
        purpose = OPTIMIZER
    if purpose in (OPTIMIZER, MASTERS):  # moments have the names that parameters have
        named = _OF_STATES
    elif "params" in names:  # of a train state, or of a Linen module's variables
        purpose = OTHERS
    for name, (_, child) in zip(names, below, strict=True):
        yield from _leaves(child, named.get(name, purpose))
