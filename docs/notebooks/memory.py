# %% [markdown]
# # Where did my memory go?
#
# What a training step keeps for its backward pass, by module and dtype, and what a policy makes of it. Nothing runs, and no
# accelerator is needed.

# %%
import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jaxmp


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=8)(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class LM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8192, 512)(tokens)
        for _ in range(4):
            x = Block()(x)
        return nn.Dense(8192)(nn.LayerNorm()(x))


tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
params = jax.eval_shape(LM().init, jax.random.key(0), tokens)


def loss_fn(params, tokens):
    logits = LM().apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


policies = [
    "float32",
    "mixed_bfloat16",
    "mixed_bfloat16,residuals=recompute",
]
saved = {p: jaxmp.explain(loss_fn, p)(params, tokens).residual_bytes for p in policies}
for policy, by_dtype in saved.items():
    left = 0
    for dtype, color in {"float32": "C0", "bfloat16": "C1"}.items():
        plt.barh(policy, by_dtype.get(dtype, 0) / 2**20, left=left, color=color)
        left += by_dtype.get(dtype, 0) / 2**20
plt.xlabel("MiB saved for the backward pass: float32 (blue), bfloat16 (orange)")

# %% [markdown]
# Which operations those bytes are results of, by the module they are in:

# %%
parts = collections.Counter()
for row in jaxmp.explain(loss_fn, "mixed_bfloat16")(params, tokens).rows:
    module = row.path.split("/")[-1].rstrip("_0123456789") or "the loss"
    parts[module] += row.bytes / 2**20
names, sizes = zip(*parts.most_common(8), strict=True)
plt.barh(names[::-1], sizes[::-1])
plt.xlabel("MiB of results computed, by the innermost module")

# %% [markdown]
# What a chip's compiler makes of it, peak and all, is `jaxmp.preflight(step, policies, target="tpu-v5e")`, with its compiler
# installed and no chip: see [preflight](../tools.md#preflight). Less still: [Less memory](../how_to/memory.md).
