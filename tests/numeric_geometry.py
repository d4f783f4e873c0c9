"""Coordinates and warps, rotary and Fourier features, cameras and rigid frames."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program

# --- coordinates and warps -----------------------------------------------------------------------


@program("coordinates and warps", lambda r: (r.normal(size=(4, 4)) * 0.3, r.normal(size=(1000, 4))))
def warp_by_offsets_of_pixel_positions(k: Plain, w, img):
    x = jnp.arange(1000.0) + k.mm(img, w)[:, 0]
    x0 = jnp.floor(x)
    i = jnp.clip(x0.astype(int), 0, 998)
    t = (x - x0)[:, None]
    return jnp.mean(k.mm((1 - t) * img[i] + t * img[i + 1], w) ** 2)


def _bilinear(img, y, x):
    """`img` [h, w, c] at float positions."""
    y0, x0 = jnp.floor(y), jnp.floor(x)
    b, a = (y - y0)[..., None], (x - x0)[..., None]
    i = jnp.clip(y0.astype(int), 0, img.shape[0] - 2)
    j = jnp.clip(x0.astype(int), 0, img.shape[1] - 2)
    top = (1 - a) * img[i, j] + a * img[i, j + 1]
    return (1 - b) * top + b * ((1 - a) * img[i + 1, j] + a * img[i + 1, j + 1])


def _smooth(r: np.random.Generator, h: int, w: int, c: int) -> np.ndarray:
    """An image whose neighbors are near each other, so that gradients do not jump."""
    y, x = np.mgrid[:h, :w]
    waves = [
        np.sin(x * a + y * b + p)
        for a, b, p in zip(
            r.uniform(0.01, 0.1, c), r.uniform(0.01, 0.1, c), r.uniform(0, 6, c), strict=True
        )
    ]
    return np.stack(waves, -1)


@program(
    "coordinates and warps",
    lambda r: (_smooth(r, 8, 400, 3), _smooth(r, 8, 400, 3), r.normal(size=(3, 3, 6, 2)) * 0.2),
)
def optical_flow_lookup(k: Plain, first, second, kernel):
    both = jnp.concatenate([first, second], -1)[None]
    flow = k.conv(both, kernel, ("NHWC", "HWIO", "NHWC"))[0]
    grid = jnp.stack(jnp.meshgrid(jnp.arange(8.0), jnp.arange(400.0), indexing="ij"), -1)
    place = grid + flow
    return jnp.mean((_bilinear(second, place[..., 0], place[..., 1]) - first) ** 2)


@program(
    "coordinates and warps",
    lambda r: (_smooth(r, 300, 8, 4), r.uniform(20, 280, size=(16, 2)), r.normal(size=(4, 8)) / 8),
)
def deformable_sampling_around_anchors(k: Plain, img, anchors, w):
    anchors = anchors * jnp.array([1.0, 0.02])
    query = _bilinear(img, anchors[:, 0], anchors[:, 1])
    offsets = k.mm(query, w).reshape(16, 4, 2)
    place = anchors[:, None] + offsets
    return jnp.mean(k.mm(_bilinear(img, place[..., 0], place[..., 1]), w) ** 2)


@program("coordinates and warps", lambda r: (r.normal(size=(64, 4)), r.normal(size=(4, 1)) * 0.05))
def boxes_regressed_from_a_grid(k: Plain, x, w):
    cells = (jnp.arange(64.0) + 0.5) * 16.0
    shift = k.mm(x, w)[:, 0]
    center = cells + 16.0 * jnp.tanh(shift)
    lo, hi = center - 8.0, center + 8.0
    target = cells + 1.0
    overlap = jnp.minimum(hi, target + 8.0) - jnp.maximum(lo, target - 8.0)
    return jnp.mean(1 - overlap / (32.0 - overlap))


@program(
    "coordinates and warps",
    lambda r: (r.normal(size=(700, 4)) + 1, r.normal(size=(4, 2)) * 0.1 + 0.2),
)
def rounding_with_a_straight_through_gradient(k: Plain, x, w):
    place = jnp.cumsum(jax.nn.softplus(k.up(k.mm(x, w))), 0) / 10
    steps = place + jax.lax.stop_gradient(jnp.round(place) - place)
    return jnp.mean((steps - place[::-1]) ** 2) / 1e3


@program("coordinates and warps", lambda r: (r.normal(size=(300, 4)), r.normal(size=(4, 1)) * 0.1))
def a_soft_attention_window_at_positions(k: Plain, x, w):
    center = jnp.arange(300.0)[:, None] + 2 * jnp.tanh(k.mm(x, w))
    weights = jnp.exp(-0.5 * (jnp.arange(300.0) - center) ** 2)
    inside = jnp.abs(jnp.arange(300.0) - center) < 6.0
    weights = jnp.where(inside, weights, 0.0)
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    return jnp.mean(k.mm(weights, x)[:, 0] * jnp.cumsum(x, 0)[:, 1]) + 1.0


@program("coordinates and warps", lambda r: (r.normal(size=(32, 8)), r.normal(size=(8, 1)) * 0.3))
def a_lookup_between_two_rows_of_a_table(k: Plain, x, w):
    table = jnp.sin(jnp.arange(2000.0) / 50)
    place = 1000.0 + 500.0 * jnp.tanh(k.up(k.mm(x, w))[:, 0])
    i = place.astype(jnp.int32)
    t = place - i
    return jnp.mean(((1 - t) * table[i] + t * table[i + 1]) * x[:, 0]) + 2.0


# --- rotary and Fourier features -----------------------------------------------------------------

_FREQUENCIES = 1.0 / 10000 ** (np.arange(4) / 4)


def _rotated(x, angles):
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attended(k: Plain, wq, wk, x, angles):
    q, key = _rotated(k.mm(x, wq), angles), _rotated(k.mm(x, wk), angles)
    weights = jax.nn.softmax(k.mm(q, key.T))
    return jnp.mean(k.mm(weights, x)[:, 0] ** 2)


def _queries(r: np.random.Generator) -> tuple:
    return r.normal(size=(8, 8)) / 2, r.normal(size=(8, 8)) / 2, r.normal(size=(32, 8))


@program("rotary and Fourier", _queries, geometry=True)
def rotary_by_an_einsum_of_positions(k: Plain, wq, wk, x):
    t = jnp.arange(1000.0, 1032.0)
    return _attended(k, wq, wk, x, jnp.einsum("i,j->ij", t, jnp.asarray(_FREQUENCIES)))


@program(
    "rotary and Fourier",
    lambda r: (*_queries(r), 5000 + np.arange(32), _FREQUENCIES),
    geometry=True,
)
def rotary_by_a_product_of_arguments(k: Plain, wq, wk, x, t, frequencies):
    return _attended(k, wq, wk, x, t[:, None] * jax.lax.stop_gradient(frequencies))


@program("rotary and Fourier", _queries, geometry=True)
def rotary_as_complex_numbers(k: Plain, wq, wk, x):
    angles = jnp.outer(jnp.arange(700.0, 732.0), jnp.asarray(_FREQUENCIES))
    turn = jax.lax.complex(jnp.cos(angles), jnp.sin(angles))

    def rotated(y):
        a, b = jnp.split(k.up(y), 2, -1)
        z = jax.lax.complex(a, b) * turn
        return jnp.concatenate([z.real, z.imag], -1)

    weights = jax.nn.softmax(k.mm(rotated(k.mm(x, wq)), rotated(k.mm(x, wk)).T))
    return jnp.mean(k.mm(weights, x)[:, 0] ** 2)


_RANDOM = np.random.default_rng(7).normal(size=(3, 16))


@program(
    "rotary and Fourier",
    lambda r: (r.uniform(-1, 1, size=(32, 3)), r.normal(size=(32, 4)) / 4),
    geometry=True,
)
def fourier_features_of_positions(k: Plain, x, w):
    y = 2 * jnp.pi * (x @ (10.0 * jnp.asarray(_RANDOM)))
    return jnp.mean(k.mm(jnp.concatenate([jnp.sin(y), jnp.cos(y)], -1), w) ** 2)


@program(
    "rotary and Fourier",
    lambda r: (r.normal(size=(32, 16)), r.normal(size=(16, 64)), r.normal(size=(64, 4)) / 4),
    geometry=True,
)
def random_kitchen_sinks(k: Plain, x, frequencies, w):
    y = x @ (8.0 * frequencies)
    return jnp.mean(k.mm(jnp.cos(y) * np.sqrt(2 / 64), w) ** 2)


@program(
    "rotary and Fourier",
    lambda r: (r.uniform(0, 1, size=(32, 3)), r.normal(size=(60, 4)) / 6),
    geometry=True,
)
def nerf_encoding(k: Plain, x, w):
    y = (x[..., None] * 2.0 ** jnp.arange(10)).reshape(32, -1) * jnp.pi
    return jnp.mean(k.mm(jnp.concatenate([jnp.sin(y), jnp.cos(y)], -1), w) ** 2)


# --- cameras and rigid frames --------------------------------------------------------------------


def _rotation(angles):
    """A rotation about x, then y, then z."""
    (ca, cb, cc), (sa, sb, sc) = jnp.cos(angles), jnp.sin(angles)
    one, zero = jnp.ones_like(ca), jnp.zeros_like(ca)
    rows = [
        [[one, zero, zero], [zero, ca, -sa], [zero, sa, ca]],
        [[cb, zero, sb], [zero, one, zero], [-sb, zero, cb]],
        [[cc, -sc, zero], [sc, cc, zero], [zero, zero, one]],
    ]
    a, b, c = (jnp.stack([jnp.stack(row) for row in m]) for m in rows)
    return a @ b @ c


@program(
    "cameras and frames",
    lambda r: (
        r.normal(size=3),
        r.normal(size=(32, 3)),
        r.normal(size=(3, 16)),
        r.normal(size=(16, 3)) / 4,
    ),
    geometry=True,
)
def rays_through_a_camera(k: Plain, angles, d, a, b):
    d = d / jnp.linalg.norm(d, axis=-1, keepdims=True)
    points = jnp.array([0.3, 0.2, 0.1]) + 4.0 * (d @ _rotation(angles).T)
    return jnp.mean(k.mm(jnp.sin(points @ a), b) ** 2)


@program(
    "cameras and frames",
    lambda r: (r.normal(size=3) * 0.1, r.uniform(100, 110, size=(24, 3)), r.normal(size=(24, 2))),
    geometry=True,
)
def reprojection_of_far_points(k: Plain, angles, points, seen):
    pose = jnp.eye(4).at[:3, :3].set(_rotation(angles)).at[2, 3].set(5.0)
    homogeneous = jnp.concatenate([points, jnp.ones((24, 1))], -1)
    camera = homogeneous @ pose.T
    intrinsics = jnp.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])
    pixels = camera[:, :3] @ intrinsics.T
    error = pixels[:, :2] / pixels[:, 2:] - seen - 700.0
    return jnp.mean(jnp.sqrt(1 + error**2))


def _quaternion(q):
    w, x, y, z = jnp.moveaxis(q / jnp.linalg.norm(q, axis=-1, keepdims=True), -1, 0)
    entries = [
        *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    ]
    return jnp.stack(entries, -1).reshape(*q.shape[:-1], 3, 3)


@program(
    "cameras and frames",
    lambda r: (r.normal(size=(8, 8)), r.normal(size=(8, 6)) / 6, 30 * r.normal(size=(8, 3))),
    geometry=True,
)
def frames_updated_by_a_layer(k: Plain, features, w, t):
    """AlphaFold's structure module: small turns and shifts of frames, and an aligned error."""
    turn = jnp.broadcast_to(jnp.eye(3), (8, 3, 3))
    place = t
    for _ in range(4):
        update = k.mm(features, w)
        q = jnp.concatenate([jnp.ones((8, 1)), update[:, :3]], -1)
        place = place + jnp.einsum("nij,nj->ni", turn, update[:, 3:])
        turn = jnp.einsum("nij,njk->nik", turn, _quaternion(q))
    local = jnp.einsum("nji,nmj->nmi", turn, place[None] - place[:, None])
    start = t[None] - t[:, None]
    return jnp.mean(jnp.sqrt(jnp.sum((local - start) ** 2, -1) + 1.0))


