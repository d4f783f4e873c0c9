"""What 8-bit products make of a language model's step, compiled ahead of time, beside bfloat16's.

    python benchmarks/eight_bits_aot.py                                   # an H100, float8
    python benchmarks/eight_bits_aot.py --target gpu-a100                 # emulated, and said so
    python benchmarks/eight_bits_aot.py --target tpu-v5e --policy mixed_int8
    python benchmarks/eight_bits_aot.py --part steps                      # by chip: an hour
    python benchmarks/eight_bits_aot.py --part steps --targets tpu-v5e --programs llama
    python benchmarks/eight_bits_aot.py --part blocks                     # a B200's block products
    python benchmarks/eight_bits_aot.py --check                           # exits with 1 on a miss

It compiles the whole donated AdamW step of LM-A (`benchmarks/models.py`) by `jaxmp.preflight`, and
needs no accelerator; `benchmarks/aot.py` says what to install. It prints:

* the products in 8 bits in the program before it is compiled, forward and backward, and what each
  compiled program multiplies;
* the library calls in 8 bits (`$f8`), and which products that were to be in 8 bits are not: a
  compiled product counts by the module that it was written in. XLA merges products of one operand
  (queries, keys and values), so that there are fewer calls than products;
* peak memory, and its ratio to `mixed_bfloat16`'s;
* what the forward pass keeps for the backward pass, by dtype, and the 8-bit part of it over what
  is no longer kept in 16 bits: 0.5 where every such array is halved.

`--part steps` prints a table of two programs on TPUs and GPUs, under recipes over `mixed_bfloat16`:
`lm`, the step above, and `llama`, a layer of Llama 3 8B (`benchmarks/llama.py`) forward and
backward, of 8 x 1024 bfloat16 tokens, with the gradients of weights and inputs. A layer of 16
outputs reads what comes of it, and is bfloat16 in all. On TPUs a ratio is of the cycles that XLA
estimates, of the programs as compiled. On GPUs, for which it estimates none, it is of the times
that `jaxmp.preflight` estimates: a roofline of published figures, of the FLOPs by dtype and of the
bytes that the compiled kernels move. `e4m3` is that format on every chip, `float8` the chip's.

`--part blocks` compiles one MXFP8 product and its gradient for a B200, as
`jax.nn.scaled_dot_general` has them: one native call forward and two backward.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp._core.speed import chip_named, warning
from jaxmp._tools.preflight.hlo import Multiplied
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import AS_WRITTEN, Preflight
from jaxmp.recipes import parse_recipe

import aot
import llama
from models import CASES

BASE = "mixed_bfloat16"
# The most of `mixed_bfloat16`'s peak memory that an H100 may need, and of bytes kept per byte that
# is no longer kept in 16 bits: scales are a little.
PEAK, HALVED = 0.965, 0.51
# The most of `mixed_bfloat16`'s cycles that a program may take under `mixed_float8`.
CYCLES = {("llama", "tpu-v5e"): 0.75}
TARGETS = ("tpu-v5e", "tpu-v6e", "tpu7x", "gpu-h100", "gpu-b200")
RECIPES = ("float8", "e4m3", "int8")


def step_of(policy: str, model: str) -> tuple[Any, tuple[Any, ...]]:
    """The whole AdamW step under a policy, and its arguments."""
    case, optimizer = CASES[model], optax.adamw(3e-4)
    grad_fn = jax.value_and_grad(jaxmp.autocast(case.loss(), policy), has_aux=True)
    params, *rest = case.shapes()

    def step(params: Any, opt_state: Any, *batch: Any) -> Any:
        (loss, _), grads = grad_fn(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, jax.eval_shape(optimizer.init, params), *rest)


class LlamaLayer(nn.Module):
    """A layer that a recipe takes, and one that it does not."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, _ = llama.Layer(heads=32, kv_heads=8, hidden=14336)(x, None)
        return nn.Dense(16, use_bias=False)(x)


def layer_of(policy: str) -> tuple[Any, tuple[Any, ...]]:
    """A layer of Llama 3 8B under a policy, forward and backward, and its arguments."""
    model = jaxmp.wrap(LlamaLayer(), policy)
    x = jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(variables: Any, x: jax.Array, g: jax.Array) -> Any:
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(g)

    return step, (variables, x, jax.ShapeDtypeStruct((8, 1024, 16), jnp.float32))


# By name: the program under a policy with its arguments, and the arguments that are donated.
PROGRAMS: dict[str, tuple[Callable[[str], tuple[Any, tuple[Any, ...]]], tuple[int, ...]]] = {
    "lm": (lambda policy: step_of(policy, "lm"), (0, 1)),
    "llama": (layer_of, ()),
}


def time_of(program: str, target: str, policy: str) -> tuple[float, str]:
    """The cycles or the seconds of a program, and a mark; or 0, and why it is not compiled."""
    make, donated = PROGRAMS[program]
    step, arguments = make(policy)
    report = jaxmp.preflight(step, target=target, donate_argnums=donated)(*arguments)
    hlo, time = report[AS_WRITTEN].program, report.step_time(AS_WRITTEN)
    if hlo is None or time is None:
        return 0, f"{program}, {target}, {policy}: {' '.join(report[AS_WRITTEN].error.split())}"
    emulated, unknown = bool(report.emulated(AS_WRITTEN)), bool(hlo.unknown_cycles)
    return hlo.cycles_run or time.seconds, "*" * emulated + "?" * unknown


