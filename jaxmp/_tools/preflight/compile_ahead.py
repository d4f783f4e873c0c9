"""Compiles functions for a target that this machine lacks, in a separate process."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core.host_memory import is_on_host
from jaxmp._core.jaxprs.trace import is_array
from jaxmp._tools.preflight import aot_worker
from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.preflight.hlo_collectives import Mesh
from jaxmp._tools.preflight.program import TracedProgram, traced_program
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.preflight.size_search import sharding_of
from jaxmp._tools.speed.target import Target, tracing_for
from jaxmp.devices import chips

_CUSTOM_CALL = re.compile(r"custom_call @([\w$.]+)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The TPU compiler's message on a program that does not fit the memory; it reports nothing else.
_OUT_OF_MEMORY = re.compile(r"\([\d.]+[KMGT]\) exceeds available HBM \([\d.]+[KMGT]\)")
_SIZE = re.compile(r"([\d.]+)([KMGT])\)")


def compile_ahead(
    target: Target,
    fns: Sequence[Callable[..., Any]],
    args: tuple[Any, ...],
    donate_argnums: Sequence[int],
    labels: Sequence[str],
    progress: Callable[[str], None] | None = None,
) -> list[Preflight]:
    """Traces and lowers functions of the same arguments here, and compiles them in a new process.

    Those that JAX lowers only if it has devices are compiled here, too.

    Args:
      target: the target to compile for.
      fns: the functions.
      args: their arguments.
      donate_argnums: the arguments that are donated.
      labels: the name of each function in messages.
      progress: called with a line of text before each step.

    Raises:
      ValueError: if the arguments are sharded over other devices than the target's, or its compiler
        knows no such topology.
      RuntimeError: if the process ends without a result.
    """
    job = _job(target, args, tuple(donate_argnums))
    tell = progress or (lambda _: None)
    platform = target.compiler
    programs: list[TracedProgram] = []
    here: list[int] = []
    with tempfile.TemporaryDirectory(prefix="jaxmp-") as name:
        folder = Path(name)
        for i, fn in enumerate(fns):
            tell(f"tracing for {target.name}: {labels[i]} …")
            with tracing_for(target):
                programs.append(traced_program(fn, args, platform))
                exported = _export_for(target, job, programs[i], labels[i])
            if exported is None:
                here.append(i)
            else:
                _check_devices(target, job, exported.nr_devices)
                (folder / f"{i}.exported").write_bytes(exported.serialize())
        job["programs"] = [str(i) for i in range(len(fns)) if i not in here]
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")

        def starts(i: int) -> None:
            tell(f"compiling for {target.name}: {labels[i]} …")

        if job["programs"]:
            try:
                _run_worker(folder, starts)
            except aot_worker.TopologyError as error:
                raise ValueError(_no_such(target, str(error))) from error
        for i in here:
            starts(i)
            _compile_here(folder / str(i), programs[i], job)
        mesh = tuple(job["mesh"]["axes"].items()) if job["mesh"] else ()
        results = [_result(folder, i, mesh) for i in range(len(fns))]
    return [
        replace(result, requested=program.flops, callbacks=program.callbacks)
        for result, program in zip(results, programs, strict=True)
    ]


def _compile_here(path: Path, program: TracedProgram, job: dict[str, Any]) -> None:
    """Compiles in this process a program that JAX lowers only if it has devices.

    So are operations that JAX partitions by a Python function, such as attention by cuDNN: it
    cannot cross to another process.
    """

    def placed() -> aot_worker.Program:
        mesh = aot_worker.target_mesh(job["mesh"], aot_worker.topology_devices(job))
        specs = [a.sharding.spec if a.sharding else PartitionSpec() for a in program.arguments]
        return program.run, [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
            for a, spec in zip(program.arguments, specs, strict=True)
        ]

    aot_worker.compile_program(path, placed, job)


def _no_such(target: Target, said: str) -> str:
    chip, _, shape = target.name.partition(":")
    known = chips()[chip].get("topologies", [])
    if not known:
        where = "" if target.compiler == "tpu" else "; JAX's plugin loads only where such a GPU is"
        return f"preflight: the installed compiler does not compile for {chip}: {said}{where}."
    there = f" There are {', '.join(known)} and more."
    return f"preflight: the compiler for {chip} knows no topology {shape!r}: {said}.{there}"


def _job(target: Target, args: tuple[Any, ...], donated: tuple[int, ...]) -> dict[str, Any]:
    """Returns the worker's job: the target, and the arguments' mesh and donation."""
    shardings = [sharding_of(leaf) for leaf in _arrays(args)]
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    given_away = {i % len(args) for i in donated}
    flags = [i in given_away for i, arg in enumerate(args) for _ in _arrays(arg)]
    job: dict[str, Any] = {
        "platform": target.compiler,
        "topology": target.topology,
        "config": target.config,
        "donated": [i for i, flag in enumerate(flags) if flag],
        "on_host": [is_on_host(leaf) for leaf in _arrays(args)],
        "mesh": None,
    }
    if not meshes:
        return job
    mesh = meshes[0]
    if any(m.axis_names != mesh.axis_names or m.size != mesh.size for m in meshes):
        raise ValueError("preflight: the arguments are sharded over different meshes; use one.")
    if mesh.size != target.device_count:
        raise ValueError(
            f"preflight: the arguments are sharded over {mesh.size} devices, but {target.name} has "
            f"{target.device_count}."
        )
    job["mesh"] = {"axes": dict(mesh.shape), "types": [t.name for t in mesh.axis_types]}
    return job


def _arrays(args: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(args) if is_array(leaf)]


def _export_for(
    target: Target, job: dict[str, Any], program: TracedProgram, label: str
) -> jax.export.Exported | None:
    """Exports a program for a target; returns None if this process has to compile it.

    Raises:
      ValueError: if JAX cannot lower the program, or no process can compile it.
    """
    try:
        return _export(program, target.compiler)
    except (ValueError, NotImplementedError) as error:
        if job["mesh"] is None:
            raise
        if target.platform == "tpu":
            raise ValueError(
                f"preflight: {label} cannot be compiled for several TPUs that are not present: "
                f"{error} Compile the share of one device instead."
            ) from error
        return None


def _check_devices(target: Target, job: dict[str, Any], count: int) -> None:
    """Checks that a target has the devices of a program; gives the job a mesh if it has none.

    A program with `jax.shard_map` is of several devices, although its arguments may not be sharded.
    """
    if count > 1 and count != target.device_count:
        raise ValueError(
            f"preflight: the function runs on {count} devices, but {target.name} has "
            f"{target.device_count}."
        )
    if count > 1 and job["mesh"] is None:
        job["mesh"] = {"axes": {"device": count}, "types": ["Auto"]}


def _export(program: TracedProgram, platform: str) -> jax.export.Exported:
    """Lowers a program for a platform.

    Raises:
      ValueError: if JAX lowers it only with devices that are present.
    """
    lowering = program.run.trace(*program.arguments).lower(lowering_platforms=(platform,))
    # Kernels of libraries are custom calls, which export refuses unless they are named.
    calls = set(_CUSTOM_CALL.findall(lowering.as_text()))
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    export = jax.export.export(program.run, platforms=[platform], disabled_checks=checks)
    return export(*program.arguments)


def _run_worker(folder: Path, starts: Callable[[int], None]) -> None:
    """Runs the worker on a folder, and calls `starts(i)` when it begins with program i."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    messages = folder / "stderr"
    with (
        messages.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(  # noqa: S603 (our own file)
            [sys.executable, aot_worker.__file__, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            for line in process.stdout or ():  # compilers print, too
                if line.startswith(aot_worker.STARTS):
                    starts(int(line.removeprefix(aot_worker.STARTS)))
        except BaseException:
            process.kill()  # leaving the block waits for its end
            raise
    if (folder / aot_worker.REFUSED).exists():
        raise aot_worker.TopologyError((folder / aot_worker.REFUSED).read_text(encoding="utf-8"))
    if process.returncode and not any(folder.glob("*.hlo")):
        said = messages.read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(
            f"preflight: the compiling process ended with code {process.returncode}:\n"
            f"{said[-2000:]}"
        )


def _result(folder: Path, i: int, mesh: Mesh) -> Preflight:
    path = folder / f"{i}.json"
    if not path.exists():
        return Preflight(error="the compiler crashed")
    result = json.loads(path.read_text(encoding="utf-8"))
    if "error" not in result:
        text = (folder / f"{i}.hlo").read_text(encoding="utf-8")
        devices = math.prod(size for _, size in mesh)
        return Preflight(**result, program=read_hlo(text, mesh), device_count=devices)
    refused = _OUT_OF_MEMORY.search(result["error"])
    if refused is None:
        return Preflight(error=result["error"])
    sizes = [int(float(number) * _UNITS[unit]) for number, unit in _SIZE.findall(refused[0])]
    return Preflight(required_bytes=sizes[0], available_bytes=sizes[1])
