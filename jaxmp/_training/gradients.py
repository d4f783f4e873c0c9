"""Gradients: dividing them by the scale of their loss, and checking what a scaler is given."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._jaxprs.attributes import explicit_sharding, is_weak
from jaxmp._jaxprs.scopes import UNSCALE
from jaxmp._training.scale_rule import LossScaleState
from jaxmp.tree import widen_floating

__all__ = [
    "check_arrays",
    "check_floating",
    "check_scaler_state",
    "check_structure",
    "explain_failure",
    "factor_for",
    "is_inexact",
    "is_overwrite",
    "show",
    "strong",
    "unscaled",
    "widened",
]

# The collection in which Flax keeps the scales and histories of its float8 layers. They travel as
# gradients but are new values.
_OVERWRITE: Final = "_overwrite_with_gradient"


def unscaled(grads: Any, scale: jax.Array) -> Any:
    """Gradients of a scaled loss divided by its scale, in float32; others as they are.

    What is not finite becomes NaN: an elementwise clip would make an infinity a number like others.

    Args:
      grads: A pytree of gradients. float64 and complex ones keep their dtype.
      scale: float32[], what the loss was multiplied by.
    """
    # A product with the reciprocal: exact for powers of two, and what GradScaler does.
    with jax.named_scope(UNSCALE):
        inverse = np.float32(1) / scale

    def divide(path: tuple[Any, ...], grad: Any) -> Any:
        if is_overwrite(path) or not is_inexact(grad):
            return grad
        wide = widened(path, grad)
        factor = factor_for(wide, inverse)
        if factor is not inverse:  # parts of a sum: no test goes through them
            return wide * factor
        return jnp.where(jnp.isfinite(wide), wide * inverse, jnp.nan)

    with jax.named_scope(UNSCALE):
        return jax.tree_util.tree_map_with_path(divide, grads)


def factor_for(grad: Any, factor: Any) -> Any:
    """A factor as an explicit mesh wants it, for gradients that are yet to be reduced."""
    sharding = explicit_sharding(grad)
    axes = sharding.spec.unreduced if sharding is not None else None
    if not axes or sharding is None:
        return factor
    reduced = NamedSharding(sharding.mesh, PartitionSpec(reduced=axes))
    return jax.sharding.reshard(factor, reduced)


def widened(path: tuple[Any, ...], grad: Any) -> Any:
    """A gradient of 16 bits in float32, and a weakly typed one strong; others as they are."""
    if is_overwrite(path) or not is_inexact(grad):
        return grad
    return strong(jnp.asarray(widen_floating(grad)))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a floating or complex number, or an array of those."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def strong(leaf: Any) -> Any:
    """Strips the weak type, which `select` would strip after the first step: two compilations."""
    return leaf.astype(leaf.dtype) if is_weak(leaf) else leaf


def is_overwrite(path: tuple[Any, ...]) -> bool:
    """Tells whether a gradient's path is under Flax's `_overwrite_with_gradient`.

    Example:
      >>> tree = {"_overwrite_with_gradient": {"scale": 1.0}, "w": 2.0}
      >>> [is_overwrite(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
      [True, False]
    """
    return any(getattr(entry, "key", getattr(entry, "name", None)) == _OVERWRITE for entry in path)


def check_arrays(function: str, what: str, tree: Any) -> None:
    """Raises for a leaf that is a function or a string, as Equinox modules have.

    Args:
      function: Who speaks in the message.
      what: What the leaves are: "parameter" or "gradient".
      tree: The parameters or the gradients.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "dtype") and (callable(leaf) or isinstance(leaf, str)):
            raise TypeError(
                f"{function}: the {what} at {show(path)} is {leaf!r}, no array; keep it out of "
                "the parameters. Of an Equinox module, take eqx.filter(model, "
                "eqx.is_inexact_array)."
            )


def check_floating(function: str, what: str, tree: Any) -> None:
    """Raises for a leaf that is no number, or one that cannot be scaled: an integer, 8 bits.

    Args:
      function: Who speaks in the message.
      what: What the leaves are: "parameter" or "gradient". A parameter may have 8 bits.
      tree: The parameters or the gradients.
    """
    check_arrays(function, what, tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        kind = np.dtype(type(leaf)) if isinstance(leaf, (bool, int)) else dtype
        if kind is None or kind == jax.dtypes.float0:
            continue
        if jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.bool_):
            raise TypeError(
                f"{function}: the {what} at {show(path)} is {kind}, which has no gradient to "
                "scale; keep it out of the parameters: initialize, differentiate and update a tree "
                "of the others, and give this one to the loss as another argument."
            )
        if what == "gradient" and jnp.issubdtype(kind, jnp.floating) and kind.itemsize == 1:
            raise TypeError(
                f"{function}: the gradient at {show(path)} is {kind}, whose numbers mean something "
                "only beside a scale of their own; store the parameter in 16 bits or more, and "
                "cast it where it is used."
            )


def check_scaler_state(function: str, state: Any) -> None:
    """Raises where `update` is given anything but a scaler's state."""
    if isinstance(state, LossScaleState):
        return
    bare = isinstance(state, tuple) and not jax.tree_util.all_leaves([state])
    hint = " The state of an optimizer without a scaler is put into one: " if bare else ""
    hint += "tx.init(params)._replace(inner_state=state)." if bare else ""
    raise TypeError(
        f"{function}: update takes (gradients, state, params), the state being a LossScaleState "
        f"from this optimizer's init; got {type(state).__name__!r}.{hint}"
    )


def check_structure(function: str, grads: Any, params: Any) -> None:
    """Compares paths, not container types; a gradient may be None where the parameter is not."""

    def paths(tree: Any) -> dict[Any, Any]:
        return dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_absent))

    def absent_above(path: tuple[Any, ...]) -> bool:
        return any(_is_absent(got.get(path[:length], grads)) for length in range(len(path) + 1))

    got, want = paths(grads), paths(params)
    missing = [
        path
        for path, leaf in want.items()
        if path not in got and not _is_absent(leaf) and not absent_above(path)
    ]
    extra = [path for path, leaf in got.items() if path not in want and not _is_absent(leaf)]
    if missing or extra:
        found = (("no gradient at", missing), ("no parameter at", extra))
        raise ValueError(
            f"{function}: the gradients have another structure than the parameters: "
            + "; ".join(
                f"{what} {', '.join(show(path) for path in paths[:5])}"
                for what, paths in found
                if paths
            )
            + ". Differentiate with respect to these parameters."
        )


