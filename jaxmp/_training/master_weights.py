"""Training parameters that are stored in 16 bits: float32 masters, or stochastic rounding."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jaxmp._core.printable import show
from jaxmp._training.checks import as_transformation, check_arrays, check_state, update_inner
from jaxmp._training.host_state import in_memory
from jaxmp._training.leaves import check_key, first_key, next_key
from jaxmp._training.opt_state import the_scaler
from jaxmp.tree import (
    join_float32,
    keys_of,
    round_at_random,
    select,
    split_float32,
    widen_floating,
)

__all__ = ["MasterWeightsState", "RemainderState", "StochasticRoundingState", "master_weights"]

T = TypeVar("T")


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      masters: The parameters' structure: a float32 copy of each 16-bit leaf, and an
        `optax.MaskedNode`, which is not a leaf, in the place of every other one.
      inner_state: The state of the inner transformation, initialized on float32 parameters.
    """

    masters: Any
    inner_state: Any


class RemainderState(NamedTuple):
    """State of `master_weights` with remainders.

    Attributes:
      remainders: The parameters' structure: for each bfloat16 leaf a uint16 array, the low half of
        the master's bits, and an `optax.MaskedNode` in the place of every other one.
      inner_state: The state of the inner transformation, initialized on float32 parameters.
    """

    remainders: Any
    inner_state: Any

    def masters(self, params: Any) -> Any:
        """Returns the parameters in float32: those of 16 bits joined with their remainders."""
        return jax.tree.map(_joined, params, self.remainders)


