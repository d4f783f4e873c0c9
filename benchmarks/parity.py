"""How often `parity` and `tolerance` cry wolf, and which planted mistakes they find.

    nice python benchmarks/parity.py               # minutes on two cores
    nice python benchmarks/parity.py --seeds 20    # the same, in a hurry

Two tables. **False alarms**: five models, each with 200 seeds of parameters and data, are compared
with themselves: under `mixed_bfloat16` with float32, and in float32 with every sum in another
order. No layer is to differ by more than rounding, and no result by more than its tolerance.
**Swaps**: twelve mistakes that ports and samplers are known for, each in one line of a transformer
or a recurrent network; seed 0. Found is a mistake if the first layer that differs by more than
rounding is the right module, at the line marked with its name below.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As in `convergence.py`: without it the CPU backend sums some bfloat16 products in bfloat16.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._core.jaxprs.trace import trace
from jaxmp._tools.parity.parity import prepare
from jaxmp._tools.parity.runs import AsWritten
from jaxmp._tools.parity.tolerance import prepare_tolerance

POLICY = "mixed_bfloat16"


# Models.


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.relu(nn.LayerNorm()(nn.Dense(width)(x)))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (8, 16):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


class Recurrent(nn.Module):
    start: float = 0.0

    @nn.compact
    def __call__(self, x):
        cell = nn.GRUCell(24)
        carry = jnp.full((x.shape[0], 24), self.start)  # initial state
        x = nn.RNN(cell)(x, initial_carry=carry)
        return nn.Dense(10)(x)


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (4, 4), strides=(4, 4))(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for _ in range(2):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(16)(y)))
            x = x + y.swapaxes(1, 2)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def rope(x, swap):
    """Rotary embedding of [batch, time, heads, d]: of halves, or of neighbors."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    if swap == "RoPE's pairs":
        a, b = x[..., 0::2], x[..., 1::2]  # RoPE's pairs
        pairs = [a * cos - b * sin, a * sin + b * cos]  # RoPE's pairs
        pairs = jnp.stack(pairs, -1)  # RoPE's pairs
        return pairs.reshape(x.shape)  # RoPE's pairs
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nn.Module):
    swap: str = ""

    @nn.compact
    def __call__(self, x):
        batch, time, width = x.shape
        q, k, v = (nn.Dense(width, name=name)(x).reshape(batch, time, 4, -1) for name in "qkv")
        q, k = rope(q, self.swap), rope(k, self.swap)
        scale = 1 / 4 if self.swap == "scale of attention" else 1 / np.sqrt(q.shape[-1])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale  # scale of attention
        mask = jnp.tril(jnp.ones((time, time), bool), 1 if self.swap == "mask" else 0)  # mask
        scores = jnp.where(mask, scores, -1e9)  # mask
        x = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v).reshape(batch, time, width)
        return nn.Dense(width, name="out")(x)


def in_tf32(x, w, dims, **options):
    """A product whose operands have 10 mantissa bits, as on an Ampere GPU."""
    x, w = (jax.lax.reduce_precision(a, 8, 10) for a in (x, w))  # TF32
    return jax.lax.dot_general(x, w, dims, **options)  # TF32


class Transposed(nn.Module):
    """A Dense layer whose kernel was saved the other way around."""

    features: int

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        return x @ kernel.T + self.param("bias", nn.initializers.zeros, (self.features,))  # kernel


class Block(nn.Module):
    swap: str = ""

    @nn.compact
    def __call__(self, x):
        eps = 1e-5 if self.swap == "epsilon of a norm" else 1e-6
        y = nn.LayerNorm(epsilon=eps, name="norm_1")(x)  # epsilon of a norm
        x = x + Attention(self.swap, name="attention")(y)
        y = nn.Dense(128, name="up")(nn.LayerNorm(name="norm_2")(x))
        y = nn.gelu(y, approximate=self.swap != "GELU")  # GELU
        dot = in_tf32 if self.swap == "TF32" else None
        y = nn.Dense(32, dot_general=dot, name="down")(y)  # TF32
        dropout = nn.Dropout(0.1, deterministic=self.swap != "dropout")
        y = dropout(y)  # dropout
        square = Transposed(32, name="mix") if self.swap == "kernel" else nn.Dense(32, name="mix")
        return x + square(y)  # kernel


class LM(nn.Module):
    swap: str = ""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32, name="embed")
        x = embed(tokens)
        for i in range(2):
            x = Block(self.swap if i else "", name=f"block_{i}")(x)
            if self.swap == "cast point" and not i:
                x = x.astype(jnp.bfloat16).astype(jnp.float32)  # cast point
        x = nn.LayerNorm(name="norm")(x)
        if self.swap == "bf16 logits":
            table = embed.embedding.astype(jnp.bfloat16)
            return (x.astype(jnp.bfloat16) @ table.T).astype(jnp.float32)  # bf16 logits
        if self.swap == "tied weights":
            table = self.param("head", nn.initializers.normal(0.2), (64, 32))
            return x @ table.T  # tied weights
        return x @ embed.embedding.T


# What is given to each, of a seed.

SHAPES = {
    "MLP": (MLP(), (32, 48)),
    "CNN": (CNN(), (8, 16, 16, 3)),
    "transformer": (LM(), None),
    "recurrent": (Recurrent(), (8, 12, 16)),
    "mixer": (Mixer(), (4, 16, 16, 3)),
}


def data(shape, seed):
    rng = np.random.default_rng(seed)
    if shape is None:
        return jnp.asarray(rng.integers(0, 64, (4, 16)))
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def program(model):
    """A model as a function of its variables and data, with all that is random fixed."""

    def apply(variables, x):
        rngs = {"dropout": jax.random.key(7)}
        out = model.apply(variables, x, rngs=rngs, mutable=["batch_stats"])
        return out[0]

    return apply


