"""Libraries whose gradients are rules of their own: equinox, jaxopt; diffrax's adaptive solver.

Each loss differentiates through a library's default rule; the gradient under autocast is compared
with the float32 one, in value and in structure. Of other solvers, `public_models/solvers.py` does.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import reference

import jaxmp

from support import gaussian, slow_when

equinox = pytest.importorskip("equinox")

WIDTH = 8
X = jax.device_put(np.linspace(-1.0, 1.0, 2 * WIDTH).reshape(2, WIDTH))


def weights() -> dict[str, Any]:
    names = enumerate(("hidden", "out"))
    return {name: gaussian(i, WIDTH, WIDTH, scale=1 / WIDTH) for i, name in names}


def field(params: Any, x: Any) -> Any:
    """A small network: the right-hand side, the residual, the optimality condition."""
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


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


def jaxopt_descent_loss(params: Any, x: Any) -> Any:
    """A ridge regression by gradient descent; its objective takes the data (docs/limits.md)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jaxopt = pytest.importorskip("jaxopt")
    target = jnp.sum(x, axis=1)

    def objective(w, p, x, target):
        return jnp.mean((field(p, x) @ w - target) ** 2) + 0.5 * jnp.sum(w**2)

    solver = jaxopt.GradientDescent(objective, maxiter=50, implicit_diff=True)
    return jnp.sum(solver.run(jnp.zeros(WIDTH), params, x, target).params ** 2)


LOSSES = {
    "equinox, filter_custom_vjp": equinox_vjp_loss,
    "equinox, filter_checkpoint": equinox_checkpoint_loss,
    "equinox, checkpointed loop": equinox_loop_loss,
    "jaxopt, descent": jaxopt_descent_loss,
}


LOOPS = ("equinox, checkpointed loop", "jaxopt, descent")


# That its rule is told what is perturbed, filter_custom_vjp says.
@slow_when(lambda name: name == "equinox, checkpointed loop")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_float32_but_for_rounding(name: str) -> None:
    loss, params = LOSSES[name], weights()
    fast = jaxmp.autocast(loss, "mixed_bfloat16")
    # What equinox and jaxopt loop with is not in NumPy.
    by = jax.jit if name in LOOPS else reference
    got, want = by(lambda *args: [jax.grad(f)(*args) for f in (fast, loss)])(params, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for leaf, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert leaf.dtype == exact.dtype == jnp.float32
        # Some ten roundings of relative size 2**-9. The descent subtracts its target from a
        # product that left in 16 bits, so what is left of it is less exact.
        error = np.linalg.norm(leaf - exact) / np.linalg.norm(exact)
        assert error < (0.08 if "descent" in name else 0.02)
        assert np.linalg.norm(exact) > 0


def test_filter_grad_and_filter_jit_of_an_autocast() -> None:
    mlp = equinox.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=jax.random.key(0))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    want = equinox.filter_jit(equinox.filter_grad(loss))(mlp, X)
    got = equinox.filter_jit(equinox.filter_grad(jaxmp.autocast(loss, "mixed_bfloat16")))(mlp, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b) < 0.04


@pytest.mark.slow
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
