# %% [markdown]
# # float16 and its loss scale, seen
#
# float16 has 5 bits of exponent: what is above 65,504 is infinite, what is below 6e-8 is 0. Gradients are small, so the loss
# is multiplied by a scale, and gradients are divided by it. A step whose gradients are not finite is skipped.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import Image

import jaxmp


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(64)(x))
        return nn.Dense(1)(x)


x = jax.random.normal(jax.random.key(0), (256, 8))
y = jnp.sin(x.sum(1, keepdims=True))


def train(scaler, steps=120):
    model = jaxmp.wrap(Model(), "mixed_float16")
    tx = jaxmp.numerics.monitor(scaler(optax.adam(3e-3)), every=1)
    params = model.init(jax.random.key(1), x)["params"]
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, x):
        # The mean of squares, in units so small that gradients are about 1e-7.
        return 1e-6 * jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    @jax.jit
    def train_step(state, x):
        loss, grads = state.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    history, losses = [], []
    for i in range(steps):
        batch = x.at[0, 0].set(jnp.inf) if i == 70 else x  # one bad batch
        state, loss = train_step(state, batch)
        history.append(jaxmp.numerics.read_monitor(state))
        losses.append(float(loss))
    return history, losses


# %% [markdown]
# Without a scale, with a fixed one, and with a dynamic one that begins too high:


# %%
def dynamic(tx):
    return jaxmp.dynamic_loss_scale(tx, init_scale=2.0**50, max_scale=2.0**60, growth_interval=20)


runs = {
    "no scale": train(lambda tx: tx),
    "static, 2¹⁴": train(lambda tx: jaxmp.static_loss_scale(tx, 2.0**14)),
    "dynamic, from 2⁵⁰": train(dynamic),
}
for name, (_, losses) in runs.items():
    plt.semilogy(np.maximum(losses, 1e-9), label=name)
plt.xlabel("step (70 has a bad batch)")
plt.ylabel("loss")
plt.legend()

# %% [markdown]
# The dynamic scale halves at every step that is skipped, and doubles after 20 good ones. The crosses are skipped steps: they
# leave no trace but a counter. The bad batch is one of them.

# %%
history = runs["dynamic, from 2⁵⁰"][0]
jaxmp.numerics.plot_scale(history, "scale.png")
Image("scale.png")

# %%
zeros = {name: f"{history[60]['zeros/Dense_0']:.0%}" for name, (history, _) in runs.items()}
print("zeros among the gradients of the first layer:", zeros)
skipped = {
    name: history[-1].get("skipped_count", "all are made") for name, (history, _) in runs.items()
}
print("steps skipped:", skipped)
