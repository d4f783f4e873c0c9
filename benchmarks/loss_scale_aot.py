"""What loss scaling costs: ours beside flax's, jmp's, mpx's and optax.apply_if_finite.

    python benchmarks/loss_scale_aot.py                  # both parts
    python benchmarks/loss_scale_aot.py --part step      # TPU v5e, ahead of time
    python benchmarks/loss_scale_aot.py --part step --no-prefetch    # the same, all in HBM
    python benchmarks/loss_scale_aot.py --part update    # CPU: size of the program, compile time

It needs no accelerator: `benchmarks/aot.py` says what to install. mpx is on PyPI as
`mixed-precision-for-JAX`; rows of what is not installed are left out, and it says so.

`step` compiles the whole donated AdamW step of LM-B (a Linen transformer: width 512, 8 heads, 4
layers, sequence 512, batch 8, vocabulary 8192) for one TPU v5e, and reports bytes accessed, the
schedule's estimated cycles and temporary memory, over the same step without scaling: alone, and
with `optax.clip_by_global_norm` before AdamW in both. The model computes in `--dtype`; its loss is
float32. Every library's step is written as its own documentation does it, which for flax, jmp and
mpx means selecting the parameters and the optimizer's state by hand. `apply_if_finite` scales
nothing: it only skips.

`update` compiles the update alone on CPU, for 72 and 240 parameters of 64x64, and reports the
instructions of the optimized HLO, those of the StableHLO it is made from, and the process CPU time
(`time.process_time`, every thread) of `Lowered.compile()`, the median of `--runs` interleaved runs,
over plain `optax.adamw`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

import jaxmp

import aot
from models import Case, Size
from transformer import TransformerLM

try:
    import mpx
except ImportError:
    mpx = None

# The most that ours may cost: bytes of the step over the unscaled one, alone and beside a clip, and
# the optimized HLO and the compile time of the update over plain AdamW's.
STEP_LIMITS = {"alone": 1.055, "clip": 1.002}
UPDATE_LIMITS = {"instructions": 3.0, "compile": 2.5}

TOKENS = jax.ShapeDtypeStruct((8, 512), jnp.int32)
CONFIG = dict(width=512, heads=8, layers=4, seq=512, vocab=8192)
LM_B = Case("lm_b", TransformerLM, Size(CONFIG, TOKENS, TOKENS, 8192), None, has_softmax=True)

PyTree = Any
LossFn = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Library:
    """A way to train.

    Attributes:
      init: From parameters, everything that a step carries beside them.
      step: `(loss_fn, params, carried, *batch) -> (params, carried, loss)`.
    """

    init: Callable[[PyTree], PyTree]
    step: Callable[..., tuple[PyTree, PyTree, jax.Array]]


def unscaled(optimizer: optax.GradientTransformation) -> Library:
    def step(loss_fn, params, opt_state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Library(optimizer.init, step)


def ours(optimizer: optax.GradientTransformation) -> Library:
    scaled = jaxmp.dynamic_loss_scale(optimizer)

    def step(loss_fn, params, opt_state, *batch):
        loss, grads = jaxmp.value_and_grad(loss_fn, opt_state)(params, *batch)
        updates, opt_state = scaled.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Library(scaled.init, step)


def flax(optimizer: optax.GradientTransformation) -> Library:
    """As in flax's examples/imagenet/train.py."""

    def init(params):
        # Arrays, so that it compiles once; its defaults are Python numbers.
        scale = DynamicScale(fin_steps=jnp.zeros([], jnp.int32), scale=jnp.float32(65536.0))
        return optimizer.init(params), scale

    def step(loss_fn, params, carried, *batch):
        opt_state, scale = carried
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, *batch)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        select = functools.partial(jnp.where, finite)
        params = jax.tree.map(select, new_params, params)
        opt_state = jax.tree.map(select, new_opt_state, opt_state)
        return params, (opt_state, scale), loss

    return Library(init, step)


