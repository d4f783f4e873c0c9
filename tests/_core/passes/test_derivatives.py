"""Derivative rules under autocast see what they see without it: perturbations, zeros, closures."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.jet import jet
from numpy_reference import reference

import jaxmp
from jaxmp._core.plan.why import Kind

from constructs import tanh_times_seven
from support import autocast, contraction_dtypes, explain, gaussian, relative

BF16 = "mixed_bfloat16"
X = jax.device_put(np.linspace(-1.0, 1.0, 48).reshape(6, 8))
W = jax.device_put(np.linspace(-1.0, 0.7, 64).reshape(8, 8))
S = jax.device_put(np.float32(1.5))


def is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def relative_error(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest element of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (got, want))
    return max(
        float(np.abs(a - b).max() / (np.abs(b).max() + 1e-3)) for a, b in zip(*leaves, strict=True)
    )


def test_a_rule_of_an_argument_in_16_bits() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(tanh_times_seven(x).astype(jnp.float32) @ w)

    low = np.asarray(X).astype(jnp.bfloat16)
    got, want = (reference(jax.grad(f))(low, W) for f in (autocast(fn, BF16), fn))
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(want, np.float64)) > 5
    assert relative(got, want) < 12 * eps(BF16)


# --- symbolic zeros ------------------------------------------------------------------------------


def vjp_rule(seen: set[Any]) -> Any:
    """Two results, an integer operand, and a rule that computes only what is asked for."""

    @jax.custom_vjp
    def f(x, w, i):
        return jnp.tanh(x @ w), jnp.sum(w) * i

    def fwd(x, w, i):
        seen.add(("forward", x.perturbed, w.perturbed, i.perturbed))
        saved = x.value if w.perturbed else None  # what is not needed is not kept
        return f(x.value, w.value, i.value), (saved, w.value)

    def bwd(saved, cotangents):
        x, w = saved
        seen.add(("backward", *map(is_zero, cotangents)))
        if is_zero(cotangents[0]):
            return None, None, None
        return 2 * (cotangents[0] @ w.T), None if x is None else -(x.T @ cotangents[0]), None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return lambda x, w: f(x, w, 3)


def jvp_rule(seen: set[Any]) -> Any:
    """The same in forward mode; the second result has no tangent whatever happens."""

    @jax.custom_jvp
    def f(x, w, i):
        return jnp.tanh(x @ w), jnp.sum(w) * i

    def jvp(primals, tangents):
        x, w, i = primals
        seen.add(tuple(map(is_zero, tangents)))
        out = f(x, w, i)
        dx, dw = (
            jnp.zeros_like(v) if is_zero(t) else t
            for v, t in zip((x, w), tangents[:2], strict=True)
        )
        return out, (2 * (dx @ w) - x @ dw, SymbolicZero(jax.typeof(out[1])))

    f.defjvp(jvp, symbolic_zeros=True)
    return lambda x, w: f(x, w, 3)


PLACES = {
    "first result": lambda f: lambda x, w: jnp.sum(f(x, w)[0] ** 2),
    "both results": lambda f: lambda x, w: jnp.sum(f(x, w)[0]) + f(x, w)[1],
    "jit": lambda f: lambda x, w: jnp.sum(jax.jit(f)(x, w)[0] ** 2),
    "remat": lambda f: lambda x, w: jnp.sum(jax.checkpoint(f)(x, w)[0] ** 2),
    "scan": lambda f: (
        lambda x, w: jnp.sum(lax.scan(lambda c, _: (f(c, w)[0], None), x, None, length=2)[0])
    ),
    "scanned weights": lambda f: (
        lambda x, w: jnp.sum(lax.scan(lambda c, v: (c, f(c, v)[0]), x, jnp.stack([w, w]))[1])
    ),
    "vmap": lambda f: lambda x, w: jnp.sum(jax.vmap(lambda v: f(v[None], w)[0])(x) ** 2),
    "cond": lambda f: (
        lambda x, w: jnp.sum(lax.cond(x[0, 0] < 0, lambda x: f(x, w)[0], lambda x: x, x))
    ),
    "twice": lambda f: lambda x, w: jnp.sum(f(f(x, w)[0], w)[0]),
    "stop_gradient": lambda f: lambda x, w: jnp.sum(f(lax.stop_gradient(x), w)[0] + x),
}


# All cotangents at once are tried as well, to learn in which dtype to save what.
TRIED = {("backward", False, False)}


@pytest.mark.parametrize("place", PLACES)
def test_a_rule_with_symbolic_zeros_sees_the_same_perturbation(place: str) -> None:
    for rule in (vjp_rule, jvp_rule):
        seen: set[Any] = set()
        fn = PLACES[place](rule(seen))
        cast = autocast(fn, BF16)
        for argnums in (0, 1, (0, 1)):
            seen.clear()
            jax.eval_shape(jax.grad(fn, argnums), X, W)
            plainly = set(seen)
            seen.clear()
            jax.eval_shape(jax.grad(cast, argnums), X, W)
            assert seen - TRIED == plainly - TRIED, (rule.__name__, argnums)
        got, want = (reference(jax.grad(f, 1))(X, W) for f in (cast, fn))
        assert relative_error(got, want) < 0.03


@pytest.mark.parametrize("rule", [vjp_rule, jvp_rule])
def test_symbolic_zeros_without_jit(rule: Any) -> None:
    fn = PLACES["scan"](rule(set()))
    want = reference(jax.grad(fn))(X, W)
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            assert relative_error(jax.grad(autocast(fn, BF16))(X, W), want) < 0.03


def test_a_rule_that_refuses_other_perturbations() -> None:
    """As in equinox's filter_custom_vjp, which raises for operands that are not differentiable."""

    @jax.custom_vjp
    def f(x, w):
        return jnp.tanh(w @ x)

    def fwd(x, w):
        assert not x.perturbed
        assert w.perturbed
        return f(x.value, w.value), (x.value, w.value)

    def bwd(saved, g):
        x, w = saved
        return None, jnp.outer(g * (1 - jnp.tanh(w @ x) ** 2), x)

    f.defvjp(fwd, bwd, symbolic_zeros=True)

    def loss(w, x):
        return jnp.sum(f(x, w))

    x = np.asarray(X)[0]
    got, want = (reference(jax.grad(f))(W, x) for f in (autocast(loss, BF16), loss))
    assert relative_error(got, want) < 0.03


