# %% [markdown]
# # NNX
#
# An NNX model under a policy, and one of its layers under another: `prepare` returns a model that shares its Variables
# with yours.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxmp


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up, self.down = (nnx.Linear(width, width, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.read = nnx.Linear(2, 128, rngs=rngs)
        self.blocks = nnx.List([Block(128, rngs) for _ in range(3)])
        self.head = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, x):
        x = self.read(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


def target(x):
    return np.sin(6 * x[:, 0]) * np.cos(4 * x[:, 1])


def loss_fn(net, x, y):
    return optax.l2_loss(net(x), y).mean()


@nnx.jit
def train_step(net, optimizer, x, y):
    loss, grads = jaxmp.value_and_grad(loss_fn, optimizer.opt_state)(net, x, y)
    optimizer.update(net, grads)
    return loss


# %% [markdown]
# Which coordinates the first layer reads matters to the last digit, so it stays float32: a line of a `PolicyMap`.

# %%
precise = jaxmp.PolicyMap({"read": "float32"}, default="mixed_bfloat16")


def train(policy, steps=400):
    mine = Net(nnx.Rngs(0))
    net, tx = jaxmp.prepare(mine, optax.adam(1e-3), policy)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    draw, losses = np.random.default_rng(0), []
    for _ in range(steps):
        x = draw.uniform(-1, 1, (256, 2)).astype(np.float32)
        losses.append(train_step(net, optimizer, x, target(x)))
    return mine, net, jax.device_get(losses)


runs = {
    "float32": train("float32"),
    "mixed_bfloat16": train("mixed_bfloat16"),
    "the first layer in float32": train(precise),
}
grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 64, dtype=np.float32)] * 2), -1).reshape(-1, 2)
figure, axes = plt.subplots(1, 4, figsize=(11, 3), layout="constrained")
axes[0].imshow(target(grid).reshape(64, 64))
axes[0].set_title("the function")
for panel, (name, (_, net, losses)) in zip(axes[1:], runs.items(), strict=True):
    panel.imshow(net(grid).reshape(64, 64))
    panel.set_title(f"{name}\nloss {np.mean(losses[-20:]):.1e}", fontsize=9)

# %% [markdown]
# The Variables are yours, in float32; what computes with them is the policy's:

# %%
mine, net, _ = runs["the first layer in float32"]
print(mine.blocks[0].up.kernel[...].dtype, mine.blocks[0].up.kernel is net.blocks[0].up.kernel)
print(jaxmp.explain(loss_fn, only="matmul")(net, grid, target(grid)))
