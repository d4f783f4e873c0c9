"""One training run of a validation: checks, calls and records the result of `make_step`."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from jaxmp._core.jaxprs.trace import trace
from jaxmp._core.printable import shown
from jaxmp._tools.arguments import mismatch
from jaxmp._tools.files import DamagedError, bytes_of, digest, text_of
from jaxmp._tools.validate.perturb import perturb

_CHUNK: Final = 32  # steps whose metrics are fetched at once: the device need not wait for each
# A scale of 2^60, the largest that makes sense, is down at 1 after 60 overflows.
_HOPELESS: Final = 100
_MADE: Final = "(state, step), or (state, step, evaluate) with evaluate(state) -> loss"
_KEPT: Final = ("loss", "grad_norm", "loss_scale", "finite")

# The types of a run's fields, and of the items of those that are series.
_NUMBERS: Final = (float, int)
_TYPES: Final = {
    "label": (str,),
    "seed": (int,),
    "perturbation": (int,),
    "losses": _NUMBERS,
    "grad_norms": _NUMBERS,
    "loss_scales": _NUMBERS,
    "finite": (bool,),
    "final": _NUMBERS,
    "held_out": (bool,),
    "data": (int,),
}
_SERIES: Final = {"losses", "grad_norms", "loss_scales", "finite", "data"}

# The state, step, and `evaluate` if there is one.
Made = tuple[Any, Callable[..., Any], Callable[..., Any] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """The settings that all runs have in common."""

    make_step: Callable[..., Any]
    batches: Callable[[int], Any] | None
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A run to make: of the policy called `label`, from a seed; 0 is no perturbation."""

    label: str
    policy: Any
    seed: int
    perturbation: int = 0

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}" + (
            f", perturbation {self.perturbation}" * bool(self.perturbation)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The record of a training run, step by step.

    Attributes:
      label: the policy's name.
      seed: the seed of the run.
      perturbation: which of the perturbed runs of this seed; 0 for one that was not.
      losses: of each step, on its batch. Fewer than the steps if the run was given up, after its
        losses had been non-finite for 100 steps.
      grad_norms: of each step, if the step reports them.
      loss_scales: likewise.
      finite: likewise: whether the step was applied, not skipped.
      final: the loss that is judged: `evaluate`'s after the last step, or the mean training loss of
        the last twentieth of the steps.
      held_out: whether `final` is `evaluate`'s.
      data: a checksum of each batch, if there are `batches`.
    """

    label: str
    seed: int
    perturbation: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    loss_scales: tuple[float, ...]
    finite: tuple[bool, ...]
    final: float
    held_out: bool
    data: tuple[int, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Returns the run with these fields, in which lists stand for tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        run = cls(**fields)
        for name, kinds in _TYPES.items():
            value = fields[name]
            items = value if name in _SERIES else (value,)
            if not isinstance(items, tuple) or not all(type(item) in kinds for item in items):
                raise DamagedError(f"{name} is {shown(value)}")
        for name in ("grad_norms", "loss_scales", "finite"):
            if len(fields[name]) not in (0, len(run.losses)):
                raise DamagedError(f"{name} has {len(fields[name])} of {len(run.losses)} steps")
        return run

    def same_as(self, other: Run) -> bool:
        """Returns whether both runs have the same losses, to the bit."""
        return self.losses == other.losses and self.final == other.final


def make(task: Task, job: Job) -> Made:
    """Makes the state, step and `evaluate` of a run.

    Raises:
      TypeError: if `make_step` returns something else.
    """
    made = task.make_step(job.policy, job.seed)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise TypeError(f"validate: make_step returned {_kind(made)}; it must return {_MADE}.")
    state, step, evaluate = (*made, None)[:3]
    if not callable(step):
        swapped = "; are the two swapped?" if callable(state) else ""
        raise TypeError(
            f"validate: make_step must return {_MADE}, and its step is {_kind(step)}{swapped}"
        )
    if evaluate is not None and not callable(evaluate):
        raise TypeError(
            f"validate: make_step must return {_MADE}, and its evaluate is {_kind(evaluate)}."
        )
    if not jax.tree.leaves(state):
        raise TypeError(
            f"validate: the state that make_step returned for {job} has no leaves "
            f"({_kind(state)}); it must return {_MADE}."
        )
    return state, step, evaluate


def program_of(task: Task, job: Job, made: Made) -> str:
    """Hashes a run's program: its first step, `evaluate`, and the arrays that they begin with.

    Raises:
      TypeError: if JAX cannot trace them.
    """
    state, step, evaluate = made
    first = next(_feed(task, job.seed))
    args = (state, first)
    parts = list(bytes_of(args))
    try:
        parts += text_of(trace(_taking(step, first, job), args, {}).jaxpr)
        if evaluate is not None:
            parts += text_of(trace(evaluate, (state,), {}).jaxpr)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            "validate: out= identifies runs by the jaxprs of step and evaluate, and those of "
            f"{job} cannot be traced ({type(error).__name__}): identify your program and its data "
            "by key=, such as key=('my_model 1.2', 'data of May')."
        ) from error
    return digest(parts)


def train(
    task: Task, job: Job, made: Made, tick: Callable[[int], Any], data: tuple[int, ...] = ()
) -> Run:
    """Makes one run, whose batches must have the checksums `data`, if those are known.

    `tick` is called with the number of steps since its last call.

    Raises:
      TypeError: if `step` or `evaluate` returns a wrong type.
      ValueError: if a metric is missing or not a number, the batches end early or differ from
        `data`, or nothing in the state can be perturbed.
    """
    state, step, evaluate = made
    record: dict[str, list[Any]] = {name: [] for name in _KEPT}
    pending: list[dict[str, Any]] = []
    checksums: list[int] = []
    perturbed = not job.perturbation
    names: set[str] | None = None

    def fetch() -> None:
        for metrics in jax.device_get(pending):
            for name, value in metrics.items():
                record[name].append(bool(value) if name == "finite" else float(value))
        tick(len(pending))
        pending.clear()

    for i, fed in enumerate(_feed(task, job.seed)):
        if task.batches is not None:
            checksums.append(checksum := _checksum(fed))
            if data and checksum != data[i]:
                raise ValueError(
                    f"validate: batch {i} of {job} differs from the first run's of this "
                    "seed: batches(seed) must return the same batches in the same order each time "
                    "(is a generator, or a random number generator, shared between the runs?)."
                )
        if not perturbed:  # parameters that are all zero can be after the first step
            state, perturbed = perturb(state, (job.seed, job.perturbation))
        state, metrics = _read_step(_taking(step, fed, job)(state, fed), i, job)
        if names not in (None, metrics.keys()):
            raise ValueError(
                f"validate: step {i} of {job} reports {_listed(metrics)}, and the one before "
                f"{_listed(names or ())}: each step has to report the same."
            )
        names = set(metrics)
        pending.append(metrics)
        if len(pending) == _CHUNK:
            fetch()
            if not any(map(math.isfinite, record["loss"][-_HOPELESS:])) and i >= _HOPELESS:
                break
    fetch()
    if not perturbed:
        raise ValueError(
            "validate: found no floating parameter to perturb in make_step's state, "
            "so float32's noise floor cannot be measured. A state is a pytree: a TrainState, "
            "(params, opt_state), NNX modules."
        )
    return Run(
        label=job.label,
        seed=job.seed,
        perturbation=job.perturbation,
        losses=tuple(record["loss"]),
        grad_norms=tuple(record["grad_norm"]),
        loss_scales=tuple(record["loss_scale"]),
        finite=tuple(record["finite"]),
        final=_final(record, task.steps) if evaluate is None else _evaluated(evaluate, state),
        held_out=evaluate is not None,
        data=tuple(checksums),
    )


def _feed(task: Task, seed: int) -> Iterator[Any]:
    """Yields the second argument of each step: its number, or its batch."""
    if task.batches is None:
        yield from range(task.steps)
        return
    batches = task.batches(seed)
    try:
        iterator = iter(batches)
    except TypeError:
        raise TypeError(
            f"validate: batches({seed}) returned {_kind(batches)}; it must return an iterable of "
            "batches."
        ) from None
    end = object()
    for i in range(task.steps):
        if (batch := next(iterator, end)) is end:
            raise ValueError(
                f"validate: batches({seed}) ended after {i} of {task.steps} batches: repeat the "
                "data, or take fewer steps. (An iterator that was used up by an earlier run, where "
                "a new one is wanted for each?)"
            )
        yield batch


def _checksum(batch: Any) -> int:
    """Computes a checksum of all leaves."""
    return functools.reduce(lambda total, part: zlib.crc32(part, total), bytes_of(batch), 0)


def _taking(step: Callable[..., Any], fed: Any, job: Job) -> Callable[..., Any]:
    """Returns `step` as step(state, batch), also one that takes parts, step(state, x, y)."""
    wrong = mismatch(step, None, fed)
    if not wrong:
        return step
    if isinstance(fed, (tuple, list)) and not mismatch(step, None, *fed):
        return lambda state, parts: step(state, *parts)
    what = "step(state, i)" if isinstance(fed, int) else f"step(state, batch), a batch {_kind(fed)}"
    raise TypeError(
        f"validate: step is called as {what}; in {job} it takes {wrong}. "
        "batches=lambda seed: ... gives it batches: of a tuple (x, y) each part may be an argument."
    )


def _read_step(result: Any, i: int, job: Job) -> tuple[Any, dict[str, Any]]:
    """Returns the state, and the metrics that are kept."""
    wanted = 'step must return (state, loss), or (state, metrics) as {"loss": loss}'
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"validate: {wanted}; step {i} of {job} returned {_kind(result)}.")
    state, metrics = result
    if _is_number(metrics):
        metrics = {"loss": metrics}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"validate: {wanted}; step {i} of {job} has metrics of {_kind(metrics)}.")
    if "loss" not in metrics:
        raise ValueError(
            f'validate: {wanted}; step {i} of {job} reports {_listed(metrics)}, and no "loss".'
        )
    kept = {name: metrics[name] for name in _KEPT if name in metrics}
    for name, value in kept.items():
        if not _is_number(value):
            raise ValueError(
                f"validate: the metric {name!r} must be one number, and is {_kind(value)} of shape "
                f"{np.shape(value)}: report its mean, for example."
            )
    return state, kept


def _evaluated(evaluate: Callable[..., Any], state: Any) -> float:
    loss = evaluate(state)
    if not _is_number(loss):
        raise TypeError(
            f"validate: evaluate(state) must return the loss, one number, and returned "
            f"{_kind(loss)} of shape {np.shape(loss)}."
        )
    return float(loss)


def _final(record: Mapping[str, Sequence[Any]], steps: int) -> float:
    """Returns the mean over the last twentieth of the steps without skips; NaN if given up."""
    window = max(1, steps // 20)
    losses = record["loss"][-window:]
    made = record["finite"][-window:] or [True] * len(losses)
    counted = [loss for loss, so in zip(losses, made, strict=True) if so]
    return float(np.mean(counted)) if counted and len(record["loss"]) == steps else math.nan


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and np.shape(value) == ()


def _listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(map(str, names)))) or "nothing"


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
