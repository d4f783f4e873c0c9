"""MaxText's own Llama, as its trainer builds it: its dtype flag beside a policy.

    python benchmarks/maxtext_llama.py [--layers 4]
    python benchmarks/maxtext_llama.py --block gemma mixtral --remat full minimal

The loss and its gradient, compiled for a TPU v5e: once with MaxText's `dtype=bfloat16`, once with
`dtype=float32` under `mixed_bfloat16`. Width 1024, 16 heads, batch 8 x 1,024, a vocabulary of
32,000. `--block` names MaxText's `decoder_block`, and `--remat` its `remat_policy`: "full" computes
each layer again in the backward pass ("none" does as well), and "minimal" saves what products
return. Columns:

* GB: memory traffic, and Mcycles: the compiler's estimate; where layers are scanned, a loop's body
  counts once in both;
* temp MiB: temporary memory;
* gradient error: relative to float32 in the 2-norm, of one layer of width 64 on this machine.

MaxText needs Python 3.12 and more packages than it names: `pip install --no-deps maxtext`, then
what an import error asks for (omegaconf, ml_collections, aqtp, transformers, grain, tokamax, ...).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # no clients of Google Cloud

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmp

LARGE: Final = {
    "base_emb_dim": 1024,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_mlp_dim": 2816,
    "base_moe_mlp_dim": 2816,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_target_length": 1024,
    "per_device_batch_size": 8,
}
SMALL: Final = {
    **LARGE,
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 176,
    "base_moe_mlp_dim": 176,
    "head_dim": 16,
    "vocab_size": 128,
    "max_target_length": 64,
}
# What a block needs beside the sizes: as MaxText's own configurations of its models have it.
BLOCKS: Final[dict[str, dict[str, Any]]] = {
    "llama2": {},
    "gemma": {"mlp_activations": ["gelu", "linear"], "logits_via_embedding": True},
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2, "sparse_matmul": False},
}
VARIANTS: Final = {
    "MaxText, dtype=bfloat16": ("bfloat16", None),
    "jaxmp": ("float32", "mixed_bfloat16"),
}


def model(sizes: dict[str, Any], *, shapes: bool) -> Any:
    """MaxText's module, or its shapes alone."""
    options = {
        "run_name": "benchmark",
        "enable_checkpointing": False,
        "attention": "dot_product",
        "dataset_type": "synthetic",
        "base_output_directory": tempfile.gettempdir(),
        "skip_jax_distributed_system": True,
        "steps": 2,
        "log_config": False,
        "hardware": "cpu",
        **sizes,
    }
    with contextlib.redirect_stdout(sys.stderr):
        # Not at the top: the benchmarks do not depend on it.
        import maxtext
        from maxtext.configs import pyconfig
        from maxtext.utils import maxtext_utils, model_creation_utils

        base = Path(maxtext.__file__).parent / "configs" / "base.yml"
        config = pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in options.items())])
        mesh = maxtext_utils.get_mesh_from_config(config)

        def make() -> Any:
            return model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))

        with mesh:
            return nnx.eval_shape(make) if shapes else make()


def loss(net: Any, tokens: Any, positions: Any, segments: Any) -> Any:
    """The mean cross-entropy of the next tokens."""
    logits = net(
        decoder_input_tokens=tokens,
        decoder_positions=positions,
        decoder_segment_ids=segments,
        enable_dropout=False,
    )
    labels = jnp.roll(tokens, -1, 1)
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compiled(dtype: str, policy: str | None, options: dict[str, Any]) -> list[float]:
    """The compiler's GB, Mcycles and MiB of temporaries."""
    net = model({**LARGE, **options, "dtype": dtype}, shapes=True)
    graph, state = nnx.split(jaxmp.wrap(net, policy) if policy else net)
    batch = [jax.ShapeDtypeStruct((8, 1024), jnp.int32)] * 3

    def step(state: Any, *batch: Any) -> Any:
        return nnx.value_and_grad(loss)(nnx.merge(graph, state), *batch)

    [row] = jaxmp.preflight(step, target="tpu-v5e")(state, *batch).policies
    cycles = row.program.cycles
    return [row.bytes_accessed / 1e9, cycles / 1e6, row.temporary_bytes / 2**20]


def gradient(dtype: str, policy: str | None, options: dict[str, Any]) -> np.ndarray:
    """The gradient of one small layer, as one float64 vector."""
    one = {**SMALL, **options, "base_num_decoder_layers": 1, "dtype": dtype}
    net = model(one, shapes=False)
    tokens = jax.random.randint(jax.random.key(0), (8, 64), 0, 128)
    positions = jnp.broadcast_to(jnp.arange(64), (8, 64))
    net = jaxmp.wrap(net, policy) if policy else net
    _, grads = nnx.value_and_grad(loss)(net, tokens, positions, jnp.ones_like(tokens))
    leaves = jax.tree.leaves(grads)
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in leaves])


def print_rows(block: str, remat: str, layers: int) -> None:
    """Prints the rows of a block, unrolled and scanned, and their ratios."""
    options = {"decoder_block": block, "remat_policy": remat, **BLOCKS[block]}
    truth = gradient("float32", None, options)
    errors = {
        name: np.linalg.norm(gradient(*of, options) - truth) / np.linalg.norm(truth)
        for name, of in VARIANTS.items()
    }
    for scanned in (False, True):
        where = f"{block:7} | {remat:7} | {'scanned' if scanned else 'unrolled':8}"
        at = {**options, "base_num_decoder_layers": layers, "scan_layers": scanned}
        rows = {name: compiled(*of, at) for name, of in VARIANTS.items()}
        for name, row in rows.items():
            gb, cycles, mib = row
            print(
                f"| {where} | {name:23} | {gb:6.2f} | {cycles:7.1f} | {mib:8.1f} "
                f"| {errors[name]:14.2e} |",
                flush=True,
            )
        hand, jaxmps = rows.values()
        gb, cycles, mib = (b / a for a, b in zip(hand, jaxmps, strict=True))
        first, second = errors.values()
        print(
            f"| {where} | {'jaxmp / MaxText':23} | {gb:6.3f} | {cycles:7.3f} | {mib:8.3f} "
            f"| {second / first:14.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of the compiled model")
    parser.add_argument("--block", nargs="+", choices=list(BLOCKS), default=["llama2"])
    parser.add_argument("--remat", nargs="+", default=["full"], help="MaxText's remat_policy")
    args = parser.parse_args()
    print(
        "| block   | remat   | layers   | variant                 |     GB | Mcycles | temp MiB "
        "| gradient error |"
    )
    print("| :-- | :-- | :-- | :-- | --: | --: | --: | --: |")
    for block in args.block:
        for remat in args.remat:
            print_rows(block, remat, args.layers)


if __name__ == "__main__":
    main()
