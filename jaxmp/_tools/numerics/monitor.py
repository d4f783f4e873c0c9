"""`monitor`: statistics of gradients in the optimizer's state: norms, underflow, overflow."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._tools.numerics.monitor_statistics import MonitorStatistics, Paths, leaves_of, measure
from jaxmp._training.checks import as_transformation, check_count, check_is_state, check_state
from jaxmp._training.opt_state import find_scalers, the_scaler
from jaxmp._training.scale_rule import IDENTITY
from jaxmp.tree import select


class MonitorState(NamedTuple):
    """The state of `monitor`, whose arrays are strongly typed. `read_monitor` reads it.

    Attributes:
      step_count: int32[], steps so far, including those that a scaler skipped.
      nonfinite_count: int32[], the number of steps with a gradient that was not finite.
      nonfinite_step: int32[], the last of those, counted from 1; 0 if there was none.
      nonfinite_index: int32[], the first parameter whose gradient was not finite in that step.
      statistics_step: int32[], the step that `statistics` is of, likewise.
      statistics: float32[modules] each: norms, shares of underflow and of zeros.
      paths: The paths of the parameters, which are a part of the structure, not a leaf.
      inner_state: The state of the inner transformation.
    """

    step_count: jax.Array
    nonfinite_count: jax.Array
    nonfinite_step: jax.Array
    nonfinite_index: jax.Array
    statistics_step: jax.Array
    statistics: MonitorStatistics
    paths: Paths
    inner_state: optax.OptState


def monitor(
    inner: optax.GradientTransformation, *, every: int = 100
) -> optax.GradientTransformationExtraArgs:
    """Keeps statistics of a training run in the optimizer's state, and changes nothing else.

    The updates are `inner`'s, to the bit, and so is its state. `monitor` adds to the state, on the
    device and without ever waiting for it,

    * in every step: the first parameter (in the order of the tree) with a non-finite gradient in
      the last step with such gradients, and the number of that step;
    * in one step of `every`: the norm of the gradients, of each top-level module and in
      all; the share of *underflow*, of elements that are not 0, but would be 0 or subnormal in
      float16 at the scale of their loss; and the share of exact zeros. Zeros are rows
      that no token looked up, units that are off, and values that had underflowed before: in
      gradients that arrive in 16 bits, or in float16 cotangents on the way to them.

    `jaxmp.numerics.read_monitor(opt_state)` makes a dict of numbers for any logger. A rising share
    of underflow or of zeros means that the loss scale is too small; if the scale does not stop
    falling, look at the parameter.

    It goes *around* a loss scaler, whose scale it reads, and may be around or inside anything else:
    `jaxmp.master_weights`, `optax.chain`, `optax.MultiSteps` (it then sees the averages).
    Inside a scaler it would see neither skipped steps nor the scale; `read_monitor` raises for it.
    A skipped step updates `step_count` and the three fields on non-finite gradients; the statistics
    stay those of the last step that was measured.

    The sums over a gradient are computed in every step, and kept in one of `every`: XLA computes
    them in passes that exist anyway, and branches would cost more. That holds under `jax.vmap` too,
    where there are no branches. Sharded gradients are summed over all devices; under
    `jax.shard_map`, those that JAX knows to differ between devices count as parts of one array.
    If it does not know, with `check_vma=False` or `jax.pmap`, norms are root mean squares over
    the devices, which is right if all have the same gradients.

    Args:
      inner: The optimizer, with its loss scaler if it has one.
      every: The number of steps between those whose statistics are kept, from the first on. If one
        is skipped, the next takes its place.

    Returns:
      A transformation whose state is a `MonitorState`.

    Raises:
      ValueError: If `every` is less than 1; from `update`, if there is a gradient without a
        parameter.
      TypeError: If `inner` is not an optax transformation, or `every` not an integer; from
        `update`, if the state is not of a `monitor`.

    Example:
      >>> import jaxmp
      >>> optimizer = monitor(jaxmp.dynamic_loss_scale(optax.sgd(1.0), init_scale=8.0))
      >>> params = {"Dense_0": {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2))}}
      >>> state = optimizer.init(params)
      >>> grads = {"Dense_0": {"bias": jnp.full(2, 1e-6), "kernel": jnp.full((2, 2), 1/8)}}
      >>> _, state = optimizer.update(grads, state, params)
      >>> numbers = read_monitor(state)
      >>> numbers["grad_norm/Dense_0"], round(numbers["underflow/Dense_0"], 3)
      (0.25, 0.333)
      >>> grads["Dense_0"]["kernel"] = jnp.full((2, 2), jnp.inf)
      >>> _, state = optimizer.update(grads, state, params)
      >>> numbers = read_monitor(state)
      >>> numbers["nonfinite_parameter"], numbers["nonfinite_step"], numbers["loss_scale"]
      ('Dense_0/kernel', 2, 4.0)
    """
    check_count("monitor", "every", every)
    wrapped = as_transformation("monitor", inner)

    def init(params: optax.Params) -> MonitorState:
        inner_state = wrapped.init(params)
        the_scaler("monitor", inner_state)
        paths = Paths.of(params)
        count = len(paths.modules)
        # One array each: donated buffers must not be shared.
        return MonitorState(
            step_count=jnp.zeros([], jnp.int32),
            nonfinite_count=jnp.zeros([], jnp.int32),
            nonfinite_step=jnp.zeros([], jnp.int32),
            nonfinite_index=jnp.zeros([], jnp.int32),
            statistics_step=jnp.zeros([], jnp.int32),
            statistics=MonitorStatistics(*(jnp.zeros(count, jnp.float32) for _ in range(3))),
            paths=paths,
            inner_state=inner_state,
        )

    def update(
        updates: optax.Updates,
        state: MonitorState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MonitorState]:
        check_state("monitor", state, MonitorState)
        scaler = the_scaler("monitor", state.inner_state)
        scale = None if scaler is IDENTITY else scaler.loss_scale
        leaves = leaves_of(updates, state.paths)
        first, statistics = measure(leaves, state.paths, scale, state.step_count)
        moved = _next_state(state, int(every), first, statistics)
        updates, inner_state = wrapped.update(updates, state.inner_state, params, **extra_args)
        return updates, moved._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def read_monitor(opt_state: Any) -> dict[str, float | int | str]:
    """Reads the statistics of `monitor` as a flat dict of numbers, which any logger takes.

    Call it on the host now and then, outside jit: it waits for the state to be computed. With
    TensorBoard, for instance, through tensorboardX (or `clu.metric_writers`, whose
    `write_scalars(step, numbers)` takes them at once):

    ```python
    if step % 100 == 0:
        for name, value in jaxmp.numerics.read_monitor(state.opt_state).items():
            if not isinstance(value, str):
                writer.add_scalar(name, value, step)
    ```

    Args:
      opt_state: The optimizer's state, or any pytree that holds it, such as a train state. Its
        `MonitorState` is found by its type, at any depth. Of several stacked states, give one:
        `jax.tree.map(lambda x: x[0], opt_state)`.

    Returns:
      The same names every time. Steps are counted from 1, and 0 stands for none.

      * ``step_count``, ``nonfinite_count``: steps so far, and those with a gradient that was not
        finite; ``nonfinite_step``, ``nonfinite_parameter``: the last of these, and the path of the
        first such parameter in it, empty if there was none.
      * ``loss_scale``, ``skipped_count``: the scaler's; 1 and 0 without one.
      * ``statistics_step``: the step that the following are of; they are NaN before the first.
        ``grad_norm``: of all gradients; ``grad_norm/<module>``, ``underflow/<module>``,
        ``zeros/<module>`` for each top-level module of the parameters.

    Raises:
      ValueError: If there is no monitor, there are several, it is not around the loss scaler, or
        the state is of several stacked ones.
      TypeError: If `opt_state` is not an optimizer's state and holds none, or it is called on
        traced values, under jit.

    Example:
      >>> import jaxmp
      >>> optimizer = jaxmp.numerics.monitor(optax.adam(1e-3), every=10)
      >>> params = {"w": jnp.zeros(2)}
      >>> _, state = optimizer.update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
      >>> read_monitor(state)["grad_norm/w"], read_monitor(state)["zeros/w"]
      (5.0, 0.0)
    """
    state = _find(opt_state)
    scaler = the_scaler("read_monitor", opt_state)
    counts = [jnp.asarray(x) for x in state[:5]]
    shares = [jnp.asarray(x) for x in state.statistics]
    of_scaler = [jnp.asarray(x) for x in (scaler.loss_scale, scaler.skipped_count)]
    arrays = [*counts, *shares, *of_scaler]
    if any(map(is_tracer, arrays)):
        raise TypeError("read_monitor: reads values, so call it outside jit, on the new state.")
    if counts[0].ndim:
        raise ValueError(
            f"read_monitor: this is a stack of {counts[0].shape[0]} states; give one of them: "
            "jax.tree.map(lambda x: x[0], opt_state)."
        )
    *numbers, norms, underflow, zeros, scale, skipped = jax.device_get(arrays)
    step, nonfinite, nonfinite_step, index, statistics_step = map(int, numbers)
    if not statistics_step:
        norms, underflow, zeros = (np.full_like(x, math.nan) for x in (norms, underflow, zeros))
    read: dict[str, float | int | str] = {
        "step_count": step,
        "nonfinite_count": nonfinite,
        "nonfinite_step": nonfinite_step,
        "nonfinite_parameter": state.paths.names[index] if nonfinite_step else "",
        "loss_scale": float(scale),
        "skipped_count": int(skipped),
        "statistics_step": statistics_step,
        "grad_norm": math.sqrt(math.fsum(float(norm) ** 2 for norm in norms)),
    }
    for i, module in enumerate(state.paths.modules):
        read[f"grad_norm/{module}"] = float(norms[i])
        read[f"underflow/{module}"] = float(underflow[i])
        read[f"zeros/{module}"] = float(zeros[i])
    return read


def _next_state(
    state: MonitorState, every: int, first: jax.Array, statistics: MonitorStatistics
) -> MonitorState:
    """Returns the state after a step; `first` is the index of the first non-finite gradient."""
    step = optax.safe_increment(state.step_count)
    finite = first == len(state.paths.paths)
    due = (state.statistics_step == 0) | (step - state.statistics_step >= np.int32(every))
    kept = finite & due
    return state._replace(
        step_count=step,
        nonfinite_count=jnp.where(
            finite, state.nonfinite_count, optax.safe_increment(state.nonfinite_count)
        ),
        nonfinite_step=jnp.where(finite, state.nonfinite_step, step),
        nonfinite_index=jnp.where(finite, state.nonfinite_index, first),
        statistics_step=jnp.where(kept, step, state.statistics_step),
        statistics=select(kept, statistics, state.statistics),
    )


def _find(opt_state: Any) -> MonitorState:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: type(node) is MonitorState)
    found = [node for node in nodes if type(node) is MonitorState]
    if not found:
        check_is_state("read_monitor", opt_state)
    if len(found) != 1:
        raise ValueError(
            f"read_monitor: there are {len(found)} monitors in the state; it reads the one that "
            "jaxmp.numerics.monitor(optimizer) makes, around the whole optimizer."
        )
    if len(find_scalers(opt_state)) != len(find_scalers(found[0].inner_state)):
        raise ValueError(
            "read_monitor: the loss scaler is not inside the monitor, which therefore sees "
            "neither its scale nor its skipped steps. Write "
            "jaxmp.numerics.monitor(jaxmp.dynamic_loss_scale(...))."
        )
    return found[0]
