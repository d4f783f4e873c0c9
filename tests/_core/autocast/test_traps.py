"""Twenty traps for a transformation of jaxprs, by number. Each of them has caught somebody.

The numbers are those of the list this library was designed from. Those that are not here are
guarded elsewhere: 6, a bias's gradient (`test_reductions_guard`, `test_autocast_numerics`); 7, the
author's word (`test_authors_word`, `test_rules`); 8, regions (`test_regions`); 19, the floor under
gradient error (`test_public_models`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._core.autocast import transform as transform_module

from support import (
    autocast,
    contraction_dtypes,
    contractions,
    explain,
    gaussian,
    iter_eqns,
    jaxpr_of,
    primitives,
    relative,
)

BF16, F16 = "mixed_bfloat16", "mixed_float16"
EPS = {BF16: 2.0**-7, F16: 2.0**-10}
COMPUTE = {BF16: "bfloat16", F16: "float16"}
FLOAT32_MIN = float(np.finfo(np.float32).min)


X = gaussian(0, 6, 8)
W = gaussian(1, 8, 8, scale=8**-0.5)


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


# --- 9: a weight's cast inside a scan body -------------------------------------------------------


def test_trap_09_ten_thousand_unit_gradients() -> None:
    def fn(w: jax.Array, xs: jax.Array) -> jax.Array:
        _, ys = lax.scan(lambda c, x: (c, jnp.sum(x @ w)), 0.0, xs)
        return jnp.sum(ys)

    xs = jnp.ones((10_000, 1, 2))
    got = jax.jit(jax.grad(autocast(fn, BF16)))(jnp.ones((2, 2)), xs)
    np.testing.assert_array_equal(got, 10_000.0)  # in bfloat16 the sum stops at 256


# --- 10: sorting ---------------------------------------------------------------------------------


def test_trap_10_keys_are_float32() -> None:
    sorting = {
        "sort": lambda x: jnp.sort(x, -1),
        "argsort": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
        "top_k": lambda x: jnp.pad(lax.top_k(x, 4)[0], ((0, 0), (0, 4))),
        "median": lambda x: jnp.broadcast_to(jnp.median(x, -1, keepdims=True), x.shape),
    }
    for name, op in sorting.items():
        fn = autocast(lambda x, w, op=op: op(jnp.tanh(x @ w)) @ w, BF16)
        keys = {
            str(e.invars[0].aval.dtype)
            for e in iter_eqns(jaxpr_of(fn, X, W))
            if e.primitive.name in ("sort", "top_k")
        }
        assert keys == {"float32"}, name


def test_trap_10_near_ties_keep_their_order() -> None:
    def fn(keys: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.take_along_axis(w, jnp.argsort(keys), -1)

    keys = 1 + jnp.arange(64.0)[::-1] * 2.0**-12  # all of them 1.0 or 1.0078 in bfloat16
    fast = autocast(fn, BF16)
    np.testing.assert_array_equal(fast(keys, jnp.arange(64.0)), np.arange(64.0)[::-1])


# --- 11: custom_vjp ------------------------------------------------------------------------------


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
    for _ in range(2):  # the second time, all were seen before
        for i in range(2):
            fast(X + i, {"w": W})
            fast(X[:2], {"w": W})
            fast(X, {"w": W}, scale=2.0)
        assert len(planned) == 3
    fast(X.astype(jnp.bfloat16), {"w": W})
    assert len(planned) == 4
    gradient = jax.value_and_grad(autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w), BF16))
    for i in range(2):
        gradient(X * i, W)
    assert len(planned) == 5


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


@jax.custom_batching.custom_vmap
def mapped(a: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(a @ w)


mapped.def_vmap(lambda size, batched, a, w: (jnp.tanh(a @ w), True))
COMPOSITE = lax.composite(lambda a, w: jnp.tanh(a @ w), "jaxmp.test")


@pytest.mark.parametrize(
    ("inner", "op", "reason"),
    [
        (mapped, "custom_vmap_call", "not looked inside"),
        (COMPOSITE, "composite", "not classified"),
    ],
)
def test_trap_13_what_is_unknown_runs_as_written_and_is_reported(
    inner: Any, op: str, reason: str
) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return inner(x @ w, w) @ w

    found = explain(fn, BF16)(X, W)
    assert [row.op for row in found.rows if reason in row.reason] == [op]
    assert op in found.summary()
    fast = autocast(fn, BF16)
    with pytest.warns(UserWarning, match=op):
        counts = contraction_dtypes(fast, X, W)
    assert counts == {"bfloat16": 2, "float32": 1}
    assert relative(fast(X, W), fn(X, W)) < 6 * EPS[BF16]


def test_trap_13_solvers_transforms_and_callbacks_see_float32() -> None:
    kind = jax.ShapeDtypeStruct((6, 8), jnp.float32)
    solvers: dict[str, Callable[..., Any]] = {
        "cholesky": lambda x, w: jnp.linalg.cholesky((x.T @ x) @ w @ w.T + 9 * jnp.eye(8)),
        "lu": lambda x, w: jnp.linalg.solve(w.T @ w + jnp.eye(8), x.T @ x),
        "triangular_solve": lambda x, w: jnp.linalg.solve(w.T @ w + jnp.eye(8), x.T @ x),
        "svd": lambda x, w: jnp.linalg.svd(x.T @ x @ w, compute_uv=False),
        "fft": lambda x, w: jnp.abs(jnp.fft.fft(x @ w)),
        "pure_callback": lambda x, w: jax.pure_callback(lambda a: a, kind, x @ w),
    }
    for name, fn in solvers.items():
        fast = autocast(lambda x, w, fn=fn: jnp.sum(fn(x, w)[..., :4] @ w[:4]), BF16, data=1)
        found = [e for e in iter_eqns(jaxpr_of(fast, X, W)) if e.primitive.name == name]
        assert found, name
        dtypes = {str(v.aval.dtype) for e in found for v in (*e.invars, *e.outvars)}
        assert not dtypes & {"bfloat16", "float16"}, name


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


def test_trap_14_residuals_are_no_more_than_hand_written() -> None:
    variables = jax.eval_shape(ConvNet().init, jax.random.key(0), IMAGES)

    def residuals(loss: Callable[..., Any]) -> int:
        _, pullback = jax.eval_shape(lambda v: jax.vjp(lambda v: loss(v, IMAGES), v), variables)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    hand = residuals(conv_loss(ConvNet(dtype=jnp.bfloat16)))
    assert residuals(autocast(conv_loss(ConvNet()), BF16)) <= hand


# --- 15: saturate what is narrowed, never a tangent ----------------------------------------------


def log_recurrence(scores: jax.Array, w: jax.Array) -> jax.Array:
    """CTC's forward recurrence in the log domain, −1e5 for log 0."""
    frames = jax.nn.log_softmax(scores @ w)

    def step(alpha: jax.Array, frame: jax.Array) -> tuple[jax.Array, None]:
        shifted = jnp.concatenate([jnp.full((1,), -1e5), alpha[:-1]])
        return jnp.logaddexp(alpha, shifted) + frame, None

    init = jnp.full((w.shape[1],), -1e5).at[0].set(0.0)
    return -lax.scan(step, init, frames)[0][-1]


