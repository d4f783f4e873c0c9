"""bonsai's vision transformer, in Flax NNX: fine-tuned in float32, bfloat16 and float16.

    python examples/recipes/nnx_vit.py
    BONSAI=path/to/bonsai python examples/recipes/nnx_vit.py --epochs 1 --no-preflight

`BONSAI` is a checkout of github.com/jax-ml/bonsai, which has no package of its own; by default
`bonsai` in this folder. docs/recipes/nnx.md names the commit. A small model is trained on half of
scikit-learn's digits in float32, and fine-tuned on all of them with a new classifier. ViT-B/16 is
compiled for a TPU v5e, which need not be there. Nothing of bonsai is changed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.environ.get("BONSAI", "bonsai"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bonsai.models.vit.modeling import ModelConfig, ViTClassificationModel
from flax import nnx
from shown import plot, print_compiled
from sklearn.datasets import load_digits

import jaxmp

POLICIES: Final = ("float32", "mixed_bfloat16", "mixed_float16")
SMALL: Final = ModelConfig(
    image_size=(8, 8),
    patch_size=(2, 2),
    num_channels=1,
    hidden_dim=64,
    attn_dropout_prob=0.0,
    dropout_prob=0.1,
    num_heads=4,
    mlp_dim=128,
    eps=1e-6,
    num_layers=3,
    num_labels=10,
)


def loss_fn(net: Any, images: Any, labels: Any, rngs: nnx.Rngs | None) -> Any:
    """The mean cross-entropy."""
    logits = net(images, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(net: Any, optimizer: nnx.Optimizer, images: Any, labels: Any, rngs: nnx.Rngs) -> Any:
    """Updates the model and the optimizer; returns the loss."""
    grad_fn = jaxmp.value_and_grad(loss_fn, optimizer.opt_state)
    loss, grads = grad_fn(net, images, labels, rngs)
    optimizer.update(net, grads)
    return loss


def fit(net: Any, policy: str, images: Any, labels: Any, epochs: int) -> tuple[Any, list[float]]:
    """Trains a model under a policy; returns it, and the mean loss of each epoch."""
    net, tx = jaxmp.prepare(net, optax.adamw(1e-3), policy)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    draw, rngs, losses = np.random.default_rng(0), nnx.Rngs(0), []
    for _ in range(epochs):
        order = draw.permutation(len(labels))
        batches = [order[i : i + 50] for i in range(0, len(order) - 49, 50)]
        steps = [train_step(net, optimizer, images[b], labels[b], rngs) for b in batches]
        losses.append(float(np.mean(jax.device_get(steps))))
    return net, losses


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images of 8 x 8 and their labels."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels.astype(np.int32)


def compiled(policy: str) -> Any:
    """What the compiler of a TPU v5e says of a step of ViT-B/16 with a batch of 64."""
    config = ModelConfig.vit_p16_224()
    tx = optax.adamw(1e-3)

    def make() -> Any:
        net, scaled = jaxmp.prepare(ViTClassificationModel(config, rngs=nnx.Rngs(0)), tx, policy)
        return net, nnx.Optimizer(net, scaled, wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state: Any, images: Any, labels: Any) -> Any:
        net, optimizer = nnx.merge(graph, state)
        grad_fn = jaxmp.value_and_grad(loss_fn, optimizer.opt_state)
        loss, grads = grad_fn(net, images, labels, nnx.Rngs(0))
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), loss

    images = jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    program = jax.jit(step, donate_argnums=0)
    return jaxmp.preflight(program, target="tpu-v5e")(state, images, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--preflight", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="a PNG file for the loss curves")
    args = parser.parse_args()
    images, labels = digits()
    half = np.flatnonzero(labels < 5)
    base = ViTClassificationModel(SMALL, rngs=nnx.Rngs(0))
    # The wrapped model shares its Variables with the one it is made of.
    _, losses = fit(base, "float32", images[half], labels[half], args.epochs)
    print(
        f"ViT learns the digits below 5 in float32: loss {losses[0]:.3f}, then {losses[-1]:.4f}\n"
    )
    print("| fine-tuned in  | first loss | last loss | accuracy | audit |")
    print("| :------------- | ---------: | --------: | -------: | :---- |")
    curves = {}
    for policy in POLICIES:
        net = nnx.clone(base)
        net.classifier = nnx.Linear(SMALL.hidden_dim, SMALL.num_labels, rngs=nnx.Rngs(1))
        net, losses = fit(net, policy, images[:1500], labels[:1500], args.epochs)
        curves[policy] = losses
        report = jaxmp.audit(nnx.grad(loss_fn))(net, images[:50], labels[:50], nnx.Rngs(0))
        net.eval()
        right = np.argmax(net(images[1500:], rngs=None), 1) == labels[1500:]
        row = f"| {policy:14} | {losses[0]:10.4f} | {losses[-1]:9.4f} | {right.mean():8.1%} "
        print(f"{row}| {report.verdict()} |", flush=True)
    if args.plot:
        plot(curves, args.plot, x="epoch", log=True)
    if args.preflight:
        steps = {policy: functools.partial(compiled, policy) for policy in POLICIES[:2]}
        print_compiled("a step of ViT-B on a TPU v5e", steps)


if __name__ == "__main__":
    main()
