"""An optimizer's update alone, its state stored in float32, 16 and 8 bits, compiled for two chips.

    python benchmarks/update_aot.py [TARGET ...]

Adam and two parameters, 8192 x 8192 and 8192, state and parameters donated; for one H100 and one
TPU v5e if no targets are named. A row has, of each storage, the bytes that are read and written
(what kernels do on a GPU; "bytes accessed" on a TPU, everything in HBM), over those of float32; and
the temporaries, over the bytes of the parameters in float32: 1 would be one more copy of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import jax
import optax

import jaxmp
from jaxmp._tools.preflight.hlo import read_hlo

from aot import NO_PREFETCH, compile_on

N = 8192
ADAM = optax.adam(1e-3)
MASTERS = jaxmp.master_weights
STATES: dict[str, tuple[str, optax.GradientTransformation]] = {
    "float32": ("float32", ADAM),
    "moments in bfloat16": ("float32", jaxmp.store_state(ADAM, "bfloat16")),
    "moments in int8": ("float32", jaxmp.store_state(ADAM, "int8")),
    "moments in float8_e4m3fn": ("float32", jaxmp.store_state(ADAM, "float8_e4m3fn")),
    "bfloat16 weights, masters": ("bfloat16", MASTERS(ADAM)),
    "bfloat16 weights, remainders": ("bfloat16", MASTERS(ADAM, remainder=True)),
    "  and moments in bfloat16": (
        "bfloat16",
        MASTERS(jaxmp.store_state(ADAM, "bfloat16"), remainder=True),
    ),
    "  and moments in int8": ("bfloat16", MASTERS(jaxmp.store_state(ADAM, "int8"), remainder=True)),
}


def measured(target: str, dtype: str, tx: optax.GradientTransformation) -> tuple[float, float]:
    """Bytes read and written, and of temporaries."""
    params = {"w": jax.ShapeDtypeStruct((N, N), dtype), "b": jax.ShapeDtypeStruct((N,), dtype)}
    state = jax.eval_shape(tx.init, params)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    options = NO_PREFETCH if target.startswith("tpu") else None
    compiled = compile_on(target, update, (params, state, params), (0, 1), options)
    cost = compiled.cost_analysis() if options else None
    moved = cost["bytes accessed"] if cost else sum(read_hlo(compiled.as_text()).traffic)
    return moved, compiled.memory_analysis().temp_size_in_bytes


def main(targets: list[str]) -> None:
    size = 4 * (N * N + N)
    for target in targets or ["gpu-h100", "tpu-v5e"]:
        print(f"{target:32}{'bytes':>8}{'over float32':>15}{'temporaries':>14}", flush=True)
        plain = 0.0
        for name, (dtype, tx) in STATES.items():
            moved, temporaries = measured(target, dtype, tx)
            plain = plain or moved
            over = f"{moved / 1e9:5.2f} GB{moved / plain:15.2f}{temporaries / size:14.3f}"
            print(f"{name:32}{over}", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
