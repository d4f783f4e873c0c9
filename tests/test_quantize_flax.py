"""Quantized weights in Flax modules: under `wrap`, under `autocast`, and as they are."""

from __future__ import annotations

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import jaxmp
from jaxmp.quantized import is_quantized

from support import slow_when

FORMATS = ("int8", "int4", "float8_e4m3fn")
POLICIES = ("float32", "mixed_bfloat16", "bfloat16")
TOKENS = jnp.arange(12).reshape(2, 6)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.relu(nn.Dense(32)(h))), None


class Linen(nn.Module):
    """A tied table, attention, a perceptron, a convolution, a parameter of its own; by a scan."""

    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 16)
        x = embed(tokens) + self.param("table", nn.initializers.normal(0.1), (6, 16))
        if self.scan:
            scanned = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = scanned()(x, None)
        else:
            x, _ = Layer()(x)
        x = nn.Conv(16, (3,))(x)
        return embed.attend(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.LinearGeneral((32,), (16,), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.own = nnx.Param(jax.random.normal(rngs.params(), (16, 16)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.down(nnx.relu(self.up(self.attention(x)))))
        x = x @ self.own + x @ self.own[...]
        return self.embed.attend(x)


def small(params, fmt="int8"):
    return jaxmp.quantize(params, fmt, min_size=64, block_size=8)


def close(got, want, *, bits):
    """Equal but for the order of sums, and what is rounded to so many bits after them."""
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(
        np.asarray(got, np.float32),
        np.asarray(want, np.float32),
        atol=2.0**-bits * 8 * scale,
        rtol=0,
    )


@functools.cache
def linen(*, scan):
    model = Linen(scan)
    return model, jax.jit(model.init)(jax.random.key(0), TOKENS)


# Linen.


@pytest.mark.slow  # quick: `test_layers_of_a_loop` in test_quantize_products.py
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("policy", ["as it is", *POLICIES])
def test_linen_computes_what_it_does_with_the_dequantized_weights(scan, fmt, policy):
    model, variables = linen(scan=scan)
    q = small(variables, fmt)
    back = jaxmp.dequantize(q)
    assert sum(map(is_quantized, jax.tree.leaves(q, is_leaf=is_quantized))) == 9
    run = model.apply if policy == "as it is" else jaxmp.wrap(model, policy).apply
    got, want = jax.jit(run)(q, TOKENS), jax.jit(run)(back, TOKENS)
    assert got.dtype == want.dtype
    close(got, want, bits=8 if "b" in policy else 22)
    if policy != "as it is":
        counted = jaxmp.explain(run)(q, TOKENS).products()
        assert counted == jaxmp.explain(run)(back, TOKENS).products()
        assert counted.keys() == {"bfloat16" if "b" in policy else "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_of_a_plain_apply(policy):
    model, variables = linen(scan=False)
    q = small(variables)
    fast = jaxmp.autocast(model.apply, policy)
    close(fast(q, TOKENS), fast(jaxmp.dequantize(q), TOKENS), bits=7 if "b" in policy else 22)
    rows = jaxmp.explain(model.apply, policy)(q, TOKENS).products()
    assert rows == jaxmp.explain(model.apply, policy)(variables, TOKENS).products()


@pytest.mark.slow
def test_a_frozen_dict_and_a_box_around_it():
    model = nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.ones_init(), (None, "a")))
    variables = FrozenDict(model.init(jax.random.key(0), jnp.ones((2, 16))))
    q = small(variables)
    assert isinstance(q, FrozenDict)
    assert is_quantized(q["params"]["kernel"].value)
    assert q["params"]["kernel"].names == (None, "a")
    for apply in (model.apply, jaxmp.wrap(model, "mixed_bfloat16").apply):
        np.testing.assert_allclose(apply(q, jnp.ones((2, 16))), 16.0)


@pytest.mark.slow
def test_scanned_weights_are_dequantized_in_the_body():
    """Outside of it, the whole stack would be in 16 bits at once."""
    model, variables = linen(scan=True)
    wrapped = jaxmp.wrap(model, "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(wrapped.apply)(small(variables), TOKENS)
    [scan] = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    stacked = [v.aval for v in scan.invars if v.aval.shape[:1] == (2,) and v.aval.ndim > 2]
    assert {a.dtype.name for a in stacked if a.shape[1:] == (16, 32)} == {"int8"}
    outside = [v.aval.shape for e in jaxpr.jaxpr.eqns for v in e.outvars]
    assert (2, 16, 32) not in outside


@pytest.mark.slow
def test_weights_that_were_16_bits_are_float32_to_a_wrapped_module():
    model, variables = linen(scan=False)
    halved = jaxmp.get_policy("bfloat16").cast_to_param(variables)
    wrapped = jaxmp.wrap(model, "mixed_bfloat16")
    assert jaxmp.explain(wrapped.apply)(small(halved), TOKENS).products().keys() == {"bfloat16"}
    assert model.apply(small(halved), TOKENS).dtype == jnp.bfloat16
    out, kept = wrapped.apply(small(halved), TOKENS, mutable=["params"])
    assert out.dtype == np.float32
    assert jax.tree.structure(kept["params"]) == jax.tree.structure(small(halved)["params"])


@pytest.mark.slow
def test_the_residual_stream_stays_low():
    """A table computed from integers is a parameter, as it was: it does not win as data."""
    model, variables = linen(scan=False)
    wrapped = jaxmp.wrap(model, "mixed_bfloat16")

    def adds(variables):
        return [
            r.dtype for r in jaxmp.explain(wrapped.apply)(variables, TOKENS).rows if r.op == "add"
        ]

    assert adds(small(variables)) == adds(variables)
    assert "bfloat16" in adds(variables)


def test_the_scale_is_multiplied_in_float32():
    """Whatever the policy makes of other products."""
    q = jaxmp.quantize(jax.random.normal(jax.random.key(0), (32, 16)), min_size=1)
    exact = np.asarray(q.values, np.float32) * np.asarray(q.scale)
    for policy in ("bfloat16", "p=bf16,c=bf16,o=bf16,ops=mul:low"):
        fn = jaxmp.autocast(lambda w, x: x @ w, policy)
        np.testing.assert_array_equal(fn(q, jnp.eye(32)), exact.astype(jnp.bfloat16))


# NNX.


@slow_when(lambda fmt, policy: (fmt, policy) != ("int8", "mixed_bfloat16"))
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("policy", ["as it is", *POLICIES])
def test_nnx_computes_what_it_does_with_the_dequantized_weights(fmt, policy):
    module = Nnx(nnx.Rngs(0))
    q = small(module, fmt)
    back = jaxmp.dequantize(q)
    assert not any(map(is_quantized, jax.tree.leaves(nnx.state(module), is_leaf=is_quantized)))
    held = jax.tree.leaves(nnx.state(q), is_leaf=is_quantized)
    assert sum(map(is_quantized, held)) == 8
    call = nnx.jit(lambda m, t: m(t))
    for m in (q, back):
        m.eval()
    bits = 8 if "b" in policy else 22
    if policy == "as it is":
        close(call(q, TOKENS), call(back, TOKENS), bits=bits)
        return
    cast = nnx.jit(jaxmp.autocast(lambda m, t: m(t), policy))
    close(cast(q, TOKENS), cast(back, TOKENS), bits=bits)
    a, b = jaxmp.wrap(q, policy), jaxmp.wrap(back, policy)
    assert call(a, TOKENS).dtype == call(b, TOKENS).dtype
    close(call(a, TOKENS), call(b, TOKENS), bits=bits)
    count = jaxmp.explain(lambda m, t: m(t))
    assert count(a, TOKENS).products() == count(b, TOKENS).products()


@pytest.mark.slow
def test_an_nnx_module_learns_its_averages_and_keeps_its_weights():
    q = jaxmp.wrap(small(Nnx(nnx.Rngs(0))), "mixed_bfloat16")
    before = np.asarray(q.norm.mean[...])
    q(TOKENS)
    assert not np.array_equal(before, q.norm.mean[...])
    assert is_quantized(q.up.kernel.get_raw_value())
    assert isinstance(q.up.kernel[...], jax.Array)


@pytest.mark.slow
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_an_nnx_module_copies_and_pickles(again):
    q = small(Nnx(nnx.Rngs(0)))
    np.testing.assert_array_equal(again(q)(TOKENS), q(TOKENS))


@pytest.mark.slow
def test_an_nnx_state_and_its_shapes():
    module = Nnx(nnx.Rngs(0))
    state = nnx.state(module, nnx.Param)
    q = small(state)
    assert jax.tree.structure(jax.eval_shape(small, state)) == jax.tree.structure(q)
    assert jax.tree.structure(jaxmp.dequantize(q)) == jax.tree.structure(state)
    want = small(module)(TOKENS)
    nnx.update(module, q)
    np.testing.assert_array_equal(module(TOKENS), want)
    shapes = nnx.eval_shape(lambda: small(Nnx(nnx.Rngs(0))))
    assert isinstance(shapes.up.kernel.get_raw_value().values, jax.ShapeDtypeStruct)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_a_readers_hook_of_the_authors_stays():
    def doubled(_, value):
        return 2 * value

    module = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    module.kernel = nnx.Param(jnp.eye(16), on_get_value=doubled)
    q = small(module)
    x = jnp.ones((1, 16))
    np.testing.assert_allclose(q(x), 2 * x, rtol=1e-6)
    np.testing.assert_allclose(jaxmp.dequantize(q)(x), 2 * x, rtol=1e-6)
    assert jaxmp.dequantize(q).kernel.get_metadata()["on_get_value"] == (doubled,)


@pytest.mark.slow
def test_nnx_scan_over_stacked_layers():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(16, 16, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return jnp.tanh(layer(x))

    layers, x = make(nnx.Rngs(0)), jnp.ones((2, 16))
    q = small(layers)
    assert q.kernel.get_raw_value().scale.shape == (3, 1, 16)
    back = jaxmp.dequantize(q)
    close(forward(q, x), forward(back, x), bits=22)
    close(jaxmp.autocast(forward, "mixed_bfloat16")(q, x), forward(back, x), bits=7)


# Training beside them.


@pytest.mark.slow
def test_lora_learns_in_linen_with_the_base_quantized():
    base = nn.Dense(16)
    variables = base.init(jax.random.key(0), jnp.ones((1, 16)))
    q = small(variables)
    fast = jaxmp.wrap(base, "mixed_bfloat16")
    x = jax.random.normal(jax.random.key(1), (32, 16))
    want = x @ jax.random.normal(jax.random.key(2), (16, 16))
    lora = {"a": 0.1 * jax.random.normal(jax.random.key(3), (16, 16)), "b": jnp.zeros((16, 16))}
    tx = jaxmp.loss_scale_for("mixed_bfloat16", optax.adam(3e-2))
    state = jaxmp.TrainState.create(apply_fn=None, params=lora, tx=tx)

    @jax.jit
    def step(state, q):
        def loss(lora):
            y = fast.apply(q, x) + jaxmp.autocast(lambda x: x @ lora["a"] @ lora["b"], "bf16")(x)
            return jnp.mean((y - want) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state, first = step(state, q)
    for _ in range(60):
        state, last = step(state, q)
    assert float(last) < 0.3 * float(first)


@pytest.mark.slow
def test_lora_learns_in_nnx_with_the_base_quantized():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(16, 16, rngs=rngs)
            self.lora = nnx.LoRA(16, 4, 16, rngs=rngs)

        def __call__(self, x):
            return self.base(x) + self.lora(x)

    module = Adapted(nnx.Rngs(0))
    q = jaxmp.wrap(small(module), "mixed_bfloat16")
    assert not is_quantized(q.lora.lora_a.get_raw_value())
    x = jnp.ones((2, 16))
    which = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2), argnums=which)(q)
    plain = nnx.grad(lambda m: jnp.mean(m(x) ** 2), argnums=which)(jaxmp.dequantize(small(module)))
    assert {str(p[-1]) for p, _ in nnx.to_flat_state(grads)} == {"lora_a", "lora_b"}
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=3e-2, atol=1e-3), grads, plain)


@pytest.mark.slow
def test_gradients_flow_past_them_and_not_into_them():
    w = jaxmp.quantize(jax.random.normal(jax.random.key(0), (16, 16)), min_size=1)
    f8 = jaxmp.quantize(w.dequantize(), "float8", min_size=1)
    x = jnp.ones((2, 16))

    def loss(w, x):
        return jnp.sum(x @ w)

    for fn in (jaxmp.autocast(loss, "float32"), jaxmp.autocast(loss, "mixed_bfloat16")):
        dx = jax.grad(fn, 1)(w, x)
        np.testing.assert_allclose(dx[0], w.dequantize().sum(1), rtol=2e-2, atol=5e-2)
        with pytest.raises(TypeError, match="int8"):
            jax.grad(fn)(w, x)
        with pytest.raises(TypeError, match="QuantizedArray: differentiated by its float8"):
            jax.grad(fn)(f8, x)  # it was zero, without a word
