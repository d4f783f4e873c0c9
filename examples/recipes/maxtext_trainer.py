"""MaxText's own training step: in float32, with its `dtype=bfloat16`, and float32 under a policy.

    python examples/recipes/maxtext_trainer.py
    python examples/recipes/maxtext_trainer.py --steps 5 --no-preflight  # a minute

A small Llama is trained on the text of Python's standard library, a byte a token, by MaxText's
`train_step` and optimizer. A larger one is compiled for a TPU v5e, which need not be there.
Nothing of MaxText is changed; the policy is one line, in `trainer`.

MaxText needs Python 3.12 and more packages than it names; docs/recipes/maxtext.md lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # no clients of Google Cloud

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from shown import means_of_ten, plot, print_compiled

import jaxmp

# The variants: MaxText's `dtype`, and the policy.
VARIANTS: Final = {
    "float32": ("float32", None),
    "MaxText, dtype=bfloat16": ("bfloat16", None),
    "float32, jaxmp": ("float32", "mixed_bfloat16"),
}
SMALL: Final = {
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_num_decoder_layers": 2,
    "base_mlp_dim": 352,
    "head_dim": 32,
    "vocab_size": 256,
    "max_target_length": 128,
    "per_device_batch_size": 8,
    "learning_rate": 3e-3,
}
LARGE: Final = {
    "base_emb_dim": 1024,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_num_decoder_layers": 4,
    "base_mlp_dim": 2816,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_target_length": 1024,
    "per_device_batch_size": 8,
}


def config_of(dtype: str, sizes: dict[str, Any]) -> Any:
    """MaxText's configuration."""
    options = {
        "run_name": "recipe",
        "decoder_block": "llama2",
        "attention": "dot_product",
        "remat_policy": "none",
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "base_output_directory": tempfile.gettempdir(),
        "skip_jax_distributed_system": True,
        "log_config": False,
        "hardware": "cpu",
        "steps": 200,
        "dtype": dtype,
        **sizes,
    }
    import maxtext
    from maxtext.configs import pyconfig

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in options.items())])


def trainer(
    dtype: str, policy: str | None, sizes: dict[str, Any], *, shapes: bool = False
) -> tuple[Callable[..., Any], Any]:
    """MaxText's step, as a function of a state and a batch, and the first state, or its shapes."""
    from maxtext.common import train_state_nnx
    from maxtext.trainers.pre_train.train import train_step
    from maxtext.utils import maxtext_utils, model_creation_utils, train_utils

    config = config_of(dtype, sizes)
    mesh = maxtext_utils.get_mesh_from_config(config)

    def make() -> Any:
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
        if policy is not None:
            model = jaxmp.wrap(model, policy)
        _, tx = train_utils.create_training_optimizer(config, model, mesh=mesh)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return train_state_nnx.TrainStateNNX(model, optimizer)

    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        graph, state = nnx.split(nnx.eval_shape(make) if shapes else make())
    return functools.partial(train_step, graph, config, None, None), state


def batches(sizes: dict[str, Any], steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Windows of the standard library's source, the same for every variant."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    length, rows = sizes["max_target_length"], sizes["per_device_batch_size"]
    draw = np.random.default_rng(0)
    for _ in range(steps):
        starts = draw.integers(0, len(tokens) - length - 1, rows)
        windows = np.stack([tokens[start : start + length + 1] for start in starts])
        yield batch_of(windows[:, :-1], windows[:, 1:])


def batch_of(inputs: Any, targets: Any) -> dict[str, Any]:
    """A batch as MaxText's pipeline makes it, of whole windows."""
    places = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    every = np.ones(inputs.shape, np.int32)
    return {
        "inputs": inputs,
        "inputs_position": places,
        "inputs_segmentation": every,
        "targets": targets,
        "targets_position": places,
        "targets_segmentation": every,
    }


def own_bfloat16() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """MaxText's step with its own `dtype=bfloat16`, and its arguments, for `python -m jaxmp`."""
    with contextlib.redirect_stdout(sys.stderr):  # MaxText's own log
        step, state = trainer("bfloat16", None, SMALL, shapes=True)
    return step, (state, next(batches(SMALL, 1)))


def train(dtype: str, policy: str | None, steps: int) -> list[float]:
    """The loss of each step."""
    step, state = trainer(dtype, policy, SMALL)
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for batch in batches(SMALL, steps):
        state, metrics = step(state, batch)
        losses.append(metrics["scalar"]["learning/loss"])
    return [float(loss) for loss in jax.device_get(losses)]


def compiled(dtype: str, policy: str | None) -> Any:
    """What the compiler of a TPU v5e says of the large model's step."""
    step, state = trainer(dtype, policy, LARGE, shapes=True)
    tokens = jax.ShapeDtypeStruct((8, 1024), np.int32)
    batch = dict.fromkeys(batch_of(np.zeros((8, 8)), np.zeros((8, 8))), tokens)
    # The state's memory is reused for the new one, as in the trainer.
    return jaxmp.preflight(jax.jit(step, donate_argnums=0), target="tpu-v5e")(state, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--preflight", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="a PNG file for the loss curves")
    args = parser.parse_args()
    curves = {}
    print("| variant                 | first loss | last loss | audit |")
    print("| :---------------------- | ---------: | --------: | :---- |")
    for name, of in VARIANTS.items():
        with contextlib.redirect_stdout(sys.stderr):
            step, state = trainer(*of, SMALL, shapes=True)
            report = jaxmp.audit(step)(state, next(batches(SMALL, 1)))
            curves[name] = train(*of, args.steps)
        last = np.mean(curves[name][-10:])
        row = f"| {name:23} | {curves[name][0]:10.4f} | {last:9.4f} | {report.verdict()} |"
        print(row, flush=True)
    if args.plot:
        means = {name: means_of_ten(losses) for name, losses in curves.items()}
        plot(means, args.plot, steps=10, y="loss (nats a byte)")
    if args.preflight:
        steps = {name: functools.partial(compiled, *of) for name, of in VARIANTS.items()}
        print_compiled("a step on a TPU v5e", steps)


if __name__ == "__main__":
    main()
