"""Flax's train state, for steps that a loss scaler may skip."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from jaxmp._core.flax import is_pytree_node
from jaxmp._training.checks import as_transformation, check_floating, explained
from jaxmp._training.differentiate import scaled_value_and_grad
from jaxmp._training.leaves import is_overwrite
from jaxmp._training.master_weights import (
    MasterWeightsState,
    RemainderState,
    StochasticRoundingState,
)
from jaxmp._training.opt_state import policies_checked, the_scaler
from jaxmp._training.scale_rule import IDENTITY
from jaxmp.policy import Policy, PolicyLike, single_policy
from jaxmp.tree import select

__all__ = ["TrainState"]

_16_BITS = {np.dtype(jnp.bfloat16), np.dtype(np.float16)}
# The further arguments of the updates of optax: a loss, its gradients, and functions of parameters.
_OF_UPDATE = frozenset({"value", "grad", "value_fn", "obj_fn"})


class TrainState(train_state.TrainState):
    """A `flax.training.train_state.TrainState` whose skipped steps leave no trace.

    Use it where you would use Flax's, and subclass it likewise to add fields. With a
    `dynamic_loss_scale` somewhere in `tx` it scales the loss, and where gradients overflow it keeps
    everything as it was: `params`, `step`, and each extra field that the step gives to
    `apply_gradients` (BatchNorm statistics, a PRNG key, an EMA of the parameters). Only the
    scaler's counters move, so `step` counts the updates that were made, as the optimizer's own
    counts do, and `step + skipped_count` the attempts. Without a scaler it does what Flax's does.

    It is a pytree of arrays: `jax.eval_shape` gives its shapes, a `tree.map` over those its
    `PartitionSpec`s, and Orbax saves and restores it. `step` is a strong int32 from the start, so a
    jitted step compiles once.

    A checkpoint written with other wrappers than `tx` now has is restored into a state made with
    the old ones. To add a scaler to `old`, which had none (`opt_state.inner_state` takes one away):

    ```python
    state = TrainState.create(apply_fn=model.apply, params=old.params, tx=tx)
    opt_state = state.opt_state._replace(inner_state=old.opt_state)
    state = state.replace(step=old.step, opt_state=opt_state)
    ```

    Attributes:
      step: int32[], the number of updates made.
      apply_fn: Usually the model's `apply`.
      params: The parameters.
      tx: The optimizer.
      opt_state: Its state.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.dynamic_loss_scale(optax.sgd(0.1), init_scale=1024.0)
      >>> params = {"w": jnp.ones(2)}
      >>> state = TrainState.create(apply_fn=None, params=params, tx=tx, policy="float32")
      >>> loss_fn = lambda params, x: jnp.sum(params["w"] * x)
      >>> @jax.jit
      ... def train_step(state, x):
      ...     loss, grads = state.value_and_grad(loss_fn)(state.params, x)
      ...     return state.apply_gradients(grads=grads), loss
      >>> state, loss = train_step(state, jnp.array([2.0, 3.0]))
      >>> float(loss), state.params["w"].tolist()
      (5.0, [0.8..., 0.69...])
      >>> state, _ = train_step(state, jnp.array([2.0, jnp.inf]))
      >>> int(state.step), int(state.skipped_count), float(state.loss_scale)
      (1, 1, 512.0)
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Any,
        tx: optax.GradientTransformation,
        policy: PolicyLike | None = None,
        **fields: Any,
    ) -> Self:
        """Makes the state before the first step.

        Args:
          apply_fn: Usually the model's `apply`.
          params: The parameters, floating numbers all of them.
          tx: The optimizer.
          policy: What `jaxmp.get_policy` takes. The parameters are cast to its `param_dtype`, but
            for those that Flax's float8 layers overwrite. None leaves them as they are.
          **fields: Those that a subclass adds.

        Returns:
          The state, with `step` 0 and a new `opt_state`.

        Raises:
          TypeError: If a parameter is not a floating (or complex) number, or `tx` not an optimizer.
          ValueError: If `params` is all that Linen's `init` returns, BatchNorm's averages too, or
            a loss scaler is where `jaxmp.loss_scaling.loss_scale` refuses it.

        Warns:
          UserWarning: If all parameters are stored in 16 bits, without `jaxmp.master_weights`.
        """
        as_transformation("TrainState.create", tx, "tx")
        _check_container("TrainState.create: params", params)
        check_floating("TrainState.create", "the parameter", params)
        _check_is_no_variables(params)
        if policy is not None:
            params = _cast_params(params, single_policy("TrainState.create", policy))
        state: Self = super().create(  # type: ignore[no-untyped-call]  # Flax's is not annotated
            apply_fn=apply_fn, params=params, tx=tx, **fields
        )
        the_scaler("TrainState.create", state.opt_state)
        _warn_without_masters(state.params, state.opt_state)
        started: Self = state.replace(step=jnp.zeros([], jnp.int32))
        return started

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool = False,  # noqa: FBT001, FBT002  # a step reads better so
        *,
        argnums: int | Sequence[int] = 0,
        skip_overflow: bool = False,
    ) -> Callable[..., tuple[Any, Any]]:
        """Makes a function that returns the loss and its gradients, for `apply_gradients`.

        It is `jaxmp.value_and_grad(loss_fn, self.opt_state, argnums, has_aux, ...)`: see there.
        """
        name = "TrainState.value_and_grad"
        state = the_scaler(name, self.opt_state)
        fn = scaled_value_and_grad(
            name, loss_fn, state, argnums, has_aux, skip_overflow=skip_overflow
        )
        return policies_checked(
            fn, name, has_scaler=state is not IDENTITY, skip_overflow=skip_overflow
        )

    def apply_gradients(self, *, grads: Any, **fields: Any) -> Self:
        """Makes a step; where the gradients are not finite, skips it as a whole.

        Args:
          grads: As `value_and_grad` returns them.
          **fields: New values of other fields, of the structure, shapes and dtypes of the old; and
            the further arguments of `tx.update` that optax's optimizers take: `value`, `grad`,
            `value_fn` and `obj_fn`.

        Returns:
          The new state.

        Raises:
          TypeError: If `grads` is not a container of arrays, there is no such field to set, or `tx`
            takes no further arguments.
          ValueError: If a new value has another structure than the field has now.
        """
        own = {"step", "params", "opt_state"}  # which the step itself makes
        names = sorted({field.name for field in dataclasses.fields(self)} - own)
        extra = {name: fields.pop(name) for name in _OF_UPDATE.difference(names) & fields.keys()}
        if unknown := [repr(name) for name in fields if name not in names]:
            raise TypeError(
                "TrainState.apply_gradients: takes grads, new values of the fields "
                f"{', '.join(names)}, and {', '.join(sorted(_OF_UPDATE))} for tx.update; got "
                f"{', '.join(unknown)}."
            )
        if extra and not isinstance(self.tx, optax.GradientTransformationExtraArgs):
            raise TypeError(
                f"TrainState.apply_gradients: {', '.join(sorted(extra))} would be ignored: no part "
                "of tx takes further arguments, as optax.contrib.reduce_on_plateau and optax.lbfgs "
                "do."
            )
        _check_container("TrainState.apply_gradients: grads", grads)
        if isinstance(grads, tuple) and isinstance(self.params, Mapping):
            raise TypeError(
                "TrainState.apply_gradients: grads is a tuple, and params are a mapping. "
                "value_and_grad returns a pair: loss, grads = ..."
            )
        name = "TrainState.apply_gradients"
        started = self.replace(tx=_with_arguments(self.tx, extra)) if extra else self
        with explained(name, self.tx, grads, self.opt_state, self.params):
            new: Self = train_state.TrainState.apply_gradients(started, grads=grads, **fields)
        new = new.replace(tx=self.tx)
        scaler = the_scaler("TrainState.apply_gradients", new.opt_state)
        if scaler is IDENTITY:
            return new
        finite = jnp.asarray(scaler.finite)
        nodes = {f.name for f in dataclasses.fields(new) if is_pytree_node(f)}
        kept = {
            name: _select_field(name, finite, getattr(new, name), getattr(self, name))
            for name in nodes & {"step", "params", *fields}
        }
        selected: Self = new.replace(**kept)
        return selected

    @property
    def loss_scale(self) -> jax.Array:
        """The factor that the next loss is multiplied by: float32[], 1 without a scaler."""
        return jnp.asarray(the_scaler("TrainState.loss_scale", self.opt_state).loss_scale)

    @property
    def skipped_count(self) -> jax.Array:
        """The number of steps skipped so far: int32[], 0 without a scaler."""
        return jnp.asarray(the_scaler("TrainState.skipped_count", self.opt_state).skipped_count)


