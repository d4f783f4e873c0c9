"""Values read by layers and by something that does not forgive: logarithms, differences, angles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program


def _normalized(k: Plain, x, w, axis: int = -1):
    g = k.up(k.mm(x, w))
    return (g - g.mean(axis, keepdims=True)) / jnp.sqrt(g.var(axis, keepdims=True) + 1e-5)


def _gate(r: np.random.Generator) -> tuple:
    return r.normal(size=(64, 8)), r.normal(size=(8, 8)), r.normal(size=(8, 3))


@program("gates", _gate)
def entropy_of_a_gate_that_feeds_a_layer(k: Plain, x, w, out):
    p = jax.nn.sigmoid(4 * _normalized(k, x, w))
    entropy = -jnp.log1p(-p) - jnp.log(p)
    return jnp.mean(k.mm(p, out) ** 2) + 0.1 * jnp.mean(entropy)


@program("gates", _gate)
def margin_of_a_gate_by_erf(k: Plain, x, w, out):
    p = jax.scipy.special.erf(_normalized(k, x, w, 0) + 3)
    return jnp.mean(k.mm(p, out) ** 2) + jnp.mean(jnp.log(1 - p + 1e-7))


@program("gates", _gate)
def log_sigmoid_beside_a_layer(k: Plain, x, w, out):
    """A bonus for each gate that is open: of what it depends on, normalizing leaves little."""
    s = jax.nn.log_sigmoid(_normalized(k, x, w))
    return jnp.mean(k.mm(s, out)) - jnp.sum(s)


@program("gates", _gate)
def scales_of_a_coupling_layer(k: Plain, x, w, out):
    scale = jax.nn.softplus(_normalized(k, x, w)) + 0.01
    return jnp.mean(k.mm(x * scale, out) ** 2) - jnp.mean(jnp.log(scale))


@program("gates", _gate)
def probability_made_from_a_sum(k: Plain, x, w, out):
    energy = jnp.sum(k.up(k.mm(x, w)).reshape(64, 2, 4) ** 2, -1) / 4
    p = jax.nn.sigmoid(energy)
    return jnp.mean(k.mm(p, out[:2]) ** 2) - 0.1 * jnp.mean(jnp.log1p(-p * (1 - 1e-6)))


@program(
    "knots",
    lambda r: (r.normal(size=(16, 6)), r.normal(size=(6, 24)) / 3, r.normal(size=(24, 4))),
)
def thresholds_that_increase(k: Plain, x, w, out):
    cuts = jnp.cumsum(jax.nn.softplus(k.up(k.mm(x, w))), -1) - 10
    below = jax.nn.sigmoid(jnp.concatenate([jnp.full((16, 1), -20.0), cuts], -1))
    p = below[:, 1:] - below[:, :-1]
    return -jnp.mean(jnp.log(p + 1e-9)) + jnp.mean(k.mm(p * 10, out) ** 2)


@program(
    "knots",
    lambda r: (r.normal(size=(60, 6)), r.normal(size=(6, 1)), r.normal(size=(7, 4))),
)
def learned_clock_as_a_feature(k: Plain, x, w, out):
    t = jnp.clip(jnp.cumsum(jax.nn.softplus(k.up(k.mm(x, w)) + 8), 0), 0.0, 1e4)
    features = jnp.concatenate([t / 500, x], -1)
    return jnp.mean(k.mm(features, out) ** 2) + jnp.mean((t[1:] - t[:-1] - 8) ** 2)


@program(
    "knots",
    lambda r: (
        r.normal(size=(64, 8)),
        r.normal(size=(8, 16)) / 2,
        r.normal(size=(16, 24)) / 2,
        r.normal(size=(64,)) / 2,
        r.normal(size=(8, 3)),
    ),
)
def spline_between_learned_knots(k: Plain, x, a, b, at, out):
    w, h = jnp.split(k.up(k.mm(jnp.tanh(k.mm(x, a)), b))[:, :16], 2, -1)
    w, h = (0.01 + 0.92 * jax.nn.softmax(v, -1) for v in (w, h))
    knots = jnp.concatenate([jnp.zeros((64, 1)), jnp.cumsum(w, -1)], -1) * 6 - 3
    widths = knots[:, 1:] - knots[:, :-1]
    i = jnp.clip(jnp.sum(at[:, None] >= knots[:, :-1], -1) - 1, 0, 7)[:, None]
    left, width, height = (jnp.take_along_axis(v, i, -1) for v in (knots, widths, h))
    y = height * (at[:, None] - left) / width
    return jnp.mean(y**2) - jnp.mean(jnp.log(height / width)) + jnp.mean(k.mm(widths, out) ** 2)


@program(
    "grids",
    lambda r: (r.normal(size=(3, 6)), r.normal(size=(6, 200)) * 0.05, r.normal(size=(200, 8)) / 8),
)
def grid_of_pixels_displaced(k: Plain, z, w, out):
    at = jnp.arange(200.0)[None] + k.mm(z, w)
    return jnp.mean((at[:, 1:] - at[:, :-1] - 1) ** 2) * 10 + jnp.mean(k.mm(at / 200, out) ** 2)


@program(
    "grids",
    lambda r: (r.normal(size=(3, 6)), r.normal(size=(6, 64)) * 0.002, r.normal(size=(64, 8)) / 8),
)
def grid_by_linspace_displaced(k: Plain, z, w, out):
    at = jnp.linspace(-1, 1, 64) + k.mm(z, w)
    return jnp.mean((jnp.diff(at, axis=-1) * 31.5 - 1) ** 2) * 10 + jnp.mean(k.mm(at, out) ** 2)


@program(
    "ensembles",
    lambda r: (
        r.normal(size=(4, 30, 8, 16)) / 3,
        r.normal(size=(4, 30, 16, 8)) * 0.05,
        r.normal(size=(32, 8)),
    ),
)
def ensemble_of_streams_on_shared_data(k: Plain, a, b, x):
    def network(a, b):
        h = x
        for i in range(30):
            h = h + 0.02 * k.mm(jnp.tanh(k.mm(h, a[i])), b[i])
        return h

    return jnp.mean((jax.vmap(network)(a, b) - x) ** 2) * 1e3


def _points(r: np.random.Generator) -> tuple:
    code, layers = r.normal(size=(3, 6)), [r.normal(size=(6, 16)) / 3, r.normal(size=(16, 3)) / 40]
    return r.uniform(-1, 1, size=(30, 3)), code, *layers, r.normal(size=(27, 8)) / 4


@program("coordinates", _points)
def deformed_points_encoded(k: Plain, points, code, a, b, out):
    x = points[None] + k.mm(jnp.tanh(k.mm(code, a)), b)[:, None]
    angles = (x[..., None] * 2.0 ** jnp.arange(4) * jnp.pi).reshape(3, 30, 12)
    encoded = jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)
    return jnp.mean(k.mm(encoded, out) ** 2)


@program(
    "coordinates",
    lambda r: (
        r.normal(size=(4, 10)),
        r.normal(size=(10, 120)) * 0.01,
        r.uniform(-1, 1, size=(40, 3)),
        r.normal(size=(4, 40, 2)) * 5 + 256,
    ),
)
def blend_shapes_seen_by_a_camera(k: Plain, shape, basis, template, seen):
    points = template[None] + k.mm(shape, basis).reshape(4, 40, 3)
    turn = jnp.array([[0.6, -0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    points = points @ turn.T + jnp.array([0.0, 0.0, 5.0])
    pixels = 500 * points[..., :2] / points[..., 2:] + 256
    return jnp.mean(jnp.abs(pixels - seen))


@program(
    "coordinates",
    lambda r: (r.normal(size=(200, 8)), r.normal(size=(8, 3)) * 0.01),
)
def small_rotations_composed(k: Plain, f, w):
    def step(turn, v):
        o = jnp.zeros(())
        cross = jnp.stack([o, -v[2], v[1], v[2], o, -v[0], -v[1], v[0], o]).reshape(3, 3)
        return turn @ (jnp.eye(3) + cross + 0.5 * cross @ cross), None

    turn, _ = k.scan(step, jnp.eye(3), k.up(k.mm(f, w)))
    return jnp.sum((turn - jnp.eye(3)) ** 2)


@program(
    "ranges",
    lambda r: (r.normal(size=(8, 6)) * 10, r.normal(size=(6, 8)) * 10, r.normal(size=(8, 3))),
)
def divided_by_what_float16_cannot_hold(k: Plain, x, w, out):
    return jnp.mean(k.mm(k.up(k.mm(x, w)) / 2e5 * 1e2, out) ** 2)


@program(
    "gates",
    lambda r: (
        {
            "halt": r.normal(size=(8, 1)),
            "bias": np.full(1, 4.0),
            "out": r.normal(size=(8, 4)) / 3,
        },
        r.normal(size=(32, 16, 8)) / 2,
    ),
)
def halting_of_a_pondering_network(k: Plain, p, states):
    """PonderNet: when to halt weighs what each step answers, and has a prior: its log is taken."""
    halt = jax.nn.sigmoid(k.mm(states, p["halt"]) + p["bias"])[..., 0]
    before = jnp.cumprod(jnp.concatenate([jnp.ones((32, 1)), 1 - halt[:, :-1]], 1), 1)
    answer = jnp.einsum("bs,bso->bo", halt * before, k.up(k.mm(states, p["out"])))
    context = k.einsum("bs,bso->bo", halt, states)
    return jnp.mean(answer**2) + jnp.mean(context**2) / 64 - jnp.mean(jnp.log1p(-halt)) / 8


@program(
    "coordinates",
    lambda r: (
        {
            "rate": r.normal(size=(8, 16)) * 4,
            "phase": r.uniform(0, 6.3, size=16),
            "out": r.normal(size=(32, 4)) / 4,
        },
        r.normal(size=(40, 8)) * 3,
    ),
)
def a_trend_and_its_waves(k: Plain, p, x):
    """Time2Vec: a layer's results, and their sines, are what the next layer reads."""
    angle = k.mm(x, p["rate"]) + p["phase"]
    return jnp.mean(k.mm(jnp.concatenate([angle / 50, jnp.sin(angle)], -1), p["out"]) ** 2)


