"""Trains one model under every recipe, and compares what is held out: are 8 or 4 bits as good?

    nice python benchmarks/convergence.py --out convergence.json      # half an hour on two cores
    nice python benchmarks/convergence.py --out convergence.json --tasks digits
    python benchmarks/convergence.py --out convergence.json --print   # what is there, as a table

Two tasks: the byte-level transformer of `examples/train_lm.py` at its *small* size, on the source
text of Python's standard library; and a perceptron (64-128-128-10) on scikit-learn's digits. Each
recipe trains every seed from the float32 run's initialization on its batches, in the same order.
Every size is a multiple of 16, in training and in evaluation, or products would silently stay in 16
bits; the table says how many were multiplied in fewer: `planned`, of those in the loss function, by
`jaxmp.explain`; `multiplied`, of the whole step, by the dtypes in its jaxpr. What a TPU or a GPU
multiplies in 8 or 4 bits, the CPU computes from the same quantized values, widened.

How to read the differences:

* `spread` is that of float32 from seed to seed, largest less smallest, relative to the mean. A
  difference inside it proves nothing: another seed makes as much of one. Each seed is compared with
  float32's run of it; after the mean stands the standard error of those differences.
* "float32, perturbed" is float32 with every initial parameter changed by one part in 10^6. What it
  differs by is chance alone: a recipe has to differ by more before anything is learned about it.

Runs that are finished are kept in `--out`, until jaxmp or this program changes: an interrupted
comparison goes on where it was. Recipes that jaxmp refuses are listed as not run, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As in `autocast_aot.py`: without it the CPU backend sums some bfloat16 products in bfloat16.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
)

import flax
import flax.linen as nn
import jax
import numpy as np
import optax

import jaxmp

import aot

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "examples"))


class Stages(NamedTuple):
    """What a model is trained under, fine-tuned under if it is, and served under.

    A fine-tune is of a tenth as many steps more, at a fifth of the learning rate.
    """

    trained: str | jaxmp.PolicyMap
    tuned: str | jaxmp.PolicyMap = ""
    served: str | jaxmp.PolicyMap = ""


PERTURBED = "float32, perturbed"
# Of the language model: its table is its head as well.
TABLE_IN_INT8 = jaxmp.PolicyMap(
    {"Embed_0": "mixed_bfloat16,weights=int8"}, default="mixed_bfloat16,weights=int4@row"
)
# In the order in which they run: what everything is compared with comes first.
RECIPES = {
    "float32": "float32",
    PERTURBED: "float32",
    "mixed_bfloat16": "mixed_bfloat16",
    "mixed_float8": "mixed_float8",
    "float8 of TPU v5e, v5p, v6e": "mixed_bfloat16,matmul=e4m3b11",
    "mixed_int8": "mixed_int8",
    "float8, e5m2 gradients": "mixed_bfloat16,matmul=e4m3:e5m2:e5m2",
    "float8 by row": "mixed_bfloat16,matmul=e4m3@row",
    "float8, bf16 weight gradients": "mixed_bfloat16,matmul=e4m3:e4m3:bf16",
    "float32 forward, bf16 gradients": "float32,matmul=f32:bf16:bf16",
    "bf16 forward, float32 gradients": "mixed_bfloat16,matmul=bf16:f32:f32",
    "mxfp8": "mixed_bfloat16,matmul=mxfp8",
    "blockwise_float8": "mixed_bfloat16,matmul=blockwise_float8",
    "nvfp4": "mixed_bfloat16,matmul=nvfp4",
    "nvfp4, plain Hadamard": "mixed_bfloat16,matmul=nvfp4+plain_hadamard",
    "nvfp4, nearest": "mixed_bfloat16,matmul=nvfp4+nearest",
    "nvfp4, bf16 forward": "mixed_bfloat16,matmul=bf16:e2m1:e2m1@nv",
    "mxfp4": "mixed_bfloat16,matmul=mxfp4",
    "mxfp4, plain Hadamard": "mixed_bfloat16,matmul=mxfp4+plain_hadamard",
    "nvfp4, fine-tuned with bf16 forward": Stages(
        "mixed_bfloat16,matmul=nvfp4", "mixed_bfloat16,matmul=bf16:e2m1:e2m1@nv"
    ),
    # The weights served in few bits: rounded after training, fine-tuned for them, trained for them.
    "bfloat16, fine-tuned": Stages("mixed_bfloat16", "mixed_bfloat16"),
    **{
        f"{name}, {how}": stages
        for name, policy in (
            ("int4 by row", "mixed_bfloat16,weights=int4@row"),
            ("int4 by row, the table in int8", TABLE_IN_INT8),
            ("int4 in blocks", "mixed_bfloat16,weights=int4"),
            ("e2m1 in blocks of 32", "mixed_bfloat16,weights=e2m1@32"),
        )
        for how, stages in (
            ("rounded", Stages("mixed_bfloat16", served=policy)),
            ("fine-tuned", Stages("mixed_bfloat16", policy)),
            ("trained", Stages(policy)),
        )
    },
}
TARGET = 0.005  # the most that a recipe's loss may be from float32's
FEW_BITS = ("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2", "int8", "float4_e2m1fn")

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and what is held out, in batches of one shape."""

    name: str
    model: nn.Module
    batches: Callable[[int], Iterator[Batch]]  # of a seed
    held_out: list[Batch]
    steps: int
    learning_rate: float
    seeds: int


