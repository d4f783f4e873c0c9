"""What runs in which precision inside a wrapped NNX module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp

from nnx_models import MODELS, POLICY, WIDTH, MoE, abstract, functions, made, uniform
from support import (
    assert_same_program,
    contraction_dtypes,
    contractions,
    float16_is_slow,
    ones,
    primitives,
    slow_when,
)


def counts(model: nnx.Module, x: object, policy: object) -> tuple[dict, dict]:
    """The contractions of a model under a policy, forward and backward."""
    _, gradient, state = functions(jaxmp.wrap(model, policy), x)
    return forward_counts(model, x, policy), dict(contraction_dtypes(gradient, *state))


def forward_counts(model: nnx.Module, x: object, policy: object) -> dict:
    forward, _, state = functions(jaxmp.wrap(model, policy), x)
    return dict(contraction_dtypes(forward, *state))


def mapped(overrides: dict, default: object = POLICY) -> jaxmp.PolicyMap:
    return jaxmp.PolicyMap(overrides, default=default)


@float16_is_slow
@slow_when(lambda name: name in ("mlp", "gru", "optimized lstm"))
@pytest.mark.parametrize("policy", [POLICY, "mixed_float16"])
@pytest.mark.parametrize("name", MODELS)
def test_all_contractions_are_low_forward_and_backward(name, policy):
    x = MODELS[name].x()
    forward, backward = counts(abstract(name), x, policy)
    dtype = policy.removeprefix("mixed_")
    # As many as in the model itself: none is left out, none done twice.
    plain_forward, plain_gradient, state = functions(abstract(name), x)
    # A dispatch by one-hot rows contracts nothing: by law it is float32.
    outer = {"float32": 1} if name == "moe" else {}
    want = [contraction_dtypes(f, *state)["float32"] for f in (plain_forward, plain_gradient)]
    assert forward == {dtype: want[0] - len(outer), **outer}
    assert backward == {dtype: want[1] - len(outer), **outer}
    assert sum(forward.values()) == MODELS[name].contractions


def step(model: nnx.Module, x: jax.Array) -> tuple[Callable[..., Any], nnx.State]:
    """Outputs, gradients and what they change, as a function of the model's state; and that."""
    graphdef, state = nnx.split(model)

    def fn(state: nnx.State) -> tuple:
        model = nnx.merge(graphdef, state, copy=True)
        out = model(x), nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        return out, nnx.state(model)

    return fn, state


@slow_when(lambda name: name not in ("attention", "cnn", "moe", "scanned"))
@pytest.mark.parametrize("name", MODELS)
def test_float32_is_bitwise_the_identity(name):
    policies = ["float32"]
    if name in ("moe", "scanned"):  # with products of its own, and with parts that are entered
        policies.append(mapped({"**": "float32"}, "float32"))
    as_written, state = step(abstract(name), MODELS[name].x())
    for policy in policies:
        wrapped, same_state = step(jaxmp.wrap(abstract(name), policy), MODELS[name].x())
        assert jax.tree.structure(same_state) == jax.tree.structure(state)
        assert_same_program(as_written, wrapped, state)


def test_norms_and_softmax_stay_float32():
    for name in ("cnn", "attention"):
        forward, _, state = functions(jaxmp.wrap(abstract(name), POLICY), MODELS[name].x())
        found = primitives(forward, *state)
        for primitive in ("rsqrt", "reduce_sum", "exp"):
            assert not found[primitive, "bfloat16"], (name, primitive)
        assert found["rsqrt", "float32"], name


def test_output_dtype():
    for policy, dtype in (
        (POLICY, "float32"),
        ("p=f32,c=bf16,o=bf16", "bfloat16"),
        ("p=f32,c=bf16,o=f16", "float16"),
        ("p=f32,c=f32,o=bf16", "bfloat16"),
    ):
        wrapped = jaxmp.wrap(abstract("mlp"), policy)
        found = nnx.eval_shape(
            lambda m: (m(uniform(4, WIDTH)), m.encode(uniform(4, WIDTH))), wrapped
        )
        assert [out.dtype for out in found] == [dtype] * 2, policy


# PolicyMap.