# --- float16's range: what divides, and what is divided by ---------------------------------------


def _with_padded_rows(r: np.random.Generator) -> tuple:
    x = r.normal(size=(32, 16))
    x[:4] = 0.0
    return r.normal(size=(16, 16)) / 4, x


@program("divisors", _with_padded_rows)
def relu_attention_of_padded_rows(k: Plain, w, x):
    a = jax.nn.relu(k.mm(x, w))
    y = k.mm(a, w) / (k.up(a).sum(-1, keepdims=True) + 1e-5)
    return jnp.mean(k.mm(y, w) ** 2)


@program("divisors", _with_padded_rows)
def a_gate_between_two_features(k: Plain, w, x):
    a, b = jax.nn.relu(k.mm(x, w)), jax.nn.relu(k.mm(x, w.T))
    return jnp.mean(k.mm(a / (k.up(a) + k.up(b) + 1e-6), w) ** 2)


@program("divisors", _with_padded_rows)
def a_share_of_the_larger_total(k: Plain, w, x):
    a, b = jax.nn.relu(k.mm(x, w)), jax.nn.relu(k.mm(x, w.T))
    totals = k.up(a).sum(-1, keepdims=True), k.up(b).sum(-1, keepdims=True)
    return jnp.mean(k.mm(b / jnp.maximum(jnp.maximum(*totals), 1e-6), w) ** 2)


