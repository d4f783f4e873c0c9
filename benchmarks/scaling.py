"""Why scales are taken from the values at hand, and not from those of earlier steps.

    python benchmarks/scaling.py

A stream of gradients [64, 256] of one distribution, but for two steps in which all of them are 30
and 30,000 times as large, is quantized to float8 step by step; both ways get the same values:

* current: the scale is that of this step's largest magnitude, as jaxmp takes it (`quantize`).
* delayed: the scale is that of the largest magnitude of the last 16 steps, this one not included,
  as in TransformerEngine's `DelayedScaling` and Flax's `fp8_ops`. What is beyond it saturates.

It prints the relative error of a step's values, in the norm: around the spikes, the worst, and the
mean. Under delayed scaling a spike saturates in the step that it comes in, nearly all of it; and
until it has left the history the scale is too coarse for the steps after it, which in e4m3 become
subnormal. Current scaling is as good in every step, and there is no state to keep, nor to lose.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.products.derivative import quantize
from jaxmp._core.products.scaled import dequantize
from jaxmp.recipes import FORMATS

STEPS, SPIKES, TIMES, HISTORY = 64, (24, 44), (30, 30_000), 16


def stream() -> np.ndarray:
    draw = np.random.default_rng(0)
    gradients = 1e-3 * draw.normal(size=(STEPS, 64, 256)).astype("f")
    for step, times in zip(SPIKES, TIMES, strict=True):
        gradients[step] *= times
    return gradients


def delayed(x: jax.Array, history: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """The scale of the largest magnitude seen before; 1 before anything was."""
    amax = history.max()
    scale = jnp.where(amax > 0, amax / largest, 1.0)
    values = jnp.clip(x / scale, -largest, largest)
    return scale, values


@jax.jit
def errors(gradients: jax.Array) -> dict[str, jax.Array]:
    """The error of each step by way and format."""

    def step(history, x):
        found = {}
        for short in ("e4m3", "e5m2"):
            fmt = FORMATS[short]
            found["current", short] = dequantize(quantize(x, fmt, (0, 1)))
            scale, values = delayed(x, history, fmt.largest)
            found["delayed", short] = values.astype(fmt.name).astype(jnp.float32) * scale
        norm = jnp.linalg.norm
        relative = {f"{how} {short}": norm(y - x) / norm(x) for (how, short), y in found.items()}
        return jnp.roll(history, 1).at[0].set(jnp.abs(x).max()), relative

    return jax.lax.scan(step, jnp.zeros(HISTORY), gradients)[1]


def main() -> None:
    found = {name: np.asarray(one) for name, one in errors(jnp.asarray(stream())).items()}
    names = list(found)
    print(f"JAX {jax.__version__}; spikes of {TIMES} at steps {SPIKES}, a history of {HISTORY}\n")
    print("| step | " + " | ".join(names) + " |\n| --: |" + " --: |" * len(names))
    first, second = SPIKES
    shown = [0, 1, first - 1, first, first + 1, first + HISTORY, first + HISTORY + 1]
    shown += [second, second + 1, second + HISTORY, second + HISTORY + 1]
    for step in shown:
        what = f"{step}, spike" if step in SPIKES else str(step)
        print(f"| {what} | " + " | ".join(f"{found[n][step]:.3f}" for n in names) + " |")
    settled = {name: one[2:] for name, one in found.items()}  # the first has no history
    print("| worst | " + " | ".join(f"{settled[n].max():.3f}" for n in names) + " |")
    print("| mean | " + " | ".join(f"{settled[n].mean():.3f}" for n in names) + " |")


if __name__ == "__main__":
    main()
