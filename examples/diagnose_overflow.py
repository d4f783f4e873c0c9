"""Finds the layer of a Linen model that overflows in float16, and fixes it.

The model sees the spectra of short sounds: its layer `power` squares numbers of some hundreds, and
float16 ends at 65,504. The loss is NaN, and nothing says why. `jaxmp.diagnose` does; a policy that
leaves this one layer in float32 fixes it.

    python examples/diagnose_overflow.py

It prints all of that, and draws the pictures `exponents.png` and `underflow.png` of the fixed
model: its gradients are small, and a loss scale is what keeps them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from terminal import start, waiting

with waiting("importing JAX and Flax", show=__name__ == "__main__"):
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    import jaxmp


class Power(nn.Module):
    """Adds up the power in bands of a spectrum."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, use_bias=False, name="bands")(x**2)


class Sounds(nn.Module):
    """Which of ten sounds a spectrum float32[batch, 64] is of."""

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(64, name="filters")(x))
        h = Power(name="power")(h)
        h = jnp.tanh(nn.LayerNorm(name="norm")(h))
        return nn.Dense(10, name="head")(h)


def loss_of(model):
    def loss_fn(params, x, y):
        logits = model.apply({"params": params}, x)
        # One term among many: its weight makes its gradients small.
        return 1e-3 * optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss_fn


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="where to write files")
    folder = parser.parse_args().out
    if not folder.is_dir():
        parser.error(f"--out: there is no folder {folder}")

    with waiting("making the data and the model"):
        key = jax.random.key(0)
        x = 90 * jax.random.normal(jax.random.fold_in(key, 0), (32, 64))
        y = jax.random.randint(jax.random.fold_in(key, 1), (32,), 0, 10)
        params = Sounds().init(jax.random.fold_in(key, 2), x)["params"]

    heading("float16")
    with waiting("running it, and measuring every number"):
        half = jaxmp.diagnose(loss_of(Sounds()), "mixed_float16")(params, x, y)
    print(half)

    heading("float16, but for the layer that overflows")
    policy = jaxmp.PolicyMap({"power": "float32"}, default="mixed_float16")
    with waiting("running it under the other policy"):
        fixed = jaxmp.diagnose(loss_of(jaxmp.wrap(Sounds(), policy)), None)(params, x, y)
    print(fixed)
    with waiting("drawing"):
        fixed.plot_exponents(folder / "exponents.png")
        fixed.plot_underflow(folder / "underflow.png")


if __name__ == "__main__":
    start(main)
