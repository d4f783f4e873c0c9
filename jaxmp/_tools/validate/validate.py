"""`validate`: does another policy train to the same result, apart from chance?"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jmp
import numpy as np

from jaxmp._tools.arguments import check_positional, mismatch
from jaxmp._tools.files import RunCache, described
from jaxmp._tools.validate.numerics import check_cpu_sums, describe_numerics, remarks_on
from jaxmp._tools.validate.progress import progress_bar
from jaxmp._tools.validate.report import ValidationReport
from jaxmp._tools.validate.run import Job, Run, Task, make, program_of, train
from jaxmp._tools.validate.verdict import conclude, spread_of
from jaxmp.policy import PolicyLike, PolicyMap, get_policy


def validate(
    make_step: Callable[[Any, int], Any],
    policy: PolicyLike | Sequence[PolicyLike] | Mapping[str, Any],
    *misplaced: Any,
    seeds: int | Sequence[int] = 3,
    reference: Any = "float32",
    perturbations: int = 1,
    threshold: float = 0.005,
    grad_norm_threshold: float | None = 0.1,
    curve_threshold: float | None = 0.05,
    out: str | os.PathLike[str] | None = None,
    key: Any = None,
    progress: bool = True,
) -> Callable[..., ValidationReport]:
    """Trains in float32 and under other policies, and judges whether the results are the same.

    Every run of a seed starts from the same parameters and sees the same batches in the same order;
    only the policy differs, and each run is compared with float32's of its seed. But float32 itself
    reaches another loss as soon as one last bit differs: so it also runs with each initial
    parameter moved to the number above or below, or left, at random. The bound that the mean over
    seeds of such differences stays below, 19 times in 20, is its *noise floor*. Rounding disturbs
    more than a last bit, so the scatter of the policy's own differences from seed to seed counts as
    well: the *noise* is the wider of the two. The verdict on the final loss:

    * **passes**: the policy's is within `threshold` of float32's, and so is the noise;
    * **fails**: it is beyond `threshold`, and beyond the noise. A loss that is not finite also
      fails, as do gradient norms or curves beyond their own thresholds;
    * **inside noise: proves nothing**: the noise is wider than `threshold`, and the difference
      inside it: if the policy did harm, this would not show it. More seeds, longer runs or a lower
      learning rate would. A policy that does not change a single bit proves nothing either.

    The final loss is `evaluate`'s, if `make_step` returns one; else the mean training loss of the
    last twentieth of the steps. Differences are relative to float32's mean, in either direction.

    Args:
      make_step: ``make_step(policy, seed)`` makes a new model and optimizer under the policy, as
        `jaxmp.wrap(model, policy)`, and returns ``(state, step)`` or ``(state, step, evaluate)``:

        * ``state``: a pytree, such as a `TrainState`, or NNX modules;
        * ``step(state, i) -> (state, loss)`` makes step ``i``, or with `batches` ``step(state,
          batch)``, or for tuples ``step(state, x, y)``. Best compiled, by `jax.jit`; a function
          made once for each policy and cached compiles once for all seeds. In place of the loss it
          may return a dict of numbers: "loss", not multiplied by a loss scale, and optionally
          "grad_norm" (unscaled too), "loss_scale", and "finite", which is whether the step was
          applied;
        * ``evaluate(state) -> loss``, on held-out data.

        Everything in it must be determined by the policy and the seed.
      policy: the policies to compare: one or several that `jaxmp.get_policy` takes, or a mapping of
        names to whatever your `make_step` takes for a policy.
      seeds: the number of seeds, from 0 on, or the seeds. Two prove little: the noise narrows fast
        with more.
      reference: the policy to compare with instead of float32, or what `make_step` takes for one.
      perturbations: the number of perturbed runs per seed.
      threshold: the largest relative difference in final loss that passes.
      grad_norm_threshold: the same for gradient norms, of which the median over the steps of the
        relative difference is taken; None not to judge them.
      curve_threshold: the same for the training loss on average over all steps; None not to judge
        it. If steps were skipped, which shifts the rest of a curve, it is not judged.
      out: a folder where finished runs are kept: a validation that was killed continues with the
        run it was at. A run is repeated when one of these has changed: the policy, the seed,
        `steps`; `key`; versions of jaxmp, JAX, Flax, optax, NumPy and Python; the device,
        XLA_FLAGS, matmul precision, 64 bits, and the random number generator.
      key: anything else that determines the outcome, by its `repr`: a version of your code and
        data. None: the first step as JAX traces it, with the state and the batch that it is called
        with, and `evaluate`. Data that later steps read from elsewhere is not covered then.
      misplaced: takes nothing; its error says where further arguments go.
      progress: whether to show a bar on stderr; without tqdm (``jaxmp[progress]``), a line a run.

    Returns:
      A function of ``(steps, batches=None)`` that returns the report: `print` it, `plot` it.
      ``steps`` is the number of steps of each run. ``batches(seed)`` returns an iterable of at
      least ``steps`` batches, pytrees of arrays, the same at each call: runs are checked for that.

    Raises:
      ValueError: if a policy is unknown or named twice; an option is out of range; batches or
        losses show that `make_step` or `batches` depend on more than policy and seed; float32
        itself does not reach a finite loss; a metric is missing or not a number.
      TypeError: if something is not callable, or returns a wrong type; if, with `out` and without
        `key`, JAX cannot trace `step`.
      RuntimeError: on a CPU that sums bfloat16 products in bfloat16; it names the flag that helps.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxmp
      >>> def make_step(policy, seed):
      ...     x = jax.random.normal(jax.random.key(seed), (64, 8))
      ...     model = jaxmp.autocast(lambda p, x: jnp.mean((x @ p["w"] - jnp.sin(x)) ** 2), policy)
      ...     tx = jaxmp.loss_scale_for(policy, optax.sgd(0.1))
      ...
      ...     @jax.jit
      ...     def step(state, i):
      ...         loss, grads = state.value_and_grad(model)(state.params, x)
      ...         metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
      ...         return state.apply_gradients(grads=grads), metrics
      ...
      ...     params = {"w": jax.random.normal(jax.random.key(seed + 1), (8, 8))}
      ...     return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx), step
      >>> report = validate(make_step, "mixed_float16", seeds=2)(steps=20)
      >>> report["mixed_float16"].verdict
      'passes'
    """
    check_positional(misplaced, "validate(make_step, policy, seeds=3)(steps, batches)")
    named = _named_policies(policy)
    base_name = _name_of_reference(reference, named)
    seeds = _seeds(seeds)
    perturbations = _count("perturbations", perturbations)
    _check_thresholds(threshold, grad_norm_threshold, curve_threshold)
    limits = {
        "final loss": threshold, "gradient norm": grad_norm_threshold, "curve": curve_threshold,
    }  # fmt: skip

    def validated(
        steps: int, batches: Callable[[int], Iterable[Any]] | None = None
    ) -> ValidationReport:
        _check_function("make_step(policy, seed)", make_step, "policy", 0)
        if batches is not None:
            _check_function("batches(seed)", batches, 0)
        steps = _count("steps", steps)
        check_cpu_sums(map(_parsed, (reference, *named.values())))
        numerics = describe_numerics()
        task = Task(make_step, batches, steps)
        base = [Job(base_name, reference, seed) for seed in seeds]
        perturbed = [
            Job(base_name, reference, seed, n + 1) for seed in seeds for n in range(perturbations)
        ]
        others = {name: [Job(name, spec, seed) for seed in seeds] for name, spec in named.items()}
        total = steps * (len(base) + len(perturbed) + len(others) * len(seeds))
        with progress_bar(total, shown=progress) as bar:
            maker = _Runs(task, RunCache("validate", out), key, numerics, bar)
            base_runs = maker.make_base(base)
            perturbed_runs = maker.make_perturbed(perturbed)
            other_runs = {name: list(map(maker.make, jobs)) for name, jobs in others.items()}
        results = tuple(
            conclude(name, runs, base_runs, perturbed_runs, limits)
            for name, runs in other_runs.items()
        )
        return ValidationReport(
            policies=results,
            reference=base_name,
            steps=steps,
            seeds=seeds,
            threshold=threshold,
            spread=spread_of(base_runs),
            floor=results[0].checks[0].floor,
            reference_runs=tuple(base_runs),
            perturbed_runs=tuple(perturbed_runs),
            numerics=numerics,
            remarks=remarks_on(numerics),
        )

    return validated


class _Runs:
    """The maker of runs that are not cached; checks each against the reference of its seed."""

    def __init__(
        self, task: Task, kept: RunCache, key: Any, numerics: Mapping[str, str], bar: Any
    ) -> None:
        self._task, self._kept, self._key, self._bar = task, kept, key, bar
        self._made_by = {"steps": task.steps, "numerics": dict(numerics), "key": described(key)}
        self._base: dict[int, Run] = {}

    def make_base(self, jobs: Sequence[Job]) -> list[Run]:
        for job in jobs:
            run = self.make(job)
            if not math.isfinite(run.final):
                raise ValueError(
                    f"validate: {job} does not reach a finite loss itself, so there is nothing "
                    "to compare with: fix the training first (a lower learning rate, clipping)."
                )
            same = next((r for r in self._base.values() if r.same_as(run)), None)
            if same is not None:
                raise ValueError(
                    f"validate: seeds {same.seed} and {run.seed} are bitwise the same run: "
                    "make_step(policy, seed) or batches(seed) must depend on "
                    "the seed. (With nothing random in it, take seeds=1.)"
                )
            self._base[job.seed] = run
        return list(self._base.values())

    def make_perturbed(self, jobs: Sequence[Job]) -> list[Run]:
        runs = []
        for job in jobs:
            run, base = self.make(job), self._base[job.seed]
            first, again = base.losses[0], run.losses[0]
            # A last bit of the parameters is 1e-7 of them.
            if math.isfinite(first) and not abs(again - first) <= 1e-3 * abs(first):
                raise ValueError(
                    f"validate: the first loss of {job.label}, seed {job.seed}, was {first:.6g}, "
                    f"and {again:.6g} when it was repeated with parameters that differ in their "
                    "last bits: make_step must make the same parameters, and step use the same "
                    "data, for the same policy and seed."
                )
            if not math.isfinite(run.final):
                raise ValueError(
                    f"validate: {job} (its parameters differ from those of the run before in their "
                    "last bits alone) does not reach a finite loss: this training is unstable in "
                    f"{job.label} already."
                )
            runs.append(run)
        return runs

    def make(self, job: Job) -> Run:
        self._bar.set_description(str(job))
        made_by: dict[str, Any] = self._made_by | dataclasses.asdict(job)
        made_by["policy"] = described(_parsed(job.policy))
        base = self._base.get(job.seed)
        try:
            made = None
            if self._kept.folder is not None and self._key is None:
                made = make(self._task, job)
                made_by["program"] = program_of(self._task, job, made)
            if (run := self._kept.get(str(job), made_by, Run.from_dict)) is not None:
                self._bar.update(self._task.steps)
                return run
            made = made or make(self._task, job)
            run = train(self._task, job, made, self._bar.update, base.data if base else ())
        except Exception as error:
            error.add_note(f"validate: this was in {job}")
            raise
        self._bar.update(self._task.steps - len(run.losses))
        if base:
            _check_unscaled(run, base)
        self._kept.put(str(job), made_by, dataclasses.asdict(run))
        return run


def _check_unscaled(run: Run, base: Run) -> None:
    scale = run.loss_scales[0] if run.loss_scales else 1.0
    if scale > 2 and base.losses[0] and 0.5 < run.losses[0] / base.losses[0] / scale < 2:
        raise ValueError(
            f'validate: the "loss" of {run.label} is {run.losses[0]:.6g} at the first step, which '
            f"is {base.label}'s times the loss scale of {scale:g}: report the loss that is not "
            "scaled."
        )


def _named_policies(policies: Any) -> dict[str, Any]:
    if isinstance(policies, Mapping):
        if wrong := [name for name in policies if not isinstance(name, str)]:
            raise TypeError(f"validate: the names of policies must be strings; got {wrong[0]!r}.")
        named = dict(policies)
    else:
        one = isinstance(policies, (str, jmp.Policy, PolicyMap)) or not isinstance(
            policies, Iterable
        )
        specs = [policies] if one else list(policies)
        for i, spec in enumerate(specs):
            if get_policy(spec) in map(get_policy, specs[:i]):
                raise ValueError(f"validate: the policy {str(spec)!r} is named twice.")
        named = {_name_of(spec): spec for spec in specs}
    if not named:
        raise ValueError("validate: there are no policies; name one, such as 'mixed_bfloat16'.")
    return named


def _parsed(policy: Any) -> Any:
    """Parses a policy; returns it as it is if only `make_step` understands it."""
    try:
        return get_policy(policy)
    except (TypeError, ValueError):
        return policy


def _name_of(spec: Any) -> str:
    return spec if isinstance(spec, str) else str(_parsed(spec))


def _name_of_reference(reference: Any, named: Mapping[str, Any]) -> str:
    name = _name_of(reference)
    parsed = _parsed(reference)
    for other, policy in named.items():
        if other == name or (type(_parsed(policy)) is type(parsed) and _parsed(policy) == parsed):
            raise ValueError(
                f"validate: {other!r} is what the others are compared with, and runs anyway; leave "
                "it out of the policies."
            )
    return name


def _seeds(seeds: Any) -> tuple[int, ...]:
    try:
        several = isinstance(seeds, Iterable)
        found = tuple(map(operator.index, seeds if several else range(operator.index(seeds))))
    except TypeError:
        found = ()
    if not found or len(set(found)) < len(found) or min(found) < 0:
        raise ValueError(
            "validate: seeds must be a number of seeds, at least 1, or distinct seeds from 0 on; "
            f"got {seeds!r}."
        )
    return found


def _check_function(takes: str, function: Any, *arguments: Any) -> None:
    name = takes.partition("(")[0]
    if not callable(function):
        raise TypeError(
            f"validate: {name} must be a function, {takes}; got a {type(function).__name__!r}."
        )
    if wrong := mismatch(function, *arguments):
        raise TypeError(f"validate: {name} is called as {takes}, and takes {wrong}.")


def _count(name: str, number: Any) -> int:
    if not isinstance(number, (int, np.integer)) or number < 1:
        shown = " ".join(reprlib.repr(number).split())
        raise ValueError(
            f"validate: {name} must be a number from 1 on; got {shown}. The call is "
            "validate(make_step, policy)(steps, batches)."
        )
    return int(number)


def _check_thresholds(*thresholds: float | None) -> None:
    names = ("threshold", "grad_norm_threshold", "curve_threshold")
    for name, limit in zip(names, thresholds, strict=True):
        if limit is None and name != "threshold":
            continue
        if not isinstance(limit, (int, float, np.floating)) or not limit > 0:
            raise ValueError(
                f"validate: {name} must be positive, 0.005 for half a percent; got {limit!r}."
            )
