"""Two issues of JAX, by name: in what dtype arrays cross devices. Read on a GPU's program.

On a TPU XLA narrows what it gathers by itself, and on a CPU it widens all, which would hide both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

from support import needs_gpu_compiler

pytestmark = [pytest.mark.slow, needs_gpu_compiler]

MESH = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
WHOLE = NamedSharding(MESH, P())


def shape(*sizes, spec=None, dtype=jnp.float32):
    spec = P() if spec is None else spec
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(MESH, spec))


def crossing(step, *args):
    """Bytes by kind of collective and dtype, scalars left out."""
    report = jaxmp.preflight(step, target="gpu-h100:8")(*args)
    found = report["as written"].program.collectives
    return {key: size for key, (_, size) in found.items() if size > 64}


# https://github.com/jax-ml/jax/issues/23543, "All-gather performed in fp32 instead of bf16 despite
# explicit datatype conversion": attention over a sequence that is split over devices, which gather
# its keys and values. They are rotated (RoPE) in float32 and cast to bfloat16; XLA gathers first.


def rotate(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 1000 ** (jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], axis=-1
    )


def attention(w, x):
    q, k, v = jnp.einsum("blw,wkhd->kblhd", x, w)
    k, v = (jax.lax.with_sharding_constraint(z, WHOLE) for z in (rotate(k), v))
    weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", rotate(q), k))
    return jnp.einsum("bhlm,bmhd->blhd", weights, v)


def by_hand(w, x):
    """With the casts of the issue, which today's XLA leaves where they are, in this program."""
    q, k, v = jnp.einsum("blw,wkhd->kblhd", x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    q, k = (rotate(z.astype(jnp.float32)).astype(jnp.bfloat16) for z in (q, k))
    k, v = (jax.lax.with_sharding_constraint(z, WHOLE) for z in (k, v))
    weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k).astype(jnp.float32))
    return jnp.einsum("bhlm,bmhd->blhd", weights.astype(jnp.bfloat16), v)


@pytest.mark.parametrize("fn", [attention, by_hand])
def test_jax_23543_keys_and_values_cross_in_16_bits(fn):
    w, x = shape(256, 3, 4, 64), shape(2, 1024, 256, spec=P(None, "d"))
    keys_and_values = 2 * (2 * 1024 * 4 * 64)
    found = crossing(jaxmp.autocast(fn, "mixed_bfloat16"), w, x)
    assert found == {("all-gather", "bfloat16"): 2 * keys_and_values}


# https://github.com/jax-ml/jax/issues/27496, "Lower Precision Grad Reduction": data parallelism in
# NNX; gradients are sums over devices in bfloat16, cast to float32 afterwards.


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(512, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 512, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


BIASES = 1024 + 512
PARAMETERS = 2 * 512 * 1024 + BIASES


def data_parallel(policy):
    """What crosses in a step of Adam, the batch being split and the model on every device."""
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    graph, state = nnx.split(jaxmp.wrap(model, policy))
    tx = optax.adam(1e-3)

    def step(state, opt_state, x, y):
        def loss_fn(state):
            return jnp.mean(jnp.square(nnx.merge(graph, state)(x) - y))

        loss, grads = jax.value_and_grad(loss_fn)(state)
        updates, opt_state = tx.update(grads, opt_state, state)
        return optax.apply_updates(state, updates), opt_state, loss

    whole = jax.tree.map(lambda s: shape(*s.shape, dtype=s.dtype), state)
    moments = jax.tree.map(lambda s: shape(*s.shape, dtype=s.dtype), jax.eval_shape(tx.init, whole))
    batch = shape(1024, 512, spec=P("d"))
    return crossing(step, whole, moments, batch, batch)


def test_jax_27496_gradients_are_reduced_in_float32_and_in_16_bits_on_request():
    full = data_parallel("float32")
    assert data_parallel("mixed_bfloat16") == full
    (everything,) = full.values()
    found = data_parallel("mixed_bfloat16,reduce=bf16")
    narrow, wide = found[("all-reduce", "bfloat16")], found[("all-reduce", "float32")]
    # All but the biases' gradients, which are sums of no product.
    assert 2 * narrow + wide == everything
    assert wide / everything == pytest.approx(BIASES / PARAMETERS, rel=1e-2)
