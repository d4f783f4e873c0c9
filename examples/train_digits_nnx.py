"""Trains a convolutional network on scikit-learn's 8x8 handwritten digits.

The model is plain Flax NNX, written in float32, with BatchNorm and Dropout. `jaxmp.wrap` applies
the policy to it; the training loop is Flax's, with the loss scaled for float16.

    python examples/train_digits_nnx.py
    python examples/train_digits_nnx.py --policy mixed_float16
    python examples/train_digits_nnx.py --compare float32 --runs 3

The last trains each seed twice, from one initialization on one sequence of batches. It shows a
progress bar, draws `digits.png`, and ends with

    accuracy (%)           seed 0   seed 1   seed 2     mean   points  matmuls
    mixed_bfloat16          98.44    98.33    98.67    98.48    +0.11  3 bfloat16
    float32                 98.33    98.22    98.55    98.37           3 float32
"""

from __future__ import annotations

from collections.abc import Iterator

from terminal import CtrlC, often_at_first, start, stop, waiting

with waiting("importing JAX, Flax and scikit-learn", show=__name__ == "__main__"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from digits_report import Run, parse, plot, report
    from flax import nnx
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm

    import jaxmp


class CNN(nnx.Module):
    """Images [batch, 8, 8, 1] to the logits of the ten digits: [batch, 10]."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, images, digits):
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


@nnx.jit
def train_step(model, optimizer, images, digits):
    # `nnx.state` returns the model's own variables: copy them.
    averages = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
    loss, grads = jaxmp.value_and_grad(loss_fn, optimizer.opt_state)(model, images, digits)
    optimizer.update(model, grads)
    # A step that overflows is skipped: by the optimizer, and here by BatchNorm.
    finite = jaxmp.loss_scaling.step_was_finite(optimizer.opt_state)
    new_averages = nnx.state(model, nnx.BatchStat)
    nnx.update(model, jaxmp.tree.select(finite, new_averages, averages))
    return loss


@nnx.jit
def right_answers(model, images, digits):
    return (model(images).argmax(-1) == digits).sum()


def read_digits():
    """((images, digits) to train on, (images, digits) held out): half of the 1797 each."""
    images, digits = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("f") / 16
    split = train_test_split(images, digits, test_size=0.5, stratify=digits, random_state=0)
    return (split[0], split[2]), (split[1], split[3])


def batches(data, steps: int, batch: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The training batches: the same in the same order for the same seed."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.integers(len(data[0]), size=batch)
        yield data[0][chosen], data[1][chosen]


def train(policy: str, steps: int, batch: int, seed: int) -> Run:
    """Trains under `policy`; `seed` decides the parameters and the batches."""
    with waiting(f"{policy}, seed {seed}: making the model"):
        data, held_out = read_digits()
        model = CNN(nnx.Rngs(seed))

    # Mixed precision is these two lines; the second scales the loss where the policy needs it.
    model = jaxmp.wrap(model, policy)
    tx = jaxmp.loss_scale_for(policy, optax.adamw(2e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses, accuracy = [], {}

    def evaluate():
        model.eval()  # the averages that BatchNorm has kept, and no Dropout
        accuracy[len(losses)] = 100 * int(right_answers(model, *held_out)) / len(held_out[0])
        model.train()

    with waiting(f"{policy}, seed {seed}: compiling"):
        evaluate()
        images, digits = next(batches(data, 1, batch, seed))
        compiled = train_step.lower(model, optimizer, images, digits).compile()

    measure_at = often_at_first(steps)
    with tqdm(desc=f"{policy}, seed {seed}", total=steps, unit=" steps") as bar, CtrlC() as ctrl_c:
        for images, digits in batches(data, steps, batch, seed):
            losses.append(float(compiled(model, optimizer, images, digits)))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
            if len(losses) in measure_at:
                evaluate()
            if ctrl_c.pressed:
                break
    if ctrl_c.pressed:
        stop(f"{policy}, seed {seed}: stopped at step {len(losses)} of {steps}; nothing is kept")
    jaxmp.loss_scaling.check_not_stuck(optimizer.opt_state)
    if (scale := float(jaxmp.loss_scaling.loss_scale(optimizer.opt_state))) != 1:
        skipped = jaxmp.loss_scaling.skipped_count(optimizer.opt_state)
        print(f"{policy}: the loss scale is {scale:g}, {skipped} steps were skipped")

    plan = jaxmp.explain(lambda model, images: model(images))(model, held_out[0])
    return Run(losses, accuracy, plan.products())


def main() -> None:
    args, policies = parse(__doc__.split("\n")[0])
    seeds = range(args.seed, args.seed + args.runs)
    results = {
        policy: {seed: train(policy, args.steps, args.batch, seed) for seed in seeds}
        for policy in policies
    }
    report(results)
    plot(results, args.plot)
    print(f"\nThe curves are in {args.plot}.")


if __name__ == "__main__":
    start(main)
