"""NNX modules among the arguments of an autocast function: what it changes in them is kept."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import jaxmp

from support import contraction_dtypes, slow_when

BF16 = "mixed_bfloat16"
X = jax.device_put(np.random.default_rng(0).normal(3.0, size=(8, 16)))
Y = jax.device_put(np.tanh(np.asarray(X)[:, :4]))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class NoTree(Net, pytree=False):
    """A module that JAX does not take for a pytree."""


def loss_fn(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def state_of(model: nnx.Module) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))
    return [np.asarray(leaf, np.float64) for leaf in leaves]


def assert_same_state(got: nnx.Module, want: nnx.Module, atol: float = 0.05) -> None:
    for a, b in zip(state_of(got), state_of(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@slow_when(lambda cls, policy: cls is NoTree or policy not in (BF16, "bfloat16"))
@pytest.mark.parametrize("policy", [BF16, "mixed_float16", "bfloat16", "p=f32,c=bf16,o=bf16"])
@pytest.mark.parametrize("cls", [Net, NoTree])
def test_what_a_call_changes_is_kept(cls: type[Net], policy: str) -> None:
    plain, model = cls(nnx.Rngs(0)), cls(nnx.Rngs(0))
    before = np.asarray(model.norm.mean[...])
    fast = jaxmp.autocast(loss_fn, policy)
    for _ in range(2):
        want, got = loss_fn(plain, X, Y), fast(model, X, y=Y)
    assert got.dtype == np.dtype(jaxmp.get_policy(policy).output_dtype)
    np.testing.assert_allclose(np.float32(got), want, rtol=0.1)
    assert model.calls[...] == 2
    assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...] == 2
    assert not np.allclose(model.norm.mean[...], before)
    assert_same_state(model, plain)
    for leaf, other in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(plain)), strict=True
    ):
        assert leaf.dtype == other.dtype


def test_a_training_loop_of_nnx() -> None:
    def train(fn):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(fn)(model, X, Y)
            optimizer.update(model, grads)
            return loss, grads

        for _ in range(10):
            loss, grads = step(model, optimizer)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
        return model, loss

    (plain, want), (model, got) = train(loss_fn), train(jaxmp.autocast(loss_fn, BF16))
    np.testing.assert_allclose(got, want, atol=0.03)
    assert model.calls[...] == 10
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=0.3)


def test_streams_and_variables_are_arguments_too() -> None:
    def fn(rngs, total, x):
        total[...] += x.sum()
        return x @ x.T + jax.random.normal(rngs.params(), (8, 8))

    rngs, total = nnx.Rngs(0), nnx.Variable(jnp.zeros(()))
    fast = jaxmp.autocast(fn, BF16)
    assert not np.array_equal(fast(rngs, total, X), fast(rngs, total, X))
    np.testing.assert_allclose(total[...], 2 * X.sum(), rtol=1e-5)


def test_a_function_that_returns_its_module() -> None:
    def fn(model, x):
        return model, [model, model(x)]

    model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    first, (second, _) = jaxmp.autocast(fn, BF16)(model, X)
    assert first is model
    assert second is model


def test_a_module_is_made_inside() -> None:
    def fn(x):
        model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        return model(x) @ x.T

    np.testing.assert_allclose(jaxmp.autocast(fn, BF16)(X), fn(X), rtol=0.05, atol=0.3)


def test_transforms_of_jax_around_it() -> None:
    """They take a module for a pytree, and lose its changes themselves."""
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    fast = jaxmp.autocast(lambda model, x: model(x), BF16)
    want = model(X)
    np.testing.assert_allclose(jax.jit(fast)(model, X), want, atol=0.1)
    np.testing.assert_allclose(jax.vmap(fast, (None, 0))(model, X), want, atol=0.1)
    grads = jax.grad(lambda model: fast(model, X).sum())(model)
    np.testing.assert_allclose(grads.kernel[...], np.tile(X.sum(0)[:, None], 4), rtol=0.02)
    stacked = nnx.vmap(lambda key: nnx.Linear(16, 4, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    assert nnx.vmap(fast, in_axes=(0, None))(stacked, X).shape == (3, 8, 4)


def test_a_module_closed_over_is_read() -> None:
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    bias = nnx.Variable(jnp.ones(4))
    fast = jaxmp.autocast(lambda bias, x: model(x) + bias[...], BF16)
    np.testing.assert_allclose(jax.jit(lambda x: fast(bias, x))(X), model(X) + 1.0, atol=0.1)


def test_parameters_are_known_for_what_they_are() -> None:
    """A bias of the result's own shape would be data if it were a plain argument."""

    class Shift(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.eye(16))
            self.shift = nnx.Param(jnp.ones((8, 16)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return (x @ self.kernel[...] + self.shift[...]) @ self.kernel[...]

    def fn(model, x):
        return model(x)

    reasons = [row.reason for row in jaxmp.explain(fn, BF16)(Shift(), X).rows]
    assert "a parameter beside a 16-bit value" in reasons
    assert not any("float32 data wins" in reason for reason in reasons)
    assert set(contraction_dtypes(lambda x: jaxmp.autocast(fn, BF16)(Shift(), x), X)) == {
        "bfloat16"
    }


def test_float32_is_the_module_itself() -> None:
    plain, model = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    assert jaxmp.autocast(loss_fn, "float32")(model, X, Y) == loss_fn(plain, X, Y)
    assert_same_state(model, plain, atol=0)


def test_inside_another_autocast() -> None:
    model = Net(nnx.Rngs(0))
    inner = jaxmp.autocast(loss_fn, "float32")
    jaxmp.autocast(lambda model, x: inner(model, x, Y), BF16)(model, X)
    assert model.calls[...] == 1


def test_an_optimizer_and_a_whole_step() -> None:
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, Y)
        optimizer.update(model, grads)
        return loss

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = np.asarray(model.hidden.kernel[...])
    step = nnx.jit(jaxmp.autocast(step, BF16))
    losses = [step(model, optimizer, X) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert optimizer.step[...] == 3
    assert model.calls[...] == 3
    assert not np.allclose(model.hidden.kernel[...], before)


@pytest.mark.parametrize("form", ["the module", "its method"])
def test_a_module_is_the_function(form: str) -> None:
    plain, model = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    fn = model if form == "the module" else model.__call__
    want, got = plain(X), jaxmp.autocast(fn, BF16)(X)
    np.testing.assert_allclose(got, want, rtol=0.1, atol=0.1)
    assert_same_state(model, plain)
    assert model.calls[...] == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_looking_at_a_module_changes_nothing(*, wrapped: bool) -> None:
    model = Net(nnx.Rngs(0))
    model = jaxmp.wrap(model, BF16) if wrapped else model
    before = state_of(model)
    for policy in ("float32", BF16):
        low = wrapped or policy == BF16
        counts = jaxmp.explain(model, policy)(X).products()
        assert counts == {"bfloat16" if low else "float32": 2}
        decides = not wrapped or policy == BF16
        warns = nullcontext() if decides else pytest.warns(UserWarning, match="decides no product")
        with warns:
            share = jaxmp.audit(model, policy=policy)(X).product_share()
        assert share == {"bfloat16" if low else "float32": 1.0}
    for a, b in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_reduced_precision_refuses_a_module() -> None:
    """Its parameters would not be narrowed, and what changes in it would be lost."""
    marked = jaxmp.reduced_precision(lambda model, x: model(x))
    model = Net(nnx.Rngs(0))
    with pytest.raises(TypeError, match="reduced_precision: takes arrays"):
        jaxmp.autocast(marked, BF16)(model, X)
    marked(model, X)  # outside an autocast it is the function itself
    assert model.calls[...] == 1


def test_a_module_that_is_closed_over_and_changed_is_to_be_an_argument():
    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(x @ x)

    net, x = Dropping(nnx.Rngs(0)), jnp.ones((4, 4))
    for tool in (jaxmp.explain(lambda x: net(x), "mixed_bfloat16"), jaxmp.audit(lambda x: net(x))):
        with pytest.raises(TraceContextError) as error:
            tool(x)
        assert any("fn(model, x) in place of fn(x)" in note for note in error.value.__notes__)
