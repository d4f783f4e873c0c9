"""What autocast does to whole training steps, compiled ahead of time, beside hand-written bf16.

    python benchmarks/autocast_aot.py                            # TPU v5e, every model
    python benchmarks/autocast_aot.py --target gpu-h100 --models lm cnn
    python benchmarks/autocast_aot.py --target none              # no compiler: residuals, errors
    python benchmarks/autocast_aot.py --models lm --cache hand.json   # while developing jaxmp
    python benchmarks/autocast_aot.py --models cnn --no-prefetch
    python benchmarks/autocast_aot.py --models lm --target tpu-v5e gpu-h100 --recompute
    python benchmarks/autocast_aot.py --models gpt2 --target gpu-b200 --peers
    python benchmarks/autocast_aot.py --models cnn --rows hand mixed_bfloat16,ops=max:full_precision

It needs no accelerator; `benchmarks/aot.py` says what to install. The rows of a model:

* float32, and the same class with `dtype=bfloat16` written into every layer ("hand"), with its
  softmax in bfloat16 or in float32; `benchmarks/models.py` has both.
* jaxmp: `jaxmp.autocast` of the float32 model's loss under `mixed_bfloat16` (its softmax in
  float32) and `mixed_bfloat16,softmax=bf16`. Ratios are against the hand-written row with the same
  softmax. Models without a softmax have one row of each.
* with `--recompute`, rows that keep less, with the softmax in bfloat16: "jaxmp, recompute" under
  `residuals=recompute`, "hand, recompute" in a `jax.checkpoint` of the whole loss with the same
  policy, `jaxmp.checkpoint_policies.long_products`. "jaxmp, fused" is the default with
  `attention=fused` for the target (on GPU, cuDNN must be installed to trace its call); its errors
  are not told, for the kernel runs on the target alone. Where no attention is fused, a warning says
  why, and the row is the default's.
* with `--peers`, float32, "hand", "jaxmp" and other libraries, on the same model and batch
  (`benchmarks/peers.py`), and jaxmp's 8-bit policy beside Qwix: int8 on TPUs, float8 on GPUs.
  What is not installed is named and left out.
* with `--rows`, these alone; one that is not among them is a policy, of `jaxmp.autocast`.

The columns:

* `GB`, `temp`, `Mcycles` are of the whole donated AdamW step on one device (see `aot.py`).
* `saved` is what the loss's forward pass keeps for its backward pass: the leaves of the function
  that `jax.vjp` returns, without those that are parameters themselves.
* `low`: the share of the FLOPs of contractions in the jaxpr of the loss's `value_and_grad` that
  multiply 16 or 8 bits by 16 or 8 bits. Read it first: it says what a row really is.
* `forward`, `backward`: contractions by the dtype multiplied, in the jaxpr of the loss, and of its
  `value_and_grad` less the former; those in a scan are counted as often as it runs, those in a
  kernel written in JAX as if it were called once.
* `grad err`: relative L2 error of the whole parameter gradient, and `loss err` of the loss, against
  float32. At small size, on CPU, with every rounding the program asks for carried out
  (`xla_allow_excess_precision` off) and dots summed in float32; root mean square over seeds.

`--no-prefetch` keeps the TPU compiler from copying arrays between HBM and VMEM ahead of their use.
`GB` counts those copies beside the reads they serve, and how many there are depends on what fits:
float32 arrays are copied less often than bfloat16 ones. Without them `GB` is what the program's
own operations read and write.

On TPU, "float32" multiplies in one bfloat16 pass unless told otherwise: a policy's gain there is
memory and traffic. The errors are against true float32 on CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
# YNN, the CPU backend's matmul library since jaxlib 0.12, takes no bf16 dot that contracts its
# first operand's first dimension: that one is then summed in bf16, which shows as an error of 1e-2
# in some programs and not in others that are equal. Without YNN dots are summed in float32.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
)

import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp._core import chips
from jaxmp._tools.speed.target import chip_names

import aot
import peers
from aot_table import Row, ratios, show
from models import CASES, Case
from peers import LossFn

PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin")

FLOAT32, HAND, HAND_F32, JAXMP, JAXMP_LOW = (
    "float32",
    "hand",
    "hand, float32 softmax",
    "jaxmp",
    "jaxmp, softmax=bf16",
)
HAND_AGAIN, JAXMP_AGAIN, JAXMP_FUSED = "hand, recompute", "jaxmp, recompute", "jaxmp, fused"
JAXMP_INT8, JAXMP_FLOAT8 = "jaxmp mixed_int8", "jaxmp mixed_float8"
NOT_OURS = (FLOAT32, HAND, HAND_F32, *peers.PEERS)  # rows that do not depend on jaxmp
POLICIES = {
    JAXMP: "mixed_bfloat16",
    JAXMP_LOW: "mixed_bfloat16,softmax=bf16",
    JAXMP_AGAIN: "mixed_bfloat16,softmax=bf16,residuals=recompute",
    JAXMP_FUSED: "mixed_bfloat16,attention=fused",  # @ the target
    JAXMP_INT8: "mixed_int8",
    JAXMP_FLOAT8: "mixed_float8",
}


# (model, variant) -> the most that (GB accessed, saved residuals) may be of the hand-written
# row's: what this library promises, checked with --check.
LIMITS: dict[tuple[str, str], tuple[float, float]] = {
    ("lm", JAXMP_LOW): (0.98, 1.00),
    ("lm", JAXMP): (1.00, 1.00),
    ("cnn", JAXMP): (0.95, 1.00),
}
# (model, variant, target) -> likewise of (temporaries, peak).
MEMORY_LIMITS = {("lm", JAXMP_AGAIN, "gpu-h100"): (0.52, 0.60)}


# Rows of which the limits, and what is said of errors and dtypes, are checked.
PROMISED = (JAXMP, JAXMP_LOW, JAXMP_AGAIN)


def variants(case: Case, target: str, *, recompute: bool, others: bool) -> tuple[str, ...]:
    """A model's rows; those that cannot be had here are named on standard error and left out."""
    if not others:
        by_hand: tuple[str, ...] = (HAND, HAND_F32) if case.has_softmax else (HAND,)
        ours: tuple[str, ...] = (JAXMP, JAXMP_LOW) if case.has_softmax else (JAXMP,)
        if recompute:
            by_hand, ours = (*by_hand, HAND_AGAIN), (*ours, JAXMP_AGAIN)
            if case.has_softmax and can_fuse(target):
                ours = (*ours, JAXMP_FUSED)
        return FLOAT32, *by_hand, *ours
    tpu = target.startswith("tpu")
    wanted = (peers.JMP, peers.MPX, peers.QWIX_INT8 if tpu else peers.QWIX_FLOAT8)
    found = []
    for peer in wanted:
        if peers.available(peer):
            found.append(peer)
        else:
            print(f"{peer}: not installed", file=sys.stderr)
    jaxmp_rows = (JAXMP, JAXMP_INT8 if tpu else JAXMP_FLOAT8)
    return FLOAT32, HAND, *found, *jaxmp_rows


