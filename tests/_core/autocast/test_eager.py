"""Calls outside of every transformation: compiled once, of what `jax.jit` computes, and no more."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import monitoring
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._core.autocast.eager import EagerPrograms
from jaxmp._core.execute.program_key import _Identity

from constructs import BF16, F16, V, W, X, assert_bitwise, data_mesh
from linen_models import variables_of
from support import autocast, case, float16_is_slow, ones, slow_when


@jax.custom_vjp
def with_a_rule(x):
    return jnp.tanh(x)


with_a_rule.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))
JITTED = jax.jit(lambda x: nn.relu(with_a_rule(x)) * np.arange(8.0, dtype=np.float32))
TABLE = jax.device_put(np.linspace(0.0, 1.0, 8))


class Activations(nn.Module):
    @nn.compact
    def __call__(self, x):
        for activation in (nn.relu, nn.gelu, nn.silu):
            x = activation(nn.Dense(8)(x))
        return x


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3,))(x[None]))
        return nn.Dense(8)(nn.max_pool(x, (2,)))


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        tokens = jnp.arange(12).reshape(2, 6) + 0 * x[0, 0].astype(int)
        h = nn.Embed(16, 8)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            h += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(h), mask=mask)
            h += nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(h))))
        return nn.Dense(16)(h)


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def of_linen(module):
    model = jaxmp.wrap(module, BF16)
    variables = variables_of(module, X)
    return lambda: model.apply(variables, X)


def remat_with_a_rule(w, x):
    return jax.checkpoint(lambda x: nn.relu(x @ w) @ w)(x)


PROGRAMS = {
    "a rule": lambda w, x: with_a_rule(x @ w) @ w,
    "a jit": lambda w, x: JITTED(x @ w) @ w,
    "remat": remat_with_a_rule,
    "activations": lambda w, x: nn.silu(nn.gelu(nn.relu(x @ w) @ w) @ w),
    "closed over": lambda w, x: (x @ w) * TABLE + np.arange(8.0, dtype=np.float32),
    "a policy of remat made anew": lambda w, x: jax.checkpoint(
        lambda x: jnp.tanh(x @ w), policy=jax.checkpoint_policies.save_only_these_names("x")
    )(x),
    "scan": lambda w, x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=2)[0],
}


def eager_calls():
    """Makes functions that are called eagerly, by name: models, functions, gradients."""
    cast = {name: autocast(fn, BF16) for name, fn in PROGRAMS.items()}
    differentiated = ("a rule", "a jit", "remat")
    return {
        "activations in Linen": lambda: of_linen(Activations()),
        "convolutions": lambda: of_linen(Convolutions()),
        "language model": lambda: of_linen(LanguageModel()),
        "nnx": lambda: functools.partial(jaxmp.wrap(Layers(nnx.Rngs(0)), BF16), X),
        **{name: lambda f=f: functools.partial(f, W, X) for name, f in cast.items()},
        **{
            f"gradient of {name}": lambda f=cast[name]: functools.partial(gradient, f)
            for name in differentiated
        },
    }


def gradient(fn):
    return jax.grad(lambda w: jnp.sum(fn(w, X)))(W)


EAGER = eager_calls()


@slow_when(lambda name: name in ("language model", "convolutions", "gradient of remat"))
@pytest.mark.parametrize("name", EAGER)
def test_an_eager_call_compiles_nothing_after_the_first(name: str, compiled: list[str]) -> None:
    """A program with a rule of its own was planned again: nn.relu was compiled at each call."""
    call = EAGER[name]()
    call()
    assert compiled
    compiled.clear()
    call()
    call()
    assert not compiled


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Grows by an entry with each program that XLA compiles."""
    found: list[str] = []

    def listen(event: str, _seconds: float, **_: object) -> None:
        if "backend_compile" in event:
            found.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield found
    monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def as_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Grows with each call that is not traced: by whether it ran as one program."""
    found: list[bool] = []
    find = EagerPrograms.find

    def noted(self, *args):
        program = find(self, *args)
        found.append(program is not None)
        return program

    monkeypatch.setattr(EagerPrograms, "find", noted)
    return found


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
def test_it_is_what_jit_computes(policy: str, as_one: list[bool]) -> None:
    """To the bit. Step by step a value is rounded to 16 bits where XLA keeps it in float32."""
    for name, fn in PROGRAMS.items():
        fast = autocast(fn, policy)
        with case(name):
            want = jax.jit(fast)(W, X)
            as_one.clear()
            for _ in range(2):
                got = fast(W, X)
            assert as_one == [name != "a jit"] * 2  # that one has a constant of its own
            if name not in ("a jit", "closed over"):  # there XLA of 0.10 sees its values
                assert_bitwise(got, want)


@pytest.mark.parametrize("name", ["activations", "a rule", "closed over"])
def test_a_program_is_planned_once(name: str, planned: list[int]) -> None:
    fast = autocast(PROGRAMS[name], BF16)
    for _ in range(3):
        fast(W, X)
    assert len(planned) == 1


def test_each_program_of_a_function_is_planned_once(planned: list[int]) -> None:
    # Every call traces, as what a function reads may have changed; an equal trace has a plan.
    fast = autocast(lambda w, x, scale=1.0: {"y": jnp.tanh(x @ w["w"]) * scale}, BF16)
    for _ in range(2):  # the second time, all were seen before
        for i in range(2):
            fast({"w": W}, np.asarray(X) + i)
            fast({"w": W}, np.asarray(X)[:2])
            fast({"w": W}, X, scale=2.0)
        assert len(planned) == 3
    fast({"w": W}, np.asarray(X).astype(jnp.bfloat16))
    assert len(planned) == 4
    gradient = jax.value_and_grad(autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), BF16))
    for i in range(2):
        gradient(W, np.asarray(X) * i)
    assert len(planned) == 5


def test_custom_rules_are_planned_once() -> None:
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
    gradient = jax.grad(autocast(lambda w, x: jnp.sum(jitted(x @ w) @ w), BF16))
    gradient(W, X)
    first = len(runs)
    for _ in range(5):
        gradient(W, X)
    assert len(runs) == first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remat", "closed over", "a jit"])
def test_eager_calls_keep_nothing(name: str) -> None:
    fast = autocast(PROGRAMS[name], BF16)

    def held_after(calls: int) -> int:
        for _ in range(calls):
            fast(W, X)
        gc.collect()
        return len(gc.get_objects())

    # What is bounded is full then: the cache of whole programs, and those of JAX.
    before = held_after(200)
    assert held_after(100) - before < 400


def test_no_array_is_kept() -> None:
    """Arguments, and what a function closes over."""
    table, w, x = (jax.device_put(np.asarray(a) + 1) for a in (TABLE, W, X))
    fast = autocast(lambda w, x: (x @ w) * table, BF16)
    fast(w, x)
    held = [weakref.ref(array) for array in (table, w, x)]
    table = w = x = None
    gc.collect()
    assert [ref() is None for ref in held] == [True] * 3


def test_a_constant_is_compared_by_what_it_is_now(as_one: list[bool]) -> None:
    """An array by identity, of one that is gone as well; a NumPy array by its contents."""
    box = [None]
    fast = autocast(lambda x: (x @ x) * box[0], BF16)
    ones = np.ones((8, 8), np.float32)
    for number in range(2):
        box[0] = jax.device_put(np.full(8, number, np.float32))
        assert np.asarray(fast(ones))[0, 0] == 8 * number
    box[0] = table = np.ones(8, np.float32)
    for number in range(2):
        table[:] = number
        assert np.asarray(fast(ones))[0, 0] == 8 * number
    assert as_one == [True] * 4
    large = autocast(lambda x: x @ np.ones((8, 40_000), np.float32), BF16)
    assert np.asarray(large(ones))[0, 0] == 8
    assert not as_one[-1]


def test_planning_of_constants_is_by_their_values(planned: list[int]) -> None:
    """A number above 8 is not narrowed as a summand; one below it is."""
    box = [None]
    fast = autocast(lambda w, x: (x @ w + box[0]) @ w, BF16)
    arrays = [jax.device_put(np.full(8, size, np.float32)) for size in (1, 300)]
    for box[0] in arrays * 2:
        fast(W, X)
    assert len(planned) == 2
    for size in (1.0, 300.0, 1.0):
        box[0] = np.full(8, size, np.float32)
        fast(W, X)
    assert len(planned) == 4


def test_an_array_that_is_gone_is_equal_to_none() -> None:
    """Another one may be at its place in memory."""
    array = jax.device_put(np.asarray(X) + 1)
    key, same = _Identity(array), _Identity(array)
    assert key == same
    assert key != _Identity(X)
    array = None
    gc.collect()
    assert key != same


def test_equal_programs_with_other_derivative_rules() -> None:
    """They run as one program and are differentiated by their own rules."""
    slope = [1.0]

    def fn(w, x):
        factor = slope[0]

        @jax.custom_vjp
        def ruled(x):
            return jnp.tanh(x)

        ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (factor * g,))
        return ruled(x @ w)

    fast = autocast(fn, "p=f32,c=bf16,o=f32")
    for slope[0] in (1.0, 2.0, 1.0):
        fast(W, X)
        assert_bitwise(
            gradient(fast), slope[0] * gradient(lambda w, x: fast(w, x) / 1.0) / slope[0]
        )
        np.testing.assert_allclose(
            gradient(fast), slope[0] * np.sum(X, 0)[:, None] * np.ones(8), rtol=2e-2, atol=1e-2
        )


def test_transformations_around_it_trace(as_one: list[bool]) -> None:
    fast = autocast(lambda w, x: jnp.tanh(x @ w), BF16)
    gradient(fast)
    jax.vmap(fast, (None, 0))(W, X[None])
    jax.jit(lambda: fast(W, X))()
    jax.make_jaxpr(lambda x: fast(W, X) + x)(1.0)
    jax.grad(lambda s: autocast(lambda x: jnp.sum(x * s), BF16)(X))(1.0)
    assert as_one
    assert not any(as_one)


@pytest.mark.parametrize("setting", ["debug_nans", "debug_infs", "disable_jit", "checking_leaks"])
def test_settings_that_look_at_each_operation(setting: str, as_one: list[bool]) -> None:
    fast = autocast(lambda w, x: jnp.where(x > 0, x @ w, jnp.log(x - 10)) * 0, BF16)
    positive = np.abs(X) + 20
    with getattr(jax, setting)(True) if setting != "checking_leaks" else jax.checking_leaks():
        fast(W, positive)
        if setting == "debug_nans":
            with pytest.raises(FloatingPointError, match="log"):
                fast(W, np.abs(X) + 1)
    assert as_one
    assert not any(as_one)


def test_transfer_guard() -> None:
    """No number is moved to the device: a literal is part of what is compiled."""
    fast = autocast(lambda w, x, s: (x @ w) * s + 1.0, BF16)
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            out = fast(W, X, 2.0)
    assert_bitwise(out, jax.jit(lambda w, x: fast(w, x, 2.0))(W, X))


def test_references_and_effects_run_step_by_step(as_one: list[bool]) -> None:
    seen = []
    ref = jax.new_ref(ones(8))

    def inner(w, x):
        inside = jax.new_ref(x)
        inside[...] = inside[...] @ w
        return inside[...]

    def callback(w, x):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(x))
        return x @ w

    def host(w, x):
        return jax.pure_callback(lambda x: np.asarray(x) + 1, jax.typeof(x), x) @ w

    programs = {
        "closed over": lambda w, x: (x @ w) * ref[...],
        "inside": inner,
        "debug": callback,
        "pure": host,
    }
    for name, fn in programs.items():
        fast = autocast(fn, BF16)
        as_one.clear()
        with case(name):
            for _ in range(2):
                got = fast(W, X)
            np.testing.assert_allclose(got, fn(W, X), rtol=3e-2, atol=3e-2)
            assert as_one == [False, False]
    ref[...] = np.zeros(8, np.float32)
    fast = autocast(programs["closed over"], BF16)
    assert not np.any(fast(W, X))
    jax.effects_barrier()
    assert len(seen) == 3


def test_devices(as_one: list[bool]) -> None:
    """Arguments that were put on different devices, or are moved, run step by step."""
    first, second = jax.devices()[:2]

    def two(w, v, x):
        return jax.device_put(jnp.tanh(x @ w), second) @ v

    apart = jaxmp.autocast(lambda w, v, x, y: (x @ w, y @ v), BF16, argnums=(0, 1))
    fast = jaxmp.autocast(two, BF16, argnums=(0, 1))
    w, v, x = jax.device_put(W, first), jax.device_put(V, second), jax.device_put(X, first)
    out = fast(w, v, x)
    assert out.devices() == {second}
    assert jaxmp.autocast(two, BF16, argnums=(0, 1))(W, V, X).devices() == {second}
    outs = apart(w, v, x, jax.device_put(X, second))
    assert [out.devices() for out in outs] == [{first}, {second}]
    assert as_one == [False] * 3
    one = autocast(lambda w, x: jnp.tanh(x @ w), BF16)
    for device in (first, second):
        out = one(jax.device_put(W, device), jax.device_put(X, device))
        assert out.devices() == {device}
        assert out.committed
    assert not one(W, X).committed
    rows = NamedSharding(data_mesh(), P("d"))
    many = ones(8, 8)
    out = one(W, jax.device_put(many, rows))
    assert out.sharding.is_equivalent_to(rows, 2)
    assert all(as_one[3:])


def test_types_of_results_and_arguments(as_one: list[bool]) -> None:
    """Weak types, typed keys, NumPy arrays; results that are arguments; deleted arrays."""
    key = jax.random.key(0)

    def fn(w, x, key, n, unused):
        noise = jax.random.normal(key, x.shape)
        return {"y": x @ w + noise, "w": w, "key": key, "n": n, "weak": n * 2, "table": TABLE}

    fast = autocast(fn, BF16)
    weak = jnp.asarray(3.0)
    numbers = jax.jit(lambda: 3)()
    deleted = jax.device_put(np.asarray(X) + 0)
    deleted.delete()
    for _ in range(2):
        got, want = fast(W, np.asarray(X), key, numbers, deleted), fn(W, X, key, numbers, X)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        assert got["w"] is W
        assert got["key"] is key
        assert got["table"] is TABLE
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
    assert all(as_one)
    passed = autocast(lambda x: x, BF16)
    assert jax.typeof(passed(weak)) == jax.typeof(weak)
    assert isinstance(passed(np.asarray(X)), jax.Array)


def test_donated_arguments_of_a_jit_inside() -> None:
    inner = jax.jit(lambda x: x + 1, donate_argnums=0)
    fast = autocast(lambda w, x: inner(x @ w), BF16)
    x = jax.device_put(np.asarray(X) + 0)
    for _ in range(3):
        fast(W, x)
    assert not x.is_deleted()
    assert not W.is_deleted()


def test_numbers_that_change_at_each_call(compiled: list[str], as_one: list[bool]) -> None:
    """A function whose programs are never called again is not compiled again and again."""
    fast = autocast(lambda w, x, step: (x @ w) * step, BF16)
    for step in range(6):
        fast(W, X, float(step) + 0.5)
    assert as_one == [True] * 4 + [False] * 2
    fast(W, X, 5.5)  # once more
    compiled.clear()
    fast(W, X, 5.5)
    assert as_one[-2:] == [True, True]
    assert not compiled


def test_threads() -> None:
    fast = autocast(lambda w, x, n: jnp.tanh(x @ w) * n, BF16)
    want = {n: jax.jit(lambda w, x, n=n: fast(w, x, n))(W, X) for n in range(1, 3)}
    right, start = [], threading.Barrier(8)

    def work(n):
        start.wait()
        right.extend(np.array_equal(fast(W, X, n), want[n]) for _ in range(10))

    threads = [threading.Thread(target=work, args=(1 + i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(right)
    assert len(right) == 80


def test_nnx_modules_keep_their_arrays() -> None:
    """What a call does not change is the same array afterwards, and not a copy."""
    model = Layers(nnx.Rngs(0))
    wrapped = jaxmp.wrap(model, BF16)
    before = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for _ in range(2):
        wrapped(X)
    after = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert all(a is b for a, b in zip(before, after, strict=True))