def explain_failure(
    function: str,
    inner: optax.GradientTransformation,
    grads: Any,
    inner_state: Any,
    params: Any,
) -> None:
    """Raises a ValueError that says why an inner optimizer failed, for three known reasons."""
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda x: x is None)
    if absent := [show(path) for path, leaf in leaves if leaf is None]:
        raise ValueError(
            f"{function}: the gradient at {', '.join(absent[:5])} is None, which the optimizer "
            "inside does not take. Give zeros, or leave these parameters out of init, update and "
            "what is differentiated."
        )
    if params is None:
        return
    shapes = {show(path): jnp.shape(leaf) for path, leaf in leaves}
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        shape = shapes.get(show(path))
        if shape is not None and shape != jnp.shape(param):
            raise ValueError(
                f"{function}: the gradient at {show(path)} has shape {shape} and its parameter "
                f"{jnp.shape(param)}, which the optimizer inside does not take. Differentiate with "
                "respect to these parameters."
            )
    want: Any = jax.tree.structure(jax.eval_shape(inner.init, params))
    got: Any = jax.tree.structure(inner_state)
    if got != want:
        raise ValueError(
            f"{function}: the state is another optimizer's: its inner_state is {got}, and that of "
            f"this one {want}. Use the state that this optimizer's init made."
        )


def show(path: tuple[Any, ...]) -> str:
    """A path in a pytree, for a message.

    Example:
      >>> show(()), show((jax.tree_util.DictKey("w"),))
      ('the root', "['w']")
    """
    return jax.tree_util.keystr(path) or "the root"


def _is_absent(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)
