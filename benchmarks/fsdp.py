"""A training step of a language model of a billion parameters, fully sharded over 256 chips.

    cd benchmarks
    python -m jaxmp preflight fsdp:step --target tpu-v5e:16x16 --donate 0 --donate 1
    python -m jaxmp preflight fsdp:mixed --target tpu-v5e:16x16 --donate 0 --donate 1
    python -m jaxmp preflight fsdp:mixed_reduced_low --target tpu-v5e:16x16 --donate 0 --donate 1

The first is float32. Policies are inside of the gradient, which is where `reduce_dtype` tells.
Every parameter and optimizer moment is split over the chips along its largest axis, and so is the
batch. The model is the scanned transformer of `models.py`; what leaves its layers is constrained to
the batch's sharding, without which XLA spreads that of the parameters to the activations.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

from models import Block, TransformerLM

CHIPS = 256
BATCH, SEQ = 256, 1024
MESH = AbstractMesh((CHIPS,), ("data",), axis_types=(AxisType.Auto,))
BY_BATCH = NamedSharding(MESH, P("data"))


def split(like: Any) -> jax.ShapeDtypeStruct:
    """The shape, split along the largest axis that the number of chips divides."""
    axes = [i for i, size in enumerate(like.shape) if size % CHIPS == 0]
    spec: list[str | None] = [None] * len(like.shape)
    if axes:
        spec[max(axes, key=lambda i: like.shape[i])] = "data"
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(MESH, P(*spec)))


def by_batch(layer, args, kwargs, context):
    """A Linen interceptor: the outputs of embedding and blocks stay split along the batch."""
    out = layer(*args, **kwargs)
    if isinstance(context.module, Block | nn.Embed) and context.method_name == "__call__":
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, BY_BATCH), out)
    return out


def mixed():
    """The step in mixed_bfloat16, whose gradients cross in float32."""
    return step("mixed_bfloat16")


def mixed_reduced_low():
    """The same, whose gradients cross in bfloat16."""
    return step("mixed_bfloat16,reduce=bf16")


def step(policy: str = "float32"):
    """A training step and its arguments, as shapes with shardings."""
    model = TransformerLM(width=2048, heads=16, layers=20, seq=SEQ, vocab=32000, scan=True)
    optimizer = optax.adamw(3e-4)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32, sharding=BY_BATCH)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    opt_state = jax.eval_shape(optimizer.init, params)

    def loss_fn(params, inputs, labels):
        with nn.intercept_methods(by_batch):
            logits = model.apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def train_step(params, opt_state, inputs, labels):
        low = jaxmp.autocast(loss_fn, policy)
        loss, grads = jax.value_and_grad(low)(params, inputs, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    arguments = (*jax.tree.map(split, (params, opt_state)), tokens, tokens)
    return train_step, arguments
