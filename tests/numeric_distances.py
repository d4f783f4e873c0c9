"""Distances by expansion, bins and knots, transforms by literal matrices, small algebras."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program

# --- distances by expansion ----------------------------------------------------------------------


def _squared(k: Plain, a, b):
    """|a|^2 + |b|^2 - 2 a b, as everyone writes it."""
    a, b = k.up(a), k.up(b)
    return jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1)[None] - 2 * k.up(k.mm(a, b.T))


def _points(r: np.random.Generator) -> tuple:
    """An embedding, points, and others: nearly orthogonal, so that squares exceed products."""
    points = (r.normal(size=(n, 96)) for n in (24, 40))
    return {"w": r.normal(size=(96, 96)) / 10}, *points, r.normal(size=(40, 3))


@program("distances", _points)
def soft_neighbors_in_an_embedding(k: Plain, p, x, bank, values):
    """Weights of the nearest of a bank, by distances between embedded points."""
    distance = _squared(k, k.mm(x, p["w"]), k.mm(bank, p["w"]))
    return jnp.mean(k.mm(jax.nn.softmax(-distance), values) ** 2)


@program("distances", _points)
def radial_kernel_regression(k: Plain, p, x, bank, values):
    """Nadaraya-Watson with a Gaussian kernel of given points, a learned metric's scale."""
    scale = jnp.exp(p["w"][0])
    kernel = jnp.exp(-(_squared(k, x * scale, bank * scale) - 192.0) / 8)
    estimate = k.mm(kernel, values) / (jnp.sum(kernel, -1, keepdims=True) + 1e-6)
    return jnp.mean(estimate**2)


@program("distances", _points)
def soft_k_means(k: Plain, p, x, bank, _values):
    """Centers moved ten times to the means of what is near them, softly."""
    centers = p["w"][:8] * 10

    def step(centers, _):
        near = jax.nn.softmax(-0.1 * _squared(k, bank, centers), axis=-1)
        return k.up(k.mm(near.T, bank)) / jnp.sum(near, 0)[:, None], None

    centers = k.scan(step, centers, length=10)[0]
    return jnp.mean(jnp.min(_squared(k, x, centers), -1)) + jnp.mean(centers**2)


@program("distances", _points)
def codebook_with_straight_through(k: Plain, p, x, bank, _values):
    """VQ: the nearest of 40 codes in the encoder's space, commitment, a decoder."""
    z = k.up(k.mm(x, p["w"]))
    distance = jax.lax.stop_gradient(_squared(k, z, bank))
    chosen = bank[jnp.argmin(distance, -1)]
    straight = z + jax.lax.stop_gradient(chosen - z)
    decoded = k.mm(straight, p["w"].T)
    margin = jnp.min(distance, -1) - jnp.sum(z**2, -1)
    return jnp.mean((chosen - z) ** 2) + jnp.mean(decoded**2) + jnp.mean(margin)


@program("distances", _points)
def discrepancy_of_two_samples(k: Plain, p, x, bank, _values):
    """Maximum mean discrepancy: means of kernels, the difference of which is small."""
    a, b = k.mm(x, p["w"]), k.mm(bank, p["w"])
    means = [jnp.mean(jnp.exp(-0.02 * _squared(k, u, v))) for u, v in ((a, a), (b, b), (a, b))]
    return 10 * (means[0] + means[1] - 2 * means[2])


# --- bins and knots ------------------------------------------------------------------------------


@program(
    "bins",
    lambda r: (
        {"a": r.normal(size=(8, 16)) / 3, "b": r.normal(size=(16, 1)) / 4},
        r.normal(size=(128, 8)),
        r.dirichlet(np.ones(256)),
    ),
)
def histogram_of_gray_values(k: Plain, p, x, target):
    """256 soft bins a unit wide around gray values; the distance of cumulative histograms."""
    gray = 255 * jax.nn.sigmoid(k.up(k.mm(jnp.tanh(k.mm(x, p["a"])), p["b"])))
    edges = jnp.arange(257.0) - 0.5
    below = jax.nn.sigmoid((edges - gray) / 0.5)
    counts = jnp.mean(below[:, 1:] - below[:, :-1], 0)
    return jnp.mean((jnp.cumsum(counts) - jnp.cumsum(target)) ** 2) * 10 + jnp.sum(counts**2)


