"""equimo's vision transformer, in Equinox: float32, under jmp's policy, and under jaxmp's.

    python examples/recipes/equimo_vit.py
    python examples/recipes/equimo_vit.py --epochs 1 --no-preflight  # a minute

A small one is trained on scikit-learn's digits; a ViT-S is compiled for a TPU v5e, which need not
be there. Nothing of equimo is changed.

    pip install equimo jmp scikit-learn
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from equimo.vision.models.vit import VisionTransformer
from shown import plot, print_compiled
from sklearn.datasets import load_digits

import jaxmp

SMALL: Final = {
    "img_size": 8,
    "patch_size": 2,
    "in_channels": 1,
    "num_classes": 10,
    "dim": 64,
    "num_heads": 4,
    "depths": [2],
}
LARGE: Final = {
    "img_size": 224,
    "patch_size": 16,
    "in_channels": 3,
    "num_classes": 1000,
    "dim": 384,
    "num_heads": 6,
    "depths": [12],
}
POLICY: Final = jmp.get_policy("params=float32,compute=bfloat16,output=float32")


def loss_fn(model: Any, images: Any, labels: Any, key: Any) -> Any:
    """The mean cross-entropy, in float32."""
    keys = jax.random.split(key, len(images))
    logits = jax.vmap(model)(images, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def jmp_loss(model: Any, images: Any, labels: Any, key: Any) -> Any:
    """The same as jmp has it: parameters and inputs are cast, and the logits."""
    model, images = POLICY.cast_to_compute((model, images))
    keys = jax.random.split(key, len(images))
    logits = POLICY.cast_to_output(jax.vmap(model)(images, keys))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


VARIANTS: Final[dict[str, Callable[..., Any]]] = {
    "float32": loss_fn,
    "jmp": jmp_loss,
    "jaxmp": jaxmp.autocast(loss_fn, "mixed_bfloat16"),
}
TX: Final = optax.adamw(1e-3)


def step_of(loss: Callable[..., Any], static: Any) -> Callable[..., Any]:
    """A training step, given the parts of the model that are no arrays."""

    def step(arrays: Any, state: Any, images: Any, labels: Any, key: Any) -> Any:
        def of_arrays(arrays: Any) -> Any:
            return loss(eqx.combine(arrays, static), images, labels, key)

        value, grads = jax.value_and_grad(of_arrays)(arrays)
        updates, state = TX.update(grads, state, arrays)
        return optax.apply_updates(arrays, updates), state, value

    return step


def train(loss: Callable[..., Any], epochs: int, seed: int) -> tuple[list[float], float]:
    """The mean loss of each epoch, and the accuracy on what was held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    key = jax.random.key(seed)
    arrays, static = eqx.partition(VisionTransformer(**SMALL, key=key), eqx.is_inexact_array)
    step, state, losses = jax.jit(step_of(loss, static)), TX.init(arrays), []
    draw = np.random.default_rng(seed)
    for epoch in range(epochs):
        order, total = draw.permutation(1500), 0.0
        for i in range(0, 1500 - 99, 100):
            batch = order[i : i + 100]
            key = jax.random.fold_in(key, epoch * 100 + i)
            arrays, state, value = step(arrays, state, images[batch], labels[batch], key)
            total += float(value)
        losses.append(total / 15)
    model = eqx.nn.inference_mode(eqx.combine(arrays, static))
    logits = jax.jit(jax.vmap(lambda x: model(x, key)))(images[1500:])
    return losses, float((np.argmax(logits, 1) == labels[1500:]).mean())


def compiled(loss: Callable[..., Any]) -> Any:
    """What the compiler of a TPU v5e says of a step of the large model, with a batch of 64."""
    shapes = eqx.filter_eval_shape(lambda: VisionTransformer(**LARGE, key=jax.random.key(0)))
    arrays, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    images = jax.ShapeDtypeStruct((64, 3, 224, 224), jnp.float32)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = jax.jit(step_of(loss, static), donate_argnums=(0, 1))
    state = jax.eval_shape(TX.init, arrays)
    return jaxmp.preflight(step, target="tpu-v5e")(arrays, state, images, labels, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preflight", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="a PNG file for the loss curves")
    args = parser.parse_args()
    curves: dict[str, list[Any]] = {}
    print("| policy  | seed | first loss | last loss | accuracy |")
    print("| :------ | ---: | ---------: | --------: | -------: |")
    for name, loss in VARIANTS.items():
        for seed in range(args.seeds):
            losses, accuracy = train(loss, args.epochs, seed)
            curves.setdefault(name, []).append(losses)
            row = f"| {name:7} | {seed:4} | {losses[0]:10.4f} | {losses[-1]:9.4f} "
            print(f"{row}| {accuracy:8.1%} |", flush=True)
    if args.plot:
        plot(curves, args.plot, x="epoch", log=True)
    if args.preflight:
        steps = {name: functools.partial(compiled, loss) for name, loss in VARIANTS.items()}
        print_compiled("a step on a TPU v5e", steps)


if __name__ == "__main__":
    main()