def jmp_(optimizer: optax.GradientTransformation) -> Library:
    """As in jmp's README; its two arrays are carried, since its object breaks under `lower`."""

    def init(params):
        return optimizer.init(params), (jnp.float32(2.0**15), jnp.zeros([], jnp.int32))

    def step(loss_fn, params, carried, *batch):
        opt_state, arrays = carried
        scale = jmp.DynamicLossScale(*arrays)
        scaled_loss, grads = jax.value_and_grad(lambda p: scale.scale(loss_fn(p, *batch)))(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        new = jmp.select_tree(finite, (new_params, new_opt_state), (params, opt_state))
        loss, scale = scale.unscale(scaled_loss), scale.adjust(finite)
        return new[0], (new[1], (scale.loss_scale, scale.counter)), loss

    return Library(init, step)


def mpx_(optimizer: optax.GradientTransformation) -> Library:
    """mpx's own parts, in the order of its `filter_value_and_grad`; its casts are left out."""

    def init(params):
        one = jnp.float32(1.0)
        return optimizer.init(params), mpx.DynamicLossScaling(jnp.float32(2.0**15), one)

    def step(loss_fn, params, carried, *batch):
        opt_state, scale = carried
        loss, grads = jax.value_and_grad(mpx.scaled(loss_fn, scale))(params, *batch)
        finite = mpx.all_finite(grads)
        scale = scale.adjust(finite)
        grads, loss = scale.unscale(grads), scale.unscale(loss)
        params, opt_state = mpx.optimizer_update(params, optimizer, opt_state, grads, finite)
        return params, (opt_state, scale), loss

    return Library(init, step)


def apply_if_finite(optimizer: optax.GradientTransformation) -> Library:
    return unscaled(optax.apply_if_finite(optimizer, max_consecutive_errors=10**6))


OURS = "jaxmp"
LIBRARIES = {
    OURS: ours,
    "flax DynamicScale": flax,
    "jmp": jmp_,
    **({"mpx": mpx_} if mpx else {}),
    "apply_if_finite": apply_if_finite,
}


def compile_step(library: Library, dtype: Any, options: Any = None) -> aot.Compiled:
    """The donated step of LM-B on one TPU v5e."""
    loss_and_state = LM_B.loss(dtype=dtype)
    params, _, inputs, labels = LM_B.shapes()
    carried = jax.eval_shape(library.init, params)

    def step(params, carried, inputs, labels):
        def loss_fn(params, inputs, labels):
            return loss_and_state(params, {}, inputs, labels)[0]

        return library.step(loss_fn, params, carried, inputs, labels)

    args = (params, carried, inputs, labels)
    return aot.compile_for("tpu-v5e", step, args, donate=(0, 1), options=options)


def step_part(libraries: dict[str, Any], dtype: Any, options: Any) -> list[str]:
    """Prints the table of the step; returns what of ours is over its limit."""
    failures = []
    for inner, optimizer in (
        ("alone", optax.adamw(3e-4)),
        ("clip", optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))),
    ):
        base = compile_step(unscaled(optimizer), dtype, options)
        title = {"alone": "adamw", "clip": "clip_by_global_norm, adamw"}[inner]
        print(f"\n{title}, LM-B in {jnp.dtype(dtype).name}, TPU v5e")
        print(f"{'':20}{'GB':>9}{'':9}{'Mcycles':>9}{'':9}{'temp MiB':>10}{'peak MiB':>10}")
        print(f"{'unscaled':20}{base.gb_accessed:9.4f}{'':9}{base.mcycles:9.3f}{'':9}"
              f"{base.temp_mib:10.1f}{base.peak_mib:10.1f}")  # fmt: skip
        for name, make in libraries.items():
            row = compile_step(make(optimizer), dtype, options)
            ratio = row.gb_accessed / base.gb_accessed
            print(
                f"{name:20}{row.gb_accessed:9.4f} {ratio - 1:+8.2%}{row.mcycles:9.3f} "
                f"{row.mcycles / base.mcycles - 1:+8.2%}{row.temp_mib:10.1f}{row.peak_mib:10.1f}",
                flush=True,
            )
            if name == OURS and ratio > STEP_LIMITS[inner]:
                failures.append(f"{inner}: bytes are {ratio:.4f} of unscaled, over "
                                f"{STEP_LIMITS[inner]}")  # fmt: skip
    return failures


