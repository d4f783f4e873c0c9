"""Twenty traps for a transformation of jaxprs, by number. Each of them has caught somebody.

The numbers are those of the list this library was designed from; every test says in its name which
trap it guards, and fails when the trap is fallen into.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

import jaxmp
from jaxmp._autocast import transform as transform_module

from support import (
    autocast,
    contraction_dtypes,
    contractions,
    explain,
    float16_is_slow,
    gaussian,
    iter_eqns,
    jaxpr_of,
    primitives,
    relative,
    slow_when,
)

BF16, F16 = "mixed_bfloat16", "mixed_float16"
EPS = {BF16: 2.0**-7, F16: 2.0**-10}
COMPUTE = {BF16: "bfloat16", F16: "float16"}
FLOAT32_MIN = float(np.finfo(np.float32).min)


X = gaussian(0, 6, 8)
W = gaussian(1, 8, 8, scale=8**-0.5)
V = gaussian(2, 8, 8, scale=8**-0.5)


def scan_eqns(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [e for e in iter_eqns(jaxpr_of(fn, *args)) if e.primitive.name == "scan"]


def all_low(fn: Callable[..., Any], *args: Any, policy: str = BF16) -> bool:
    return set(contraction_dtypes(fn, *args)) == {COMPUTE[policy]}


# --- 1: jaxpr objects are shared between call sites ----------------------------------------------


def test_trap_01_one_jaxpr_at_two_call_sites_gets_two_plans() -> None:
    inner = jax.jit(lambda a: jnp.tanh(a) * 0.5)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = inner(x @ w)  # towards a contraction: low
        return jnp.sum(jnp.log1p(inner(hidden @ w) ** 2))  # into a loss: float32

    calls = [e for e in iter_eqns(jaxpr_of(fn, X, W)) if e.primitive.name == "jit"]
    [first, second] = [e.params["jaxpr"] for e in calls if e.params["name"] == "<lambda>"]
    assert first is second, "JAX no longer shares them: find another pair"
    found = primitives(autocast(fn, BF16), X, W)
    assert (found["tanh", "bfloat16"], found["tanh", "float32"]) == (1, 1)


def test_trap_01_one_scan_body_entered_in_two_dtypes() -> None:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry, jnp.tanh(x)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        _, low = lax.scan(body, jnp.float32(0), x @ w)
        _, full = lax.scan(body, jnp.float32(0), jnp.exp(-(x * x)))
        return jnp.sum(low @ w) + jnp.sum(jnp.log1p(full**2))

    found = primitives(autocast(fn, BF16), X, W)
    assert (found["tanh", "bfloat16"], found["tanh", "float32"]) == (1, 1)


# --- 2: parameters, names and contexts of what is bound again ------------------------------------


def test_trap_02_scan_keeps_its_parameters_on_either_jax() -> None:
    def fn(x: jax.Array, w: jax.Array, stack: jax.Array) -> Any:
        # Constants, two carries and two inputs: whichever way a JAX says how operands split.
        def body(carry: Any, xs: Any) -> Any:
            hidden, count = carry
            matrix, shift = xs
            hidden = jnp.tanh(hidden @ matrix + shift @ w)
            return (hidden, count + 1), (hidden, count)

        init = (jnp.tanh(x @ w), jnp.int32(0))
        return lax.scan(body, init, (stack, stack[:, 0, :6, None] * x[0]), reverse=True, unroll=2)

    stack = gaussian(3, 4, 8, 8, scale=8**-0.5)
    fast = autocast(fn, BF16)
    [was], [now] = scan_eqns(fn, X, W, stack), scan_eqns(fast, X, W, stack)
    for name in set(was.params) - {"jaxpr"}:
        assert now.params[name] == was.params[name], name
    got, want = jax.jit(fast)(X, W, stack), fn(X, W, stack)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_array_equal(got[1][1], want[1][1])
    # Nine contractions in a row, 1.5 eps each, on a contracting map.
    assert relative(got[1][0], want[1][0]) < 14 * EPS[BF16]
    assert all_low(fast, X, W, stack)


def test_trap_02_names_scopes_and_lines_survive() -> None:
    @partial(jax.jit, inline=False)
    def named_layer(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.tanh(x @ w)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.checkpoint(named_layer, static_argnums=())(x, w) @ w

    def described(jaxpr: Any, path: str = "") -> Iterator[tuple[str, str]]:
        """Each product and tanh under the scopes and named jits around it."""
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            here = "/".join(filter(None, (path, str(eqn.source_info.name_stack))))
            if eqn.primitive.name in ("dot_general", "tanh"):
                yield eqn.primitive.name, here
            if eqn.params.get("name") == "named_layer":
                here += "/named_layer"
            for inner in jaxprs_in_params(eqn.params):
                yield from described(inner, here)

    was = list(described(jaxpr_of(fn, X, W)))
    assert {part for _, path in was for part in path.split("/")} >= {
        "outer",
        "inner",
        "named_layer",
    }
    assert list(described(jaxpr_of(autocast(fn, BF16), X, W))) == was


def test_trap_02_context_of_an_equation_survives() -> None:
    metadata = pytest.importorskip("jax.experimental.xla_metadata")

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with metadata.set_xla_metadata(jaxmp_test="kept"):
            y = x @ w
        return jnp.tanh(y) @ w

    assert 'jaxmp_test = "kept"' in jax.jit(fn).lower(X, W).as_text()
    assert 'jaxmp_test = "kept"' in jax.jit(autocast(fn, BF16)).lower(X, W).as_text()


# --- 3: custom_jvp -------------------------------------------------------------------------------


@jax.custom_jvp
def tanh_times_seven(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@tanh_times_seven.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x], [t] = primals, tangents
    return jnp.tanh(x), 7 * t * (1 - jnp.tanh(x) ** 2)


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("jit", [False, True])
def test_trap_03_custom_jvp_rule_is_kept_with_a_low_operand(policy: str, jit: bool) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(tanh_times_seven(x @ w) @ w)

    fast = autocast(fn, policy)
    assert primitives(fast, X, W)["tanh", COMPUTE[policy]] == 1  # the operand is low already
    wrap = jax.jit if jit else (lambda f: f)
    got, want = wrap(jax.grad(fast))(X, W), jax.grad(fn)(X, W)
    assert np.linalg.norm(want) > 5  # seven times autodiff's
    assert relative(got, want) < 12 * EPS[policy]  # three contractions, tanh and its square
    rows = lambda x, w: tanh_times_seven(x @ w) @ w  # noqa: E731
    _, got = jax.jvp(autocast(rows, policy), (X, W), (X, W))
    _, want = jax.jvp(rows, (X, W), (X, W))
    assert relative(got, want) < 12 * EPS[policy]


def test_trap_03_custom_jvp_of_an_argument_in_16_bits() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(tanh_times_seven(x).astype(jnp.float32) @ w)

    low = X.astype(jnp.bfloat16)
    got, want = jax.grad(autocast(fn, BF16))(low, W), jax.grad(fn)(low, W)
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(want, np.float64)) > 5
    assert relative(got, want) < 12 * EPS[BF16]


# --- 4: finfo(float32).min -----------------------------------------------------------------------


def masked_constant(scores: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep > 0, scores, FLOAT32_MIN)


def masked_argument(scores: jax.Array, keep: jax.Array) -> jax.Array:
    return scores + keep  # given as 0 and finfo.min


def masked_computed(scores: jax.Array, keep: jax.Array) -> jax.Array:
    return scores + (1.0 - keep) * FLOAT32_MIN


KEEP = jnp.asarray(np.tri(6, k=-1), jnp.float32)  # the first row is masked throughout
MASKS = {
    "constant": (masked_constant, KEEP),
    "argument": (masked_argument, (1 - KEEP) * FLOAT32_MIN),
    "computed": (masked_computed, KEEP),
}


@slow_when(lambda kind, policy: kind != "constant" and "softmax" in policy)
@pytest.mark.parametrize(
    "policy", [BF16, F16, "mixed_bfloat16,softmax=bf16", "mixed_float16,softmax=f16"]
)
@pytest.mark.parametrize("kind", MASKS)
def test_trap_04_a_row_masked_throughout_is_finite(kind: str, policy: str) -> None:
    mask, given = MASKS[kind]

    def attention(x: jax.Array, given: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(mask(x @ x.T, given))
        return weights @ x

    fast = jaxmp.autocast(attention, policy)
    got = fast(X, given)
    assert np.isfinite(got).all()
    # One row of the softmax is uniform; the others see only what the mask lets through. Scores up
    # to 20 rounded at eps/2 move an exponent by 0.08.
    np.testing.assert_allclose(got, attention(X, given), atol=0.3)
    np.testing.assert_allclose(got[0], X.mean(0), atol=4 * EPS[BF16])
    gradient = jax.grad(lambda x: jnp.sum(fast(x, given) ** 2))(X)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("kind", MASKS)
def test_trap_04_narrowing_saturates_where_an_op_follows(kind: str, policy: str) -> None:
    mask, given = MASKS[kind]

    def fn(x: jax.Array, w: jax.Array, given: jax.Array) -> jax.Array:
        # relu makes zeros of the masked entries, unless they are NaN; the mask itself is narrowed.
        return jnp.maximum(mask(x @ w, given), -1.0) @ w

    x, w = jnp.stack([X[:, :6], X[:, 2:]]), W[:6, :6]  # the mask is repeated over a batch
    fast = autocast(fn, policy)
    assert primitives(fast, x, w, given)["max", COMPUTE[policy]] == 1
    assert np.isfinite(fast(x, w, given)).all()
    assert relative(fast(x, w, given), fn(x, w, given)) < 6 * EPS[policy]

    def touch(x: jax.Array, w: jax.Array, given: jax.Array) -> jax.Array:
        return mask(x @ w, given) @ jnp.zeros_like(w)  # 0 × finite is 0, 0 × inf is NaN

    np.testing.assert_array_equal(autocast(touch, policy)(x, w, given), 0.0)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_trap_04_a_true_infinity_stays_one(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        # 1 / inf is 0; 1 / (the largest finite number) is not, and neither is 1 / NaN.
        return (1.0 / (x @ w + mask)) @ jnp.ones_like(w)

    def seen(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        scores = x @ w + mask
        return jnp.where(jnp.isinf(scores), 1.0, scores) @ w * 0 + jnp.isneginf(scores)

    mask = jnp.zeros((1, 8)).at[0, 2].set(-jnp.inf).at[0, 3].set(FLOAT32_MIN)
    got = autocast(seen, policy)(X, W, mask)
    want = np.zeros((6, 8))
    want[:, 2] = 1
    np.testing.assert_array_equal(got, want)
    infinite = jnp.full((1, 8), -jnp.inf)
    np.testing.assert_array_equal(autocast(fn, policy)(X, W, infinite), 0.0)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_trap_04_the_gradient_passes_straight_through(policy: str) -> None:
    def fn(mask: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum((x @ w + mask) @ w)

    big = jnp.full((1, 8), 1e30).at[0, 3].set(FLOAT32_MIN)
    got = jax.grad(autocast(fn, policy))(big, X, W)
    want = jax.grad(fn)(big, X, W)
    assert relative(got, want) < 4 * EPS[policy]


# --- 5: accumulators in a scan -------------------------------------------------------------------


def carries(fn: Callable[..., Any], *args: Any) -> list[list[str]]:
    """The dtypes that each scan of a function returns, carries first."""
    return [[str(v.aval.dtype) for v in e.outvars] for e in scan_eqns(fn, *args)]


def test_trap_05_an_accumulator_of_products_stays_float32() -> None:
    def fn(xs: jax.Array, w: jax.Array) -> jax.Array:
        init = jnp.zeros(xs.shape[1:-1] + w.shape[1:])
        total, _ = lax.scan(lambda acc, x: (acc + x @ w, None), init, xs)
        return total @ w  # a contraction wants the sum: that does not make the accumulator low

    xs = jnp.ones((1024, 2, 8))
    w = jnp.eye(8)
    fast = autocast(fn, BF16)
    assert carries(fast, xs, w) == [["float32"]]
    # 1024 in steps of one: a bfloat16 accumulator stops at 256.
    np.testing.assert_array_equal(fast(xs, w), fn(xs, w))
    assert all_low(fast, xs, w)


def test_trap_05_a_hidden_state_is_low_beside_an_accumulator() -> None:
    def fn(x: jax.Array, ws: jax.Array) -> Any:
        def body(carry: Any, w: jax.Array) -> Any:
            hidden, total, energy = carry
            hidden = hidden + jnp.tanh(hidden @ w)
            return (hidden, total + hidden @ w, energy + jnp.sum(hidden**2)), None

        init = (jnp.tanh(x @ ws[0]), jnp.zeros_like(x), jnp.float32(0))
        return lax.scan(body, init, ws)[0]

    fast = autocast(fn, BF16)
    assert carries(fast, X, jnp.stack([W] * 5)) == [["bfloat16", "float32", "float32"]]


def test_trap_05_a_state_that_one_weight_moves_a_little_is_float32() -> None:
    """The same residual, but no layers: a step in time, whatever it starts from."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda _, h: h + 1e-3 * jnp.tanh(h @ w), jnp.tanh(x @ w))

    assert carries(autocast(fn, BF16), X, W)[0][-1] == "float32"


