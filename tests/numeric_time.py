"""Integrators and samplers: many small steps added to one state."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numeric_kit import Plain, program


def _field(rng: np.random.Generator) -> tuple:
    """A contraction's matrix, and a state."""
    return np.eye(4) + 0.1 * rng.normal(size=(4, 4)), rng.normal(size=(2, 4)) + 1.0


@program("integrators", _field)
def euler_from_a_computed_start(k: Plain, w, x):
    x = 1.0 * x
    x = k.fori(1000, lambda i, x: x - 1e-3 * k.mm(x, w), x)
    return jnp.mean(x**2)


@program("integrators", _field)
def euler_unrolled_from_an_argument(k: Plain, w, x):
    return jnp.mean(k.repeat(60, lambda i, x: x - 1e-3 * k.mm(x, w), x) ** 2)


@program(
    "integrators",
    lambda r: (
        r.normal(size=(6, 8)) / 3,
        r.normal(size=(8, 4)) / 3,
        np.eye(4) + 0.1 * r.normal(size=(4, 4)),
        r.normal(size=(2, 6)),
    ),
)
def ode_from_an_encoder(k: Plain, a, b, w, x):
    z = k.mm(jnp.tanh(k.mm(x, a)), b)
    z = k.up(z)
    z = k.fori(500, lambda i, z: z - 1e-3 * jnp.tanh(k.mm(z, w)), z)
    return jnp.mean(z**2)


@program("integrators", _field)
def rk4_of_a_small_network(k: Plain, w, x):
    h = 5e-3

    def f(x):
        return -jnp.tanh(k.mm(x, w))

    def step(x, _):
        a = f(x)
        b = f(x + 0.5 * h * a)
        c = f(x + 0.5 * h * b)
        d = f(x + h * c)
        return x + h / 6 * (a + 2 * b + 2 * c + d), None

    return jnp.mean(k.scan(step, x * 1.0, length=200)[0] ** 2)


@program("integrators", _field)
def leapfrog_in_a_dict(k: Plain, w, x):
    h = 1e-2

    def step(s, _):
        v = s["v"] - 0.5 * h * k.mm(s["x"], w)
        x = s["x"] + h * v
        return {"x": x, "v": v - 0.5 * h * k.mm(x, w)}, 0.5 * jnp.sum(v * v)

    state, energy = k.scan(step, {"x": x + 0.5, "v": jnp.zeros_like(x)}, length=200)
    return jnp.mean(state["x"] ** 2) + jnp.mean(energy)


@program("integrators", _field)
def vmapped_solves(k: Plain, w, x):
    def solve(x):
        step = jax.jit(lambda x: x - 2e-3 * jnp.sin(k.mm(w, x)))
        return k.fori(300, lambda i, x: step(x), x.reshape(4, 1)).sum()

    return jnp.mean(jax.vmap(solve)(x) ** 2)


@program("integrators", _field)
def a_frozen_row_is_selected_in_the_update(k: Plain, w, x):
    frozen = jnp.arange(2)[:, None] == 0

    def step(x, t):
        return jnp.where(frozen & (t > 100), x, x - 2e-3 * k.mm(x, w)), None

    return jnp.mean(k.scan(step, x.T.T * 2.0, jnp.arange(300))[0] ** 2)


@program("integrators", _field)
def a_rematerialized_step(k: Plain, w, x):
    step = jax.checkpoint(lambda x: x - 1e-3 * jnp.tanh(k.mm(x, w)))
    return jnp.mean(k.scan(lambda x, _: (step(x), None), 2.0 * x, length=300)[0] ** 2)


@program("integrators", _field)
def scans_in_a_scan(k: Plain, w, x):
    def inner(x, _):
        return x - 1e-3 * k.mm(x, w), None

    def outer(x, _):
        return k.scan(inner, x, length=25)[0], jnp.mean(x)

    x, means = k.scan(outer, x - 0.5, length=12)
    return jnp.mean(x**2) + jnp.mean(means)


@program("integrators", _field, differentiated=False)
def a_while_loop_until_a_time(k: Plain, w, x):
    def step(c):
        t, x = c
        return t + 2.0**-10, k.up(x - 1e-3 * k.mm(x, w))

    _, x = lax.while_loop(lambda c: c[0] < 0.5, step, (jnp.zeros(()), x * 1.0))
    return jnp.mean(x**2)