@pytest.mark.parametrize("policy", [F16, "mixed_float16,softmax=f16"])
def test_trap_15_a_log_domain_recurrence_is_finite(policy: str) -> None:
    scores = gaussian(8, 20, 8)
    value, gradient = jax.jit(jax.value_and_grad(autocast(log_recurrence, policy)))(scores, W)
    want, exact = jax.value_and_grad(log_recurrence)(scores, W)
    assert abs(value - want) < 0.02 * abs(want)
    # Posteriors of a 20-step recurrence on scores that are exact to eps.
    assert relative(gradient, exact) < 0.1


def test_trap_15_a_low_carry_that_starts_out_of_range_saturates() -> None:
    def fn(x: jax.Array, w: jax.Array, start: jax.Array, ws: jax.Array) -> jax.Array:
        def body(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh((carry * 0.0) @ w) + jnp.tanh(x @ w), None  # inf × 0 is NaN

        return lax.scan(body, start, ws)[0]

    fast = autocast(fn, F16)
    rest = W, jnp.full(X.shape, FLOAT32_MIN), jnp.stack([W] * 3)
    assert carries(fast, X, *rest) == [["float16"]]
    assert relative(fast(X, *rest), fn(X, *rest)) < 6 * EPS[F16]
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


INNER: dict[str, Callable[..., Any]] = {
    "grad": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.tanh(jax.nn.relu(x @ w) + x) @ w))(x),
    "jvp": lambda x, w: jax.jvp(lambda a: jnp.tanh(a @ w) @ w, (x,), (x * 0.5,))[1],
    "vjp": lambda x, w: jax.vjp(lambda a: jnp.tanh(a @ w) @ w, x)[1](x * 0.5)[0],
    "linearize": lambda x, w: jax.linearize(lambda a: jnp.tanh(a @ w) @ w, x)[1](x * 0.5),
    "custom_jvp": lambda x, w: tanh_times_seven(x @ w),
}


def assert_gradient(fn: Callable[..., Any], roundings: int, *, eager: bool = False) -> None:
    """The float16 gradient, jitted; and of a jitted function, and eager, where asked."""
    fast = autocast(fn, F16)
    want, *found = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (fn, fast)])(X, W)
    if eager:
        found += [jax.grad(f)(X, W) for f in (fast, jax.jit(fast))]
    for got in found:
        assert relative(got, want) < roundings * EPS[F16]


