"""Experts, graphs, short convolutions, modulation, ensembles, statistics that run along."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numeric_kit import Plain, program

# --- experts by einsum ---------------------------------------------------------------------------


def _experts(r: np.random.Generator) -> tuple:
    weights = {
        "in": r.normal(size=(8, 8)) / 3,
        "router": r.normal(size=(8, 4)),
        "up": r.normal(size=(4, 8, 16)) / 3,
        "down": r.normal(size=(4, 16, 8)) / 4,
    }
    return weights, r.normal(size=(2, 24, 8)), np.argsort(r.normal(size=(2, 24, 4)), -1)[..., 0]


def _places(wanted, room: int):
    """bool[g, s, e, c]: the place that a token has at its expert, if there is one."""
    place = jnp.cumsum(wanted, axis=1) * wanted - 1
    return jax.nn.one_hot(place, room, dtype=jnp.bool_)


@program("experts", _experts)
def tokens_dispatched_by_a_boolean_mask(k: Plain, p, x, chosen):
    """Dispatched and combined by einsum with a bool mask, as in Switch; experts are given."""
    mask = _places(jax.nn.one_hot(chosen, 4, dtype=jnp.int32), 8)
    gate = jax.nn.softmax(k.up(k.mm(x, p["router"])))
    sent = k.einsum("gsec,gsd->gecd", mask, k.mm(x, p["in"]))
    h = jax.nn.gelu(k.einsum("gecd,edf->gecf", sent, p["up"]))
    h = k.einsum("gecf,efd->gecd", h, p["down"])
    combine = jnp.einsum("gse,gsec->gsec", gate, mask)
    return jnp.mean((x + k.einsum("gecd,gsec->gsd", h, combine)) ** 2)


@program("experts", _experts)
def experts_kept_in_balance(k: Plain, p, x, chosen):
    """Fractions of tokens counted by an integer mask, times mean gates; a z-loss of the logits."""
    logits = k.up(k.mm(x, p["router"]))
    gate = jax.nn.softmax(logits)
    mask = jax.nn.one_hot(chosen, 4, dtype=jnp.int32)
    fraction = jnp.einsum("gse,gs->ge", mask, jnp.ones((2, 24))) / 24
    balance = 4 * jnp.mean(jnp.sum(fraction * jnp.mean(gate, 1), -1))
    z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    h = k.einsum("gse,gsd,edf->gsf", mask, x, p["up"])
    return (balance - 1.0) * 10 + 0.1 * z + jnp.mean(jnp.tanh(h) ** 2)


# --- graphs --------------------------------------------------------------------------------------


def _graph(r: np.random.Generator) -> tuple:
    weights = {
        "edge": r.normal(size=(17, 8)) / 4,
        "node": r.normal(size=(16, 8)) / 4,
        "score": r.normal(size=(8, 1)),
    }
    senders, receivers = r.integers(0, 30, size=(2, 240))
    return weights, r.normal(size=(30, 8)), r.uniform(size=(30, 3)), senders, receivers


@program("graphs", _graph)
def messages_of_an_edge_network(k: Plain, p, x, place, senders, receivers):
    """Interaction network: both ends and their distance make a message; three rounds."""
    place = 1000.0 + 10 * place  # metres on a map
    distance = jnp.sqrt(jnp.sum((place[senders] - place[receivers]) ** 2, -1, keepdims=True) + 1e-3)
    for _ in range(3):
        ends = jnp.concatenate([x[senders], x[receivers], distance], -1)
        received = jax.ops.segment_sum(jax.nn.silu(k.mm(ends, p["edge"])), receivers, 30)
        x = x + 0.3 * jnp.tanh(k.mm(jnp.concatenate([x, received], -1), p["node"]))
    return jnp.mean(x**2)


@program("graphs", _graph)
def attention_over_the_edges_of_a_node(k: Plain, p, x, _place, senders, receivers):
    """Graph attention: a softmax over segments, from segment_max and segment_sum."""
    h = k.up(k.mm(x, p["node"][:8]))
    score = k.up(k.mm(jnp.tanh(h[senders] + h[receivers]), p["score"]))[:, 0] * 3
    top = jax.ops.segment_max(lax.stop_gradient(score), receivers, 30)
    weight = jnp.exp(score - top[receivers])
    total = jax.ops.segment_sum(weight, receivers, 30)
    weight = weight / total[receivers]
    out = jax.ops.segment_sum(weight[:, None] * h[senders], receivers, 30)
    entropy = -jax.ops.segment_sum(weight * jnp.log(weight + 1e-9), receivers, 30)
    return jnp.mean(jnp.tanh(out) ** 2) + 0.1 * jnp.mean(entropy)


@program("graphs", _graph)
def heat_that_flows_along_edges(k: Plain, p, x, _place, senders, receivers):
    """Temperatures of nodes near 300 K; differences flow, at rates that a network learns."""
    rate = jax.nn.softplus(k.up(k.mm(jnp.concatenate([x[senders], x[receivers]], -1), p["node"])))
    degree = jax.ops.segment_sum(jnp.ones(240), receivers, 30)[:, None] + 1

    def step(t, _):
        flow = rate * (t[senders] - t[receivers])
        return t + 0.05 * jax.ops.segment_sum(flow, receivers, 30) / degree, None

    t = k.scan(step, 300 + x, length=50)[0]
    return jnp.mean((t - jnp.mean(t, 0)) ** 2)


# --- short convolutions --------------------------------------------------------------------------


def _depthwise(k: Plain, x, kernel):
    """Causal, one filter for each channel: [batch, time, channels] by [taps, channels]."""

    def convolve(x, kernel):
        taps, channels = kernel.shape
        return lax.conv_general_dilated(
            x,
            kernel[:, None],
            (1,),
            [(taps - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=channels,
        )

    return k._product(convolve, x, kernel)


def _sequence(taps: int):
    def draw(r: np.random.Generator) -> tuple:
        weights = {
            "in": r.normal(size=(8, 32)) / 3,
            "taps": r.normal(size=(taps, 16)) / np.sqrt(taps),
            "dt": r.normal(size=(16, 16)) / 8,
            "b": r.normal(size=(16, 4)) / 3,
            "c": r.normal(size=(16, 4)) / 3,
            "rate": np.log(np.arange(1.0, 5.0)) * np.ones((16, 1)),
            "out": r.normal(size=(16, 4)) / 4,
        }
        return weights, r.normal(size=(2, 200, 8)) + 0.5

    return draw


@program("short convolutions", _sequence(4))
def selective_state_space_of_four_taps(k: Plain, p, x):
    """Mamba: a depthwise convolution of four taps, steps that depend on the input, a scan."""
    h, gate = jnp.split(k.mm(x, p["in"]), 2, -1)
    h = jax.nn.silu(_depthwise(k, h, p["taps"]))
    dt = 0.1 * jax.nn.softplus(k.up(k.mm(h, p["dt"])) - 3)
    decay = jnp.exp(-dt[..., None] * jnp.exp(p["rate"]))
    drive = (dt * h)[..., None] * k.mm(h, p["b"])[..., None, :]

    def step(state, inputs):
        decay, drive, c = inputs
        state = decay * state + drive
        return state, jnp.einsum("bdn,bn->bd", state, c)

    times = (jnp.moveaxis(v, 1, 0) for v in (decay, k.up(drive), k.up(k.mm(h, p["c"]))))
    y = jnp.moveaxis(k.scan(step, jnp.zeros((2, 16, 4)), tuple(times))[1], 0, 1)
    return jnp.mean(k.mm(y * jax.nn.silu(gate), p["out"]) ** 2) * 10


@program("short convolutions", _sequence(2))
def token_shift_of_two_taps(k: Plain, p, x):
    """RWKV's shift by a convolution of two taps, and sums with decay over 200 tokens."""
    h, gate = jnp.split(k.mm(x, p["in"]), 2, -1)
    mixed = _depthwise(k, h, p["taps"])
    decay = jnp.exp(-0.02 * jnp.exp(p["rate"][0, 0]))

    def step(sums, key):
        sums = jax.tree.map(lambda s, v: decay * s + v, sums, (key * jnp.exp(key), jnp.exp(key)))
        return sums, sums[0] / sums[1]

    zero = jnp.zeros((2, 16))
    keys = jnp.moveaxis(k.up(jnp.tanh(mixed)), 1, 0)
    y = jnp.moveaxis(k.scan(step, (zero, zero), keys)[1], 0, 1)
    return jnp.mean(k.mm(y * jax.nn.sigmoid(gate), p["out"]) ** 2)


