"""The loss scaler in an optimizer's state: where it is, that it works there, that it is needed."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxmp._core.plan.regions import policies_traced
from jaxmp._core.printable import show
from jaxmp._training.checks import check_is_state
from jaxmp._training.scale_rule import IDENTITY, LossScaleState
from jaxmp.policy import Policy

__all__ = ["find_scaler", "find_scalers", "float16_in", "policies_checked", "the_scaler"]

# Wrappers of optax that hide an overflow from a scaler inside, or keep one: by their states, their
# names and what goes wrong.
_WRAPPERS: Final[dict[Any, tuple[str, str]]] = {
    optax.MultiStepsState: ("MultiSteps", "one overflow would stay in its sum forever"),
    optax.ApplyIfFiniteState: (
        "apply_if_finite",
        "it would undo what an overflow teaches the scaler, which skips such steps by itself",
    ),
    optax.PartitionState: (
        "partition",
        "it (or multi_transform) would not see an overflow in the parameters of other labels",
    ),
    optax.MaskedState: ("masked", "it would not see an overflow in the other parameters"),
    optax.ConditionallyMaskState: (
        "conditionally_mask",
        "it would not see an overflow in the steps that are masked",
    ),
    optax.ConditionallyTransformState: (
        "conditionally_transform",
        "an overflow in the steps that it leaves alone would go into the parameters",
    ),
    contrib.MechanicState: (
        "contrib.mechanize",
        "an overflow would stay in the state that adapts its step size",
    ),
    contrib.SAMState: (
        "contrib.sam",
        "an overflow in the steps of its other optimizer would go into the parameters",
    ),
}


# The states of `master_weights`, which imports this module.
_OF_MASTERS: Final = {"MasterWeightsState", "RemainderState", "StochasticRoundingState"}
F = TypeVar("F", bound=Callable[..., Any])


def find_scalers(tree: Any) -> list[tuple[tuple[Any, ...], LossScaleState]]:
    """Finds the outermost `LossScaleState`s in a pytree, with the path of each."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_scaler)
    return [(path, node) for path, node in nodes if _is_scaler(node)]


def _is_scaler(node: Any) -> bool:
    return type(node) is LossScaleState


def the_scaler(function: str, opt_state: Any) -> LossScaleState:
    """Returns the one scaler in a tree that is known to be, or to hold, an optimizer's state.

    It is `IDENTITY` if there is none.

    Raises:
      ValueError: If there are several, or it is in a wrapper of optax that hides or keeps an
        overflow, or in a chain after links that keep a state.
    """
    _check_masters(function, opt_state)
    found = find_scalers(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"{function}: there are {len(found)} loss scalers in the state, at "
            f"{' and '.join(show(path) for path, _ in found)}; a loss has one scale. Keep one, "
            "around everything else: dynamic_loss_scale(optax.chain(...))."
        )
    if not found:
        return IDENTITY
    [(path, scaler)] = found
    _check_around(function, opt_state, path)
    return scaler


def find_scaler(function: str, opt_state: Any) -> LossScaleState:
    """Returns `the_scaler` of a caller's `opt_state`; if there is none, calls `check_is_state`."""
    state = the_scaler(function, opt_state)
    if state is IDENTITY:
        check_is_state(function, opt_state)
    return state


def _check_masters(function: str, opt_state: Any) -> None:
    """Raises if a transformation follows master_weights in a chain: it would change its updates."""
    for node in jax.tree.leaves(opt_state, is_leaf=_changes_masters):
        if _changes_masters(node):
            raise ValueError(
                f"{function}: in an optax.chain another transformation comes after master_weights: "
                "it would change the updates, so that parameters are not those of the masters. The "
                "right form is master_weights(optax.chain(...)). (If these are separate states and "
                "not a chain, give one of them.)"
            )


def _changes_masters(node: Any) -> bool:
    """Returns whether a node is the state of a chain with masters in a link before the last."""
    links = list(node.values() if type(node) is OrderedDict else node) if _is_chain(node) else []
    return any(type(link).__name__ in _OF_MASTERS for link in links[:-1])


