"""The language model's training step, for `python -m jaxmp audit` and `preflight`.

    cd examples
    python -m jaxmp audit lm_step:small
    python -m jaxmp preflight lm_step:base --target tpu-v5e --policy float32 \\
        --policy mixed_bfloat16 --donate 0 --donate 1

The model is that of `train_lm.py`, in float32; nothing is computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from train_lm import LM, SIZES


def make(name):
    """A training step and its arguments, as shapes."""
    size = SIZES[name]
    model = LM(size)
    tx = optax.adamw(size.learning_rate)
    tokens = jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.uint8)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, size.length), jnp.uint8))

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, (params, jax.eval_shape(tx.init, params), tokens)


def small():
    return make("small")


def base():
    return make("base")
