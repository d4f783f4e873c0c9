"""Temporary memory of a step with a vocabulary of 131,072, with and without its logits.

    python benchmarks/large_vocabulary.py [TARGET ...]

Four blocks of 2048-8192-2048 and 8 x 1024 tokens; the gradient by all parameters, compiled ahead of
time for one device of each target (an H100 and a TPU v5p if none is named; 20 seconds and a minute
for each program).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp.losses import linear_cross_entropy

from aot import compile_for

FEATURES, HIDDEN, VOCAB, TOKENS, BLOCKS = 2048, 8192, 131_072, (8, 1024), 4
POLICIES = ("mixed_bfloat16", "mixed_bfloat16,residuals=recompute")


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "embedding": float32(VOCAB, FEATURES),
    "blocks": [
        {"up": float32(FEATURES, HIDDEN), "down": float32(HIDDEN, FEATURES)} for _ in range(BLOCKS)
    ],
    "table": float32(FEATURES, VOCAB),
}
IDS = jax.ShapeDtypeStruct(TOKENS, jnp.int32)


def features(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    for block in params["blocks"]:
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(h @ block["up"]) @ block["down"]
    return x


def all_logits(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    logits = features(params, tokens) @ params["table"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def in_chunks(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    return linear_cross_entropy(features(params, tokens), params["table"], labels).mean()


LOSSES: dict[str, Callable[..., jax.Array]] = {
    "optax": all_logits,
    "linear_cross_entropy": in_chunks,
}


def main(targets: list[str]) -> None:
    for target in targets or ["gpu-h100", "tpu-v5p"]:
        for policy in POLICIES:
            for name, loss_fn in LOSSES.items():
                gradient = jax.grad(jaxmp.autocast(loss_fn, policy))
                compiled = compile_for(target, gradient, (PARAMS, IDS, IDS))
                gib = compiled.temp_mib / 1024
                print(f"{target:10}{policy:36}{name:22}{gib:5.2f} GiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
