"""Trains a digit classifier in float16 on the devices of many processes, and survives their deaths.

JAX's own engine distributes: `jax.distributed.initialize` joins the processes, the parameters and
the optimizer's state are split over all their devices (FSDP), each process reads its share of every
batch, and `jax.jit` puts the collectives in. jaxmp's part is what it is on one device: the policy
of `jaxmp.wrap`, a loss scale around the optimizer, and `jaxmp.TrainState`.

    python examples/train_multihost.py --processes 2 --checkpoint run   # both on this machine's CPU
    python examples/train_multihost.py --processes 4 --checkpoint run --resume --steps 60
    python examples/train_multihost.py --processes 2 --poison 5   # an inf in one process's batch
    python examples/train_multihost.py --processes 2 --checkpoint killed --kill 25   # kill -9 one

On a cluster that JAX knows (Cloud TPU, Slurm, Open MPI, Kubernetes), start it on each host without
`--processes`; on another one with `--coordinator HOST:PORT --processes N --process I`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath  # as pathlib, and reads gs://
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from multihost_launcher import launch, saved_steps
from sklearn.datasets import load_digits

import jaxmp

POLICY = "mixed_float16"
HELD_OUT = 297


class Refused(Exception):
    """What was asked for cannot be done. It is so in every process."""


def say(message: str) -> None:
    """Prints, in the first process only."""
    if jax.process_index() == 0:
        print(message, flush=True)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    images, digits = load_digits(return_X_y=True)
    return images.astype("f") / 16, digits


def my_share(data, step: int, args) -> tuple[np.ndarray, np.ndarray]:
    """This process's part of a step's batch, which is the same however many processes share it."""
    rng = np.random.default_rng((args.seed, step))
    chosen = rng.integers(len(data[0]) - HELD_OUT, size=args.batch)
    mine = np.split(chosen, jax.process_count())[jax.process_index()]
    images, digits = data[0][mine], data[1][mine]
    if step == args.poison and jax.process_index() == args.victim:
        images[0, 0] = np.inf
    return images, digits


def fsdp(mesh: Mesh, tree):
    """Splits each array over all devices along the first axis that they divide, if there is one."""

    def sharding(x):
        divided = [size > 0 and size % mesh.size == 0 for size in x.shape]
        axes = [None] * divided.index(True) + ["data"] if any(divided) else []
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, tree)


@jax.jit
def fingerprint(tree):
    """A checksum of every bit of a tree, whichever devices have it: uint32[]."""
    total = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        bits = x.astype("u4") if x.dtype == bool else jax.lax.bitcast_convert_type(x, "uint32")
        weights = 2 * jnp.arange(x.size, dtype="u4") + 1
        total = 31 * total + (bits.ravel() * weights).sum(dtype="u4")
    return total


def train(args: argparse.Namespace) -> None:
    """What every process does, at the same time, on its part of the data."""
    mesh = Mesh(jax.devices(), ("data",))
    if args.batch % mesh.size:
        raise Refused(f"--batch {args.batch} does not divide by the {mesh.size} devices there are")
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_example = NamedSharding(mesh, PartitionSpec("data"))
    data = read_digits()

    model = jaxmp.wrap(nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(10)]), POLICY)
    tx = jaxmp.dynamic_loss_scale(optax.adamw(2e-3), growth_interval=50)

    def create(key):
        params = model.init(key, data[0][:1])["params"]
        return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, images, digits):
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()

    def train_step(state, images, digits):
        loss, grads = state.value_and_grad(loss_fn)(state.params, images, digits)
        return state.apply_gradients(grads=grads), loss

    def right_answers(params, images, digits):
        return (model.apply({"params": params}, images).argmax(-1) == digits).mean()

    key = jax.random.key(args.seed)
    shapes = jax.eval_shape(create, key)
    shardings = fsdp(mesh, shapes)
    train_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere))

    start, manager = 0, None
    if args.checkpoint is not None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        manager = ocp.CheckpointManager(epath.Path(args.checkpoint).resolve(), options=options)
    if args.resume:
        start = manager.latest_step()
        state = restore(manager, start, shapes, shardings, args)
    else:
        state = jax.jit(create, out_shardings=shardings)(key)
    say(f"{jax.process_count()} processes, {mesh.size} devices, {args.batch} examples a step")
    say(f"step {start}: starts from {int(fingerprint(state)):08x}")

    for step in range(start + 1, args.steps + 1):
        share = my_share(data, step, args)
        inputs = [jax.make_array_from_process_local_data(by_example, x) for x in share]
        state, loss = train_step(state, *inputs)
        scale, left_out = float(state.loss_scale), int(state.skipped_count)
        note = "" if jaxmp.step_was_finite(state) else "  LEFT OUT: the gradients are not finite"
        print(
            f"step {step}: loss {float(loss):.9g}, scale {scale:g}, left out {left_out}{note}",
            flush=True,
        )
        jaxmp.check_not_stuck(state)
        if manager is not None and (step % args.every == 0 or step == args.steps):
            save(manager, step, state, args)
        if step == args.kill and jax.process_index() == args.victim:
            time.sleep(args.timeout)  # the launcher kills this process here
    if manager is not None:
        manager.close()  # waits until the last one is written
    accuracy = jax.jit(right_answers)(state.params, data[0][-HELD_OUT:], data[1][-HELD_OUT:])
    say(f"ends with {int(fingerprint(state)):08x}; {100 * float(accuracy):.1f} % of digits are right")


def settings(args: argparse.Namespace) -> dict[str, int]:
    """What the course of a run depends on, but for the number of processes."""
    return {"batch": args.batch, "seed": args.seed}


def save(manager: ocp.CheckpointManager, step: int, state, args) -> None:
    """Each process writes the parts it has, in the background."""
    parts = {
        "state": ocp.args.StandardSave(state),
        "settings": ocp.args.JsonSave(settings(args)),
    }
    manager.save(step, args=ocp.args.Composite(**parts))
    say(f"step {step}: saves {int(fingerprint(state)):08x}")


def restore(manager: ocp.CheckpointManager, step: int, shapes, shardings, args):
    """Each process reads the parts it is to have, whichever processes wrote them."""
    how = ocp.args.Composite(settings=ocp.args.JsonRestore())
    if (then := manager.restore(step, args=how)["settings"]) != settings(args):
        raise Refused(f"the run in {args.checkpoint} has {then}, and this one {settings(args)}")
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    how = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    return manager.restore(step, args=how)["state"]


def join(args: argparse.Namespace) -> None:
    """Joins the processes; without --coordinator as the cluster says."""
    try:
        jax.distributed.initialize(
            args.coordinator,
            args.processes,
            args.process,
            # If one dies, the others are ended after so long: they would wait for ever.
            heartbeat_timeout_seconds=args.heartbeat,
            cluster_detection_method=args.coordinator and "deactivate",
        )
    except ValueError as error:
        raise Refused(f"{error} JAX knows no cluster here: --processes 2 starts two") from error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    count = {"type": int, "metavar": "N"}
    parser.add_argument("--processes", **count, help="start so many on this machine's CPU")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, to be one of N")
    parser.add_argument("--process", **count, help="which of them, from 0, with --coordinator")
    parser.add_argument("--steps", **count, default=40, help="default: %(default)s")
    parser.add_argument("--batch", **count, default=64, help="of all processes together")
    parser.add_argument("--seed", **count, default=0, help="default: %(default)s")
    parser.add_argument("--checkpoint", metavar="DIR", help="keep checkpoints here")
    parser.add_argument("--every", **count, default=10, help="steps between them, default 10")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    parser.add_argument("--heartbeat", **count, default=10, help="seconds until a process is dead")
    parser.add_argument("--timeout", **count, default=120, help="seconds without a step are a hang")
    parser.add_argument("--poison", **count, help="an inf in one process's batch of this step")
    parser.add_argument("--kill", **count, help="kill -9 one process after this step")
    parser.add_argument("--victim", **count, help="the process of --poison, --kill; default: last")
    args = parser.parse_args()
    for name in ("processes", "steps", "batch", "every", "heartbeat", "timeout", "poison", "kill"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    check_options(parser, args)
    return args


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.coordinator is not None and None in (args.processes, args.process):
        parser.error("--coordinator needs --processes and --process")
    if args.process is not None and args.coordinator is None:
        parser.error("--process needs --coordinator")
    if args.processes is not None:
        if args.batch % args.processes:
            parser.error(f"--batch {args.batch} does not divide by {args.processes} processes")
        if args.victim is None:
            args.victim = args.processes - 1
        if not 0 <= args.victim < args.processes:
            parser.error(f"--victim {args.victim}: the processes are 0 to {args.processes - 1}")
    elif args.kill is not None:
        parser.error("--kill needs --processes: it is the launcher that kills")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if args.checkpoint is not None:
        steps = saved_steps(args.checkpoint)
        if args.resume and not steps:
            parser.error(f"--resume: there is no checkpoint in {args.checkpoint}")
        if steps and not args.resume:
            parser.error(f"{args.checkpoint} holds a run; --resume continues it")


def launch_here(args: argparse.Namespace) -> int:
    """Starts the processes, and says how to go on if one of them dies."""
    code = launch(
        [sys.executable, *sys.argv],
        args.processes,
        timeout=args.timeout,
        grace=args.heartbeat + 20,
        kill=args.kill and (args.victim, args.kill),
    )
    if code == 1:
        again = [sys.executable, *sys.argv]
        print(shlex.join(again))
    return code


def main() -> None:
    args = parse()
    if args.processes is not None and args.coordinator is None:
        raise SystemExit(launch_here(args))
    try:
        join(args)
        train(args)
    except Refused as error:
        if not args.process:
            print(f"train_multihost.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except Exception:
        # At once: an orderly exit would wait for the others, and they for this process.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
