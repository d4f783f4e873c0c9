"""What a kernel for attention saves: `attention=fused` against the same step without it.

    python benchmarks/fused_attention.py           # memory and library calls, on H100 and TPU v5e
    python benchmarks/fused_attention.py --check   # the same, and fails where they are not as said

The step is that of two pre-norm transformer layers and their gradient, compiled ahead of time:
4096 tokens, which attend causally, 8 heads of 64. cuDNN must be installed to trace its call, though
no GPU is needed: `pip install nvidia-cudnn-cu13`. Speed is not told: no cost model knows what is
inside of a kernel.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from typing import Any, NamedTuple

# Nothing here runs on an accelerator, and without CUDA's libraries JAX's plugin starts under this
# alone.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmp
from jaxmp._tools.preflight.hlo import read_hlo

from aot import TARGETS, compile_on

BATCH, TIME, HEADS, WIDTH, LAYERS = 2, 4096, 8, 64, 2
# One float32 score for each head, query and key.
SCORES_MIB = BATCH * HEADS * TIME**2 * 4 / 2**20
POLICIES = ("float32", "mixed_bfloat16", "mixed_bfloat16,attention=fused")
# The calls of a layer, forward and backward.
CALLS = {
    "gpu-h100": {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1},
    "tpu-v5e": {"tpu_custom_call": 3},
}


class Model(nn.Module):
    """Pre-norm transformer layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Features of tokens, of features of tokens: ``[batch, time, features]``."""
        mask = nn.make_causal_mask(x[..., 0])
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x += nn.MultiHeadDotProductAttention(HEADS, deterministic=True)(y, y, mask=mask)
            y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
            x += nn.Dense(x.shape[-1])(nn.gelu(y))
        return x


class Result(NamedTuple):
    """What a compiler says of a step.

    Attributes:
      temp_mib: Temporary memory, in 2^20 bytes.
      peak_mib: The most memory at any time, in 2^20 bytes.
      calls: How many calls there are of kernels, by target.
    """

    temp_mib: float
    peak_mib: float
    calls: dict[str, int]


def step(policy: str) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of a loss, and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((BATCH, TIME, HEADS * WIDTH), jnp.float32)
    params = jax.eval_shape(Model().init, jax.random.key(0), x)
    model = jaxmp.wrap(Model(), policy)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    return jax.grad(loss), (params, x)


def compiled(target: str, policy: str) -> Result:
    """The step under a policy, compiled for a target."""
    fused = policy.endswith("fused")
    fn, args = step(f"{policy}@{target}" if fused else policy)
    program = compile_on(target, fn, args, (), None)
    memory = program.memory_analysis()
    calls = read_hlo(program.as_text()).library_calls
    return Result(
        memory.temp_size_in_bytes / 2**20,
        memory.peak_memory_in_bytes / 2**20,
        {name: n for name, n in calls.items() if name in CALLS[target]},
    )


def failures(target: str, results: dict[str, Result]) -> list[str]:
    """What is not as it should be."""
    bf16, fused = results["mixed_bfloat16"], results["mixed_bfloat16,attention=fused"]
    want = {name: n * LAYERS for name, n in CALLS[target].items()}
    found = []
    if fused.calls != want:
        found.append(f"{target}: calls {fused.calls}, and not {want}")
    if bf16.peak_mib - fused.peak_mib < SCORES_MIB:
        found.append(f"{target}: the peak falls by less than {SCORES_MIB:.0f} MiB of scores")
    return found


def main() -> int:
    """Prints a table; 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--check", action="store_true", help="fail where it is not as said")
    arguments = parser.parse_args()
    print(f"JAX {version('jax')}; scores of one layer in float32: {SCORES_MIB:.0f} MiB")
    wrong = []
    for target in [arguments.target] if arguments.target else TARGETS:
        results = {policy: compiled(target, policy) for policy in POLICIES}
        print(f"\n{target:32s}{'temporary MiB':>15s}{'peak MiB':>10s}  kernel calls")
        for policy, result in results.items():
            calls = ", ".join(f"{n} {name}" for name, n in result.calls.items()) or "none"
            print(f"{policy:32s}{result.temp_mib:15.0f}{result.peak_mib:10.0f}  {calls}")
        wrong += failures(target, results)
    for line in wrong if arguments.check else ():
        print(f"FAILED {line}")
    if arguments.check and not wrong:
        print("\nas said: every layer's kernel, and a peak that is lower by the scores")
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
