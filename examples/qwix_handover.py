"""Hands a Flax model that jaxmp trained to Qwix: 8-bit activations after calibration, and QLoRA.

`jaxmp.quantize` stores weights in few bits and multiplies in 16. Qwix goes on from there
(https://github.com/google/qwix): activations in 8 bits whose scales are calibrated on data, and
adapters that it adds to a frozen 4-bit base by itself. A wrapped module has the variables of the
module itself, so nothing is converted: train `jaxmp.wrap(model, policy)`, and give `model` and its
parameters to Qwix.

    pip install --no-deps qwix opt_einsum absl-py
    python examples/qwix_handover.py

It trains a classifier of noisy points and prints its accuracy in float32, with `jaxmp.quantize`,
with Qwix after calibration, and, where the classes have other names, before and after the adapters
learnt those (Qwix 0.1.8, JAX 0.12):

    float32                                   accuracy  99.6%
    jaxmp.quantize, 4-bit weights             accuracy  99.7%
    Qwix, 8 bits, calibrated                  accuracy  99.6%
    Qwix, 4-bit base, other classes           accuracy   0.1%
      with adapters that learnt them          accuracy  98.8%
"""

from __future__ import annotations

import sys

from terminal import start, waiting

try:
    with waiting("importing JAX, Flax and Qwix", show=__name__ == "__main__"):
        import flax.linen as nn
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        import qwix

        import jaxmp
except ImportError as error:
    sys.exit(
        f"qwix_handover.py: {error}; needs Qwix: pip install --no-deps qwix opt_einsum absl-py"
    )

FEATURES, CLASSES = 64, 10


class Classifier(nn.Module):
    """A perceptron, written in float32."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(CLASSES)(x)


def data(seed: int, shift: int = 0) -> tuple[jax.Array, jax.Array]:
    """Points around one center for each class; `shift` renames the classes."""
    centers = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, 2048)
    points = centers[labels] + 1.5 * rng.normal(size=(2048, FEATURES))
    return jnp.asarray(points, jnp.float32), jnp.asarray((labels + shift) % CLASSES)


def accuracy(apply, variables, x, labels) -> float:
    return float(jnp.mean(jnp.argmax(apply(variables, x), -1) == labels))


def fit(loss, params, steps: int):
    """Adam on what `loss(params)` is differentiated by."""
    tx = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def trained():
    """The model, and its parameters, trained in mixed precision."""
    model, (x, labels) = Classifier(), data(1)
    fast = jaxmp.wrap(model, "mixed_bfloat16")
    params = fast.init(jax.random.key(0), x)["params"]
    return model, fit(lambda p: cross_entropy(fast.apply({"params": p}, x), labels), params, 60)


def calibrated(model, params):
    """Qwix's model with 8-bit weights and activations, whose scales are calibrated on data."""
    rules = [
        qwix.QuantizationRule(
            module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8, act_static_scale=True
        )
    ]
    # Fake quantization collects the statistics; the model that serves has them as scales.
    watching = qwix.quantize_model(model, qwix.QtProvider(rules))
    variables = {"params": params}
    for seed in range(2, 6):
        _, new = watching.apply(variables, data(seed)[0], mutable=["quant_stats"])
        variables = {"params": params, **new}
    serving = qwix.quantize_model(model, qwix.PtqProvider(rules))
    shapes = jax.eval_shape(serving.init, jax.random.key(0), data(2)[0])["params"]
    return serving, qwix.quantize_params(params, shapes, variables["quant_stats"])


def adapted(model, params):
    """Qwix's model, its weights in 4 bits, and adapters that learn other names of the classes."""
    x, labels = data(1, shift=3)
    rule = qwix.LoraRule(module_path=".*", weight_qtype=jnp.int4, tile_size=32, rank=8, alpha=8.0)
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider([rule]))
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    init = model.init(jax.random.key(1), x)["params"]
    base = qwix.quantize_params(params, shapes)

    def is_adapter(path):
        return "lora" in jax.tree_util.keystr(path)

    # The quantized base is no argument of what is differentiated.
    leaves = jax.tree_util.tree_leaves_with_path(init)
    adapters = {jax.tree_util.keystr(p): v for p, v in leaves if is_adapter(p)}

    def merged(adapters):
        def put(path, leaf):
            return adapters.get(jax.tree_util.keystr(path), leaf)

        return {"params": jax.tree_util.tree_map_with_path(put, with_base)}

    with_base = merge(init, base)
    before = merged(adapters)
    adapters = fit(lambda a: cross_entropy(model.apply(merged(a), x), labels), adapters, 200)
    return model, before, merged(adapters)


def merge(tree, base):
    """A tree with what `base` has of it in place of its own."""
    if not isinstance(tree, dict):
        return base
    return {k: merge(v, base[k]) if k in base else v for k, v in tree.items()}


def main() -> None:
    with waiting("training in mixed precision"):
        model, params = trained()
    x, labels = data(9)

    def show(what, share):
        print(f"{what:42s}accuracy {share:6.1%}")

    show("float32", accuracy(model.apply, {"params": params}, x, labels))
    small = jaxmp.quantize({"params": params}, "int4", min_size=1)
    show(
        "jaxmp.quantize, 4-bit weights",
        accuracy(jaxmp.wrap(model, "mixed_bfloat16").apply, small, x, labels),
    )
    with waiting("calibrating with Qwix"):
        serving, quantized = calibrated(model, params)
    show("Qwix, 8 bits, calibrated", accuracy(serving.apply, {"params": quantized}, x, labels))
    x, labels = data(9, shift=3)
    with waiting("training adapters with Qwix"):
        lora, before, after = adapted(model, params)
    show("Qwix, 4-bit base, other classes", accuracy(lora.apply, before, x, labels))
    show("  with adapters that learnt them", accuracy(lora.apply, after, x, labels))


if __name__ == "__main__":
    start(main)