def _with_arguments(
    tx: optax.GradientTransformationExtraArgs, extra: dict[str, Any]
) -> optax.GradientTransformation:
    """Returns an optimizer whose `update` has further arguments: Flax's train state has none."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return tx.update(grads, state, params, **extra)

    return optax.GradientTransformation(tx.init, update)


def _check_container(what: str, tree: Any) -> None:
    """Raises unless a tree is a container of keys: Flax's train state looks one up in it."""
    is_array = isinstance(tree, (jax.Array, np.ndarray))
    if is_array or not hasattr(type(tree), "__contains__"):
        raise TypeError(
            f"{what} must be a dict or the like of arrays; got {type(tree).__name__!r}. (An NNX or "
            "Equinox module is trained without a train state; docs/get_started.md shows the loop.)"
        )


def _check_is_no_variables(params: Any) -> None:
    """Raises for BatchNorm's averages, which the optimizer would silently move and decay."""
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys():
        raise ValueError(
            "TrainState.create: params is all that init returned: its 'batch_stats' are averages, "
            "which are not trained. Write variables = model.init(...), params=variables['params'], "
            "and keep batch_stats=variables['batch_stats'] in a field of a subclass."
        )


def _warn_without_masters(params: Any, opt_state: Any) -> None:
    """Warns if all parameters have 16 bits and no masters, so that small updates are lost."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")}
    kinds = (MasterWeightsState, RemainderState, StochasticRoundingState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    if not dtypes or dtypes - _16_BITS or any(isinstance(n, kinds) for n in nodes):
        return
    stored = " and ".join(sorted(dtype.name for dtype in dtypes))
    warnings.warn(
        f"TrainState.create: all parameters are {stored} and have no float32 masters: an update "
        "that is small compared with its weight is lost. A policy such as 'mixed_bfloat16' keeps "
        "them in float32; for parameters stored in 16 bits, tx=jaxmp.master_weights(tx).",
        UserWarning,
        stacklevel=3,
    )


def _cast_params(params: Any, policy: Policy) -> Any:
    # The values that float8 layers overwrite are scales and histories, not weights.
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_overwrite(path) else policy.cast_to_param(leaf), params
    )


def _select_field(name: str, finite: jax.Array, new: Any, old: Any) -> Any:
    got: Any = jax.tree.structure(new)
    had: Any = jax.tree.structure(old)
    if got != had:
        raise ValueError(
            f"TrainState.apply_gradients: {name} has another structure than before, so a skipped "
            f"step could not keep the old one: got {got}, had {had}. Give the first state such a "
            "value: TrainState.create(..., "
            f"{name}=...)."
        )
    return select(finite, new, old)
