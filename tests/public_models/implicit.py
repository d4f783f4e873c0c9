"""Integrators and fixed points, differentiated by the adjoint or implicitly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.ode import odeint

from public_models.registry import Data, PublicModel, cross_entropy, init, square, zoo


class VectorField(nn.Module):
    """dy/dt of the neural ODEs below."""

    width: int

    @nn.compact
    def __call__(self, y: jax.Array, t: jax.Array) -> jax.Array:
        time = jnp.broadcast_to(t, (*y.shape[:-1], 1))
        h = nn.tanh(nn.Dense(24)(jnp.concatenate([y, time], axis=-1)))
        return nn.Dense(self.width)(h)


def trajectories(seed: int) -> dict[str, jax.Array]:
    """Noisy spirals: starting points and where each is at time one."""
    start = Data(seed).normal(12, 4)
    rotation = np.kron(np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]]))
    return {"start": start, "end": 0.7 * start @ jnp.asarray(rotation)}


@zoo
def neural_ode() -> PublicModel:
    """Adaptive Dormand-Prince with the adjoint method (Chen et al. 2018), JAX's own `odeint`."""
    field = VectorField(4)
    times = jnp.linspace(0.0, 1.0, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        # Tolerances that a 16-bit vector field can meet: its rounding looks like stiffness to the
        # step-size control, which would otherwise shrink the step without end.
        path = odeint(
            lambda y, t, p: field.apply(p, y, t),
            batch["start"],
            times,
            params,
            rtol=1e-2,
            atol=1e-2,
            mxstep=64,
        )
        return square(path[-1], batch["end"])

    params = init(field, jnp.zeros((1, 4)), jnp.zeros(()))
    return PublicModel(params, trajectories, loss)


@zoo
def rk4_adjoint() -> PublicModel:
    """Fixed-step Runge-Kutta 4 whose backward integrates the adjoint, as a custom_vjp."""
    field = VectorField(4)
    steps = 8

    def integrate(derivative: Callable[..., Any], state: Any, start: float, end: float) -> Any:
        dt = (end - start) / steps

        def step(state: Any, i: jax.Array) -> tuple[Any, None]:
            t = start + i * dt

            def moved(slope: Any, by: float) -> Any:
                return jax.tree.map(lambda s, k: s + by * k, state, slope)

            k1 = derivative(state, t)
            k2 = derivative(moved(k1, dt / 2), t + dt / 2)
            k3 = derivative(moved(k2, dt / 2), t + dt / 2)
            k4 = derivative(moved(k3, dt), t + dt)
            state = jax.tree.map(
                lambda s, a, b, c, d: s + dt / 6 * (a + 2 * b + 2 * c + d), state, k1, k2, k3, k4
            )
            return state, None

        return lax.scan(step, state, jnp.arange(steps))[0]

    @jax.custom_vjp
    def solve(params: Any, start: jax.Array) -> jax.Array:
        return integrate(lambda y, t: field.apply(params, y, t), start, 0.0, 1.0)

    def solve_fwd(params: Any, start: jax.Array) -> tuple[jax.Array, Any]:
        end = solve(params, start)
        return end, (params, end)

    def solve_bwd(residuals: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        params, end = residuals

        def augmented(state: Any, t: jax.Array) -> Any:
            y, adjoint, _ = state
            slope, pullback = jax.vjp(lambda y, p: field.apply(p, y, t), y, params)
            dy, dparams = pullback(adjoint)
            return slope, -dy, jax.tree.map(jnp.negative, dparams)

        zeros = jax.tree.map(jnp.zeros_like, params)
        _, adjoint, dparams = integrate(augmented, (end, grad, zeros), 1.0, 0.0)
        return dparams, adjoint

    solve.defvjp(solve_fwd, solve_bwd)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return square(solve(params, batch["start"]), batch["end"])

    params = init(field, jnp.zeros((1, 4)), jnp.zeros(()))
    return PublicModel(params, trajectories, loss)


@zoo
def deep_equilibrium() -> PublicModel:
    """Fixed point by a while_loop, differentiated implicitly by another (Bai et al. 2019)."""

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, z: jax.Array, x: jax.Array) -> jax.Array:
            inner = nn.Dense(16, kernel_init=nn.initializers.normal(0.1))(z)
            return nn.tanh(inner + nn.Dense(16)(x))

    cell = Cell()

    def fixed_point(step: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        def unfinished(state: Any) -> jax.Array:
            i, previous, current = state
            return (i < 30) & (jnp.max(jnp.abs(current - previous)) > 1e-5)

        def advance(state: Any) -> Any:
            i, _, current = state
            return i + 1, current, step(current)

        return lax.while_loop(unfinished, advance, (0, start, step(start)))[2]

    @jax.custom_vjp
    def equilibrium(params: Any, x: jax.Array) -> jax.Array:
        return fixed_point(lambda z: cell.apply(params, z, x), jnp.zeros((x.shape[0], 16)))

    def forward(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        z = equilibrium(params, x)
        return z, (params, x, z)

    def backward(residuals: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        params, x, z = residuals
        _, pull_z = jax.vjp(lambda z: cell.apply(params, z, x), z)
        adjoint = fixed_point(lambda u: grad + pull_z(u)[0], grad)
        _, pull = jax.vjp(lambda p, x: cell.apply(p, z, x), params, x)
        return pull(adjoint)

    equilibrium.defvjp(forward, backward)

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(12, 8)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(equilibrium(params["cell"], batch["x"]) @ params["out"], batch["y"])

    params = {
        "cell": init(cell, jnp.zeros((1, 16)), jnp.zeros((1, 8))),
        "out": 0.25 * Data(1).normal(16, 5),
    }
    return PublicModel(params, batch, loss)
