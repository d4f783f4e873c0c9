"""`preflight`: what a program will cost on an accelerator that is not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jmp
from jax.typing import DTypeLike

from jaxmp.autocast.transform import autocast
from jaxmp.inspect import aot_worker
from jaxmp.inspect.audit import audit
from jaxmp.inspect.chip import Target, parse_target
from jaxmp.inspect.hlo import Program, read_hlo
from jaxmp.policy import Policy, single_policy

AS_WRITTEN = "as written"
_PYTHON: tuple[int, ...] = sys.version_info[:2]
_CUSTOM_CALL = re.compile(r"custom_call @([\w$.]+)")


class CompilerMissingError(ImportError):
    """Raised when the compiler for a target is not installed; the message says how to get it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preflight:
    """One program compiled for a target. Sizes are of one device.

    Attributes:
      policy: the policy, or "as written".
      error: what the compiler said, if it failed; all else is empty then.
      argument_bytes: of arguments: parameters, optimizer state, batch.
      output_bytes: of results.
      temporary_bytes: of everything in between.
      aliased_bytes: of results that take the place of donated arguments.
      bytes_accessed: memory traffic, where the compiler says (TPU). A loop's body counts once.
      program: what the optimised program does.
      requested: contractions' FLOPs by dtype in the program before it was compiled.
    """

    policy: str
    error: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    aliased_bytes: int = 0
    bytes_accessed: float | None = None
    program: Program | None = None
    requested: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The memory that the program needs: arguments, results and temporaries, less aliases."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.aliased_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PreflightReport:
    """What `jaxmp.preflight` found, policy by policy. Print it.

    Attributes:
      target: what was compiled for.
      policies: one result per policy.
    """

    target: Target
    policies: tuple[Preflight, ...]

    def __getitem__(self, policy: str) -> Preflight:
        """The result of a policy, by the name it was given."""
        for result in self.policies:
            if result.policy == policy:
                return result
        names = ", ".join(repr(result.policy) for result in self.policies)
        raise KeyError(f"there is no policy {policy!r} in the report; there are {names}")

    def fits(self, policy: str) -> bool:
        """Whether the program fits the memory of the target's devices under a policy."""
        result = self[policy]
        return not result.error and result.peak_bytes <= self.target.hbm_bytes

    def emulated(self, policy: str) -> dict[str, float]:
        """FLOPs of contractions in dtypes that the target widens before it multiplies them."""
        native = {*self.target.tflops, "float32", "float64", "complex64", "complex128"}
        return {
            dtype: flops
            for dtype, flops in self[policy].requested.items()
            if not set(dtype.split("*")) <= native
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        rows = []
        for result in self.policies:
            row = dataclasses.asdict(result)
            if result.program is not None:
                row["program"] = result.program._asdict() | {
                    "collectives": [
                        {"kind": kind, "dtype": dtype, "count": count, "bytes": size}
                        for (kind, dtype), (count, size) in result.program.collectives.items()
                    ]
                }
            row |= {"peak_bytes": result.peak_bytes, "fits": self.fits(result.policy)}
            rows.append(row | {"emulated": self.emulated(result.policy)})
        target = {key: getattr(self.target, key) for key in ("name", "device_count", "hbm_bytes")}
        return {"target": target, "policies": rows}

    def __str__(self) -> str:
        names = [result.policy for result in self.policies]
        table = {"": names, **dict(_rows(self))}
        widths = [max(map(len, column)) for column in zip(*table.values(), strict=True)]
        label_width = max(map(len, table))
        lines = [
            "  ".join(
                [
                    label.ljust(label_width),
                    *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)),
                ]
            )
            for label, cells in table.items()
        ]
        count = self.target.device_count
        heading = (
            f"{self.target.name}: {count} device{'s' * (count > 1)} of "
            f"{_gib(self.target.hbm_bytes)}; sizes are of one device"
        )
        return "\n".join([heading, "", *lines, *_remarks(self), "", _TRUST])


_TRUST = (
    "Exact: memory, traffic, contractions, collectives (a loop's body counts once). "
    "Estimated by the compiler: cycles."
)