@program(
    "bins",
    lambda r: (
        {"w": r.normal(size=(6, 1)) / 2, "slope": r.normal(size=40)},
        r.normal(size=(200, 6)),
    ),
)
def piecewise_linear_in_many_hinges(k: Plain, p, x):
    """A calibration curve: hinges at 40 knots from 0 to 1000, and slopes that are learned."""
    at = 500 + 100 * jnp.tanh(k.up(k.mm(x, p["w"])))
    hinges = jax.nn.relu(at - jnp.linspace(0.0, 1000.0, 40))
    second = jnp.diff(p["slope"], prepend=0.0)
    y = jnp.sum(hinges * second, -1) / 25
    return jnp.mean((y - jnp.mean(y)) ** 2) / 10 + jnp.mean(jnp.abs(y)) / 100


@program(
    "bins",
    lambda r: (
        {"w": r.normal(size=(6, 12)) / 3, "out": r.normal(size=(12, 2))},
        r.normal(size=(100, 6)),
        r.uniform(0, 80, size=100),
    ),
)
def survival_in_intervals_of_months(k: Plain, p, x, month):
    """Piecewise constant hazards: the time spent in each interval, a matter of clipping."""
    hazard = jax.nn.softplus(k.up(k.mm(x, p["w"])) - 4)
    start = jnp.arange(12.0) * 7.0
    spent = jnp.clip(month[:, None] - start, 0.0, 7.0)
    total = jnp.sum(hazard * spent, -1)
    here = jnp.take_along_axis(hazard, (month // 7).astype(jnp.int32)[:, None], -1)[:, 0]
    survived = jnp.exp(-jnp.cumsum(hazard * spent, -1))
    return jnp.mean(total - jnp.log(here)) + jnp.mean(k.mm(survived, p["out"]) ** 2)


# --- transforms by literal matrices --------------------------------------------------------------

_N = np.arange(256)
_ANGLES = 2 * np.pi * np.outer(_N, np.arange(129)) / 256
_COS, _SIN = np.cos(_ANGLES), np.sin(_ANGLES)


def _mel(bins: int, bands: int) -> np.ndarray:
    """Triangles, evenly spaced in mel, over the bins of a spectrum of 16 kHz."""
    hertz = np.linspace(0, 8000, bins)
    mels = np.linspace(0, 2595 * np.log10(1 + 8000 / 700), bands + 2)
    low, mid, high = (700 * (10 ** (m / 2595) - 1) for m in (mels[:-2], mels[1:-1], mels[2:]))
    rising = (hertz[:, None] - low) / (mid - low)
    falling = (high - hertz[:, None]) / (high - mid)
    return np.maximum(0, np.minimum(rising, falling)) / (high - low) * 100


_MEL = _mel(129, 40)
_DCT = np.cos(np.pi / 40 * (np.arange(40)[:, None] + 0.5) * np.arange(13))


def _sound(r: np.random.Generator) -> tuple:
    """A loud tone between bins and weak ones beside it, eight frames; layers for features."""
    t = np.arange(8 * 256) / 256
    tones = np.sin(2 * np.pi * 20.3 * t) + 1e-2 * np.sin(2 * np.pi * 60.0 * t + r.uniform(0, 6))
    weights = {
        "a": r.normal(size=(40, 8)) / 20,
        "b": r.normal(size=(13, 4)) / 30,
        "gain": np.ones(256),
    }
    return weights, (tones + 1e-3 * r.normal(size=t.size)).reshape(8, 256)


@program("literal transforms", _sound, geometry=True)
def log_mel_features_before_a_layer(k: Plain, p, frames):
    """A window, a DFT of 256 by 129, a mel filterbank: literals all; the log, and a layer."""
    x = frames * p["gain"] * (0.5 - 0.5 * jnp.cos(2 * jnp.pi * _N / 256))
    power = (x @ jnp.asarray(_COS, x.dtype)) ** 2 + (x @ jnp.asarray(_SIN, x.dtype)) ** 2
    mel = jnp.log(power @ jnp.asarray(_MEL, x.dtype) + 1e-5)
    return jnp.mean(jnp.tanh(k.mm(mel, p["a"])) ** 2) + jnp.mean(mel**2) / 100


@program("literal transforms", _sound, geometry=True)
def cepstrum_by_a_cosine_transform(k: Plain, p, frames):
    """Thirteen cepstral coefficients of a spectrum by FFT, and their changes in time."""
    spectrum = jnp.abs(jnp.fft.rfft(frames * p["gain"])) ** 2
    mel = jnp.log(spectrum @ jnp.asarray(_MEL, frames.dtype) + 1e-5)
    cepstrum = mel @ jnp.asarray(_DCT, frames.dtype)
    change = cepstrum[1:] - cepstrum[:-1]
    return jnp.mean(jnp.tanh(k.mm(cepstrum, p["b"])) ** 2) + jnp.mean(change**2) / 10


@program("literal transforms", _sound, geometry=True)
def spectrum_and_back(k: Plain, p, frames):
    """A filter between a DFT and its inverse: what remains beside the signal is a thousandth."""
    x = frames * p["gain"]
    real, imaginary = x @ jnp.asarray(_COS, x.dtype), x @ jnp.asarray(_SIN, x.dtype)
    weight = jnp.where((jnp.arange(129) == 0) | (jnp.arange(129) == 128), 1.0, 2.0) / 256
    pass_ = jnp.where(jnp.arange(129) == 60, 0.0, weight)
    back = (real * pass_) @ jnp.asarray(_COS.T, x.dtype) + (imaginary * pass_) @ jnp.asarray(
        _SIN.T, x.dtype
    )
    return jnp.mean((x - back) ** 2) * 1e4


# --- small algebras ------------------------------------------------------------------------------

_METRIC = np.zeros((5, 5))
_METRIC[:3, :3], _METRIC[3, 4], _METRIC[4, 3] = np.eye(3), -1, -1


@program(
    "small algebras",
    lambda r: (
        {"w": r.normal(size=(6, 3)) / 8, "bias": np.array([3.0, 4.0, 5.0])},
        r.normal(size=(20, 6)),
        r.normal(size=(20, 3)) / 3 + np.array([3.0, 4.0, 5.0]),
    ),
    geometry=True,
)
def distances_in_the_conformal_algebra(k: Plain, p, x, y):
    """Points as null vectors of five elements: an inner product is minus half a distance."""

    def point(q):
        square = jnp.sum(q * q, -1, keepdims=True) / 2
        return jnp.concatenate([q, jnp.ones_like(square), square], -1)

    a, b = point(k.up(k.mm(x, p["w"])) + p["bias"]), point(y)
    inner = jnp.einsum("ni,ij,mj->nm", a, jnp.asarray(_METRIC, a.dtype), b)
    return jnp.mean(jnp.exp(2 * inner)) + jnp.mean(-2 * jnp.diagonal(inner))


def _cayley() -> np.ndarray:
    """The geometric product of the algebra of three dimensions: [8, 8, 8] of 0, 1 and -1."""
    table = np.zeros((8, 8, 8))
    for a in range(8):
        for b in range(8):
            swaps = sum(((a >> i) & b).bit_count() for i in range(1, 3))
            table[a, b, a ^ b] = (-1) ** swaps
    return table


@program(
    "small algebras",
    lambda r: ({"w": r.normal(size=(6, 3)) / 10}, r.normal(size=(60, 6)), r.normal(size=(60, 3))),
    geometry=True,
)
def rotors_composed_in_three_dimensions(k: Plain, p, x, v):
    """Sixty small rotors, by products of eight elements; what they do to vectors."""
    table = jnp.asarray(_cayley(), v.dtype)

    def product(a, b):
        return jnp.einsum("i,ijk,j->k", a, table, b)

    def step(rotor, inputs):
        plane, vector = inputs
        zero = jnp.zeros(())
        turn = jnp.stack([1 + zero, zero, zero, plane[0], zero, plane[1], plane[2], zero])
        rotor = product(rotor, turn / jnp.sqrt(1 + jnp.sum(plane**2)))
        whole = jnp.stack([zero, vector[0], vector[1], zero, vector[2], zero, zero, zero])
        back = rotor * jnp.array([1.0, 1, 1, -1, 1, -1, -1, -1])
        turned = product(product(rotor, whole), back)
        return rotor, turned[jnp.array([1, 2, 4])]

    start = jnp.zeros(8).at[0].set(1.0)
    rotor, turned = k.scan(step, start, (k.up(k.mm(x, p["w"])), v))
    return jnp.mean((turned - v) ** 2) + rotor[0] ** 2