def can_fuse(target: str) -> bool:
    """Whether the call of the target's kernel for attention can be traced here."""
    if target == "none":
        return False
    if target.startswith("gpu") and not (find_spec("nvidia") and find_spec("nvidia.cudnn")):
        print(f"{JAXMP_FUSED}: cuDNN is not installed", file=sys.stderr)
        return False
    return True


def twins(case: Case, variant: str) -> tuple[str, ...]:
    """The variants that a variant is compared with: hand-written ones, and Qwix in 8 bits."""
    if variant in NOT_OURS:
        return ()
    if variant == JAXMP and case.has_softmax:
        return (HAND_F32, HAND)
    return {
        JAXMP_AGAIN: (HAND, HAND_AGAIN),
        JAXMP_INT8: (peers.QWIX_INT8,),
        JAXMP_FLOAT8: (peers.QWIX_FLOAT8,),
    }.get(variant, (HAND,))


def loss_of(case: Case, variant: str, target: str = "none", *, small: bool = False) -> LossFn:
    if variant in peers.PEERS:
        return peers.loss(case, variant, small=small)
    if variant in (HAND, HAND_F32):
        return case.loss(small=small, dtype=jnp.bfloat16, float32_softmax=variant == HAND_F32)
    if variant == HAND_AGAIN:
        policy = jaxmp.checkpoint_policies.long_products
        return jax.checkpoint(loss_of(case, HAND, small=small), policy=policy)
    loss = case.loss(small=small)
    if variant == FLOAT32:
        return loss
    chip = f"@{target.removesuffix(NO_PREFETCH)}" if variant == JAXMP_FUSED else ""
    return jaxmp.autocast(loss, POLICIES.get(variant, variant) + chip)