def test_trap_05_a_state_that_is_summed_up_and_multiplied_stays_float32() -> None:
    # Linear attention: the state meets a contraction in every iteration, yet only adds up.
    def fn(xs: jax.Array, w: jax.Array) -> jax.Array:
        def body(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = state + x.T @ (x @ w)
            return state, x @ state

        return lax.scan(body, jnp.zeros_like(w), xs)[1]

    xs, w = jnp.ones((1024, 1, 8)), jnp.eye(8)
    fast = autocast(fn, BF16)
    assert carries(fast, xs, w)[0][0] == "float32"
    # The outer product, `x.T @ …`, contracts nothing; and `x @ state` is of data and a state.
    assert contraction_dtypes(fast, xs, w) == {"bfloat16": 1, "float32": 2}
    np.testing.assert_array_equal(fast(xs, w)[-1], 8192.0)  # a bfloat16 sum stops at 256


def test_trap_05_demand_reaches_a_fixpoint_over_rotating_carries() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(carry: Any, _: None) -> Any:
            a, b, c = carry  # `c` meets a contraction only two iterations later
            return (jnp.tanh(b), c * 1.5, jnp.tanh(a @ w)), None

        h = jnp.tanh(x @ w)
        a = lax.scan(body, (h, h, h), None, length=6)[0][0]
        return jnp.sum(a @ w)

    fast = autocast(fn, BF16)
    assert all_low(fast, X, W)
    assert relative(fast(X, W), fn(X, W)) < 12 * EPS[BF16]
    assert relative(jax.grad(fast)(X, W), jax.grad(fn)(X, W)) < 24 * EPS[BF16]


# --- 6: bias gradients ---------------------------------------------------------------------------


@float16_is_slow
@pytest.mark.parametrize("shape", [(8,), (1, 8), (), (1, 1), (4096, 1)])
@pytest.mark.parametrize("policy", [BF16, F16])
def test_trap_06_a_bias_gradient_is_summed_in_float32(shape: tuple[int, ...], policy: str) -> None:
    def fn(b: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum((x @ w + b) @ w)

    x, w = jnp.ones((4096, 8)), jnp.eye(8)
    fast = jax.grad(autocast(fn, policy))
    b = jnp.zeros(shape)
    np.testing.assert_array_equal(fast(b, x, w), jax.grad(fn)(b, x, w))
    # XLA may well sum in float32 inside and hide the trap: no sum may be low as written.
    assert not [
        e
        for e in iter_eqns(jaxpr_of(fast, b, x, w))
        if e.primitive.name in ("reduce_sum", "cumsum")
        and str(e.outvars[0].aval.dtype) == COMPUTE[policy]
    ]


def test_trap_06_linen_layers() -> None:
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8), nn.LayerNorm(), nn.Dense(1)])
    params = jax.jit(model.init)(jax.random.key(0), X)

    def fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x))

    gradient = jax.jit(jax.grad(autocast(fn, BF16)))
    sums = {
        str(e.outvars[0].aval.dtype)
        for e in iter_eqns(jaxpr_of(gradient, params, X))
        if e.primitive.name == "reduce_sum"
    }
    assert sums == {"float32"}
    assert {str(g.dtype) for g in jax.tree.leaves(gradient(params, X))} == {"float32"}


