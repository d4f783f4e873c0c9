"""Kernels with a solver, statistics, returns, pooling by product, scalar contractions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program

# --- kernels with a solver -----------------------------------------------------------------------


def _points(r: np.random.Generator) -> tuple:
    x = r.normal(size=(24, 12))
    return x, np.sin(x[:, :1]), r.normal(size=(8, 12))


def _rbf(x, y):
    square = jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1)[None] - 2 * x @ y.T
    return jnp.exp(-0.05 * square)


# Not held to code by hand alone: the predictions' kernel is a product that only the product with
# the solution tells from a layer's.
@program("kernels and solvers", _points)
def kernel_ridge_by_the_distance_trick(k: Plain, x, y, z):
    factor = jax.scipy.linalg.cho_factor(_rbf(x, x) + 1e-2 * jnp.eye(24))
    return jnp.mean((_rbf(z, x) @ jax.scipy.linalg.cho_solve(factor, y)) ** 2)


@program("kernels and solvers", lambda r: (*_points(r)[:2], np.zeros(())), geometry=True)
def gaussian_process_evidence(k: Plain, x, y, scale):
    kernel = _rbf(x * jnp.exp(scale), x * jnp.exp(scale)) + 1e-2 * jnp.eye(24)
    lower = jnp.linalg.cholesky(kernel)
    half = jax.scipy.linalg.solve_triangular(lower, y, lower=True)
    return (0.5 * jnp.sum(half**2) + jnp.sum(jnp.log(jnp.diagonal(lower)))) / 24


@program(
    "kernels and solvers",
    lambda r: (r.normal(size=(6, 16)) / 3, r.normal(size=(30, 6)), r.normal(size=(30, 1))),
    geometry=True,
)
def deep_kernel_of_a_network(k: Plain, w, x, y):
    features = k.up(jnp.tanh(k.mm(x, w)))
    gram = features @ features.T / 16 + 1e-1 * jnp.eye(30)
    return jnp.mean(y * jnp.linalg.solve(gram, y))


@program("kernels and solvers", _points, geometry=True)
def normal_equations(k: Plain, x, y, z):
    w = jnp.linalg.solve(x.T @ x + 1e-3 * jnp.eye(12), x.T @ y)
    return jnp.mean((z @ w) ** 2)


@program("kernels and solvers", lambda r: (r.normal(size=(4, 6)), r.normal(size=(32, 4))))
def ridge_on_a_layer_of_features(k: Plain, w, x):
    features = k.up(jax.nn.relu(k.mm(x, w)))
    gram = features.T @ features + jnp.eye(6)
    return jnp.mean(jnp.linalg.solve(gram, features.T @ x) ** 2)


# --- statistics given or computed ----------------------------------------------------------------


def _with_mean_ten(r: np.random.Generator) -> tuple:
    """Inputs, weights under which all features are near 10, their mean, their deviation.

    The tens themselves are exact in bfloat16, so that it is the means' rounding that is seen.
    """
    x, w = r.normal(size=(256, 8)), r.normal(size=(8, 8)) / 6
    x[:, 0], w[0] = 1.0, 10 + r.integers(-4, 5, 8) / 16
    return x, w, (x @ w).mean(0), (x @ w).std(0)


def _and_a_layer(r: np.random.Generator) -> tuple:
    return *_with_mean_ten(r), r.normal(size=(8, 4)) / 3


_, _, _MEAN, _STD = _with_mean_ten(np.random.default_rng(0))


@program("statistics", _and_a_layer)
def standardized_by_given_statistics(k: Plain, x, w, mean, std, v):
    y = k.mm((k.mm(x, w) - mean) / std, v)
    return jnp.mean(y**2) + jnp.mean((y.mean(0) - 1.0) ** 2)


@program("statistics", _and_a_layer)
def standardized_by_constants(k: Plain, x, w, _mean, _std, v):
    y = (k.mm(x, w) - jnp.asarray(_MEAN)) / jnp.asarray(_STD)
    y = k.mm(jnp.tanh(y), v)
    return jnp.mean(y**2) + jnp.mean((y.mean(0) - 1.0) ** 2)


@program("statistics", _and_a_layer)
def standardized_and_clipped(k: Plain, x, w, mean, std, v):
    y = jnp.clip((k.mm(x, w) - mean) / std, -5.0, 5.0)
    return jnp.mean(k.mm(jnp.where(jnp.abs(y) < 0.01, 0.0, y), v) ** 2)


@program("statistics", _and_a_layer)
def standardized_by_computed_statistics(k: Plain, x, w, _mean, _std, v):
    y = k.up(k.mm(x, w))
    y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-6)
    return jnp.mean(k.mm(y, v) ** 2)


@program("statistics", lambda r: (*_with_mean_ten(r), r.normal(size=(2, 8)), r.normal(size=(8, 4))))
def batch_norm_in_inference(k: Plain, x, w, mean, std, affine, v):
    y = (k.mm(x, w) - mean) * jax.lax.rsqrt(std**2 + 1e-5) * affine[0] + affine[1]
    return jnp.mean(k.mm(jax.nn.relu(y), v) ** 2)


@program("statistics", lambda r: (r.normal(size=(64, 8)) + 100, r.normal(size=(8, 4))))
def inputs_standardized_before_a_layer(k: Plain, x, w):
    return jnp.mean(k.mm((x - 100.0) / 2.0, w) ** 2)


@program(
    "statistics", lambda r: (r.normal(size=(64, 8)) + 300, r.normal(size=(8, 4)), np.full(8, 300.0))
)
def running_statistics_updated_and_used(k: Plain, x, w, running):
    running = 0.9 * running + 0.1 * x.mean(0)
    return jnp.mean(jnp.tanh(k.mm(x - running, w)) ** 2)


@program(
    "statistics", lambda r: (r.normal(size=(64, 6)) @ r.normal(size=(6, 6)) + 5,), geometry=True
)
def whitening(k: Plain, x):
    centered = x - x.mean(0)
    covariance = centered.T @ centered / 64 + 1e-2 * jnp.eye(6)
    white = jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(covariance), centered.T, lower=True
    )
    return jnp.mean(jnp.abs(white) ** 3)


@program("statistics", lambda r: (*_with_mean_ten(r)[:2], r.normal(size=(256, 8)) * 0.1 + 10))
def targets_near_what_a_layer_predicts(k: Plain, x, w, y):
    return jnp.mean((k.mm(x, w) - y) ** 2)


@program(
    "statistics", lambda r: (*_with_mean_ten(r)[:2], r.normal(size=(8, 2)) / 3, np.full(2, 50.0))
)
def targets_rescaled_after_a_layer(k: Plain, x, w, v, mean):
    prediction = 3.0 * k.mm(jnp.tanh(k.mm(x, w) / 10), v) + mean
    return jnp.mean((prediction - mean - x[:, :2]) ** 2)


@program(
    "statistics",
    lambda r: (r.normal(size=(8, 4)) / 3, r.uniform(size=(256, 8)), r.normal(size=(256, 4))),
)
def latents_by_inverse_normal_cdf(k: Plain, w, uniforms, y):
    latents = jnp.sqrt(2.0) * jax.scipy.special.erfinv(2 * uniforms - 1)
    return jnp.mean((k.mm(latents, w) - y) ** 2)


# --- returns -------------------------------------------------------------------------------------


def _episode(r: np.random.Generator) -> tuple:
    """States that change slowly, what they are worth, and rewards: neighboring errors alike."""
    t = np.linspace(0, np.pi, 513)[:, None]
    x = np.sin(t * r.uniform(1, 2, size=6) + r.uniform(0, 6, size=6))
    return x, r.normal(size=(6, 1)) * 0.03, np.sin(t[1:, 0]) ** 2


@program("returns", _episode)
def advantages_by_a_reversed_scan(k: Plain, x, w, rewards):
    rewards = jax.lax.stop_gradient(rewards)
    v = k.up(k.mm(x, w))[:, 0]
    deltas = rewards + 0.99 * v[1:] - v[:-1]
    advantages = k.scan(lambda a, d: (d + 0.95 * a,) * 2, jnp.zeros(()), deltas[::-1])[1]
    return jnp.mean(advantages**2)


@program("returns", _episode)
def cotangents_that_cancel(k: Plain, x, w, rewards):
    rewards = jax.lax.stop_gradient(rewards)
    v = k.up(k.mm(x, w))[:, 0]
    d = rewards + 0.999 * v[1:] - v[:-1]
    return jnp.mean(d**2)


@program("returns", _episode)
def smoothness_of_what_a_layer_returns(k: Plain, x, w, rewards):
    v = k.up(jnp.tanh(k.mm(x, w) / 10))[:, 0]
    return 1e2 * jnp.mean((v[2:] - 2 * v[1:-1] + v[:-2]) ** 2) + jnp.mean(rewards * v[1:])


@program("returns", _episode, geometry=True, scale=1.0)
def discounted_sums_by_a_matrix(k: Plain, x, w, rewards):
    i = jnp.arange(512)
    lag = i[None] - i[:, None]
    discount = jnp.where(lag >= 0, 0.99 ** jnp.maximum(lag, 0).astype(float), 0.0)
    return jnp.mean((discount @ (rewards + 1.0) - 10 * k.mm(x[:-1], w)[:, 0]) ** 2)


@program("returns", _episode)
def returns_bootstrapped_from_a_network(k: Plain, x, w, rewards):
    last = k.mm(x[-1:], w)[0, 0]
    total = k.scan(lambda g, r: (r + 0.99 * g,) * 2, last * 1.0, (rewards + 0.1)[::-1])[1]
    return jnp.mean((total - 5.0) ** 2)


@program("returns", _episode)
def advantages_by_an_associative_scan(k: Plain, x, w, rewards):
    v = k.up(k.mm(x, w))[:, 0]
    deltas = rewards + 0.99 * v[1:] - v[:-1]

    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    decay = jnp.full_like(deltas, 0.95)
    _, sums = jax.lax.associative_scan(combine, (decay, deltas), reverse=True)
    return jnp.mean(sums**2)


def _prices(r: np.random.Generator) -> tuple:
    levels = 100 * np.exp(np.cumsum(r.normal(size=200) / 100))
    return levels, r.normal(size=(16, 4)) / 4, r.integers(0, 183, size=64)


@program("returns", _prices)
def returns_of_levels_shared_by_a_batch(k: Plain, levels, w, start):
    window = levels[start[:, None] + jnp.arange(17)]
    returns = 100 * jnp.log(window[:, 1:] / window[:, :-1])
    return jnp.mean(jnp.tanh(k.mm(returns, w)) ** 2)


# --- pooling by product, scalar contractions -----------------------------------------------------


@program("pooling by product", lambda r: (r.normal(size=(4, 1001)) + 1,), geometry=True)
def masked_mean_by_a_product_with_ones(k: Plain, x):
    mask = (jnp.arange(1001) < jnp.array([[1001], [999], [301], [7]])).astype(x.dtype)
    count = mask @ jnp.ones(1001)
    return jnp.mean(jnp.sum(mask * x, -1) / count) + jnp.mean(count) / 500


@program(
    "pooling by product", lambda r: (r.normal(size=(600, 8)), r.integers(0, 3, 600)), geometry=True
)
def segment_mean_by_a_one_hot_product(k: Plain, x, segments):
    chosen = jax.nn.one_hot(segments, 3)
    count = jnp.einsum("ns,n->s", chosen, jnp.ones(600))
    sums = k.einsum("ns,nd->sd", chosen, x)
    return jnp.mean((k.up(sums) / count[:, None]) ** 2) * 100 + jnp.mean(jnp.sqrt(count))


@program("pooling by product", lambda r: (r.normal(size=(50, 6)), r.normal(size=(6, 6)) / 2))
def graph_convolution_with_degrees(k: Plain, x, w):
    i = jnp.arange(50)
    edges = (jnp.abs(i[:, None] - i[None]) <= 2).astype(x.dtype)
    degree = edges.sum(-1, keepdims=True)
    return jnp.mean(jax.nn.relu(k.mm(k.mm(edges, x) / degree, w)) ** 2)


@program("pooling by product", lambda r: (r.normal(size=(4, 300)) + 1,), geometry=True)
def cumulative_sums_by_a_triangle_of_ones(k: Plain, x):
    return jnp.mean((x @ jnp.triu(jnp.ones((300, 300)))) ** 2) / 1e3


@program("pooling by product", lambda r: (r.normal(size=(16, 16, 4)) + 2,), geometry=True)
def average_pooling_by_a_convolution(k: Plain, x):
    box = jnp.full((4, 4, 1, 1), 1 / 16)
    y = jnp.moveaxis(x, -1, 0)[..., None]
    mean = jax.lax.conv_general_dilated(
        y, box, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean((y.reshape(4, 4, 4, 4, 4, 1).mean((2, 4)) * 0.9 - mean) ** 2) * 1e2


@program("scalar contractions", lambda r: (np.ones(100_000), r.normal(size=(4, 4))), geometry=True)
def weight_decay_by_vdot(k: Plain, w, x):
    return 1e-5 * (0.5 * jnp.vdot(w, w)) + jnp.mean(k.mm(x, x) ** 2)


@program(
    "scalar contractions", lambda r: (r.normal(size=400) + 1, r.normal(size=400) + 1), geometry=True
)
def cosine_of_nearly_parallel_vectors(k: Plain, x, y):
    y = x + 0.01 * y
    return 1e4 * (1 - x @ y / jnp.sqrt((x @ x) * (y @ y)))
