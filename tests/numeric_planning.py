"""Iterations to a fixed point: values, eigenvectors, ranks, transport plans; and reciprocals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program

# --- values --------------------------------------------------------------------------------------


def _decisions(r: np.random.Generator) -> tuple:
    """Logits of transitions [actions, states, states] and weights of a reward; what states are."""
    weights = {"moves": r.normal(size=(4, 24, 24)), "reward": r.normal(size=(6, 4)) / 3}
    return weights, r.normal(size=(24, 6))


@program("value iteration", _decisions)
def soft_values_by_logsumexp(k: Plain, p, states):
    """Soft value iteration: the next value has no term of the last one itself."""
    moves = jax.nn.softmax(p["moves"])
    reward = k.up(k.mm(states, p["reward"]))

    def step(v, _):
        ahead = k.einsum("ast,t->as", moves, v)
        return jax.nn.logsumexp(reward + 0.95 * ahead.T, axis=-1), None

    v = k.scan(step, jnp.zeros(24), length=60)[0]
    return jnp.mean((v - v[:1]) ** 2) + 1e-2 * jnp.mean(v)


@program("value iteration", _decisions)
def values_by_the_best_action(k: Plain, p, states):
    """Value iteration with a maximum, and a loop that counts."""
    moves = jax.nn.softmax(2 * p["moves"])
    reward = k.up(k.mm(states, p["reward"]))

    def step(i, v):
        return jnp.max(reward + 0.9 * k.up(jnp.matmul(moves, v[:, None])[..., 0].T), axis=-1)

    v = k.fori(60, step, jnp.zeros(24))
    return jnp.mean((v - jnp.mean(v)) ** 2) + 1e-2 * jnp.mean(v)


@program("value iteration", _decisions)
def a_policy_evaluated(k: Plain, p, states):
    """Values of a softmax policy by 200 sweeps; the reward is given, not computed."""
    policy = jax.nn.softmax(k.up(k.mm(states, p["reward"])))
    moves = jnp.einsum("sa,ast->st", policy, jax.nn.softmax(p["moves"]))
    reward = jnp.tanh(states[:, 0]) + 1.0
    v = k.scan(lambda v, _: (reward + 0.97 * k.mm(moves, v), None), jnp.zeros(24), length=200)[0]
    return jnp.mean((v - v.mean()) ** 2) + 1e-3 * jnp.mean(v)


@program("value iteration", _decisions)
def advantages_under_a_model(k: Plain, p, states):
    """Three looks ahead in a learned model, unrolled; advantages are small beside the values."""
    moves = jax.nn.softmax(p["moves"])
    v = 50.0 + k.up(k.mm(states, p["reward"]))[:, 0]
    for _ in range(3):
        q = k.up(k.einsum("ast,t->sa", moves, v - 50.0)) * 0.95 + 50.0
        v = jax.nn.logsumexp(q, axis=-1) - np.log(4)
    return jnp.mean((q - v[:, None]) ** 2)


# --- eigenvectors and ranks ----------------------------------------------------------------------


@program(
    "power iteration",
    lambda r: (
        {"w": r.normal(size=(24, 16)), "out": r.normal(size=(16, 3)) / 3},
        r.normal(size=24),
        r.normal(size=(32, 24)),
    ),
)
def layer_divided_by_its_spectral_norm(k: Plain, p, u, x):
    """Spectral normalization: thirty products with a weight and its transpose, then the layer."""

    def step(u, _):
        v = k.mm(u, p["w"])
        v = v / jnp.linalg.norm(k.up(v))
        u = k.mm(p["w"], v)
        return k.up(u / jnp.linalg.norm(k.up(u))), None

    u = jax.lax.stop_gradient(k.scan(step, u, length=30)[0])
    v = k.up(k.mm(u, p["w"]))
    sigma = jnp.linalg.norm(v)
    return jnp.mean(k.mm(jnp.tanh(k.mm(x, p["w"]) / sigma), p["out"]) ** 2) + 0.1 * sigma


@program(
    "power iteration",
    lambda r: (
        {"mix": r.normal(size=(12, 12)) / 3 + np.eye(12), "rate": np.asarray(-5.0)},
        r.normal(size=(500, 12)),
        r.normal(size=12),
    ),
)
def principal_component_by_small_steps(k: Plain, p, samples, start):
    """Oja's rule: each of 500 samples moves the direction by less than a hundredth."""
    xs = k.up(k.mm(samples, p["mix"]))

    def step(w, x):
        y = jnp.sum(w * x)
        return w + jnp.exp(p["rate"]) * y * (x - y * w), None

    w = k.scan(step, start / jnp.linalg.norm(start), xs)[0]
    return jnp.mean(k.mm(xs, w) ** 2) + jnp.sum(w**4)


@program(
    "power iteration",
    lambda r: (
        {"home": r.normal(size=60), "link": r.normal(size=(60, 60))},
        (r.uniform(size=(60, 60)) < 0.1).astype(np.int32),
    ),
)
def walks_with_restart(k: Plain, p, links):
    """PageRank from learned homes and links, by how little it moves the ranks of the homes."""
    strength = jnp.where(links + jnp.eye(60) > 0, jnp.exp(0.3 * p["link"]), 0.0)
    flow = strength / jnp.sum(strength, axis=0)
    home = jax.nn.softmax(0.1 * p["home"])
    rank = k.scan(lambda r, _: (0.1 * k.mm(flow, r) + 0.9 * home, None), home, length=20)[0]
    return 1e3 * jnp.mean((rank / home - 1) ** 2)


