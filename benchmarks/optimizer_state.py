"""Trains scikit-learn's digits with an optimizer's state stored in float32, 16 and 8 bits.

    python benchmarks/optimizer_state.py

A perceptron 64-256-256-10, 300 steps of 64 images, three seeds, on CPU in two minutes. It prints,
of each optimizer and storage, the mean over the seeds of the loss and the accuracy on the half
that is held out, with half the spread of the seeds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxmp

SEEDS, STEPS, BATCH = 3, 300, 64
SIZES = (64, 256, 256, 10)
STORED = ("float32", "bfloat16", "int8", "float8_e4m3fn")
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, weight_decay=1e-2),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=10**6, momentum=0.9),
    "sgd": optax.sgd(5e-2, momentum=0.9),
}


def stored(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    return tx if dtype == "float32" else jaxmp.store_state(tx, dtype)


def digits() -> tuple[np.ndarray, ...]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return tuple(train_test_split(images, labels, test_size=0.5, random_state=0))


def logits(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def initial(key: jax.Array) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(SIZES) - 1)
    pairs = zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)} for k, m, n in pairs
    ]


def train(
    tx: optax.GradientTransformation, dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """The held-out loss and accuracy of each seed; parameters are stored in a dtype."""
    x, held_x, y, held_y = digits()

    def one(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        init_key, data_key = jax.random.split(jax.random.key(seed))
        params = jax.tree.map(lambda p: p.astype(dtype), initial(init_key))
        rows = jax.random.randint(data_key, (STEPS, BATCH), 0, len(x))

        def step(carry, rows):
            params, state = carry
            grads = jax.grad(loss_fn)(params, jnp.asarray(x)[rows], jnp.asarray(y)[rows])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), rows)
        right = logits(params, held_x).argmax(-1) == held_y
        return loss_fn(params, held_x, held_y), right.mean()

    loss, accuracy = jax.jit(jax.vmap(one))(jnp.arange(SEEDS))
    return np.asarray(loss), np.asarray(accuracy)


def main() -> None:
    print(f"{'':10}{'stored in':15}{'held-out loss':>18}{'accuracy':>20}")
    for name, tx in OPTIMIZERS.items():
        for dtype in STORED:
            loss, right = train(stored(tx, dtype))
            print(
                f"{name:10}{dtype:15}{loss.mean():9.4f} ± {np.ptp(loss) / 2:.4f}"
                f"{100 * right.mean():11.2f} ± {100 * np.ptp(right) / 2:.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