def _is_chain(node: Any) -> bool:
    is_sequence = type(node) in (tuple, OrderedDict)
    return is_sequence and all(map(_is_link, node.values() if isinstance(node, dict) else node))


def _check_around(function: str, tree: Any, path: tuple[Any, ...]) -> None:
    """Checks the wrappers and chains around a scaler, from the root inwards.

    In a chain, links without a state pass a NaN on to it, and `value_and_grad` turns every infinity
    into one. A chain of `optax.named_chain` is an `OrderedDict`, whose order JAX keeps.
    """
    node = tree
    for depth, key in enumerate(path):
        if type(node) in _WRAPPERS:
            name, wrong = _WRAPPERS[type(node)]
            where = f" at {show(path[:depth])}" if depth else ""
            raise ValueError(
                f"{function}: optax.{name}{where} is around a loss scaler: {wrong}. The right form "
                f"is dynamic_loss_scale(optax.{name}(...))."
            )
        children = _children(node)
        link = list(children).index(key)
        front = list(children.values())[:link] if type(node) in (tuple, OrderedDict) else []
        keeping = [i for i, state in enumerate(front) if _is_link(state) and jax.tree.leaves(state)]
        if keeping:
            raise ValueError(
                f"{function}: the loss scaler in link {link} of an optax.chain comes after link "
                f"{keeping[0]}, which keeps a state: an overflow would stay in it, and it would "
                "count steps that are skipped. The right form is "
                "dynamic_loss_scale(optax.chain(...)). (If these are separate states and not a "
                "chain, give one of them.)"
            )
        node = children[key]


def _children(node: Any) -> dict[Any, Any]:
    one_level = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {key: child for (key,), child in one_level}


def _is_link(state: Any) -> bool:
    """Returns whether a value is an optax transformation's state: a NamedTuple, or a chain of them.

    Parameters, step counters and other values next to a state are not.
    """
    if type(state) is tuple:
        return bool(state) and all(map(_is_link, state))
    named = isinstance(state, tuple) and hasattr(state, "_fields")
    return named and not isinstance(state, (optax.GradientTransformation, optax.LookaheadParams))


def float16_in(policies: Iterable[Policy]) -> Policy | None:
    """Returns the first policy that has float16 in it, whose gradients need a loss scale."""
    for policy in policies:
        if jnp.float16 in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
            return policy
    return None


def policies_checked(fn: F, name: str, *, has_scaler: bool, skip_overflow: bool = False) -> F:
    """Wraps `fn` to warn if something in it is traced under float16, and there is no scaler.

    A scaler without float16 is used on purpose: it skips the steps that are not finite.

    Args:
      fn: a function that differentiates a loss.
      name: the function that the message names.
      has_scaler: whether the optimizer's state has a loss scale.
      skip_overflow: whether it skips steps in which float16 overflowed.

    Warns:
      UserWarning: if a policy has float16 in it, and there is no scaler; if none has, and
        `skip_overflow` has nothing to watch. The policies of functions that `jax.jit` has traced
        before are not known.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with policies_traced() as policies:
            out = fn(*args, **kwargs)
        if not has_scaler and (policy := float16_in(policies)) is not None:
            warnings.warn(
                f"{name}: the loss computes under {str(policy)!r}, and the optimizer has no loss "
                "scale: gradients that are too small for float16 become 0. Make the optimizer "
                "jaxmp.dynamic_loss_scale(tx), or both by jaxmp.prepare(model, tx, policy).",
                UserWarning,
                stacklevel=2,
            )
        if skip_overflow and policies and float16_in(policies) is None:
            warnings.warn(
                f"{name}: skip_overflow=True has no effect: the loss computes under "
                f"{str(policies[0])!r}, and only float16 overflows. Leave it out.",
                UserWarning,
                stacklevel=2,
            )
        return out

    return checked  # type: ignore[return-value]
