"""Quantized weights in Flax modules: under `wrap`, under `autocast`, and as they are."""

from __future__ import annotations

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from numpy_reference import reference

import jaxmp
from jaxmp.quantized import is_quantized

from support import gaussian, random_key, slow_when

FORMATS = ("int8", "int4", "float8_e4m3fn")
POLICIES = ("float32", "mixed_bfloat16", "bfloat16")
TOKENS = jax.device_put(np.arange(12).reshape(2, 6))


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
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=2.0**-bits * 8 * np.abs(want).max(), rtol=0)


@functools.cache
def linen(*, scan):
    model = Linen(scan)
    return model, jax.jit(model.init)(random_key(0), TOKENS)


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
    if policy == "as it is":
        runs = [model.apply]
    else:
        runs = [jaxmp.wrap(model, policy).apply, jaxmp.autocast(model.apply, policy)]
    for run in runs:
        got, want = jax.jit(run)(q, TOKENS), jax.jit(run)(back, TOKENS)
        assert got.dtype == want.dtype
        close(got, want, bits=8 if "b" in policy else 22)
        if policy != "as it is":
            counted = jaxmp.explain(run)(q, TOKENS).products()
            assert counted == jaxmp.explain(run)(back, TOKENS).products()
            assert counted.keys() == {"bfloat16" if "b" in policy else "float32"}


@slow_when(lambda scan, fmt: scan or fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scan", [False, True])
def test_weights_are_saved_for_the_backward_pass_as_they_are_stored(scan, fmt):
    """Not as 16-bit copies of the base, when what is trained is adapters."""
    model, variables = linen(scan=scan)
    q = small({"params": variables["params"]}, fmt)
    run = jaxmp.wrap(model, "mixed_bfloat16").apply

    def loss(added, q, stored=lambda base: base):
        free = jax.tree.map(lambda p: p if is_quantized(p) else p + added, q, is_leaf=is_quantized)
        return jnp.mean(jnp.square(run(stored(free), TOKENS)))

    weights = [w.values for w in jax.tree.leaves(q, is_leaf=is_quantized) if is_quantized(w)]
    saved = jax.tree.leaves(jax.eval_shape(lambda q: jax.vjp(lambda a: loss(a, q), 0.0)[1], q))
    shapes = {tuple(sorted(w.shape)) for w in weights}  # sorted: one may be transposed
    assert not [r for r in saved if r.dtype == jnp.bfloat16 and tuple(sorted(r.shape)) in shapes]
    assert {r.dtype for r in saved} >= {w.dtype for w in weights}
    exact = functools.partial(loss, stored=jaxmp.dequantize)
    close(*(reference(jax.grad(fn))(0.0, q) for fn in (loss, exact)), bits=8)


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
    q = jaxmp.quantize(gaussian(0, 32, 16), min_size=1)
    exact = np.asarray(q.values, np.float32) * np.asarray(q.scale)
    for policy in ("bfloat16", "p=bf16,c=bf16,o=bf16,ops=mul:compute"):
        fn = jaxmp.autocast(lambda w, x: x @ w, policy)
        eye = np.eye(32, dtype=np.float32)
        np.testing.assert_array_equal(fn(q, eye), exact.astype(jnp.bfloat16))


# NNX.


def called(fn, module):
    """What `fn` returns of a module, in NumPy."""
    graph, state = nnx.split(module)
    return reference(lambda state, tokens: fn(nnx.merge(graph, state), tokens))(state, TOKENS)


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
    for m in (q, back):
        m.eval()
    pairs = [(lambda m, t: m(t), q, back)]
    if policy != "as it is":
        wrapped = jaxmp.wrap(q, policy), jaxmp.wrap(back, policy)
        pairs = [(lambda m, t: m(t), *wrapped)]
        if policy != "mixed_bfloat16":
            pairs += [(jaxmp.autocast(lambda m, t: m(t), policy), q, back)]
        a, b = (jaxmp.explain(lambda m, t: m(t))(m, TOKENS).products() for m in wrapped)
        assert a == b
    for call, *modules in pairs:
        got, want = (called(call, m) for m in modules)
        assert got.dtype == want.dtype
        close(got, want, bits=8 if "b" in policy else 22)


@pytest.mark.slow
def test_an_nnx_module_learns_its_averages_and_keeps_its_weights():
    q = jaxmp.wrap(small(Nnx(nnx.Rngs(0))), "mixed_bfloat16")
    before = np.asarray(q.norm.mean[...])
    q(TOKENS)
    assert not np.array_equal(before, q.norm.mean[...])
    assert is_quantized(q.up.kernel.get_raw_value())
    assert isinstance(q.up.kernel[...], jax.Array)
    q.eval()
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        np.testing.assert_array_equal(again(TOKENS), q(TOKENS))


def test_an_nnx_module_quantized_from_16_bits_runs_under_its_policy():
    """Inside, its weights are float32, as those that it was trained with."""

    class Linear(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.eye(16, dtype=jnp.bfloat16))

        def __call__(self, x):
            seen.append(self.kernel[...].dtype)
            return x @ self.kernel[...]

    seen = []
    q = jaxmp.wrap(small(Linear()), "mixed_bfloat16")
    assert is_quantized(q.kernel.get_raw_value())
    assert q(jnp.ones((4, 16))).dtype == jnp.float32
    assert set(seen) == {jnp.dtype("float32")}
    assert q.kernel.get_raw_value().dtype == jnp.bfloat16


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


@pytest.mark.slow
def test_gradients_flow_past_them_and_not_into_them():
    """docs/how_to/lora.md trains adapters beside a quantized base, in Linen and NNX."""
    w = jaxmp.quantize(jax.random.normal(jax.random.key(0), (16, 16)), min_size=1)
    f8 = jaxmp.quantize(w.dequantize(), "float8", min_size=1)
    x = jnp.ones((2, 16))
    for policy in ("float32", "mixed_bfloat16"):
        fn = jaxmp.autocast(lambda w, x: jnp.sum(x @ w), policy)
        dx = jax.grad(fn, 1)(w, x)
        np.testing.assert_allclose(dx[0], w.dequantize().sum(1), rtol=2e-2, atol=5e-2)
        with pytest.raises(TypeError, match="int8"):
            jax.grad(fn)(w, x)
        with pytest.raises(TypeError, match="QuantizedArray: differentiated by its float8"):
            jax.grad(fn)(f8, x)  # it was zero, without a word