class StochasticRoundingState(NamedTuple):
    """State of `master_weights` with stochastic rounding.

    Attributes:
      key: The data of the PRNG key of the next step, uint32[2].
      inner_state: The state of the inner transformation, initialized on float32 parameters.
    """

    key: jax.Array
    inner_state: Any


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    stochastic_rounding: bool = False,
    remainder: bool = False,
    key: ArrayLike = 0,
    memory: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer train parameters that are stored in bfloat16 or float16.

    Updates that are small compared with a 16-bit parameter are lost when they are added to it: Adam
    with a learning rate of 1e-3 never moves a bfloat16 1.0, whose neighbor is 0.0039 away. Here
    `inner` sees float32 gradients and float32 parameters, so its moments are float32 as well, and

    * by default a float32 copy of the parameters (the masters) is in the optimizer state, and
      `optax.apply_updates` stores exactly `masters.astype(param.dtype)` at every step (zeros may
      differ in sign). A parameter that its master does not round to has been replaced, by a
      pretrained one, an average or a clipped one: the master is then the parameter, element by
      element, which reads nothing that a step does not read anyway;
    * with `remainder` the state has only the 16 bits of a master that its bfloat16 parameter lacks
      (`jaxmp.tree.split_float32`): 4 bytes a parameter and not 6, and masters that are to the bit
      those of float32 training. `state.masters(params)` returns them;
    * with `stochastic_rounding` there is no copy: the updated value is rounded to one of its two
      neighbors at random, with the probabilities that make the expectation right. That costs no
      memory, but adds noise.

    Leaves that are not of 16 bits have no copy and are updated as `inner` says. Apply the updates,
    which are float32, with `optax.apply_updates`: it adds in float32 and casts to the parameter's
    dtype. Nothing may change them on the way, so this is the outermost transformation; a loss
    scaler goes inside, `master_weights(dynamic_loss_scale(inner))`, and a step that it skips leaves
    masters, parameters and key as they are.

    A finite value that the parameter's dtype cannot hold becomes the largest that it can, never an
    infinity; infinities and NaNs are kept. Masters are those of float32 training to within a
    rounding of float32, below 1.2e-38 to within what the processor does with such numbers.

    Args:
      inner: The optimizer.
      stochastic_rounding: Round at random instead of keeping masters.
      remainder: Keep remainders instead of masters; parameters of 16 bits must be bfloat16.
      key: PRNG key, or the seed of one, for the rounding.
      memory: As of `store_state`: "pinned_host" keeps masters, and the state of `inner`, on the
        host.

    Returns:
      A transformation whose state is a `MasterWeightsState`, a `RemainderState` or a
      `StochasticRoundingState`; its `update` needs the parameters.

    Raises:
      TypeError: If `inner` is not an optax transformation.
      ValueError: If both kinds are asked for, or `memory` is unknown; from `init`, with
        `remainder`, if a parameter is float16; from `update`, if the parameters are not given.

    Warns:
      UserWarning: From `init`, if no parameter has 16 bits: then there is nothing to do.

    Example:
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> tx = master_weights(optax.adam(1e-3))
      >>> state = tx.init(params)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jnp.ones(3, jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params.dtype, params[0], f"{state.masters[0]:.3f}")
      bfloat16 0.996094 0.995

    References:
      Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740 (masters); Zamirai et al., 2020,
      https://arxiv.org/abs/2010.06192 (stochastic rounding).
    """
    wrapped = as_transformation("master_weights", inner)
    kind = _kind(stochastic_rounding, remainder)
    check_key("master_weights", key)
    if not stochastic_rounding and not (isinstance(key, int) and key == 0):
        raise ValueError(
            "master_weights: key is for stochastic_rounding=True, and masters need none; leave it "
            "out."
        )

    def init(params: Any) -> MasterWeightsState | RemainderState | StochasticRoundingState:
        check_arrays("master_weights", "the parameter", params)
        _warn_if_useless(params)
        full = widen_floating(params)
        inner_state = wrapped.init(full)
        if remainder:
            _check_bfloat16(params)
            return RemainderState(jax.tree.map(_no_remainder, params), inner_state)
        if not stochastic_rounding:
            return MasterWeightsState(_masters(params, full), inner_state)
        return StochasticRoundingState(first_key(key), inner_state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MasterWeightsState | RemainderState | StochasticRoundingState]:
        check_state("master_weights", state, kind)
        if params is None:
            raise ValueError(
                "master_weights: update needs the parameters that it updates; "
                "call tx.update(grads, state, params)."
            )
        _check_replaced(params, state)
        full = _in_float32(params, state)
        grads = widen_floating(updates)
        updates, inner_state = update_inner(
            "master_weights", wrapped, grads, state.inner_state, full, extra_args
        )
        full = optax.apply_updates(full, updates)
        if stochastic_rounding:
            following, now = next_key(state.key)
            full = jax.tree.map(_rounded, params, full, keys_of(params, now))
            finite = the_scaler("master_weights", inner_state).finite
            following = select(finite, following, state.key)
        else:
            full = jax.tree.map(_within_range, params, full)
        masters = full
        if remainder:
            full = jax.tree.map(_rounded_half, params, masters)
        updates = jax.tree.map(
            lambda p, f, u: _step(p, f) if _has_16_bits(p) else u, params, full, updates
        )
        if stochastic_rounding:
            return updates, StochasticRoundingState(following, inner_state)
        if remainder:
            stored = optax.apply_updates(params, updates)
            return updates, RemainderState(jax.tree.map(_remainder, stored, masters), inner_state)
        # The sum that `optax.apply_updates` computes before it casts, so that it stores the cast of
        # the masters even where the step was rounded. That is seldom so: float32 holds the
        # difference of a 16-bit number and one near it, or a sum of near opposites.
        full = optax.apply_updates(widen_floating(params), updates)
        return updates, MasterWeightsState(_masters(params, full), inner_state)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return in_memory("master_weights", tx, memory)


def _kind(stochastic_rounding: bool, remainder: bool) -> type:  # noqa: FBT001
    for name, flag in {"stochastic_rounding": stochastic_rounding, "remainder": remainder}.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"master_weights: {name} must be True or False; got {flag!r}.")
    if stochastic_rounding and remainder:
        raise ValueError(
            "master_weights: stochastic_rounding keeps no masters, and remainder keeps them "
            "exactly; choose one."
        )
    if remainder:
        return RemainderState
    return StochasticRoundingState if stochastic_rounding else MasterWeightsState


def _in_float32(params: Any, state: Any) -> Any:
    full = widen_floating(params)
    if isinstance(state, RemainderState):
        return state.masters(params)
    if isinstance(state, MasterWeightsState):
        return jax.tree.map(
            lambda p, f, m: _current(p, f, m) if _has_16_bits(p) else f, params, full, state.masters
        )
    return full


def _current(param: Any, full: jax.Array, master: jax.Array) -> jax.Array:
    """Returns the master; the parameter, in float32, where the master does not round to it."""
    # By the bits: XLA may compare what has not been rounded.
    stored, expected = (
        lax.bitcast_convert_type(x, jnp.uint16) for x in (param, master.astype(param.dtype))
    )
    both_zero = (stored | expected) & 0x7FFF == 0
    both_nan = (full != full) & (master != master)  # noqa: PLR0124
    return jnp.where((stored == expected) | both_zero | both_nan, master, full)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _check_replaced(params: Any, state: Any) -> None:
    """Raises if parameters have other dtypes or shapes than those that the state is of."""
    copies = getattr(state, "remainders", getattr(state, "masters", None))
    if copies is None:
        return
    copied = dict(jax.tree_util.tree_leaves_with_path(copies, is_leaf=_is_masked))
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        copy = copied.get(path)
        shape = None if copy is None or _is_masked(copy) else np.shape(copy)
        if _has_16_bits(param) == (shape is not None) and shape in (None, np.shape(param)):
            continue
        was = f"a 16-bit one of shape {shape}" if shape is not None else "not one of 16 bits"
        raise ValueError(
            f"master_weights: the parameter at {show(path)} is {getattr(param, 'dtype', None)} of "
            f"shape {np.shape(param)}, and was {was} at init: give the replaced parameters the "
            "dtypes and shapes of those before, or call init again."
        )


def _warn_if_useless(params: Any) -> None:
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(_has_16_bits, leaves)):
        warnings.warn(
            "master_weights: no parameter has 16 bits, so it changes nothing. Inside a loss scaler "
            "all parameters are float32: write master_weights(dynamic_loss_scale(inner)).",
            stacklevel=3,
        )


def _has_16_bits(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return is_array and leaf.dtype in (jnp.bfloat16, jnp.float16)


def _masters(params: Any, full: Any) -> Any:
    return jax.tree.map(lambda p, f: f if _has_16_bits(p) else optax.MaskedNode(), params, full)


def _check_bfloat16(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if getattr(leaf, "dtype", None) == jnp.float16:
            raise ValueError(
                f"master_weights: the parameter at {show(path)} is float16, which is not half of a "
                "float32; with remainder=True store it in bfloat16, or leave remainder out."
            )


def _no_remainder(param: Any) -> Any:
    return jnp.zeros_like(param, jnp.uint16) if _has_16_bits(param) else optax.MaskedNode()


def _rounded_half(param: Any, master: jax.Array) -> jax.Array:
    return split_float32(master)[0].astype(jnp.float32) if _has_16_bits(param) else master


def _remainder(stored: Any, master: jax.Array) -> Any:
    """Returns the master's remainder; 0 where float32 updates reach only a neighbor of its half."""
    if not _has_16_bits(stored):
        return optax.MaskedNode()
    half, remainder = split_float32(master)
    bits, reached = (lax.bitcast_convert_type(x, jnp.uint16) for x in (half, stored))
    return jnp.where(bits == reached, remainder, jnp.uint16(0))