@program("divisors", _with_padded_rows)
def pooling_by_a_mask_that_may_be_empty(k: Plain, w, x):
    mask = (x != 0).astype(k.real)
    h = jax.nn.sigmoid(k.mm(x, w)) * mask
    return jnp.mean(k.mm(h / (mask.sum(-1, keepdims=True) + 1e-6), w) ** 2)


@program("divisors", _with_padded_rows)
def features_over_the_norm_of_others(k: Plain, w, x):
    other = k.up(k.mm(x, w.T))
    by = jax.lax.rsqrt(jnp.sum(other**2, -1, keepdims=True) + 1e-12)
    return jnp.mean(k.mm(jnp.tanh(k.mm(x, w)) * by, w) ** 2)


@program(
    "divisors",
    lambda r: (r.normal(size=(3, 16, 16)) / 4, r.normal(size=(4096, 16))),
    scale=2.0**15,
)
def linear_attention_over_many_tokens(k: Plain, w, x):
    q, key = jax.nn.elu(k.mm(x, w[0])) + 1, jax.nn.elu(k.mm(x, w[1])) + 1
    norm = k.up(q) @ k.up(key).sum(0)
    return jnp.mean((k.up(k.mm(q, k.mm(key.T, k.mm(x, w[2])))) / norm[:, None]) ** 2)
