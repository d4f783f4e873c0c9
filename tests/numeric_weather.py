"""Statistics that are added and taken away again, and states in physical units."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain, program

# --- statistics added and removed ----------------------------------------------------------------


def _network(r: np.random.Generator) -> dict:
    return {
        "a": r.normal(size=(8, 16)) / 3,
        "b": r.normal(size=(16, 8)) / 4,
        "c": r.normal(size=(8, 4)) / 3,
    }


def _weather(shape: tuple[int, ...]) -> Any:
    """A network, normalized fields, and their mean and spread in kelvin."""

    def draw(r: np.random.Generator) -> tuple:
        mean, spread = 280 + 3 * r.normal(size=8), 15 + r.uniform(size=8)
        return _network(r), r.normal(size=(64, 8)), mean.reshape(shape), spread.reshape(shape)

    return draw


def _forecast(k: Plain, p, x):
    return k.mm(jnp.tanh(k.mm(x, p["a"])), p["b"])


@program("statistics added and removed", _weather((8,)))
def forecast_clipped_in_kelvin(k: Plain, p, x, mean, spread):
    """A forecast is made physical, clipped, and normalized again for the next layer."""
    kelvin = jnp.clip(_forecast(k, p, x) * spread + mean, 150.0, 400.0)
    return jnp.mean(k.mm((kelvin - mean) / spread, p["c"]) ** 2)


@program("statistics added and removed", _weather((8,)))
def mean_added_without_a_spread(k: Plain, p, x, mean, _spread):
    """Nothing but the mean: added to a layer's result, subtracted, into a layer."""
    return jnp.mean(k.mm((mean + _forecast(k, p, x)) - mean, p["c"]) ** 2)


_CHANNELS = np.array([280.0, 5e4, 101325.0, 8e-3]), np.array([15.0, 3e3, 1e3, 5e-3])


@program(
    "statistics added and removed",
    lambda r: (
        {"in": r.normal(size=(3, 3, 4, 8)) / 6, "out": r.normal(size=(3, 3, 8, 4)) / 8},
        r.normal(size=(2, 12, 12, 4)),
        *_CHANNELS,
    ),
)
def channels_of_a_convolution_in_their_units(k: Plain, p, x, mean, spread):
    """Temperature, geopotential, pressure and humidity: statistics per channel of an image."""
    dims = ("NHWC", "HWIO", "NHWC")
    y = k.conv(jax.nn.relu(k.conv(x, p["in"], dims)), p["out"], dims)
    fields = y * spread + mean
    fields = fields.at[..., 3].set(jnp.maximum(fields[..., 3], 0.0))  # no negative humidity
    again = (fields - mean) / spread
    return jnp.mean(k.conv(again, p["in"], dims) ** 2)


@program("statistics added and removed", lambda r: (_network(r), r.normal(size=(64, 8))))
def statistics_in_a_closure(k: Plain, p, x):
    """Mean and spread are arrays of the program's own module."""
    mean, spread = jnp.asarray(_LEVELS), 15.0
    kelvin = mean + spread * _forecast(k, p, x)
    kelvin = jnp.where(kelvin < 273.15, kelvin + 0.1 * (273.15 - kelvin), kelvin)
    return jnp.mean(k.mm((kelvin - mean) / spread, p["c"]) ** 2)


_LEVELS = 300 - 6.5 * np.linspace(0.3, 11.7, 8) ** 1.1


class _Forecast(nn.Module):
    """A layer of which the statistics are variables, but no parameters."""

    kit: Any

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.zeros, (8, 8))
        mean = self.variable("statistics", "mean", jnp.zeros, (8,)).value
        spread = self.variable("statistics", "spread", jnp.ones, (8,)).value
        kelvin = mean + spread * jnp.tanh(self.kit.mm(x, w))
        return self.kit.mm((kelvin - mean) / spread, w)


@program("statistics added and removed", _weather((8,)))
def statistics_in_a_collection_of_a_module(k: Plain, p, x, mean, spread):
    """Linen variables of a collection of their own."""
    params = {"w": p["a"][:, :8]}
    variables = {"params": params, "statistics": {"mean": mean, "spread": spread}}
    return jnp.mean(_Forecast(k).apply(variables, x) ** 2)


@program(
    "statistics added and removed",
    lambda r: (
        _network(r),
        280 + 10 * np.sin(np.arange(365)[:, None] / 58 + r.uniform(0, 6, size=8)),
        r.normal(size=(64, 8)),
        r.integers(0, 364, 64),
    ),
)
def anomalies_from_a_climatology(k: Plain, p, climate, x, day):
    """A table of daily means is looked up, and what is forecast is the departure from it."""
    today = climate[day] + 5 * jnp.tanh(x)
    tomorrow = _forecast(k, p, (today - climate[day]) / 5) + climate[day + 1]
    return jnp.mean(k.mm(tomorrow - climate[day], p["c"]) ** 2)


