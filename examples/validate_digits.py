"""Which precision trains a digit classifier as float32 does? And without loss scaling?

    python examples/validate_digits.py
    python examples/validate_digits.py --rate 4 --out validate_digits_fast

The network and its loss are those of `float16_loss_scaling.py`: the loss is multiplied by 1e-5, as
one term among many may be, so that its gradients are too small for float16. bfloat16, and float16
with a scaled loss, come to float32's loss; float16 without does not. The second command learns four
times as fast, on the brink of instability, where a difference proves nothing. A minute each on two
CPU cores; `docs/validation.md` shows what they print and draw. Stopped, they go on where they were.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path

# Since JAX 0.12, a CPU sums some bfloat16 products in bfloat16 without this; it is read when the
# first computation starts. `jaxmp.validate` refuses to measure that.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
)

import jax
import optax
from float16_loss_scaling import LEARNING_RATE, LOSS_WEIGHT, init_params, network
from terminal import start, stop
from train_digits_nnx import batches as draw
from train_digits_nnx import read_digits

import jaxmp

STEPS = 300
BATCH = 512
SCALED, NOT_SCALED = "loss scaled", "loss not scaled"
POLICIES = {
    "mixed_bfloat16": "mixed_bfloat16",
    f"mixed_float16, {SCALED}": "mixed_float16",
    f"mixed_float16, {NOT_SCALED}": ("mixed_float16", NOT_SCALED),
}


@functools.cache  # so that each policy is compiled once, for all seeds
def under(rate, policy, scaling=SCALED):
    """The optimizer, the step and the loss under a policy."""
    low_network = jaxmp.autocast(network, policy)
    tx = optax.sgd(optax.cosine_decay_schedule(rate * LEARNING_RATE, STEPS), momentum=0.9)
    if scaling == SCALED:
        # It starts too large, to show what happens then.
        options = {"init_scale": 2.0**39, "growth_interval": 50, "max_scale": 2.0**60}
        tx = jaxmp.loss_scale_for(policy, tx, **options)

    def loss_fn(params, images, digits):
        logits = low_network(params, images.reshape(len(images), -1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()

    def weighted(params, batch):
        return LOSS_WEIGHT * loss_fn(params, *batch)

    @jax.jit
    def step(state, batch):
        loss, grads = state.value_and_grad(weighted)(state.params, batch)
        metrics = {
            "loss": loss / LOSS_WEIGHT,
            "grad_norm": optax.tree.norm(grads) / LOSS_WEIGHT,
            "loss_scale": state.loss_scale,
        }
        state = state.apply_gradients(grads=grads)
        return state, metrics | {"finite": jaxmp.loss_scaling.step_was_finite(state)}

    return tx, step, jax.jit(loss_fn)


def make_step(policy, seed, rate=1.0):
    policy = policy if isinstance(policy, tuple) else (policy,)
    tx, step, loss_fn = under(rate, *policy)
    state = jaxmp.TrainState.create(apply_fn=network, params=init_params(seed), tx=tx)
    return state, step, lambda state: loss_fn(state.params, *data()[1])


@functools.cache
def data():
    return read_digits()


def batches(seed):
    return draw(data()[0], STEPS, BATCH, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path("validate_digits")
    parser.add_argument("--out", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=1, help="times as fast as it learns well")
    args = parser.parse_args()
    if not 1 <= args.steps <= STEPS:
        parser.error(f"--steps must be from 1 to {STEPS}")
    try:
        report = jaxmp.validate(
            functools.partial(make_step, rate=args.rate),
            POLICIES,
            seeds=args.seeds,
            out=args.out,
        )(args.steps, batches=batches)
    except KeyboardInterrupt:
        stop(f"\nstopped; the same command resumes from {args.out}")
    (args.out / "report.json").write_text(json.dumps(report.to_dict()))
    (args.out / "report.md").write_text(report.to_markdown())
    report.plot(args.out / "report.png")
    print(report)
    print(f"\nThe curves are in {args.out / 'report.png'}.")


if __name__ == "__main__":
    start(main)
