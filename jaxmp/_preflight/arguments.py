"""The purposes of a program's arguments, and the bytes of each purpose on one device."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import jax

from jaxmp._jaxprs.trace import is_array
from jaxmp._preflight.size_search import sharding_of

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


def bytes_by_purpose(
    args: Sequence[Any], params: Collection[int], batch: Collection[int]
) -> dict[str, dict[str, int]]:
    """Adds up the bytes of arguments on one device, by purpose and dtype.

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
