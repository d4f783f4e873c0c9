"""Hands a Flax model that jaxmp trained to Qwix: 8-bit activations after calibration, and QLoRA.

`jaxmp.quantize` stores weights in few bits and multiplies in 16. Qwix (https://github.com/google/qwix)
continues from there: 8-bit activations with calibrated scales, and adapters on a frozen 4-bit base.
A wrapped module has the variables of the original, so nothing is converted.

    pip install --no-deps qwix opt_einsum absl-py
    python examples/qwix_handover.py

It trains a classifier of noisy points and prints its accuracy (Qwix 0.1.8, JAX 0.12):

    float32                                   accuracy  99.6%
    jaxmp.quantize, 4-bit weights             accuracy  99.7%
    Qwix, 8 bits, calibrated                  accuracy  99.6%
    Qwix, 4-bit base, other classes           accuracy   0.1%
      with adapters that learned them         accuracy  98.8%
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
        from flax.traverse_util import flatten_dict, unflatten_dict

        import jaxmp
except ImportError as error:
    how = "pip install --no-deps qwix opt_einsum absl-py"
    sys.exit(f"qwix_handover.py: {error}; needs Qwix: {how}")

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
    """Returns the model, and its parameters, trained in mixed precision."""
    model, (x, labels) = Classifier(), data(1)
    fast = jaxmp.wrap(model, "mixed_bfloat16")
    params = fast.init(jax.random.key(0), x)["params"]
    return model, fit(lambda p: cross_entropy(fast.apply({"params": p}, x), labels), params, 60)


def calibrated(model, params):
    """Returns Qwix's model with 8-bit weights and activations, their scales calibrated on data."""
    rule = qwix.QuantizationRule(
        module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8, act_static_scale=True
    )
    # Fake quantization collects the statistics; the model that serves has them as scales.
    watching = qwix.quantize_model(model, qwix.QtProvider([rule]))
    variables = {"params": params}
    for seed in range(2, 6):
        _, new = watching.apply(variables, data(seed)[0], mutable=["quant_stats"])
        variables = {"params": params, **new}
    serving = qwix.quantize_model(model, qwix.PtqProvider([rule]))
    shapes = jax.eval_shape(serving.init, jax.random.key(0), data(2)[0])["params"]
    return serving, qwix.quantize_params(params, shapes, variables["quant_stats"])


def adapted(model, params):
    """Returns Qwix's model with 4-bit weights, and adapters that learn other names of classes."""
    x, labels = data(1, shift=3)
    rule = qwix.LoraRule(module_path=".*", weight_qtype=jnp.int4, tile_size=32, rank=8, alpha=8.0)
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider([rule]))
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    init = model.init(jax.random.key(1), x)["params"]
    base = qwix.quantize_params(params, shapes)

    # The quantized base is not an argument of what is differentiated.
    flat = {**flatten_dict(init), **flatten_dict(base)}
    adapters = {path: v for path, v in flat.items() if "lora" in "/".join(path)}

    def merged(adapters):
        return {"params": unflatten_dict({**flat, **adapters})}

    before = merged(adapters)
    adapters = fit(lambda a: cross_entropy(model.apply(merged(a), x), labels), adapters, 200)
    return model, before, merged(adapters)


def show(what: str, share: float) -> None:
    print(f"{what:42s}accuracy {share:6.1%}")


def main() -> None:
    model, params = trained()
    x, labels = data(9)
    show("float32", accuracy(model.apply, {"params": params}, x, labels))
    small = jaxmp.quantize({"params": params}, "int4", min_size=1)
    low = jaxmp.wrap(model, "mixed_bfloat16").apply
    show("jaxmp.quantize, 4-bit weights", accuracy(low, small, x, labels))
    serving, quantized = calibrated(model, params)
    show("Qwix, 8 bits, calibrated", accuracy(serving.apply, {"params": quantized}, x, labels))
    x, labels = data(9, shift=3)
    lora, before, after = adapted(model, params)
    show("Qwix, 4-bit base, other classes", accuracy(lora.apply, before, x, labels))
    show("  with adapters that learned them", accuracy(lora.apply, after, x, labels))


if __name__ == "__main__":
    start(main)