class MLP(nn.Module):
    """float32[batch, 64] to the logits of the ten digits: [batch, 10]."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def language_model(steps: int | None) -> Task:
    import train_lm

    size = train_lm.SIZES["small"]
    size = size._replace(steps=steps or size.steps)
    text, held_out_text = train_lm.read_text()
    starts = np.arange(256) * (len(held_out_text) - size.length) // 256
    held_out = train_lm.windows(held_out_text, starts, size.length)

    def split(tokens: np.ndarray) -> Batch:
        return tokens[:, :-1], tokens[:, 1:]

    return Task(
        "lm",
        train_lm.LM(size),
        lambda seed: map(split, train_lm.batches(text, size, seed)),
        [split(tokens) for tokens in np.split(held_out, 256 // size.batch)],
        size.steps,
        size.learning_rate,
        seeds=3,
    )


def digits(steps: int | None, batch: int = 128) -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    steps = steps or 400
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images.astype("f") / 16, labels, test_size=0.5, stratify=labels, random_state=0
    )

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = rng.integers(len(split[0]), size=batch)
            yield split[0][chosen], split[2][chosen]

    whole = range(0, len(split[1]) - batch + 1, batch)
    held_out = [(split[1][i : i + batch], split[3][i : i + batch]) for i in whole]
    return Task("digits", MLP(), batches, held_out, steps, 1e-3, seeds=12)


TASKS = {"lm": language_model, "digits": digits}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run came to."""

    loss: float  # held out, after the last step
    planned: str
    multiplied: str
    seconds: float


def train(task: Task, recipe: str, seed: int) -> Run:
    started = time.perf_counter()
    said = RECIPES[recipe]
    stages = said if isinstance(said, Stages) else Stages(said)
    params = jaxmp.wrap(task.model, stages.trained).init(jax.random.key(seed), task.held_out[0][0])[
        "params"
    ]
    if recipe == PERTURBED:
        params = jax.tree.map(lambda p: p * np.float32(1 + 1e-6), params)
    loss_fn = loss_under(task, stages.trained)
    planned, multiplied = products(loss_fn, stages.trained, params, task.held_out[0])
    params = trained(loss_fn, params, task.batches(seed), task.steps, task.learning_rate)
    if stages.tuned:
        loss_fn, steps = loss_under(task, stages.tuned), task.steps // 10
        more = itertools.islice(task.batches(seed + 1000), steps)
        params = trained(loss_fn, params, more, steps, task.learning_rate / 5)
    evaluate = jax.jit(loss_under(task, stages.served) if stages.served else loss_fn)
    loss = statistics.fmean(float(evaluate(params, batch)) for batch in task.held_out)
    return Run(loss, planned, multiplied, time.perf_counter() - started)


def loss_under(task: Task, policy: str | jaxmp.PolicyMap) -> Callable[[Any, Batch], jax.Array]:
    model = jaxmp.wrap(task.model, policy)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss_fn


def trained(
    loss_fn: Callable[[Any, Batch], jax.Array],
    params: Any,
    batches: Iterable[Batch],
    steps: int,
    learning_rate: float,
) -> Any:
    schedule = optax.warmup_cosine_decay_schedule(0, learning_rate, steps // 10, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params


def products(
    loss_fn: Any, policy: str | jaxmp.PolicyMap, params: Any, batch: Batch
) -> tuple[str, str]:
    """How many products of the loss run as the recipe says; what the step's are multiplied in."""
    recipe = None if isinstance(policy, jaxmp.PolicyMap) else jaxmp.get_policy(policy).matmul
    rows = [r for r in jaxmp.explain(loss_fn)(params, batch).rows if r.op in aot.CONTRACTIONS]
    meant = sum(r.count for r in rows if f", {recipe}" in r.reason)
    planned = f"{meant} of {sum(r.count for r in rows)}" if recipe else "-"
    counts = aot.contraction_counts(jax.value_and_grad(loss_fn), params, batch)
    few = sum(n for dtypes, n in counts.items() if set(dtypes.split("*")) & set(FEW_BITS))
    if recipe and not meant and not few:
        raise ValueError(f"convergence: no product of the model multiplies as {recipe}")
    return planned, ", ".join(f"{n} {dtype}" for dtype, n in counts.most_common())


class Kept:
    """Finished runs, in a JSON file; those of other versions of the program are not read."""

    def __init__(self, path: Path):
        self._path = path
        self._runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        sources = [Path(__file__), *sorted(Path(jaxmp.__file__).parent.rglob("*.py"))]
        made_by = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
        self._made_by = f"{versions()}|{made_by.hexdigest()[:12]}"

    def _key(self, task: Task, recipe: str, seed: int) -> str:
        return f"{task.name}|{task.steps}|{recipe}|{RECIPES[recipe]}|{seed}|{self._made_by}"

    def get(self, task: Task, recipe: str, seed: int) -> Run | None:
        found = self._runs.get(self._key(task, recipe, seed))
        return Run(**found) if found else None

    def put(self, task: Task, recipe: str, seed: int, run: Run) -> None:
        self._runs[self._key(task, recipe, seed)] = dataclasses.asdict(run)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._runs, indent=1))
        new.replace(self._path)  # a run that is interrupted here leaves the old file


