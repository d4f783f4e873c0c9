"""Libraries whose gradients are rules of their own: diffrax, equinox, optimistix, jaxopt.

Each loss differentiates through a library's default rule; the gradient under autocast is compared
with the float32 one, in value and in structure.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp

from support import contraction_dtypes, float16_is_slow, slow_when

equinox = pytest.importorskip("equinox")

WIDTH = 8
X = jnp.linspace(-1.0, 1.0, 2 * WIDTH).reshape(2, WIDTH)


def weights(key: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(key), 2)
    return {
        "hidden": jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH,
        "out": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH,
    }


def field(params: Any, x: Any) -> Any:
    """A small network: the right-hand side, the residual, the optimality condition."""
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def diffrax_loss(params: Any, x: Any, adjoint: str = "RecursiveCheckpointAdjoint") -> Any:
    diffrax = pytest.importorskip("diffrax")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda _t, y, p: field(p, y)),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.25,
        y0=x,
        args=params,
        adjoint=getattr(diffrax, adjoint)(),
    )
    return jnp.sum(solution.ys**2)


def equinox_vjp_loss(params: Any, x: Any) -> Any:
    """filter_custom_vjp: only the perturbed leaves get a gradient, and the rule knows which."""

    @equinox.filter_custom_vjp
    def layer(vjp_arg, x):
        return field(vjp_arg, x)

    @layer.def_fwd
    def fwd(perturbed, vjp_arg, x):
        assert all(jax.tree.leaves(perturbed))
        return field(vjp_arg, x), None

    @layer.def_bwd
    def bwd(_residuals, grad, _perturbed, vjp_arg, x):
        return jax.vjp(lambda p: field(p, x), vjp_arg)[1](2 * grad)[0]

    return jnp.sum(layer(params, x) ** 2)


def equinox_checkpoint_loss(params: Any, x: Any) -> Any:
    """filter_jit and filter_checkpoint around a module."""
    layer = equinox.filter_checkpoint(equinox.filter_jit(functools.partial(field, params)))
    return jnp.sum(layer(layer(x)) ** 2)


def equinox_loop_loss(params: Any, x: Any) -> Any:
    """The loop of diffrax's default adjoint: its rule reads which of its values are perturbed."""
    internal = pytest.importorskip("equinox.internal")
    final = internal.while_loop(
        lambda carry: carry[0] < 3,
        lambda carry: (carry[0] + 1, carry[1] + field(params, carry[1])),
        (0, x),
        max_steps=4,
        kind="checkpointed",
    )
    return jnp.sum(final[1] ** 2)


def optimistix_root_loss(params: Any, x: Any) -> Any:
    optimistix = pytest.importorskip("optimistix")
    solution = optimistix.root_find(
        lambda y, args: y - 0.5 * field(args, y) - x,
        optimistix.Newton(rtol=1e-4, atol=1e-4),
        x,
        args=params,
        max_steps=32,
        throw=False,
    )
    return jnp.sum(solution.value**2)


def optimistix_least_squares_loss(params: Any, x: Any) -> Any:
    optimistix = pytest.importorskip("optimistix")
    solution = optimistix.least_squares(
        lambda y, args: y + 0.5 * field(args, y) - x,
        optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4),
        x,
        args=params,
        max_steps=32,
        throw=False,
    )
    return jnp.sum(solution.value**2)


def jaxopt_loss(params: Any, x: Any, *, closes: bool) -> Any:
    """Implicit differentiation of a fixed point; `closes`: of an objective that closes over x."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it says that it is not maintained
        jaxopt = pytest.importorskip("jaxopt")
    if closes:
        solver = jaxopt.FixedPointIteration(lambda y, p: x + 0.5 * field(p, y), maxiter=20)
        return jnp.sum(solver.run(x, params).params ** 2)
    solver = jaxopt.FixedPointIteration(lambda y, p, x: x + 0.5 * field(p, y), maxiter=20)
    return jnp.sum(solver.run(x, params, x).params ** 2)


def jaxopt_descent_loss(params: Any, x: Any) -> Any:
    """A ridge regression by gradient descent; its objective closes over the data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jaxopt = pytest.importorskip("jaxopt")
    target = jnp.sum(x, axis=1)

    def objective(w, p):
        return jnp.mean((field(p, x) @ w - target) ** 2) + 0.5 * jnp.sum(w**2)

    solver = jaxopt.GradientDescent(objective, maxiter=50, implicit_diff=True)
    return jnp.sum(solver.run(jnp.zeros(WIDTH), params).params ** 2)


LOSSES = {
    "diffrax": diffrax_loss,
    "diffrax, backsolve": functools.partial(diffrax_loss, adjoint="BacksolveAdjoint"),
    "equinox, filter_custom_vjp": equinox_vjp_loss,
    "equinox, filter_checkpoint": equinox_checkpoint_loss,
    "equinox, checkpointed loop": equinox_loop_loss,
    "optimistix, root": optimistix_root_loss,
    "optimistix, least squares": optimistix_least_squares_loss,
    "jaxopt, fixed point": functools.partial(jaxopt_loss, closes=False),
    "jaxopt, fixed point that closes over data": functools.partial(jaxopt_loss, closes=True),
    "jaxopt, descent that closes over data": jaxopt_descent_loss,
}


# They take seconds each, and are of a kind with another.
LONG = (
    "optimistix, root",
    "diffrax",  # a checkpointed loop of equinox; what of it is low is asked below
    "diffrax, backsolve",
    "optimistix, least squares",
    "jaxopt, fixed point",
    "jaxopt, fixed point that closes over data",
)