@program("short convolutions", _sequence(7))
def gated_filters_of_seven_taps(k: Plain, p, x):
    """Two gated convolutions, and their average over the last hundred steps, carried along."""
    h, gate = jnp.split(k.mm(x, p["in"]), 2, -1)
    h = jax.nn.gelu(_depthwise(k, h * jax.nn.sigmoid(gate), p["taps"]))
    h = jnp.moveaxis(k.up(_depthwise(k, h, p["taps"])), 1, 0)
    slow = k.scan(lambda m, h: (0.99 * m + 0.01 * h,) * 2, jnp.ones((2, 16)), h)[1]
    return jnp.mean(k.mm(slow, p["out"]) ** 2) + 1e3 * jnp.mean((slow[1:] - slow[:-1]) ** 2)


# --- modulation and adapters ---------------------------------------------------------------------


@program(
    "modulation",
    lambda r: (
        {
            "film": r.normal(size=(12, 32)) / 20,
            "w": r.normal(size=(8, 16)) / 3,
            "out": r.normal(size=(16, 4)) / 4,
        },
        r.normal(size=(64, 8)),
        np.stack([r.uniform(-90, 90, 64), r.uniform(0, 360, 64)], -1),
    ),
)
def modulated_by_latitude_and_longitude(k: Plain, p, x, degrees):
    """FiLM by an encoding of coordinates given in degrees, at frequencies up to 2^5."""
    # The second half of the waves is of longitude alone, where a thirtieth of a degree is seen.
    radians = degrees * (jnp.pi / 180)
    waves = jnp.concatenate([radians[:, :1], radians[:, 1:] * 2.0 ** jnp.arange(5)], -1)
    encoded = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
    scale, shift = jnp.split(k.mm(encoded, p["film"]), 2, -1)
    h = k.mm(x, p["w"]) * (1 + scale) + shift
    return jnp.mean(k.mm(jnp.tanh(h), p["out"]) ** 2)