def versions() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, JAX {jax.__version__}, Flax {flax.__version__}"


def missing(task: Task, recipe: str, seed: int, kept: Kept, *, run: bool) -> str:
    """Trains if it must and may; why there is no result, or ''."""
    if kept.get(task, recipe, seed):
        return ""
    if not run:
        return "not in the file"
    try:
        result = train(task, recipe, seed)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    kept.put(task, recipe, seed, result)
    print(f"{task.name}, {recipe}, seed {seed}: {result.loss:.4f}, {result.seconds:.0f} s")
    return ""


def report(task: Task, seeds: list[int], kept: Kept, why_not: dict[str, str]) -> None:
    def losses(recipe: str) -> np.ndarray | None:
        runs = [kept.get(task, recipe, seed) for seed in seeds]
        return np.array([run.loss for run in runs]) if all(runs) else None

    base = losses("float32")
    if base is None:
        print(f"\n{task.name}: nothing to compare with: float32: {why_not['float32']}")
        return
    spread = (base.max() - base.min()) / base.mean()
    print(
        f"\n## {task.name}: {task.steps} steps, seeds {', '.join(map(str, seeds))}; {versions()}, "
        f"{datetime.now(UTC):%Y-%m-%d}\n\n"
        f"float32's own spread from seed to seed: {spread:.2%}\n\n"
        "| recipe | held-out loss | against float32 | seed by seed | planned | multiplied |\n"
        "| :-- | --: | --: | --: | --: | :-- |"
    )
    said = []
    for recipe, why in why_not.items():
        found = losses(recipe)
        if found is None:
            print(f"| {recipe} | not run | | | | {why} |")
            continue
        change = found.mean() / base.mean() - 1
        pairs = found / base - 1
        error = pairs.std(ddof=1) / len(seeds) ** 0.5
        run = kept.get(task, recipe, seeds[0])
        assert run is not None
        mean, by_seed = f"{change:+.2%} ± {error:.2%}", f"{pairs.min():+.2%} to {pairs.max():+.2%}"
        if recipe == "float32":
            mean = by_seed = ""
        else:
            said.append(in_words(recipe, change, spread))
        print(
            f"| {recipe} | {found.mean():.4f} | {mean} | {by_seed} | {run.planned} | "
            f"{run.multiplied} |"
        )
    print("\n" + "\n".join(said))


def in_words(recipe: str, change: float, spread: float) -> str:
    target = "within" if abs(change) <= TARGET else "MISSED: beyond"
    if abs(change) <= spread:
        meaning = f"inside float32's seed spread of {spread:.2%}, so it proves nothing"
    else:
        meaning = f"outside float32's seed spread of {spread:.2%}"
    return f"* {recipe}: {change:+.2%}, {target} {TARGET:.1%}; {meaning}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where finished runs are kept")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, help="how many (default: lm 3, digits 12)")
    parser.add_argument("--steps", type=int, help="default: as suits the task")
    parser.add_argument("--print", action="store_true", help="train nothing")
    args = parser.parse_args(arguments)
    if (args.seeds is not None and args.seeds < 2) or (args.steps is not None and args.steps < 10):
        parser.error("--seeds must be at least 2, or there is no spread; --steps at least 10")
    kept = Kept(args.out)
    recipes = [recipe for recipe in RECIPES if recipe in {"float32", *args.recipes}]
    for name in args.tasks:
        task = TASKS[name](args.steps)
        seeds = list(range(args.seeds or task.seeds))
        why_not: dict[str, str] = {}
        for recipe in recipes:
            for seed in seeds:
                why_not[recipe] = missing(task, recipe, seed, kept, run=not args.print)
                if why_not[recipe]:
                    break
        report(task, seeds, kept, why_not)


if __name__ == "__main__":
    main()