def test_a_rule_that_refuses_other_cotangents() -> None:
    @jax.custom_vjp
    def f(x, w):
        return x @ w, jnp.sum(x)

    def bwd(saved, cotangents):
        assert is_zero(cotangents[1])
        return cotangents[0] @ saved.T, None

    f.defvjp(lambda x, w: (f(x.value, w.value), w.value), bwd, symbolic_zeros=True)

    def loss(x, w):
        return jnp.sum(f(x, w)[0])

    got, want = (reference(jax.grad(f))(X, W) for f in (autocast(loss, BF16), loss))
    assert relative_error(got, want) < 0.03


@pytest.mark.parametrize("rule", [vjp_rule, jvp_rule])
def test_the_rule_s_own_products_are_low(rule: Any) -> None:
    fn = autocast(PLACES["first result"](rule(set())), BF16, data=0)
    assert set(contraction_dtypes(jax.grad(fn, (0, 1)), X, W)) == {"bfloat16"}


def test_forward_mode_and_second_derivatives_of_a_rule_with_symbolic_zeros() -> None:
    fn = PLACES["twice"](jvp_rule(set()))
    cast = autocast(fn, BF16)
    firsts = (reference(lambda *a, f=f: jax.jvp(f, a, a))(X, W) for f in (cast, fn))
    assert relative_error(*firsts) < 0.03

    def second(f: Any) -> Any:
        return reference(lambda x: jax.jvp(jax.grad(f), (x, W), (jnp.ones_like(x), 0 * W))[1])(X)

    assert relative_error(second(cast), second(fn)) < 0.05


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_result_that_vmap_leaves_as_it_is(symbolic: bool) -> None:
    """JAX 0.12 takes no cotangent of such a result, not even zeros in an array."""
    seen = []

    @jax.custom_vjp
    def f(x, w):
        return jnp.tanh(x @ w), jnp.sum(w), jnp.int32(w.shape[0])

    def fwd(x, w):
        x, w = (x.value, w.value) if symbolic else (x, w)
        return f(x, w), (x, w)

    def bwd(saved, cotangents):
        seen.append([*map(is_zero, cotangents)])
        x, w = saved
        h = cotangents[0] * (1 - jnp.tanh(x @ w) ** 2)
        return h @ w.T, jnp.outer(x, h)

    f.defvjp(fwd, bwd, symbolic_zeros=symbolic)

    def loss(w, x):
        return jnp.sum(jax.vmap(lambda x: f(x, w)[0])(x))

    want = reference(jax.grad(loss))(W, X)
    plainly = seen[-1]
    got = reference(jax.grad(autocast(loss, BF16)))(W, X)
    assert relative_error(got, want) < 0.03
    assert seen[-1] == plainly


