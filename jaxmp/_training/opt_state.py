"""The loss scaler in an optimizer's state: finding it, and refusing what cannot have one."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from optax import contrib

from jaxmp._flax import AxisMetadata
from jaxmp._training.scale_rule import LossScaleState

__all__ = [
    "check_is_state",
    "find_scaler",
    "find_scalers",
    "scale_of",
    "skipped_by",
    "the_scaler",
    "was_finite",
]

# Wrappers of optax that bear no scaler inside: their states, what they are called, what goes wrong,
# and the form that is right.
_WRAPPERS: Final[dict[Any, tuple[str, str, str]]] = {
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "one overflow would stay in its sum for ever",
        "dynamic_loss_scale(optax.MultiSteps(optimizer, k))",
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "it would undo what an overflow teaches the scaler, whose scale would never back off",
        "dynamic_loss_scale(optimizer), which leaves such steps out by itself",
    ),
    optax.PartitionState: (
        "optax.partition (or multi_transform)",
        "it would not see an overflow in the parameters of other labels",
        "dynamic_loss_scale(optax.partition(...)), with no scaler inside",
    ),
    optax.MaskedState: (
        "optax.masked",
        "it would not see an overflow in the other parameters",
        "dynamic_loss_scale(optax.masked(optimizer, mask))",
    ),
    optax.ConditionallyMaskState: (
        "optax.conditionally_mask",
        "it would not see an overflow in the steps that are masked",
        "dynamic_loss_scale(optax.conditionally_mask(optimizer, ...))",
    ),
    optax.ConditionallyTransformState: (
        "optax.conditionally_transform",
        "an overflow in the steps that it leaves alone would go into the parameters",
        "dynamic_loss_scale(optax.conditionally_transform(optimizer, ...))",
    ),
    contrib.MechanicState: (
        "optax.contrib.mechanize",
        "an overflow would stay in what it tunes its step by",
        "dynamic_loss_scale(optax.contrib.mechanize(optimizer))",
    ),
    contrib.SAMState: (
        "optax.contrib.sam",
        "an overflow in the steps of its other optimizer would go into the parameters",
        "dynamic_loss_scale(optax.contrib.sam(optimizer, adversary))",
    ),
}

# Fields by which a `LossScaleState` is known that has lost its type.
_FIELDS: Final = frozenset({"loss_scale", "growth_count", "skipped_count"})

# How each function that reads a state is called.
_CALLS: Final = {
    "scale_loss": "jaxmp.scale_loss(loss, opt_state)",
    "unscale": "jaxmp.loss_scaling.unscale(grads, opt_state)",
    "value_and_grad": "jaxmp.value_and_grad(loss_fn, opt_state)",
}


def find_scalers(tree: Any) -> list[tuple[str, LossScaleState]]:
    """Finds the outermost `LossScaleState`s in a pytree, with the path of each.

    Raises:
      ValueError: If one is inside a wrapper of optax that hides or keeps an overflow, such as
        `optax.MultiSteps` or `optax.masked`.

    Example:
      >>> import jaxmp
      >>> optimizer = optax.chain(jaxmp.dynamic_loss_scale(optax.sgd(0.1)), optax.ema(0.9))
      >>> [path for path, state in find_scalers(optimizer.init(jnp.ones(2)))]
      ['[0]']
    """
    kinds = (LossScaleState, *_WRAPPERS)
    found = []
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: type(x) in kinds)
    for path, node in nodes:
        if type(node) is LossScaleState:
            found.append((jax.tree_util.keystr(path), node))
        elif type(node) in _WRAPPERS and _holds_scaler(node):
            name, wrong, right = _WRAPPERS[type(node)]
            where = jax.tree_util.keystr(path)
            where = f" at {where}" if where else ""
            raise ValueError(
                f"{name}{where} is around a loss scaler: {wrong}. The right form is {right}."
            )
    return found


def _check_front(tree: Any) -> None:
    """Checks that in no chain a scaler comes after links that keep something.

    What keeps nothing hands a NaN on, and `value_and_grad` makes one of every infinity. A chain of
    `optax.named_chain` is an `OrderedDict`, whose order JAX keeps.
    """
    chains = (tuple, OrderedDict)
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: type(x) in (*chains, LossScaleState))
    for node in nodes:
        links = tuple(node.values()) if type(node) is OrderedDict else node
        for i, link in enumerate(links if type(node) in chains else ()):
            _check_front(link)
            front = enumerate(links[:i])
            keeping = [j for j, state in front if _is_link(state) and jax.tree.leaves(state)]
            if keeping and find_scalers(link):
                raise ValueError(
                    f"the loss scaler in link {i} of an optax.chain comes after link {keeping[0]}, "
                    "which keeps a state: an overflow would stay in it, and it would count steps "
                    "that are skipped. The right form is dynamic_loss_scale(optax.chain(...)). (If "
                    "this is no chain but states side by side, give one of them.)"
                )


def _is_link(state: Any) -> bool:
    """Whether a value is the state of an optax transformation: a NamedTuple, or a chain of those.

    Parameters, step counters and what else may be next to a state are not.
    """
    if type(state) is tuple:
        return bool(state) and all(map(_is_link, state))
    named = isinstance(state, tuple) and hasattr(state, "_fields")
    return named and not isinstance(state, (optax.GradientTransformation, optax.LookaheadParams))


def _holds_scaler(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: type(x) is LossScaleState)
    return any(type(leaf) is LossScaleState for leaf in leaves)


def check_is_state(function: str, value: Any) -> None:
    """Raises unless something without a scaler in it may be an optimizer's state, or hold one.

    What counts as one: a tree with a NamedTuple in it, as all states of optax are, or with a node
    of a type that JAX was told of (a dataclass, say); NNX's variables of an optimizer; and a tree
    without arrays, such as `()`. Parameters kept in a NamedTuple pass for a state, therefore; a
    state of plain arrays in dicts and lists, which only an optimizer written by hand has, does not.

    Raises:
      TypeError: For what is certainly none: None, a function, an optimizer, a module, parameters.

    Example:
      >>> check_is_state("scale_loss", optax.sgd(0.1).init(np.ones(2)))
      >>> check_is_state("scale_loss", optax.sgd(0.1))
      Traceback (most recent call last):
      TypeError: scale_loss: opt_state must be the optimizer's state... got the optimizer itself...
    """
    lost = next(_lost_scalers(value), None)
    if lost is not None:
        where = f" at {lost}" if lost else ""
        got = (
            f"a tree in which the scaler's state{where} has become a plain mapping, as in "
            "nnx.state(optimizer) or a checkpoint restored without a target. Give "
            "optimizer.opt_state; restore into the shapes of a new state"
        )
    elif (what := _what_it_is(value)) is not None:
        got = what
    else:
        return
    call = _CALLS.get(function, f"jaxmp.{function}(opt_state)")
    raise TypeError(
        f"{function}: opt_state must be the optimizer's state, or a tree that holds it, such as a "
        f"train state; got {got}. Write {call}, where opt_state = tx.init(params) at first and "
        "what tx.update returned from then on."
    )


def the_scaler(function: str, opt_state: Any) -> LossScaleState | None:
    """The one scaler in what is known to be an optimizer's state, or to hold one.

    Raises:
      ValueError: As `find_scalers`, or if there are several, or one comes in a chain after links
        that keep a state.
    """
    found = find_scalers(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"{function}: there are {len(found)} loss scalers in the state, at "
            f"{' and '.join(path or 'the root' for path, _ in found)}; a loss has one scale. Keep "
            "one, around everything else: dynamic_loss_scale(optax.chain(...))."
        )
    if found:
        _check_front(opt_state)
    return found[0][1] if found else None


def scale_of(state: LossScaleState | None) -> jax.Array:
    """The scale of a scaler; of none, 1."""
    return jnp.asarray(np.float32(1) if state is None else state.loss_scale)


def was_finite(state: LossScaleState | None) -> jax.Array:
    """Whether a scaler made its last step; without one, it was made."""
    return jnp.asarray(np.True_ if state is None else state.finite)


def skipped_by(state: LossScaleState | None) -> jax.Array:
    """How many steps a scaler skipped; without one, 0."""
    return jnp.asarray(np.int32(0) if state is None else state.skipped_count)


def find_scaler(function: str, opt_state: Any) -> LossScaleState | None:
    """The scaler in what a caller says is an optimizer's state, or holds one; None if it has none.

    Raises:
      ValueError: As `the_scaler`.
      TypeError: As `check_is_state`.
    """
    state = the_scaler(function, opt_state)
    if state is None:
        check_is_state(function, opt_state)
    return state


def _what_it_is(value: Any) -> str | None:
    """What a value that is not an optimizer's state is, in words; None for what may be one."""
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
    nodes = jax.tree.leaves(value, is_leaf=_may_be_state)
    if nodes and not any(_may_be_state(node) for node in nodes):
        return (
            f"a {type(value).__name__!r} of arrays, which looks like parameters (a state of your "
            "own is known by being a NamedTuple)"
        )
    return None


def _may_be_state(node: Any) -> bool:
    if isinstance(node, (nnx.OptState, nnx.OptArray, nnx.OptVariable)):
        return True
    if isinstance(node, tuple):
        others = (optax.GradientTransformation, optax.LookaheadParams, optax.MaskedNode)
        return hasattr(node, "_fields") and not isinstance(node, others)
    # Boxes around parameters are types that JAX was told of, too.
    if node is None or isinstance(node, (list, nnx.State, nnx.Variable, AxisMetadata)):
        return False
    if isinstance(node, Mapping) and not dataclasses.is_dataclass(node):  # chex's are both
        return False
    return not callable(node) and not jax.tree_util.all_leaves([node])


def _lost_scalers(value: Any) -> Iterator[str]:
    def is_one(node: Any) -> bool:
        return isinstance(node, (Mapping, nnx.State)) and node.keys() >= _FIELDS

    for path, node in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_one):
        if is_one(node):
            yield jax.tree_util.keystr(path)
