"""Loss scaling as an optax transformation: test, update, select.

Small float16 gradients become zero, so the loss is multiplied by a large factor before it is
differentiated, and the gradients are divided by it: `scaled_grad` does both. The transformations
here hold that factor, adapt it, and skip a step whose gradients are not finite.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp._core.host_memory import is_on_host
from jaxmp._core.jaxprs.attributes import is_inexact, varying_axes
from jaxmp._core.jaxprs.scopes import TESTED
from jaxmp._training.checks import (
    as_transformation,
    check_floating,
    check_gradients,
    check_state,
    check_structure,
    update_inner,
)
from jaxmp._training.leaves import strong, widened
from jaxmp._training.opt_state import find_scalers, float16_in
from jaxmp._training.scale_rule import LossScaleState, ScaleRule, next_state, start_state
from jaxmp.policy import PolicyLike, PolicyMap, get_policy
from jaxmp.tree import all_finite, select, widen_floating

__all__ = ["dynamic_loss_scale", "loss_scale_for", "static_loss_scale"]

AxisName = Any  # what `jax.lax.pmin` takes: a hashable, or a tuple of them


def dynamic_loss_scale(
    inner: optax.GradientTransformation | None = None,
    *,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    refill: Literal["growth", "clean"] = "growth",
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer skip steps that overflow, and adapts the scale of the loss to them.

    Use it for float16; bfloat16 and float32 have the range to do without (`loss_scale_for`).
    Gradients come from `jaxmp.value_and_grad`, which scales the loss by the state and returns
    gradients of the loss itself. If every element of them is finite, `inner` updates. Otherwise the
    updates are exactly zero and `inner`'s state (moments, counts, schedules, noise keys) stays as
    it was: only the counters of `LossScaleState` move. After an overflow the scale is multiplied by
    `backoff_factor`; after `growth_interval` finite steps in a row by `growth_factor`. This is the
    rule of PyTorch's `GradScaler`, with bounds.

    Put transformations that keep something of a gradient *inside*: moments, averages,
    `optax.MultiSteps` (which then counts only finite microbatches). Around a scaler, or before it
    in a chain, they would keep an overflow forever: the functions that read the state
    (`jaxmp.loss_scaling.loss_scale` and the like) refuse that. Transformations that keep nothing,
    such as clipping and weight decay, may be on either side.

    `inner` sees parameters and gradients of 16 bits as float32, so its moments and the updates are
    float32; `optax.apply_updates` rounds to what parameters are stored as. Leaves that are `None`,
    `optax.MaskedNode` or float0 pass, and so do new values of float8 scales, under Flax's
    `_overwrite_with_gradient`.

    `hysteresis` is the number of overflows that it takes to back off, as in Megatron-LM and
    DeepSpeed. Above 1 the first ones leave the scale alone: each takes one off a counter, and the
    scale backs off while it stands at 1. Growth fills the counter again (`refill="growth"`), or
    every finite step does (`refill="clean"`, DeepSpeed's `consecutive_hysteresis`). With
    `hysteresis=2`, `growth_interval=3`:

    ```text
    step      (start) finite  overflow  finite  finite  overflow  finite finite finite overflow
    "growth"
    scale     8       8       8         8       8       4         4      4      8      8
    counter   2       2       1         1       1       1         1      1      2      1
    "clean"
    scale     8       8       8         8       8       8         8      8      16     16
    counter   2       2       1         2       2       1         2      2      2      1
    ```

    Args:
      inner: The optimizer. Without it, this is a link for `optax.chain` that only tests and
        zeroes: on a skipped step the links after it get zeros, and their moments decay and their
        counts go on as if those were gradients. Prefer `dynamic_loss_scale(optax.chain(...))`.
      init_scale: The first scale. Powers of two lose nothing in multiplying; others warn.
      growth_interval: Finite steps in a row after which the scale grows.
      growth_factor: The factor that it then grows by, above 1.
      backoff_factor: The factor that it is multiplied by after an overflow, between 0 and 1.
      min_scale: The scale never falls below it; `jaxmp.loss_scaling.check_not_stuck` raises if
        even that overflows.
      max_scale: The scale never rises above it.
      hysteresis: The number of overflows that it takes to back off.
      refill: When the hysteresis counter is filled again: on "growth", or on any "clean" step.
      axis_name: The mapped axes over which an overflow on one device counts on all: a name or a
        tuple of them; by default every axis that an enclosing `jax.shard_map` or `jax.pmap` maps,
        so that devices cannot drift apart. With `()` each device decides for itself, as an ensemble
        with a model on each needs.

    Returns:
      A transformation whose state is a `LossScaleState`.

    Raises:
      ValueError: If a number is out of its range, or `min_scale <= init_scale <= max_scale` does
        not hold; from `init`, if `inner` contains a scaler; from `update`, if the gradients are not
        of the parameters' structure, or `axis_name` is not bound.
      TypeError: If `inner` is not an optax transformation, or an argument is not a number; from
        `init` and `update`, if a parameter or a gradient is an integer.

    Example:
      >>> optimizer = dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0)
      >>> params = {"w": jnp.zeros(())}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.float32(0.5)}, state, params)
      >>> float(updates["w"]), float(state.loss_scale)
      (-0.5, 8.0)
      >>> updates, state = optimizer.update({"w": jnp.float32(jnp.nan)}, state, params)
      >>> float(updates["w"]), float(state.loss_scale), int(state.skipped_count)
      (0.0, 4.0, 1)
    """
    rule = ScaleRule(
        function="dynamic_loss_scale",
        init_scale=init_scale,
        min_scale=min_scale,
        max_scale=max_scale,
        growth_interval=growth_interval,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        hysteresis=hysteresis,
        refill=refill,
    )
    return _transformation(inner, rule, axis_name)


