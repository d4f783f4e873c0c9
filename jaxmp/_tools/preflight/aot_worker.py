"""Compiles exported programs for a target this machine lacks. A script, run in its own process.

    python aot_worker.py FOLDER

FOLDER holds ``job.json`` and one ``NAME.exported`` (from `jax.export`) per program. For each it
prints ``jaxmp compiles NAME`` and leaves ``NAME.json`` (memory and cost, or the compiler's error)
and ``NAME.hlo`` (the optimized program). It imports JAX alone: an accelerator that JAX runs on
elsewhere is left alone, and a compiler that crashes takes no one with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# A function of flat arrays, and its arguments.
Program = tuple[Callable[..., Any], list[Any]]
# The words before the name of each program that it starts to compile.
STARTS = "jaxmp compiles "


# The file in which the worker leaves why it cannot describe the target.
REFUSED = "topology.txt"


class TopologyError(ValueError):
    """Raised for a target that its compiler does not describe; it says why."""


def main(folder: Path) -> None:
    """Compiles every program of a job; leaves `REFUSED` where there is no such target."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # here, not on import: this file is imported elsewhere
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    try:
        devices = topology_devices(job)
    except TopologyError as error:
        (folder / REFUSED).write_text(str(error), encoding="utf-8")
        sys.exit(1)
    for name in job["programs"]:
        sys.stdout.write(f"\n{STARTS}{name}\n")
        sys.stdout.flush()
        program = partial(exported_program, folder / name, job, devices)
        compile_program(folder / name, program, job)


def topology_devices(job: dict[str, Any]) -> list[Any]:
    """Describes the devices of the target, which are not present.

    Raises:
      TopologyError: if its compiler refuses.
    """
    if job["platform"] == "tpu":
        import libtpu  # noqa: PLC0415 (an extra)

        os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # ask no metadata server which TPU this is ...
        os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-1"  # ... nor complain that none answers
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from jax.experimental import topologies  # noqa: PLC0415 (reads the variables above)

    if job["platform"] == "tpu":
        options = {"platform": "tpu", "topology_name": job["topology"]}
    else:
        options = {"platform": job["platform"], "topology_name": "", "topology": job["topology"]}
        options["target_config"] = job["config"]
    try:
        return list(topologies.get_topology_desc(**options).devices)
    except (RuntimeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise TopologyError(said.removeprefix("INVALID_ARGUMENT: ")) from error


def exported_program(path: Path, job: dict[str, Any], devices: list[Any]) -> Program:
    """Reads an exported program, and places its arguments on the devices."""
    import jax  # noqa: PLC0415 (reads the variables that `topology_devices` sets)
    from jax import export  # noqa: PLC0415

    exported = export.deserialize(bytearray(path.with_suffix(".exported").read_bytes()))
    shardings: list[Any]
    if job["mesh"] is None:
        shardings = [jax.sharding.SingleDeviceSharding(devices[0])] * len(exported.in_avals)
    else:
        mesh = target_mesh(job["mesh"], devices)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shardings = [sharding or whole for sharding in exported.in_shardings_jax(mesh)]
    return exported.call, [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]


def target_mesh(mesh: dict[str, Any], devices: list[Any]) -> Any:
    """Returns the mesh of a job, of the target's devices."""
    import jax  # noqa: PLC0415

    types = tuple(jax.sharding.AxisType[name] for name in mesh["types"])
    sizes, names = tuple(mesh["axes"].values()), tuple(mesh["axes"])
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def _on_host(x: Any) -> Any:
    import jax  # noqa: PLC0415

    sharding = x.sharding.with_memory_kind("pinned_host")
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compile_program(path: Path, program: Callable[[], Program], job: dict[str, Any]) -> None:
    """Compiles what `program` returns; leaves ``path.json``, also of an error, and ``path.hlo``."""
    import jax  # noqa: PLC0415

    platform = job["platform"]
    options = {"xla_gpu_enable_triton_gemm": False} if platform == "cuda" else {}
    try:
        run, args = program()
        args = [_on_host(x) if flag else x for x, flag in zip(args, job["on_host"], strict=True)]
        traced = jax.jit(run, donate_argnums=tuple(job["donated"])).trace(*args)
        compiled = traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)
        path.with_suffix(".hlo").write_text(compiled.as_text(), encoding="utf-8")
        memory = compiled.memory_analysis()
        result = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "host_argument_bytes": memory.host_argument_size_in_bytes,
            "host_output_bytes": memory.host_output_size_in_bytes,
            "host_temporary_bytes": memory.host_temp_size_in_bytes,
            "host_aliased_bytes": memory.host_alias_size_in_bytes,
            "bytes_accessed": (compiled.cost_analysis() or {}).get("bytes accessed"),
        }
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is the result)
        result = {"error": f"{type(error).__name__}: {error}"}
    path.with_suffix(".json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