@program(
    "modulation",
    lambda r: (
        {"a": r.normal(size=(16, 4)) / 4, "b": r.normal(size=(4, 16)) * 0.004},
        r.normal(size=(16, 8)) / 3,
        r.normal(size=(64, 16)),
        r.normal(size=(64, 16)),
    ),
)
def low_rank_update_beside_what_is_cached(k: Plain, p, w, x, cached):
    """LoRA beside a frozen layer's cached output, and a penalty of how far it moves that."""
    total = cached + 2.0 * k.mm(k.mm(x, p["a"]), p["b"])
    y = k.mm(jax.nn.silu(total), w)
    return jnp.mean(y**2) + 2e3 * jnp.mean((total - cached) ** 2)


@program(
    "modulation",
    lambda r: (
        {
            "a": r.normal(size=(6, 16)) / 3 + 0.02 * r.normal(size=(5, 6, 16)),
            "b": r.normal(size=(16, 1)) / 4 + 0.02 * r.normal(size=(5, 16, 1)),
        },
        r.normal(size=(64, 6)),
        r.normal(size=(64, 1)) + 3,
    ),
)
def disagreement_of_an_ensemble(k: Plain, p, x, offset):
    """Five members under vmap, all near one prediction: their spread is what is asked for."""

    def member(a, b):
        return offset + k.mm(jnp.tanh(k.mm(x, a)), b)

    y = jax.vmap(member)(p["a"], p["b"])
    return 10 * jnp.mean(jnp.var(y, axis=0)) + jnp.mean((jnp.mean(y, 0) - 3) ** 2)


# --- rates and running statistics ----------------------------------------------------------------


@program(
    "rates",
    lambda r: (
        {"w": r.normal(size=(4, 4)) / 3 + np.eye(4), "rate": r.normal(size=(6, 1)) / 2},
        r.normal(size=(8, 4)) + 1,
        r.normal(size=(8, 6)),
    ),
)
def step_sizes_from_a_layer(k: Plain, p, x, context):
    """A step of .2 + .1 sigmoid(layer), taken 200 times and with a hundredth of the field."""
    rate = 0.2 + 0.1 * jax.nn.sigmoid(k.mm(context, p["rate"]))
    step = lambda x, _: (x - rate * 0.01 * k.mm(x, p["w"]), jnp.mean(rate))  # noqa: E731
    x, rates = k.scan(step, k.up(x), length=200)
    return jnp.mean(x**2) + jnp.mean((rates - 0.25) ** 2)


@program(
    "rates",
    lambda r: (
        {"w": r.normal(size=(4, 2)) / 2, "rates": np.full(50, -5.0) + 0.3 * r.normal(size=50)},
        r.normal(size=(32, 4)),
        r.normal(size=(32, 2)),
    ),
)
def descent_with_a_learned_rate_for_each_step(k: Plain, p, x, y):
    """Meta-SGD: the rates are parameters, and so is where it starts."""

    def error(w):
        return jnp.mean((k.mm(x, w) - y) ** 2)

    def step(w, rate):
        return w - jnp.exp(rate) * jax.grad(error)(w), None

    return error(k.scan(step, p["w"], p["rates"])[0])


@program(
    "rates",
    lambda r: (
        {"w": r.normal(size=(6, 8)) / 2, "out": r.normal(size=(8, 3)) / 3},
        r.normal(size=(50, 16, 6)),
        np.full(8, 50.0),
    ),
)
def mean_and_variance_merged_along_a_stream(k: Plain, p, xs, offset):
    """Welford's statistics of a layer's results near 50, batch by batch, and then used."""

    def merge(state, x):
        count, mean, spread = state
        y = k.up(k.mm(x, p["w"])) + offset
        new = count + 16.0
        delta = y.mean(0) - mean
        spread = spread + 16 * y.var(0) + delta**2 * count * 16 / new
        return (new, mean + delta * 16 / new, spread), y

    start = jnp.zeros(()), jnp.zeros(8), jnp.zeros(8)
    (count, mean, spread), ys = k.scan(merge, start, xs)
    normal = (ys - mean) / jnp.sqrt(spread / count + 1e-3)
    return jnp.mean(k.mm(jnp.tanh(normal), p["out"]) ** 2) + jnp.mean((mean - offset) ** 2)