@slow_when(lambda name: name in LONG)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_float32_but_for_rounding(name: str) -> None:
    loss, params = LOSSES[name], weights()
    want = jax.jit(jax.grad(loss))(params, X)
    got = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_bfloat16")))(params, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for leaf, reference in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert leaf.dtype == reference.dtype == jnp.float32
        # Some ten roundings of relative size 2**-9. The descent subtracts its target from a
        # product that left in 16 bits, so what is left of it is less exact.
        error = jnp.linalg.norm(leaf - reference) / jnp.linalg.norm(reference)
        assert float(error) < (0.08 if "descent" in name else 0.02)
        assert float(jnp.linalg.norm(reference)) > 0


def test_filter_grad_and_filter_jit_of_an_autocast() -> None:
    mlp = equinox.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=jax.random.key(0))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    want = equinox.filter_jit(equinox.filter_grad(loss))(mlp, X)
    got = equinox.filter_jit(equinox.filter_grad(jaxmp.autocast(loss, "mixed_bfloat16")))(mlp, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 0.04


@pytest.mark.slow
def test_the_network_inside_a_solver_is_low() -> None:
    counts = contraction_dtypes(
        jax.grad(jaxmp.autocast(diffrax_loss, "mixed_bfloat16")), weights(), X
    )
    assert counts["bfloat16"] >= 4


@pytest.mark.slow
def test_diffrax_s_own_training_loop() -> None:
    """The neural ODE of its documentation: a solver with the default adjoint under `jax.vmap`."""
    diffrax, optax = pytest.importorskip("diffrax"), pytest.importorskip("optax")
    mlp = equinox.nn.MLP(2, 2, 16, 1, jax.nn.softplus, jnp.tanh, key=jax.random.key(2))
    ts = jnp.linspace(0.0, 1.0, 5)
    starts = jax.random.uniform(jax.random.key(3), (8, 2), minval=-0.6, maxval=1.0)
    ys = starts[:, None] * jnp.exp(-ts)[:, None]

    def solve(model: Any, y0: jax.Array) -> jax.Array:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda _t, y, _: model(y)),
            diffrax.Tsit5(),
            ts[0],
            ts[-1],
            ts[1] - ts[0],
            y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-2),
            saveat=diffrax.SaveAt(ts=ts),
        ).ys

    def loss(model: Any, ys: jax.Array) -> jax.Array:
        return jnp.mean((ys - jax.vmap(solve, (None, 0))(model, ys[:, 0])) ** 2)

    def trained(loss: Any) -> list[float]:
        model, losses, tx = mlp, [], optax.adabelief(3e-2)
        state = tx.init(equinox.filter(model, equinox.is_inexact_array))

        @equinox.filter_jit
        def step(model: Any, state: Any) -> Any:
            value, grads = equinox.filter_value_and_grad(loss)(model, ys)
            updates, state = tx.update(grads, state)
            return value, equinox.apply_updates(model, updates), state

        for _ in range(20):
            value, model, state = step(model, state)
            losses.append(float(value))
        return losses

    want, got = trained(loss), trained(jaxmp.autocast(loss, "mixed_bfloat16"))
    assert want[-1] < 0.3 * want[0]
    assert got == pytest.approx(want, rel=0.1)
    grad = equinox.filter_grad(jaxmp.autocast(loss, "mixed_bfloat16"))
    assert contraction_dtypes(lambda ys: grad(mlp, ys), ys)["bfloat16"] >= 4


@float16_is_slow
@pytest.mark.parametrize(("policy", "steps"), [("mixed_bfloat16", 1219), ("mixed_float16", 440)])
def test_an_adaptive_solver_takes_few_steps_by_the_cures_of_the_limits(policy, steps):
    """Rounding is noise to its step controller: that of docs/limits.md, with its figures."""
    diffrax = pytest.importorskip("diffrax")
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = jax.random.normal(keys[0], (16, 64)) / 4, jax.random.normal(keys[1], (64, 16)) / 8
    y0 = jax.random.normal(keys[2], (32, 16))

    def slope(_t: Any, y: Any, weights: Any) -> Any:
        return jnp.tanh(y @ weights[0]) @ weights[1] - y

    def solve(weights: Any, y0: Any, slope: Any = slope, tolerance: float = 1e-6) -> Any:
        control = diffrax.PIDController(rtol=tolerance, atol=tolerance)
        if not tolerance:
            control = diffrax.ConstantStepSize()
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(slope),
            diffrax.Dopri8(),
            t0=0.0,
            t1=1.0,
            dt0=None if tolerance else 1 / 8,
            y0=y0,
            args=weights,
            stepsize_controller=control,
        )
        return solution.ys[-1], solution.stats["num_steps"]

    def solved(solve: Any, **options: Any) -> tuple[Any, int]:
        fn = functools.partial(solve, **options)
        y, count = jax.jit(jaxmp.autocast(fn, policy))((a, b), y0)
        return y, int(count)

    exact, few = jax.jit(solve)((a, b), y0)
    low, many = solved(solve)
    assert few == 9
    assert many == pytest.approx(steps, rel=0.5)
    for cured in (
        solved(solve, slope=jaxmp.full_precision(slope)),
        solved(jaxmp.full_precision(solve)),
    ):
        assert cured[1] == few
        assert jnp.array_equal(cured[0], exact)
    error = jnp.linalg.norm(low - exact)
    for tolerance in (1e-2 if policy == "mixed_bfloat16" else 1e-3, 0.0):
        y, count = solved(solve, tolerance=tolerance)
        assert count <= few + 1
        assert jnp.linalg.norm(y - exact) < 1.5 * error