@dataclasses.dataclass
class Program:
    """An update compiled on CPU: instructions in both programs, CPU seconds of each compilation."""

    optimized: int
    stablehlo: int
    seconds: list[float] = dataclasses.field(default_factory=list)


@jax.custom_vjp
def with_gradient(params, grads):
    """A loss whose gradient, scaled or not, is `grads`."""
    del params, grads
    return jnp.float32(0.0)


def _forward(params, grads):
    return with_gradient(params, grads), grads


with_gradient.defvjp(_forward, lambda grads, cotangent: (grads, None))  # noqa: ARG005


def compile_update(make: Callable[..., Library], leaves: int) -> tuple[Any, float]:
    """Compiles an update of `leaves` parameters from gradients that are arguments."""
    library = make(optax.adamw(3e-4))
    params = {f"w{i:03}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(leaves)}
    carried = jax.eval_shape(library.init, params)

    def step(params, carried, grads):
        return library.step(with_gradient, params, carried, grads)[:2]

    jax.clear_caches()
    gc.collect()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, carried, params)
    start = time.process_time()
    compiled = lowered.compile()
    return (lowered, compiled), time.process_time() - start


def update_part(libraries: dict[str, Any], leaf_counts: list[int], runs: int) -> list[str]:
    """Prints the table of the update; returns what of ours is over its limit."""
    failures = []
    for leaves in leaf_counts:
        programs: dict[str, Program] = {}
        for _ in range(runs):
            for name, make in {"unscaled": unscaled, **libraries}.items():
                (lowered, compiled), seconds = compile_update(make, leaves)
                if name not in programs:
                    programs[name] = Program(
                        optimized=_instructions(compiled.as_text()),
                        stablehlo=_instructions(lowered.as_text()),
                    )
                programs[name].seconds.append(seconds)
        base = programs["unscaled"]
        base_seconds = statistics.median(base.seconds)
        print(f"\nadamw's update of {leaves} parameters, CPU, {runs} runs")
        print(f"{'':20}{'HLO':>8}{'':7}{'StableHLO':>10}{'':7}{'compile s':>10}{'':7}  range")
        for name, program in programs.items():
            seconds = statistics.median(program.seconds)
            ratios = {
                "instructions": program.optimized / base.optimized,
                "compile": seconds / base_seconds,
            }
            print(
                f"{name:20}{program.optimized:8}{ratios['instructions']:6.2f}x"
                f"{program.stablehlo:10}{program.stablehlo / base.stablehlo:6.2f}x"
                f"{seconds:10.2f}{ratios['compile']:6.2f}x"
                f"  {min(program.seconds):.2f} to {max(program.seconds):.2f}",
                flush=True,
            )
            if name == OURS:
                failures += [
                    f"{leaves} parameters: {what} is {ratios[what]:.2f} of adamw's, over {most}"
                    for what, most in UPDATE_LIMITS.items()
                    if ratios[what] > most
                ]
    return failures


def _instructions(text: str) -> int:
    """How many lines of HLO or StableHLO define a value."""
    return len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", text, re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("step", "update", "both"), default="both")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-prefetch", action="store_true", help="step: keep every array in HBM")
    parser.add_argument("--leaves", type=int, nargs="+", default=[72, 240])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 when over a limit")
    args = parser.parse_args()
    packages = ("jax", "flax", "optax", "jmp", "mixed-precision-for-JAX", "libtpu")
    print(", ".join(f"{package} {_version(package)}" for package in packages))
    if mpx is None:
        print("mpx is not installed: its rows are left out")
    libraries = {name: LIBRARIES[name] for name in args.libraries}
    failures = []
    if args.part in ("step", "both"):
        options = aot.NO_PREFETCH if args.no_prefetch else None
        failures += step_part(libraries, jnp.dtype(args.dtype), options)
    if args.part in ("update", "both"):
        failures += update_part(libraries, args.leaves, args.runs)
    for failure in failures:
        print(f"over the limit: {failure}")
    return int(bool(failures) and args.check)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
