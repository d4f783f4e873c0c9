"""`numerics.capture` on kinds of programs and arguments that are easily forgotten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from public_models import build
from test_numerics_capture import measured

import jaxmp
from jaxmp import numerics
from jaxmp._numerics.capture import prepare
from jaxmp._numerics.origins import Walk
from jaxmp._numerics.statistics import Measurements, Statistics, look, unpack
from jaxmp._numerics.survey import Loop, Site, SurveyedProgram

KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(KEYS[0], (4, 8))
W = jax.random.normal(KEYS[1], (8, 8)) / 3


def ops(run: numerics.Capture) -> list[str]:
    return [origin.site.op for origin in run.origins()]


# Programs.


def test_a_loop_that_ends_elsewhere_for_each_element() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        def until_small(row: jax.Array) -> jax.Array:
            return lax.while_loop(lambda h: jnp.sum(h**2) > 1, lambda h: jnp.tanh(h @ w) / 2, row)

        return jax.vmap(until_small)(x * jnp.arange(4.0)[:, None])

    run = numerics.capture(fn, None, grad=False)(W, X)
    np.testing.assert_array_equal(run.results, jax.jit(fn)(W, X))
    np.testing.assert_allclose(run.measured_results, run.results, atol=1e-6)
    [product] = [m for m in run.sites.values() if m.site.op == "dot_general"]
    assert product.statistics.runs >= 2


def test_a_loop_that_counts_elsewhere_for_each_element() -> None:
    def fn(x: jax.Array, counts: jax.Array) -> jax.Array:
        def repeated(row: jax.Array, count: jax.Array) -> jax.Array:
            start = (row, jnp.int32(0))
            return lax.while_loop(
                lambda state: state[1] < count, lambda state: (state[0] * 2, state[1] + 1), start
            )[0]

        return jax.vmap(repeated)(x, counts)

    got = prepare(fn, None, (X, jnp.arange(4)), grad=False).results()
    np.testing.assert_array_equal(got, X * 2.0 ** np.arange(4)[:, None])


def test_complex_numbers_are_measured() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.abs(jnp.fft.fft(x))

    run = numerics.capture(lambda x: fn(jnp.exp(1e3 * jnp.abs(x))), None, grad=False)(X)
    assert ops(run) == ["exp"]
    run = numerics.capture(fn, None, grad=False)(jnp.full((2, 8), 3e38))  # finite as it comes in
    assert ops(run) == ["fft"]
    [fft] = [m for m in run.sites.values() if m.site.op == "fft"]
    assert fft.site.dtype == "complex64"


def test_float64_is_not_infinite_beyond_float32() -> None:
    with jax.enable_x64(True):
        found = measured(jnp.array([1e300, -1e-300, 0.0, 2.0]))
        infinite = measured(jnp.array([1e300, jnp.inf]))
    assert not found.is_infinite
    assert (found.zeros, found.infinities) == (1, 0)
    np.testing.assert_allclose(
        [found.largest, found.smallest], [np.finfo("f").max, np.finfo("f").tiny]
    )
    assert infinite.is_infinite


@pytest.mark.parametrize(
    "shape", [(100_000,), (3, 70_001), (40, 1000), (300, 2, 5), (0, 8), (8, 0)]
)
def test_a_look_makes_nothing_larger_than_what_it_looks_at(shape: tuple[int, ...]) -> None:
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    jaxpr = jax.make_jaxpr(lambda x: look(x[None])._replace(lengths=None))(x)
    made = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars]
    assert max(made) <= max(x.size + 128 * 16, 16 * 128)
    seen = look(x[None])
    [sample], [rows_of_sample] = seen.sample, seen.rows
    kept = np.concatenate([row[:n] for row, n in zip(sample, seen.lengths, strict=True)])
    assert len(set(kept.tolist())) == len(kept)  # none twice
    assert len(kept) >= min(x.size, 1000)
    rows = x.reshape(-1, shape[-1] if shape[-1] >= 16 else max(x.size, 1))
    pairs = zip(sample, rows_of_sample, seen.lengths, strict=True)
    for piece, largest in [(piece, largest) for piece, largest, n in pairs if n]:
        [row] = [row for row in rows if row[0] <= piece[0] <= row[-1]]
        assert largest == row[-1]


def solved(w: jax.Array, x: jax.Array) -> jax.Array:
    def speed(y: jax.Array, t: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(y @ w)

    return jnp.mean(odeint(speed, x[0], jnp.array([0.0, 1.0]), w)[-1] ** 2)


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.softmax(h @ w) @ w.T, None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x, length=3)[0] ** 2)


@pytest.mark.parametrize(
    ("loss", "grad"), [(layers, True), pytest.param(solved, False, marks=pytest.mark.slow)]
)
def test_a_loss_of_loops_is_the_same(loss: Callable[..., Any], grad: bool) -> None:
    fn = jaxmp.autocast(loss, "mixed_bfloat16")
    plain = jax.jit(jax.value_and_grad(fn) if grad else fn)
    prepared = prepare(loss, "mixed_bfloat16", (W, X), grad=grad)
    same(prepared.results(), plain(W, X))


@pytest.mark.slow
def test_the_gradients_of_a_solver_are_the_same_but_for_the_order_of_sums() -> None:
    """XLA fuses the sums of one loop in two ways, with and without what is measured.

    In float32 the two differ by 2e-6 of the largest gradient, and such a difference may turn one
    rounding to bfloat16 over.
    """

    def run(policy: str) -> tuple[jax.Array, jax.Array]:
        return jax.jit(jax.value_and_grad(jaxmp.autocast(solved, policy)))(W, X)

    value, got = prepare(solved, "mixed_bfloat16", (W, X)).results()
    want_value, want = run("mixed_bfloat16")
    allowed = 2**-13 * jnp.abs(want).max()
    assert value == want_value
    np.testing.assert_allclose(got, want, rtol=0, atol=allowed)
    assert jnp.abs(got - run("float32")[1]).max() > 2 * allowed


@pytest.mark.slow
def test_layers_in_a_loop_are_the_same_measured() -> None:
    run = numerics.capture(layers, "mixed_bfloat16")(W, X)
    same(run.measured_results, run.results)
    assert any(m.site.backward and m.site.loops for m in run.sites.values())


@pytest.mark.slow
def test_a_scanned_language_model_is_the_same() -> None:
    model = build("scanned_lm")
    plain = jax.jit(jax.value_and_grad(jaxmp.autocast(model.loss, "mixed_bfloat16")))
    args = (model.params, model.batch(0))
    same(prepare(model.loss, "mixed_bfloat16", args).results(), plain(*args))


def same(got: Any, want: Any) -> None:
    """The same bits."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# The order of what went wrong.


