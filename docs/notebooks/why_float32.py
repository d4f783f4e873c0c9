# %% [markdown]
# # Why is this float32?
#
# Every operation has a reason for its dtype. `explain` prints it, `audit` finds what should not be float32, and a line of the
# policy changes it.

# %%
import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import jaxmp


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, table):
        x = nn.Dense(256, name="read")(x)
        x = x + table  # float32 data, of the caller's
        x = nn.Dense(256, name="mix")(nn.relu(x))
        scores = nn.softmax(x @ x.T)
        return nn.Dense(16, name="head", precision="highest")(scores @ x)


model = jaxmp.wrap(Model(), "mixed_bfloat16")
x, table = jnp.ones((128, 64)), jnp.ones((128, 256))
params = model.init(jax.random.key(0), x, table)
print(jaxmp.explain(model.apply, only="matmul")(params, x, table))

# %% [markdown]
# All operations by dtype and reason. Those that cost the most are widest:

# %%
plan = jaxmp.explain(model.apply)(params, x, table)
cost = collections.Counter()
for row in plan.rows:
    if row.bytes:
        cost[row.dtype, row.reason] += row.bytes / 1024
labels = [reason for (_, reason), _ in cost.most_common(12)]
sizes = [size for _, size in cost.most_common(12)]
colors = ["C1" if dtype == "bfloat16" else "C0" for (dtype, _), _ in cost.most_common(12)]
plt.barh(labels[::-1], sizes[::-1], color=colors[::-1])
plt.xlabel("KiB of results: float32 (blue), bfloat16 (orange)")

# %% [markdown]
# `audit` reads the whole step, the backward pass too: what is a fault, and what is meant.

# %%
step = jax.grad(lambda params: jnp.mean(model.apply(params, x, table)))
print(jaxmp.audit(step)(params))

# %% [markdown]
# Two lines change it: the caller's data is rounded where it enters, and the head leaves its `precision` to the policy.


# %%
class Cured(Model):
    @nn.compact
    def __call__(self, x, table):
        x = nn.Dense(256, name="read")(x)
        x = x + table.astype(x.dtype)
        x = nn.Dense(256, name="mix")(nn.relu(x))
        scores = nn.softmax(x @ x.T)
        return nn.Dense(16, name="head")(scores @ x)


cured = jaxmp.wrap(Cured(), "mixed_bfloat16")
print(jaxmp.audit(jax.grad(lambda p: jnp.mean(cured.apply(p, x, table))))(params).verdict())
for each in (model, cured):
    print(
        "saved for the backward pass:", jaxmp.explain(each.apply)(params, x, table).residual_bytes
    )