@pytest.mark.parametrize("inner", INNER)
def test_trap_15_tangents_are_never_clamped(inner: str) -> None:
    """A derivative in the program, differentiated from outside: a clamp has no transpose."""
    eager = inner in ("grad", "custom_jvp")
    assert_gradient(lambda x, w: jnp.sum((INNER[inner](x, w) @ w) ** 2), 40, eager=eager)


@jax.custom_jvp
def modulated(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


@modulated.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x, w], [dx, dw] = primals, tangents
    hidden = jnp.tanh(x @ w)
    # A float32 tangent meets a low value on its way to a contraction.
    return hidden @ w, (dx * hidden) @ w + hidden @ dw


def test_trap_15_a_rule_stays_linear_in_its_tangents() -> None:
    assert_gradient(lambda x, w: jnp.sum(modulated(x, w) ** 2), 12, eager=True)
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


@pytest.mark.parametrize("detour", DETOURS)
def test_trap_15_a_tangent_that_was_in_another_dtype_is_one_still(detour: str) -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        # The other branch is low, so this one's result is narrowed.
        return lax.cond(w[0, 0] > 1e6, lambda a: jnp.tanh(a) @ w, DETOURS[detour], x)

    halved = jax.custom_jvp(body)

    @halved.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        out, out_tangent = jax.jvp(body, primals, tangents)
        return out, 0.5 * out_tangent

    assert_gradient(lambda x, w: jnp.sum(jnp.tanh(halved(x, w)) @ w), 12, eager=detour == "cond")


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


def test_trap_16_a_16_bit_operand_decides_for_its_partner() -> None:
    def dispatch(x: jax.Array, mask: jax.Array, w: jax.Array) -> jax.Array:
        slots = lax.dot_general(
            mask, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.tanh(slots @ w))

    for author in ("bfloat16", "float16"):
        mask = jnp.eye(6, 6, dtype=author)
        for policy in (BF16, F16):
            fast = autocast(dispatch, policy)
            for fn in (fast, jax.grad(fast)):
                assert set(contraction_dtypes(fn, X, mask, W)) <= {"bfloat16", "float16"}
        assert relative(fast(X, mask, W), dispatch(X, mask, W)) < 0.05


# --- 17: complex numbers and HIGHEST -------------------------------------------------------------


def test_trap_17_complex_products_and_fft_stay_as_they_are() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        spectrum = jnp.fft.rfft(x @ w)
        mixed = (x @ w) @ (w * (1 + 1j))  # complex64 × float32
        return jnp.abs(jnp.fft.irfft(spectrum * 2)).sum() + jnp.abs(mixed).sum()

    fast = autocast(fn, BF16)
    both = jax.jit(lambda *args: (jax.value_and_grad(fast)(*args), fn(*args)))
    (got, gradient), want = both(X, W)
    assert relative(got, want) < 5 * EPS[BF16]
    assert np.isfinite(gradient).all()
    eqns = list(iter_eqns(jaxpr_of(fast, X, W)))
    ffts = {str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "fft"}
    assert ffts == {"float32", "complex64"}
    assert {c.in_dtypes for c in contractions(fast, X, W) if "complex64" in c.in_dtypes}


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


def scaled_gradient(model: Mlp, policy: str | None = None) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    fn = loss if policy is None else autocast(loss, policy)
    return jax.jit(jax.grad(lambda params, x: fn(params, x) * 4096.0))


def test_trap_18_float16_overflows_where_a_hand_written_model_does() -> None:
    x = gaussian(9, 32, 8) * jnp.asarray([100.0, 1, 1, 1, 0.01, 0.01, 0.01, 0.01])
    params = jax.jit(Mlp().init)(jax.random.key(0), x)
    hand = scaled_gradient(Mlp(jnp.float16))(params, x)
    ours = scaled_gradient(Mlp(), F16)(params, x)
    finite = [
        np.isfinite(np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)])) for t in (hand, ours)
    ]
    assert 0 < finite[0].mean() < 1, "this model must overflow, but not everywhere"
    # Nothing that hand-written code keeps finite may overflow; sums in float32 may survive.
    assert not (finite[0] & ~finite[1]).any()
    narrow = scaled_gradient(Mlp(), f"{F16},reduce=f16")(params, x)
    kernels = [
        [np.isfinite(v["kernel"]) for _, v in sorted(t["params"].items())] for t in (hand, narrow)
    ]
    for a, b in zip(*kernels, strict=True):
        np.testing.assert_array_equal(a, b)


# --- 20: routers ---------------------------------------------------------------------------------


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
