"""The small autocast of docs/concepts/autocast_in_300_lines.md decides what jaxmp decides."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from numpy_reference import reference

import jaxmp

from doc_blocks import blocks, run
from support import ROOT, slow_when

PAGE = (ROOT / "docs" / "concepts" / "autocast_in_300_lines.md").read_text(encoding="utf-8")
BLOCKS = [block.text for block in blocks(PAGE) if block.runs]
# The last two blocks are an example, and compare it with jaxmp.
SOURCE = "\n".join(BLOCKS[:-2])


@functools.cache
def page(source: str = SOURCE):
    """The namespace of the page, or of what a test has made of it."""
    return run(source, {"__name__": "page"})


# --- the programs -------------------------------------------------------------------------------

PROGRAMS = {}
_RANDOM = np.random.default_rng(0)


def array(*shape):
    """A batch, or weights that keep its variance."""
    return (_RANDOM.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)


X = 4 * array(16, 32)
FRAMES = array(5, 16, 32)
TOKENS = _RANDOM.integers(0, 20, 16, dtype=np.int32)
W, U, V = array(32, 32), array(32, 32), array(32, 32)
SCALE, BIAS = 1 + 0.1 * array(32), 0.1 * array(32)
CAUSAL = np.where(np.tri(16) > 0, 0.0, -1e9).astype(np.float32)


def program(*args):
    def register(fn):
        PROGRAMS[fn.__name__] = fn, args
        return fn

    return register


def normalized(h):
    centered = h - jnp.mean(h, -1, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)


@program((W, U), X)
def mlp(params, x):
    w, u = params
    return jnp.mean((jnp.tanh(x @ w) @ u) ** 2)


@program((W, BIAS, U), X)
def mlp_with_a_bias(params, x):
    w, b, u = params
    return jnp.mean(jnp.tanh(x @ w + b) @ u)


@program((W, SCALE, BIAS, U), X)
def layer_norm(params, x):
    w, scale, bias, u = params
    return jnp.mean((normalized(x @ w) * scale + bias) / 2 @ u)


@program((W, SCALE, U), X)
def root_mean_square_norm(params, x):
    w, scale, u = params
    h = x @ w
    h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return jnp.mean(jnp.tanh(h * scale) @ u)


@program((W, U, V), X)
def softmax_attention(params, x):
    q, k, v = (x @ w for w in params)
    return jnp.mean((jax.nn.softmax(q @ k.T / 32**0.5 + CAUSAL) @ v) ** 2)


@program((W, U), X)
def attention_of_two_heads(params, x):
    w, u = params
    q = (x @ w).reshape(16, 2, 16).transpose(1, 0, 2)
    weights = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, q) / 4.0)
    return jnp.mean(jnp.einsum("hqk,hkd->qhd", weights, q).reshape(16, 32) @ u)


@program((W, U, V), X)
def residual_stream(params, x):
    h = x @ params[0]
    for w in params[1:]:
        h = h + jnp.tanh(h @ w)
    return jnp.mean(h**2)


@program((W, U), X)
def residual_stream_of_data(params, x):
    w, u = params
    return jnp.mean((x + jnp.tanh(x) @ w) @ u)


@program((array(20, 32), W, U), TOKENS)
def embedding(params, tokens):
    table, w, u = params
    h = table[tokens]
    return jnp.mean((h + jax.nn.gelu(h @ w)) @ u)


@program((array(3, 3, 3, 8), BIAS[:8], array(512, 10)), array(2, 8, 8, 3))
def convolution(params, x):
    w, b, u = params
    h = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.relu(h + b).reshape(2, -1) @ u)


@program((W, U, BIAS, array(32, 4)), FRAMES)
def recurrent_network_with_a_delay(params, frames):
    w, u, b, out = params

    def cell(carry, x):
        h, delayed = carry
        new = jnp.tanh(x @ w + delayed @ u + b)
        return (new, h), new

    init = jnp.tanh(frames[0] @ w), jnp.zeros((16, 32))
    return jnp.mean(lax.scan(cell, init, frames)[1] @ out)


@program((W, U, V), FRAMES)
def running_average(params, frames):
    w, u, v = params

    def step(average, x):
        y = jax.nn.relu(x @ w + average) @ u
        return 0.9 * average + 0.1 * y, jnp.tanh(y) @ v

    average, ys = lax.scan(step, jnp.zeros((16, 32)), frames)
    return jnp.mean(average * ys[0])


@program((W, U), X)
def relu_by_its_custom_jvp(params, x):
    w, u = params
    return jnp.mean(jax.nn.relu(x @ w) @ u)


@jax.custom_vjp
def dense(x, w):
    return jnp.tanh(x @ w)


def _backward(saved, g):
    x, w, y = saved
    g = g * (1 - y * y)
    return g @ w.T, 2 * x.T @ g  # twice the gradient: inlined, it would differ


dense.defvjp(lambda x, w: (dense(x, w), (x, w, dense(x, w))), _backward)


@program((W, U), X)
def layer_with_a_custom_vjp(params, x):
    w, u = params
    return jnp.mean(dense(dense(x, w), u) ** 2)


@program((W, array(32, 20)), X, TOKENS)
def cross_entropy(params, x, tokens):
    w, u = params
    logits = jax.nn.log_softmax(jnp.tanh(x @ w) @ u)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, None], 1))


@program((W, U), X)
def mean_of_data_added(params, x):
    w, u = params
    return jnp.mean((x @ w + jnp.mean(x, 0)) @ u)


@program((W, SCALE, BIAS, U), X)
def mean_of_280_added(params, x):
    w, scale, bias, u = params
    return jnp.mean(jax.nn.relu(normalized(x @ w + 280.0) * scale + bias) @ u)


@program((W, U), X)
def factor_of_280(params, x):
    w, u = params
    return jnp.mean((x @ w * 280.0 + 2.0) @ u)


@program((W, U), X)
def squared_distances(params, x):
    a, b = (x @ w for w in params)
    distances = jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1) - 2 * a @ b.T
    return jnp.mean(jax.nn.softmax(-distances) @ b)


@program((W, U), X)
def total_of_a_layer_added(params, x):
    w, u = params
    h = x @ w
    return jnp.mean((h + jnp.sum(h)) @ u)


@program((W, U), X)
def gate_by_another_layer(params, x):
    w, u = params
    h = x @ w
    return jnp.mean(h * jnp.exp(jnp.mean(h @ u, -1, keepdims=True)) @ u)


@program((W, U), X)
def gates_and_a_mask(params, x):
    w, u = params
    h = x @ w
    h = jax.nn.sigmoid(h) * jnp.tanh(h)
    return jnp.mean(jnp.where(jnp.arange(32) < 20, h, 0.0) @ u)


@program((W, U), X)
def tied_weights_joined(params, x):
    w, u = params
    h = jnp.concatenate([x @ w, x], 1)
    return jnp.mean(h @ jnp.concatenate([w.T, u], 0))


# --- what the page is ---------------------------------------------------------------------------


def test_it_has_at_most_300_lines():
    assert sum(len(text.splitlines()) for text in BLOCKS) <= 300


def test_it_imports_public_jax_and_numpy():
    imports = re.findall(r"^(?:import|from) ([\w.]+)", SOURCE, re.MULTILINE)
    assert "jax" in imports
    outside = {name for name in imports if name.split(".")[0] in ("jax", "numpy", "jaxmp")}
    assert outside <= {"jax", "jax.numpy", "numpy", "jax.extend.core"}
    assert "_src" not in SOURCE


# --- what it decides ----------------------------------------------------------------------------


@functools.cache
def decided_by_jaxmp(name):
    fn, args = PROGRAMS[name]
    return [(row.op, row.dtype) for row in jaxmp.explain(fn, "mixed_bfloat16")(*args).rows]


def decided_by(scope, name):
    fn, args = PROGRAMS[name]
    return [(op, dtype) for op, dtype, _ in scope["rows"](scope["plan_of"](fn, args)[0])]


def test_there_are_20_programs():
    assert len(PROGRAMS) >= 20


def test_it_decides_what_jaxmp_decides():
    for name in PROGRAMS:
        assert decided_by(page(), name) == decided_by_jaxmp(name), name


# What a rule of the page says → what would be there without the rule.
RULES = {
    "sums are float32": ("rsqrt sin cos reduce_sum", "rsqrt sin cos"),
    "what no matmul wants": ("if not wants & MATMUL:", "if False:"),
    "what only matmuls read": ("name in REORDERS and wants == MATMUL", "False"),
    "a demand goes through": ("wants & MATMUL if kind in", "0 if kind in"),
    "a carry": ("if wants & CARRY:", "if False:"),
    "a carry is data": (
        "Value(FLOAT32, DATA) for v in facts",
        "Value(FLOAT32, PARAMETER) for v in facts",
    ),
    "a carry goes around": ("if carry != wanted[:count]:", "if False:"),
    "a statistic": ("any(v.origins & origins for v in low)", "False"),
    "a matmul starts anew": (
        'facts.alike(facts.low, out, "a matmul")',
        'facts.narrowed("a matmul")',
    ),
    "data": ("if DATA in provenances:", "if False:"),
    "parameters": ("PARAMETER if i in argnums else DATA", "DATA"),
    "large constants": ("{LARGE, SHARED}", "{SHARED}"),
    "shared summands": ("{LARGE, SHARED}", "{LARGE}"),
    "factors": ('name not in ("mul", "div") and provenances', "provenances"),
    "a literal factor": ("not (scales and isinstance(x, Literal))", "True"),
    "small constants": ("CONSTANT if small else LARGE", "LARGE"),
    "choices": ("if low and name in CHOOSES", "if False"),
    "leaves a normalization": ("if normalized and name not in AFFINE:", "if False:"),
    "the bias of a normalization": ('if normalized and name == "add"', "if False"),
    "what repeats": ("FLOAT32 if repeats else value.dtype", "value.dtype"),
}


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_it_decides_otherwise(rule):
    old, new = RULES[rule]
    assert SOURCE.count(old) == 1
    scope = page(SOURCE.replace(old, new))
    assert any(decided_by(scope, name) != decided_by_jaxmp(name) for name in PROGRAMS)


# --- what it computes ---------------------------------------------------------------------------


def gradients(fn, args):
    return jax.tree.leaves(jax.grad(fn)(*args))


# What is decided is compared above, of all of them.
COMPUTED = (
    *("mlp_with_a_bias", "layer_norm", "convolution", "recurrent_network_with_a_delay"),
    *("running_average", "layer_with_a_custom_vjp", "cross_entropy"),
)


@slow_when(lambda name: name not in COMPUTED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_its_gradients_are_float32_and_those_of_jaxmp(name):
    fn, args = PROGRAMS[name]
    mine = page()["autocast"](fn)
    theirs = jaxmp.autocast(fn, "mixed_bfloat16")
    both = (reference(lambda *args, f=f: gradients(f, args))(*args) for f in (mine, theirs))
    for here, there in zip(*both, strict=True):
        assert here.dtype == jnp.float32
        # A few roundings of what they have in common, in other places.
        distance = np.linalg.norm(here - there) / np.linalg.norm(there)
        assert distance < 4 * eps("bfloat16")


def test_it_composes_with_jit_and_vmap():
    fn, args = PROGRAMS["softmax_attention"]
    mine = page()["autocast"](fn)
    batch = np.stack([args[1], 2 * np.asarray(args[1])])
    together = jax.jit(jax.vmap(mine, (None, 0)))(args[0], batch)
    apart = [reference(mine)(args[0], x) for x in batch]
    np.testing.assert_allclose(together, apart, rtol=0.03)


def test_gradients_of_what_is_repeated_are_summed_in_float32():
    fn, args = PROGRAMS["mlp_with_a_bias"]
    jaxpr = jax.make_jaxpr(jax.grad(page()["autocast"](fn)))(*args)
    sums = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    assert len(sums) > 1
    assert {eqn.invars[0].aval.dtype for eqn in sums} == {jnp.dtype("float32")}
