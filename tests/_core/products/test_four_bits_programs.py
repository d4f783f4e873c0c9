"""Recipes of 4 bits in whole programs: what they multiply, and on many devices."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp

from support import assert_same, random_key, relative, slow_when

RECIPES = ("nvfp4", "mxfp4")
TOKENS = np.arange(128, dtype=np.int32) * 7 % 32


def weights(width=64):
    r = np.random.default_rng(0)
    sizes = {"table": (32, 32), "up": (32, width), "down": (width, 32), "last": (32, 32)}
    return {k: np.float32(r.normal(size=n) / np.sqrt(n[0])) for k, n in sizes.items()}


def loss(p, tokens):
    """Three layers between an embedding and logits."""
    h = jnp.tanh(jax.nn.gelu(p["table"][tokens] @ p["up"]) @ p["down"]) @ p["last"]
    return jnp.mean((h @ p["table"].T) ** 2)


def policy(recipe):
    return f"mixed_bfloat16,matmul={recipe}"


@functools.cache
def gradient(recipe):
    return jax.jit(jax.grad(jaxmp.autocast(loss, policy(recipe))))


@slow_when(lambda recipe: recipe == "mxfp4")
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_multiplied_in_4_bits_is_told(recipe):
    found = jaxmp.explain(loss, policy(recipe))(weights(), TOKENS)
    assert found.products() == {"float4_e2m1fn": 3, "bfloat16": 1}
    assert f"float4_e2m1fn, matmul or convolution, {recipe}: 3 operations" in str(found)
    report = jaxmp.audit(gradient(recipe))(weights(), TOKENS)
    assert report.quantized().counts() == {"forward": (3, 4), "backward": (6, 8)}
    assert "products in 4 bits  3 of 4 forward, 6 of 8 backward" in str(report)


def test_products_in_4_and_8_bits_are_told_together():
    policies = jaxmp.PolicyMap({"Dense_1": policy("nvfp4")}, default="mixed_float8")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(32)(nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(32)(x)))))

    model = jaxmp.wrap(Model(), policies)
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    step = jax.grad(lambda v, x: jnp.sum(model.apply(v, x) ** 2))
    text = jaxmp.audit(step)(variables, x).quantized().summary()
    assert "products in 8 or 4 bits  2 of 3 forward, 4 of 6 backward" in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_are_no_multiple_of_16_are_told(recipe):
    why = {"a size is 40, not a multiple of 16": 2, "no matmul or convolution reads the result": 1}
    assert jaxmp.explain(loss, policy(recipe))(weights(40), TOKENS).quantized().reasons() == why


@slow_when(lambda target: target in ("gpu-b300", "tpu-v6e", "gpu-mi355x"))
@pytest.mark.parametrize(
    ("recipe", "target", "dtype", "emulated"),
    [
        ("nvfp4", "gpu-b200", "float4_e2m1fn", False),
        ("nvfp4", "gpu-b300", "float4_e2m1fn", False),
        ("nvfp4", "gpu-h100", "bfloat16", True),
        ("nvfp4", "tpu-v6e", "bfloat16", True),
        ("mxfp4", "gpu-b200", "bfloat16", True),
        ("mxfp4", "gpu-mi355x", "bfloat16", True),
    ],
)
def test_where_it_is_emulated_audit_and_a_warning_say_so(recipe, target, dtype, emulated):
    def loss(p, x):
        return jnp.mean((x @ p["up"] @ p["down"]) ** 2)

    args = weights(), np.ones((64, 32), np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = jax.grad(jaxmp.autocast(loss, policy(recipe)))
        report = jaxmp.audit(step, target=target)(*args)
    assert dtype in report.product_share()
    found = [f.what for f in report.findings if f.kind == "emulated"]
    assert bool(found) == emulated == bool(said)
    assert all(what.startswith("float4_e2m1fn in blocks is not") for what in found)
    assert all(f"{recipe} is emulated: blocks of" in str(w.message) for w in said)
    assert "float4_e2m1fn" in str(jaxmp.explain(loss, policy(recipe), target=target)(*args))


@slow_when(lambda recipe: recipe == "mxfp4")
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_float32_as_4_bits_have_them(recipe):
    got, want = gradient(recipe)(weights(), TOKENS), reference(jax.grad(loss))(weights(), TOKENS)
    for name in want:
        assert 0.02 < relative(got[name], want[name]) < 0.45, name
    assert got["up"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("split", ["rows", "columns"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_eight_devices_round_as_one(recipe, split):
    """Batch and weights are sharded. Other random bits would move gradients by a tenth."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P("d", None) if split == "rows" else P(None, "d")
    p = jax.device_put(weights(), NamedSharding(mesh, spec))
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("d")))
    grad = gradient(recipe)
    got, want = grad(p, tokens), grad(weights(), TOKENS)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@slow_when(lambda recipe: recipe == "mxfp4")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(recipe, tmp_path):
    """The random bits are of the gradients alone: a program that is traced anew has the same."""
    tx = optax.adam(1e-2)

    @jax.jit
    def update(p, state, grads):
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    def train(grad, p, state):
        for _ in range(2):
            p, state = update(p, state, grad(p, TOKENS))
        return p, state

    first = gradient(recipe)
    begun = train(first, jax.device_put(weights()), tx.init(weights()))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", begun)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: begun))
    assert_same(train(gradient.__wrapped__(recipe), *restored), train(first, *begun))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["remat", "scan", "scan of remat"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rematerialized_and_scanned_layers_round_as_others(recipe, kind):
    """But for the order of float32 sums, where what they round is the same: else a tenth apart.

    Of a relu it is; of what XLA computes with more precision than bfloat16, as tanh, it may differ.
    """

    def layer(x, w):
        return jax.nn.relu(x @ w), None

    def gradient(run):
        def loss(p, x):
            return jnp.mean((run(x, p) @ p[0]) ** 2)

        return jax.jit(jax.grad(jaxmp.autocast(loss, policy(recipe))))

    def looped(each):
        return lambda x, p: functools.reduce(lambda x, w: each(x, w)[0], p, x)

    def scanned(each):
        return lambda x, p: jax.lax.scan(each, x, p)[0]

    r = np.random.default_rng(0)
    p, x = np.float32(r.normal(size=(2, 32, 32)) / 5), np.float32(r.normal(size=(64, 32)))
    again = jax.checkpoint(layer)
    run = {"remat": looped(again), "scan": scanned(layer), "scan of remat": scanned(again)}[kind]
    got, want = (gradient(each)(jax.device_put(p), x) for each in (run, looped(layer)))
    assert relative(got, want) < 1e-5


@pytest.mark.slow
def test_a_linen_model_learns_and_switches_its_forward_pass_to_16_bits():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(nn.relu(nn.Dense(64)(x)))

    r = np.random.default_rng(0)
    x, y = np.float32(r.normal(size=(128, 32))), np.float32(r.normal(size=(128, 16)))
    variables = jax.jit(Model().init)(random_key(0), x)
    tx = optax.adam(1e-2)

    def step_of(recipe):
        model = jaxmp.wrap(Model(), policy(recipe))

        def of(variables):
            return jnp.mean((model.apply(variables, x) - y) ** 2)

        @jax.jit
        def step(variables, state):
            value, g = jax.value_and_grad(of)(variables)
            updates, state = tx.update(g, state, variables)
            return optax.apply_updates(variables, updates), state, value

        return step, of

    four, _ = step_of("nvfp4")
    last, in_sixteen = step_of("bf16:e2m1:e2m1@nv")
    state, losses = tx.init(variables), []
    for step in [four] * 40 + [last] * 20:
        variables, state, value = step(variables, state)
        losses.append(float(value))
    assert float(in_sixteen(variables)) < 0.5 * losses[0]
    plain = jnp.mean((jaxmp.wrap(Model(), "mixed_bfloat16").apply(variables, x) - y) ** 2)
    np.testing.assert_array_equal(in_sixteen(variables), plain)


@pytest.mark.slow
def test_an_overflow_is_seen_by_the_loss_scaler():
    p = weights()
    p["down"][3, 3] = np.inf
    tx = jaxmp.dynamic_loss_scale(optax.sgd(0.1))
    state = tx.init(p)
    fast = jaxmp.autocast(loss, "mixed_float16,matmul=nvfp4")
    grads = jax.jit(jax.grad(lambda p: jaxmp.loss_scaling.scale_loss(fast(p, TOKENS), state)))(p)
    _, state = tx.update(grads, state, p)
    assert int(state.skipped_count) == 1


def test_layers_of_one_input_have_copies_of_their_own():
    """The two recipes' formats are the same, and their blocks are not."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            q, k = nn.Dense(32, name="q")(x), nn.Dense(32, name="k")(x)
            return q, k, nn.Dense(32, name="out")(q * k)

    x = np.float32(np.random.default_rng(0).standard_t(2, (32, 64)))
    variables = jax.jit(Model().init)(random_key(0), x)
    split = jaxmp.PolicyMap({"k": policy("mxfp4")}, default=policy("nvfp4"))
    models = [jaxmp.wrap(Model(), each) for each in (split, policy("nvfp4"), policy("mxfp4"))]
    (q, k, _), *wholes = jax.jit(lambda v, x: [m.apply(v, x) for m in models])(variables, x)
    for mine, whole, of in zip((q, k), wholes, range(2), strict=True):
        np.testing.assert_array_equal(mine, whole[of])