# --- 7: what of the author's intent can be seen --------------------------------------------------


def test_trap_07_a_cast_that_does_nothing_leaves_nothing_to_honour() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) @ w

    assert [e.primitive.name for e in iter_eqns(jaxpr_of(fn, X, W))] == ["dot_general"]
    assert all_low(autocast(fn, BF16), X, W)


def test_trap_07_a_preferred_element_type_of_float32_says_nothing() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ij,jk->ik", x, w, preferred_element_type=jnp.float32)

    assert all_low(autocast(fn, BF16), X, W)


@pytest.mark.parametrize("derivative", [False, True])
def test_trap_07_a_real_upcast_is_honoured(derivative: bool) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32) @ w)

    fast = autocast(fn, BF16)
    fast = jax.grad(fast, argnums=1) if derivative else fast
    assert set(contraction_dtypes(fast, X.astype(jnp.bfloat16), W)) == {"float32"}


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", lax.Precision.HIGHEST])
def test_trap_07_precision_is_honoured(precision: Any, derivative: bool) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.dot(x, w, precision=precision)))

    fast = autocast(fn, BF16)
    fast = jax.grad(fast) if derivative else fast
    assert set(contraction_dtypes(fast, X, W)) == {"float32"}


def test_trap_07_the_region_marker_is_honoured() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jaxmp.full_precision(jnp.matmul)(x @ w, w) @ w

    assert contraction_dtypes(autocast(fn, BF16), X, W) == {"bfloat16": 2, "float32": 1}


# --- 8: the region marker survives every transformation ------------------------------------------


def marked(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(jaxmp.full_precision(lambda a, b: jnp.tanh(a @ b) @ b)(x, w))


def in_jit(x, w):
    return jax.jit(marked)(x, w)


def in_scan(x, w):
    return lax.scan(lambda c, _: (marked(c, w), None), x, None, length=3)[0]


def in_while(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, marked(s[1], w)), (0, x))[1]


def in_fori(x, w):
    return lax.fori_loop(0, 3, lambda _, c: marked(c, w), x)


def in_remat(x, w):
    return jax.checkpoint(marked)(x, w)


def in_vmap(x, w):
    return jax.vmap(marked, in_axes=(0, None))(x, w)


def in_cond(x, w):
    return lax.cond(x[0, 0] > 0, marked, lambda a, b: marked(a, b) * 2, x, w)


def in_switch(x, w):
    return lax.switch(1, [marked, marked], x, w)


def in_grad(x, w):
    return jax.grad(lambda a: jnp.sum(marked(a, w) ** 2))(x)


def in_custom_jvp(x, w):
    @jax.custom_jvp
    def f(a, b):
        return marked(a, b)

    f.defjvp(lambda primals, tangents: jax.jvp(lambda a, b: marked(a, b) * 1.0, primals, tangents))
    return f(x, w)


def in_custom_vjp(x, w):
    @jax.custom_vjp
    def f(a, b):
        return marked(a, b)

    def forward(a, b):
        return marked(a, b), (a, b)

    def backward(saved, g):
        return jax.vjp(marked, *saved)[1](g)

    f.defvjp(forward, backward)
    return f(x, w)


def in_custom_vjp_in_remat_in_scan(x, w):
    body = jax.checkpoint(lambda c, _: (in_custom_vjp(c, w), None))
    return lax.scan(body, x, None, length=2)[0]


def around_autocast(x, w):
    return autocast(marked, F16)(x, w)