# --- rules that close over a value of their caller -----------------------------------------------


def closing(scale: Any, which: str) -> Any:
    """A function whose forward rule, backward rule or jvp reads `scale` by closure."""
    if which == "jvp":

        @jax.custom_jvp
        def j(x):
            return jnp.tanh(x @ W)

        j.defjvp(lambda p, t: (j(*p), (t[0] @ W) * scale))
        return j

    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x @ W)

    if which == "forward":
        f.defvjp(lambda x: (f(x), scale * 2.0), lambda r, g: ((g @ W.T) * r,))
    elif which == "backward":
        f.defvjp(lambda x: (f(x), None), lambda _, g: ((g @ W.T) * scale,))
    else:  # the primal closes over it too, as in implicit differentiation

        @jax.custom_vjp
        def f(x):
            return jnp.tanh(x @ W) * scale

        f.defvjp(lambda x: (f(x), x * scale), lambda r, g: ((g @ W.T) * r * scale,))
    return f


def in_remat(x, s, which):
    t = s * 3.0
    return jnp.sum(jax.checkpoint(lambda x: closing(t, which)(x))(x))


def in_scan(x, s, which):
    t = s * 3.0
    return jnp.sum(lax.scan(lambda c, _: (closing(t, which)(c), None), x, None, length=2)[0])


CLOSING = {
    "top": lambda x, s, w: jnp.sum(closing(s * 3.0, w)(x)),
    "remat": in_remat,
    "vmap": lambda x, s, w: jnp.sum(jax.vmap(closing(s * 3.0, w))(x)),
    "vmapped": lambda x, s, w: jnp.sum(
        jax.vmap(lambda x, s: closing(s, w)(x))(x, s * jnp.arange(1.0, 7.0))
    ),
    "scan": in_scan,
}
AS_WRITTEN = "runs as written, in float32"
REFUSED_BY_JAX = {
    ("backward", "vmapped"),
    ("both", "vmapped"),
    ("backward", "scan"),
    ("both", "scan"),
}


@pytest.mark.parametrize("place", CLOSING)
@pytest.mark.parametrize("which", ["forward", "backward", "jvp", "both"])
def test_a_program_whose_rule_closes_over_a_value_runs_as_written(which: str, place: str) -> None:
    if (which, place) in REFUSED_BY_JAX:
        pytest.skip("JAX refuses it without autocast too")

    def fn(x, s):
        return CLOSING[place](x, s, which)

    run = jax.value_and_grad(autocast(fn, BF16))
    want = reference(jax.value_and_grad(fn))(X, S)
    with pytest.warns(UserWarning, match=AS_WRITTEN):
        assert relative_error(reference(run)(X, S), want) < 1e-5
    if which == "both":
        assert relative_error(run(X, S), want) < 1e-5  # warned of once


