# %% [markdown]
# # 8 bits
#
# Layers multiply float8 or int8: half the bytes of bfloat16, at twice the speed where the chip multiplies them. A CPU emulates
# them to the bit, so that what trains can be seen here.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxmp

# %% [markdown]
# The numbers of each format between 1 and 4: bfloat16 has 128 a power of two, the 4-3 float8 has 8, the 5-2 float8 has 4.
# int8, here scaled to 4, has equal steps.

# %%
grids = {
    "bfloat16": jnp.arange(0x3F80, 0x4081, dtype=jnp.uint16).view(jnp.bfloat16),
    "float8_e4m3fn": jnp.arange(0x78, dtype=jnp.uint8).view(jnp.float8_e4m3fn),
    "float8_e5m2": jnp.arange(0x78, dtype=jnp.uint8).view(jnp.float8_e5m2),
    "int8": jnp.arange(128) * 4 / 127,
}
for i, grid in enumerate(grids.values()):
    values = np.asarray(grid.astype(jnp.float32))
    values = values[(values >= 1) & (values <= 4)]
    plt.plot(values, np.full(len(values), -i), "|", markersize=20)
plt.yticks(range(0, -4, -1), grids)


# %% [markdown]
# A small residual network under four policies. Its logits stay in 16 bits.


# %%
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64)(x)
        for _ in range(3):
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(16)(x)


x = jax.random.normal(jax.random.key(0), (2048, 32))
y = jnp.argmax(x[:, :16] * x[:, 16:], axis=-1)


def train(policy, steps=300):
    model = jaxmp.wrap(Model(), policy)
    params, tx = model.init(jax.random.key(1), x), optax.adam(2e-3)

    def loss_fn(params, x, y):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def train_step(params, state, i):
        at = jax.random.randint(jax.random.key(i), (128,), 0, len(x))
        loss, grads = jax.value_and_grad(loss_fn)(params, x[at], y[at])
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for i in range(steps):
        params, state, loss = train_step(params, state, i)
        losses.append(loss)
    return np.asarray(losses).reshape(-1, 10).mean(1), jaxmp.explain(loss_fn)(params, x, y)


plt.figure()
for policy in ("float32", "mixed_bfloat16", "mixed_float8", "mixed_int8"):
    losses, plan = train(policy)
    plt.plot(10 * np.arange(len(losses)), losses, label=policy)
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()

# %%
print(plan.quantized())
