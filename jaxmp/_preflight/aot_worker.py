"""Compiles exported programs for a target that is not there. A script, run in its own process.

    python aot_worker.py FOLDER

FOLDER holds ``job.json`` and one ``NAME.exported`` (from `jax.export`) per program. For each it
prints ``jaxmp compiles NAME`` and leaves ``NAME.json`` (memory and cost, or the compiler's error)
and ``NAME.hlo`` (the optimised program). It imports JAX alone: an accelerator that JAX runs on
elsewhere is left alone, and a compiler that crashes takes no one with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# What it prints before the name of the program it starts on.
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
    """The devices of the target, described, not present."""
    if job["platform"] == "tpu":
        import libtpu  # noqa: PLC0415 (an extra)

        os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # ask no metadata server which TPU this is ...
        os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-1"  # ... nor complain that none answers
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from jax.experimental import topologies  # noqa: PLC0415 (reads the variables above)

    if job["platform"] == "tpu":
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices
        )
    return list(
        topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=job["config"], topology=job["topology"]
        ).devices
    )


def compile_program(
    folder: Path, name: str, job: dict[str, Any], devices: list[Any]
) -> dict[str, Any]:
    """Compiles one program; returns what the compiler says of it."""
    import jax  # noqa: PLC0415 (reads the variables that `topology_devices` sets)
    from jax import export  # noqa: PLC0415

    exported = export.deserialize(bytearray((folder / f"{name}.exported").read_bytes()))
    shardings = argument_shardings(job, devices, len(exported.in_avals))
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
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "cost": compiled.cost_analysis() or {},
    }


def argument_shardings(job: dict[str, Any], devices: list[Any], count: int) -> list[Any]:
    """The sharding of each argument: over the job's mesh, or all on one device."""
    import jax  # noqa: PLC0415

    if job["mesh"] is None:
        return [jax.sharding.SingleDeviceSharding(devices[0])] * count
    mesh = jax.make_mesh(
        tuple(job["mesh"]["sizes"]),
        tuple(job["mesh"]["names"]),
        axis_types=tuple(jax.sharding.AxisType[t] for t in job["mesh"]["types"]),
        devices=devices,
    )
    specs = [
        jax.sharding.PartitionSpec(*(tuple(s) if isinstance(s, list) else s for s in spec))
        for spec in job["mesh"]["specs"]
    ]
    return [jax.sharding.NamedSharding(mesh, spec) for spec in specs]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
