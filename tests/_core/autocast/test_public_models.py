"""Architectures that are not ours under every policy: what runs low, what is finite, how exact.

The gradient of a 16-bit run is judged against two floors, errors of float32 compute in which only
some values are rounded to bfloat16. On some networks (ReLU kinks, batch statistics) either is
several per cent, so a fixed tolerance would be either blind or wrong.

* The *input floor* rounds the parameters and inputs, once, and nothing that is computed from them.
* The *contraction floor* rounds the operands of every contraction, forward and backward, each time
  they are read, and nothing else; see `contraction_floor.py`. No way of running every contraction
  in bfloat16 rounds less. On these models it is 0.5 to 1.7 times the input floor, so it excuses
  only part of a ratio above 1.

Neither is a bound in the strict sense: rounding errors can cancel, and less rounding is then more
error. What autocast rounds beyond them is stated at `expected.ABOVE_INPUT_FLOOR`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import HEADROOM, ROUNDING, TARGET
from contraction_floor import rounded_contractions
from numpy_reference import reference
from public_models import BUILDERS, REQUIRES, PublicModel, build
from public_models.expected import (
    ABOVE_CONTRACTION_FLOOR,
    ABOVE_INPUT_FLOOR,
    ABOVE_INPUT_FLOOR_IN_FLOAT16,
    BACKWARD,
    FLOAT16,
    FLOAT32,
    QUICK,
    REPRESENTATIVE,
)

import jaxmp

from support import (
    Contraction,
    assert_same_program,
    contraction_dtypes,
    contractions,
    float16_is_slow,
    gaussian,
    slow_when,
)

SEEDS = range(8)

# Static loss scales tried for float16, largest first, as a dynamic one would back off.
LOSS_SCALES = (2.0**12, 2.0**8, 2.0**4, 1.0)

COMPILER_OPTIONS = {
    # YNN, the CPU backend's matmul library since jaxlib 0.12, leaves bf16 products that contract
    # the first dimension of the first operand to a loop that sums in bf16: an error of the CPU
    # backend, which doubled some ratios below. Without YNN, products are summed in float32.
    "xla_cpu_experimental_ynn_fusion_type": "",
}


pytestmark = slow_when(lambda name: name not in REPRESENTATIVE)
TOGETHER = "name"  # tests/conftest.py: one model's tests share what they compile


@pytest.fixture(scope="module", params=BUILDERS)
def name(request: pytest.FixtureRequest) -> str:
    """Module scope keeps one model's tests together, and with them what they compile once."""
    return request.param


def _build(name: str) -> PublicModel:
    # Not `importorskip`: importing JAXopt warns, and the builder knows.
    if name in REQUIRES and importlib.util.find_spec(REQUIRES[name]) is None:
        pytest.skip(f"needs {REQUIRES[name]}")
    return build(name)


def _value_and_grad(model: PublicModel, policy: str | None) -> Callable[..., Any]:
    loss = model.loss if policy is None else jaxmp.autocast(model.loss, policy)
    return jax.value_and_grad(loss, has_aux=model.has_aux)


@functools.cache
def _compiled(name: str, policy: str | None) -> Callable[..., Any]:
    return jax.jit(_value_and_grad(build(name), policy), compiler_options=COMPILER_OPTIONS)


