"""Perturbation of a run's parameters by one unit in the last place: float32's own noise."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.flax import nnx

# The dtypes that are perturbed, by width in bytes; and the names that are not: a power of two.
_BITS: Final[dict[int, Any]] = {2: np.int16, 4: np.int32, 8: np.int64}
_NEVER: Final = {"loss_scale"}


def perturb(state: Any, seed: tuple[int, int]) -> tuple[Any, bool]:
    """Moves each parameter to the next number above or below, or leaves it, with equal chances.

    As if each had been rounded stochastically. Parameters are those leaves of the state whose path
    has a component ``params`` (`TrainState`, ``{"params": …}``), the `nnx.Param`s of NNX modules
    among its leaves (which are changed in place), and where there is neither, all floating leaves
    but those named ``loss_scale``. Zeros, which have no neighbors of their size, stay as they are.
    Returns the state, and whether anything in it has changed.

    Example:
      >>> before = {"params": np.ones(100, "f"), "momentum": np.ones(100, "f")}
      >>> after, changed = perturb(before, (0, 1))
      >>> changed, sorted({int(x) for x in np.round((after["params"] - 1) * 2**24)})
      (True, [-1, 0, 2])
      >>> bool(np.all(after["momentum"] == 1))
      True
    """
    draw = np.random.default_rng(seed)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Module)
    )
    modules = [node for _, node in nodes if isinstance(node, nnx.Module)]
    if modules:
        params, rest = jax.tree.flatten([nnx.state(module, nnx.Param) for module in modules])
        moved, changed = _perturb_leaves(params, draw)
        for module, new in zip(modules, jax.tree.unflatten(rest, moved), strict=True):
            nnx.update(module, new)
        return state, changed
    names = [jax.tree_util.keystr(path, simple=True, separator="/").split("/") for path, _ in nodes]
    named = any("params" in name for name in names)
    leaves = [leaf for _, leaf in nodes]
    wanted = [
        i for i, name in enumerate(names) if ("params" in name if named else not {*name} & _NEVER)
    ]
    moved, changed = _perturb_leaves([leaves[i] for i in wanted], draw)
    for i, new in zip(wanted, moved, strict=True):
        leaves[i] = new
    return jax.tree.unflatten(treedef, leaves), changed


def _perturb_leaves(leaves: list[Any], draw: np.random.Generator) -> tuple[list[Any], bool]:
    moved = [_perturb_leaf(leaf, draw) for leaf in leaves]
    return moved, any(new is not old for new, old in zip(moved, leaves, strict=True))


def _perturb_leaf(leaf: Any, draw: np.random.Generator) -> Any:
    """Returns a floating array of 16 bits or more with its elements moved; other leaves as is.

    It runs on the host, where nothing is compiled for each shape.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize not in _BITS:
        return leaf
    array = np.array(leaf)
    # Neighbors in size are neighbors as integers, whatever the sign.
    bits = array.view(_BITS[dtype.itemsize])
    moved = (bits + draw.integers(-1, 2, bits.shape, bits.dtype)).view(dtype)
    usable = (abs(array) >= jnp.finfo(dtype).tiny) & np.isfinite(moved)
    if not np.any(usable & (moved != array)):
        return leaf
    moved = np.where(usable, moved, array)
    if not isinstance(leaf, jax.Array):
        return moved
    # One that is not committed to its device goes where the batches are.
    return jax.device_put(moved, leaf.sharding if leaf.committed else None)