PLACES = {
    f.__name__: f
    for f in (
        marked,
        in_jit,
        in_scan,
        in_while,
        in_fori,
        in_remat,
        in_vmap,
        in_cond,
        in_switch,
        in_grad,
        in_custom_jvp,
        in_custom_vjp,
        in_custom_vjp_in_remat_in_scan,
        around_autocast,
    )
}


@pytest.mark.parametrize("derivative", ["value", "grad", "jvp", "grad of jit", "hessian"])
@pytest.mark.parametrize("place", PLACES)
def test_trap_08_full_precision_survives(place: str, derivative: str) -> None:
    fn = PLACES[place]
    if derivative != "value" and place == "in_while" and derivative != "jvp":
        pytest.skip("JAX cannot reverse a while loop")
    if derivative == "hessian" and "custom_vjp" in place:
        pytest.skip("JAX cannot push forward through a custom_vjp")

    def scalar(x: jax.Array, w: jax.Array) -> jax.Array:
        # Low contractions on either side: the marker is what keeps those between them float32.
        return jnp.sum(jnp.tanh(fn(jnp.tanh(x @ w), w)) @ w)

    fast = autocast(scalar, BF16)
    if derivative == "grad":
        fast = jax.grad(fast, argnums=(0, 1))
    elif derivative == "jvp":
        if "custom_vjp" in place:
            pytest.skip("JAX cannot push forward through a custom_vjp")
        fast = lambda x, w: jax.jvp(autocast(scalar, BF16), (x, w), (x, w))  # noqa: E731
    elif derivative == "grad of jit":
        fast = jax.grad(jax.jit(fast))
    elif derivative == "hessian":
        fast = jax.jacfwd(jax.grad(fast))
    found = contractions(fast, X, W)
    mixed = [c for c in found if len(set(c.in_dtypes)) > 1]
    assert not mixed
    inside = [c for c in found if c.in_dtypes[0] == "float32"]
    outside = [c for c in found if c.in_dtypes[0] == "bfloat16"]
    plain = contractions(
        {"value": scalar, "grad": jax.grad(scalar, argnums=(0, 1)),
         "jvp": lambda x, w: jax.jvp(scalar, (x, w), (x, w)),
         "grad of jit": jax.grad(jax.jit(scalar)),
         "hessian": jax.jacfwd(jax.grad(scalar))}[derivative], X, W)  # fmt: skip
    # Outside are two products and what differentiates them; their number does not depend on `fn`.
    alone = contractions(
        {"value": twice, "grad": jax.grad(twice, argnums=(0, 1)),
         "jvp": lambda x, w: jax.jvp(twice, (x, w), (x, w)),
         "grad of jit": jax.grad(jax.jit(twice)),
         "hessian": jax.jacfwd(jax.grad(twice))}[derivative], X, W)  # fmt: skip
    assert len(outside) == len(alone), (len(outside), len(alone), len(inside), len(plain))
    assert len(inside) >= 2


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """The outside of the test above."""
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w)) @ w)


@pytest.mark.parametrize("place", PLACES)
def test_trap_08_full_precision_computes_what_it_did(place: str) -> None:
    fn = PLACES[place]
    np.testing.assert_array_equal(jax.jit(autocast(fn, BF16))(X, W), jax.jit(fn)(X, W))


# --- 9: a weight's cast inside a scan body -------------------------------------------------------


def test_trap_09_a_weights_gradient_over_iterations_is_summed_in_float32() -> None:
    def fn(w: jax.Array, xs: jax.Array) -> jax.Array:
        _, ys = lax.scan(lambda c, x: (c, jnp.sum(jnp.tanh(x @ w) @ w)), 0.0, xs)
        return jnp.sum(ys)

    xs = gaussian(5, 64, 2, 8)
    fast = autocast(fn, BF16)
    [scan] = scan_eqns(fast, W, xs)
    dtypes = {
        str(v.aval.dtype)
        for v in scan.invars
        if not isinstance(v, Literal) and v.aval.shape == W.shape
    }
    assert dtypes == {"float32"}, "the weight was narrowed outside of the loop"
    for eqn in scan_eqns(jax.grad(fast), W, xs):
        for var in eqn.outvars:
            if var.aval.shape == W.shape:
                assert str(var.aval.dtype) == "float32"


def test_trap_09_ten_thousand_unit_gradients() -> None:
    def fn(w: jax.Array, xs: jax.Array) -> jax.Array:
        _, ys = lax.scan(lambda c, x: (c, jnp.sum(x @ w)), 0.0, xs)
        return jnp.sum(ys)

    xs = jnp.ones((10_000, 1, 2))
    got = jax.jit(jax.grad(autocast(fn, BF16)))(jnp.ones((2, 2)), xs)
    np.testing.assert_array_equal(got, 10_000.0)  # in bfloat16 the sum stops at 256