def preflight(
    fn: Callable[..., Any],
    *args: Any,
    target: str = "tpu-v5e",
    policies: Sequence[str | Policy | jmp.Policy | DTypeLike | None] = (None,),
    donate_argnums: int | Sequence[int] = (),
) -> PreflightReport:
    """Compiles a function for hardware that is not there, and reports what it will need.

    The function is traced and lowered here, and compiled in a process of its own, by the compiler
    of the target: what is reported of memory and structure is what the hardware will get. Nothing
    runs, and no time is predicted.

    Args:
      fn: a function of any pytrees: a forward pass, or better a whole training step.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s. To split the program over the devices
        of a target, give the structs shardings: `jax.sharding.NamedSharding`s over one mesh, real
        or a `jax.sharding.AbstractMesh`, of as many devices as the target has.
      target: a chip and its topology, "tpu-v5e", "tpu-v5e:4x4", or a GPU and how many, "gpu-h100",
        "gpu-h100:8". `jaxmp.inspect.chip_names()` lists the chips.
      policies: each is compiled: `jaxmp.autocast(fn, policy)`; None is the function as it is, which
        is right for one that calls a wrapped module.
      donate_argnums: the positional arguments that the step gives away, such as the train state.

    Returns:
      The report: `print` it.

    Raises:
      ValueError: if the target or a policy is unknown, or shardings do not fit the target.
      CompilerMissingError: (an ImportError) if the compiler is not installed.
      RuntimeError: if the compiling process ends without a result.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> step = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
      >>> report = jaxmp.preflight(step, w, w, target="gpu-h100")  # doctest: +SKIP
      >>> report["as written"].program.contractions  # doctest: +SKIP
      {'float32': 2}
      >>> jaxmp.preflight(step, w, w, target="gpu-h10")
      Traceback (most recent call last):
      ValueError: preflight: unknown target 'gpu-h10' (did you mean 'gpu-h100'?)...
    """
    resolved = parse_target(target)
    _check_compiler(resolved)
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    job = _job(resolved, args, donated)
    named = [_named(policy) for policy in policies]
    with tempfile.TemporaryDirectory(prefix="jaxmp-") as name:
        folder = Path(name)
        requested = []
        for i, (_, policy) in enumerate(named):
            program = fn if policy is None else autocast(fn, policy)
            requested.append(audit(program, *args).contraction_flops())
            exported = _export(program, args, resolved.platform)
            (folder / f"{i}.exported").write_bytes(exported)
        job["programs"] = [str(i) for i in range(len(named))]
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        _run_worker(folder)
        results = tuple(
            _result(folder, i, label, requested[i]) for i, (label, _) in enumerate(named)
        )
    return PreflightReport(resolved, results)


def _named(policy: Any) -> tuple[str, Policy | None]:
    if policy is None:
        return AS_WRITTEN, None
    resolved = single_policy("preflight", policy)
    return (policy if isinstance(policy, str) else str(resolved)), resolved