def _round(tree: Any) -> Any:
    """Every float32 leaf rounded to bfloat16 and held in float32."""

    def leaf(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(np.asarray(x).astype(jnp.bfloat16).astype(x.dtype))

    return jax.tree.map(leaf, tree)


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def _relative(errors: list[np.ndarray], references: list[np.ndarray]) -> float:
    """Relative L2 error over the whole gradient and all batches."""
    return float(np.linalg.norm(np.stack(errors)) / np.linalg.norm(np.stack(references)))


class Reference(NamedTuple):
    """Float32 gradients and losses per batch, and the relative floor over all batches."""

    gradients: list[np.ndarray]
    losses: list[float]
    input_floor: float


@functools.cache
def _reference(name: str) -> Reference:
    model, run = build(name), _compiled(name, None)
    gradients, losses, errors = [], [], []
    for seed in SEEDS:
        batch = model.batch(seed)
        value, gradient = run(model.params, batch)
        gradients.append(_flat(gradient))
        losses.append(float(value[0] if model.has_aux else value))
        _, rounded = run(_round(model.params), _round(batch))
        errors.append(_flat(rounded) - gradients[-1])
    return Reference(gradients, losses, _relative(errors, gradients))


def _contraction_floor(name: str) -> float:
    model, reference = build(name), _reference(name)
    run = jax.jit(
        rounded_contractions(_value_and_grad(model, None)), compiler_options=COMPILER_OPTIONS
    )
    rounded = [_flat(run(model.params, model.batch(seed))[1]) for seed in SEEDS]
    errors = [a - b for a, b in zip(rounded, reference.gradients, strict=True)]
    return _relative(errors, reference.gradients)


@pytest.mark.slow
def test_model_is_sound_in_float32(name: str) -> None:
    """What the other tests compare with: finite, float32, and gradients that are not zero."""
    model = _build(name)
    reference = _reference(name)
    assert np.isfinite(reference.losses).all()
    assert np.isfinite(reference.gradients).all()
    assert min(np.linalg.norm(g) for g in reference.gradients) > 1e-3
    assert 0 < reference.input_floor < 0.2
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}


@slow_when(lambda name: name not in QUICK)
def test_float32_policy_is_the_identity(name: str) -> None:
    model = _build(name)
    plain, cast = (_value_and_grad(model, policy) for policy in (None, "float32"))
    assert_same_program(plain, cast, model.params, model.batch(0))


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_contractions_are_low_but_for_those_documented(name: str, policy: str) -> None:
    model = _build(name)
    compute = np.dtype(jaxmp.get_policy(policy).compute_dtype).name
    forward = contractions(jaxmp.autocast(model.loss, policy), model.params, model.batch(0))
    both = contractions(_value_and_grad(model, policy), model.params, model.batch(0))
    assert any(c.in_dtypes == (compute, compute) for c in both)
    kept = FLOAT32.get(name, {})
    count = sum(kept.values()) + (FLOAT16.get(name, 0) if compute == "float16" else 0)
    other = _not_low(forward, compute)
    assert len(other) == count, f"{kept} expected in float32, found {other}"
    # Backward, each of them is transposed once per operand at most, and nothing else is added.
    other = _not_low(both, compute)
    assert len(other) <= 3 * count + BACKWARD.get(name, 0), other
    assert {c.in_dtypes for c in other} <= {("float32", "float32")}


def _not_low(found: list[Contraction], compute: str) -> list[Contraction]:
    """Those that multiply in another dtype than `compute`, though the author did not ask for it."""
    return [c for c in found if c.in_dtypes != (compute, compute) and not c.exempt]


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_wrap_runs_the_same_contractions_low_as_autocast(name: str, policy: str) -> None:
    """A `dtype=float32` that a configuration hands to every layer is not a layer's own word."""
    model = _build(name)
    if model.wrapped is None:
        pytest.skip("tried under autocast alone")
    arguments = model.params, model.batch(0)
    wrapped = contraction_dtypes(model.wrapped(policy), *arguments)
    compute = np.dtype(jaxmp.get_policy(policy).compute_dtype).name
    want = contraction_dtypes(jaxmp.autocast(model.loss, policy), *arguments)
    # The loss is outside the model.
    assert wrapped[compute] == want[compute]
    assert wrapped.total() == want.total()


@functools.cache
def _bfloat16_error(name: str) -> float:
    """Checks the types and the loss of each batch; the relative error of the gradients."""
    model, reference = build(name), _reference(name)
    run = _compiled(name, "mixed_bfloat16")
    errors = []
    for seed, want, loss in zip(SEEDS, reference.gradients, reference.losses, strict=True):
        value, gradient = run(model.params, model.batch(seed))
        _check_types(model, value, gradient)
        scalar = float(value[0] if model.has_aux else value)
        assert np.isfinite(scalar)
        assert abs(scalar - loss) <= 8 * ROUNDING * max(1.0, abs(loss))
        errors.append(_flat(gradient) - want)
    assert np.isfinite(errors).all()
    return _relative(errors, reference.gradients)


def _bound(ratios: dict[str, float], name: str) -> float:
    return HEADROOM * ratios[name] if name in ratios else TARGET


