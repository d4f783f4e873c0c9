"""A call depends on what it reads at the time: nothing that was traced before is taken for it."""

from __future__ import annotations

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._tools.preflight.compile_ahead import _export, _job
from jaxmp._tools.preflight.program import traced_program
from jaxmp._tools.speed.target import parse_target

from constructs import BF16, V, W, X, assert_bitwise
from support import case, contraction_dtypes, ones

ONE = ones(8, 8)


def reader(box):
    """A function of an array that reads what `box` holds."""
    return lambda x: (x @ x) * box.scale


def jitted_anew(fn):
    return lambda x: jax.jit(lambda x: fn(x))(x)


MAKERS = {
    "autocast": lambda f: jaxmp.autocast(f, BF16),
    "full_precision": jaxmp.full_precision,
    "reduced_precision": jaxmp.reduced_precision,
    "full_precision in autocast": lambda f: jaxmp.autocast(jaxmp.full_precision(f), BF16),
    "autocast in autocast": lambda f: jaxmp.autocast(jaxmp.autocast(f, "float32"), BF16),
    "autocast, called under a jit of its own each time": lambda f: jitted_anew(
        jaxmp.autocast(f, BF16)
    ),
}
SCALES = {
    "Python number": (1.0, 3.0),
    "NumPy scalar": (np.float32(1.0), np.float32(3.0)),
    "zeros of either sign": (0.0, -0.0),
    "array": jax.device_put((np.float32(1.0), np.float32(3.0))),
    "NumPy array": (np.ones(8, np.float32), np.full(8, 3, np.float32)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_what_a_function_closes_over_may_change(maker: str) -> None:
    for kind, scales in SCALES.items():
        box = types.SimpleNamespace()
        fn = MAKERS[maker](reader(box))
        for box.scale in (*scales, scales[0]):
            with case(kind):
                assert_bitwise(fn(ONE), reader(box)(ONE))


def test_a_numpy_array_that_is_changed_in_place() -> None:
    table = np.ones((8, 8), np.float32)
    scan = jaxmp.autocast(
        lambda x: jax.lax.scan(lambda c, _: (c + table, None), x, length=2)[0], BF16
    )
    for value in (1.0, 3.0):
        table[:] = value
        np.testing.assert_array_equal(scan(ONE), 1 + 2 * value)


def test_an_argument_that_is_changed_in_place() -> None:
    """Not only its identity matters."""
    settings = types.SimpleNamespace(scale=1.0)
    fn = jaxmp.autocast(lambda x, s: x * s.scale, BF16)
    assert float(fn(ONE, settings)[0, 0]) == 1.0
    settings.scale = 3.0
    assert float(fn(ONE, settings)[0, 0]) == 3.0


SCALE = 1.0


def test_a_global_and_a_default_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x, factor=1.0):
        return x * SCALE * factor

    cast = jaxmp.autocast(fn, BF16)
    assert float(cast(ONE)[0, 0]) == 1.0
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    fn.__defaults__ = (2.0,)
    assert float(cast(ONE)[0, 0]) == 6.0


def test_what_looks_equal_is_not_mixed_up() -> None:
    """Plans are used again for equal programs; and names name regions."""
    box = types.SimpleNamespace()
    fn = jaxmp.autocast(lambda x: box.mark(jnp.matmul)(x, x), BF16)
    found = []
    for box.mark in (lambda f: f, jaxmp.full_precision, lambda f: f):
        fn(ONE)  # eagerly first, so that there is a plan to mix up
        found += contraction_dtypes(fn, ONE)
    assert found == ["bfloat16", "float32", "bfloat16"]


def test_under_jit_a_function_is_traced_once() -> None:
    calls = []

    def fn(x, w):
        calls.append(1)
        return jnp.tanh(x @ w)

    jitted = jax.jit(jaxmp.autocast(fn, BF16))
    for i in range(3):
        jitted(np.asarray(X) + i, W)
    assert len(calls) == 1


def test_what_is_compiled_inside_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each eager call traces; an equal trace is run by what was compiled for the one before."""
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w) @ w)
    cast = jaxmp.autocast(lambda x, w: inner(x, w), BF16)
    with jax.log_compiles():
        cast(X, W)
        assert "Compiling" in caplog.text
        caplog.clear()
        for _ in range(3):
            cast(X, W)
    assert "Compiling" not in caplog.text


def test_a_second_trace_finds_what_the_first_made_of_a_jit() -> None:
    """JAX keeps the derivatives of jits: diffrax took 5 s each time, for .02 s without autocast."""
    runs = []

    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x)

    def backward(x, g):
        runs.append(1)
        return (g * (1 - jnp.tanh(x) ** 2),)

    f.defvjp(lambda x: (jnp.tanh(x), x), backward)
    row = jax.jit(lambda w, x: f(x @ w) * np.arange(8.0, dtype=np.float32))
    fast = jaxmp.autocast(lambda w, x: jnp.sum(jax.vmap(row, (None, 0))(w, x)), BF16)
    counts = []
    for _ in range(3):
        jax.make_jaxpr(lambda w: jax.grad(fast)(w, X))(W)
        counts.append(len(runs))
    assert counts[0] == counts[-1] > 0


def test_a_number_may_steer_control_flow() -> None:
    """As in a plain call; in `explain` and `audit`, too."""

    def fn(x, n):
        return x @ x if n > 0 else x

    for value in (np.int64(5), np.int32(5), np.float32(5), np.bool_(True), 5):
        assert_bitwise(jaxmp.autocast(fn, "p=f32,c=bf16,o=f32")(ONE, value), ONE @ ONE)
        assert jaxmp.explain(fn, BF16)(ONE, value).products() == {"bfloat16": 1}
        assert jaxmp.audit(fn, policy=BF16)(ONE, value).product_share() == {"bfloat16": 1.0}


def test_numpy_scalars_promote_as_in_a_plain_call() -> None:
    def fn(x, s):
        return x * s, type(s)

    for dtype in (jnp.float32, jnp.bfloat16):
        for s in (np.float32(2), np.float16(2), np.int32(2), 2, 2.0):
            x = jax.device_put(np.asarray(ONE, dtype))
            got, want = jaxmp.autocast(fn, BF16)(x, s), fn(x, s)
            assert_bitwise(got[0], want[0])
            assert got[1] is want[1]


STRANGE = {
    "string": "deep",
    "NumPy strings": np.array(["deep", "flat"]),
    "objects": np.array([None, "deep"]),
    "records": np.zeros(2, [("a", "f4")]),
    "dates": np.zeros(2, "M8[s]"),
    "a function": jnp.tanh,
    "bytes": b"deep",
}


def test_what_jax_knows_nothing_of_is_passed_on() -> None:
    for name, strange in STRANGE.items():

        def fn(x, s, strange=strange):
            assert s is strange
            return x @ x, s

        with case(name):
            assert jaxmp.autocast(fn, BF16)(ONE, strange)[1] is strange
            assert jaxmp.explain(fn, BF16)(ONE, strange).products() == {"bfloat16": 1}
            assert jaxmp.audit(fn)(ONE, strange).product_share() == {"float32": 1.0}


def test_preflight_compiles_what_is_called() -> None:
    """Numbers and strings are not operands of the program that is compiled ahead."""
    pytest.importorskip("flatbuffers")
    target = parse_target("gpu-h100")

    def fn(x, n, mode, state):
        return x @ x * state["step"] if n > 0 and mode == "deep" else x

    args = (ONE, np.int32(5), "deep", {"step": ONE, "name": "s"})
    assert _job(target, args, (0, 3))["donated"] == [0, 1]
    exported = _export(traced_program(fn, args, "cuda"), "cuda")
    assert len(exported.in_avals) == 2
    assert "dot_general" in exported.mlir_module()


def test_many_threads_call_one_function_and_their_own() -> None:
    """Shapes, static results and closures of one thread do not turn up in another."""
    shared = jaxmp.autocast(lambda x, tag: {"y": jnp.tanh(x @ x), tag: tag}, BF16)
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        x = np.full((2 + i % 4, 2 + i % 4), 0.1 * (i + 1), np.float32)
        own = jaxmp.autocast(lambda x: (x @ x * i, i), BF16)
        start.wait()
        for repeat in range(5):
            tag = f"{i}-{repeat}"
            out, (y, number) = shared(x, tag), own(x)
            right = out.keys() == {"y", tag} and out[tag] == tag and number == i
            if not right or out["y"].shape != x.shape or y.shape != x.shape:
                failures.append(tag)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_function_in_many_layers_is_planned_once(planned: list[int]) -> None:
    layer = jaxmp.autocast(lambda x, w: jnp.tanh(x @ w), BF16)

    @jax.jit
    def model(x):
        for _ in range(6):
            x = layer(x, W) @ V
        return x

    model(X)
    assert len(planned) == 1
