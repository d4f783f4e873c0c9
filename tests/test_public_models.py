"""Architectures that are not ours under every policy: what runs low, what is finite, how exact.

The gradient of a 16-bit run is judged against the *input-rounding floor*: the error that float32
compute makes when only its parameters and inputs are rounded to bfloat16. No transformation can do
better than that in bfloat16, and on some networks (ReLU kinks, batch statistics) it alone is
several per cent, so a fixed tolerance would be either blind or wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_models import BUILDERS, REQUIRES, PublicModel, build

import jaxmp

from support import contractions, primitives

SEEDS = range(8)

# The floor already holds one rounding of every parameter and input. A weight's gradient is moreover
# the product of an activation and a cotangent which are each rounded once more when they enter the
# backward contraction, and where the floor is small (little depth, no kinks) that is what remains.
# Rounding to bfloat16 is off by at most eps / 2 relative, so a gradient within eps / 2 in relative
# L2 norm is as close as its own representation in bfloat16 is guaranteed to be.
ROUNDING = float(jnp.finfo(jnp.bfloat16).eps) / 2

# Static loss scales tried for float16, largest first, as a dynamic one would back off.
LOSS_SCALES = (2.0**12, 2.0**8, 2.0**4, 1.0)

# LLVM's optimisations change nothing these tests look at and take half of the compile time.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}

# The target is 1.5 × the floor. These models miss it: the worst ratio measured, JAX 0.10 and 0.12.
# Models hand-written with dtype=bfloat16 miss it as well, most of them by more, and so do most of
# these with nothing but the contractions in 16 bits (every `follow` op overridden to float32). The
# mixture of experts routes one token elsewhere in one batch. The bound keeps them from growing.
TARGET = 1.5
MISSED = {
    "lstm_seq2seq": 3.61,
    "gru_tagger": 2.91,
    "ctc_speech": 2.08,
    "vit": 1.63,
    "mobilenet_depthwise": 1.54,
    "diffusion_unet": 1.83,
    "mlp_mixer": 2.03,
    "clip_towers": 1.95,
    "flash_attention": 1.71,
    "scanned_lm": 1.82,
    "mixture_of_experts": 7.72,
    "mamba": 1.73,
    "realnvp": 1.69,
    "rk4_adjoint": 1.94,
    "deep_equilibrium": 1.52,
    "bfloat16_inputs": 1.65,
    "haiku_transformer": 2.66,
    "linear_recurrent_unit": 2.26,
    "nnx_transformer": 1.51,
}
HEADROOM = 1.25  # a ratio moves by a fifth between compilers

# Contractions that rightly stay out of the compute dtype although nothing in the equation says so:
# model -> {(primitive, operand dtypes): reason}.
EXEMPT: dict[str, dict[tuple[str, tuple[str, ...]], str]] = {}


@pytest.fixture(scope="module", params=list(BUILDERS))
def name(request: pytest.FixtureRequest) -> str:
    """Module scope keeps one model's tests together, and with them what they compile once."""
    return request.param


def _build(name: str) -> PublicModel:
    if name in REQUIRES:
        pytest.importorskip(REQUIRES[name])
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


@functools.cache
def _reference(name: str) -> tuple[list[np.ndarray], float, list[float]]:
    """Float32 gradients per batch, the relative floor over them, and the losses."""
    model, run = build(name), _compiled(name, None)
    gradients, errors, losses = [], [], []
    for seed in SEEDS:
        batch = model.batch(seed)
        value, gradient = run(model.params, batch)
        _, rounded = run(_round(model.params), _round(batch))
        gradients.append(_flat(gradient))
        errors.append(_flat(rounded) - gradients[-1])
        losses.append(float(value[0] if model.has_aux else value))
    return gradients, _relative(errors, gradients), losses


def test_model_is_sound_in_float32(name: str) -> None:
    """What the other tests compare with: finite, float32, and gradients that are not zero."""
    model = _build(name)
    gradients, floor, losses = _reference(name)
    assert np.isfinite(losses).all()
    assert np.isfinite(gradients).all()
    assert min(np.linalg.norm(g) for g in gradients) > 1e-3
    assert 0 < floor < 0.2
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}