# --- 10: sorting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "primitive"),
    [
        (lambda x: jnp.sort(x, -1), "sort"),
        (lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1), "sort"),
        (lambda x: jnp.pad(lax.top_k(x, 4)[0], ((0, 0), (0, 4))), "top_k"),
        (lambda x: jnp.broadcast_to(jnp.median(x, -1, keepdims=True), x.shape), "sort"),
    ],
    ids=["sort", "argsort", "top_k", "median"],
)
def test_trap_10_keys_are_float32(op: Callable[[jax.Array], jax.Array], primitive: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return op(jnp.tanh(x @ w)) @ w

    keys = {
        str(e.invars[0].aval.dtype)
        for e in iter_eqns(jaxpr_of(autocast(fn, BF16), X, W))
        if e.primitive.name == primitive
    }
    assert keys == {"float32"}


def test_trap_10_near_ties_keep_their_order() -> None:
    def fn(keys: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.take_along_axis(w, jnp.argsort(keys), -1)

    keys = 1 + jnp.arange(64.0)[::-1] * 2.0**-12  # all of them 1.0 or 1.0078 in bfloat16
    fast = autocast(fn, BF16)
    np.testing.assert_array_equal(fast(keys, jnp.arange(64.0)), np.arange(64.0)[::-1])


# --- 11: custom_vjp ------------------------------------------------------------------------------


@jax.custom_vjp
def reverse_gradient(x: jax.Array) -> jax.Array:
    return x


reverse_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@jax.custom_vjp
def recomputing(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


def _recomputing_fwd(x: jax.Array, w: jax.Array) -> Any:
    return recomputing(x, w), (x, w)


def _recomputing_bwd(saved: Any, g: jax.Array) -> Any:
    x, w = saved
    hidden = jnp.tanh(x @ w)  # recomputed: three more products than a stored one
    inner = (g @ w.T) * (1 - hidden**2)
    return 5 * (inner @ w.T), 5 * (x.T @ inner + hidden.T @ g)  # five times autodiff's


recomputing.defvjp(_recomputing_fwd, _recomputing_bwd)


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
def test_trap_11_gradient_reversal_keeps_its_sign(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(reverse_gradient(jnp.tanh(x @ w)) @ w)

    fast = autocast(fn, policy)
    want = jax.jit(jax.grad(fn))(X, W)
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.grad(fast))(X, W)
        assert relative(got, want) < 10 * EPS[policy]  # −1 × autodiff's would be 2 off


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
def test_trap_11_primal_forward_and_backward_are_all_transformed(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(recomputing(x @ w, w) @ w)

    fast = autocast(fn, policy)
    gradient = jax.grad(fast, argnums=(0, 1))
    found = contraction_dtypes(gradient, X, W)
    want = contraction_dtypes(jax.grad(fn, argnums=(0, 1)), X, W)
    assert found == {COMPUTE[policy]: sum(want.values())}  # none float32, none dropped
    assert all_low(fast, X, W, policy=policy)
    # Six products deep.
    assert relative(gradient(X, W), jax.grad(fn, argnums=(0, 1))(X, W)) < 6 * 3 * EPS[policy]


def test_trap_11_the_memory_saving_is_kept() -> None:
    def saved(fn: Callable[..., Any]) -> int:
        x = gaussian(6, 64, 8)
        _, pullback = jax.vjp(lambda x, w: recomputing(jnp.tanh(x @ w), w), x, W)
        _, fast = jax.vjp(fn, x, W)
        total = [sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for p in (pullback, fast)]
        return total[1] / total[0]

    # Residuals are x, w and tanh's result: narrowed, never more of them.
    assert saved(autocast(lambda x, w: recomputing(jnp.tanh(x @ w), w), BF16)) <= 1.0


# --- 12: eager calls -----------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every program that is planned."""
    programs: list[int] = []
    plan_program = transform_module.plan_program

    def counted(*args: Any) -> Any:
        programs.append(1)
        return plan_program(*args)

    monkeypatch.setattr(transform_module, "plan_program", counted)
    return programs


def test_trap_12_an_eager_loop_plans_once_per_program(planned: list[int]) -> None:
    # Every call traces, as what a function reads may have changed; an equal trace has a plan.
    fast = autocast(lambda x, w, scale=1.0: {"y": jnp.tanh(x @ w["w"]) * scale}, BF16)
    for i in range(5):
        fast(X + i, {"w": W})
    assert len(planned) == 1
    for _ in range(5):
        fast(X[:2], {"w": W})
    assert len(planned) == 2
    for _ in range(5):
        fast(X, {"w": W}, scale=2.0)
    assert len(planned) == 3
    for _ in range(5):  # seen before: nothing new
        fast(X, {"w": W})
        fast(X[:2], {"w": W})
        fast(X, {"w": W}, scale=2.0)
    assert len(planned) == 3
    fast(X.astype(jnp.bfloat16), {"w": W})
    assert len(planned) == 4


def test_trap_12_eager_gradients_plan_once(planned: list[int]) -> None:
    gradient = jax.value_and_grad(autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w), BF16))
    for i in range(5):
        gradient(X * i, W)
    assert len(planned) == 1


def test_trap_12_a_captured_array_never_goes_stale() -> None:
    # A function that closes over arrays (a model's weights) is traced anew at each eager call.
    captured = {"w": W}
    fast = autocast(lambda x: x @ captured["w"], BF16)
    first = fast(X)
    assert relative(first, X @ W) < 2 * EPS[BF16]
    captured["w"] = 2.0 * W
    np.testing.assert_array_equal(fast(X), 2.0 * first)


def test_trap_12_custom_rules_are_planned_once() -> None:
    runs = []

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    def backward(saved: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        runs.append(1)
        return (g * saved,)

    f.defvjp(lambda x: (jnp.tanh(x), x), backward)
    jitted = jax.jit(f)
    # In a jit, so that JAX itself keeps the rule from one eager call to the next.
    gradient = jax.grad(autocast(lambda x, w: jnp.sum(jitted(x @ w) @ w), BF16))
    gradient(X, W)
    first = len(runs)
    for _ in range(5):
        gradient(X, W)
    assert len(runs) == first


# --- 13: what nobody listed ----------------------------------------------------------------------


def test_trap_13_an_unknown_higher_order_primitive_runs_as_written_and_is_reported() -> None:
    @jax.custom_batching.custom_vmap
    def inner(a: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(a @ w)

    @inner.def_vmap
    def _(size: int, batched: Any, a: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(a @ w), True

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return inner(x @ w, w) @ w

    found = explain(fn, BF16)(X, W)
    unknown = [row for row in found.rows if "not looked inside" in row.reason]
    assert [row.op for row in unknown] == ["custom_vmap_call"]
    assert "custom_vmap_call" in found.summary()
    fast = autocast(fn, BF16)
    with pytest.warns(UserWarning, match="custom_vmap_call"):
        counts = contraction_dtypes(fast, X, W)
    assert counts == {"bfloat16": 2, "float32": 1}
    assert relative(fast(X, W), fn(X, W)) < 6 * EPS[BF16]


def test_trap_13_composite_runs_as_written_and_is_reported() -> None:
    composite = lax.composite(lambda a, w: jnp.tanh(a @ w), "jaxmp.test")

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return composite(x @ w, w) @ w

    found = explain(fn, BF16)(X, W)
    assert "composite" in {row.op for row in found.rows if row.reason.startswith("not classified")}
    with pytest.warns(UserWarning, match="composite"):
        got = autocast(fn, BF16)(X, W)
    assert relative(got, fn(X, W)) < 6 * EPS[BF16]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: jnp.linalg.cholesky((x.T @ x) @ w @ w.T + 9 * jnp.eye(8)),
        lambda x, w: jnp.linalg.solve(w.T @ w + jnp.eye(8), x.T @ x),
        lambda x, w: jnp.linalg.svd(x.T @ x @ w, compute_uv=False),
        lambda x, w: jnp.abs(jnp.fft.fft(x @ w)),
        lambda x, w: jax.pure_callback(
            lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((6, 8), jnp.float32), x @ w
        ),
    ],
    ids=["cholesky", "solve", "svd", "fft", "callback"],
)
def test_trap_13_solvers_transforms_and_callbacks_see_float32(fn: Callable[..., Any]) -> None:
    fast = autocast(lambda x, w: jnp.sum(fn(x, w)[..., :4] @ w[:4]), BF16)
    for eqn in iter_eqns(jaxpr_of(fast, X, W)):
        if eqn.primitive.name in (
            "cholesky",
            "lu",
            "triangular_solve",
            "svd",
            "fft",
            "pure_callback",
        ):
            dtypes = {str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)}
            assert not dtypes & {"bfloat16", "float16"}
    plain = jax.jit(lambda x, w: jnp.sum(fn(x, w)[..., :4] @ w[:4]))(X, W)
    # Up to four products in a row, in absolute terms since the sum may cancel.
    assert abs(jax.jit(fast)(X, W) - plain) < 12 * EPS[BF16] * float(jnp.linalg.norm(fn(X, W)) * 8)


# --- 14: after a normalization -------------------------------------------------------------------


class ConvNet(nn.Module):
    """Convolution, BatchNorm, ReLU, twice; optionally with hand-written dtypes."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            y = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y))
            y = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(y)
            y = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)
            x = nn.relu(x + y) if x.shape == y.shape else nn.relu(y)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


IMAGES = gaussian(7, 8, 8, 8, 3)


def conv_loss(model: ConvNet) -> Callable[..., jax.Array]:
    def loss(variables: Any, x: jax.Array) -> jax.Array:
        y, _ = model.apply(variables, x, mutable=["batch_stats"])
        return -jnp.mean(jax.nn.log_softmax(y)[:, 0])

    return loss


def test_trap_14_relu_after_batch_norm_is_low() -> None:
    model = ConvNet()
    variables = jax.jit(model.init)(jax.random.key(0), IMAGES)
    found = explain(conv_loss(model), BF16)(variables, IMAGES)
    relus = [r for r in found.rows if r.op == "max" and "float32" not in r.path and r.count]
    images = [r for r in relus if "log_softmax" not in r.path and "BatchNorm" not in r.path]
    assert images
    # The one before the pooled head has float32 customers only (the mean); the others feed Conv.
    assert [r.dtype for r in images].count("bfloat16") >= 3
    assert found.products() == {"bfloat16": 5}


def test_trap_14_residuals_are_no_more_than_hand_written() -> None:
    variables = jax.jit(ConvNet().init)(jax.random.key(0), IMAGES)

    def residuals(loss: Callable[..., Any]) -> int:
        _, pullback = jax.eval_shape(lambda v: jax.vjp(lambda v: loss(v, IMAGES), v), variables)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    hand = residuals(conv_loss(ConvNet(dtype=jnp.bfloat16)))
    assert residuals(autocast(conv_loss(ConvNet()), BF16)) <= hand


@pytest.mark.parametrize(
    "activation", ["relu", "tanh", "sigmoid", "leaky_relu", "relu6", "hard_tanh"]
)
def test_trap_14_other_activations_after_layer_norm(activation: str) -> None:
    function = getattr(jax.nn, activation)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-6)
        return function(y * 1.5 + 0.5) @ w

    assert relative(autocast(fn, BF16)(X, W), fn(X, W)) < 8 * EPS[BF16]
    op = {"relu": "max", "tanh": "tanh", "sigmoid": "logistic", "leaky_relu": "select_n",
          "relu6": "min", "hard_tanh": "select_n"}[activation]  # fmt: skip
    found = primitives(autocast(fn, BF16), X, W)
    assert found[op, "bfloat16"] >= 1, found


# --- 15: saturate what is narrowed, never a tangent ----------------------------------------------


def log_recurrence(scores: jax.Array, w: jax.Array) -> jax.Array:
    """CTC's forward recurrence in the log domain, −1e5 for log 0."""
    frames = jax.nn.log_softmax(scores @ w)

    def step(alpha: jax.Array, frame: jax.Array) -> tuple[jax.Array, None]:
        shifted = jnp.concatenate([jnp.full((1,), -1e5), alpha[:-1]])
        return jnp.logaddexp(alpha, shifted) + frame, None

    init = jnp.full((w.shape[1],), -1e5).at[0].set(0.0)
    return -lax.scan(step, init, frames)[0][-1]


@slow_when(lambda policy: policy == BF16)  # float16 is the one out of range
@pytest.mark.parametrize("policy", [F16, BF16, "mixed_float16,softmax=f16"])
def test_trap_15_a_log_domain_recurrence_is_finite(policy: str) -> None:
    scores = gaussian(8, 20, 8)
    fast = jax.jit(autocast(log_recurrence, policy))
    assert np.isfinite(fast(scores, W))
    assert relative(fast(scores, W), log_recurrence(scores, W)) < 0.02
    gradient = jax.jit(jax.grad(fast))(scores, W)
    assert np.isfinite(gradient).all()
    # Posteriors of a 20-step recurrence on scores that are exact to eps.
    assert relative(gradient, jax.grad(log_recurrence)(scores, W)) < 0.1


@slow_when(lambda policy: policy == BF16)  # float16 is the one out of range
@pytest.mark.parametrize("policy", [F16, BF16])
def test_trap_15_a_low_carry_that_starts_out_of_range_saturates(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array, start: jax.Array, ws: jax.Array) -> jax.Array:
        def body(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh((carry * 0.0) @ w) + jnp.tanh(x @ w), None  # inf × 0 is NaN

        return lax.scan(body, start, ws)[0]

    fast = autocast(fn, policy)
    rest = W, jnp.full(X.shape, FLOAT32_MIN), jnp.stack([W] * 3)
    assert carries(fast, X, *rest) == [[COMPUTE[policy]]]
    assert relative(fast(X, *rest), fn(X, *rest)) < 6 * EPS[policy]
    assert np.isfinite(jax.grad(lambda x: jnp.sum(fast(x, *rest)))(X)).all()


@pytest.mark.parametrize("policy", [F16, BF16])
def test_trap_15_literals_saturate(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.minimum(jnp.maximum(x @ w, -1e38), 3.4e38) @ w

    def touch(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x @ w - 3.4e38) @ jnp.zeros_like(w)  # inf × 0 is NaN

    np.testing.assert_array_equal(autocast(touch, policy)(X, W), 0.0)
    assert relative(autocast(fn, policy)(X, W), fn(X, W)) < 5 * EPS[policy]
    assert np.isfinite(jax.grad(lambda x: jnp.sum(autocast(fn, policy)(x, W)))(X)).all()


@slow_when(lambda policy: policy == BF16)  # float16 is the one out of range
@pytest.mark.parametrize("policy", [F16, BF16])
@pytest.mark.parametrize("inner", ["grad", "jvp", "vjp", "linearize", "custom_jvp"])
def test_trap_15_tangents_are_never_clamped(inner: str, policy: str) -> None:
    # A derivative inside the program, differentiated again from outside: a clamp on a tangent has
    # no transpose.
    def energy(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jax.nn.relu(x @ w) + x) @ w)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        f = partial(energy, w=w)
        if inner == "grad":
            out = jax.grad(f)(x) @ w
        elif inner == "jvp":
            out = jax.jvp(lambda a: jnp.tanh(a @ w) @ w, (x,), (x * 0.5,))[1] @ w
        elif inner == "vjp":
            out = jax.vjp(lambda a: jnp.tanh(a @ w) @ w, x)[1](x * 0.5)[0] @ w
        elif inner == "linearize":
            out = jax.linearize(lambda a: jnp.tanh(a @ w) @ w, x)[1](x * 0.5) @ w
        else:
            out = tanh_times_seven(x @ w) @ w
        return jnp.sum(out**2)

    want = jax.jit(jax.grad(fn))(X, W)
    for outer in (jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: jax.jit(jax.grad(f))):
        got = outer(autocast(fn, policy))(X, W)
        assert relative(got, want) < 40 * EPS[policy]


@jax.custom_jvp
def modulated(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


@modulated.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x, w], [dx, dw] = primals, tangents
    hidden = jnp.tanh(x @ w)
    # A float32 tangent meets a low value on its way to a contraction.
    return hidden @ w, (dx * hidden) @ w + hidden @ dw


@slow_when(lambda policy: policy == BF16)  # float16 is the one out of range
@pytest.mark.parametrize("policy", [F16, BF16])
def test_trap_15_a_rule_stays_linear_in_its_tangents(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(modulated(x, w) ** 2)

    want = jax.jit(jax.grad(fn))(X, W)
    for outer in (jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: jax.jit(jax.grad(f))):
        got = outer(autocast(fn, policy))(X, W)
        assert relative(got, want) < 12 * EPS[policy]
    _, big = jax.jvp(partial(jaxmp.autocast(modulated, BF16, argnums=1), w=W), (X,), (X * 1e30,))
    _, want = jax.jvp(partial(modulated, w=W), (X,), (X * 1e30,))
    assert relative(big, want) < 12 * EPS[BF16]


DETOURS = {
    "complex": lambda x: jnp.real(lax.complex(x, -x) * (1 + 1j)),
    "bfloat16": lambda x: (2 * x.astype(jnp.bfloat16)).astype(jnp.float32),
    "jit": lambda x: jax.jit(jnp.real)(lax.complex(x, x)),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.real, jnp.imag, lax.complex(x, -x)),
    "scan": lambda x: jnp.real(
        lax.scan(lambda c, _: (c * (1 + 1j), None), lax.complex(x, x), None, length=3)[0]
    ),
    # The first iteration's carry is not a tangent yet.
    "carry": lambda x: jnp.real(
        lax.scan(
            lambda c, _: ((c[1], lax.complex(x, x)), None),
            (lax.complex(X, X), lax.complex(X, X)),
            None,
            length=3,
        )[0][0]
    ),
}


@slow_when(lambda policy: policy == BF16)  # float16 is the one out of range
@pytest.mark.parametrize("policy", [F16, BF16])
@pytest.mark.parametrize("detour", DETOURS)
def test_trap_15_a_tangent_that_was_in_another_dtype_is_one_still(detour: str, policy: str) -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        # The other branch is low, so this one's result is narrowed.
        return lax.cond(w[0, 0] > 1e6, lambda a: jnp.tanh(a) @ w, DETOURS[detour], x)

    halved = jax.custom_jvp(body)

    @halved.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        out, out_tangent = jax.jvp(body, primals, tangents)
        return out, 0.5 * out_tangent

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(halved(x, w)) @ w)

    fast = autocast(fn, policy)
    want = jax.jit(jax.grad(fn))(X, W)
    for got in (jax.grad(fast)(X, W), jax.jit(jax.grad(fast))(X, W)):
        assert relative(got, want) < 12 * EPS[policy]


@pytest.mark.parametrize("detour", [lambda g: g, *DETOURS.values()][:4])
def test_trap_15_a_cotangent_that_overflows_is_seen_to(detour: Callable[..., Any]) -> None:
    """Clipped to the largest float16, it would be a wrong gradient that loss scaling lets pass."""

    @jax.custom_vjp
    def fn(x: jax.Array) -> jax.Array:
        return x

    fn.defvjp(lambda x: (x, None), lambda _, g: (1e6 * detour(g.reshape(8, -1)).reshape(g.shape),))
    gradient = jax.grad(autocast(lambda w, x: jnp.sum(fn(x @ w) @ w), F16))(W, 1e-3 * X)
    assert not np.isfinite(gradient).all()


# --- 16: the author's 16-bit operand -------------------------------------------------------------


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("author", ["bfloat16", "float16"])
def test_trap_16_a_16_bit_operand_decides_for_its_partner(author: str, policy: str) -> None:
    def dispatch(x: jax.Array, mask: jax.Array, w: jax.Array) -> jax.Array:
        slots = lax.dot_general(
            mask, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.tanh(slots @ w))

    mask = jnp.eye(6, 6, dtype=author)
    for fn in (autocast(dispatch, policy), jax.grad(autocast(dispatch, policy))):
        found = contraction_dtypes(fn, X, mask, W)
        assert not [d for d in found if "float32" in d], found
        assert not [d for d in found if "*" in d], found
    assert relative(autocast(dispatch, policy)(X, mask, W), dispatch(X, mask, W)) < 0.05


# --- 17: complex numbers and HIGHEST -------------------------------------------------------------


def test_trap_17_complex_products_and_fft_stay_as_they_are() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        spectrum = jnp.fft.rfft(x @ w)
        mixed = (x @ w) @ (w * (1 + 1j))  # complex64 × float32
        return jnp.abs(jnp.fft.irfft(spectrum * 2)).sum() + jnp.abs(mixed).sum()

    fast = autocast(fn, BF16)
    assert relative(fast(X, W), fn(X, W)) < 5 * EPS[BF16]
    eqns = list(iter_eqns(jaxpr_of(fast, X, W)))
    ffts = {str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "fft"}
    assert ffts == {"float32", "complex64"}
    assert {c.in_dtypes for c in contractions(fast, X, W) if "complex64" in c.in_dtypes}
    assert np.isfinite(jax.grad(fast)(X, W)).all()


def test_trap_17_contractions_that_the_author_pinned_are_counted_apart() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        resized = jax.image.resize(x @ w, (8, 16), "linear")  # HIGHEST inside
        return jnp.sum(resized @ jnp.concatenate([w, w]))

    found = explain(fn, BF16)(X, W)
    pinned = [r for r in found.rows if r.op == "dot_general" and r.dtype == "float32"]
    assert pinned
    assert {r.reason for r in pinned} == {"precision=HIGHEST, as the author asked"}
    assert [
        c
        for c in contractions(autocast(fn, BF16), X, W)
        if not c.exempt and c.in_dtypes[0] != "bfloat16"
    ] == []


# --- 18: float16 overflow is float16's -----------------------------------------------------------


class Mlp(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (16, 16):
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(4, dtype=self.dtype)(x).astype(jnp.float32)


def scaled_gradient(model: Mlp, scale: float, policy: str | None = None) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    fn = loss if policy is None else autocast(loss, policy)
    return jax.jit(jax.grad(lambda params, x: fn(params, x) * scale))


def test_trap_18_float16_overflows_where_a_hand_written_model_does() -> None:
    x = gaussian(9, 32, 8) * jnp.asarray([100.0, 1, 1, 1, 0.01, 0.01, 0.01, 0.01])
    params = jax.jit(Mlp().init)(jax.random.key(0), x)
    hand = scaled_gradient(Mlp(jnp.float16), 4096.0)(params, x)
    ours = scaled_gradient(Mlp(), 4096.0, F16)(params, x)
    finite = [
        np.isfinite(np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)])) for t in (hand, ours)
    ]
    assert 0 < finite[0].mean() < 1, "this model must overflow, but not everywhere"
    # Nothing that hand-written code keeps finite may overflow; sums in float32 may survive.
    assert not (finite[0] & ~finite[1]).any()
    narrow = scaled_gradient(Mlp(), 4096.0, f"{F16},reduce=f16")(params, x)
    kernels = [
        [np.isfinite(v["kernel"]) for _, v in sorted(t["params"].items())] for t in (hand, narrow)
    ]
    for a, b in zip(*kernels, strict=True):
        np.testing.assert_array_equal(a, b)


