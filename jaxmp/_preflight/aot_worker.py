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
from pathlib import Path
from typing import Any

# The words before the name of each program that it starts to compile.
STARTS = "jaxmp compiles "


def main(folder: Path) -> None:
    """Compiles every program of a job."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # here, not on import: this file is imported elsewhere
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    devices = topology_devices(job)
    for name in job["programs"]:
        sys.stdout.write(f"\n{STARTS}{name}\n")
        sys.stdout.flush()
        try:
            result = compile_program(folder, name, job, devices)
        except Exception as error:  # noqa: BLE001 (whatever the compiler raises is the result)
            result = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def topology_devices(job: dict[str, Any]) -> list[Any]:
    """Describes the devices of the target, which are not present."""
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
        options = {"platform": "cuda", "topology_name": "", "topology": job["topology"]}
        options["target_config"] = job["config"]
    return list(topologies.get_topology_desc(**options).devices)


def compile_program(
    folder: Path, name: str, job: dict[str, Any], devices: list[Any]
) -> dict[str, Any]:
    """Compiles one program; returns the memory and cost that the compiler reports."""
    import jax  # noqa: PLC0415 (reads the variables that `topology_devices` sets)
    from jax import export  # noqa: PLC0415

    exported = export.deserialize(bytearray((folder / f"{name}.exported").read_bytes()))
    shardings = argument_shardings(exported, job["mesh"], devices)
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    jitted = jax.jit(exported.call, donate_argnums=tuple(job["donated"]))
    platform = "tpu" if job["platform"] == "tpu" else "cuda"
    options = {"xla_gpu_enable_triton_gemm": False} if platform == "cuda" else {}
    compiled = (
        jitted.trace(*args).lower(lowering_platforms=(platform,)).compile(compiler_options=options)
    )
    (folder / f"{name}.hlo").write_text(compiled.as_text(), encoding="utf-8")
    memory = compiled.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "bytes_accessed": (compiled.cost_analysis() or {}).get("bytes accessed"),
    }


def argument_shardings(exported: Any, mesh: dict[str, Any] | None, devices: list[Any]) -> list[Any]:
    """Returns the sharding of each argument: as exported, over the job's mesh, or on one device."""
    import jax  # noqa: PLC0415

    if mesh is None:
        return [jax.sharding.SingleDeviceSharding(devices[0])] * len(exported.in_avals)
    types = tuple(jax.sharding.AxisType[name] for name in mesh["types"])
    sizes, names = tuple(mesh["axes"].values()), tuple(mesh["axes"])
    described = jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    whole = jax.sharding.NamedSharding(described, jax.sharding.PartitionSpec())
    return [sharding or whole for sharding in exported.in_shardings_jax(described)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
