# %% [markdown]
# # Many devices
#
# Eight devices, simulated on this CPU: parameters are split over all (FSDP), the batch too, and JAX puts in the collectives.
# The policy is what it is on one device, and decides what crosses in 16 bits.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before anything else runs
jax.config.update("jax_cpu_enable_async_dispatch", False)  # eight share a few cores

import flax.linen as nn
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmp

mesh = Mesh(np.array(jax.devices()), ("data",))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = x + nn.Dense(512)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(64)(x)


def split(x):
    """Shards an array by its longest axis, if that divides."""
    axis = int(np.argmax(x.shape)) if x.ndim else 0
    whole = x.ndim == 0 or x.shape[axis] % 8
    spec = PartitionSpec() if whole else PartitionSpec(*[None] * axis, "data")
    return jax.device_put(x, NamedSharding(mesh, spec))


x = split(jax.random.normal(jax.random.key(0), (256, 512)))
y = split(jax.random.randint(jax.random.key(1), (256,), 0, 64))


def prepared(policy):
    model, tx = jaxmp.prepare(Model(), optax.adam(1e-3), policy)
    params = jax.tree.map(split, model.init(jax.random.key(2), x)["params"])
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, x, y):
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train_step(state, x, y):
        loss, grads = state.value_and_grad(loss_fn)(state.params, x, y)
        return state.apply_gradients(grads=grads), loss

    return jax.jit(train_step), state


step, state = prepared("mixed_float16")
state, loss = step(state, x, y)
print(loss, jaxmp.loss_scaling.loss_scale(state.opt_state))
for shard in state.params["Dense_0"]["kernel"].addressable_shards:
    print(shard.device, shard.index)

# %% [markdown]
# An infinity in one device's part of the batch skips the step on all of them:

# %%
bad, _ = step(state, x.at[0, 0].set(jnp.inf), y)
print("skipped:", int(jaxmp.loss_scaling.skipped_count(bad.opt_state)))
same = jax.tree.map(lambda a, b: bool((a == b).all()), state.params, bad.params)
print("parameters unchanged:", all(jax.tree.leaves(same)))

# %% [markdown]
# What each device holds: an eighth of the parameters and of the optimizer's state. Moments in bfloat16, by
# `jaxmp.store_state`, take a third off.


# %%
def on_one_device(tree):
    shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)]
    return sum(shards) / 2**20


everything = state.params, state.opt_state
small = jaxmp.store_state(optax.adam(1e-3), "bfloat16")
rows = {
    "whole, on one device": sum(x.nbytes for x in jax.tree.leaves(everything)) / 2**20,
    "split over eight": on_one_device(everything),
    "and moments in bfloat16": on_one_device((state.params, small.init(state.params))),
}
plt.barh(list(rows), list(rows.values()))
plt.xlabel("MiB of parameters and moments on a device")