@pytest.mark.slow
def test_bfloat16_gradients_are_near_the_input_floor(name: str) -> None:
    _build(name)
    floor, error = _reference(name).input_floor, _bfloat16_error(name)
    bound = _bound(ABOVE_INPUT_FLOOR, name)
    assert error <= max(bound * floor, ROUNDING), f"error {error:.2e}, floor {floor:.2e}"


@pytest.mark.slow
def test_bfloat16_gradients_are_near_the_contraction_floor(name: str) -> None:
    _build(name)
    floor, error = _contraction_floor(name), _bfloat16_error(name)
    assert 0 < floor < 0.2
    bound = _bound(ABOVE_CONTRACTION_FLOOR, name)
    assert error <= max(bound * floor, ROUNDING), f"error {error:.2e}, floor {floor:.2e}"


def test_the_contraction_floor_rounds_operands_forward_and_backward() -> None:
    """On products small enough to follow: what is rounded, and that nothing else is."""
    x, w = (gaussian(i, 4, 4) for i in (0, 1))

    def fn(x, w):
        return jnp.sum(jnp.sin(x @ w))

    value, (dx, dw) = reference(rounded_contractions(jax.value_and_grad(fn, argnums=(0, 1))))(x, w)
    x_, w_ = map(np.asarray, _round((x, w)))
    product = x_ @ w_
    cotangent = np.asarray(_round(np.cos(product)))
    np.testing.assert_allclose(value, np.sum(np.sin(product)), rtol=1e-6)
    np.testing.assert_allclose(dx, cotangent @ w_.T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dw, x_.T @ cotangent, rtol=1e-6, atol=1e-6)
    # Inside loops and branches too, but not where the author wants it exact.
    loops = {
        "scan": lambda x, w: jax.lax.scan(lambda c, u: (c @ u, None), x, w[None])[0],
        "cond": lambda x, w: jax.lax.cond(True, jnp.matmul, jnp.add, x, w),
        "while": lambda x, w: jax.lax.fori_loop(0, 1, lambda i, c: c @ w, x),
        "jit": jax.jit(jnp.matmul),
    }
    for name, loop in loops.items():
        np.testing.assert_allclose(
            reference(rounded_contractions(loop))(x, w), product, rtol=1e-6, err_msg=name
        )
    exact = functools.partial(jnp.matmul, precision="highest")
    got, want = (reference(f)(x, w) for f in (rounded_contractions(exact), exact))
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_float16_gradients_are_finite_under_a_static_loss_scale(name: str) -> None:
    """float16 has three bits more than bfloat16 and far less range: bfloat16's bound holds.

    A scale at which the float16 model overflows is not a fault of the transformation, so the
    largest scale without an overflow is used, as a dynamic loss scale would find it.
    """
    model = _build(name)
    cast = jaxmp.autocast(model.loss, "mixed_float16")

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params: Any, batch: Any, scale: jax.Array) -> tuple[jax.Array, Any]:
        value = cast(params, batch)
        return (value[0] if model.has_aux else value) * scale, value

    reference = _reference(name)
    for scale in LOSS_SCALES:
        errors = []
        for seed, want, loss in zip(SEEDS, reference.gradients, reference.losses, strict=True):
            (_, value), gradient = run(model.params, model.batch(seed), jnp.asarray(scale))
            _check_types(model, value, gradient)
            scalar = float(value[0] if model.has_aux else value)
            assert np.isfinite(scalar)
            assert abs(scalar - loss) <= 8 * ROUNDING * max(1.0, abs(loss))
            errors.append(_flat(gradient) / scale - want)
        if np.isfinite(errors).all():
            break
    assert np.isfinite(errors).all(), "gradients not finite at any loss scale"
    error, floor = _relative(errors, reference.gradients), reference.input_floor
    bound = _bound(ABOVE_INPUT_FLOOR_IN_FLOAT16, name)
    assert error <= max(bound * floor, ROUNDING), f"error {error:.2e}, floor {floor:.2e}"


def _check_types(model: PublicModel, value: Any, gradient: Any) -> None:
    """The result and gradients have the dtypes and structure of the float32 program's."""
    expected = jax.eval_shape(model.loss, model.params, model.batch(0))
    assert jax.tree.map(lambda x: x.dtype, value) == jax.tree.map(lambda x: x.dtype, expected)
    assert jax.tree.map(lambda x: x.dtype, gradient) == jax.tree.map(
        lambda x: x.dtype, model.params
    )
