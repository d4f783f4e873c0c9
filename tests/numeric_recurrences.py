"""Recurrences by scans and associative scans, and training on data that is scanned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numeric_kit import Plain, program

import jaxmp


def _linear(left: tuple, right: tuple) -> tuple:
    """How two steps `h -> a h + b` combine."""
    return left[0] * right[0], right[0] * left[1] + right[1]


@program(
    "associative scans",
    lambda r: (
        r.normal(size=(256, 6)) + 0.3,
        r.normal(size=(6, 8)) / 3,
        r.uniform(3, 7, size=8),
        r.normal(size=(8, 3)),
    ),
)
def linear_recurrent_unit(k: Plain, x, w, decay, out):
    a = jnp.broadcast_to(jax.nn.sigmoid(decay), (256, 8))
    h = lax.associative_scan(_linear, (a, (1 - a) * k.mm(x, w)))[1]
    return jnp.mean(k.mm(h, out) ** 2)


@program(
    "recurrences",
    lambda r: (
        r.normal(size=(300, 2, 6)) + 0.3,
        r.normal(size=(6, 8)) / 2,
        r.normal(size=(6, 8)) / 2,
        (r.uniform(size=(300, 2)) < 0.003).astype(np.int32),
    ),
)
def decayed_state_with_resets(k: Plain, xs, wk, wv, done):
    decay = jnp.array([0.999, 0.99])

    def cell(state, inputs):
        key, value, reset = inputs
        state = jnp.einsum("b,bij->bij", decay, state)
        state = state + 1e-2 * jnp.einsum("bi,bj->bij", key, value)
        state = jnp.where(reset[:, None, None] > 0, 0.0, state)
        return state, k.einsum("bi,bij->bj", key, state)

    inputs = (k.up(k.mm(xs, wk)), k.up(k.mm(xs, wv)), done)
    state, out = k.scan(cell, jnp.zeros((2, 8, 8)), inputs)
    return jnp.mean(out**2) + jnp.mean(state**2)


@program(
    "recurrences",
    lambda r: (
        r.uniform(0.01, 0.1, size=8),
        r.normal(size=(400, 4, 6)),
        r.normal(size=(6, 16)) / 3,
        r.normal(size=(16, 3)),
    ),
)
def oscillators_of_two_by_two_rotations(k: Plain, angles, us, w, out):
    c, s = jnp.cos(angles), jnp.sin(angles)
    turn = 0.999 * jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], -2)

    def step(x, u):
        x = jnp.einsum("cij,bcj->bci", turn, x) + u
        return x, k.mm(x.reshape(4, 16), out)

    drive = 0.01 * k.mm(us, w).reshape(400, 4, 8, 2)
    return jnp.mean(k.scan(step, jnp.zeros((4, 8, 2)), drive)[1] ** 2)


@program(
    "recurrences",
    lambda r: (r.normal(size=(500, 8, 8)), r.normal(size=(2, 6)), r.normal(size=(6, 8))),
)
def linear_system_that_is_given(k: Plain, matrices, x, w):
    def step(z, matrix):
        return z + 2e-3 * k.mm(z, matrix - 2 * jnp.eye(8)), None

    return jnp.mean(k.scan(step, k.up(k.mm(x, w)), matrices)[0] ** 2)


@program(
    "recurrences",
    lambda r: (r.normal(size=(500, 8, 8)), r.normal(size=(2, 6)), r.normal(size=(6, 8))),
)
def linear_system_scaled_before_its_product(k: Plain, matrices, x, w):
    def step(z, matrix):
        return z - k.mm(2e-3 * z, 2 * jnp.eye(8) - matrix), None

    return jnp.mean(k.scan(step, k.up(k.mm(x, w)), matrices)[0] ** 2)


def _slow(r: np.random.Generator) -> tuple:
    """Slow waves, and a critic of them."""
    t = np.linspace(0, np.pi, 400)[:, None]
    waves = np.sin(t * r.uniform(1, 2, size=6) + r.uniform(0, 6, size=6))
    return waves, r.normal(size=(6, 1)) / 3


@program("returns", _slow)
def advantages_of_values_scanned_in_pairs(k: Plain, x, w):
    # As docs/limits.md says: the two parts of a low `v` would round their cotangents one by one.
    v = k.up(jaxmp.full_precision(k.mm)(x, w))[:, 0]

    def step(total, inputs):
        reward, now, after = inputs
        total = reward + 0.999 * after - now + 0.9 * total
        return total, total

    return jnp.mean(k.scan(step, jnp.zeros(()), (x[1:, 0] * 0.01, v[:-1], v[1:]))[1] ** 2)


@program(
    "inner optimizers",
    lambda r: (
        r.normal(size=(3, 6)),
        r.normal(size=(6, 64)) / 3,
        r.normal(size=(200, 8, 8)),
        r.normal(size=(200, 8, 8)),
    ),
)
def sgd_from_a_hypernetwork(k: Plain, task, hyper, xs, ys):
    def error(w, x, y):
        return jnp.mean((k.einsum("bi,tij->tbj", x, w) - y) ** 2)

    def step(w, xy):
        return w - 2e-2 * jax.grad(error)(w, *xy), None

    w = k.up(k.mm(task, hyper)).reshape(3, 8, 8)
    return jnp.mean(k.scan(step, w, (xs, ys))[0] ** 2)


@program(
    "inner optimizers",
    lambda r: (
        r.normal(size=(300, 8)) / 3,
        r.normal(size=(300, 8)) / 3,
        r.normal(size=(4, 64)) / 3,
        r.normal(size=(3, 4)),
        np.asarray(0.01),
    ),
)
def delta_rule_with_a_given_rate(k: Plain, xs, ys, hyper, task, rate):
    def step(w, xy):
        x, y = xy
        error = k.einsum("i,tij->tj", x, w) - y
        return w - rate * jnp.einsum("i,tj->tij", x, error), jnp.sum(error**2)

    w = k.up(k.mm(task, hyper)).reshape(3, 8, 8)
    w, errors = k.scan(step, w, (xs, ys))
    return jnp.mean(errors) + jnp.mean(w**2)


@program(
    "associative scans",
    lambda r: (
        {
            "continue": r.normal(size=(6, 8)),
            "reward": r.normal(size=(6, 8)),
            "out": r.normal(size=(8, 4)) / 3,
        },
        r.normal(size=(400, 2, 6)) / 3,
    ),
)
def returns_under_predicted_continuation(k: Plain, p, states):
    """Dreamer: whether an episode goes on is predicted, and discounts what is predicted to come."""
    discount = jax.nn.sigmoid(k.up(k.mm(states, p["continue"])) + 5)
    rewards = jnp.tanh(k.up(k.mm(states, p["reward"]))) + 0.1
    returns = lax.associative_scan(_linear, (discount, rewards), reverse=True)[1]
    return jnp.mean(k.mm(returns, p["out"]) ** 2)
