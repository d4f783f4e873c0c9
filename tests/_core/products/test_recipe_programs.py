"""Recipes in whole programs: which products they multiply, and under every transformation."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp.testing import PrecisionError, assert_products_in

from support import gaussian, relative, slow_when

POLICY = "mixed_float8"
RECIPES = ("float8", "e4m3:e5m2:e5m2", "e4m3@row", "int8", "e4m3:bf16:bf16")


def weights(seed=0):
    r = np.random.default_rng(seed)
    sizes = {"table": (32, 32), "up": (32, 64), "down": (64, 32), "last": (32, 32)}
    drawn = {k: np.float32(r.normal(size=n) / np.sqrt(n[0])) for k, n in sizes.items()}
    return jax.device_put(drawn)


TOKENS = np.arange(128, dtype=np.int32) * 7 % 32


def mlp(p, x):
    return jnp.tanh(jax.nn.gelu(x @ p["up"]) @ p["down"]) @ p["last"]


def loss(p, tokens):
    """Three layers between an embedding and logits: three products are to be in 8 bits."""
    return jnp.mean((mlp(p, p["table"][tokens]) @ p["table"].T) ** 2)


def counts(fn, policy=POLICY, tokens=TOKENS):
    return jaxmp.explain(fn, policy)(weights(), tokens).quantized().counts()["forward"]


# Which products.


def test_layers_multiply_in_8_bits_forward_and_backward():
    found = jaxmp.explain(loss, POLICY)(weights(), TOKENS)
    assert found.products() == {"float8_e4m3fn": 3, "bfloat16": 1}
    assert found.quantized().reasons() == {"no matmul or convolution reads the result": 1}
    report = jaxmp.audit(jax.grad(jaxmp.autocast(loss, POLICY)))(weights(), TOKENS)
    assert report.quantized().counts() == {"forward": (3, 4), "backward": (6, 8)}
    assert not report.findings
    assert "products in 8 bits  3 of 4 forward, 6 of 8 backward" in str(report)
    assert "1 not: no matmul or convolution reads the result" in str(found)
    # Results in 16 bits are no reason for the logits to be in 8.
    assert counts(loss, "bfloat16,matmul=float8") == (3, 4)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 32, name="table")(tokens)
        q, k, v = (nn.Dense(32, name=name)(x) for name in "qkv")
        x = x + nn.Dense(32, name="out")(jax.nn.softmax(q @ k.T / 6) @ v)
        return nn.Dense(16, name="logits")(x)


def attention(policy):
    model, x = jaxmp.wrap(Attention(), policy), TOKENS[:48]
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x


def test_products_of_attention_itself_have_no_weight():
    apply, *args = attention(POLICY)
    found = jaxmp.explain(apply)(*args).quantized()
    assert {p.path.split("/")[-1]: p.quantized for p in found.products} == {
        "q": True, "k": True, "v": True, "Attention": False, "out": True, "logits": False
    }  # fmt: skip
    # What several products read is quantized once: what q, k and v read, and what `out` reads.
    jaxpr = str(jax.make_jaxpr(apply)(*args))
    assert len(re.findall(r"f8_e4m3fn\[48,32\] = convert_element_type", jaxpr)) == 2


def saved(policy):
    """How many matrices of each dtype are saved for the backward pass."""
    fast = jaxmp.autocast(loss, policy)
    pullback = jax.eval_shape(lambda p: jax.vjp(fast, p, TOKENS)[1], weights())
    return Counter(str(x.dtype) for x in jax.tree.leaves(pullback) if x.ndim == 2)


def test_the_backward_pass_keeps_8_bits_only():
    found, plain = saved(POLICY), saved("mixed_bfloat16")
    assert found["uint8"] == 6  # of three products both operands, as bits
    # JAX 0.10 keeps what tanh returns for tanh itself, too.
    assert found["bfloat16"] <= plain["bfloat16"] - 5


def test_sizes_that_matrix_units_do_not_take_are_told():
    def odd(p, tokens):
        return jnp.mean((jnp.tanh(p["table"][tokens] @ p["up"][:, :20]) @ p["up"][:, :20].T) ** 2)

    found = jaxmp.explain(odd, POLICY)(weights(), TOKENS).quantized()
    assert found.products[0].why_not == "a size is 20, not a multiple of 16"
    assert not found.products[0].intended
    with pytest.warns(UserWarning, match="float8 products: 100% of the FLOPs of layers stay in"):
        report = jaxmp.audit(jaxmp.autocast(odd, POLICY))(weights(), TOKENS)
    assert [(f.kind, f.fix[:6]) for f in report.findings] == [("not-quantized", "pad it")]
    with pytest.raises(PrecisionError, match="not in 8 bits: a size is 20"):
        report.assert_no("not-quantized")


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [("nvfp4", "4 bits"), ("int8", "8 bits"), ("bf16:e2m1:e4m3@mx", "8 or 4 bits")],
)
def test_an_audit_says_the_bits_of_the_recipe(recipe, bits):
    policy = f"p=float32,c=bfloat16,o=float32,matmul={recipe}"
    fn = jaxmp.autocast(lambda w, x: jnp.tanh(x @ w) @ w.T, policy)
    with pytest.warns(UserWarning, match="100% of the FLOPs of layers stay in"):
        report = jaxmp.audit(fn)(np.ones((32, 20), "float32"), np.ones((16, 32), "float32"))
    [finding] = report.findings
    assert finding.what.startswith(f"not in {bits}: a size is 20")


def test_convolutions_stay_in_16_bits_and_say_so():
    layers = [nn.Conv(16, (3, 3)), nn.relu, nn.Conv(16, (3, 3))]
    model, x = jaxmp.wrap(nn.Sequential(layers), POLICY), jnp.ones((2, 8, 8, 16))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with pytest.warns(UserWarning, match="2 because conv_general_dilated is not a matrix product"):
        jax.eval_shape(model.apply, variables, x)


def test_assertions_about_8_bits():
    for policy, dtype, said in (
        (POLICY, "int8", "float8_e4m3fn"),
        ("mixed_bfloat16,matmul=e4m3:e5m2:e5m2", "e4m3", r"float8_e4m3fn\*float8_e5m2"),
        ("mixed_bfloat16", "float8_e4m3fn", "bfloat16"),
    ):
        step = jax.grad(jaxmp.autocast(loss, policy))
        with pytest.raises(PrecisionError, match=f"multiplies {said}"):
            assert_products_in(step, dtype=dtype)(weights(), TOKENS)


@slow_when(lambda recipe: recipe != "mxfp8")
@pytest.mark.parametrize("recipe", ["float8", "mxfp8", "blockwise_float8"])
def test_blocks_that_are_emulated_count_as_what_they_are(recipe):
    step = jax.grad(jaxmp.autocast(loss, f"mixed_bfloat16,matmul={recipe}"))
    found = jaxmp.audit(step)(weights(), TOKENS).quantized()
    assert found.counts() == {"forward": (3, 4), "backward": (6, 8)}
    assert_products_in(step, dtype="float8_e4m3fn")(weights(), TOKENS)


def test_modules_may_have_another_policy():
    apply, *args = attention(jaxmp.PolicyMap({"out": "mixed_bfloat16"}, default=POLICY))
    found = jaxmp.explain(apply)(*args).quantized()
    quantized = {p.path.split("/")[-1] for p in found.products if p.quantized}
    assert quantized == {"q", "k", "v"}
    spelled = jaxmp.PolicyMap({"out": "mixed_bfloat16,matmul=e4m3:e5m2:bf16@row"}, default=POLICY)
    apply, *args = attention(spelled)
    rows = jaxmp.explain(apply)(*args).rows
    assert [r.reason for r in rows if r.path.endswith("out") and r.op == "dot_general"] == [
        "matmul or convolution, e4m3:e5m2:bf16@row"
    ]


def test_nnx_modules():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 32, rngs=rngs)
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))

    model = Model(nnx.Rngs(0))
    fast = jaxmp.wrap(model, POLICY)
    found = jaxmp.explain(lambda m, t: m(t))(fast, TOKENS).quantized()
    assert found.counts() == {"forward": (2, 3)}
    assert relative(*reference(lambda tokens: (fast(tokens), model(tokens)))(TOKENS)) < 0.06


# Every transformation.


def scanned(p, tokens):
    def layer(x, w):
        return x + jax.nn.relu(x @ w[0]) @ w[1], None

    stacked = jnp.stack([p["up"]] * 3), jnp.stack([p["down"]] * 3)
    x, _ = jax.lax.scan(layer, p["table"][tokens], stacked)
    return jnp.mean((x @ p["table"].T) ** 2)


def refined(p, tokens):
    """A scan, and a while loop, whose carries start as data, and a layer after them."""
    x = jnp.sin(p["table"][tokens] * tokens[:, None])
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, jnp.stack([p["last"]] * 3))
    _, x = jax.lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ p["last"])), (0, x)
    )
    return jnp.mean((x @ p["last"] @ p["table"].T) ** 2)


def branched(p, tokens):
    x = p["table"][tokens]
    h = jax.lax.cond(
        tokens[0] < 1, lambda x: jnp.tanh(x @ p["up"]), lambda x: jax.nn.relu(x @ p["up"]), x
    )
    return jnp.mean((h @ p["down"] @ p["table"].T) ** 2)


def experts(p, tokens):
    x = p["table"][tokens].reshape(8, 16, 32)
    h = jnp.tanh(jnp.einsum("ecd,edf->ecf", x, jnp.stack([p["up"]] * 8)))
    return jnp.mean((jnp.einsum("ecf,fd->ecd", h, p["down"]) @ p["table"].T) ** 2)


def mixture(p, tokens):
    sizes = jnp.array([48, 0, 16, 64], jnp.int32)
    x = jnp.sin(p["table"][tokens])
    h = jax.lax.ragged_dot(x, jnp.stack([p["up"], 2 * p["up"], p["up"] ** 2, -p["up"]]), sizes)
    return jnp.mean((jnp.tanh(h) @ p["down"] @ p["table"].T) ** 2)


@jax.custom_vjp
def layer_with_vjp(x, w):
    return jnp.tanh(x @ w)


def backward(saved, g):
    x, w, y = saved
    g = g * (1 - y**2)
    return g @ w.T, x.T @ g


layer_with_vjp.defvjp(lambda x, w: (layer_with_vjp(x, w), (x, w, jnp.tanh(x @ w))), backward)


@jax.custom_jvp
def layer_with_jvp(x, w):
    return jnp.tanh(x @ w)


@layer_with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y * y) * (dx @ w + x @ dw)


def with_rule(layer):
    def fn(p, tokens):
        h = layer(layer(p["table"][tokens], p["up"]), p["down"])
        return jnp.mean((h @ p["last"] @ p["table"].T) ** 2)

    return fn


def sharded(p, tokens):
    return jax.shard_map(
        lambda p, t: jax.lax.pmean(loss(p, t), "d"),
        mesh=jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(P(), P("d")),
        out_specs=P(),
    )(p, tokens)


PROGRAMS = {
    "plain": (loss, 3),
    "jit": (jax.jit(loss), 3),
    "scan": (scanned, 6),
    "cond": (branched, 3),
    "experts": (experts, 2),
    "ragged_dot": (mixture, 2),
    "custom_vjp": (with_rule(layer_with_vjp), 3),
    "custom_jvp": (with_rule(layer_with_jvp), 3),
    "shard_map": (sharded, 3),
    "vmap": (lambda p, t: jnp.mean(jax.vmap(loss, (None, 0))(p, t.reshape(4, 32))), 3),
}


QUICK = ("scan", "custom_jvp", "shard_map")  # and ragged products in `test_open_sizes`


@slow_when(lambda name, recipe: recipe == "int8" or name not in QUICK)
@pytest.mark.parametrize("recipe", ["float8", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, recipe):
    """All their layers are in 8 bits, and their gradients as good as 8 bits are."""
    fn, quantized = PROGRAMS[name]
    policy = f"mixed_bfloat16,matmul={recipe}"
    assert counts(fn, policy)[0] == quantized
    fast = jaxmp.autocast(fn, policy)
    plain = loss if name == "shard_map" else fn  # a mean over equal parts is that of all
    exact = jax.jit if name == "ragged_dot" else reference  # which has none
    value, want = exact(jax.value_and_grad(plain))(weights(), TOKENS)
    compiler = reference if (name, recipe) == ("custom_jvp", "float8") else jax.jit
    fast_value, got = compiler(jax.value_and_grad(fast))(weights(), TOKENS)
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype("float32")}
    # Each of a chain of products adds its own error.
    most = {"float8": 0.038, "int8": 0.011}[recipe] * np.sqrt(2 * quantized)
    assert relative(fast_value, value) < most
    assert 1e-3 < relative(got, want) < most


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformations_outside(recipe):
    fast = jaxmp.autocast(loss, f"mixed_bfloat16,matmul={recipe}")
    p = weights()
    want = jax.jit(jax.grad(loss))(p, TOKENS)
    most = 0.03 if recipe == "int8" else 0.13
    assert relative(jax.grad(fast)(p, TOKENS), want) < most
    both = jax.tree.map(lambda x: jnp.stack([x, 4 * x]), p)
    each = jax.jit(jax.vmap(jax.grad(fast), (0, None)))(both, TOKENS)
    assert relative(jax.tree.map(lambda x: x[0], each), want) < most
    # One of them is compiled as a whole, and XLA keeps some 16-bit values of that in float32.
    linear = jax.linearize(lambda p: fast(p, TOKENS), p)[0]
    assert relative(linear, fast(p, TOKENS)) < 2**-8


POLICIES = (
    "everything_saveable",
    None,
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "save_only_these_names",
)


def remat(name):
    policy = getattr(jax.checkpoint_policies, name) if name else None
    policy = policy("hidden") if name == "save_only_these_names" else policy

    @functools.partial(jax.checkpoint, policy=policy)
    def block(p, x):
        h = checkpoint_name(x @ p["up"], "hidden")
        return jnp.tanh(jax.nn.gelu(h) @ p["down"])

    return lambda p, t: jnp.mean((block(p, p["table"][t]) @ p["last"] @ p["table"].T) ** 2)


def products_run(fn):
    return str(jax.make_jaxpr(jax.grad(fn))(weights(), TOKENS)).count(" dot_general[")


@slow_when(lambda name: name != POLICIES[0])
@pytest.mark.parametrize("name", POLICIES)
def test_what_jax_checkpoint_saves_is_what_its_policy_says(name):
    """Products are seen by policies, and what is recomputed is the same."""
    fast = jaxmp.autocast(remat(name), POLICY)
    again = jaxmp.autocast(remat("nothing_saveable"), POLICY)
    got, want = (reference(jax.grad(fn))(weights(), TOKENS) for fn in (fast, again))
    # What is recomputed may be fused otherwise, and then rounded to the next of 8 bits.
    assert relative(got, want) < 0.05
    plain = jaxmp.autocast(remat(name), "mixed_bfloat16")
    assert products_run(fast) == products_run(plain)


def test_loops_whose_carries_are_data():
    """A layer after them reads what they return, so all their products are in 8 bits."""
    found = jaxmp.explain(refined, POLICY)(weights(), TOKENS).quantized()
    assert [(p.quantized, p.count) for p in found.products] == [
        (True, 3), (True, 1), (True, 1), (False, 1)
    ]  # fmt: skip


# Derivatives of higher order, and the other order.


@slow_when(lambda recipe: recipe == "mxfp8")
@pytest.mark.parametrize("recipe", ["float8", "mxfp8"])
def test_a_second_derivative_is_refused_by_name(recipe):
    policy = f"mixed_bfloat16,matmul={recipe}"
    fast = jaxmp.autocast(loss, policy)

    @functools.partial(jaxmp.autocast, policy=policy)
    def linear(p, t):
        return jnp.sum(mlp(p, jnp.sin(p["table"][t])) @ p["last"])

    def norm(fn):
        return lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(jax.grad(fn)(p, TOKENS)))

    for fn in (fast, linear):  # a loss that is linear in the product, as well
        with pytest.raises(
            TypeError, match=rf"the second derivative of the product at .* {recipe}"
        ):
            jax.eval_shape(jax.grad(norm(fn)), weights())


def test_a_forward_derivative_is_refused_by_name():
    fast = jaxmp.autocast(loss, POLICY)
    with pytest.raises(TypeError, match=r"forward-mode .* of the product at .* float8: .*jax.grad"):
        jax.jvp(lambda p: fast(p, TOKENS), (weights(),), (weights(),))


@pytest.mark.slow
def test_gradients_in_16_bits_may_be_differentiated_again():
    """Triple precision has a second derivative as ever."""

    def norm(fn):
        return lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(jax.grad(fn)(p, TOKENS)))

    fast = jaxmp.autocast(loss, "float32,matmul=f32:bf16:bf16")
    got, want = (jax.jit(jax.grad(norm(fn)))(weights()) for fn in (fast, loss))
    assert relative(got, want) < 0.02


def test_what_is_no_second_derivative_is_not_refused():
    fast = jaxmp.autocast(loss, POLICY)

    @reference
    def run(p):
        value = lambda p: jax.vjp(lambda q: fast(q, TOKENS), p)[0]  # noqa: E731
        return jax.grad(value)(p), jax.grad(fast)(p, TOKENS)

    # What is differentiated twice leaves its products in 16 bits.
    assert relative(*run(weights())) < 2**-8


def test_a_backward_pass_in_the_program_is_in_16_bits_and_says_so():
    """`autocast(grad(f))`: differentiate what autocast returns."""
    step = jax.grad(loss)
    with pytest.warns(UserWarning, match="8 because a backward pass in the program"):
        report = jaxmp.audit(step, policy=POLICY)(weights(), TOKENS)
    assert report.quantized().counts() == {"forward": (3, 4), "backward": (0, 8)}
    assert {f.kind for f in report.findings} == {"not-quantized"}


# Other formats than 8 bits.


@slow_when(lambda rule: rule != "plain")
@pytest.mark.parametrize("rule", ["plain", "custom_vjp", "scan"])
def test_triple_precision(rule):
    """Float32 forward, bitwise; bfloat16 gradients, of what is kept in bfloat16."""
    fn, _ = PROGRAMS[rule]
    fast = jaxmp.autocast(fn, "float32,matmul=f32:bf16:bf16")
    p = weights()
    assert jax.jit(fast)(p, TOKENS) == jax.jit(fn)(p, TOKENS)
    got, want = (reference(jax.grad(f))(p, TOKENS) for f in (fast, fn))
    assert 1e-3 < relative(got, want) < 1e-2


def test_triple_precision_keeps_16_bits_for_the_backward_pass():
    triple = "float32,matmul=f32:bf16:bf16"
    assert saved(triple)["bfloat16"] == 8
    for policy, forward, backward in (
        (triple, "float32", "bfloat16"),
        ("mixed_bfloat16,matmul=bf16:f32:f32", "bfloat16", "float32"),  # the reverse of it
    ):
        share = jaxmp.audit(jax.grad(jaxmp.autocast(loss, policy)))(weights(), TOKENS).product_flops
        assert share(backward=False).keys() == {forward}
        assert share(backward=True).keys() == {backward}


def test_a_float32_region_stays_float32():
    def with_region(p, t):
        h = jaxmp.full_precision(lambda x: x @ p["up"])(p["table"][t])
        return jnp.mean((h @ p["down"] @ p["table"].T) ** 2)

    assert jaxmp.explain(with_region, POLICY)(weights(), TOKENS).products() == {
        "float32": 1, "float8_e4m3fn": 1, "bfloat16": 1
    }  # fmt: skip


# Loss scaling and devices.


def test_an_overflow_is_seen_by_the_loss_scaler():
    p = weights()
    p["down"] = np.array(p["down"])
    p["down"][3, 3] = np.inf
    tx = jaxmp.dynamic_loss_scale(optax.sgd(0.1))
    fast = jaxmp.autocast(loss, "mixed_float16,matmul=float8")

    @jax.jit
    def step(p):
        state = tx.init(p)
        grads = jax.grad(lambda p: jaxmp.loss_scaling.scale_loss(fast(p, TOKENS), state))(p)
        return tx.update(grads, state, p)

    updates, state = step(p)
    assert int(state.skipped_count) == 1
    assert all(not np.any(x) for x in jax.tree.leaves(updates))


@slow_when(lambda sharded, recipe: (sharded, recipe) != ("weights", "float8"))
@pytest.mark.parametrize("recipe", ["float8", "e4m3@row", "mxfp8", "f32:bf16:bf16"])
@pytest.mark.parametrize("sharded", ["batch", "weights"])
def test_sharding_in_types(sharded, recipe):
    """Gradients have the shardings of what they are of, where types say which that is."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    policy = "float32" if recipe.startswith("f32") else "mixed_bfloat16"

    def fn(p, x):
        h = jax.nn.relu(jnp.sin(x * 2) @ p["up"])
        return jnp.mean((jnp.tanh(h @ p["down"]) @ p["last"]) ** 2)

    p, x = weights(), gaussian(1, 128, 32)
    want = reference(jax.grad(fn))(p, x)
    rows, whole = NamedSharding(mesh, P("d", None)), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        p = jax.device_put(p, rows if sharded == "weights" else whole)
        x = jax.device_put(x, rows if sharded == "batch" else whole)
        fast = jaxmp.autocast(fn, f"{policy},matmul={recipe}")
        with warnings.catch_warnings(action="ignore"):  # blocks are not cut, and say so
            got = jax.jit(jax.grad(fast))(p, x)
    assert relative(got, want) < 0.13
    for k, gradient in got.items():
        assert gradient.sharding.is_equivalent_to(p[k].sharding, 2)


def test_sharded_weights_are_gathered_in_8_bits():
    """int8, which CPUs have: float8 they emulate in wider dtypes, collectives included."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, batch = NamedSharding(mesh, P("d", None)), NamedSharding(mesh, P("d"))
    p, tokens = jax.device_put(weights(), rows), jax.device_put(TOKENS, batch)
    step = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_int8"))).lower(p, tokens).compile()
    gathered = Counter(re.findall(r"= (\w+)\[[\d,]+\]\S* all-gather\(", step.as_text()))
    assert gathered["s8"] == 3  # each layer's weights, once for all three products
    assert relative(step(p, tokens), reference(jax.grad(loss))(weights(), TOKENS)) < 0.03