@program("integrators", _field)
def trajectory_written_into_a_buffer(k: Plain, w, x):
    def step(i, c):
        x, path = c
        x = x - 2e-3 * k.mm(x, w)
        row = x[None].astype(path.dtype)
        return x, lax.dynamic_update_slice(path, row, (i, 0, 0))

    x, path = k.fori(200, step, (x * 1.0, jnp.zeros((200, 2, 4))))
    return jnp.mean((path[1:] - path[:-1]) ** 2) * 1e5


@program("integrators", lambda r: (r.normal(size=(3, 3, 1, 1)) * 0.2, r.normal(size=(1, 8, 8, 1))))
def heat_equation_with_a_learned_stencil(k: Plain, kernel, u):
    dims = ("NHWC", "HWIO", "NHWC")
    step = lambda u, _: (u + 1e-2 * k.conv(u, kernel, dims), None)  # noqa: E731
    return jnp.mean(k.scan(step, u + 1.0, length=100)[0] ** 2)


# --- samplers ------------------------------------------------------------------------------------


@program("samplers", lambda r: (*_field(r), r.normal(size=(200, 2, 4))))
def langevin(k: Plain, w, x, noise):
    h = 1e-3

    def step(x, n):
        return x - h * k.mm(x, w) + jnp.sqrt(2 * h) * n, None

    return jnp.mean(k.scan(step, 1.0 * x, noise)[0] ** 2)


@program(
    "samplers", lambda r: (r.normal(size=(8, 4)) / 2, *_field(r)[1:], r.normal(size=(10, 2, 4)))
)
def hamiltonian_monte_carlo(k: Plain, w, x, momenta):
    h = 2e-2

    def energy(x):
        return 0.5 * jnp.sum(jnp.tanh(k.mm(x, w.T)) ** 2) + 0.05 * jnp.sum(x**2)

    def transition(x, p):
        p = p - 0.5 * h * jax.grad(energy)(x)

        def leap(c, _):
            x, p = c
            x = x + h * p
            return (x, p - h * jax.grad(energy)(x)), None

        (x, p), _ = k.scan(leap, (x, p), length=10)
        return x, energy(x)

    x, energies = k.scan(transition, x * 0.5, momenta)
    return jnp.mean(x**2) + jnp.mean(energies)


def _denoiser(r: np.random.Generator) -> tuple:
    return (
        r.normal(size=(5, 16)) / 2,
        r.normal(size=(16, 4)) / 4,
        r.normal(size=(8, 4)),
        r.normal(size=(50, 8, 4)),
    )


@program("samplers", _denoiser)
def diffusion_ancestral_sampling(k: Plain, a, b, x, noise):
    betas = jnp.linspace(1e-4, 2e-2, 50)
    kept = jnp.cumprod(1 - betas)

    def step(x, s):
        beta, bar, n, t = s
        time = jnp.broadcast_to(t / 50.0, (8, 1))
        inputs = jnp.concatenate([x, time], -1)
        eps = k.mm(jnp.tanh(k.mm(inputs, a)), b)
        mean = (x - beta / jnp.sqrt(1 - bar) * eps) / jnp.sqrt(1 - beta)
        return mean + jnp.sqrt(beta) * n, None

    xs = (betas[::-1], kept[::-1], noise, jnp.arange(50.0)[::-1])
    return jnp.mean(k.scan(step, x, xs)[0] ** 2)


@program("samplers", lambda r: (*_denoiser(r)[:2], r.normal(size=32)))
def diffusion_deterministic_sampling_unrolled(k: Plain, a, b, x):
    x = x.reshape(8, 4)
    sigmas = 10.0 * 0.8 ** np.arange(21)
    for high, low in itertools.pairwise(sigmas):
        level = jnp.full((8, 1), float(np.log(high)))
        d = k.mm(jnp.tanh(k.mm(jnp.concatenate([x, level], -1), a)), b)
        x = x + float(low - high) * d
    return jnp.mean(x**2)


@program(
    "samplers",
    lambda r: (r.normal(size=(4, 16)) / 2, r.normal(size=(16, 1)) / 4, r.normal(size=(4, 4))),
)
def langevin_by_the_gradient_of_an_energy(k: Plain, a, b, x):
    def energy(x):
        return jnp.sum(k.mm(jax.nn.softplus(k.mm(x, a)), b)) + 0.5 * jnp.sum(x**2)

    x = k.fori(200, lambda i, x: x - 2e-3 * jax.grad(energy)(x), x + 1.0)
    return jnp.mean(x**2)