def test_float32_policy_is_bitwise_the_identity(name: str) -> None:
    model = _build(name)
    batch = model.batch(0)
    plain = _compiled(name, None)(model.params, batch)
    cast = _compiled(name, "float32")(model.params, batch)
    assert jax.tree.structure(plain) == jax.tree.structure(cast)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(cast), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert primitives(_value_and_grad(model, None), model.params, batch) == primitives(
        _value_and_grad(model, "float32"), model.params, batch
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_every_contraction_multiplies_in_the_compute_dtype(name: str, policy: str) -> None:
    model = _build(name)
    compute = np.dtype(jaxmp.get_policy(policy).compute_dtype).name
    found = contractions(_value_and_grad(model, policy), model.params, model.batch(0))
    exempt = EXEMPT.get(name, {})
    low = [c for c in found if c.in_dtypes == (compute, compute)]
    other = [
        c
        for c in found
        if c not in low and not c.exempt and (c.primitive, c.in_dtypes) not in exempt
    ]
    assert low
    assert not other, f"{len(other)} of {len(found)} contractions not in {compute}: {other}"


def test_bfloat16_gradients_are_within_the_rounding_floor(name: str) -> None:
    model = _build(name)
    run = _compiled(name, "mixed_bfloat16")
    references, floor, losses = _reference(name)
    errors = []
    for seed, reference, loss in zip(SEEDS, references, losses, strict=True):
        value, gradient = run(model.params, model.batch(seed))
        _check_types(model, value, gradient)
        scalar = float(value[0] if model.has_aux else value)
        assert np.isfinite(scalar)
        assert abs(scalar - loss) <= 8 * ROUNDING * max(1.0, abs(loss))
        errors.append(_flat(gradient) - reference)
    assert np.isfinite(errors).all()
    error = _relative(errors, references)
    bound = HEADROOM * MISSED[name] if name in MISSED else TARGET
    assert error <= max(bound * floor, ROUNDING), f"error {error:.2e}, floor {floor:.2e}"


def test_float16_gradients_are_finite_under_a_static_loss_scale(name: str) -> None:
    """float16 has three bits more than bfloat16 and far less range: bfloat16's bound holds.

    A scale at which the float16 model overflows is no fault of the transformation, so the largest
    scale without an overflow is used, as a dynamic loss scale would find it.
    """
    model = _build(name)
    cast = jaxmp.autocast(model.loss, "mixed_float16")

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params: Any, batch: Any, scale: jax.Array) -> tuple[jax.Array, Any]:
        value = cast(params, batch)
        return (value[0] if model.has_aux else value) * scale, value

    references, floor, losses = _reference(name)
    for scale in LOSS_SCALES:
        errors = []
        for seed, reference, loss in zip(SEEDS, references, losses, strict=True):
            (_, value), gradient = run(model.params, model.batch(seed), jnp.asarray(scale))
            _check_types(model, value, gradient)
            scalar = float(value[0] if model.has_aux else value)
            assert np.isfinite(scalar)
            assert abs(scalar - loss) <= 8 * ROUNDING * max(1.0, abs(loss))
            errors.append(_flat(gradient) / scale - reference)
        if np.isfinite(errors).all():
            break
    assert np.isfinite(errors).all(), "gradients not finite at any loss scale"
    error = _relative(errors, references)
    assert error <= max(1.5 * floor, ROUNDING), f"error {error:.2e}, floor {floor:.2e}"


def _check_types(model: PublicModel, value: Any, gradient: Any) -> None:
    """The result and gradients have the dtypes and structure of the float32 program's."""
    expected = jax.eval_shape(model.loss, model.params, model.batch(0))
    assert jax.tree.map(lambda x: x.dtype, value) == jax.tree.map(lambda x: x.dtype, expected)
    assert jax.tree.map(lambda x: x.dtype, gradient) == jax.tree.map(
        lambda x: x.dtype, model.params
    )
