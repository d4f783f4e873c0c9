"""Models around a solver of diffrax, Optimistix or JAXopt."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from public_models.implicit import VectorField, trajectories
from public_models.registry import Data, PublicModel, cross_entropy, init, square, zoo


@zoo(requires="diffrax")
def diffrax_ode() -> PublicModel:
    """Neural ODE by Tsit5; the default adjoint is a custom_vjp with symbolic zeros."""
    import diffrax

    field = VectorField(4)

    def slope(t: jax.Array, y: jax.Array, params: Any) -> jax.Array:
        return field.apply(params, y, t)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        path = diffrax.diffeqsolve(
            diffrax.ODETerm(slope),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=batch["start"],
            args=params,
            max_steps=16,
        )
        return square(path.ys[-1], batch["end"])

    params = init(field, jnp.zeros((1, 4)), jnp.zeros(()))
    return PublicModel(params, trajectories, loss)


@zoo(requires="optimistix")
def optimistix_equilibrium() -> PublicModel:
    """Deep equilibrium layer: Newton's method, differentiated by the implicit function theorem."""
    import optimistix

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, z: jax.Array, x: jax.Array) -> jax.Array:
            inner = nn.Dense(12, kernel_init=nn.initializers.normal(0.1))(z)
            return nn.tanh(inner + nn.Dense(12)(x))

    cell = Cell()

    def equilibrium(params: Any, x: jax.Array) -> jax.Array:
        def residual(z: jax.Array, args: Any) -> jax.Array:
            params, x = args
            return z - cell.apply(params, z, x)

        solver = optimistix.Newton(rtol=1e-3, atol=1e-3)
        found = optimistix.root_find(residual, solver, jnp.zeros(12), (params, x), max_steps=16)
        return found.value

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(8, 6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        z = jax.vmap(equilibrium, (None, 0))(params["cell"], batch["x"])
        return cross_entropy(z @ params["out"], batch["y"])

    params = {
        "cell": init(cell, jnp.zeros(12), jnp.zeros(6)),
        "out": 0.3 * Data(1).normal(12, 5),
    }
    return PublicModel(params, batch, loss)


@zoo(requires="jaxopt")
def jaxopt_bilevel() -> PublicModel:
    """Features trained through a ridge regression that gradient descent solves to the end."""
    with warnings.catch_warnings():  # "JAXopt is no longer maintained", at import
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt

    class Features(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.tanh(nn.Dense(8)(nn.tanh(nn.Dense(24)(x))))

    features = Features()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        x = data.rng.standard_normal((2, 32, 5))
        y = np.sin(x[..., 0]) * x[..., 1]
        return {"x": jnp.asarray(x), "y": jnp.asarray(y)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        x, y = batch["x"], batch["y"]

        def ridge(weights: jax.Array, penalty: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
            # `y` is an argument: see docs/limits.md on derivative rules that close over a value.
            return square(h @ weights, y) + jnp.exp(penalty) * jnp.sum(weights**2)

        solver = jaxopt.GradientDescent(ridge, maxiter=50, tol=1e-4, implicit_diff=True)
        h = features.apply(params["features"], x[0])
        weights = solver.run(jnp.zeros(8), params["penalty"], h, y[0]).params
        return square(features.apply(params["features"], x[1]) @ weights, y[1])

    params = {"features": init(features, jnp.zeros((1, 5))), "penalty": jnp.asarray(-2.0)}
    return PublicModel(params, batch, loss)
