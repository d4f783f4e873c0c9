"""tunix: a decoder trained by its PeftTrainer, then LoRA on a frozen base in int4.

    python examples/recipes/tunix_lora.py
    python examples/recipes/tunix_lora.py --steps 5 --no-preflight  # a minute

A small Llama learns the source of Python's standard library, a byte a token; adapters then learn
the documentation in `pydoc_data`. The base is float32, or int4 by `jaxmp.quantize`; the model
computes in float32, or in bfloat16 by `jaxmp.wrap`. Nothing of tunix is changed.

    pip install google-tunix
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from shown import means_of_ten, plot, print_compiled
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer

import jaxmp

SMALL: Final = llama3.ModelConfig(
    num_layers=2,
    vocab_size=256,
    embed_dim=128,
    hidden_dim=352,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10_000,
    norm_eps=1e-5,
)
LARGE: Final = dataclasses.replace(llama3.ModelConfig.llama3p2_1b(), num_layers=4)
LENGTH, ROWS = 128, 8
# The variants: the format of the base, and the policy.
VARIANTS: Final = {
    "base float32, float32": (None, "float32"),
    "base float32, mixed_bfloat16": (None, "mixed_bfloat16"),
    "base int4, mixed_bfloat16": ("int4", "mixed_bfloat16"),
}


def text(*names: str) -> np.ndarray:
    """The bytes of files of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for name in names for path in folder.glob(name))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)


def batches(tokens: np.ndarray, steps: int, seed: int) -> Iterator[Any]:
    """tunix's batches, of windows at random places."""
    draw = np.random.default_rng(seed)
    mask = np.ones((ROWS, LENGTH), bool)
    for _ in range(steps):
        starts = draw.integers(0, len(tokens) - LENGTH, ROWS)
        windows = np.stack([tokens[start : start + LENGTH] for start in starts])
        yield peft_trainer.TrainingInput(input_tokens=windows, input_mask=mask)


def model_input(batch: Any) -> dict[str, Any]:
    """What tunix's loss takes, of a batch."""
    rows, length = batch.input_tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
        "attention_mask": jnp.broadcast_to(causal, (rows, length, length)),
    }


def train(net: nnx.Module, tokens: np.ndarray, steps: int, rate: float) -> list[float]:
    """The loss of each step of tunix's trainer, which updates the model."""
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps)
    trainer = peft_trainer.PeftTrainer(net, optax.adamw(rate), settings)
    trainer.with_gen_model_input_fn(model_input).train(batches(tokens, steps, seed=0))
    return [float(x) for x in trainer.metrics_logger.get_metric_history("", "loss", "train")]


def adapted(base: nnx.Module, stored: str | None, policy: str) -> nnx.Module:
    """A copy of the base with adapters, the base in few bits, under a policy."""
    net = qwix.apply_lora_to_model(
        nnx.clone(base),
        qwix.LoraProvider(module_path=".*proj", rank=8, alpha=16.0),
        rngs=nnx.Rngs(1),
        **base.get_model_input(),
    )
    if stored is not None:
        net = jaxmp.quantize(net, stored)  # the base, not the adapters
    return jaxmp.wrap(net, policy)


def nbytes(net: nnx.Module) -> int:
    """The bytes of a model's arrays, of int4 two an octet."""
    leaves = jax.tree.leaves(nnx.state(net))
    return sum(int(x.size * jax.dtypes.itemsize_bits(x.dtype)) // 8 for x in leaves)


def compiled(stored: str | None, policy: str) -> Any:
    """What the compiler of a TPU v5e says of a step of four layers of Llama 3.2 1B, 4 x 512."""

    def make() -> Any:
        net = adapted(llama3.Llama3(LARGE, rngs=nnx.Rngs(0)), stored, policy)
        return net, nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.LoRAParam)

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state: Any, tokens: Any) -> Any:
        net, optimizer = nnx.merge(graph, state)
        batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=tokens >= 0)
        inputs, adapters = model_input(batch), nnx.DiffState(0, nnx.LoRAParam)

        def loss_fn(net: nnx.Module) -> Any:
            logits = trained(net, inputs)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn, argnums=adapters)(net)
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), loss

    tokens = jax.ShapeDtypeStruct((4, 512), jnp.int32)
    return jaxmp.preflight(jax.jit(step, donate_argnums=0), target="tpu-v5e")(state, tokens)


def sampled(net: nnx.Module, inputs: dict[str, Any]) -> Any:
    """The logits as tunix's sampler computes them: a token a step, from a cache."""
    tokens = inputs["input_tokens"]
    rows, length = tokens.shape
    empty = jnp.zeros((rows, length, SMALL.num_kv_heads, SMALL.head_dim))
    layer = {"k": empty, "v": empty, "end_index": jnp.zeros((rows,), jnp.int32)}
    cache = {f"layer_{i}": layer for i in range(SMALL.num_layers)}
    found = []
    for i in range(length):
        one = slice(i, i + 1)
        places = inputs["positions"][:, one], cache, inputs["attention_mask"][:, one]
        logits, cache = net(tokens[:, one], *places)
        found.append(logits)
    return jnp.concatenate(found, 1)


def trained(net: nnx.Module, inputs: dict[str, Any]) -> Any:
    """The logits as the trainer computes them."""
    return net(inputs["input_tokens"], inputs["positions"], None, inputs["attention_mask"])[0]


def gradients(net: nnx.Module, inputs: dict[str, Any]) -> Any:
    """The gradient of the adapters, as tunix's trainer takes it."""
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    return nnx.grad(lambda net: trained(net, inputs).mean(), argnums=adapters)(net)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of the base, and of the adapters")
    parser.add_argument("--preflight", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="a PNG file for the loss curves")
    args = parser.parse_args()
    base = llama3.Llama3(SMALL, rngs=nnx.Rngs(0))
    source, words = text("*.py"), text("pydoc_data/topics.py")
    with contextlib.redirect_stdout(sys.stderr):
        first = train(base, source, args.steps, 3e-3)
    print(f"the base learns the source: loss {first[0]:.3f}, then {np.mean(first[-10:]):.3f}\n")
    print("| adapters                     | model kB | first loss | last loss | audit |")
    print("| :--------------------------- | -------: | ---------: | --------: | :---- |")
    curves, nets = {}, {}
    inputs = model_input(next(batches(words, 1, seed=2)))
    for name, of in VARIANTS.items():
        net = nets[name] = adapted(base, *of)
        report = jaxmp.audit(gradients)(net, inputs)
        with contextlib.redirect_stdout(sys.stderr):
            losses = curves[name] = train(net, words, args.steps, 3e-3)
        print(
            f"| {name:28} | {nbytes(net) / 1e3:8.0f} | {losses[0]:10.3f} "
            f"| {np.mean(losses[-10:]):9.3f} | {report.verdict()} |",
            flush=True,
        )
    first = {key: value[:, :8] for key, value in inputs.items()}
    first["attention_mask"] = first["attention_mask"][:, :, :8]
    print("\nthe last one's logits, as the trainer and as the sampler computes them:")
    print(jaxmp.parity(trained, sampled, match={})(nets[name], first))
    if args.plot:
        means = {name: means_of_ten(losses) for name, losses in curves.items()}
        plot(means, args.plot, steps=10, y="loss (nats a byte)")
    if args.preflight:
        steps = {name: functools.partial(compiled, *of) for name, of in VARIANTS.items()}
        print_compiled("a step of 4 layers on a TPU v5e", steps)


if __name__ == "__main__":
    main()
