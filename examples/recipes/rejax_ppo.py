"""rejax's PPO, in float32 and with its networks under a policy: the return of three seeds.

    python examples/recipes/rejax_ppo.py
    python examples/recipes/rejax_ppo.py --steps 8192 --seeds 1  # a minute

Nothing of rejax is changed: two lines, in `agent`, wrap its networks. The environment, the
advantages and the losses stay float32.

    pip install rejax "gymnax<0.1"
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import rejax
from shown import plot, print_compiled

import jaxmp

POLICIES: Final = ("float32", "mixed_bfloat16")
SETTINGS: Final = {
    "agent_kwargs": {"hidden_layer_sizes": [64, 64]},
    "num_envs": 32,
    "num_steps": 64,
    "num_epochs": 8,
    "num_minibatches": 8,
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "gae_lambda": 0.95,
}
LARGE: Final = SETTINGS | {
    "agent_kwargs": {"hidden_layer_sizes": [1024, 1024]},
    "num_envs": 2048,
}


def agent(environment: str, policy: str, steps: int, settings: Any = SETTINGS) -> Any:
    """rejax's PPO with its networks under a policy."""
    made = rejax.PPO.create(
        env=environment, total_timesteps=steps, eval_freq=steps // 8, **settings
    )
    return made.replace(
        actor=jaxmp.wrap(made.actor, policy),
        critic=jaxmp.wrap(made.critic, policy),
    )


def returns(environment: str, policy: str, seeds: int, steps: int) -> np.ndarray:
    """The mean return of each evaluation, for each seed: all in one program."""
    train = jax.jit(jax.vmap(agent(environment, policy, steps).train))
    _, (_, found) = train(jax.random.split(jax.random.key(0), seeds))
    return np.asarray(found).mean(-1)


def iteration(environment: str, policy: str, settings: Any = SETTINGS) -> tuple[Any, Any]:
    """One iteration, from environment steps to updates, and its state's shapes."""
    made = agent(environment, policy, 8, settings)
    return made.train_iteration, jax.eval_shape(made.init_state, jax.random.key(0))


def compiled(environment: str, policy: str) -> Any:
    """What the compiler of a TPU v5e says of an iteration with large networks."""
    train, state = iteration(environment, policy, LARGE)
    return jaxmp.preflight(jax.jit(train, donate_argnums=0), target="tpu-v5e")(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=262_144)
    parser.add_argument("--preflight", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="a PNG file for the returns")
    args = parser.parse_args()
    curves = {}
    print("| policy         | seed | first return | half way | last return |")
    print("| :------------- | ---: | -----------: | -------: | ----------: |")
    for policy in POLICIES:
        curves[policy] = returns(args.environment, policy, args.seeds, args.steps)
        for seed, curve in enumerate(curves[policy]):
            first, half, last = (curve[i] for i in (0, len(curve) // 2, -1))
            row = f"| {policy:14} | {seed:4} | {first:12.1f} | {half:8.1f} | {last:11.1f} |"
            print(row, flush=True)
    print()
    for policy in POLICIES:
        train, state = iteration(args.environment, policy)
        print(f"{policy}: {jaxmp.audit(train)(state).verdict()}")
    if args.plot:
        each = args.steps / (len(curve) - 1)
        labels = {"x": "steps of the environment", "y": "return of an episode"}
        plot(curves, args.plot, steps=each, first=0, **labels)
    if args.preflight:
        steps = {name: functools.partial(compiled, args.environment, name) for name in POLICIES}
        print_compiled("2,048 environments, layers of 1,024", steps)


if __name__ == "__main__":
    main()
