"""Residual streams, time and schedules, scatter and hash grids, signals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program

# --- residual streams ----------------------------------------------------------------------------


def _layers(r: np.random.Generator) -> tuple:
    return r.normal(size=(50, 16, 16)) / 4, r.normal(size=(50, 16, 16)) / 16, r.normal(size=(8, 16))


def _block(k: Plain, h, a, b):
    return h + 0.3 * k.mm(jnp.tanh(k.mm(h, a)), b)


@program("residual streams", _layers)
def stream_of_fifty_layers_from_data(k: Plain, a, b, x):
    for i in range(50):
        x = _block(k, x, a[i], b[i])
    return jnp.mean(x**2)


@program("residual streams", lambda r: (r.normal(size=(12, 16, 16)) / 4, r.normal(size=(32, 16))))
def stream_of_residuals_with_a_factor(k: Plain, w, x):
    """The factor is no 16-bit number: rounded, it would have one error in every layer."""
    for i in range(12):
        x = x + 0.6 * jnp.tanh(k.mm(x, w[i]))
    return jnp.mean(x**2)


@program("residual streams", _layers)
def scanned_stream_from_data(k: Plain, a, b, x):
    return jnp.mean(k.scan(lambda h, w: (_block(k, h, *w), None), x, (a, b))[0] ** 2)


@program(
    "residual streams", lambda r: (*_layers(r)[:2], r.normal(size=(30, 16)), r.integers(0, 30, 8))
)
def scanned_stream_from_embeddings(k: Plain, a, b, table, tokens):
    x = k.param(table)[tokens]
    x = k.scan(lambda h, w: (_block(k, h, *w), None), x, (a, b))[0]
    return jnp.mean(k.up(x) ** 2)


@program("residual streams", lambda r: (*_layers(r), np.ones(16)))
def normalized_stream_in_blocks_of_remat(k: Plain, a, b, x, scale):
    @jax.checkpoint
    def block(h, w):
        y = h - h.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale
        return h + 0.3 * k.mm(jax.nn.gelu(k.mm(y, w[0])), w[1]), None

    return jnp.mean(k.scan(block, x + 3.0, (a, b))[0] ** 2)


@program("residual streams", _layers)
def stream_with_a_learned_step_size(k: Plain, a, b, x):
    steps = jnp.linspace(1.0, 0.01, 50)
    body = lambda h, w: (h + w[2] * k.mm(jnp.sin(k.mm(h, w[0])), w[1]), None)  # noqa: E731
    return jnp.mean(k.scan(body, x[::-1] * 1.5, (a, b, steps))[0] ** 2)


@program("residual streams", _layers)
def two_streams_that_exchange(k: Plain, a, b, x):
    def layer(c, w):
        left, right = c["left"], c["right"]
        left = left + 0.2 * k.mm(jnp.tanh(right), w[0])
        return {"left": left, "right": right + k.mm(jnp.tanh(left), w[1])}, None

    out = k.scan(layer, {"left": x, "right": jnp.flip(x)}, (a, b))[0]
    return jnp.mean(out["left"] * out["right"]) + jnp.mean(out["left"] ** 2)


# --- time and schedules --------------------------------------------------------------------------


def _timed(lo: float, hi: float):
    return lambda r: (
        r.uniform(lo, hi, size=16),
        *(r.normal(size=s) for s in ((16, 8), (8, 8), (8, 4))),
    )


@program("time and schedules", _timed(1000, 3000))
def time_added_to_a_layer(k: Plain, t, x, w, v):
    return jnp.mean((1e-3 * k.mm(t[:, None] + k.mm(x, w), v)) ** 2)


@program("time and schedules", _timed(1000, 1010), geometry=True)
def phase_of_time_plus_a_layer(k: Plain, t, x, w, v):
    return jnp.mean(k.mm(jnp.sin(t[:, None] + k.mm(x, w)), v) ** 2)


@program("time and schedules", _timed(2000, 2002))
def time_since_an_event(k: Plain, t, x, w, v):
    y = t[:, None] + 0.1 * jnp.tanh(k.mm(x, w))
    return jnp.mean(k.mm(jnp.exp(-(y - 2000.0)), v) ** 2)


@program("time and schedules", _timed(0, 1000), geometry=True)
def sinusoidal_time_embedding(k: Plain, t, x, w, v):
    frequencies = jnp.exp(-np.log(10000.0) * jnp.arange(4) / 4)
    angles = t[:, None] * frequencies[None]
    embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    return jnp.mean(k.mm(jax.nn.silu(k.mm(x, w) + k.mm(embedded, w)), v) ** 2)


@program("time and schedules", lambda r: (r.integers(0, 1000, 16), *_timed(0, 1)(r)[1:]))
def noise_schedule_of_a_diffusion_loss(k: Plain, t, x, w, v):
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 2e-2, 1000))[t][:, None]
    noise = jnp.roll(x, 1, 0)
    noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
    eps = k.mm(jnp.tanh(k.mm(noisy, w)), v)
    x0 = (noisy[:, :4] - jnp.sqrt(1 - kept) * eps) / jnp.sqrt(kept + 1e-2)
    return jnp.mean(((1 - kept) * (x0 - x[:, :4])) ** 2)


@program("time and schedules", lambda r: (r.normal(size=(8, 2)), *_timed(0, 1)(r)[1:2]))
def inner_steps_under_a_cosine_schedule(k: Plain, w, x):
    y = x[:, :2] * 3.0

    def step(w, t):
        rate = 2e-3 * (1 + jnp.cos(jnp.pi * t / 200))
        return w - rate * jax.grad(lambda w: jnp.mean((k.mm(x, w) - y) ** 2))(w), None

    w = k.scan(step, -w, jnp.arange(200.0))[0]
    return jnp.mean((k.mm(x, w) - y) ** 2)


@program("time and schedules", lambda r: (r.normal(size=(300, 6)), r.normal(size=(6, 6)) / 2))
def distances_as_an_attention_bias(k: Plain, x, w):
    i = jnp.arange(300.0)
    logits = k.mm(k.mm(x, w), x.T) - 0.25 * jnp.abs(i[:, None] - i[None])
    return jnp.mean(k.mm(jax.nn.softmax(logits), x) ** 2)


# --- scatter and hash grids ----------------------------------------------------------------------


def _graph(r: np.random.Generator) -> tuple:
    sender, receiver = r.integers(0, 20, size=(2, 400))
    return r.normal(size=(20, 8)), r.normal(size=(8, 8)) / 3, sender, receiver


@program("scatter and hash grids", _graph)
def messages_summed_by_segment(k: Plain, x, w, sender, receiver):
    out = jax.ops.segment_sum(k.up(k.mm(x, w))[sender], receiver, 20)
    return jnp.mean(jnp.tanh(x + 0.1 * out) ** 2)


@program("scatter and hash grids", _graph)
def products_added_at_indices(k: Plain, x, w, sender, receiver):
    out = jnp.zeros((20, 8)).at[receiver].add(k.up(k.mm(x[sender] - x[receiver], w)) * 0.05)
    return jnp.mean((x + out) ** 2)


@program("scatter and hash grids", _graph)
def message_passing_in_small_steps(k: Plain, x, w, sender, receiver):
    def step(i, h):
        flow = jnp.tanh(k.mm(h[sender] - h[receiver], w))
        return h.at[receiver].add((1e-3 * flow).astype(h.dtype))

    return jnp.mean(k.fori(60, step, x + 1.0) ** 2)


def _hashed(i, size):
    mixed = i[..., 0].astype(jnp.uint32) ^ (i[..., 1].astype(jnp.uint32) * jnp.uint32(2654435761))
    return (mixed % jnp.uint32(size)).astype(jnp.int32)


def _encoded(table, x, resolution):
    """Trilinear interpolation between hashed corners, in two dimensions."""
    y = x * resolution
    corner = jnp.floor(y)
    t = y - corner
    out = 0.0
    for dx in (0, 1):
        for dy in (0, 1):
            at = _hashed(corner.astype(int) + jnp.array([dx, dy]), len(table))
            weight = jnp.abs(1 - dx - t[:, :1]) * jnp.abs(1 - dy - t[:, 1:])
            out = out + weight * table[at]
    return out


@program(
    "scatter and hash grids",
    lambda r: (
        r.normal(size=(3, 64, 2)),
        r.uniform(0, 1, size=(50, 2)),
        r.normal(size=(6, 8)) / 2,
        r.normal(size=(8, 3)) / 2,
    ),
)
def hash_grid_encoding(k: Plain, tables, x, a, b):
    levels = [_encoded(t, x, n) for t, n in zip(tables, (16.0, 90.0, 512.0), strict=True)]
    return jnp.mean(k.mm(jax.nn.relu(k.mm(jnp.concatenate(levels, -1), a)), b) ** 2)


@program(
    "scatter and hash grids",
    lambda r: (r.normal(size=(64, 2)), r.uniform(0, 1, size=(50, 2)), r.normal(size=(2, 2)) * 0.01),
)
def hash_grid_at_warped_positions(k: Plain, table, x, w):
    smooth = jnp.cumsum(table, 0)
    return jnp.mean(_encoded(smooth, x + k.mm(jnp.sin(x), w), 40.0) ** 2) / 10


# --- signals: windows, stencils, transforms ------------------------------------------------------


def _convolved(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )


@program("signals", lambda r: (np.cumsum(r.normal(size=(2, 200, 1)), 1) * 0.01 + 3,), geometry=True)
def second_differences_by_a_convolution(k: Plain, u):
    stencil = jnp.array([1.0, -2.0, 1.0]).reshape(3, 1, 1)
    return jnp.mean((_convolved(u, stencil) / 1e-2) ** 2)


@program("signals", lambda r: (np.cumsum(r.normal(size=60)) * 0.02 + 5,), geometry=True)
def burgers_equation_by_stencils(k: Plain, u):
    first = np.array([-0.5, 0.0, 0.5]).reshape(3, 1, 1)
    second = np.array([1.0, -2.0, 1.0]).reshape(3, 1, 1)

    def step(u, _):
        v = jnp.pad(u, 1, mode="wrap")[None, :, None]
        slope, bend = (_convolved(v, jnp.asarray(s))[0, :, 0] for s in (first, second))
        return u - 1e-2 * u * slope + 1e-2 * bend, None

    return jnp.var(k.scan(step, u, length=100)[0]) * 10


def _dft(n):
    angles = 2 * jnp.pi * jnp.outer(jnp.arange(n), jnp.arange(n // 2)).astype(float) / n
    return jnp.cos(angles), jnp.sin(angles)


@program(
    "signals", lambda r: (np.sin(np.arange(256) * 0.7) + 0.01 * r.normal(size=256),), geometry=True
)
def spectrogram_by_a_matrix_from_literals(k: Plain, x):
    window = 0.5 - 0.5 * jnp.cos(2 * jnp.pi * jnp.arange(32) / 32)
    frames = x[jnp.arange(0, 225, 16)[:, None] + jnp.arange(32)] * window
    cos, sin = _dft(32)
    power = (frames @ cos) ** 2 + (frames @ sin) ** 2
    return -jnp.mean(jnp.log(power + 1e-6)) / 10


@program(
    "signals", lambda r: (np.sin(np.arange(64) * 0.9) + 0.1 * r.normal(size=64),), geometry=True
)
def a_filter_in_the_frequency_domain(k: Plain, x):
    cos, sin = _dft(64)
    keep = jnp.where(jnp.arange(32) < 4, 1.0, 0.0)
    low = (cos @ (keep * (x @ cos)) + sin @ (keep * (x @ sin))) / 32
    return jnp.mean(low**2) * 1e2


@program(
    "signals",
    lambda r: (r.normal(size=(2, 100, 1)) * 0.01 + 4, r.normal(size=(3, 1, 4))),
    geometry=True,
)
def contrast_against_a_gaussian_blur(k: Plain, u, kernel):
    bell = jnp.exp(-0.5 * jnp.linspace(-2.0, 2.0, 9) ** 2)
    blurred = _convolved(u, (bell / bell.sum()).reshape(9, 1, 1))
    return jnp.mean(k.conv((u[:, 4:-4] - blurred) * 1e2, kernel) ** 2)


@program(
    "signals",
    lambda r: (r.normal(size=(4, 32)) * 0.1 + 2, r.normal(size=(32, 4)) / 6),
    geometry=True,
)
def a_cosine_transform_before_a_layer(k: Plain, x, w):
    n = jnp.arange(32.0)
    basis = jnp.cos(jnp.pi / 32 * (n[:, None] + 0.5) * n[None])
    high = jnp.where(n >= 2, x @ basis, 0.0)
    return jnp.mean(jnp.tanh(k.mm(high, w)) ** 2)


@program(
    "signals",
    lambda r: (r.normal(size=(1, 64)) * 0.01 + 3, r.normal(size=(4, 4)) / 2),
    geometry=True,
)
def haar_wavelets_by_reshaped_products(k: Plain, x, w):
    haar = jnp.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2)

    def level(x, _):
        return jnp.einsum("nk,jk->nj", x.reshape(-1, 2), haar), None

    pairs = functools.reduce(lambda y, _: level(y.T, None)[0], range(3), x)
    return jnp.mean(pairs[:, 1] ** 2) * 1e3 + jnp.mean(k.mm(pairs.reshape(-1, 4), w) ** 2)