def closing_in(place: str) -> Any:
    """A program whose backward rule closes over a value from outside the jit or loop that it is in.

    JAX differentiates it where it runs eagerly, and refuses to while it traces it.
    """

    def fn(w, x):
        scale = x[0, 0] * 3.0

        @jax.custom_vjp
        def f(x):
            return jnp.tanh(x)

        f.defvjp(lambda x: (f(x), x), lambda x, g: (g * scale * x,))
        if place == "jit":
            x = jax.jit(lambda w, x: f(x @ w))(w, x)
        else:
            x = lax.scan(lambda x, _: (f(x @ w), None), x, None, length=2)[0]
        return jnp.sum(jnp.tanh(x @ w) @ w)

    return fn


@pytest.mark.parametrize("place", ["jit", "scan"])
def test_a_program_that_runs_as_written_says_so(place: str) -> None:
    """As audit does, rather than to advise autocast."""
    fn = closing_in(place)
    w, x = (gaussian(i, 16, 16, scale=1 / 4) for i in range(2))
    cast = autocast(fn, BF16)
    said = (
        r"runs as written, in float32: the derivative rule of f \(test_derivatives.py:\d+\) closes"
    )
    with pytest.warns(UserWarning, match=said):
        got = jax.grad(cast)(w, x)
    assert relative_error(got, jax.grad(fn)(w, x)) == 0
    findings = jaxmp.audit(jax.grad(cast))(w, x).findings  # warned of once
    assert {f.kind for f in findings} == {"intended-float32"}
    assert all(str(Kind.CLOSES_OVER.of()) in f.what for f in findings)


def test_such_a_rule_and_values_that_autocast_closes_over() -> None:
    def outer(w, cast):
        def inner(x, s):
            return CLOSING["top"](x @ w, s, "forward")

        return (autocast(inner, BF16) if cast else inner)(X, S)

    want = reference(jax.grad(lambda w: outer(w, False)))(W)
    with pytest.warns(UserWarning, match="runs as written, in float32"):
        got = reference(jax.grad(lambda w: outer(w, True)))(W)
    assert relative_error(got, want) < 0.03


def test_forward_mode_of_a_jvp_rule_that_closes_over_a_value() -> None:
    def fn(x, s):
        return CLOSING["top"](x, s, "jvp")

    cast = autocast(fn, BF16)
    with pytest.warns(UserWarning, match=AS_WRITTEN):
        got, want = (
            reference(lambda x, f=f: jax.jvp(lambda x: f(x, S), (x,), (x,)))(X) for f in (cast, fn)
        )
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("which", ["backward", "jvp"])
def test_second_derivatives_of_such_a_rule(which: str) -> None:
    def fn(x, s):
        return jnp.sum(jnp.sin(CLOSING["top"](x, s, which)) * x**2)

    def second(f):
        return reference(jax.grad(lambda x: jnp.sum(jax.grad(f)(x, S) ** 2)))(X)

    with pytest.warns(UserWarning, match="runs as written, in float32"):
        got = second(autocast(fn, BF16))
    assert relative_error(got, second(fn)) < 0.05


def test_such_a_rule_in_an_autocast_inside_an_autocast() -> None:
    def fn(x, s):
        return CLOSING["top"](x, s, "backward")

    nested = autocast(lambda x, s: autocast(fn, BF16)(x, s) * 2, "mixed_float16")
    want = 2 * reference(jax.grad(fn))(X, S)
    with pytest.warns(UserWarning, match=AS_WRITTEN):
        assert relative_error(reference(jax.grad(nested))(X, S), want) < 1e-5


def test_explain_says_that_a_rule_closes_over_a_value() -> None:
    def fn(x, s):
        return CLOSING["top"](x, s, "backward") + jnp.sum(jax.nn.relu(x))

    found = explain(fn, BF16)(X, S)
    assert {row.reason for row in found.rows} == {str(Kind.CLOSES_OVER.of())}
    assert found.products() == {"float32": 1}


