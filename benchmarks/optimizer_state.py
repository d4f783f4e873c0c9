"""Trains digits and a language model with an optimizer's state stored in float32, 16 and 8 bits.

    python benchmarks/optimizer_state.py
    python benchmarks/optimizer_state.py digits --optimizer adam --optimizer lion

`digits` is a perceptron 64-256-256-10 on scikit-learn's digits, 300 steps of 64 images, tested on
the half that is held out; `text` a transformer of two layers of width 64 on the bytes of Python's
standard library, 300 steps of 16 x 64, tested on every twentieth file; `words` the same on its
8,191 most frequent words, 800 steps of 8 x 32, with an embedding of its own. Three seeds, on CPU; a
minute, a quarter of an hour, an hour. It prints, of each optimizer and storage, the mean over the
seeds of the loss and the accuracy on what is held out, with half the spread of the seeds.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxmp

from transformer import TransformerLM

SEEDS, STEPS = 3, 300
SIZES = (64, 256, 256, 10)
LM = TransformerLM(width=64, heads=4, layers=2, seq=64, vocab=256)
WORDS = dataclasses.replace(LM, seq=32, vocab=8192, tied=False)
STORED = ("float32", "bfloat16", "int8", "float8_e4m3fn")
MUON = optax.contrib.muon(1e-3)
# Muon16 is Muon whose products are in bfloat16.
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, weight_decay=1e-2),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=10**6, momentum=0.9),
    "sgd": optax.sgd(5e-2, momentum=0.9),
    "muon": MUON,
    "muon16": optax.GradientTransformation(
        MUON.init, jaxmp.autocast(MUON.update, "mixed_bfloat16")
    ),
}


def stored(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    return tx if dtype == "float32" else jaxmp.store_state(tx, dtype)


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
      initial: parameters, from a key.
      outputs: of parameters and a batch of inputs, logits.
      train: the inputs and the labels to learn from.
      held_out: those to test on.
      batch: how many of them are a step's.
      steps: how many steps.
    """

    initial: Callable[[jax.Array], Any]
    outputs: Callable[[Any, jax.Array], jax.Array]
    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    batch: int
    steps: int = STEPS

    def loss(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = self.outputs(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def digits() -> Task:
    """A perceptron, and images of digits."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    x, held_x, y, held_y = train_test_split(images, labels, test_size=0.5, random_state=0)

    def outputs(params: Any, x: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    def initial(key: jax.Array) -> list[dict[str, jax.Array]]:
        keys = jax.random.split(key, len(SIZES) - 1)
        return [
            {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
            for k, m, n in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
        ]

    return Task(initial, outputs, (x, y), (held_x, held_y), 64)


def text() -> Task:
    """A transformer, and the bytes of Python's standard library."""
    learned, held_out = _sources()
    learned, held_out = (np.frombuffer(part.encode(), np.uint8) for part in (learned, held_out))
    return _language(LM, learned, held_out, batch=16)


def words() -> Task:
    """A transformer, and the words of Python's standard library: most of them are rare."""
    learned, held_out = (re.findall(r"\w+|\s+|[^\w\s]", part) for part in _sources())
    frequent = collections.Counter(learned).most_common(WORDS.vocab - 1)
    number = {word: i for i, (word, _) in enumerate(frequent, start=1)}  # 0 is any other
    learned, held_out = (np.array([number.get(w, 0) for w in p]) for p in (learned, held_out))
    return _language(WORDS, learned, held_out, batch=8, steps=800)


def _sources() -> tuple[str, str]:
    """Python's standard library, to learn from, and every twentieth file, to test on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    read = [file.read_bytes().decode("utf-8", "replace") for file in files]
    return "".join(text for i, text in enumerate(read) if i % 20), "".join(read[::20])


def _language(
    model: TransformerLM, learned: np.ndarray, held_out: np.ndarray, **options: int
) -> Task:
    """A model of the next token, of two sequences of tokens."""

    def windows(tokens: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        rows = tokens[: len(tokens) // (model.seq + 1) * (model.seq + 1)]
        rows = rows.reshape(-1, model.seq + 1)
        rows = rows[np.random.default_rng(0).permutation(len(rows))[:most]].astype(np.int32)
        return rows[:, :-1], rows[:, 1:]

    def initial(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, model.seq), jnp.int32))

    return Task(initial, model.apply, windows(learned, 20_000), windows(held_out, 256), **options)


TASKS = {"digits": digits, "text": text, "words": words}


def train(
    tx: optax.GradientTransformation, dtype: str = "float32", task: str = "digits"
) -> tuple[np.ndarray, np.ndarray]:
    """The held-out loss and accuracy of each seed; parameters are stored in a dtype."""
    of = TASKS[task]()
    x, y = map(jnp.asarray, of.train)

    def one(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        init_key, data_key = jax.random.split(jax.random.key(seed))
        params = jax.tree.map(lambda p: p.astype(dtype), of.initial(init_key))
        rows = jax.random.randint(data_key, (of.steps, of.batch), 0, len(x))

        def step(carry, rows):
            params, state = carry
            grads = jax.grad(of.loss)(params, x[rows], y[rows])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), rows)
        held_x, held_y = of.held_out
        right = of.outputs(params, held_x).argmax(-1) == held_y
        return of.loss(params, held_x, held_y), right.mean()

    loss, accuracy = jax.jit(jax.vmap(one))(jnp.arange(SEEDS))
    return np.asarray(loss), np.asarray(accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="*", help=f"by default, {' and '.join(TASKS)}")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS)
    args = parser.parse_args()
    for task in args.task or TASKS:
        print(f"{task:10}{'stored in':15}{'held-out loss':>18}{'accuracy':>20}")
        for name in args.optimizer or OPTIMIZERS:
            for dtype in STORED:
                loss, right = train(stored(OPTIMIZERS[name], dtype), task=task)
                print(
                    f"{name:10}{dtype:15}{loss.mean():9.4f} ± {np.ptp(loss) / 2:.4f}"
                    f"{100 * right.mean():11.2f} ± {100 * np.ptp(right) / 2:.2f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