F16, F32 = "mixed_float16", "float32"
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
ROWS = [
    ({"layers/0/*": F32}, POLICY, {"float32": 2, "bfloat16": 5}),
    slow({"layers/0": F32}, POLICY, {"float32": 2, "bfloat16": 5}),
    slow({"layers/*/up": F32}, POLICY, {"float32": 3, "bfloat16": 4}),
    ({"layers/[12]/**": F32}, POLICY, {"float32": 4, "bfloat16": 3}),
    slow({"**/down": F32}, POLICY, {"float32": 3, "bfloat16": 4}),
    slow({"head": F32}, POLICY, {"float32": 1, "bfloat16": 6}),
    slow({"**": F32}, POLICY, {"float32": 7}),
    ({nnx.Linear: F32}, POLICY, {"float32": 7}),
    ({nnx.LayerNorm: F32}, POLICY, {"bfloat16": 7}),
    # The first match wins.
    ({"layers/0/up": F16, "layers/0/**": F32}, POLICY, {"float16": 1, "float32": 1, "bfloat16": 5}),
    slow(
        {"layers/0/*": F32, "layers/*/up": F16}, POLICY, {"float32": 2, "float16": 2, "bfloat16": 3}
    ),
    # So does the innermost.
    ({"layers/1": F32, "layers/1/down": POLICY}, F16, {"float16": 5, "float32": 1, "bfloat16": 1}),
    slow({"layers/0": F16, "layers/2": F32}, POLICY, {"float16": 2, "float32": 2, "bfloat16": 3}),
    ({"layers/1": POLICY}, F32, {"bfloat16": 2, "float32": 5}),
]


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Pairs(nnx.Module):
    """Little but products."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Pair(rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("overrides", "default", "forward"), ROWS)
def test_patterns_and_classes(overrides, default, forward):
    model = nnx.eval_shape(lambda: Pairs(nnx.Rngs(0)))
    got, backward = counts(model, uniform(4, WIDTH), mapped(overrides, default))
    assert got == forward
    # Each has two more in the backward pass, the first layer's input included.
    assert backward == {dtype: 3 * n for dtype, n in forward.items()}


def test_a_pattern_gives_float32_to_exactly_that_block():
    wrapped = jaxmp.wrap(abstract("listed"), mapped({"layers/1/**": "float32"}))
    forward, _, state = functions(wrapped, uniform(4, WIDTH))
    found = [c.in_dtypes[0] for c in contractions(forward, *state)]  # in the order of the layers
    assert found == ["bfloat16"] * 2 + ["float32"] * 2 + ["bfloat16"] * 3


def test_inside_scan_and_remat_and_backward():
    forward, backward = counts(
        abstract("scanned"), uniform(4, WIDTH), mapped({"layers/up": "mixed_float16"})
    )
    assert forward == {"float16": 1, "bfloat16": 2}
    # The body's two run again in the backward pass, by remat.
    plain = counts(abstract("scanned"), uniform(4, WIDTH), POLICY)[1]["bfloat16"]
    assert backward["float16"] == 4
    assert sum(backward.values()) == plain
    assert set(backward) == {"float16", "bfloat16"}


def test_a_pattern_may_match_the_wrapped_module_itself():
    # Its own products, too, not only those of the modules inside it.
    for key in ("**", MoE):
        x = MODELS["moe"].x()
        assert forward_counts(abstract("moe"), x, mapped({key: "float32"})) == {"float32": 6}
    policy = mapped({MoE: "float32", "head": POLICY})
    assert forward_counts(abstract("moe"), x, policy) == {"float32": 5, "bfloat16": 1}


def test_overrides_reach_every_method():
    wrapped = jaxmp.wrap(made("mlp"), mapped({"hidden": "float32"}))
    full = made("mlp").hidden(uniform(4, WIDTH))
    table = jaxmp.explain(lambda x: wrapped.encode(x), "float32")(uniform(4, WIDTH))
    assert table.products() == {"float32": 1}
    np.testing.assert_array_equal(wrapped.hidden(uniform(4, WIDTH)), full)


def test_keep_float32():
    policy = jaxmp.policies.keep_float32("head", nnx.LayerNorm, policy=POLICY)
    assert forward_counts(abstract("mlp"), uniform(4, WIDTH), policy) == {
        "float32": 1,
        "bfloat16": 1,
    }


# A layer's own word.


class Own(nnx.Module):
    """Layers that were given a dtype, or were not."""

    def __init__(self, dtype: object = None) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.given = nnx.Linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.plain = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.plain(self.given(self.embed(tokens))))


def own(dtype: object) -> nnx.Module:
    return nnx.eval_shape(lambda: Own(dtype))


TOKENS = np.arange(4)


MUCH_STAYS_FLOAT32 = pytest.mark.filterwarnings("ignore:wrap. 1 layer with .* stay float32")


@MUCH_STAYS_FLOAT32
def test_a_layers_own_dtype_is_honoured_unless_a_key_says_otherwise():
    for dtype in (jnp.float32, "float32"):
        forward, backward = counts(own(dtype), TOKENS, POLICY)
        # An Embed has float32 for its dtype whether it was given or not: it follows the policy.
        assert forward == {"float32": 1, "bfloat16": 2}
        assert backward["float32"] == 3
    assert forward_counts(own(jnp.float16), TOKENS, POLICY) == {"float16": 1, "bfloat16": 2}
    for key in ("given", "**", nnx.Linear):
        assert forward_counts(own(jnp.float32), TOKENS, mapped({key: POLICY})) == {"bfloat16": 3}


@pytest.mark.filterwarnings("ignore:wrap. . layers? with .* stay float32")
def test_a_dtype_handed_down_is_the_modules_around_it():
    @nnx.eval_shape
    def attention():
        return nnx.MultiHeadAttention(1, WIDTH, dtype=jnp.float32, decode=False, rngs=nnx.Rngs(0))

    x = uniform(1, 6, WIDTH)
    # The wrapped module's own is overruled by the policy, and so what it hands to its parts.
    assert forward_counts(attention, x, POLICY) == {"bfloat16": 6}
    model = abstract("attention")
    model.attention = attention
    assert forward_counts(model, x, POLICY) == {"float32": 6, "bfloat16": 1}
    assert forward_counts(model, x, mapped({"attention": POLICY})) == {"bfloat16": 7}
    policy = mapped({"attention/query": POLICY})
    assert forward_counts(model, x, policy) == {"float32": 5, "bfloat16": 2}


def test_a_default_in_the_signature_is_not_the_authors_word():
    class Mine(nnx.Linear):
        def __init__(self, *args, dtype=jnp.float32, **kwargs):
            super().__init__(*args, dtype=dtype, **kwargs)

    model = own(None)
    model.plain = nnx.eval_shape(lambda: Mine(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    assert forward_counts(model, TOKENS, POLICY) == {"bfloat16": 3}


# Parameters stored in 16 bits.


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_parameters_stored_low(dtype):
    seen = []

    class Watching(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            seen.append((self.linear.kernel.dtype, self.norm.mean.dtype))
            return self.norm(self.linear(x))

    model = Watching()
    policy = jaxmp.get_policy(dtype)
    nnx.update(model, policy.cast_to_param(nnx.state(model, nnx.Param)))
    stored = nnx.state(model, nnx.Param)
    wrapped = jaxmp.wrap(model, policy)
    x = uniform(4, WIDTH)

    out = wrapped(x)
    assert out.dtype == dtype
    assert seen == [(jnp.float32, jnp.float32)], "float32 values to the module's code"

    def loss(m, x):
        return m(x).astype("float32").var()

    grads = nnx.jit(nnx.grad(loss))(wrapped, x)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {dtype}
    assert np.any(grads.linear.kernel[...])
    for a, b in zip(
        jax.tree.leaves(stored), jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True
    ):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_array_equal(a, b)
    assert model.norm.mean.dtype == jnp.float32
    assert np.any(model.norm.mean[...])
    assert forward_counts(model, x, policy) == {dtype: 1}


def test_a_stored_parameter_that_the_module_changes_keeps_its_dtype():
    class Normed(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((WIDTH, 4), 3.0, jnp.bfloat16))

        def __call__(self, x):
            self.w[...] = self.w[...] / jnp.linalg.norm(self.w[...], axis=0)
            return x @ self.w[...]

    model = Normed()
    jaxmp.wrap(model, "bfloat16")(uniform(4, WIDTH))
    w = model.w[...]
    assert w.dtype == jnp.bfloat16
    np.testing.assert_allclose(w.astype("float32"), WIDTH**-0.5, rtol=2**-8)


@pytest.mark.parametrize("shared", [False, True])
def test_the_norm_of_a_spectral_norm_is_estimated_in_float32_and_its_layer_is_not(
    shared: bool,
) -> None:
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            dense = nnx.Linear(16, 16, rngs=rngs)
            self.before = dense if shared else nnx.Linear(16, 16, rngs=rngs)
            self.norm = nnx.SpectralNorm(dense, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(self.before(x), update_stats=True)

    model, x = Normed(nnx.Rngs(0)), ones(64, 16)
    found = jaxmp.explain(jaxmp.wrap(model, POLICY), "float32")(x).products()
    assert found == {"bfloat16": 2, "float32": 4}
    asked = jaxmp.wrap(model, mapped({"norm": "mixed_float16"}))
    found = jaxmp.explain(asked, "float32")(x).products()
    assert found["float16"] >= 4