def test_trap_18_a_smaller_scale_is_finite_and_right() -> None:
    x = gaussian(9, 32, 8) * jnp.asarray([100.0, 1, 1, 1, 0.01, 0.01, 0.01, 0.01])
    params = jax.jit(Mlp().init)(jax.random.key(0), x)
    ours = scaled_gradient(Mlp(), 2.0**-4, F16)(params, x)
    want = scaled_gradient(Mlp(), 2.0**-4)(params, x)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(ours))
    assert relative(ours, want) < 24 * EPS[F16]  # eight contractions, 1.5 eps each, doubled


# --- 19: the floor under gradient error ----------------------------------------------------------


class Vit(nn.Module):
    """A pre-norm block over patches; optionally with hand-written dtypes."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.dtype
        x = nn.Conv(16, (4, 4), strides=(4, 4), dtype=dtype)(x).reshape(x.shape[0], -1, 16)
        position = self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 16))
        x = x + position.astype(x.dtype)
        attention = nn.MultiHeadDotProductAttention(2, dtype=dtype)
        x = x + attention(nn.LayerNorm(dtype=dtype)(x))
        hidden = nn.gelu(nn.Dense(32, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
        x = x + nn.Dense(16, dtype=dtype)(hidden)
        x = nn.LayerNorm(dtype=dtype)(x).mean(1)
        return nn.Dense(10, dtype=dtype)(x).astype(jnp.float32)


def rounded(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tree)


@pytest.mark.slow
@pytest.mark.parametrize("model", [ConvNet, Vit], ids=["resnet", "vit"])
def test_trap_19_gradient_error_is_near_the_floor(model: Callable[..., nn.Module]) -> None:
    variables = jax.jit(model().init)(jax.random.key(0), IMAGES)
    labels = jnp.arange(8)

    def loss_of(module: nn.Module) -> Callable[..., jax.Array]:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            y, _ = module.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], 1))

        return loss

    params = variables["params"]
    plain, by_hand, fast = (
        jax.jit(jax.grad(fn))
        for fn in (
            loss_of(model()),
            loss_of(model(jnp.bfloat16)),
            autocast(loss_of(model()), BF16),
        )
    )
    errors = []
    for seed in range(6):  # a rounding that flips a ReLU moves one gradient by percents
        images = gaussian(100 + seed, *IMAGES.shape)
        exact = plain(params, images)
        floor = plain(rounded(params), rounded(images))
        rest = by_hand(params, images), fast(params, images)
        errors.append([relative(g, exact) for g in (floor, *rest)])
    floor, hand, ours = np.sqrt(np.mean(np.square(errors), 0))
    # The floor rounds what enters; each contraction also rounds its result, there and back: three
    # roundings for one.
    assert 1e-4 < floor < 0.5
    assert ours < 3**0.5 * floor, (ours, floor)
    assert ours < hand, (ours, hand)


# --- 20: routers ---------------------------------------------------------------------------------


class MoE(nn.Module):
    experts: int = 7

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        router = self.param("router", nn.initializers.lecun_normal(), (x.shape[-1], self.experts))
        kernels = self.param(
            "kernels", nn.initializers.lecun_normal(), (self.experts, x.shape[-1], 8)
        )
        gates = jaxmp.full_precision(lambda a, b: jax.nn.softmax(a @ b))(x, router)
        chosen = jax.nn.one_hot(gates.argmax(-1), self.experts)
        outputs = jnp.einsum("td,edh->teh", x, kernels)
        return jnp.einsum("te,teh->th", chosen * gates, outputs)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"]
)
def test_trap_20_a_router_stays_float32(wrap: Callable[..., Any]) -> None:
    model = MoE()
    params = jax.jit(model.init)(jax.random.key(0), X)

    def fn(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ W)
        return jnp.sum(wrap(model.apply)(params, hidden) @ W)

    fast = autocast(fn, BF16)
    assert contraction_dtypes(fast, params, X) == {"bfloat16": 4, "float32": 1}
    gradient = jax.grad(fast)
    narrow = [
        e
        for e in iter_eqns(jaxpr_of(gradient, params, X))
        if e.primitive.name == "dot_general"
        and (8, 7) in [v.aval.shape for v in (*e.invars, *e.outvars)]
    ]
    assert narrow
    for eqn in narrow:
        if eqn.outvars[0].aval.shape != (8, 7):
            assert {str(v.aval.dtype) for v in eqn.invars} == {"float32"}


def test_trap_20_the_choice_is_that_of_float32() -> None:
    # Two experts whose logits differ by less than bfloat16 can tell.
    x = jnp.ones((1, 8))
    router = jnp.zeros((8, 2)).at[:, 0].set(1.0).at[:, 1].set(1.0).at[0, 1].add(2.0**-9)

    def choice(x: jax.Array, router: jax.Array) -> jax.Array:
        return jnp.argmax(jaxmp.full_precision(jnp.matmul)(x, router), -1)

    def unmarked(x: jax.Array, router: jax.Array) -> jax.Array:
        return jnp.argmax(x @ router, -1)

    np.testing.assert_array_equal(autocast(choice, BF16)(x, router), [1])
    np.testing.assert_array_equal(autocast(unmarked, BF16)(x, router), [0])


def test_every_trap_has_a_test() -> None:
    names = [
        n for n, f in globals().items() if n.startswith("test_trap_") and inspect.isfunction(f)
    ]
    assert {int(n.split("_")[2]) for n in names} == set(range(1, 21))
