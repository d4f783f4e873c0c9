"""Checks of the training functions' arguments; their errors say what to do instead."""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from jaxmp._core.flax import AxisMetadata, nnx
from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.printable import show

__all__ = [
    "as_transformation",
    "check_arrays",
    "check_count",
    "check_floating",
    "check_gradients",
    "check_is_state",
    "check_state",
    "check_structure",
    "explained",
    "update_inner",
]

# The fields by which a `LossScaleState` that has lost its type is recognized.
_FIELDS: Final = frozenset({"loss_scale", "growth_count", "skipped_count"})

# The calls of the functions that take more than a state.
_CALLS: Final = {
    "scale_loss": "jaxmp.loss_scaling.scale_loss(loss, opt_state)",
    "unscale": "jaxmp.loss_scaling.unscale(grads, opt_state)",
    "read_monitor": "jaxmp.numerics.read_monitor(opt_state)",
    "value_and_grad": "jaxmp.value_and_grad(loss_fn, opt_state)",
}


def as_transformation(
    function: str, inner: Any, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """Returns the extra-args form of anything that optax accepts as a transformation."""
    if isinstance(inner, optax.MultiSteps):  # whose own conversion drops extra arguments
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{function}: {name} must be an optax transformation such as optax.adam(1e-3); got "
            f"{reprlib.repr(inner)} of type {type(inner).__name__!r}."
        )
    return optax.with_extra_args_support(inner)


def check_count(function: str, name: str, value: Any, hint: str = "") -> None:
    """Raises unless an option is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{function}: {name} must be an integer; got {value!r}.{hint}")
    if not 1 <= value < 2**31:
        allowed = "at least 1" if value < 1 else "below 2**31"
        raise ValueError(f"{function}: {name} must be {allowed}; got {value}.")


# Pytrees of parameters and gradients. `what` names a leaf: "the parameter", "the gradient".


def check_arrays(function: str, what: str, tree: Any) -> None:
    """Raises for a leaf that is a function or a string, as Equinox modules have."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "dtype") and (callable(leaf) or isinstance(leaf, str)):
            raise TypeError(
                f"{function}: {what} at {show(path)} is {leaf!r}, which is not an array; keep it "
                "out. Of an Equinox module, take eqx.filter(model, eqx.is_inexact_array), or "
                "eqx.partition's arrays, and eqx.combine them in the loss; "
                "eqx.filter_value_and_grad differentiates one around "
                "jaxmp.loss_scaling.scale_loss(loss, opt_state)."
            )


def check_floating(function: str, what: str, tree: Any, *, keys: bool = False) -> None:
    """Raises for a leaf that has no gradient: a function, an integer and, without `keys`, a key."""
    check_arrays(function, what, tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(leaf, int) or (hasattr(leaf, "dtype") and not _is_passed(leaf, keys)):
            if hasattr(tree, "opt_state") and hasattr(tree, "params"):
                raise TypeError(
                    f"{function}: {what} is a train state; give its parameters, state.params."
                )
            raise TypeError(
                f"{function}: {what} at {show(path)} is {kind}, which has no gradient; keep it out "
                "of the parameters: initialize, differentiate and update a tree of the others, and "
                "give this one to the loss as another argument. (A train state keeps it in a field "
                "of a subclass.)"
            )


def check_gradients(function: str, grads: Any) -> None:
    """Raises for a leaf that is not a gradient, or has 8 bits and cannot be scaled."""
    check_floating(function, "the gradient", grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if is_inexact(leaf) and getattr(leaf, "dtype", np.dtype(float)).itemsize == 1:
            raise TypeError(
                f"{function}: the gradient at {show(path)} is {leaf.dtype}, whose numbers mean "
                "nothing without their scale; store the parameter in 16 bits "
                "or more, and cast it where it is used."
            )


def _is_passed(leaf: Any, keys: bool) -> bool:  # noqa: FBT001
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_inexact(leaf) or leaf.dtype == jax.dtypes.float0 or bool(keys and is_key)


def check_structure(function: str, grads: Any, params: Any) -> None:
    """Raises unless the paths agree, whatever the containers; None may stand for any gradients."""
    got, want = (
        dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_absent))
        for tree in (grads, params)
    )

    def is_given(path: tuple[Any, ...]) -> bool:
        above = (path[:length] for length in range(len(path) + 1))
        return path in got or any(_is_absent(got[a]) for a in above if a in got)

    missing = [show(p) for p, leaf in want.items() if not _is_absent(leaf) and not is_given(p)]
    extra = [show(p) for p, leaf in got.items() if not _is_absent(leaf) and p not in want]
    found = (("no gradient at", missing), ("no parameter at", extra))
    if missing or extra:
        raise ValueError(
            f"{function}: the gradients have another structure than the parameters: "
            + "; ".join(f"{what} {', '.join(paths[:5])}" for what, paths in found if paths)
            + ". Differentiate with respect to these parameters."
        )


def _is_absent(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)


# States of optimizers.


def check_state(function: str, state: Any, kind: type) -> None:
    """Raises where `update` is not given the state that the transformation's `init` makes."""
    if isinstance(state, kind):
        return
    bare = isinstance(state, tuple) and not jax.tree_util.all_leaves([state])
    hint = " The state of the optimizer inside is put into one by " if bare else ""
    hint += "tx.init(params)._replace(inner_state=state)." if bare else ""
    raise TypeError(
        f"{function}: update takes (gradients, state, params), the state being a {kind.__name__} "
        f"from this optimizer's init; got {type(state).__name__!r}.{hint}"
    )


