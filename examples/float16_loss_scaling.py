"""Trains a digit classifier whose gradients underflow in float16, with and without loss scaling.

The loss is multiplied by 1e-5, as one term among many may be, and the learning rate divided by it:
in float32 nothing changes. In float16 every gradient is below 6e-8, its smallest number, and so
becomes 0: the network does not train. `jaxmp.dynamic_loss_scale` around the optimizer scales the
loss, and the gradients survive; bfloat16, which has float32's range, needs no scaling.

    python examples/float16_loss_scaling.py

The scale starts far too large, to show the rule: the first steps overflow and are skipped, each
halving the scale, and later it grows until it overflows again. It draws
`float16_loss_scaling.png` and prints the loss after 200 updates of each:

    network                         loss   against float32   skipped
    float32                      0.00803                           0
    bfloat16                     0.00804            +0.03%         0
    float16                      2.34745       +29,117.16%         0
    float16, loss scaled         0.00803            -0.04%        13
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from terminal import CtrlC, check_file, start, stop, waiting

with waiting("importing JAX and scikit-learn", show=__name__ == "__main__"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from float16_report import Run, plot, report
    from sklearn.datasets import load_digits
    from tqdm import tqdm

    import jaxmp

LOSS_WEIGHT = 1e-5
LEARNING_RATE = 0.2 / LOSS_WEIGHT
WIDTHS = (64, 64, 64, 10)


def init_params(seed: int) -> dict[str, dict[str, jax.Array]]:
    key = jax.random.key(seed)
    params = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(WIDTHS)):
        key, layer_key = jax.random.split(key)
        w = jax.random.normal(layer_key, (n_in, n_out)) / np.sqrt(n_in)
        params[f"layer_{i}"] = {"w": w, "b": jnp.zeros(n_out)}
    return params


def network(params, x):
    """Pixels [batch, 64] to the logits of the ten digits."""
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def train(dtype: str, *, scaled: bool, updates: int, seed: int = 0) -> Run:
    """Makes `updates` updates, each on all the digits, with the network computed in `dtype`."""
    digits = load_digits()
    x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
    # The logits too are in `dtype`; the loss is computed from them in float32.
    low_network = jaxmp.autocast(network, f"params=float32,compute={dtype},output={dtype}")

    def loss_fn(params):
        logits = low_network(params, x).astype(jnp.float32)
        return LOSS_WEIGHT * optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tx = optax.sgd(LEARNING_RATE, momentum=0.9)
    if scaled:
        tx = jaxmp.dynamic_loss_scale(tx, init_scale=2.0**48, growth_interval=25, max_scale=2.0**60)
    state = jaxmp.TrainState.create(apply_fn=low_network, params=init_params(seed), tx=tx)

    @jax.jit
    def train_step(state):
        loss, grads = state.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss / LOSS_WEIGHT

    name = f"{dtype}, loss scaled" if scaled else dtype
    with waiting(f"{name}: compiling"):
        train_step = train_step.lower(state).compile()
    losses, scales, skipped = [], [], []
    with tqdm(desc=name, total=updates, unit=" updates") as bar, CtrlC() as ctrl_c:
        while state.step < updates and not ctrl_c.pressed:
            jaxmp.loss_scaling.check_not_stuck(state)
            scales.append(float(state.loss_scale))
            state, loss = train_step(state)
            losses.append(float(loss))
            skipped.append(not jaxmp.loss_scaling.step_was_finite(state))
            bar.update(not skipped[-1])
    if ctrl_c.pressed:
        stop(f"{name}: stopped at update {state.step} of {updates}; nothing is kept")
    return Run(losses, scales, skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=200, help="default: %(default)s")
    default = Path("float16_loss_scaling.png")
    parser.add_argument("--plot", type=Path, default=default, help="default: %(default)s")
    args = parser.parse_args()
    if args.updates < 1:
        parser.error("--updates must be at least 1")
    check_file(parser, "--plot", args.plot)

    runs = {
        "float32": train("float32", scaled=False, updates=args.updates),
        "bfloat16": train("bfloat16", scaled=False, updates=args.updates),
        "float16": train("float16", scaled=False, updates=args.updates),
        "float16, loss scaled": train("float16", scaled=True, updates=args.updates),
    }
    report(runs)
    plot(runs, args.plot)
    print(f"\nThe curves are in {args.plot}.")


if __name__ == "__main__":
    start(main)
