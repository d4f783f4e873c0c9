"""Optimizers inside the program, and recurrences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numeric_kit import Plain, program


def _regression(rng: np.random.Generator) -> tuple:
    """A start, inputs and targets."""
    x = rng.normal(size=(16, 4))
    return rng.normal(size=(4, 2)), x, x @ rng.normal(size=(4, 2))


def _mse(k: Plain, w, x, y):
    return jnp.mean((k.mm(x, w) - y) ** 2)


@program("inner optimizers", _regression)
def maml_sgd_from_a_computed_start(k: Plain, w, x, y):
    grad = jax.grad(lambda w: _mse(k, w, x, y))
    w = k.scan(lambda w, _: (w - 1e-3 * grad(w), None), 0.5 * w, length=500)[0]
    return _mse(k, w, x, y)


@program("inner optimizers", _regression)
def maml_unrolled_from_an_argument(k: Plain, w, x, y):
    grad = jax.grad(lambda w: _mse(k, w, x, y))
    return _mse(k, k.repeat(20, lambda i, w: w - 5e-3 * grad(w), w), x, y)


@program("inner optimizers", _regression)
def adam_by_hand(k: Plain, w, x, y):
    def step(c, t):
        w, m, v = c
        g = jax.grad(lambda w: _mse(k, w, x, y))(w)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t) + 1e-6))
        return (w - 1e-3 * u, m, v), None

    zero = jnp.zeros_like(w)
    (w, _, _), _ = k.scan(step, (w + 0.0, zero, zero), jnp.arange(1.0, 201.0))
    return _mse(k, w, x, y)


@program("inner optimizers", _regression)
def least_squares_with_the_gradient_written_out(k: Plain, w, x, y):
    def step(w, _):
        r = k.mm(x, w) - y
        return w - 1e-3 * k.mm(x.T, r), None

    return jnp.mean(k.scan(step, w.reshape(2, 4).T, length=200)[0] ** 2)


@program("inner optimizers", _regression)
def a_latent_inferred_by_descent(k: Plain, w, x, y):
    codes = k.mm(x, w)  # an amortised start
    z = k.fori(300, lambda i, z: z - 2e-3 * k.mm(k.mm(z, w.T) - x, w), k.up(codes))
    return jnp.mean((z - y) ** 2)


def _network(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(4, 8)) / 2, "b": rng.normal(size=(8, 2)) / 3}


def _predict(k: Plain, p, x):
    return k.mm(jnp.tanh(k.mm(x, p["a"])), p["b"])


@program("training inside", lambda r: _regression(r)[1:], differentiated=False)
def training_with_init_inside_and_adam(k: Plain, x, y):
    key = jax.random.key(0)
    params = {
        "a": jax.random.normal(key, (4, 8), jnp.float32).astype(k.real) / 2,
        "b": jax.random.normal(key, (8, 2), jnp.float32).astype(k.real) / 3,
    }
    tx = optax.adam(1e-3)

    def step(c, _):
        p, s = c
        g = jax.grad(lambda p: jnp.mean((_predict(k, p, x) - y) ** 2))(p)
        u, s = tx.update(g, s)
        return (optax.apply_updates(p, u), s), None

    (params, _), _ = k.scan(step, (params, tx.init(params)), length=1000)
    return jnp.mean((_predict(k, params, x) - y) ** 2)


@program("training inside", lambda r: _regression(r)[1:])
def training_by_sgd_from_constants(k: Plain, x, y):
    params = jax.tree.map(jnp.asarray, _network(0))

    def step(p, _):
        g = jax.grad(lambda p: jnp.mean((_predict(k, p, x) - y) ** 2))(p)
        return jax.tree.map(lambda p, g: p - 2e-3 * g, p, g), None

    params = k.scan(step, params, length=300)[0]
    return jnp.mean((_predict(k, params, x) - y) ** 2)


@program("training inside", lambda r: (*_regression(r)[1:], r.integers(0, 16, (200, 4))))
def training_on_minibatches_with_weight_averages(k: Plain, x, y, batches):
    start = jax.tree.map(jnp.zeros_like, {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)})

    def step(c, i):
        p, mean = c
        g = jax.grad(lambda p: jnp.mean((k.mm(x[i], p["w"]) + p["b"] - y[i]) ** 2))(p)
        p = jax.tree.map(lambda p, g: p - 1e-2 * g, p, g)
        return (p, jax.tree.map(lambda m, p: 0.99 * m + 0.01 * p, mean, p)), None

    (_, mean), _ = k.scan(step, (start, start), batches)
    return jnp.mean((k.mm(x, mean["w"]) + mean["b"] - y) ** 2)


# --- recurrences ---------------------------------------------------------------------------------


@program(
    "recurrences",
    lambda r: (r.normal(size=(8, 8)) / 4, r.normal(size=(1000, 2, 8)) + 0.5),
)
def leaky_rnn(k: Plain, w, us):
    def cell(h, u):
        return 0.999 * h + 0.001 * jnp.tanh(k.mm(h, w) + u), None

    return jnp.mean(k.scan(cell, jnp.zeros((2, 8)), us)[0] ** 2)


@program(
    "recurrences",
    lambda r: (
        r.uniform(4, 7, size=8),
        r.normal(size=(4, 8)) / 2,
        r.normal(size=(300, 2, 4)) + 0.5,
    ),
)
def diagonal_linear_recurrence(k: Plain, rate, b, us):
    a = jax.nn.sigmoid(rate)
    drives = k.mm(us, b)
    hs = k.scan(lambda h, u: (a * h + (1 - a) * u,) * 2, jnp.zeros((2, 8)), drives)[1]
    return jnp.mean(hs**2)


def _attention(r: np.random.Generator) -> tuple:
    return r.normal(size=(6, 6)) / 2, r.normal(size=(6, 6)) / 2, r.normal(size=(200, 6)) + 0.3


@program("recurrences", _attention)
def linear_attention_state(k: Plain, wk, wv, xs):
    keys, values = jax.nn.elu(k.mm(xs, wk)) + 1, k.mm(xs, wv)

    def cell(s, kv):
        key, value = kv
        s = s + key[:, None] * value[None, :]
        return s, k.mm(key[None], s)[0] / 200

    s, out = k.scan(cell, jnp.zeros((6, 6)), (keys, values))
    return jnp.mean(out**2) + jnp.mean((s / 200) ** 2)


@program(
    "recurrences",
    lambda r: (r.normal(size=(4, 18)) / 2, r.normal(size=(6, 18)) / 3, r.normal(size=(100, 3, 4))),
)
def gru(k: Plain, wx, wh, xs):
    def cell(h, x):
        a, b = jnp.split(k.mm(x, wx), [12], -1), jnp.split(k.mm(h, wh), [12], -1)
        r, z = jnp.split(jax.nn.sigmoid(a[0] + b[0] + 2.0), 2, -1)
        n = jnp.tanh(a[1] + r * b[1])
        return (1 - z) * n + z * h, None

    return jnp.mean(k.scan(cell, jnp.zeros((3, 6)), xs)[0] ** 2)


@program(
    "recurrences",
    lambda r: (
        np.eye(4) + 0.02 * r.normal(size=(4, 4)),
        r.normal(size=(2, 4)),
        r.normal(size=(50, 2)),
    ),
    geometry=True,
)
def kalman_filter(k: Plain, f, h, zs):
    q, noise = 0.01 * jnp.eye(4), 0.5 * jnp.eye(2)

    def step(c, z):
        x, p = f @ c[0], f @ c[1] @ f.T + q
        s = h @ p @ h.T + noise
        gain = jnp.linalg.solve(s, h @ p).T
        innovation = z - h @ x
        return (x + gain @ innovation, p - gain @ (h @ p)), jnp.sum(innovation**2)

    (_, p), losses = k.scan(step, (jnp.zeros(4), jnp.eye(4)), zs)
    return jnp.mean(losses) + jnp.trace(p)


@program("recurrences", lambda r: (r.normal(size=(6, 5)), r.normal(size=(100, 6))))
def forward_algorithm_in_the_log_domain(k: Plain, w, xs):
    emissions = jax.nn.log_softmax(k.mm(xs, w))
    start = jnp.full(5, -1e5).at[0].set(0.0)

    def step(alpha, e):
        return jnp.logaddexp(alpha, jnp.roll(alpha, 1)) + e, None

    return -jax.nn.logsumexp(k.scan(step, start, emissions)[0]) / 100


@program("recurrences", lambda r: (r.normal(size=(8, 8)) / 9, r.normal(size=(100, 2, 8)) * 0.1))
def echo_state_with_small_input(k: Plain, w, us):
    def cell(h, u):
        h = jax.lax.stop_gradient(h) * 0.5 + 0.5 * h
        return h + 0.01 * (jnp.tanh(k.mm(h, w)) + u), None

    return jnp.mean(k.scan(cell, us[0] * 5.0, us)[0] ** 2)


# --- products of one parameter with itself -------------------------------------------------------


def _nearly_orthonormal(r: np.random.Generator) -> tuple:
    w = np.linalg.qr(r.normal(size=(16, 16)))[0] * 0.9 + 0.05 * r.normal(size=(16, 16))
    return w, r.normal(size=(64, 16))


@program("products of one parameter", _nearly_orthonormal)
def weights_orthonormalized_by_bjorck(k: Plain, w, x):
    for _ in range(8):
        w = 1.5 * w - 0.5 * k.mm(w, k.mm(w.T, w))
    return jnp.mean(jnp.tanh(k.mm(x, w)) ** 2)


@program("products of one parameter", _nearly_orthonormal)
def root_of_a_gram_matrix_by_newton_schulz(k: Plain, w, x):
    gram = k.up(k.mm(w.T, w)) + 0.1 * jnp.eye(16)
    norm = jnp.sqrt(jnp.sum(gram**2))
    y, z = gram / norm, jnp.eye(16)
    for _ in range(8):
        turn = 0.5 * (3 * jnp.eye(16) - k.up(k.mm(z, y)))
        y, z = k.mm(y, turn), k.mm(turn, z)
    return jnp.mean(jnp.tanh(k.mm(x, k.up(y) * jnp.sqrt(norm))) ** 2)