# --- reciprocals of products ---------------------------------------------------------------------


def _transport(r: np.random.Generator) -> tuple:
    return {"w": r.normal(size=(6, 3)) / 2}, r.normal(size=(32, 6)), r.normal(size=(32, 3)) / 2


@program("reciprocals", _transport)
def transport_by_sinkhorn(k: Plain, p, x, y):
    """Scalings `u = (1 / n) / (K v)`; what transport costs less than sending all everywhere."""
    z = jnp.tanh(k.up(k.mm(x, p["w"])))
    cost = jnp.sum((z[:, None] - y[None]) ** 2, -1) / 8
    kernel = jnp.exp(-cost)

    def step(v, _):
        u = (1 / 32) / k.mm(kernel, v)
        return (1 / 32) / k.mm(kernel.T, u), None

    v = k.scan(step, jnp.ones(32), length=20)[0]
    u = (1 / 32) / jnp.sum(kernel * v, -1)
    return 1e2 * (jnp.mean(cost) - jnp.sum(u[:, None] * kernel * v[None] * cost))


@program("reciprocals", _transport)
def transport_of_small_masses(k: Plain, p, x, y):
    """Unrolled, and what is divided by is 2e-3: the square of its reciprocal exceeds float16."""
    z = jnp.tanh(k.up(k.mm(x, p["w"])))
    kernel = 4e-3 / (1 + jnp.sum((z[:, None] - y[None]) ** 2, -1))
    v = jnp.full(32, 1 / 32)
    for _ in range(5):
        u = (1 / 32) / k.mm(kernel, v)
        v = (1 / 32) / k.mm(u, kernel)
    plan = u[:, None] * kernel * v[None]
    return jnp.sum(plan * plan) * 1e3


def _queries(r: np.random.Generator) -> tuple:
    weights = {name: r.normal(size=(8, 8)) / 3 for name in "qkv"}
    return weights, r.normal(size=(300, 8)) + 0.3


@program("reciprocals", _queries)
def denominators_of_linear_attention(k: Plain, p, x):
    """Linear attention by a scan: what the positive features of 300 keys add up to."""
    q, key, v = (k.up(k.mm(x, p[name])) for name in "qkv")
    q, key = jax.nn.elu(q) + 1, jax.nn.elu(key) + 1

    def step(sums, inputs):
        q, key, v = inputs
        sums = sums[0] + key[:, None] * v, sums[1] + key
        return sums, k.mm(q, sums[0]) / k.mm(q, sums[1])

    out = k.scan(step, (jnp.zeros((8, 8)), jnp.zeros(8)), (q, key, v))[1]
    return jnp.mean(out**2)


@program("reciprocals", _queries)
def attention_to_one_key_at_a_time(k: Plain, p, x):
    """A softmax whose numerator and denominator are added up key by key, and divided at last."""
    q, key, v = (k.mm(x, p[name]) for name in "qkv")
    scores = k.up(k.mm(q[:8], key.T)) / 3

    def step(sums, inputs):
        top, below, above = sums
        score, value = inputs
        new = jnp.maximum(top, jax.lax.stop_gradient(score))
        weight, kept = jnp.exp(score - new), jnp.exp(top - new)
        return (new, kept * below + weight, kept[:, None] * above + weight[:, None] * value), None

    start = jnp.full(8, -1e4), jnp.zeros(8), jnp.zeros((8, 8))
    _, below, above = k.scan(step, start, (scores.T, v))[0]
    return jnp.mean((above / below[:, None]) ** 2)


@program(
    "reciprocals",
    lambda r: (
        {"w": np.abs(r.normal(size=(12, 16))) / 3000, "out": r.normal(size=(16, 2)) / 3},
        np.abs(r.normal(size=(40, 12))) + 0.1,
    ),
)
def resistances_from_conductances(k: Plain, p, x):
    """Harmonic means of conductances of 2e-3: the squares of resistances exceed float16."""
    resistance = 1.0 / k.mm(x, p["w"])
    mean = 16.0 / jnp.sum(1.0 / k.up(resistance), -1, keepdims=True)
    return jnp.mean(k.mm(jnp.tanh(resistance / mean - 1), p["out"]) ** 2) + jnp.mean(mean) / 1e2


@program(
    "reciprocals",
    lambda r: ({"w": r.normal(size=(10, 1)) / 3}, r.normal(size=(400, 10)), r.normal(size=400)),
)
def importance_weights_normalized(k: Plain, p, x, f):
    """An expectation under weights that add up to one, and how many samples they are worth."""
    log_weight = k.up(k.mm(x, p["w"]))[:, 0]
    weight = jnp.exp(log_weight - jax.lax.stop_gradient(jnp.max(log_weight)))
    mean = k.mm(weight[None], f[:, None])[0, 0] / jnp.sum(weight)
    worth = jnp.sum(weight) ** 2 / (weight @ weight)
    return mean**2 + 1 / worth * 50
