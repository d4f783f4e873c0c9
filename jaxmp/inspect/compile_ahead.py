"""Compiles functions for a target that is not there, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmp._autocast.flat import flatten_call, is_array
from jaxmp.inspect import aot_worker
from jaxmp.inspect.batch_arguments import sharding_of
from jaxmp.inspect.chip import Target
from jaxmp.inspect.hlo import read_hlo
from jaxmp.inspect.preflight_report import Preflight

_CUSTOM_CALL = re.compile(r"custom_call @([\w$.]+)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What the TPU compiler says of a program that the memory does not hold: all that it says.
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")


def compile_ahead(
    target: Target,
    fns: Sequence[Callable[..., Any]],
    args: tuple[Any, ...],
    donate_argnums: Sequence[int],
) -> list[Preflight]:
    """Traces and lowers functions of the same arguments here, and compiles them in a new process.

    Raises:
      ValueError: if the arguments are sharded over other devices than the target's.
      RuntimeError: if the process ends without a result.
    """
    job = _job(target, args, tuple(donate_argnums))
    job["programs"] = [str(i) for i in range(len(fns))]
    with tempfile.TemporaryDirectory(prefix="jaxmp-") as name:
        folder = Path(name)
        for i, fn in enumerate(fns):
            (folder / f"{i}.exported").write_bytes(_export(fn, args, target.platform))
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        _run_worker(folder)
        return [_result(folder, i) for i in range(len(fns))]


def _job(target: Target, args: tuple[Any, ...], donated: tuple[int, ...]) -> dict[str, Any]:
    """What the worker needs to know of a target and of the arguments."""
    shardings = [getattr(leaf, "sharding", None) for leaf in _arrays(args)]
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    flags = [i in donated for i, arg in enumerate(args) for _ in _arrays(arg)]
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


def _arrays(args: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(args) if is_array(leaf)]


def _export(fn: Callable[..., Any], args: tuple[Any, ...], platform: str) -> bytes:
    """The program as a function of flat arrays, lowered and serialised."""
    flat, arrays = flatten_call(fn, args, {})
    structs = [
        jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x), sharding=sharding_of(x))
        for x in arrays
    ]
    lowered = "tpu" if platform == "tpu" else "cuda"
    jitted = jax.jit(lambda *arrays: jax.tree.leaves(flat(*arrays)))
    text = jitted.trace(*structs).lower(lowering_platforms=(lowered,)).as_text()
    # Kernels of libraries are custom calls, which export refuses unless they are named.
    calls = set(_CUSTOM_CALL.findall(text))
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    exported = jax.export.export(jitted, platforms=[lowered], disabled_checks=checks)(*structs)
    return bytes(exported.serialize())


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


def _result(folder: Path, i: int) -> Preflight:
    path = folder / f"{i}.json"
    if not path.exists():
        return Preflight(error="the compiler crashed")
    result = json.loads(path.read_text(encoding="utf-8"))
    if "error" not in result:
        return Preflight(
            argument_bytes=result["arguments"],
            output_bytes=result["outputs"],
            temporary_bytes=result["temporaries"],
            code_bytes=result["code"],
            aliased_bytes=result["aliased"],
            bytes_accessed=result["cost"].get("bytes accessed"),
            program=read_hlo((folder / f"{i}.hlo").read_text(encoding="utf-8")),
        )
    refused = _OUT_OF_MEMORY.search(result["error"])
    if refused is None:
        return Preflight(error=result["error"])
    required, required_unit, available, available_unit = refused.groups()
    return Preflight(
        required_bytes=int(float(required) * _UNITS[required_unit]),
        available_bytes=int(float(available) * _UNITS[available_unit]),
    )
