"""What 8-bit products cost on TPUs, in the cycles that XLA estimates, relative to bfloat16.

    python benchmarks/product_cycles.py                       # every TPU, every part
    python benchmarks/product_cycles.py --targets tpu7x --parts ffn --recipes float8
    python benchmarks/product_cycles.py --check               # exits with 1 where a limit is missed

It compiles, and needs no accelerator: `benchmarks/aot.py` says what to install. The parts:

* `products`: one product of two matrices of `--size`, quantized already, its result scaled and
  returned in bfloat16, over the same product in bfloat16: `relative` in
  `jaxmp/_core/chips/chips.toml`; of one that sums the last axes, as the gradient of the input
  does; and of one that sums the first axes, as the gradient of the weights does:
  `relative_grad_weight` there.
* `passes`: reading a float32 matrix of `--size` for its largest magnitude, and reading it and
  writing it in 8 bits: the bytes in the cycles in which the chip multiplies one FLOP in bfloat16,
  over what the documented peaks make of it: `achieved.memory` there. And what a product in
  bfloat16 takes longer where it casts a float32 weight: `achieved.cast`.
* `ffn`: forward and backward of two layers, `--width` -> `--hidden` -> `--width`, of `--tokens`
  float32 inputs with a GELU between them, under `jaxmp.wrap`: parameters are float32, and
  quantizing all that is multiplied is part of it. A third layer of 16 outputs reads what comes of
  them, and is bfloat16 in both. Beside it stands what `jaxmp._core.speed` estimates of the two
  layers.

Cycles are the sum of the schedule's `estimated_cycles`. Of some operations XLA does not know them;
they are left out, on both sides, and their number is printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

import jaxmp
from jaxmp._core.speed import chip_named, estimate
from jaxmp._tools.preflight.hlo import HloProgram, read_hlo
from jaxmp.devices import chips, kind_of
from jaxmp.recipes import parse_recipe

import aot

TARGETS = tuple(name for name in chips() if name.startswith("tpu") and name != "tpu-v4")
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int8")
RECIPES = ("float8", "e4m3", "float8@row", "int8", "e4m3:e5m2:e5m2")

# (target, recipe) -> the most that an FFN 4096/16384 may take of bfloat16's cycles.
LIMITS = {
    ("tpu7x", "float8"): 0.67,
    ("tpu-v5e", "float8"): 0.62,
    ("tpu-v6e", "float8"): 0.73,
    ("tpu-v5e", "int8"): 0.62,
    ("tpu-v6e", "int8"): 0.76,
}


def cycles(target: str, fn: Callable[..., Any], *args: Any) -> HloProgram:
    """What the compiled program does, its cycles among it."""
    return read_hlo(aot.hlo_for(target, fn, args))


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(target: str, size: int, dtype: str, axes: tuple[int, int] = (1, 0)) -> int:
    """The cycles of one product of two matrices that sums one axis of each."""
    matrix = shape(size, size, dtype=dtype)

    def multiply(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        dims = (((axes[0],), (axes[1],)), ((), ()))
        if dtype == "bfloat16":
            return lax.dot_general(a, b, dims)
        sums = jnp.int32 if dtype == "int8" else jnp.float32
        out = lax.dot_general(a, b, dims, preferred_element_type=sums)
        return (out.astype(jnp.float32) * scale).astype(jnp.bfloat16)

    return cycles(target, multiply, matrix, matrix, shape()).cycles or 0


def passes(target: str, size: int) -> tuple[int, int]:
    """The cycles of an amax, and of writing in 8 bits."""
    x = shape(size, size)
    amax = cycles(target, lambda x: jnp.max(jnp.abs(x)), x).cycles or 0
    write = cycles(
        target, lambda x, s: jnp.clip(jnp.round(x * s), -127, 127).astype(jnp.int8), x, shape()
    )
    return amax, write.cycles or 0


class FFN(nn.Module):
    """Two layers that a recipe takes, and one that it does not."""

    width: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.gelu(nn.Dense(self.hidden, use_bias=False)(x))
        h = nn.Dense(self.width, use_bias=False)(h)
        return nn.Dense(16, use_bias=False)(h)


def ffn(target: str, policy: str, tokens: int, width: int, hidden: int) -> HloProgram:
    """Forward and backward of the layers, with the gradients of weights and inputs."""
    model = jaxmp.wrap(FFN(width, hidden), policy)
    x = shape(tokens, width)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(variables: Any, x: jax.Array, g: jax.Array) -> Any:
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(g)

    # So that the recipe "float8" is the chip's.
    device = jax.sharding.AbstractDevice(kind_of(target), num_cores=None, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return cycles(target, step, variables, x, shape(tokens, 16))


def show_products(target: str, size: int) -> None:
    for name, axes in (("", (1, 0)), (" of last axes", (1, 1)), (" of first axes", (0, 0))):
        full = product(target, size, "bfloat16", axes)
        for dtype in FORMATS:
            ratio = product(target, size, dtype, axes) / full
            print(f"{target:8} product{name} {dtype:18} {ratio:.3f} x bfloat16", flush=True)


def show_passes(target: str, size: int) -> None:
    chip = chips()[target]
    seconds_of_product = 2 * size**3 / (chip["tflops"]["bfloat16"] * 1e12)
    full = product(target, size, "bfloat16")
    per_cycle = seconds_of_product / full
    for name, count, moved in zip(("amax", "write"), passes(target, size), (4, 5), strict=True):
        share = moved * size**2 / chip["hbm_bytes_per_second"] / (count * per_cycle)
        print(f"{target:8} pass {name:5} {share:.2f} x documented bytes per FLOP", flush=True)
    x, w = shape(size, size, dtype=jnp.bfloat16), shape(size, size)
    casts = cycles(target, lambda x, w: x @ w.astype(jnp.bfloat16), x, w).cycles or 0
    print(f"{target:8} cast {casts / full - 1:.2f} x a product more", flush=True)


def show_ffn(target: str, recipe: str, full: HloProgram, args: argparse.Namespace) -> bool:
    """Prints the ratio of an FFN; returns whether it keeps its limit."""
    program = ffn(target, f"mixed_bfloat16,matmul={recipe}", args.tokens, args.width, args.hidden)
    ratio = (program.cycles or 0) / (full.cycles or 1)
    found = [
        estimate(parse_recipe(recipe), chip_named(target), args.tokens, *sizes)
        for sizes in ((args.width, args.hidden), (args.hidden, args.width))
    ]
    estimated = sum(e.seconds for e in found) / sum(e.seconds_16_bits for e in found)
    in_8_bits = f"{len(program.products_in_8_bits)} of {len(program.products)} in 8 bits"
    unknown = f"unknown {program.unknown_cycles}, bfloat16 {full.unknown_cycles}"
    usual = (args.tokens, args.width, args.hidden) == (8192, 4096, 16384)
    limit = LIMITS.get((target, recipe)) if usual else None
    said = f", limit {limit}" if limit else ""
    print(f"{target:8} ffn {recipe:16} {ratio:.3f} x bfloat16's {(full.cycles or 0) / 1e6:.1f} M"
          f"{said}; estimate {estimated:.3f}; {in_8_bits}; {unknown}", flush=True)  # fmt: skip
    return limit is None or ratio <= limit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--parts", nargs="+", default=["products", "passes", "ffn"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=16384)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    args = parser.parse_args()
    kept = True
    start = time.perf_counter()
    for target in args.targets:
        if "products" in args.parts:
            show_products(target, args.size)
        if "passes" in args.parts:
            show_passes(target, args.size)
        if "ffn" in args.parts:
            full = ffn(target, "mixed_bfloat16", args.tokens, args.width, args.hidden)
            for recipe in args.recipes:
                kept &= show_ffn(target, recipe, full, args)
    print(f"{time.perf_counter() - start:.0f} s")
    return int(args.check and not kept)


if __name__ == "__main__":
    raise SystemExit(main())
