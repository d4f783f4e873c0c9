"""`matmul="auto"`: the recipe of the chip, for the layers for which it pays."""

from __future__ import annotations

import pickle
from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Policy, get_policy
from jaxmp._core.speed import chip_named, why_emulated
from jaxmp.devices import kind_of
from jaxmp.recipes import parse_recipe

from support import assert_same_program, gaussian, random_key


class Model(nn.Module):
    """A large layer, a small one, and the last."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(8192, use_bias=False, name="large")(x))
        x = jnp.tanh(nn.Dense(64, use_bias=False, name="small")(x))
        return nn.Dense(16, use_bias=False, name="last")(x)


def rows(policy):
    model = jaxmp.wrap(Model(), policy)
    x = jax.ShapeDtypeStruct((16384, 8192), jnp.float32)
    variables = jax.eval_shape(Model().init, jax.random.key(0), x)
    report = jaxmp.audit(model.apply)(variables, x)
    return {product.path: product for product in report.quantized().products}


def test_what_pays_is_in_8_bits_and_the_rest_says_why_not():
    for chip, recipe, dtype in (
        ("gpu-h100", "float8", "float8_e4m3fn"),
        ("tpu7x", "float8", "float8_e4m3fn"),
        ("tpu-v5e", "int8", "int8"),
    ):
        large, small, last = rows(f"mixed_bfloat16,matmul=auto@{chip}").values()
        assert large.dtype == dtype, chip
        assert small.dtype == last.dtype == "bfloat16", chip
        assert small.why_not.startswith(f"{recipe} is estimated at ")
        assert small.why_not.endswith(f"of the time of 16 bits on {chip}")
        assert small.intended
        assert last.why_not == "no matmul or convolution reads the result"


def test_where_no_format_is_fast_none_is_taken():
    """Also on the CPU that these tests run on, of which there are no figures."""
    for chip in ("@gpu-a100", "@tpu-v4", ""):
        for product in rows(f"mixed_bfloat16,matmul=auto{chip}").values():
            assert product.dtype == "bfloat16"
            assert (chip.lstrip("@") or "cpu") in product.why_not
    model = nn.Sequential([nn.Dense(64, use_bias=False), nn.Dense(32, use_bias=False)])
    x = gaussian(0, 32, 64)
    variables = jax.eval_shape(model.init, random_key(1), x)
    plain, auto = (jaxmp.wrap(model, f"mixed_bfloat16{of}").apply for of in ("", ",matmul=auto"))
    assert_same_program(plain, auto, variables, x)


def test_explain_says_what_was_taken_and_why():
    def fn(tokens, table, w, v):
        return (jnp.tanh(table[tokens]) @ w) @ v

    s = jax.ShapeDtypeStruct
    args = s((16384,), jnp.int32), *(s((8192, 8192), jnp.float32),) * 3
    found = str(jaxmp.explain(fn, "mixed_bfloat16,matmul=auto@gpu-h200", argnums=(1, 2, 3))(*args))
    assert "products in 8 bits" in found
    assert "of the time of 16 bits on gpu-h200" in found


def test_it_is_a_string_that_reads_back():
    for text in ("auto", "auto@tpu-v5e"):
        policy = get_policy(f"mixed_bfloat16,matmul={text}")
        assert policy.matmul == text
        assert policy == Policy("float32", "bfloat16", "float32", matmul=text)
        assert get_policy(str(policy)) == policy
        assert eval(repr(policy), {"get_policy": get_policy}) == policy
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert hash(policy) == hash(get_policy(str(policy)))
    assert Policy("float32", "bfloat16", "float32", matmul="AUTO").matmul == "auto"


def test_mistakes():
    with pytest.raises(ValueError, match=r"names no chip \(did you mean 'gpu-h100'\?\)"):
        get_policy("mixed_bfloat16,matmul=auto@gpu-h10")
    with pytest.raises(ValueError, match="products: 'auto@' names no chip; the chips are tpu-v4"):
        get_policy("mixed_bfloat16,matmul=auto@")
    with pytest.raises(ValueError, match="needs a compute_dtype of 16 bits; got float32"):
        Policy("float32", "float32", "float32", matmul="auto")
    with pytest.raises(ValueError, match="'autto' names no recipe"):
        get_policy("mixed_bfloat16,matmul=autto")


def told(chip):
    platform = chip[:3]
    device = jax.sharding.AbstractDevice(kind_of(chip), num_cores=None, platform=platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_float8_is_that_of_the_chip():
    def fn(w, x):
        return jnp.tanh(jnp.tanh(x) @ w) @ w

    arrays = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    for chip, dtype in (
        ("tpu-v5e", "float8_e4m3b11fnuz"),
        ("tpu-v5p", "float8_e4m3b11fnuz"),
        ("tpu-v6e", "float8_e4m3b11fnuz"),
        ("tpu7x", "float8_e4m3fn"),
        ("gpu-h100", "float8_e4m3fn"),
    ):
        for matmul, of in (("float8", dtype), ("e4m3", "float8_e4m3fn")):
            low = jaxmp.autocast(fn, f"mixed_bfloat16,matmul={matmul}")
            emulated = why_emulated(parse_recipe(matmul), chip_named(chip))
            expected = pytest.warns(UserWarning, match="emulated") if emulated else nullcontext()
            with told(chip), expected:
                found = jaxmp.explain(low)(*arrays).products()
                jaxpr = str(jax.make_jaxpr(low)(*arrays))
            assert found == {of: 1, "bfloat16": 1}, (chip, matmul)
            assert ("f8_e4m3b11fnuz" in jaxpr) == ("b11" in of)


@pytest.mark.slow
def test_a_run_goes_on_on_a_chip_with_another_float8():
    """Nothing that is kept is in float8, and scales are powers of two."""
    r = np.random.default_rng(0)
    x = r.normal(size=(64, 64)).astype(np.float32)
    params = [(r.normal(size=(64, 64)) / 8).astype(np.float32) for _ in range(3)]

    def loss_fn(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x @ params[-1] - 1))

    grad_fn = jaxmp.autocast(loss_fn, "mixed_float8")

    def run(*chips):
        state = params
        for chip in chips:
            with told(chip):
                step = jax.jit(jax.value_and_grad(grad_fn))
            for _ in range(10):
                with told(chip):
                    loss, grads = step(state, x)
                state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return float(loss)

    first = float(loss_fn(params, x))
    losses = [run(a, b) for a in ("tpu-v5e", "gpu-h100") for b in ("tpu-v5e", "gpu-h100")]
    assert max(losses) < 0.9 * first
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)


def test_what_a_gpu_emulates_is_warned_of_once():
    gpu = jax.sharding.AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu")
    fast = jaxmp.autocast(lambda w, x: jnp.tanh(jnp.tanh(x) @ w) @ w, "mixed_float8")
    arrays = jnp.ones((64, 64)), jnp.ones((16, 64))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
        with pytest.warns(UserWarning, match="float8 is emulated: gpu-a100 does not multiply"):
            jax.make_jaxpr(fast)(*arrays)
        jax.make_jaxpr(fast)(*arrays)  # warnings are errors: none