NO_PREFETCH = " without prefetch"  # after a target's name


def compile_step(target: str, case: Case, loss_fn: LossFn) -> aot.Compiled:
    """The whole AdamW step: params, optimizer state and model state are donated."""
    optimizer = optax.adamw(3e-4)
    params, state, inputs, labels = case.shapes()
    opt_state = jax.eval_shape(optimizer.init, params)

    def step(params, opt_state, state, inputs, labels):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = grad_fn(params, state, inputs, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, loss

    args = (params, opt_state, state, inputs, labels)
    options = aot.NO_PREFETCH if target.endswith(NO_PREFETCH) else None
    target = target.removesuffix(NO_PREFETCH)
    return aot.compile_for(target, step, args, donate=(0, 1, 2), options=options)


def small_results(case: Case, loss_fn: LossFn, seeds: int) -> list[tuple[float, Any]]:
    """Each seed's loss and gradients at the small size on CPU, every rounding carried out."""
    run = jax.jit(
        jax.value_and_grad(loss_fn, has_aux=True),
        compiler_options={"xla_allow_excess_precision": False},
    )
    results = []
    for seed in range(seeds):
        (loss, _), grads = run(*case.arrays(seed))
        results.append((float(loss), jax.device_get(grads)))
    return results


@functools.cache
def float32_results(case: Case, seeds: int) -> list[tuple[float, Any]]:
    return small_results(case, case.loss(small=True), seeds)


@functools.cache  # they are of no target
def errors(case: Case, variant: str, seeds: int) -> tuple[float, float]:
    """Root mean square over seeds of the relative errors of the gradient and of the loss."""
    loss_fn = loss_of(case, variant, small=True)

    def rms(values: list[float]) -> float:
        return statistics.fmean(v * v for v in values) ** 0.5

    by_seed = list(
        zip(small_results(case, loss_fn, seeds), float32_results(case, seeds), strict=True)
    )
    return (
        rms([aot.relative_error(got, want) for (_, got), (_, want) in by_seed]),
        rms([(loss - want) / want for (loss, _), (want, _) in by_seed]),
    )


def measure(case: Case, variant: str, target: str, seeds: int) -> Row:
    jax.clear_caches()  # Qwix replaces functions of JAX's, of which traces are kept
    start = time.perf_counter()
    loss_fn = loss_of(case, variant, target)
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    shapes = case.shapes()
    forward = aot.contraction_counts(loss_fn, *shapes)
    both = aot.contraction_counts(grad_fn, *shapes)
    low = aot.low_share(grad_fn, *shapes)
    saved_mib = aot.residual_mib(loss_fn, *shapes)
    compiled = None if target == "none" else compile_step(target, case, loss_fn)
    gradient_error, loss_error = (
        (None, None) if variant == JAXMP_FUSED else errors(case, variant, seeds)
    )
    return Row(
        model=case.name,
        variant=variant,
        target=target,
        gb_accessed=compiled and compiled.gb_accessed,
        temp_mib=compiled and compiled.temp_mib,
        peak_mib=compiled and compiled.peak_mib,
        mcycles=compiled and compiled.mcycles,
        saved_mib=saved_mib,
        low=low,
        forward=dict(forward),
        backward=dict(both - forward),
        gradient_error=gradient_error,
        loss_error=loss_error,
        seconds=time.perf_counter() - start,
    )


class Cache:
    """Rows that do not depend on jaxmp, kept in a JSON file that the caller names."""

    def __init__(self, path: Path | None, seeds: int):
        self._path = path
        self._rows = json.loads(path.read_text()) if path and path.exists() else {}
        here = Path(__file__).parent
        table = Path(chips.__file__).with_name("chips.toml")
        files = ["models.py", "transformer.py", "convnets.py", "mixtures.py", "graphs.py"]
        files += ["peers.py", "aot.py"]
        sources = [*(here / name for name in files), table]
        # A row is stale once anything that made it has changed.
        self._made_by = "|".join(
            [f"seeds={seeds}", os.environ["XLA_FLAGS"]]
            + [f"{p}={version(p)}" for p in (*PACKAGES, *peers.PACKAGES.values())]
            + [f"{s.name}={hash_text(s.read_text())}" for s in sources]
        )

    def get(self, *key: str) -> Row | None:
        found = self._rows.get("|".join([*key, self._made_by]))
        return Row(**found) if found else None

    def put(self, row: Row) -> None:
        key = f"{row.model}|{row.variant}|{row.target}|{self._made_by}"
        self._rows[key] = dataclasses.asdict(row)
        if self._path:
            self._path.write_text(json.dumps(self._rows, indent=1))


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions(*others: str) -> str:
    """What the figures were made with."""
    packages = [f"{package} {version(package)}" for package in (*PACKAGES, *others)]
    return ", ".join([f"Python {platform.python_version()}", *packages])


def pairs(case: Case, rows: list[Row]) -> list[tuple[Row, Row]]:
    """Each row and the hand-written rows it is compared with."""
    by_variant = {row.variant: row for row in rows}
    found = [(row, by_variant.get(hand)) for row in rows for hand in twins(case, row.variant)]
    return [(row, hand) for row, hand in found if hand is not None]


def over_limits(case: Case, rows: list[Row]) -> list[str]:
    """What of jaxmp's rows is over its limit."""
    failures = []
    for row, hand in pairs(case, rows):
        if row.variant not in PROMISED or hand.variant not in (HAND, HAND_F32):
            continue
        if row.variant == JAXMP and hand.variant != twins(case, JAXMP)[0]:
            continue  # of its softmax the hand-written row has a narrower one
        found = ratios(row, hand)
        bytes_limit, saved_limit = LIMITS.get((row.model, row.variant), (None, None))
        limits = {"gb_accessed": bytes_limit, "saved_mib": saved_limit, "gradient_error": 1.0}
        memory = MEMORY_LIMITS.get((row.model, row.variant, row.target), (None, None))
        limits |= {"temp_mib": memory[0], "peak_mib": memory[1]}
        failures += [
            f"{row.model}, {row.variant}: {name} is {found[name]:.4f} of hand-written, over {most}"
            for name, most in limits.items()
            if most is not None and name in found and found[name] > most
        ]
        failures += [
            f"{row.model}, {row.variant}: {direction} contractions are {counts}"
            for direction, counts in (("forward", row.forward), ("backward", row.backward))
            if set(counts) != {"bfloat16"}
        ]
    return failures


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--target", nargs="+", choices=(*chip_names(), "none"), default=["tpu-v5e"])
    parser.add_argument("--no-prefetch", action="store_true", help="TPU: keep every array in HBM")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="these rows alone, or policies")
    parser.add_argument("--seeds", type=int, default=3, help="runs that errors are averaged over")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument(
        "--cache", type=Path, help="keep float32 and hand-written rows in this file, and use them"
    )
    parser.add_argument("--recompute", action="store_true", help="rows that keep less")
    parser.add_argument("--peers", action="store_true", help="rows of other libraries")
    parser.add_argument("--check", action="store_true", help="exit with 1 when over a limit")
    args = parser.parse_args()
    if args.no_prefetch:
        if not all(target.startswith("tpu") for target in args.target):
            parser.error("--no-prefetch is an option of the TPU compiler")
        args.target = [target + NO_PREFETCH for target in args.target]
    return args


