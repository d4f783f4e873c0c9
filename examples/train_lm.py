"""Trains a byte-level transformer on the source text of Python's standard library.

The model is plain Flax Linen, written in float32, without dtypes or casts. `jaxmp.wrap` applies the
precision policy to it; see `train`.

    python examples/train_lm.py
    python examples/train_lm.py --once --size base --policy mixed_bfloat16,softmax=bf16
    python examples/train_lm.py --checkpoint run --resume  # goes on where it was stopped

The first trains twice, in bfloat16 and in float32, from one initialization on one sequence of
batches. It prints what runs in which precision, a progress bar, what the model writes after "def ",
draws `loss.png`, and ends, after a few minutes on two CPU cores (Python 3.12, JAX 0.12), with

    policy           held-out loss  difference  matmuls      saved for backward
    mixed_bfloat16          1.8116     -0.111%  17 bfloat16             28.6 MB
    float32                 1.8136              17 float32              44.0 MB
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from terminal import CtrlC, check_file, eighths, often_at_first, start, stop, waiting

with waiting("importing JAX, Flax and Orbax", show=__name__ == "__main__"):
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from lm_checkpoint import Checkpoints, Progress
    from lm_report import Result, plot, report
    from tqdm import tqdm

    import jaxmp


class Size(NamedTuple):
    """A model's shape, and the training that suits it."""

    width: int
    heads: int
    layers: int
    length: int
    batch: int
    steps: int
    learning_rate: float


# The small model's rate is below its best: at a higher one a run depends more on chance, and two
# precisions are harder to compare.
SIZES = {
    "tiny": Size(64, 2, 2, 64, batch=8, steps=300, learning_rate=5e-3),
    "small": Size(128, 2, 2, 128, batch=8, steps=600, learning_rate=2e-3),
    "base": Size(1024, 16, 4, 1024, batch=8, steps=2000, learning_rate=3e-4),
}


def rotate(x):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of [batch, length, heads, n]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 1000 ** (jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm, each added to the residual stream."""

    heads: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        h = nn.LayerNorm()(x)
        q, k, v = (nn.DenseGeneral((self.heads, width // self.heads), name=n)(h) for n in "qkv")
        h = nn.dot_product_attention(rotate(q), rotate(k), v, mask=mask)
        x = x + nn.DenseGeneral(width, axis=(-2, -1))(h)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h)))


class LM(nn.Module):
    """Bytes int[batch, length] to the logits of the byte after each: [batch, length, 256]."""

    size: Size

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(256, self.size.width)
        x = embed(tokens)
        for _ in range(self.size.layers):
            x = Block(self.size.heads)(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and those held out: every twentieth file, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
    files = sorted(f for f in root.rglob("*.py") if not skip & set(f.relative_to(root).parts))
    if len(files) < 20:
        raise SystemExit(f"train_lm.py: found {len(files)} source files in {root}, need 20")
    texts = [f.read_bytes() for f in files]
    held_out = b"".join(texts[::20])
    del texts[::20]
    return np.frombuffer(b"".join(texts), np.uint8), np.frombuffer(held_out, np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The pieces of `text` that begin at `starts`: uint8[len(starts), length + 1]."""
    return text[starts[:, None] + np.arange(length + 1)]


def batches(text: np.ndarray, size: Size, seed: int) -> Iterator[np.ndarray]:
    """The training batches: the same in the same order for the same seed."""
    rng = np.random.default_rng(seed)
    for _ in range(size.steps):
        yield windows(text, rng.integers(len(text) - size.length, size=size.batch), size.length)


def generate(apply, params, size: Size, seed: int, prompt: bytes = b"def ") -> bytes:
    """Samples 150 bytes to follow the prompt, one by one, from a window of fixed length."""

    @jax.jit
    def next_byte(params, window, filled, key):
        return jax.random.categorical(key, apply(params, window)[0, filled - 1] / 0.7)

    text = prompt
    for key in jax.random.split(jax.random.key(seed), 150):
        recent = text[-size.length :]
        window = np.frombuffer(recent.ljust(size.length, b"\0"), np.uint8)[None]
        text += bytes([int(next_byte(params, window, len(recent), key))])
    return text


def train(policy: str, size: Size, seed: int, checkpoint: Path | None, *, resume: bool) -> Result:
    """Trains under `policy`, from the parameters and on the batches that `seed` stands for."""
    folder = None if checkpoint is None else checkpoint / policy
    with Checkpoints(folder, size._asdict() | {"seed": seed}, resume=resume) as checkpoints:
        return train_from(policy, size, seed, checkpoints)


def fit(policy, size, progress, data, train_step, evaluate, checkpoints):
    """The training loop: to the last step, or to that in which Ctrl-C is pressed."""
    state, losses, held_out = progress
    measure_at, save_at = often_at_first(size.steps), eighths(size.steps)
    per_step, seconds = size.batch * size.length, []
    counts = {"total": size.steps * per_step, "initial": len(losses) * per_step}
    with tqdm(desc=policy, unit=" tokens", unit_scale=True, **counts) as bar, CtrlC() as ctrl_c:
        if not losses:
            held_out[0] = evaluate(state)
        for tokens in data:
            started = time.perf_counter()
            state, loss = train_step(state, tokens)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - started)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update(per_step)
            if len(losses) in measure_at:
                held_out[len(losses)] = evaluate(state)
            if len(losses) in save_at or ctrl_c.pressed:
                checkpoints.save(Progress(state, losses, held_out))
            if ctrl_c.pressed:
                break
        checkpoints.finish()
    if ctrl_c.pressed:
        stop(f"{policy}: stopped at step {len(losses)} of {size.steps}; {checkpoints.how_to_go_on}")
    return state, seconds


