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
import sys
import time
import traceback
from typing import NoReturn

from terminal import start, waiting

# The processes that the launcher starts leave it to the launcher.
FIRST = __name__ == "__main__" and "--coordinator" not in sys.argv
with waiting("importing JAX, Flax and Orbax", show=FIRST):
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from etils import epath  # as pathlib, and reads gs://
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from multihost_launcher import launch_here, parse
    from sklearn.datasets import load_digits

    import jaxmp

POLICY = "mixed_float16"
HELD_OUT = 297


def say(message: str) -> None:
    """Prints, in the first process only."""
    if jax.process_index() == 0:
        print(message, flush=True)


def refuse(args: argparse.Namespace, message: str) -> NoReturn:
    """Ends this process for what was asked of all; the first one says why."""
    if not args.process:
        print(f"train_multihost.py: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    images, digits = load_digits(return_X_y=True)
    return images.astype("f") / 16, digits


def my_share(data, step: int, args) -> tuple[np.ndarray, np.ndarray]:
    """This process's part of a step's batch, which is the same however many processes share it."""
    rng = np.random.default_rng((args.seed, step))
    chosen = rng.integers(len(data[0]) - HELD_OUT, size=args.batch)
    mine = np.split(chosen, jax.process_count())[jax.process_index()]
    return data[0][mine], data[1][mine]


def fsdp(mesh: Mesh, tree):
    """Splits each array over all devices along the first axis that they divide, if there is one."""

    def sharding(x):
        divided = [size > 0 and size % mesh.size == 0 for size in x.shape]
        axes = [None] * divided.index(True) + ["data"] if any(divided) else []
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, tree)


def fingerprint(tree) -> str:
    """A checksum of every bit of a tree, whichever devices have it."""
    return f"{int(jax.jit(checksum)(tree)):08x}"


def checksum(tree) -> jax.Array:
    total = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        bits = x.astype("u4") if x.dtype == bool else jax.lax.bitcast_convert_type(x, "uint32")
        weights = 2 * jnp.arange(x.size, dtype="u4") + 1
        total = 31 * total + (bits.ravel() * weights).sum(dtype="u4")
    return total


def train(args: argparse.Namespace) -> None:
    """What every process does, all at the same time, each with its part of the data."""
    mesh = Mesh(jax.devices(), ("data",))
    if args.batch % mesh.size:
        refuse(args, f"--batch {args.batch} does not divide by the {mesh.size} devices there are")
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

    key = jax.random.key(args.seed)
    shapes = jax.eval_shape(create, key)
    shardings = fsdp(mesh, shapes)
    train_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere))

    manager = open_checkpoints(args)
    if args.resume:
        done, state = restore(manager, shapes, shardings, args)
    else:
        done, state = 0, jax.jit(create, out_shardings=shardings)(key)
    say(f"{jax.process_count()} processes, {mesh.size} devices, {args.batch} examples a step")
    say(f"step {done}: starts from {fingerprint(state)}")

    victim = args.victim % jax.process_count()
    for step in range(done + 1, args.steps + 1):
        images, digits = my_share(data, step, args)
        if step == args.poison and jax.process_index() == victim:
            images[0, 0] = np.inf
        inputs = [jax.make_array_from_process_local_data(by_example, x) for x in (images, digits)]
        state, loss = train_step(state, *inputs)
        report(step, state, loss)
        # SIGTERM, by which a cluster tells one process that its machine goes: all stop.
        stop = multihost_utils.reached_preemption_sync_point(step)
        if stop or step % args.every == 0 or step == args.steps:
            save(manager, step, state, args)
        if step == args.kill and jax.process_index() == victim:
            time.sleep(args.timeout)  # the launcher kills this process here
        if stop:
            say(f"stops after step {step}, because one of the processes was told to")
            break
    if manager is not None:
        manager.close()  # waits until the last one is written

    logits = jax.jit(model.apply)({"params": state.params}, data[0][-HELD_OUT:])
    right = (logits.argmax(-1) == data[1][-HELD_OUT:]).mean()
    say(f"ends with {fingerprint(state)}; {100 * float(right):.1f} % of digits are right")


def report(step: int, state: jaxmp.TrainState, loss: jax.Array) -> None:
    """Prints a step, in every process. (A long run does so now and then: it waits for the step.)"""
    note = (
        ""
        if jaxmp.loss_scaling.step_was_finite(state)
        else "  SKIPPED: the gradients are not finite"
    )
    scale, skipped = float(state.loss_scale), int(state.skipped_count)
    line = f"step {step}: loss {float(loss):.9g}, scale {scale:g}, skipped {skipped}{note}"
    print(line, flush=True)
    jaxmp.loss_scaling.check_not_stuck(state)


def open_checkpoints(args: argparse.Namespace) -> ocp.CheckpointManager | None:
    if args.checkpoint is None:
        return None
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager(epath.Path(args.checkpoint).resolve(), options=options)


def settings(args: argparse.Namespace) -> dict[str, int]:
    """What the course of a run depends on, but for the number of processes."""
    return {"batch": args.batch, "seed": args.seed}


def save(manager: ocp.CheckpointManager | None, step: int, state, args) -> None:
    """Each process writes the parts it has, in the background."""
    if manager is None:
        return
    parts = {
        "state": ocp.args.StandardSave(state),
        "settings": ocp.args.JsonSave(settings(args)),
    }
    manager.save(step, args=ocp.args.Composite(**parts))
    say(f"step {step}: saves {fingerprint(state)}")


def restore(manager: ocp.CheckpointManager, shapes, shardings, args):
    """Each process reads the parts it is to have, whichever processes wrote them."""
    step = manager.latest_step()
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    try:
        how = ocp.args.Composite(settings=ocp.args.JsonRestore())
        then = manager.restore(step, args=how)["settings"]
        how = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        state = manager.restore(step, args=how)["state"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0][:200]}"
        refuse(
            args,
            f"the checkpoint {manager.directory / str(step)} is damaged ({reason}); nothing was "
            "changed: move it away to go on from the one before, or to begin again",
        )
    if then != settings(args):
        refuse(args, f"the run in {args.checkpoint} has {then}, and this one {settings(args)}")
    if step >= args.steps:
        say(f"the run is finished: it has made {step} steps; a larger --steps continues it")
    return step, state


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
        refuse(args, f"JAX finds no cluster here ({error}); --processes 2 starts two processes")


def main() -> None:
    args = parse(__doc__.split("\n")[0])
    if args.processes is not None and args.coordinator is None:
        raise SystemExit(launch_here(args))
    sys.excepthook = die
    join(args)
    train(args)


def die(*error) -> None:
    """Ends this process at once: an orderly end waits for the others, and they for this one."""
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    start(main)
