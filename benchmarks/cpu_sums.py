"""How far off the CPU backend's bfloat16 sums are: what docs/limits.md says of it.

    python benchmarks/cpu_sums.py
    XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= python benchmarks/cpu_sums.py

It prints the error of a dense layer's weight gradient over 8,192 equal rows [8, 1024, 32], relative
to float32 in the norm, the median and the worst of 50 draws of the row and the weights: for a layer
with hand-written casts, and for jaxmp.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp

BATCH, LENGTH, WIDTH = 8, 1024, 32


def loss(w, x):
    return jnp.mean((x @ w - 1) ** 2)


def by_hand(w, x):
    y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return jnp.mean((y.astype(jnp.float32) - 1) ** 2)


def main() -> None:
    draw = np.random.default_rng(0)
    print(f"JAX {jax.__version__}, {BATCH * LENGTH:,} equal rows   median   worst")
    full = jax.jit(jax.grad(loss))
    for name, low in (
        ("by hand", by_hand),
        ("jaxmp.autocast", jaxmp.autocast(loss, "mixed_bfloat16")),
    ):
        grad = jax.jit(jax.grad(low))
        errors = []
        for _ in range(50):
            row = draw.normal(size=WIDTH).astype("f")
            x = jnp.broadcast_to(row, (BATCH, LENGTH, WIDTH))
            w = jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, "float32")
            want = np.asarray(full(w, x), "float64")
            errors.append(np.linalg.norm(grad(w, x) - want) / np.linalg.norm(want))
        print(f"{name:<30}{np.median(errors):>9.2%}{max(errors):>8.2%}")


if __name__ == "__main__":
    main()