@program(
    "statistics added and removed",
    lambda r: (
        _network(r),
        r.normal(size=(6, 5, 8)),
        280 - 6.5 * np.arange(5.0)[:, None] + r.normal(size=(5, 1)),
        10 + r.uniform(size=(5, 1)),
    ),
)
def statistics_of_every_level(k: Plain, p, x, mean, spread):
    """Statistics of shape [levels, 1], which is repeated over the features; lapse rates."""
    kelvin = mean + spread * _forecast(k, p, x)
    lapse = kelvin[:, 1:] - kelvin[:, :-1] + 6.5
    return jnp.mean(k.mm(lapse / 10, p["c"]) ** 2)


# --- physical units ------------------------------------------------------------------------------


def _ring(r: np.random.Generator) -> tuple:
    """A closure's weights; pressure and wind on a ring of cells, nearly at rest."""
    weights = {"a": r.normal(size=(32, 16)) / 6, "b": r.normal(size=(16, 32)) / 4}
    waves = np.sin(2 * np.pi * np.arange(32) / 32 + r.uniform(0, 6, size=(4, 1)))
    return weights, 101325 + 300 * waves, r.normal(size=(4, 32))


@program("physical units", _ring)
def wind_driven_by_pressure(k: Plain, p, pressure, wind):
    """Differences of pressures of 1e5 Pa push a wind, which a network damps."""

    def step(state, _):
        pressure, wind = state
        slope = jnp.roll(pressure, -1, -1) - jnp.roll(pressure, 1, -1)
        drag = k.mm(jnp.tanh(k.mm(wind / 5, p["a"])), p["b"])
        wind = wind - 5e-3 * slope - 0.05 * drag
        pressure = pressure - 4.0 * (jnp.roll(wind, -1, -1) - jnp.roll(wind, 1, -1))
        return (pressure, wind), None

    pressure, wind = k.scan(step, (pressure, wind), length=40)[0]
    return jnp.mean(wind**2) + jnp.mean(((pressure - 101325.0) / 100) ** 2)


@program(
    "physical units",
    lambda r: (
        {"a": r.normal(size=(16, 24)) / 4, "b": r.normal(size=(24, 16)) / 5},
        300 - 6.5 * np.arange(16) / 2 + 2 * r.normal(size=(6, 16)),
        r.uniform(0, 1, size=(80, 6, 1)),
    ),
)
def radiating_column_of_air(k: Plain, p, kelvin, sun):
    """Temperatures radiate by their fourth power, mix with their neighbors, and are heated."""

    def step(t, s):
        heating = k.mm(jax.nn.silu(k.mm((t - 273.15) / 20, p["a"]) + s), p["b"])
        radiated = 5.67e-8 * t**4
        mixed = jnp.pad(t[:, 2:] - 2 * t[:, 1:-1] + t[:, :-2], ((0, 0), (1, 1)))
        return t + 0.05 * mixed + 0.02 * heating - 1e-4 * (radiated - 240.0), None

    end = k.scan(step, kelvin, sun)[0]
    return jnp.mean((end - kelvin) ** 2)


@program(
    "physical units",
    lambda r: (
        {"a": r.normal(size=(3, 16)) / 2, "b": r.normal(size=(16, 3)) / 8},
        np.stack(
            [290 + 5 * r.normal(size=64), 1e3 * r.uniform(size=64), 0.01 * r.uniform(size=64)], -1
        ),
    ),
)
def change_of_moist_static_energy(k: Plain, p, air):
    """Energies of 3e5 J/kg before and after a small exchange: their difference is the loss."""
    units = jnp.array([5.0, 500.0, 5e-3])
    normal = (air - jnp.array([290.0, 500.0, 5e-3])) / units

    def energy(air):
        return 1004.0 * air[:, 0] + 9.81 * air[:, 1] + 2.5e6 * air[:, 2]

    after = air + 0.05 * units * k.mm(jnp.tanh(k.mm(normal, p["a"])), p["b"])
    return jnp.mean(((energy(after) - energy(air)) / 1e2) ** 2)


@program(
    "physical units",
    lambda r: (
        {"a": r.normal(size=(6, 16)) / 3, "b": r.normal(size=(16, 3)) / 4},
        np.array([[7000.0, 0, 0], [0, 7200.0, 0]]) + r.normal(size=(2, 3)),
        np.array([[0, 7.5, 0.5], [-7.4, 0, 0.3]]),
    ),
)
def satellites_with_learned_thrust(k: Plain, p, place, speed):
    """Kilometres and seconds; a network steers, and gravity needs the cube of the distance."""

    def force(place, speed):
        state = jnp.concatenate([place / 7000, speed / 7.5], -1)
        thrust = 1e-4 * k.mm(jnp.tanh(k.mm(state, p["a"])), p["b"])
        distance = jnp.sqrt(jnp.sum(place**2, -1, keepdims=True))
        return thrust - 398600.0 * place / distance**3

    def step(state, _):
        place, speed = state
        speed = speed + 5.0 * force(place, speed)
        return (place + 10.0 * speed, speed + 5.0 * force(place + 10.0 * speed, speed)), None

    end, _ = k.scan(step, (place, speed), length=60)[0]
    free, _ = k.scan(lambda s, _: step(s, None), (place, speed), length=1)[0]
    return jnp.mean(((end - free) / 1e3) ** 2)