def update_inner(
    function: str,
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Calls the `update` of the inner optimizer; explains a failure of three known kinds."""
    with explained(function, inner, grads, state, params):
        result: tuple[Any, Any] = inner.update(grads, state, params, **extra_args)
    return result


@contextlib.contextmanager
def explained(function: str, inner: Any, grads: Any, state: Any, params: Any) -> Iterator[None]:
    """Explains three known kinds of failures of an optimizer's `update` in the body."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_own = frame.f_globals.get("__name__", "").startswith("jaxmp.")
        if not is_own and (reason := _reason(inner, grads, state, params)):
            raise ValueError(f"{function}: {reason}") from error
        raise


def _reason(inner: Any, grads: Any, state: Any, params: Any) -> str | None:
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda x: x is None)
    if absent := [show(path) for path, leaf in leaves if leaf is None]:
        return (
            f"the gradient at {', '.join(absent[:5])} is None, which the optimizer inside does not "
            "take. Give zeros, or leave these parameters out of init, update and what is "
            "differentiated."
        )
    if params is None:
        return None
    shapes = {show(path): jnp.shape(leaf) for path, leaf in leaves}
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        if (shape := shapes.get(show(path), jnp.shape(param))) != jnp.shape(param):
            return (
                f"the gradient at {show(path)} has shape {shape} and its parameter "
                f"{jnp.shape(param)}, which the optimizer inside does not take. Differentiate with "
                "respect to these parameters."
            )
    want: Any = jax.tree.structure(jax.eval_shape(inner.init, params))
    if (got := jax.tree.structure(state)) != want:
        return (
            f"the state is another optimizer's: it is {got}, this one's "
            f"{want}. Use the state that this optimizer's init made."
        )
    return None


def check_is_state(function: str, value: Any) -> None:
    """Raises unless a tree without a scaler may be an optimizer's state, or hold one.

    Such a state is: a tree with a NamedTuple in it, as all states of optax are, or with a node
    of a type registered with JAX (a dataclass, say); NNX's variables of an optimizer; and a tree
    without arrays, such as `()`. So parameters kept in a NamedTuple pass for a state; a state of
    plain arrays in dicts and lists, which only an optimizer written by hand has, does not.

    Example:
      >>> check_is_state("scale_loss", optax.sgd(0.1).init(np.ones(2)))
      >>> check_is_state("scale_loss", optax.sgd(0.1))
      Traceback (most recent call last):
      TypeError: scale_loss: opt_state must be the optimizer's state... got the optimizer itself...
    """
    if (got := _what_it_is(value)) is None:
        return
    call = _CALLS.get(function, f"jaxmp.loss_scaling.{function}(opt_state)")
    raise TypeError(
        f"{function}: opt_state must be the optimizer's state, or a tree that holds it, such as a "
        f"train state; got {got}. Write {call}, where opt_state = tx.init(params) at first and "
        "what tx.update returned from then on."
    )


def _what_it_is(value: Any) -> str | None:
    """Describes a value that is not an optimizer's state; returns None for one that may be."""
    from flax.training.dynamic_scale import DynamicScale  # noqa: PLC0415

    nodes = jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_lost_scaler)
    if lost := [show(path) for path, node in nodes if _is_lost_scaler(node)]:
        return (
            f"a tree in which the scaler's state at {lost[0]} has become a plain mapping, as in "
            "nnx.state(optimizer) or a checkpoint restored without a target. Give "
            "optimizer.opt_state; restore into the shapes of a new state"
        )
    if isinstance(value, (optax.GradientTransformation, optax.MultiSteps)):
        return "the optimizer itself"
    if isinstance(value, optax.LookaheadParams):
        return "parameters (optax.LookaheadParams)"
    if isinstance(value, (DynamicScale, jmp.DynamicLossScale, jmp.StaticLossScale)):
        return f"a {type(value).__name__!r} of another library, which jaxmp's optimizers do not use"
    if isinstance(value, nnx.Module) or (callable(value) and not isinstance(value, type)):
        name = getattr(value, "__name__", type(value).__name__)
        return f"{name!r}, which is a function or a model"
    if value is None or isinstance(value, (str, bytes, type)):
        return repr(value)
    if jax.tree_util.all_leaves([value]):
        shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
        return f"one {type(value).__name__!r}{shape}"
    parts = jax.tree.leaves(value, is_leaf=_may_be_state)
    if not parts or any(map(_may_be_state, parts)):
        return None
    return (
        f"a {type(value).__name__!r} of arrays, which looks like parameters (a state of your own "
        "is known by being a NamedTuple)"
    )


def _is_lost_scaler(node: Any) -> bool:
    return isinstance(node, (Mapping, nnx.State)) and node.keys() >= _FIELDS


def _may_be_state(node: Any) -> bool:
    if isinstance(node, (nnx.OptState, nnx.OptArray, nnx.OptVariable)):
        return True
    if isinstance(node, tuple):
        others = (optax.GradientTransformation, optax.LookaheadParams, optax.MaskedNode)
        return hasattr(node, "_fields") and not isinstance(node, others)
    # Boxes around parameters are types registered with JAX as well.
    if node is None or isinstance(node, (list, nnx.State, nnx.Variable, AxisMetadata)):
        return False
    if isinstance(node, Mapping) and not dataclasses.is_dataclass(node):  # chex's are both
        return False
    return not callable(node) and not jax.tree_util.all_leaves([node])