def site(name: str, *loops: Loop) -> Site:
    return Site(name, "log", "", "", "activation", "float32", (), loops=loops)


def nan_in(*at: tuple[int, ...], shape: tuple[int, ...]) -> Statistics:
    is_nan = np.zeros(shape, bool)
    for one in at:
        is_nan[one] = True
    return unpack(1, Measurements(np.where(is_nan, np.float32(np.nan).view("i4"), 0)))


def test_nested_loops_run_iteration_by_iteration() -> None:
    outer, inner = Loop("outer"), Loop("inner")
    several = [site(f"before {i}", outer) for i in range(3)]
    several += [site("inside", outer, inner), site("after", outer), site("last")]
    measured = {one.name: nan_in(shape=(2, 9)[: len(one.loops)]) for one in several}
    measured["before 2"] = nan_in((0,), shape=(2,))
    measured["inside"] = nan_in((0, 1), (0, 8), (1, 0), shape=(2, 9))
    measured["after"] = nan_in((0,), shape=(2,))
    measured["last"] = nan_in((), shape=())
    walk = Walk(SurveyedProgram({one.name: one for one in several}, ()), measured)
    assert [(origin.site.name, origin.at) for origin in walk.everywhere()] == [
        ("before 2", (0,)),
        ("inside", (0, 1)),
        ("inside", (0, 8)),
        ("after", (0,)),
        ("inside", (1, 0)),
        ("last", ()),
    ]


# What it is called with.


def test_arguments_that_cannot_be_measured() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w)

    with pytest.raises(ValueError, match=r"nothing to measure: .*give jnp.float32\(x\)"):
        numerics.capture(lambda n, x: x + int(n), None)(3.0, jnp.arange(3))
    with pytest.raises(TypeError, match=r"arguments are arrays; args\[0\]\['w'\] is Shape"):
        numerics.capture(lambda p, x: loss(p["w"], x), None)({"w": jax.eval_shape(lambda: W)}, X)
    with pytest.raises(ValueError, match="grad=True, but the function returns neither a floating"):
        numerics.capture(lambda w, x: x @ w, None, grad=True)(W, X)
    with pytest.raises(ValueError, match="argnums=5, but there are 2 arguments"):
        numerics.capture(loss, None, argnums=5)(W, X)


@pytest.mark.parametrize("argnums", [-1, [1]])
def test_which_argument_is_a_weight(argnums: Any) -> None:
    prepared = prepare(lambda x, w: jnp.sum(x @ w), None, (X, W), argnums=argnums)
    given = [site for site in prepared.program.sites.values() if site.op == "argument"]
    assert [site.kind for site in given] == ["activation", "weight"]


@pytest.mark.parametrize(
    ("policy", "said"),
    [("mixed_bfloat16", "mixed_bfloat16"), (None, "as written, in bfloat16, float32")],
)
def test_a_run_knows_its_policy(policy: Any, said: str) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x * x.astype(jnp.bfloat16)

    assert prepare(fn, policy, (X,)).policy == said


# What is kept of it.


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, row: (h + jnp.sum(row), h), 0.0, x)[1]

    run = numerics.capture(fn, None, grad=False)(X)
    numerics.save(run, tmp_path / "run")
    loaded = numerics.load(tmp_path / "run")
    assert loaded.program == run.program
    assert any(one.site.loops for one in loaded.sites.values())
    assert run.program.carries
    comparison = loaded.compare(run)
    assert any(pair.scale for pair in comparison.pairs if pair.this.site.loops)
    assert comparison.first is None
    none = dataclasses.replace(run, sites={})
    assert "no site in common" in str(run.compare(none))