def _check_compiler(target: Target) -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        extra = f"{target.platform}-aot"
    elif target.platform == "tpu":
        if _PYTHON < (3, 12) or jax.__version_info__ < (0, 12):
            raise CompilerMissingError(
                "preflight: compiling for TPUs without one needs Python 3.12 and JAX 0.12 or "
                f"newer; this is Python {sys.version.split()[0]} with JAX {jax.__version__}."
            )
        extra = "" if importlib.util.find_spec("libtpu") else "tpu-aot"
    else:
        plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_plugins.xla_cuda13")
        extra = "" if any(map(_is_installed, plugins)) else "gpu-aot"
    if extra:
        raise CompilerMissingError(
            f"preflight: the compiler for {target.name} is not installed; run: "
            f"python -m pip install 'jaxmp[{extra}]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _job(target: Target, args: tuple[Any, ...], donated: tuple[int, ...]) -> dict[str, Any]:
    """What the worker needs to know of a target and of the arguments."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    flags = [i in donated for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    job: dict[str, Any] = {
        "platform": target.platform,
        "topology": target.topology,
        "config": target.config,
        "donated": [i for i, flag in enumerate(flags) if flag],
        "mesh": None,
    }
    if not named:
        return job
    mesh = named[0].mesh
    if any(s.mesh.axis_names != mesh.axis_names or s.mesh.size != mesh.size for s in named):
        raise ValueError("preflight: the arguments are sharded over different meshes; use one.")
    if mesh.size != target.device_count:
        raise ValueError(
            f"preflight: the arguments are sharded over {mesh.size} devices, but {target.name} has "
            f"{target.device_count}."
        )
    job["mesh"] = {
        "names": list(mesh.axis_names),
        "sizes": [mesh.shape[name] for name in mesh.axis_names],
        "types": [t.name for t in mesh.axis_types],
        "specs": [
            list(s.spec) if isinstance(s, jax.sharding.NamedSharding) else [] for s in shardings
        ],
    }
    return job


def _export(fn: Callable[..., Any], args: tuple[Any, ...], platform: str) -> bytes:
    """The program as a function of flat arrays, lowered and serialised."""
    leaves, tree = jax.tree.flatten(args)

    def flat(*arrays: Any) -> Any:
        out = fn(*jax.tree.unflatten(tree, arrays))
        return [x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]

    structs = [
        jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x), sharding=_sharding(x))
        for x in leaves
    ]
    lowered = "tpu" if platform == "tpu" else "cuda"
    jitted = jax.jit(flat)
    text = jitted.trace(*structs).lower(lowering_platforms=(lowered,)).as_text()
    # Kernels of libraries are custom calls, which export refuses unless they are named.
    calls = set(_CUSTOM_CALL.findall(text))
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    exported = jax.export.export(jitted, platforms=[lowered], disabled_checks=checks)(*structs)
    return bytes(exported.serialize())


def _sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)


def _run_worker(folder: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    process = subprocess.run(  # noqa: S603 (our own file)
        [sys.executable, aot_worker.__file__, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode and not any(folder.glob("*.hlo")):
        raise RuntimeError(
            f"preflight: the compiling process ended with code {process.returncode}:\n"
            f"{process.stderr[-2000:]}"
        )


def _result(folder: Path, i: int, label: str, requested: dict[str, float]) -> Preflight:
    path = folder / f"{i}.json"
    if not path.exists():
        return Preflight(label, error="the compiler crashed", requested=requested)
    result = json.loads(path.read_text(encoding="utf-8"))
    if "error" in result:
        return Preflight(label, error=result["error"], requested=requested)
    cost = result["cost"]
    return Preflight(
        policy=label,
        argument_bytes=result["arguments"],
        output_bytes=result["outputs"],
        temporary_bytes=result["temporaries"],
        aliased_bytes=result["aliased"],
        bytes_accessed=cost.get("bytes accessed"),
        program=read_hlo((folder / f"{i}.hlo").read_text(encoding="utf-8")),
        requested=requested,
    )


# Printing.


def _rows(report: PreflightReport) -> Iterator[tuple[str, list[str]]]:
    results = report.policies

    def row(label: str, cell: Callable[[Preflight], str]) -> tuple[str, list[str]]:
        return label, ["-" if r.error else cell(r) for r in results]

    yield row("peak memory", lambda r: _gib(r.peak_bytes))
    yield row("  arguments", lambda r: _gib(r.argument_bytes))
    yield row("  temporaries", lambda r: _gib(r.temporary_bytes))
    yield row("fits", lambda r: "yes" if r.peak_bytes <= report.target.hbm_bytes else "NO")
    if any(r.bytes_accessed for r in results):
        yield row("traffic", lambda r: f"{(r.bytes_accessed or 0) / 1e9:.2f} GB")
    if any(r.program and r.program.cycles for r in results):
        yield row("estimated cycles", lambda r: f"{_program(r).cycles / 1e6:.1f} M")  # type: ignore[operator]
    programs = [_program(r) for r in results]
    for dtype in dict.fromkeys(d for p in programs for d in p.contractions):
        yield f"contractions {dtype}", [str(p.contractions.get(dtype, 0)) for p in programs]
    for kind in dict.fromkeys(k for p in programs for k in p.collectives):
        moved = [p.collectives.get(kind, (0, 0)) for p in programs]
        yield " ".join(kind), [f"{count} x, {size / 1e6:.1f} MB" for count, size in moved]


def _program(result: Preflight) -> Program:
    return result.program or Program({}, {}, {}, None)


def _remarks(report: PreflightReport) -> Iterator[str]:
    for result in report.policies:
        if result.error:
            yield f"\n{result.policy}: the compiler failed: {_first_lines(result.error)}"
            continue
        excess = result.peak_bytes - report.target.hbm_bytes
        if excess > 0:
            yield f"\n{result.policy}: does not fit, by {_gib(excess)}."
        for dtype in report.emulated(result.policy):
            yield (
                f"\n{result.policy}: {dtype} is emulated: {report.target.name} does not multiply "
                "it natively, its operands are widened first."
            )
        calls = {c: n for c, n in _program(result).library_calls.items() if c.startswith("__cu")}
        if calls:
            shown = ", ".join(f"{n} {call}" for call, n in sorted(calls.items()))
            yield f"\n{result.policy}: library calls: {shown}"


def _first_lines(text: str) -> str:
    return " ".join(text.split("\n")[:3])[:500]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
