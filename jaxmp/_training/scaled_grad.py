"""Functions for training steps: the scale in an optimizer's state, gradients of a scaled loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._training.checks import check_count
from jaxmp._training.differentiate import scaled, scaled_value_and_grad, unscaled
from jaxmp._training.opt_state import find_scaler, policies_checked
from jaxmp._training.replicas_equal import copies_in
from jaxmp._training.scale_rule import IDENTITY

__all__ = [
    "check_not_stuck",
    "loss_scale",
    "scale_loss",
    "skipped_count",
    "step_was_finite",
    "unscale",
    "value_and_grad",
]

# A sound run backs off at most 24 times in a row with the default bounds, from 2^24 to 1, and a few
# times more with hysteresis.
_STUCK_AFTER: Final = 50


def loss_scale(opt_state: Any) -> jax.Array:
    """Returns the factor that the next loss is to be multiplied by.

    Args:
      opt_state: An optimizer's state, or any pytree that holds one, such as a train state. Its
        `LossScaleState` is found by its type, at any depth.

    Returns:
      float32[]: 1 if there is no scaler.

    Raises:
      ValueError: If there are several scalers, or one is inside a wrapper of optax that hides or
        keeps an overflow, such as `optax.MultiSteps` or `optax.masked`.
      TypeError: If `opt_state` is not an optimizer's state and holds none: the optimizer itself,
        None, a function, parameters.

    Example:
      >>> import jaxmp, optax
      >>> optimizer = optax.chain(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))
      >>> float(jaxmp.loss_scaling.loss_scale(optimizer.init(jnp.ones(2))))
      65536.0
    """
    return jnp.asarray(find_scaler("loss_scale", opt_state).loss_scale)


def step_was_finite(opt_state: Any) -> jax.Array:
    """Tells whether the last step was applied: bool[], True before the first and without a scaler.

    Use it to skip other updates together with the step, such as BatchNorm averages:
    `jaxmp.tree.select(step_was_finite(opt_state), new, old)`. Without a scaler nothing is skipped,
    and infinities and NaNs go into the parameters, in bfloat16 and float32 too:
    `static_loss_scale(inner, 1.0)` skips such steps, and `monitor` detects them.

    Args:
      opt_state: As for `loss_scale`.

    Raises:
      ValueError, TypeError: As `loss_scale`.

    Example:
      >>> import jaxmp, optax
      >>> optimizer = jaxmp.dynamic_loss_scale(optax.adam(1e-3))
      >>> state = optimizer.init(jnp.ones(2))
      >>> _, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
      >>> bool(jaxmp.loss_scaling.step_was_finite(state))
      False
    """
    return jnp.asarray(find_scaler("step_was_finite", opt_state).finite)


def skipped_count(opt_state: Any) -> jax.Array:
    """Returns the number of steps that were skipped so far: int32[], 0 without a scaler.

    Args:
      opt_state: As for `loss_scale`.

    Raises:
      ValueError, TypeError: As `loss_scale`.

    Example:
      >>> import jaxmp, optax
      >>> optimizer = jaxmp.dynamic_loss_scale(optax.adam(1e-3))
      >>> state = optimizer.init(jnp.ones(2))
      >>> _, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
      >>> int(jaxmp.loss_scaling.skipped_count(state))
      1
    """
    return jnp.asarray(find_scaler("skipped_count", opt_state).skipped_count)


def check_not_stuck(opt_state: Any, limit: int = _STUCK_AFTER) -> None:
    """Raises once `limit` steps in a row were skipped, or devices no longer agree on the scale.

    Call it on the host now and then, outside jit: it waits for the state to be computed. A scale
    that is too large is halved a few times and training goes on; gradients that stay non-finite
    down to the smallest scale come from the model, the data or the learning rate. Parameters are
    as they were before the first of these steps.

    Under `jax.shard_map`, devices that each decide by gradients of their own which steps to skip
    (`axis_name=()`, or one of several mapped axes) drift apart, in their parameters too. This
    compares the scaler's state on the devices of this process;
    `jaxmp.testing.assert_replicas_equal` compares parameters, and
    `jax.experimental.multihost_utils.assert_equal(jaxmp.loss_scaling.loss_scale(opt_state))`
    processes.

    Args:
      opt_state: As for `loss_scale`; of several stacked states, the worst counts.
      limit: The least number of consecutive skipped steps to raise for. The default is about twice
        as many as it takes to fall from the largest default scale to the smallest.

    Raises:
      FloatingPointError: If the last `limit` steps or more were all skipped.
      ValueError: As `loss_scale`, or if `limit` is less than 1, or devices that are to hold the
        same scale and counters do not.
      TypeError: As `loss_scale`, or if it is called on traced values, under jit.

    Example:
      >>> import jaxmp, optax
      >>> optimizer = jaxmp.dynamic_loss_scale(optax.adam(1e-3), init_scale=1.0)
      >>> state = optimizer.init(jnp.ones(2))
      >>> _, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
      >>> jaxmp.loss_scaling.check_not_stuck(state)
      >>> jaxmp.loss_scaling.check_not_stuck(state, limit=1)
      Traceback (most recent call last):
      FloatingPointError: check_not_stuck: the last 1 steps were all skipped...
    """
    check_count("check_not_stuck", "limit", limit)
    state = find_scaler("check_not_stuck", opt_state)
    counts = jnp.asarray(state.consecutive_skipped_count)
    if is_tracer(counts):
        raise TypeError("check_not_stuck: reads values, so call it outside jit, on the new state.")
    drifted = [copies for copies in copies_in(state._replace(inner_state=None)) if copies.differ]
    if drifted:
        found = "; ".join(f"{copies.path.strip('.')} is {copies.values()}" for copies in drifted)
        raise ValueError(
            f"check_not_stuck: devices that are to hold one state of the scaler do not: {found}. "
            "Each has skipped steps by gradients of its own, so parameters differ as well. Leave "
            "axis_name out of dynamic_loss_scale, or name every mapped axis, and give `update` "
            "gradients that are averaged over devices; resume from a checkpoint where they agree."
        )
    if (count := int(jnp.max(counts))) >= limit:
        scale = float(jnp.min(jnp.asarray(state.loss_scale)))
        raise FloatingPointError(
            f"check_not_stuck: the last {count} steps were all skipped because gradients were not "
            f"finite; the loss scale is {scale:g} now. A smaller one does not help: the loss or "
            "its gradients are NaN or infinite by themselves (in float16 all that is beyond 65504, "
            "else the learning rate, a division or a logarithm of zero, a mask, the data). The "
            "parameters are those of the last finite step: on them and its batch, jaxmp.diagnose "
            "names the operation where it begins."
        )


def scale_loss(loss: jax.Array, opt_state: Any) -> jax.Array:
    """Multiplies a loss by the scale in an optimizer's state, in float32.

    For gradients that `value_and_grad` does not make, such as `equinox.filter_grad`'s:
    differentiate `lambda model: jaxmp.loss_scaling.scale_loss(loss_fn(model), opt_state)`, and
    divide the gradients by `jaxmp.loss_scaling.unscale(grads, opt_state)`. Log the loss before it
    is scaled.

    Args:
      loss: floating[], or any floating array. If it is float16, a warning says that its cotangent
        will be too.
      opt_state: As for `loss_scale`.

    Returns:
      float32 (float64 for a float64 loss), the loss's shape. Without a scaler the loss as it is.

    Raises:
      ValueError: As `loss_scale`.
      TypeError: As `loss_scale`, or if the loss is not a real and floating number.

    Example:
      >>> import jaxmp, optax
      >>> state = jaxmp.static_loss_scale(optax.adam(1e-3), 8.0).init(jnp.ones(2))
      >>> float(jaxmp.loss_scaling.scale_loss(jnp.float32(1.5), state))
      12.0
    """
    return scaled("scale_loss", loss, find_scaler("scale_loss", opt_state))


def unscale(grads: Any, opt_state: Any) -> Any:
    """Divides the gradients of a loss that `scale_loss` scaled by its scale.

    Elements that overflowed become NaN, which an elementwise clip keeps, unlike an infinity.

    Args:
      grads: A pytree of gradients, floating or complex. Other leaves, such as float0 and None, and
        those under Flax's `_overwrite_with_gradient`, stay as they are.
      opt_state: As for `loss_scale`; the one that the loss was scaled by.

    Returns:
      The gradients of the loss, in float32 where they had 16 bits. Without a scaler `grads`.

    Raises:
      ValueError, TypeError: As `loss_scale`.

    Example:
      >>> import jaxmp, optax
      >>> state = jaxmp.static_loss_scale(optax.sgd(0.1), 8.0).init(jnp.ones(2))
      >>> grads = jax.grad(lambda w: scale_loss(jnp.sum(w * w), state))(jnp.ones(2))
      >>> grads, unscale(grads, state)
      (Array([16., 16.], dtype=float32), Array([2., 2.], dtype=float32))
    """
    return unscaled(grads, find_scaler("unscale", opt_state))


def value_and_grad(
    fun: Callable[..., Any],
    opt_state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002  # as jax.value_and_grad has it
    *,
    skip_overflow: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns a loss and its gradients, through a scaled loss.

    It is `jax.value_and_grad`, but the loss is multiplied by the scale in `opt_state` before it is
    differentiated, and the gradients are divided by it, in float32: clip them, log them, average
    them, they are those of the loss. Where one overflowed it is NaN, and the scaler skips the step.
    Call it inside the jitted step, where `opt_state` is the current one.

    Where an argument to differentiate is a Flax NNX module, it is `flax.nnx.value_and_grad`:
    BatchNorm's averages and Dropout's keys move in the module, and the gradients are those of its
    `nnx.Param`s (or of the Variables that an `nnx.DiffState` in `argnums` selects), as
    `nnx.Optimizer.update` takes them.

    Args:
      fun: Returns a loss, floating[], or with `has_aux` a pair of it and anything.
      opt_state: As for `loss_scale`. Without a scaler this is `jax.value_and_grad`.
      argnums: The arguments to differentiate, as in JAX.
      has_aux: Whether `fun` returns a pair.
      skip_overflow: Whether to skip a step also where a value overflowed float16 in the forward
        pass and the infinity is gone from the loss, as in ``x / inf``, ``min(inf, 6)`` or
        ``tanh(inf)``: its gradients are NaN. It costs a pass over what float16 products return, and
        needs a scaler. Values without a derivative (an argmax) are not watched, nor are those
        inside a function with a `jax.custom_vjp`.

    Returns:
      A function of `fun`'s arguments: `(loss, grads)`, or `((loss, aux), grads)`. With a scaler the
      gradients of 16-bit parameters are float32.

    Raises:
      ValueError: As `loss_scale`, or with `skip_overflow` if there is no scaler.
      TypeError: As `loss_scale`, or if `fun` is not a function; when called, if the loss is not a
        real floating number, or an argument to differentiate has a leaf that is an integer, or not
        an array, as an Equinox module has.

    Example:
      >>> import jaxmp, optax
      >>> params = {"w": jnp.array([3.0, 3.0])}
      >>> state = jaxmp.static_loss_scale(optax.sgd(0.1), 8.0).init(params)
      >>> loss_fn = lambda params, x: jnp.sum(params["w"] * x)
      >>> jaxmp.value_and_grad(loss_fn, state)(params, jnp.ones(2))
      (Array(6., dtype=float32), {'w': Array([1., 1.], dtype=float32)})
    """
    state = find_scaler("value_and_grad", opt_state)
    fn = scaled_value_and_grad(
        "value_and_grad", fun, state, argnums, has_aux, skip_overflow=skip_overflow
    )
    return policies_checked(
        fn, "value_and_grad", has_scaler=state is not IDENTITY, skip_overflow=skip_overflow
    )