def train_from(policy: str, size: Size, seed: int, checkpoints: Checkpoints) -> Result:
    """Does the training, from the last checkpoint if there is one."""
    text, held_out_text = read_text()
    starts = np.arange(256) * (len(held_out_text) - size.length) // 256
    evaluation = np.split(windows(held_out_text, starts, size.length), 32)

    # Mixed precision is this line. The model knows nothing of it.
    model = jaxmp.wrap(LM(size), policy)
    with waiting(f"{policy}: initializing the parameters"):
        variables = model.init(jax.random.key(seed), evaluation[0][:, :-1])
    schedule = optax.warmup_cosine_decay_schedule(
        0, size.learning_rate, size.steps // 10, size.steps
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    # Scales the loss where the policy needs it; else this is `tx`.
    tx = jaxmp.loss_scale_for(policy, tx)
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)
    state, losses, held_out = checkpoints.restore(Progress(state, [], {}))
    if losses:
        finished = "" if len(losses) < size.steps else ": it is finished, nothing is left to train"
        print(f"{policy}: resumed after {len(losses)} of {size.steps} steps{finished}")

    def apply(params, tokens):
        return model.apply({"params": params}, tokens)

    def loss_fn(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(state, tokens):
        loss, grads = state.value_and_grad(loss_fn)(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    with waiting(f"{policy}: compiling the training step"):
        plan = jaxmp.explain(loss_fn)(state.params, evaluation[0])
        tokens = jax.ShapeDtypeStruct((size.batch, size.length + 1), np.uint8)
        eval_step = jax.jit(loss_fn).lower(state.params, evaluation[0]).compile()
        train_step = jax.jit(train_step, donate_argnums=0)
        if len(losses) < size.steps:
            train_step = train_step.lower(state, tokens).compile()
    print(f"\n{policy}: what the loss function runs in\n{plan.summary()}")

    def evaluate(state):
        jaxmp.loss_scaling.check_not_stuck(state)
        return float(np.mean([eval_step(state.params, tokens) for tokens in evaluation]))

    data = itertools.islice(batches(text, size, seed), len(losses), None)
    progress = Progress(state, losses, held_out)
    state, seconds = fit(policy, size, progress, data, train_step, evaluate, checkpoints)

    if (scale := float(state.loss_scale)) != 1:
        print(f"{policy}: the loss scale is {scale:g}, {state.skipped_count} steps were skipped")
    with waiting(f"{policy}: sampling 150 bytes"):
        sample = generate(apply, state.params, size, seed)
    print(f"{policy}: held-out loss {held_out[0]:.4f} -> {held_out[size.steps]:.4f}; it writes:")
    for line in sample.split(b"\n"):
        print("  |", repr(line)[2:-1])  # a byte that is not printable ASCII shows as \xNN
    speed = size.batch * size.length / float(np.median(seconds or [np.nan]))
    saved = sum(plan.residual_bytes.values())
    return Result(losses, held_out, speed, plan.products(), saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", default="mixed_bfloat16", help="default: %(default)s")
    parser.add_argument("--compare", metavar="POLICY", help="train a second time, under this one")
    parser.add_argument("--once", action="store_true", help="train under --policy alone")
    parser.add_argument("--size", default="small", choices=SIZES, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: as suits the size")
    parser.add_argument("--batch", type=int, help="default: as suits the size")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, default=Path("loss.png"), help="default: %(default)s")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="keep checkpoints here")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint, if any")
    args = parser.parse_args()
    given = {k: v for k in ("steps", "batch") if (v := getattr(args, k)) is not None}
    size = SIZES[args.size]._replace(**given)
    if size.steps < 1 or size.batch < 1 or args.seed < 0:
        parser.error("--steps and --batch must be at least 1, and --seed at least 0")
    policies = [args.policy, args.compare or "float32"]
    try:
        if len({jaxmp.get_policy(policy) for policy in policies}) < 2:
            if args.compare:
                parser.error("--compare needs a policy other than --policy")
            policies = policies[:1]
    except ValueError as error:
        parser.error(str(error))

    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    check_file(parser, "--plot", args.plot)

    policies = policies[:1] if args.once else policies
    results = {
        policy: train(policy, size, args.seed, args.checkpoint, resume=args.resume)
        for policy in policies
    }
    report(results)
    plot(results, args.plot)
    print(f"\nThe curves are in {args.plot}.")


if __name__ == "__main__":
    start(main)
