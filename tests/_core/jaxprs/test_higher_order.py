"""One entry makes a higher-order primitive known: planned, executed, audited and explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from numpy_reference import reference
from observed import observe

import jaxmp
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.compat import bind
from jaxmp._core.jaxprs.higher_order import HIGHER_ORDER, HigherOrder, Inner, inside, steering

from support import autocast, contraction_dtypes, gaussian, iter_eqns, jaxpr_of, relative

X = gaussian(0, 6, 8)
W = gaussian(1, 8, 8, scale=1 / 3)

# A primitive that JAX does not have: runs `jaxpr` of (w, x) again and again on its own result.
REPEAT = Primitive("jaxmp_repeat")


def _run(w, x, *, jaxpr, times):
    for _ in range(times):
        [x] = jaxpr_as_fun(jaxpr)(w, x)
    return x


REPEAT.def_impl(_run)
REPEAT.def_abstract_eval(lambda w, x, *, jaxpr, times: x)
mlir.register_lowering(REPEAT, mlir.lower_fun(_run, multiple_results=False))


def repeat(fn: Any, w: jax.Array, x: jax.Array, times: int) -> jax.Array:
    return REPEAT.bind(w, x, jaxpr=jax.make_jaxpr(fn)(w, x), times=times)


def thread(eqn: Any, operands: Any, replacements: Any, extra_in: Any) -> Any:
    [body], (w, x) = replacements, operands

    def step(x: Any, _: None) -> Any:
        [x], extras = body(extra_in, w, x)
        return x, extras

    x, extras = jax.lax.scan(step, x, None, length=eqn.params["times"])
    return [x], {name: extra.under("scan") for name, extra in extras.items()}


ENTRY = HigherOrder(
    inside=lambda eqn: (
        Inner(eqn.params["jaxpr"], (0, 1), (0,), shared=1, carried=1, trips=eqn.params["times"]),
    ),
    rebind=lambda eqn, operands, new: bind(eqn, operands, jaxpr=new[0].trace()),
    thread=thread,
)


@pytest.fixture
def known() -> Iterator[None]:
    HIGHER_ORDER[REPEAT.name] = ENTRY
    yield
    del HIGHER_ORDER[REPEAT.name]


def program(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(repeat(lambda w, x: jnp.tanh(x @ w), w, x @ w, 3) ** 2)


def dots(fn: Any, *args: Any) -> Counter[str]:
    found: Counter[str] = Counter()

    def walk(jaxpr: Any) -> None:
        for eqn in compat.closed(jaxpr).jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found[str(eqn.invars[0].aval.dtype)] += 1
            for inner in compat.inner_jaxprs(eqn):
                walk(inner)

    walk(jax.make_jaxpr(fn)(*args))
    return found


def test_an_unknown_one_runs_as_written_and_is_reported() -> None:
    with pytest.warns(UserWarning, match="jaxmp_repeat"):
        assert dots(jaxmp.autocast(program, "mixed_bfloat16"), W, X) == {
            "bfloat16": 1,
            "float32": 1,
        }
    rows = jaxmp.explain(program, "mixed_bfloat16")(W, X).rows
    assert any("not looked inside" in row.reason for row in rows)


@pytest.mark.usefixtures("known")
def test_a_known_one_is_planned_executed_audited_and_explained() -> None:
    fast = jaxmp.autocast(program, "mixed_bfloat16")
    assert dots(fast, W, X) == {"bfloat16": 2}
    np.testing.assert_allclose(fast(W, X), program(W, X), rtol=0.02)
    np.testing.assert_allclose(jax.jit(fast)(W, X), program(W, X), rtol=0.02)
    rows = [r for r in jaxmp.explain(program, "mixed_bfloat16")(W, X).rows if r.op == "dot_general"]
    assert [(row.dtype, row.count) for row in rows] == [("bfloat16", 1), ("bfloat16", 3)]
    report = jaxmp.audit(fast)(W, X)
    assert report.product_flops() == {"bfloat16": 4 * 2 * 6 * 8 * 8}
    assert report.assert_no("float32-product") is None


@pytest.mark.usefixtures("known")
def test_a_known_one_is_threaded() -> None:
    out, extras = jax.jit(observe(program))(W, X)
    assert out == jax.jit(program)(W, X)
    x, want = np.asarray(X @ W), []
    for _ in range(3):
        want.append(np.abs(x @ W).max())
        x = np.tanh(x @ W)
    assert set(extras) == {"0.dot_general", "1.jaxmp_repeat/0.dot_general"}
    assert extras["1.jaxmp_repeat/0.dot_general"].axes == ("scan",)
    np.testing.assert_allclose(extras["1.jaxmp_repeat/0.dot_general"].value, want, rtol=1e-5)


@pytest.mark.usefixtures("known")
def test_one_that_says_nothing_of_it_refuses_to_be_threaded() -> None:
    HIGHER_ORDER[REPEAT.name] = ENTRY._replace(thread=None)
    with pytest.raises(TypeError, match=r"rebuild: .* through jaxmp_repeat: its entry .* `thread`"):
        observe(program)(W, X)


SHAPES = {
    "jit": (lambda w, x: jax.jit(lambda x: x @ w)(x), None),
    "remat2": (lambda w, x: jax.checkpoint(lambda x: x @ w)(x), None),
    "custom_jvp_call": (lambda w, x: jax.nn.relu(x), None),
    "cond": (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x), None),
    "scan": (lambda w, x: jax.lax.scan(lambda c, x: (c @ w, c), x, None, length=5), 5),
    "map": (lambda w, x: jax.lax.map(lambda row: row @ w, x), 6),
    "while": (lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_operands_and_results_are_the_equation_s(name: str) -> None:
    fn, trips = SHAPES[name]
    eqn = next(e for e in iter_eqns(jax.make_jaxpr(fn)(W, X)) if inside(e))
    for inner in inside(eqn):
        opened = compat.closed(inner.jaxpr).jaxpr
        sliced = inner.loops and inner.trips is not None
        for i, (at, var) in enumerate(zip(inner.operands, opened.invars, strict=True)):
            outer = eqn.invars[at].aval
            slices = sliced and i >= inner.carries.stop
            assert var.aval.shape == (outer.shape[1:] if slices else outer.shape)
            assert var.aval.dtype == outer.dtype
        for i, (at, atom) in enumerate(zip(inner.results, opened.outvars, strict=True)):
            if at is None:
                assert (atom.aval.shape, str(atom.aval.dtype)) == ((), "bool")
                continue
            outer = eqn.outvars[at].aval
            assert atom.aval.shape == (
                outer.shape[1:] if sliced and i >= inner.carried else outer.shape
            )
        for result, operand in enumerate(inner.carries):
            assert opened.outvars[result].aval.shape == opened.invars[operand].aval.shape
        assert trips is None or inner.trips == trips
    total = sum(inner.chance for inner in inside(eqn))
    assert total == (2.0 if name == "while" else 1.0)


@pytest.mark.parametrize("name", SHAPES)
def test_what_no_jaxpr_inside_reads_steers(name: str) -> None:
    eqn = next(e for e in iter_eqns(jax.make_jaxpr(SHAPES[name][0])(W, X)) if inside(e))
    assert steering(eqn) == ((0,) if name == "cond" else ())


def test_of_the_functions_of_a_linear_solve_one_runs() -> None:
    def solve(b):
        return jax.lax.custom_linear_solve(
            lambda x: W @ x, b, lambda _, b: jnp.sin(b), symmetric=True
        )

    eqns = jax.make_jaxpr(solve)(X[0]).jaxpr.eqns
    [eqn] = [eqn for eqn in eqns if eqn.primitive.name == "custom_linear_solve"]
    [jaxpr] = compat.jaxprs_run(eqn)
    assert [e.primitive.name for e in compat.closed(jaxpr).jaxpr.eqns] == ["sin"]


def test_a_scan_keeps_its_parameters() -> None:
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
    fast = autocast(fn, "mixed_bfloat16")
    [was], [now] = (
        [e for e in iter_eqns(jaxpr_of(f, X, W, stack)) if e.primitive.name == "scan"]
        for f in (fn, fast)
    )
    for name in set(was.params) - {"jaxpr"}:
        assert now.params[name] == was.params[name], name
    got, want = (reference(f)(X, W, stack) for f in (fast, fn))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_array_equal(got[1][1], want[1][1])
    # Nine contractions in a row, 1.5 eps each, on a contracting map.
    assert relative(got[1][0], want[1][0]) < 14 * eps("bfloat16")
    assert set(contraction_dtypes(fast, X, W, stack)) == {"bfloat16"}


def test_an_equation_keeps_its_context() -> None:
    metadata = pytest.importorskip("jax.experimental.xla_metadata")

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with metadata.set_xla_metadata(jaxmp_test="kept"):
            y = x @ w
        return jnp.tanh(y) @ w

    assert 'jaxmp_test = "kept"' in jax.jit(fn).lower(X, W).as_text()
    assert 'jaxmp_test = "kept"' in jax.jit(autocast(fn, "mixed_bfloat16")).lower(X, W).as_text()