def main() -> int:
    args = parse_args()
    print(versions(*(peers.PACKAGES.values() if args.peers else ())))
    cache = Cache(args.cache, args.seeds)
    named = {*NOT_OURS, HAND_AGAIN, *POLICIES}
    policies = [row for row in args.rows or () if row not in named]
    for policy in policies:
        jaxmp.get_policy(policy)  # refuses a row that is neither
    all_rows, failures = [], []
    for name, target in itertools.product(args.models, args.target):
        case = CASES[name]
        rows = []
        usual = variants(case, target, recompute=args.recompute, others=args.peers)
        for variant in (*usual, *policies):
            if args.rows and variant not in args.rows:
                continue
            row = cache.get(name, variant, target) if variant in NOT_OURS else None
            if row is None:
                print(f"{name}, {variant} on {target} ...", file=sys.stderr, flush=True)
                row = measure(case, variant, target, args.seeds)
                if variant in NOT_OURS:
                    cache.put(row)
            rows.append(row)
        show(rows, pairs(case, rows))
        failures += over_limits(case, rows)
        all_rows += rows
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(r) for r in all_rows], indent=1))
    print()
    for failure in failures:
        print(f"* over the limit: {failure}")
    return int(bool(failures) and args.check)


if __name__ == "__main__":
    raise SystemExit(main())
