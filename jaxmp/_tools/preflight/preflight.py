"""`preflight`: the memory and time of a program on an accelerator that this machine lacks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp._core.autocast.nnx_calls import with_module
from jaxmp._core.autocast.transform import autocast
from jaxmp._core.plan.parameters import read_argnums
from jaxmp._core.plan.regions import check_callable
from jaxmp._core.speed import chip_named, warning
from jaxmp._tools.arguments import check_sizes
from jaxmp._tools.explain.explain import planned, warn_overruled
from jaxmp._tools.preflight.compile_ahead import compile_ahead
from jaxmp._tools.preflight.program import bytes_by_purpose
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import AS_WRITTEN, Preflight
from jaxmp._tools.preflight.size_search import Attempt, Axis, Largest, axis_of, search
from jaxmp._tools.progress import told
from jaxmp._tools.speed.target import Target, parse_target
from jaxmp.policy import Policy, PolicyLike, single_policy
from jaxmp.policy_fields import FUSED
from jaxmp.recipes import AUTO, Recipe

_PYTHON: tuple[int, ...] = sys.version_info[:2]
# By compiler: JAX's plugins (any will do), and how to install one.
_GPU_PLUGINS = {
    "cuda": (
        ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_plugins.xla_cuda13"),
        'in a clone of jaxmp run: python -m pip install -e ".[gpu-aot]"',
    ),
    "rocm": (
        ("jax_rocm7_plugin", "jax_plugins.xla_rocm7"),
        "with AMD's ROCm on this machine, run: python -m pip install 'jax[rocm7-local]'",
    ),
    "oneapi": (
        ("jax_oneapi_plugin", "jax_plugins.xla_oneapi"),
        "with Intel's GPU driver on this machine, run: python -m pip install 'jax[oneapi]'",
    ),
}


class CompilerMissingError(ImportError):
    """Raised when the compiler for a target is not installed; the message says how to get it."""


def preflight(
    fn: Callable[..., Any],
    policy: PolicyLike | Sequence[PolicyLike | None] | None = None,
    argnums: int | Sequence[int] = 0,
    *,
    target: str = "tpu-v5e",
    donate_argnums: int | Sequence[int] = (),
    max_batch: bool = False,
    max_length: bool = False,
    batch_argnums: int | Sequence[int] = -1,
    price_per_hour: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Callable[..., PreflightReport]:
    """Compiles a function for a chip that this machine lacks, and reports what it needs.

    The function is traced and lowered here, and compiled in a separate process, by the compiler of
    the target: the reported memory and structure are those of the program that the hardware will
    run. Nothing runs here: the time of a step is an estimate, and is labeled as one: on TPUs from
    the cycles that their compiler estimates, on GPUs from a roofline of published figures, of one
    chip at its best.

    Args:
      fn: a function of any pytrees: a forward pass, or better a whole training step. Changes to the
        NNX modules in its arguments, or to its own, count as results.
      policy: `jaxmp.autocast(fn, policy, argnums)` is compiled; None: the function as it is, which
        is right for one that calls a wrapped module. Of a sequence, each policy is.
      argnums: which arguments hold the parameters, as for `autocast`.
      target: a chip and its topology, "tpu-v5e", "tpu-v5e:4x4", or a GPU and how many, "gpu-h100",
        "gpu-h100:8". `jaxmp.devices.chips()` lists the chips.
      donate_argnums: the positional arguments that the step donates, such as the train state.
      max_batch: whether to also search for the largest batch that fits, per policy: a handful more
        compilations, each of the function traced at another batch size.
      max_length: whether to search for the longest sequence that fits, likewise.
      batch_argnums: the positional arguments that hold the batch. The leading axis of all their
        arrays is the batch, the second, if there is one, the length. By default the last.
      price_per_hour: the price of one chip for an hour, in any currency, to report the price of
        1,000 steps on all chips of the target.
      progress: called with a line of text before each program is traced and compiled, which takes
        from seconds to minutes. By default, lines are printed if stderr is a terminal, from the
        first second on.

    Returns:
      A function with the arguments of `fn` that returns a `PreflightReport`: `print` it. The
      arguments are arrays or `jax.ShapeDtypeStruct`s. To split the program over the devices of a
      target, give the structs shardings: `jax.sharding.NamedSharding`s over one mesh, real or a
      `jax.sharding.AbstractMesh`, of as many devices as the target has.
      Callbacks, such as `jax.debug.print`, are not compiled: arrays stand for their results.

    Raises:
      ValueError: if the target or a policy is unknown, or `price_per_hour` is negative or not a
        number; at a call, if an index in `donate_argnums` or `batch_argnums` is out of range,
        shardings do not fit the target, the arrays of `batch_argnums` differ in batch or length
        when that is searched for, or a size is symbolic, as in `jax.export`.
      TypeError: if `fn` is not callable, or is a Flax Linen module.
      CompilerMissingError: (an ImportError) if the compiler is not installed.
      RuntimeError: if the compiling process ends without a result.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> step = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
      >>> report = jaxmp.preflight(step, target="gpu-h100")(w, w)  # doctest: +SKIP
      >>> report["as written"].program.contractions  # doctest: +SKIP
      {'float32': 2}
      >>> jaxmp.preflight(step, target="gpu-h10")
      Traceback (most recent call last):
      ValueError: preflight: unknown target 'gpu-h10' (did you mean 'gpu-h100'?)...
    """
    resolved = parse_target(target)
    several = policy if isinstance(policy, (list, tuple)) else (policy,)
    named = [_named(single, resolved) for single in several]
    check_callable("preflight", fn)
    params = read_argnums("preflight", argnums)
    _check_price(price_per_hour)
    donated = read_argnums("preflight", donate_argnums, "donate_argnums", "are donated")
    batch = read_argnums("preflight", batch_argnums, "batch_argnums", "hold the batch")

    def preflighted(*args: Any) -> PreflightReport:
        check_sizes("preflight", args)
        if not all(-len(args) <= i < len(args) for i in donated):
            raise ValueError(
                f"preflight: donate_argnums={donated}, but the function has {len(args)} arguments "
                "here."
            )
        asked = [i for i, flag in enumerate((max_batch, max_length)) if flag]
        from_end = tuple(i - len(args) * (i >= 0) for i in batch)
        axes = [axis_of(args, from_end, number) for number in asked]
        method, modules = with_module(fn)
        given = (*modules, *args)
        # Counted from the end: an NNX module is the first argument.
        given_away = tuple(i % len(args) - len(args) for i in donated)
        _check_compiler(resolved)
        programs = []
        for _, single in named:
            if single is not None:
                warn_overruled("preflight", planned(method, single, argnums, given, {})[0])
            programs.append(method if single is None else autocast(method, single, argnums))

        with told(progress) as tell:

            def compiled(fns: Any, args: tuple[Any, ...], labels: Sequence[str]) -> list[Preflight]:
                return compile_ahead(resolved, fns, args, given_away, labels, tell)

            results = compiled(programs, given, [label for label, _ in named])
            for i, (program, (label, single)) in enumerate(zip(programs, named, strict=True)):
                recipe = None if single is None else single.matmul
                warned = (
                    warning(recipe, chip_named(resolved.name)) if isinstance(recipe, Recipe) else ""
                )
                result = dataclasses.replace(results[i], policy=label, warned=warned)
                again = functools.partial(compiled, [program])
                found = {axis.name: _largest(axis, resolved, result, given, again) for axis in axes}
                results[i] = dataclasses.replace(result, largest=found)
        held = bytes_by_purpose(given, params, from_end)
        return PreflightReport(resolved, tuple(results), held, price_per_hour)

    return preflighted


def _largest(
    axis: Axis,
    target: Target,
    first: Preflight,
    args: tuple[Any, ...],
    compiled: Callable[[tuple[Any, ...], Sequence[str]], list[Preflight]],
) -> Largest:
    """Finds the largest size of an axis that fits; `first` is the result at the current size."""

    def probe(size: int) -> Attempt:
        result, label = first, f"{first.policy}, {axis.name} {size}"
        try:
            if size != axis.size:
                [result] = compiled(axis.resized(args, size), [label])
        except Exception as error:
            error.add_note(
                f"preflight ({axis.option}) called the function with a {axis.name} of {size}."
            )
            raise
        return Attempt(result.excess_bytes(target), result.error)

    return search(probe, axis.size, axis.unit)


def _check_price(price: Any) -> None:
    """Raises unless a price is a number that is not negative, or None."""
    if price is not None and not (isinstance(price, (int, float)) and price >= 0):
        raise ValueError(
            f"preflight: price_per_hour must be the price of a chip for an hour, such as 2.5; got "
            f"{price!r}."
        )


def _named(policy: Any, target: Target) -> tuple[str, Policy | None]:
    """Returns a policy's label, and the policy resolved for a target, not this machine's chip."""
    if policy is None:
        return AS_WRITTEN, None
    resolved = single_policy("preflight", policy)
    label = policy if isinstance(policy, str) else str(resolved)
    chip = target.name.partition(":")[0]
    if resolved.matmul == AUTO:
        resolved = dataclasses.replace(resolved, matmul=f"{AUTO}@{chip}")
    if resolved.attention == FUSED:
        resolved = dataclasses.replace(resolved, attention=f"{FUSED}@{chip}")
    return label, resolved


def _check_compiler(target: Target) -> None:
    """Raises unless a target's compiler is installed; checks first what no package can fix."""
    if target.platform == "gpu":
        compilers, install = _GPU_PLUGINS[target.compiler]
    else:
        compilers = ("libtpu",)
        install = 'in a clone of jaxmp run: python -m pip install -e ".[tpu-aot]"'
        if _PYTHON < (3, 12) or jax.__version_info__ < (0, 12):
            raise CompilerMissingError(
                f"preflight: compiling for {target.name} needs Python 3.12 and JAX 0.12 or newer, "
                f"and this is Python {'.'.join(map(str, _PYTHON))} with JAX {jax.__version__}: no "
                f"package changes that. In a new environment with both, and {install}"
            )
    if not _is_installed("flatbuffers") or not any(map(_is_installed, compilers)):
        raise CompilerMissingError(
            f"preflight: the compiler for {target.name} is not installed; {install}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
