# %% [markdown]
# # Four bits
#
# Weights of 4 bits take a quarter of bfloat16's memory. Rounded after training they cost some loss; a model that is trained for
# them, in a few last steps, loses less.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxmp

# %% [markdown]
# The numbers of two formats of 4 bits, scaled to 6: int4 has equal steps, e2m1 finer ones near zero. A block of weights shares
# a scale, which fits its largest magnitude.

# %%
grids = {
    "int4": jnp.arange(-7, 8) * 6 / 7,
    "e2m1": jnp.arange(16, dtype=jnp.uint4).view(jnp.float4_e2m1fn),
}
plt.figure(figsize=(6.4, 1.6))
for i, grid in enumerate(grids.values()):
    plt.plot(np.asarray(grid.astype(jnp.float32)), [-i] * len(grid), "|", markersize=20)
plt.setp(plt.gca(), yticks=(0, -1), yticklabels=grids, ylim=(-1.7, 0.7))


# %% [markdown]
# A small network, trained in bfloat16.


# %%
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64)(x)
        for _ in range(3):
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(16)(x)


def data(seed, n):
    x = jax.random.normal(jax.random.key(seed), (n, 64))
    return x, jnp.argmax(x[:, :16] * x[:, 16:32], axis=-1)


def loss_under(policy):
    model = jaxmp.wrap(Model(), policy)

    def loss_fn(params, x, y):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss_fn


def train(loss_fn, params, steps, rate):
    tx = optax.adam(optax.cosine_decay_schedule(rate, steps))

    @jax.jit
    def train_step(params, state, i):
        updates, state = tx.update(jax.grad(loss_fn)(params, *data(i, 256)), state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for i in range(steps):
        params, state = train_step(params, state, i)
    return params


params = Model().init(jax.random.key(1), data(0, 1)[0])
params = train(loss_under("mixed_bfloat16"), params, 1500, 3e-3)

# %% [markdown]
# Its weights in few bits: rounded, and after two hundred more steps with ``weights=`` in the policy, which rounds what the model
# reads. Both are measured as they are served.

# %%
held_out, served = data(-1, 4096), jax.jit(loss_under("mixed_bfloat16"))
formats = ["int8", "int4@16", "int4@row", "e2m1@16"]
losses = {"rounded": [], "trained for": []}
for fmt in formats:
    policy = f"mixed_bfloat16,weights={fmt}"
    tuned = train(loss_under(policy), params, 200, 5e-4)
    for name, weights in (("rounded", params), ("trained for", tuned)):
        losses[name].append(float(served(jaxmp.quantize(weights, policy), *held_out)))

plt.figure()
for i, (name, values) in enumerate(losses.items()):
    above = 100 * (np.asarray(values) / float(served(params, *held_out)) - 1)
    plt.bar(np.arange(len(formats)) + 0.4 * i - 0.2, above, 0.4, label=name)
plt.xticks(range(len(formats)), formats)
plt.ylabel("held-out loss over bfloat16's, %")
plt.legend()

# %% [markdown]
# What is trained is, to the bit, what is served:

# %%
few = jaxmp.quantize(tuned, policy)
print(jax.jit(loss_under(policy))(tuned, *held_out) == served(few, *held_out))