@dataclasses.dataclass(frozen=True)
class Reordered(AsWritten):
    """Runs a program with the terms of every sum in reverse order."""

    def computed(self, eqn, operands, draw):
        match eqn.primitive.name:
            case "dot_general":
                pairs = zip(operands, eqn.params["dimension_numbers"][0], strict=True)
                operands = [jnp.flip(x, axes) for x, axes in pairs]
            case "reduce_sum":
                operands = [jnp.flip(operands[0], eqn.params["axes"])]
            case "conv_general_dilated":
                numbers = eqn.params["dimension_numbers"]
                axes = numbers.lhs_spec[1], numbers.rhs_spec[1]
                operands = [jnp.flip(x, axis) for x, axis in zip(operands, axes, strict=True)]
        return super().computed(eqn, operands, draw)


def reordered(fn):
    def run(*args):
        call = trace(fn, args, {})
        return call.rebuild(Reordered().run(call.jaxpr, call.arrays)[0])

    return run


def false_alarms(seeds):
    """Prints the table of false alarms."""
    print("| model | seeds | layers | bfloat16: alarms | largest | reordered: alarms | largest "
          "| tolerance: alarms |\n| :-- | --: | --: | --: | --: | --: | --: | --: |")  # fmt: skip
    for name, (model, shape) in SHAPES.items():
        fn, init = program(model), jax.jit(model.init)
        args = [(init(jax.random.key(s), data(shape, s)), data(shape, s)) for s in range(seeds)]
        low = jaxmp.autocast(fn, POLICY)
        compared = prepare(low, fn, args[0]), prepare(fn, reordered(fn), args[0])
        tolerances, exact = prepare_tolerance(fn, POLICY, args[0]), jax.jit(fn)
        fast = jax.jit(low)
        alarms, largest, outside = [0, 0], [0.0, 0.0], 0
        for one in args:
            arrays = jax.tree.leaves(one)
            for i, pair in enumerate(compared):
                found = pair.run(arrays)
                alarms[i] += not found.same
                largest[i] = max(
                    largest[i], *(r.difference / r.bound for r in found.rows if r.bound)
                )
                if not found.same and alarms[i] < 4:
                    print(f"<!-- seed: {found.first} -->")
            tolerance = tolerances.run(arrays)
            outside += not np.allclose(np.asarray(fast(*one), np.float32), exact(*one), **tolerance)
        layers = len(found.rows)
        print(f"| {name} | {seeds} | {layers} | {alarms[0]} | {largest[0]:.2f} | {alarms[1]} | "
              f"{largest[1]:.2f} | {outside} |", flush=True)  # fmt: skip


SWAPS = {
    "epsilon of a norm": "LM/block_1/norm_1", "RoPE's pairs": "LM/block_1/attention",
    "cast point": "LM", "TF32": "LM/block_1/down", "bf16 logits": "LM", "kernel": "LM/block_1/mix",
    "mask": "LM/block_1/attention", "GELU": "LM/block_1", "dropout": "LM/block_1/Dropout_0",
    "initial state": "Recurrent", "scale of attention": "LM/block_1/attention",
    "tied weights": "LM",
}  # fmt: skip


def lines_of(swap):
    """The lines of this file that are marked with a swap."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return {i for i, line in enumerate(lines, 1) if re.search(rf"  # {re.escape(swap)}$", line)}


def swaps():
    """Prints the table of swaps."""
    print("| swap | module and line | difference / bound | found | bfloat16 with float32: found | "
          "outside the tolerance |\n| :-- | :-- | --: | :-- | :-- | :-- |")  # fmt: skip
    found = np.zeros(3, int)
    known = {}
    for swap, module in SWAPS.items():
        recurrent = swap == "initial state"
        model, plain = (Recurrent(0.1), Recurrent()) if recurrent else (LM(swap), LM())
        x = data((8, 12, 16) if recurrent else None, 0)
        args = model.init(jax.random.key(0), x), x
        f, g = program(model), program(plain)
        key = plain, jax.tree.structure(args)
        if key not in known:  # compiled once
            known[key] = prepare(g, g, args), jaxmp.testing.tolerance(g, POLICY)(*args), g(*args)
        original, tolerance, expected = known[key]
        low = jaxmp.autocast(f, POLICY)
        reports = []
        for fn, dtype in ((f, np.float32), (low, None)):
            prepared = prepare(fn, g, args, dtype=dtype)
            arrays = prepared.this.call.arrays
            reports.append(dataclasses.replace(prepared, other=original.other).run(arrays))
        outside = not np.allclose(np.asarray(jax.jit(low)(*args)), expected, **tolerance)
        right = [_is_right(report, swap, module) for report in reports]
        found += [*right, outside]
        words = ["yes" if r else "late" if not report else "no"
                 for r, report in zip(right, reports, strict=True)]  # fmt: skip
        ratio = reports[0].first.ratio if reports[0].first else 0.0
        print(f"| {swap} | {reports[0].located} | {ratio:.3g} | {words[0]} | {words[1]} | "
              f"{'yes' if outside else 'no'} |", flush=True)  # fmt: skip
    print(f"| all {len(SWAPS)} | | | {found[0]} | {found[1]} | {found[2]} |")


def _is_right(report, swap, module):
    """Whether what is named is the module of a swap, and one of its lines."""
    line = re.search(r"\.py:(\d+)$", report.located)
    return f" in {module} at " in report.located and int(line[1]) in lines_of(swap)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", choices=("alarms", "swaps"))
    options = parser.parse_args()
    if options.only != "swaps":
        false_alarms(options.seeds)
        print()
    if options.only != "alarms":
        swaps()


if __name__ == "__main__":
    main()
