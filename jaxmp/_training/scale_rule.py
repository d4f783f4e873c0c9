"""The state of a loss scale, and the rule by which it moves, with its bounds."""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._training.checks import check_count

__all__ = ["IDENTITY", "LossScaleState", "ScaleRule", "next_state", "start_state"]

# Scales stay where both they and their reciprocals are normal float32 numbers: XLA flushes others
# to zero, and 1/2^127 would silently make every gradient zero.
_SMALLEST_SCALE: Final = 2.0**-126
_LARGEST_SCALE: Final = 2.0**126

_SCALES: Final = ("init_scale", "min_scale", "max_scale")

# The remedy for options that are arrays.
_INJECTED: Final = (
    " Hyperparameters are injected inside the scaler: "
    "dynamic_loss_scale(optax.inject_hyperparams(optax.adam)(learning_rate=...))."
)


class LossScaleState(NamedTuple):
    """The state of a loss-scaling transformation; its arrays are strongly typed.

    Attributes:
      loss_scale: float32[], the factor that the next loss is to be multiplied by.
      growth_count: int32[], finite steps since the scale last changed or a step was skipped.
      skipped_count: int32[], steps skipped so far.
      consecutive_skipped_count: int32[], steps skipped since the last one that was applied.
      hysteresis_count: int32[], the number of further overflows until the scale backs off.
      finite: bool[], whether the last step was applied.
      inner_state: The state of the transformation inside.

    Example:
      >>> import jaxmp
      >>> state = jaxmp.dynamic_loss_scale(optax.sgd(0.1)).init({"w": jnp.ones(2)})
      >>> float(state.loss_scale), int(state.skipped_count), bool(state.finite)
      (65536.0, 0, True)
    """

    loss_scale: jax.Array
    growth_count: jax.Array
    skipped_count: jax.Array
    consecutive_skipped_count: jax.Array
    hysteresis_count: jax.Array
    finite: jax.Array
    inner_state: optax.OptState


# The state that stands for no scaler: the loss is multiplied by 1, and no step is skipped.
# NumPy's numbers, because JAX's arrays would start a backend.
_NUMBERS: Final[Any] = (np.float32(1), *[np.int32(0)] * 4, np.True_, None)
IDENTITY: Final = LossScaleState(*_NUMBERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """The numbers by which a scale moves, as in `jaxmp.dynamic_loss_scale`; errors name `function`.

    `growth_interval` is None for a scale that never moves.
    """

    function: str
    init_scale: float
    min_scale: float
    max_scale: float
    growth_interval: int | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    refill: str = "growth"

    def __post_init__(self) -> None:
        factors = [*_SCALES, "growth_factor", "backoff_factor"]
        for field in factors:
            _check_number(self.function, self._argument(field), getattr(self, field))
        for field in _SCALES:
            why = "where it and its reciprocal are normal float32 numbers"
            self._check_range(field, _SMALLEST_SCALE, _LARGEST_SCALE, why)
        at_most = f"at most max_scale, {self.max_scale}"
        self._require("min_scale", at_most, self.min_scale <= self.max_scale)
        self._check_range(
            "init_scale", self.min_scale, self.max_scale, "its min_scale and max_scale"
        )
        self._require("growth_factor", "above 1", 1 < self.growth_factor < math.inf)
        self._require("backoff_factor", "between 0 and 1", 0 < self.backoff_factor < 1)
        self._require("refill", "'growth' or 'clean'", self.refill in ("growth", "clean"))
        for field in ("hysteresis", "growth_interval"):
            if (value := getattr(self, field)) is not None:
                hint = _INJECTED if isinstance(value, jax.Array) else ""
                check_count(self.function, field, value, hint)
        values = {self._argument(field): getattr(self, field) for field in factors}
        odd = [f"{name}={value}" for name, value in values.items() if math.frexp(value)[0] != 0.5]
        if odd:
            warnings.warn(
                f"{self.function}: {', '.join(odd)}: not a power of two, so multiplying and "
                "dividing by the scale rounds; a power of two loses nothing.",
                stacklevel=4,
            )

    def _argument(self, field: str) -> str:
        """Returns the caller's name of a field: a static scale is its own minimum and maximum."""
        return "scale" if self.growth_interval is None and field in _SCALES else field

    def _check_range(self, field: str, low: float, high: float, why: str) -> None:
        allowed = f"between {low:g} and {high:g}, {why}"
        self._require(field, allowed, low <= getattr(self, field) <= high)

    def _require(self, field: str, allowed: str, holds: bool) -> None:  # noqa: FBT001
        if not holds:
            raise ValueError(
                f"{self.function}: {self._argument(field)} must be {allowed}; got "
                f"{getattr(self, field)!r}."
            )


def start_state(rule: ScaleRule, inner_state: optax.OptState) -> LossScaleState:
    """Returns the state before the first step; no arrays are shared, so that it can be donated."""
    start: LossScaleState = jax.tree.map(jnp.array, IDENTITY)
    return start._replace(
        loss_scale=jnp.array(np.float32(rule.init_scale)),
        hysteresis_count=jnp.array(np.int32(rule.hysteresis)),
        inner_state=inner_state,
    )


def next_state(rule: ScaleRule, state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """Moves the scale and the counters; leaves `inner_state` as it is."""
    hysteresis_count = state.hysteresis_count
    backs_off = ~finite & (hysteresis_count <= 1)
    if rule.growth_interval is None:
        grows = jnp.zeros_like(finite)
        growth_count = jnp.zeros_like(state.growth_count)
    else:
        growth_count = state.growth_count + np.int32(1)
        grows = finite & (growth_count >= rule.growth_interval)
        growth_count = jnp.where(finite & ~grows, growth_count, np.int32(0))
    factor = jnp.where(backs_off, np.float32(rule.backoff_factor), np.float32(1))
    factor = jnp.where(grows, np.float32(rule.growth_factor), factor)
    scale = state.loss_scale * factor
    skipped = (~finite).astype(jnp.int32)
    hysteresis_count = jnp.maximum(hysteresis_count - skipped, np.int32(1))
    refills = finite if rule.refill == "clean" else grows
    consecutive = optax.safe_increment(state.consecutive_skipped_count)
    return LossScaleState(
        loss_scale=jnp.clip(scale, np.float32(rule.min_scale), np.float32(rule.max_scale)),
        growth_count=growth_count,
        skipped_count=jnp.where(
            finite, state.skipped_count, optax.safe_increment(state.skipped_count)
        ),
        consecutive_skipped_count=jnp.where(finite, np.int32(0), consecutive),
        hysteresis_count=jnp.where(refills, np.int32(rule.hysteresis), hysteresis_count),
        finite=finite,
        inner_state=state.inner_state,
    )


def _check_number(function: str, field: str, value: Any) -> None:
    concrete = isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0
    concrete = concrete and not is_tracer(value)
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or concrete):
        raise TypeError(
            f"{function}: {field} must be a number known when the optimizer is made; got {value!r} "
            f"of type {type(value).__name__!r}.{_INJECTED if isinstance(value, jax.Array) else ''}"
        )