@program(
    "cameras and frames",
    lambda r: (0.1 * r.normal(size=(60, 3)), r.normal(size=(60, 3)) + np.array([0, 0, 3])),
    geometry=True,
)
def a_chain_of_joints(k: Plain, angles, bones):
    def link(frame, s):
        turn, place = frame
        turn = turn @ _rotation(s[0])
        place = place + turn @ s[1]
        return (turn, place), place

    _, path = k.scan(link, (jnp.eye(3), jnp.zeros(3)), (angles, bones))
    return jnp.mean((path[1:] - path[:-1] - bones[1:]) ** 2)


@program(
    "cameras and frames",
    lambda r: (r.normal(size=(20, 3)) * 10, r.normal(size=(20, 3))),
    geometry=True,
)
def alignment_by_the_covariance(k: Plain, x, y):
    x = x - x.mean(0)
    y = x[:, ::-1] + y
    y = y - y.mean(0)
    covariance = x.T @ y
    u, _, vt = jnp.linalg.svd(covariance)
    return jnp.mean((x @ jax.lax.stop_gradient(u @ vt) - y) ** 2)


@program(
    "cameras and frames",
    lambda r: (r.normal(size=(16, 3)), r.normal(size=(9, 8)) / 3, r.normal(size=(8, 4)) / 3),
    geometry=True,
)
def equivariant_messages(k: Plain, x, a, b):
    offset = x[:, None] - x[None]
    square = jnp.einsum("ijc,ijc->ij", offset, offset)
    radial = jnp.exp(-((jnp.sqrt(square + 0.1)[..., None] - jnp.arange(9.0) / 2) ** 2))
    message = k.mm(jax.nn.silu(k.mm(radial, a)), b)[..., :1]
    moved = x + jnp.mean(offset * message, 1)
    turned = functools.reduce(jnp.matmul, [_rotation(jnp.full(3, 0.3))] * 2)
    return jnp.mean((moved @ turned.T) ** 2 * jnp.array([1.0, 2.0, 3.0]))
