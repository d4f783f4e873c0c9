# %% [markdown]
# # Find the NaN
#
# A model is fine in float32, and NaN in float16. `diagnose` runs its loss and gradients once, looks at every value, and names
# the operation, the module and the line where it begins.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
from IPython.display import Image

import jaxmp


class Spectrum(nn.Module):
    scale: float = 1.0

    @nn.compact
    def __call__(self, sound):
        n = sound.shape[-1]
        waves = jnp.cos(2 * jnp.pi / n * jnp.outer(jnp.arange(n), jnp.arange(n // 2)))
        waves = self.param("waves", lambda _: self.scale * waves)
        return sound @ waves  # up to n / 2 times as loud


class Model(nn.Module):
    scale: float = 1.0

    @nn.compact
    def __call__(self, sound):
        x = Spectrum(self.scale, name="spectrum")(sound)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(1, name="head")(nn.relu(nn.Dense(64, name="hidden")(x)))


time = jnp.linspace(0, 1, 1024, endpoint=False)
pitch = jax.random.uniform(jax.random.key(0), (64, 1), minval=10, maxval=200).round()
sounds = 200 * jnp.cos(2 * jnp.pi * pitch * time)


def losses(model):
    params = model.init(jax.random.key(1), sounds)

    def loss_fn(params, sounds):
        return jnp.mean((model.apply(params, sounds)[:, 0] - pitch[:, 0] / 100) ** 2)

    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        print(f"{policy:15}", jaxmp.autocast(loss_fn, policy)(params, sounds))
    return loss_fn, params


broken, params = losses(Model())

# %%
report = jaxmp.diagnose(broken, "mixed_float16")(params, sounds)
print(report)

# %% [markdown]
# The exponents of all values in float32, above the range of float16: what is right of the second dotted line overflows.

# %%
report.plot_exponents("exponents.png", sites="Model/spectrum*")
Image("exponents.png")

# %% [markdown]
# The cure is to divide by the number of samples. `jaxmp.full_precision` around the function is another.

# %%
cured, params = losses(Model(scale=1 / 1024))
print(jaxmp.diagnose(cured, "mixed_float16")(params, sounds))
