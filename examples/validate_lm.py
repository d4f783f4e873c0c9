"""A small language model's training, for `python -m jaxmp validate`.

    cd examples
    python -m jaxmp validate validate_lm:make_step --batches validate_lm:batches \\
        --policy mixed_bfloat16 mixed_float16 --steps 300 --seeds 4 --out validate_lm

The model, its data and its optimizer are those of `train_lm.py`, which makes it some minutes of two
CPU cores; `docs/validation.md` shows what the command prints and draws.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_lm import LM, Size, read_text, windows
from train_lm import batches as draw

import jaxmp

SIZE = Size(64, 2, 2, 64, batch=16, steps=300, learning_rate=2e-3)


@functools.cache
def text():
    """The bytes to train on, and the windows that are held out, in batches."""
    train, held_out = read_text()
    starts = np.arange(256) * (len(held_out) - SIZE.length) // 256
    return train, np.split(windows(held_out, starts, SIZE.length), 16)


@functools.cache  # so that each policy is compiled once, for all seeds
def under(policy):
    """The model, optimizer, step and loss under a policy."""
    model = jaxmp.wrap(LM(SIZE), policy)
    schedule = optax.warmup_cosine_decay_schedule(
        0, SIZE.learning_rate, SIZE.steps // 10, SIZE.steps
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = jaxmp.loss_scale_for(policy, tx)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(state, tokens):
        loss, grads = state.value_and_grad(loss_fn)(state.params, tokens)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "loss_scale": state.loss_scale,
        }
        state = state.apply_gradients(grads=grads)
        return state, metrics | {"finite": jaxmp.loss_scaling.step_was_finite(state)}

    return model, tx, step, jax.jit(loss_fn)


def make_step(policy, seed):
    model, tx, step, loss_fn = under(policy)
    _, held_out = text()
    params = model.init(jax.random.key(seed), held_out[0][:, :-1])["params"]
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def evaluate(state):
        return jnp.mean(jnp.stack([loss_fn(state.params, tokens) for tokens in held_out]))

    return state, step, evaluate


def batches(seed):
    return draw(text()[0], SIZE, seed)
