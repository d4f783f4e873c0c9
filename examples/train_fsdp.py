"""Trains a language model that is split over all devices (FSDP): the shape of a real run.

Scanned layers, rematerialized in the backward pass; gradients accumulated over microbatches;
parameters, optimizer state and batch split over the devices; one donated, compiled step. The model
is plain Flax Linen in float32; `jaxmp.wrap` applies the policy to it.

    python examples/train_fsdp.py                   # on a CPU: over eight simulated devices
    python examples/train_fsdp.py --size 1b         # on eight chips or 256: the same program
    python examples/train_fsdp.py --size 1b --distributed  # ... on each of their hosts

The text is that of Python's standard library.
"""

from __future__ import annotations

import argparse
import math
import os
import time

from terminal import CtrlC, start, stop, waiting

with waiting("importing JAX and Flax", show=__name__ == "__main__"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from fsdp_model import LM, SIZES, Size, read_text
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from tqdm import tqdm

    import jaxmp


def split(mesh, like) -> NamedSharding:
    """Over all devices, along the largest axis that they divide; whole where there is none."""
    axes = [i for i, n in enumerate(like.shape) if n and n % mesh.size == 0]
    axis = max(axes, key=lambda i: like.shape[i], default=None)
    return NamedSharding(mesh, P(*("data" if i == axis else None for i in range(like.ndim))))


def bytes_here(like, at: NamedSharding) -> int:
    """What one device holds of an array."""
    return math.prod(at.shard_shape(like.shape)) * like.dtype.itemsize


def train(policy: str, size: Size, steps: int, batch: int, microbatches: int, seed: int):
    """Returns the last state and the losses; a microbatch is `batch` sequences per device."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    examples = batch * microbatches * devices
    first = jax.process_index() == 0

    model = jaxmp.wrap(LM(size), policy)
    schedule = optax.warmup_cosine_decay_schedule(0, size.learning_rate, steps // 10 + 1, steps + 1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = jaxmp.loss_scale_for(policy, tx)  # for float16; with others it is `tx`

    def create(key):
        params = model.init(key, jnp.zeros((devices, size.length), jnp.uint8))["params"]
        return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(create, jax.random.key(seed))
        at = jax.tree.map(lambda x: split(mesh, x), shapes)
        data, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

        def train_step(state, tokens):
            def grad_fn(params, tokens):
                loss, grads = state.value_and_grad(loss_fn)(params, tokens)
                return loss, jax.lax.with_sharding_constraint(grads, at.params)

            loss, grads = jaxmp.accumulate_gradients(grad_fn, microbatches)(state.params, tokens)
            return state.apply_gradients(grads=grads), loss

        train_step = jax.jit(
            train_step, in_shardings=(at, data), out_shardings=(at, whole), donate_argnums=0
        )
        with waiting(f"{policy}: initializing the parameters", show=first):
            # Made in pieces: no device ever holds the whole model.
            state = jax.jit(create, out_shardings=at)(jax.random.key(seed))
        like = jax.ShapeDtypeStruct((examples, size.length + 1), jnp.uint8, sharding=data)
        started = time.perf_counter()
        with waiting(f"{policy}: compiling the training step", show=first):
            compiled = train_step.lower(shapes, like).compile()
        if first:
            count = sum(x.size for x in jax.tree.leaves(shapes.params))
            memory = compiled.memory_analysis()
            print(
                f"{policy}: {count:,} parameters over {devices} devices "
                f"({jax.devices()[0].device_kind}), {examples} sequences a step\n"
                f"compiled in {time.perf_counter() - started:.0f} s; bytes per device: "
                f"train state {sum(jax.tree.leaves(jax.tree.map(bytes_here, shapes, at))):,}, "
                f"temporary {memory.temp_size_in_bytes:,}"
            )

        text, rng, losses = read_text(), np.random.default_rng(seed), []
        started = time.perf_counter()
        bar = tqdm(desc=policy, total=steps, unit=" steps", disable=not first)
        with bar, CtrlC() as ctrl_c:
            for step in range(1, steps + 1):
                # Every process draws the same batch, and its devices take their rows of it.
                starts = rng.integers(len(text) - size.length, size=examples)
                rows = text[starts[:, None] + np.arange(size.length + 1)]
                tokens = jax.make_array_from_callback(rows.shape, data, rows.__getitem__)
                state, loss = compiled(state, tokens)
                losses.append(loss)
                jax.block_until_ready(losses[-2:-1])  # the step before: the devices never idle
                bar.update()
                if step % -(-steps // 10) == 0 or step == steps:
                    jaxmp.loss_scaling.check_not_stuck(state)
                    value = float(loss)  # waits for the step
                    speed = step * examples * size.length / (time.perf_counter() - started)
                    if first:
                        tqdm.write(f"step {step:5d}  loss {value:.4f}  {speed:,.0f} tokens/s")
                if ctrl_c.pressed:
                    break
    if ctrl_c.pressed:
        stop(f"{policy}: stopped at step {step} of {steps}; nothing is kept")
    if first and (skipped := int(state.skipped_count)):
        print(f"{skipped} steps were skipped; the loss scale is {float(state.loss_scale):g}")
    return state, [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", default="mixed_bfloat16", help="default: %(default)s")
    parser.add_argument("--size", default="small", choices=SIZES, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=1, help="of a device; default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--distributed", action="store_true", help="several processes take part")
    args = parser.parse_args()
    if min(args.steps, args.batch, args.microbatches) < 1 or args.seed < 0:
        parser.error("--steps, --batch and --microbatches must be at least 1, --seed at least 0")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    if args.distributed:
        jax.distributed.initialize()
    train(args.policy, SIZES[args.size], args.steps, args.batch, args.microbatches, args.seed)


if __name__ == "__main__":
    start(main)