def _joined(param: Any, remainder: Any) -> Any:
    if not _has_16_bits(param):
        return param
    # Infinities have no remainder, and no number that is rounded up becomes 0: it was replaced.
    magnitude = lax.bitcast_convert_type(param, jnp.uint16) & 0x7FFF
    is_of_another = (magnitude == 0x7F80) | ((magnitude == 0) & (remainder > 0x8000))
    return join_float32(param, jnp.where(is_of_another, jnp.uint16(0), remainder))


def _rounded(param: Any, value: Any, key: jax.Array) -> Any:
    if not _has_16_bits(param):
        return value
    return round_at_random(value, param.dtype, jax.random.bits(key, value.shape, jnp.uint32))


def _within_range(param: Any, master: jax.Array) -> jax.Array:
    """Clips the master to the parameter dtype's finite range; infinities and NaNs stay."""
    if not _has_16_bits(param):
        return master
    limit = jnp.asarray(jnp.finfo(param.dtype).max, jnp.float32)
    return jnp.where(jnp.isfinite(master), jnp.clip(master, -limit, limit), master)


def _step(param: Any, target: jax.Array) -> jax.Array:
    """Returns the float32 update that takes `param` to `target`, or within a rounding of it."""
    stored = param.astype(jnp.float32)
    return jnp.where(stored == target, 0.0, target - stored)  # infinity - infinity is NaN
