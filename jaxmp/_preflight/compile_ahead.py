"""Compiles functions for a target that this machine lacks, in a separate process."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxmp._audit.place import AuditPlace
from jaxmp._autocast.flops import contraction_flops
from jaxmp._flax import is_graph_node
from jaxmp._jaxprs import dataflow
from jaxmp._jaxprs.compat import closed
from jaxmp._jaxprs.equation_parameters import multiplied
from jaxmp._jaxprs.trace import flatten_call, is_array
from jaxmp._jaxprs.walk import walk
from jaxmp._preflight import aot_worker
from jaxmp._preflight.hlo import read_hlo
from jaxmp._preflight.hlo_collectives import Mesh
from jaxmp._preflight.report import Preflight
from jaxmp._preflight.size_search import sharding_of
from jaxmp._speed import chip_of
from jaxmp._speed.target import Target
from jaxmp.devices import kind_of

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

    Args:
      target: the target to compile for.
      fns: the functions.
      args: their arguments.
      donate_argnums: the arguments that are donated.
      labels: the name of each function in messages.
      progress: called with a line of text before each step.

    Raises:
      ValueError: if the arguments are sharded over other devices than the target's.
      RuntimeError: if the process ends without a result.
    """
    job = _job(target, args, tuple(donate_argnums))
    job["programs"] = [str(i) for i in range(len(fns))]
    tell = progress or (lambda _: None)
    requested: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="jaxmp-") as name:
        folder = Path(name)
        for i, fn in enumerate(fns):
            tell(f"tracing for {target.name}: {labels[i]} …")
            with _tracing_for(target, sharded=job["mesh"] is not None):
                exported, flops = _export(fn, args, target.platform)
            (folder / f"{i}.exported").write_bytes(exported)
            requested.append(flops)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        _run_worker(folder, lambda i: tell(f"compiling for {target.name}: {labels[i]} …"))
        mesh = tuple(job["mesh"]["axes"].items()) if job["mesh"] else ()
        results = [_result(folder, i, mesh) for i in range(len(fns))]
    return [replace(r, requested=flops) for r, flops in zip(results, requested, strict=True)]


def _tracing_for(target: Target, *, sharded: bool) -> AbstractContextManager[Any]:
    """Returns a context that tells the trace its target chip, for which `recipes.native` asks.

    It tells nothing if there is a mesh already, or if arguments are sharded and the chip multiplies
    block-scaled formats: JAX partitions those products with the devices of this machine.
    """
    if jax.sharding.get_abstract_mesh().axis_names:
        return nullcontext()
    kind = kind_of(target.name.partition(":")[0])
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform=target.platform)
    if sharded and chip_of(device).multiplies("mx"):
        return nullcontext()
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    context: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(mesh)
    return context


def _job(target: Target, args: tuple[Any, ...], donated: tuple[int, ...]) -> dict[str, Any]:
    """Returns the worker's job: the target, and the arguments' mesh and donation."""
    shardings = [sharding_of(leaf) for leaf in _arrays(args)]
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    given_away = {i % len(args) for i in donated}
    flags = [i in given_away for i, arg in enumerate(args) for _ in _arrays(arg)]
    job: dict[str, Any] = {
        "platform": target.platform,
        "topology": target.topology,
        "config": target.config,
        "donated": [i for i, flag in enumerate(flags) if flag],
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


def _export(
    fn: Callable[..., Any], args: tuple[Any, ...], platform: str
) -> tuple[bytes, dict[str, float]]:
    """Lowers and serializes the program as a function of flat arrays; also returns its FLOPs.

    The results are those of `fn` and the state that it changes in the NNX modules in its arguments:
    otherwise an update would be removed as unused, and with it the gradients.
    """

    def called(*args: Any) -> Any:
        out = fn(*args)
        leaves = jax.tree.leaves(args, is_leaf=is_graph_node)
        return out, jax.tree.leaves([leaf for leaf in leaves if is_graph_node(leaf)])

    flat, arrays = flatten_call(called, args, {})
    structs = [
        jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x), sharding=sharding_of(x))
        for x in arrays
    ]
    lowered = "tpu" if platform == "tpu" else "cuda"
    traced = jax.jit(flat).trace(*structs)
    kept = _distinct(traced.jaxpr, len(jax.tree.leaves(traced.out_info[0])))
    run = jaxpr_as_fun(traced.jaxpr)
    jitted = jax.jit(lambda *arrays: [out for out, k in zip(run(*arrays), kept, strict=True) if k])
    text = jitted.trace(*structs).lower(lowering_platforms=(lowered,)).as_text()
    # Kernels of libraries are custom calls, which export refuses unless they are named.
    calls = set(_CUSTOM_CALL.findall(text))
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    exported = jax.export.export(jitted, platforms=[lowered], disabled_checks=checks)(*structs)
    return bytes(exported.serialize()), _flops(traced.jaxpr)


def _flops(jaxpr: Any) -> dict[str, float]:
    """Returns the FLOPs of matmuls and convolutions by the dtype they multiply, most first."""
    flops: Counter[str] = Counter()
    for eqn, place in walk(jaxpr, AuditPlace()):
        if count := contraction_flops(eqn):
            flops[multiplied(eqn)] += count * place.times
    return dict(flops.most_common())


def _distinct(jaxpr: Any, own: int) -> list[bool]:
    """Returns which results to keep: the first `own`; of others, no operands and no repeats."""

    def transfer(eqn: Any, ins: list[int | None]) -> list[int | None]:
        outs = dataflow.through(eqn, ins, run, lambda a, b: a if a == b else None)
        return outs or [None] * len(eqn.outvars)

    def run(jaxpr: Any, ins: Any) -> list[int | None]:
        return dataflow.forward(jaxpr, ins, transfer, None)

    opened = closed(jaxpr).jaxpr
    same_as = run(jaxpr, range(len(opened.invars)))
    return [
        i < own
        or (
            atom not in opened.outvars[:i]
            and (same is None or atom.aval.shape != opened.invars[same].aval.shape)
        )
        for i, (atom, same) in enumerate(zip(opened.outvars, same_as, strict=True))
    ]


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