def steps(args: argparse.Namespace) -> bool:
    """Prints programs on chips under recipes, over bfloat16; returns whether limits are kept."""
    print(f"| program | chip | bfloat16 | {' | '.join(RECIPES)} |")
    print(f"| :-- | :-- | --: |{' --: |' * len(RECIPES)}", flush=True)
    kept, remarks = True, []
    for program, target in itertools.product(args.programs, args.targets):
        full, why = time_of(program, target, BASE)
        said = f"{full / 1e6:.2f} M cycles" if full > 1 else f"{full * 1e3:.2f} ms"
        cells = {"": f"{said}{why}" if full else "-"}
        recipes = [parse_recipe(name).with_float8(chip_named(target).float8) for name in RECIPES]
        for recipe in dict.fromkeys(recipes):
            time, mark = time_of(program, target, f"{BASE},matmul={recipe}") if full else (0, why)
            cells[str(recipe)] = f"{time / full:.3f}{mark}" if time else "-"
            remarks += [mark] if mark and not time else []
            if recipe == recipes[0]:
                kept &= 0 < time <= CYCLES.get((program, target), math.inf) * full
        row = [program, target, cells[""], *(cells[str(recipe)] for recipe in recipes)]
        print(f"| {' | '.join(row)} |", flush=True)
    print("\n* operands are widened to 16 bits first")
    print("? without operations whose cycles XLA does not know")
    print("\n".join(dict.fromkeys(remarks)))
    return kept


def compiled(policy: str, args: argparse.Namespace) -> tuple[PreflightReport, Preflight]:
    step, arguments = step_of(policy, args.model)
    report = jaxmp.preflight(step, target=args.target, donate_argnums=(0, 1))(*arguments)
    result = report[AS_WRITTEN]
    if result.error:
        raise SystemExit(result.error)
    return report, result


def left_over(products: tuple[Multiplied, ...], paths: set[str]) -> list[Multiplied]:
    """The compiled products of some modules that are not in 8 bits."""
    return [p for p in products if not p.in_8_bits and p.place.path in paths]


def language_model(args: argparse.Namespace) -> bool:
    """Prints the figures of a model; returns whether they keep the limits."""
    step, arguments = step_of(args.policy, args.model)
    requested = jaxmp.audit(step)(*arguments).quantized()
    paths = {product.path for product in requested.products if product.quantized}
    print(requested.summary())
    base, low = compiled(BASE, args), compiled(args.policy, args)
    for name, (_, result) in ((BASE, base), (args.policy, low)):
        print(f"{name}: {result.program.contractions}, calls {result.program.library_calls}")
    products = low[1].program.products
    for direction, backward in (("forward", False), ("backward", True)):
        mine = [p for p in low[1].program.products_in_8_bits if p.place.backward == backward]
        print(f"calls in 8 bits, {direction}: {len(mine)}")
    left = left_over(products, paths)
    print(f"products that were to be in 8 bits and are not: {len(left)} of {len(products)}")
    for product in left[:5]:
        print(f"  {product.dtype} {product.operands} {product.place}")
    emulated = low[0].emulated(AS_WRITTEN)
    chip = chip_named(args.target)
    recipe = jaxmp.get_policy(args.policy).matmul
    print(f"emulated: {emulated or 'none'}; warned: {warning(recipe, chip) or 'of nothing'}")
    peaks = [result.peak_bytes for _, result in (base, low)]
    ratio = peaks[1] / peaks[0]
    print(f"peak {peaks[0] / 2**20:.0f} -> {peaks[1] / 2**20:.0f} MiB: {ratio:.3f} x")
    halved = residuals(args)
    if emulated:
        return bool(warning(recipe, chip))
    in_time = ratio <= PEAK or args.target != "gpu-h100"
    return not left and bool(low[1].program.products_in_8_bits) and in_time and halved <= HALVED


def residuals(args: argparse.Namespace) -> float:
    """Prints what is kept for the backward pass; returns the 8-bit part over what it replaces."""
    case = CASES[args.model]
    kept = [
        aot.residuals_by_dtype(jaxmp.autocast(case.loss(), policy), *case.shapes())
        for policy in (BASE, args.policy)
    ]
    for name, sizes in zip((BASE, args.policy), kept, strict=True):
        by_dtype = ", ".join(f"{size:.0f} {dtype}" for dtype, size in sizes.most_common())
        print(f"kept under {name}, MiB: {sum(sizes.values()):.0f}: {by_dtype}")
    narrow = [sum(s for d, s in k.items() if d.endswith("8") or "float8" in d) for k in kept]
    replaced = kept[0]["bfloat16"] - kept[1]["bfloat16"]
    ratio = (narrow[1] - narrow[0]) / replaced if replaced else float("inf")
    print(
        f"kept in 8 bits: {narrow[1] - narrow[0]:.0f} MiB for {replaced:.0f} in 16: {ratio:.3f} x"
    )
    return ratio


def blocks() -> bool:
    """Prints the calls of an MXFP8 product on a B200; returns whether there are three."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            dims = (((2,), (1,)), ((0,), (0,)))
            return jax.nn.scaled_dot_general(
                x, w, dims, preferred_element_type=jnp.bfloat16, configs=[config] * 3
            )

        y, vjp = jax.vjp(product, x, w)
        return y, vjp(g)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    arguments = shape(1, 512, 1024), shape(1, 1024, 256), shape(1, 512, 256)
    report = jaxmp.preflight(step, target="gpu-b200")(*arguments)
    print(report)
    return report[AS_WRITTEN].program.library_calls.get("__cudnn$blockScaledDot") == 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["model", "steps", "blocks"], default="model")
    parser.add_argument("--model", choices=CASES, default="lm")
    parser.add_argument("--target", default="gpu-h100")
    parser.add_argument("--policy", default="mixed_float8")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="of steps")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    args = parser.parse_args()
    part = {"model": language_model, "steps": steps, "blocks": lambda _: blocks()}[args.part]
    kept = part(args)
    return int(args.check and not kept)


if __name__ == "__main__":
    raise SystemExit(main())