def batched_jit(offset: Any) -> Any:
    """A loss by vmap of a jit whose custom_vjp function closes over `offset` of a data row."""

    @jax.jit
    def row(w, x, d):
        @jax.custom_vjp
        def f(w, x):
            return jnp.tanh(x @ w) + offset(w, d)

        def fwd(w, x):
            return jnp.tanh(x @ w), (w, x)

        f.defvjp(fwd, lambda saved, g: jax.vjp(lambda w, x: jnp.tanh(x @ w), *saved)[1](g))
        return f(w, x)

    def loss(w, x, d):
        return jnp.sum(jax.vmap(row, (None, 0, 0))(w, x, d) ** 2)

    return loss


@pytest.mark.parametrize(
    "offset", [lambda _w, d: 0 * d, lambda w, _d: 0 * lax.stop_gradient(w[0])], ids=["d", "w"]
)
def test_what_vmap_makes_an_operand_of_a_function_is_not_differentiated(offset) -> None:
    """JAX refuses to, and emptied the equation's stores; jits keep the equation in their caches."""
    loss, (x, d) = batched_jit(offset), (gaussian(i, 4, 8) for i in range(2))
    grad, want = jax.grad(jaxmp.autocast(loss, BF16)), reference(jax.grad(loss))(W, x, d)
    assert relative_error(grad(W, x, d), want) < 0.03
    assert jaxmp.explain(loss, BF16)(W, x, d).products() == {"bfloat16": 1}
    assert relative_error(jax.jit(grad)(W, x, d), want) < 0.03


# --- other rules, other operands -----------------------------------------------------------------


def test_nondiff_arguments_and_operands_of_other_dtypes() -> None:
    @jax.custom_vjp
    def f(x, index, mask, nothing):
        return jnp.where(mask, x @ W, 0.0)[index]

    def fwd(x, index, mask, nothing):
        return f(x, index, mask, nothing), (index, mask, x.shape)

    def bwd(saved, g):
        index, mask, shape = saved
        full = jnp.zeros(shape).at[index].set(3 * g)
        none = np.zeros((), jax.dtypes.float0)
        return jnp.where(mask, full, 0.0) @ W.T, none, np.zeros(mask.shape, none.dtype), None

    f.defvjp(fwd, bwd)
    mask = np.asarray(X) > -0.5

    def loss(x, index):
        return jnp.sum(f(x, index, mask, None) ** 2)

    got, want = (reference(jax.grad(f))(X, np.int32(1)) for f in (autocast(loss, BF16), loss))
    assert relative_error(got, want) < 0.03


# --- Taylor series -------------------------------------------------------------------------------


def layer_norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)


SERIES = {
    "matmul": lambda w, x: x @ w,
    "tanh": lambda w, x: jnp.tanh(x @ w),
    "softmax": lambda w, x: jax.nn.softmax(x @ w),
    "attention": lambda w, x: jax.nn.softmax(x @ w @ x.T) @ (x @ w),
    "layer norm": lambda w, x: layer_norm(x @ w) @ w,
}


@pytest.mark.parametrize("name", SERIES)
def test_jet_of_an_autocast_function(name: str) -> None:
    """JAX's jet runs functions without their derivative rules: on JAX 0.12 all terms were zero."""
    fn = SERIES[name]
    cast = autocast(fn, BF16)
    w, x, *terms = (gaussian(i, *a.shape, scale=1 / 2) for i, a in enumerate((W, *[X] * 4)))

    @reference
    def series(x):
        runs = (fn, cast, jax.jit(cast))
        return [jet(lambda x, run=run: run(w, x), (x,), (terms[:3],)) for run in runs]

    want, *found = series(x)
    for got in found:
        assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
        assert relative_error(got, want) < 0.03