def static_loss_scale(
    inner: optax.GradientTransformation | None, scale: float, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer skip steps that overflow; the loss is multiplied by a constant.

    It is `dynamic_loss_scale` with a scale that never moves. The state is the same type, so a
    checkpoint of either restores into the other; the restored scale holds for one step.

    Args:
      inner: The optimizer, or None for a link of `optax.chain`.
      scale: The factor that the loss is multiplied by. Powers of two lose nothing; others warn.
      axis_name: As in `dynamic_loss_scale`.

    Returns:
      A transformation whose state is a `LossScaleState`.

    Raises:
      ValueError, TypeError: As `dynamic_loss_scale`.

    Example:
      >>> optimizer = static_loss_scale(optax.sgd(1.0), 128.0)
      >>> state = optimizer.init(jnp.zeros(2))
      >>> optimizer.update(jnp.array([0.5, jnp.inf]), state)[0]
      Array([0., 0.], dtype=float32)
    """
    rule = ScaleRule(
        function="static_loss_scale", init_scale=scale, min_scale=scale, max_scale=scale
    )
    return _transformation(inner, rule, axis_name)


def loss_scale_for(
    policy: PolicyLike,
    inner: optax.GradientTransformation | None,
    **options: Any,
) -> optax.GradientTransformation:
    """Wraps an optimizer in `dynamic_loss_scale` if the policy has float16 in it, and only then.

    The same training step serves every policy: the functions of `jaxmp` that read a state take one
    without a scaler for one whose scale is 1. With a scaler, gradients come from `value_and_grad`
    or `TrainState.value_and_grad`; with `jax.value_and_grad` nothing scales the loss, float16
    trains as it does without a scale, and `audit` says so.

    Args:
      policy: What `jaxmp.get_policy` takes.
      inner: The optimizer, or None for a link of `optax.chain`.
      **options: Those of `dynamic_loss_scale`.

    Returns:
      `dynamic_loss_scale(inner, **options)`, or `inner` itself.

    Example:
      >>> optimizer = optax.adam(1e-3)
      >>> loss_scale_for("mixed_bfloat16", optimizer) is optimizer
      True
      >>> type(loss_scale_for("mixed_float16", optimizer).init(jnp.ones(2))).__name__
      'LossScaleState'
    """
    if hasattr(policy, "init") and hasattr(policy, "update"):
        raise TypeError(
            "loss_scale_for: the policy comes first, and then the optimizer: "
            'loss_scale_for("mixed_float16", optax.adam(1e-3)).'
        )
    resolved = get_policy(policy)
    policies = [resolved]
    if isinstance(resolved, PolicyMap):
        policies = [resolved.default, *(override for _, override in resolved.overrides)]
    # The options are checked whatever the policy: a mistake must not wait for float16.
    scaled = dynamic_loss_scale(inner, **options)
    if float16_in(policies) is not None:
        return scaled
    return optax.identity() if inner is None else inner


def _transformation(
    inner: optax.GradientTransformation | None, rule: ScaleRule, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    wrapped = as_transformation(rule.function, optax.identity() if inner is None else inner)

    def init(params: optax.Params) -> LossScaleState:
        check_floating(rule.function, "the parameter", params, keys=True)
        inner_state = wrapped.init(widen_floating(params))
        if inside := find_scalers(inner_state):
            raise ValueError(
                f"{rule.function}: there is a loss scaler inside (at inner_state"
                f"{jax.tree_util.keystr(inside[0][0])}); a step has one loss scale. Keep "
                "one scaler."
            )
        if any(map(is_on_host, jax.tree.leaves(inner_state))):
            raise ValueError(
                f"{rule.function}: the optimizer inside keeps its state in host memory, where a "
                "skipped step is not undone; put the scaler inside: "
                "store_state(dynamic_loss_scale(inner), …, memory='pinned_host')."
            )
        return start_state(rule, jax.tree.map(strong, inner_state))

    def update(
        updates: optax.Updates,
        state: LossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaleState]:
        check_state(rule.function, state, LossScaleState)
        check_gradients(rule.function, updates)
        if params is not None:
            # optax.lookahead differentiates one of its two sets of parameters.
            fast = params.fast if isinstance(params, optax.LookaheadParams) else params
            check_structure(rule.function, updates, fast)
        grads = jax.tree_util.tree_map_with_path(widened, updates)
        # XLA on CPU would repeat the whole test inside every fusion that selects by it, unless the
        # flag is itself a result of the program: 240 leaves then take minutes to compile. (The
        # barrier helps from JAX 0.12 on; before, the flag in the returned state has to.)
        finite = lax.optimization_barrier(_finite_everywhere(rule.function, grads, axis_name))
        if "grad" in extra_args:  # which line searches take
            extra_args["grad"] = jax.tree_util.tree_map_with_path(widened, extra_args["grad"])
        full = widen_floating(params)
        updates, inner_state = update_inner(
            rule.function, wrapped, grads, state.inner_state, full, extra_args
        )
        updates = select(finite, updates, jax.tree.map(_zeros_like, updates))
        inner_state = select(finite, inner_state, state.inner_state)
        return updates, next_state(rule, state, finite)._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _finite_everywhere(function: str, grads: Any, axis_name: AxisName) -> jax.Array:
    with jax.named_scope(TESTED):
        finite = all_finite(grads)
    # The axes that JAX knows the flag varies over; without `check_vma` it knows none.
    varying = varying_axes(jax.typeof(finite))
    if axis_name is None:
        axes = tuple(varying or jax.sharding.get_abstract_mesh().manual_axes)
    else:
        axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        # JAX 0.12 reduces over both kinds of axes, but not at once.
        for kind in (True, False):
            if some := tuple(axis for axis in axes if (axis in varying) == kind):
                finite = lax.pmin(finite, some)
    except NameError as error:
        raise ValueError(
            f"{function}: axis_name={axis_name!r} is not bound where `update` is called ({error}). "
            "Call it inside the jax.shard_map or jax.vmap with that axis, or leave axis_name out: "
            "under jit alone, sharded gradients need none."
        ) from error
    return finite


def _zeros_like(leaf: Any) -> Any:
    return jnp.zeros_like(leaf) if is_inexact(leaf) else leaf
