"""Sizes that `jax.export` leaves open: what is exported is what autocast makes of known ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax
from numpy_reference import reference

import jaxmp

from support import gaussian, slow_when

BF16 = "mixed_bfloat16"


W = gaussian(0, 16, 16, scale=1 / 4)
LONG = jax.device_put(np.linspace(0.0, 1.0, 16))


def dense(x):
    return jnp.tanh(x @ W + LONG) @ W


def softmax_by_hand(x):
    scores = x @ W
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ W


def attention(x):
    q, k, v = (jnp.reshape(x @ W, (x.shape[0], 4, 4)) for _ in range(3))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ W


def positions(x):
    table = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] * LONG
    return (x @ W + jnp.sin(table)) @ W


def over_the_batch(x):
    return x.T @ x / x.shape[0]


def summed_up(x):
    return lax.scan(lambda c, row: (c + jnp.tanh(row @ W), c @ W), jnp.zeros(16), x)[1]


def flattened(x):
    return (jnp.concatenate([x, 2.0 * x]) @ W).reshape(-1)


def convolution(x):
    kernel = W[:3, :, None] * jnp.linspace(0.5, 1.0, 8)
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=numbers)


FUNCTIONS = {
    fn.__name__: fn
    for fn in (
        dense,
        softmax_by_hand,
        attention,
        positions,
        over_the_batch,
        summed_up,
        flattened,
        convolution,
    )
}


def exported(fn, rows: str = "rows"):
    [size] = export.symbolic_shape(rows)
    return export.export(jax.jit(fn))(jax.ShapeDtypeStruct((size, 16), jnp.float32))


@slow_when(lambda name: name == "convolution")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_an_open_size_is_what_it_is_of_known_ones(name: str) -> None:
    fn = jax.jit(jaxmp.autocast(FUNCTIONS[name], BF16))
    program = exported(fn)
    assert "bf16" in program.mlir_module()
    for rows in (8, 24):
        x = gaussian(rows, rows, 16)
        np.testing.assert_allclose(program.call(x), reference(fn)(x), rtol=2e-2, atol=2e-2)


@slow_when(lambda name: name not in ("dense", "summed_up"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_so_is_a_gradient(name: str) -> None:
    fn = jaxmp.autocast(FUNCTIONS[name], BF16)
    gradient = jax.jit(jax.grad(lambda x: jnp.mean(jnp.square(fn(x)))))
    x = gaussian(9, 8, 16)
    program = exported(gradient)
    np.testing.assert_allclose(program.call(x), reference(gradient)(x), rtol=5e-2, atol=2e-2)


def open_shape(rows: str, *sizes: int) -> jax.ShapeDtypeStruct:
    said = rows.split("; ")
    [size] = export.symbolic_shape(said[0], constraints=said[1:])
    return jax.ShapeDtypeStruct((size, *sizes), jnp.float32)


def layers(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w) @ w


# In nvfp4 its gradient is seen below.
QUICK = (("float8", "rows; mod(rows, 16) == 0"), ("blockwise_float8", "128*rows"))


@slow_when(lambda recipe, rows: recipe != "mxfp4" and (recipe, rows) not in QUICK)
@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        ("float8", "16*rows"),
        ("float8", "rows; mod(rows, 16) == 0"),
        ("int8", "16*rows"),
        ("blockwise_float8", "128*rows"),
        ("mxfp8", "32*rows"),
        ("nvfp4", "16*rows"),
        ("mxfp4", "32*rows"),
    ],
)
def test_a_size_known_to_be_a_multiple_multiplies_in_few_bits(recipe: str, rows: str) -> None:
    fn = jax.jit(jaxmp.autocast(layers, f"mixed_bfloat16,matmul={recipe}"))
    program = export.export(fn)(W, open_shape(rows, 16))
    plan = jaxmp.explain(layers, f"mixed_bfloat16,matmul={recipe}")(W, open_shape(rows, 16))
    assert sum(product.quantized for product in plan.quantized().products) == 2
    x = gaussian(3, 128, 16)
    np.testing.assert_array_equal(program.call(W, x), fn(W, x))


@slow_when(lambda recipe: recipe == "mxfp4")
@pytest.mark.parametrize(("recipe", "rows"), [("nvfp4", "16*rows"), ("mxfp4", "32*rows")])
def test_so_do_gradients_in_4_bits(recipe: str, rows: str) -> None:
    """What is saved in 4 bits is packed, and random bits know the positions of what they round."""

    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w) @ w))

    gradient = jax.jit(jax.grad(jaxmp.autocast(loss, f"mixed_bfloat16,matmul={recipe}")))
    x = gaussian(3, 128, 16)
    want = gradient(W, x)
    got = export.export(gradient)(W, open_shape(rows, 16)).call(W, x)
    # Another order of float32 sums makes other random bits, off by as much as 4 bits are.
    assert np.linalg.norm(got - want) <= 0.2 * np.linalg.norm(want)


@slow_when(lambda recipe: recipe == "int8")
@pytest.mark.parametrize("recipe", ["float8", "int8"])
def test_so_do_ragged_products(recipe: str) -> None:
    """`len` of an array refuses a symbolic size."""

    def experts(w, sizes, x):
        return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, w, sizes)), w, sizes)

    w, sizes = gaussian(1, 2, 16, 16), np.int32([24, 8])
    loss = jaxmp.autocast(experts, f"mixed_bfloat16,matmul={recipe}")
    fn = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.square(loss(*args)))))
    program = export.export(fn)(w, sizes, open_shape("16*rows", 16))
    assert {"float8": "f8E4M3FN>", "int8": "xi8>"}[recipe] in program.mlir_module()
    x = gaussian(3, 32, 16)
    jax.tree.map(np.testing.assert_array_equal, program.call(w, sizes, x), fn(w, sizes, x))


@pytest.mark.parametrize(
    ("recipe", "rows", "multiple"),
    [("float8", "rows", 16), ("float8", "8*rows", 16), ("mxfp8", "16*rows", 32)],
)
def test_other_open_sizes_stay_in_16_bits_and_say_so(recipe: str, rows: str, multiple: int) -> None:
    plan = jaxmp.explain(layers, f"mixed_bfloat16,matmul={recipe}")(W, open_shape(rows, 16))
    why = f"a size is {rows}, not known to be a multiple of {multiple}"
    assert [product.why_not for product in plan.quantized().products[:2]] == [why, why]


def test_auto_takes_an_open_size_for_64() -> None:
    def fn(w, x):
        return jnp.tanh(x @ w) @ w.T @ w

    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = jaxmp.explain(fn, "mixed_bfloat16,matmul=auto@gpu-h100")
    few, many = plan(w, open_shape("16*rows", 4096)), plan(w, open_shape("16*rows", 128, 4096))
    known = plan(w, jax.ShapeDtypeStruct((64 * 128, 4096), jnp.float32))
    assert "of the time of 16 bits on gpu-h100" in few.quantized().products[0].why_not
    assert many.quantized().products == known.quantized().products
    assert many.quantized().products[0].quantized


def test_open_positions_are_data() -> None:
    def fn(x):
        return (x @ W + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None]) @ W

    [size] = export.symbolic_shape("rows")
    plan = jaxmp.explain(fn, BF16)(jax.ShapeDtypeStruct((size, 16), jnp.float32))
    assert "a large constant, or a position, wins over 16 bits as a summand" in str(plan)


def test_a_wrapped_nnx_model() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 4, rngs=rngs))
    wrapped = jaxmp.wrap(model, BF16)
    x = gaussian(3, 6, 16)
    want = reference(wrapped)(x)
    np.testing.assert_allclose(exported(wrapped).call(x), want, rtol=2e-2, atol=1e-2)


def test_what_counts_bytes_refuses_them() -> None:
    [size] = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((size, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"audit: argument \['x'\] has the shape \(rows, 16\)"):
        jaxmp.audit(dense)(x=x)
    with pytest.raises(ValueError, match=r"preflight: argument \[0\] has the shape \(rows, 16\)"):
        jaxmp.preflight(dense, target="gpu-h100")(x)
