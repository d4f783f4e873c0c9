"""Regions with a policy of their own: named scopes, `full_precision`, `reduced_precision`."""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._autocast import regions as region_module
from jaxmp._autocast.regions import region
from jaxmp.policy import get_policy

from support import contraction_dtypes, slow_when

BF16, F32 = jnp.bfloat16, jnp.float32
X = jax.random.normal(jax.random.key(0), (8, 8))


def scoped(fn, policy="float32"):
    """`fn` in a region marked as those of Flax modules are."""

    def call(*args):
        with region(get_policy(policy)):
            return fn(*args)

    return call


def in_scan(dot):
    return lambda x, w: lax.scan(lambda c, _: (jnp.tanh(dot(c, w)), None), x, None, length=3)[0]


def in_cond(dot):
    return lambda x, w: lax.cond(x[0, 0] > 0, dot, lambda x, w: x + w, x, w)


def in_while(dot):
    return lambda x, w: lax.fori_loop(0, 2, lambda _, c: dot(c, w), x)


@jax.custom_vjp
def own_rule(x, w):
    return x @ w


own_rule.defvjp(lambda x, w: (own_rule(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

CONSTRUCTS = {
    "plain": lambda dot: dot,
    "jit": jax.jit,
    "inlined jit": lambda dot: jax.jit(dot, inline=True),
    "scan": in_scan,
    "cond": in_cond,
    "remat": jax.checkpoint,
    "vmap": lambda dot: lambda x, w: jax.vmap(dot, in_axes=(0, None))(x[:, None], w),
    "custom_vjp": lambda dot: lambda x, w: own_rule(x, w) + 0 * dot(x, w),
    "scan of remat of jit": lambda dot: in_scan(jax.checkpoint(jax.jit(dot))),
}


@pytest.mark.parametrize("order", ["grad of autocast", "autocast of grad"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_scope_around_a_construct_holds_inside_and_backward(name, order):
    """Contractions in the region are float32, forward and backward; the one outside is not."""
    inside = scoped(CONSTRUCTS[name](lambda x, w: x @ w))

    def loss(w, x):
        return jnp.sum(jnp.tanh(inside(x, w)) @ w)

    fn = jax.value_and_grad(loss)
    if order == "grad of autocast":
        fn = jax.value_and_grad(jaxmp.autocast(loss, "mixed_bfloat16"))
    else:
        fn = jaxmp.autocast(jax.value_and_grad(loss), "mixed_bfloat16")
    counts = contraction_dtypes(fn, X, X)
    plain = contraction_dtypes(jax.value_and_grad(loss), X, X)
    # Outside: x @ w forward, and its two gradients.
    assert counts["bfloat16"] == 3, counts
    assert counts["float32"] == plain["float32"] - 3


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_scope_inside_a_construct_holds(name):
    construct = CONSTRUCTS[name](scoped(lambda x, w: x @ w))
    if name == "custom_vjp":
        construct = CONSTRUCTS[name](lambda x, w: x)  # the rule is not in the region
        expected = {"bfloat16": 1}
    else:
        expected = {"float32": contraction_dtypes(construct, X, X)["float32"]}
    assert contraction_dtypes(jaxmp.autocast(construct, "mixed_bfloat16"), X, X) == expected


def test_the_innermost_scope_wins():
    inner = scoped(lambda x, w: x @ w, "mixed_float16")
    outer = scoped(lambda x, w: inner(x, w) @ w)
    fn = jaxmp.autocast(lambda x, w: outer(x, w) @ w, "mixed_bfloat16", argnums=1)
    counts = contraction_dtypes(fn, X, X)
    assert counts == {"float16": 1, "float32": 1, "bfloat16": 1}


def test_a_value_goes_from_one_low_dtype_to_another_without_losing_its_gradient():
    half = scoped(lambda x, w: jnp.tanh(x @ w), "mixed_float16")

    def fn(w):
        return jnp.sum(half(jnp.tanh(X @ w), w) @ w)

    expected = jax.grad(fn)(X)
    grad = jax.grad(jaxmp.autocast(fn, "mixed_bfloat16"))(X)
    assert grad.dtype == F32
    # A handful of roundings to bfloat16, each relative 2^-9, in sums of four.
    np.testing.assert_allclose(grad, expected, atol=16 * 2**-9 * float(jnp.abs(expected).max()))


def test_a_jitted_function_called_inside_and_outside_of_a_region():
    shared = jax.jit(lambda x, w: x @ w)
    fn = jaxmp.autocast(lambda x, w: shared(scoped(shared)(x, w), w), "mixed_bfloat16", argnums=1)
    assert contraction_dtypes(fn, X, X) == {"float32": 1, "bfloat16": 1}


def test_a_policy_with_ops_survives_as_a_scope():
    policy = jaxmp.Policy(F32, BF16, F32, ops={"exp": "follow", "odd/name(x)": "own"})
    fn = scoped(lambda x: jnp.exp(x @ x) @ x, str(policy))
    rows = jaxmp.explain(fn, "float32")(X).rows
    assert {r.op: r.dtype for r in rows}["exp"] == "bfloat16"


# reduced_precision


def plain(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


@jax.custom_vjp
def kernel(q, k, v):
    """Like a fused attention kernel: refuses float32, keeps its softmax in float32."""
    if any(x.dtype == F32 for x in (q, k, v)):
        raise TypeError("kernel: q, k and v must be float16 or bfloat16")
    p = jax.nn.softmax(jnp.matmul(q, k.T, preferred_element_type=F32))
    return (p.astype(v.dtype) @ v).astype(q.dtype)


def kernel_fwd(q, k, v):
    return kernel(q, k, v), (q, k, v)


def kernel_bwd(saved, g):
    assert g.dtype == saved[0].dtype
    return tuple(2 * d for d in jax.vjp(plain, *saved)[1](g))  # unlike autodiff, so that it shows


kernel.defvjp(kernel_fwd, kernel_bwd)


marked_kernel = jaxmp.reduced_precision(kernel)


def attention(w, x, call=marked_kernel):
    return jnp.mean(call(x @ w, x @ w, x @ w) @ w)


TRANSFORMS = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda w, x: jax.vmap(f, in_axes=(None, 0))(w, x[None])[0],
    "scan": lambda f: (
        lambda w, x: lax.scan(lambda c, _: (c + f(w, x), None), 0.0, None, length=1)[0]
    ),
}


@slow_when(lambda name, compiled: not compiled and name != "as it is")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_kernel_takes_the_compute_dtype_and_keeps_its_rule(name, compiled, policy):
    fn = jaxmp.autocast(TRANSFORMS[name](attention), policy)
    run = jax.value_and_grad(fn)
    loss, grad = (jax.jit(run) if compiled else run)(X, X)
    assert loss.dtype == grad.dtype == F32
    expected_loss, expected = in_float32_throughout()
    scale = float(jnp.abs(expected).max())
    assert abs(loss - expected_loss) < 16 * 2**-9
    np.testing.assert_allclose(grad, expected, atol=32 * 2**-9 * scale)


@functools.cache
def in_float32_throughout():
    return jax.jit(jax.value_and_grad(partial(attention, call=in_float32)))(X, X)


@jax.custom_vjp
def in_float32(q, k, v):
    """The kernel's function and rule, in the dtype of its arguments."""
    return plain(q, k, v)


in_float32.defvjp(
    lambda q, k, v: (plain(q, k, v), (q, k, v)),
    lambda saved, g: tuple(2 * d for d in jax.vjp(plain, *saved)[1](g)),
)


def test_what_surrounds_the_kernel_is_low_and_nothing_is_pinned():
    counts = contraction_dtypes(jaxmp.autocast(attention, "mixed_bfloat16"), X, X)
    assert set(counts) == {"bfloat16"}
    grads = contraction_dtypes(jax.grad(jaxmp.autocast(attention, "mixed_bfloat16")), X, X)
    assert set(grads) == {"bfloat16"}


def test_outside_of_an_autocast_and_under_float32_it_is_the_function():
    plain = jaxmp.reduced_precision(lambda x, w: x @ w)
    assert contraction_dtypes(plain, X, X) == {"float32": 1}
    assert contraction_dtypes(jaxmp.autocast(plain, "float32"), X, X) == {"float32": 1}
    region32 = jaxmp.full_precision(plain)
    assert contraction_dtypes(jaxmp.autocast(region32, "mixed_bfloat16"), X, X) == {"float32": 1}
    with pytest.raises(TypeError, match="must be float16 or bfloat16"):
        attention(X, X)


def test_arguments_of_other_dtypes_and_static_ones_reach_the_kernel_as_they_are():
    seen = {}

    def fn(x, ids, mask, *, scale, causal):
        seen.update(x=x.dtype, ids=ids.dtype, mask=mask.dtype, scale=scale, causal=causal)
        return {"y": x, "n": ids}

    marked = jaxmp.reduced_precision(fn)
    ids, mask = jnp.arange(4), jnp.ones(4, bool)
    out = jaxmp.autocast(lambda x: marked(x, ids, mask, scale=0.5, causal=True), "mixed_bfloat16")(
        X
    )
    assert seen == {"x": BF16, "ids": jnp.int32, "mask": bool, "scale": 0.5, "causal": True}
    assert out["y"].dtype == F32
    assert out["n"].dtype == jnp.int32


def test_never_a_dtype_that_the_device_does_not_multiply(monkeypatch):
    """float16 on TPU, bfloat16 before compute capability 8.0: the function runs in float32."""
    monkeypatch.setattr(region_module, "multiplies_natively", lambda dtype: False)
    fn = jaxmp.autocast(jaxmp.reduced_precision(lambda x: x * x), "mixed_bfloat16")
    assert "bf16" not in str(jax.make_jaxpr(fn)(X))


def test_explain_calls_float32_what_is():
    """Inside of `reduced_precision`, what is not float32 is not a float32 region."""
    square = jaxmp.reduced_precision(lambda x: jnp.sum(x * x, dtype=jnp.float32))
    rows = jaxmp.explain(square, "mixed_bfloat16")(X).rows
    reasons = {row.op: row.reason for row in rows}
    assert reasons["mul"] == "runs as written"
    assert reasons["reduce_sum"] == "float32 region"


@pytest.mark.parametrize("mark", [jaxmp.full_precision, jaxmp.reduced_precision])
def test_a_mark_refuses_what_is_not_callable(mark):
    with pytest.raises(TypeError, match=f"{mark.__name__}: fn must be callable, got int"):
        mark(3)
