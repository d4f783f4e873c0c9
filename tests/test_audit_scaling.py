"""`audit` of training steps: whether a loss is scaled as its gradients are unscaled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import jaxmp

F16, BF16 = "mixed_float16", "mixed_bfloat16"
X, Y = jnp.ones((4, 64)), jnp.ones((4, 1))
NETWORK = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(1)])
PARAMS = NETWORK.init(jax.random.key(0), X)

Step = Callable[..., Any]

# Which `value_and_grad` warns of where it sees the policy of the loss.
pytestmark = pytest.mark.filterwarnings("ignore:value_and_grad. the optimizer has a loss scale")


def kinds(fn: Step, *args: Any) -> set[str]:
    """What `audit` finds of loss scaling."""
    of_scaling = {"not-scaled", "not-unscaled", "scaled-twice", "no-scale"}
    return {f.kind for f in jaxmp.audit(fn)(*args).findings} & of_scaling


def loss_under(policy: str) -> Step:
    model = jaxmp.wrap(NETWORK, policy)
    return lambda params, x, y: jnp.mean((model.apply(params, x) - y) ** 2)


def plain(loss: Step, state: Any) -> Step:
    return jax.grad(loss)


def by_jaxmp(loss: Step, state: Any) -> Step:
    return lambda *args: jaxmp.value_and_grad(loss, state.opt_state)(*args)[1]


def only_scaled(loss: Step, state: Any) -> Step:
    return jax.grad(lambda *args: jaxmp.loss_scaling.scale_loss(loss(*args), state.opt_state))


def only_scaled_by_hand(loss: Step, state: Any) -> Step:
    return jax.grad(lambda *args: loss(*args) * jaxmp.loss_scaling.loss_scale(state.opt_state))


def only_unscaled(loss: Step, state: Any) -> Step:
    return lambda *a: jaxmp.loss_scaling.unscale(jax.grad(loss)(*a), state.opt_state)


def by_scale_loss(loss: Step, state: Any) -> Step:
    gradient = only_scaled(loss, state)
    return lambda *args: jaxmp.loss_scaling.unscale(gradient(*args), state.opt_state)


def by_hand(loss: Step, state: Any) -> Step:
    gradient, scale = (
        only_scaled_by_hand(loss, state),
        jaxmp.loss_scaling.loss_scale(state.opt_state),
    )
    return lambda *args: jax.tree.map(lambda g: g / scale, gradient(*args))


SCALED = (by_jaxmp, by_scale_loss, by_hand)


def step_of(gradient: Callable[..., Step], policy: str = F16) -> Step:
    loss = loss_under(policy)

    def step(state: Any, x: Any, y: Any) -> Any:
        return state.apply_gradients(grads=gradient(loss, state)(state.params, x, y))

    return jax.jit(step)


def state_with(tx: Any, create: Any = jaxmp.TrainState.create) -> Any:
    return create(apply_fn=NETWORK.apply, params=PARAMS, tx=tx)


def scaler(policy: str = F16) -> Any:
    return jaxmp.loss_scale_for(policy, optax.adam(1e-3))


@pytest.mark.parametrize("create", [jaxmp.TrainState.create, train_state.TrainState.create])
@pytest.mark.parametrize("gradient", [plain, only_unscaled], ids=lambda fn: fn.__name__)
def test_a_loss_that_is_not_scaled_is_named(gradient: Any, create: Any) -> None:
    state = state_with(scaler(), create)
    assert kinds(step_of(gradient), state, X, Y) == {"not-scaled"}
    report = jaxmp.audit(step_of(gradient))(state, X, Y)
    with pytest.raises(AssertionError, match=r"the loss (is not multiplied by it|was not mult)"):
        report.assert_no("not-scaled")
    [found] = [f for f in report.findings if f.kind == "not-scaled"]
    assert found.source.startswith("test_audit_scaling.py:")
    assert "jaxmp.value_and_grad(loss_fn, opt_state)" in found.fix


@pytest.mark.parametrize("policy", [F16, BF16])
@pytest.mark.parametrize("gradient", [only_scaled, only_scaled_by_hand], ids=lambda f: f.__name__)
def test_gradients_that_are_not_divided_are_named(gradient: Any, policy: str) -> None:
    state = state_with(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))
    assert kinds(step_of(gradient, policy), state, X, Y) == {"not-unscaled"}
    report = jaxmp.audit(step_of(gradient, policy))(state, X, Y)
    [found] = [f for f in report.findings if f.kind == "not-unscaled"]
    assert "jaxmp.loss_scaling.unscale(grads, opt_state)" in found.fix


@pytest.mark.parametrize("gradient", SCALED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("create", [jaxmp.TrainState.create, train_state.TrainState.create])
def test_a_loss_that_is_scaled_in_any_way_is_fine(gradient: Any, create: Any) -> None:
    assert kinds(step_of(gradient), state_with(scaler(), create), X, Y) == set()


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)])
def test_float16_without_a_scaler_is_named(optimizer: Any) -> None:
    assert kinds(step_of(plain), state_with(optimizer), X, Y) == {"no-scale"}


@pytest.mark.parametrize("policy", [BF16, "float32"])
def test_other_dtypes_need_no_scale(policy: str) -> None:
    for optimizer in (optax.adam(1e-3), scaler(policy)):
        assert kinds(step_of(plain, policy), state_with(optimizer), X, Y) == set()


def test_a_scaler_in_bfloat16_that_is_not_served_is_named_as_well() -> None:
    state = state_with(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))
    assert kinds(step_of(plain, BF16), state, X, Y) == {"not-scaled"}


@pytest.mark.parametrize("gradient", SCALED, ids=lambda fn: fn.__name__)
def test_a_scaler_that_no_gradient_needs_is_named_and_costs_what_its_operations_do(
    gradient: Any,
) -> None:
    state = state_with(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))
    report = jaxmp.audit(step_of(gradient, BF16))(state, X, Y)
    [found] = report.findings
    assert (found.kind, found.unit) == ("unneeded-scale", "bytes")
    assert found.source.startswith("test_audit_scaling.py:")
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
    assert found.cost >= parameters  # gradients are read, to be tested
    assert "loss scale without float16 gradients" in str(report)
    with pytest.raises(AssertionError, match="no gradient is float16"):
        report.assert_no("unneeded-scale")


@pytest.mark.parametrize("gradient", SCALED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("policy", [F16, "float32", f"{F16},matmul=float8"])
def test_a_scaler_is_not_unneeded_where_gradients_are_float16_or_nothing_is_narrow(
    gradient: Any, policy: str
) -> None:
    """With float32, one loop may serve every policy."""
    state = state_with(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))
    x, y = jnp.ones((16, 64)), jnp.ones((16, 1))  # sizes that a recipe takes
    jaxmp.audit(step_of(gradient, policy))(state, x, y).assert_no("unneeded-scale")


def test_an_optimizer_without_a_scaler_has_none_that_is_unneeded() -> None:
    for optimizer in (optax.adam(1e-3), scaler(BF16)):
        report = jaxmp.audit(step_of(plain, BF16))(state_with(optimizer), X, Y)
        report.assert_no("unneeded-scale")


def test_parts_of_a_step_are_not_judged() -> None:
    """Gradients alone may be of a loss that is scaled elsewhere; an update, of one that was."""
    state = state_with(scaler())
    assert kinds(jax.grad(loss_under(F16)), PARAMS, X, Y) == set()
    assert kinds(lambda s, grads: s.apply_gradients(grads=grads), state, PARAMS) == set()


def test_accumulated_in_a_scan() -> None:
    def step(state: Any, xs: Any, ys: Any, gradient: Any) -> Any:
        def add(total: Any, batch: Any) -> Any:
            grads = gradient(loss_under(F16), state)(state.params, *batch)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=jax.lax.scan(add, zeros, (xs, ys))[0])

    args = state_with(scaler()), jnp.stack([X, X]), jnp.stack([Y, Y])
    assert kinds(lambda *a: step(*a, plain), *args) == {"not-scaled"}
    assert kinds(lambda *a: step(*a, by_jaxmp), *args) == set()


def divided(loss: Step, state: Any) -> Step:
    def gradient(*args: Any) -> Any:
        grads = by_jaxmp(loss, state)(*args)
        return jax.tree.map(lambda g: g / jaxmp.loss_scaling.loss_scale(state.opt_state), grads)

    return gradient


def unscaled_twice(loss: Step, state: Any) -> Step:
    gradient = by_jaxmp(loss, state)
    return lambda *args: jaxmp.loss_scaling.unscale(gradient(*args), state.opt_state)


def both_twice(loss: Step, state: Any) -> Step:
    gradient = scaled_twice(loss, state)
    return lambda *args: jaxmp.loss_scaling.unscale(gradient(*args), state.opt_state)


def scaled_twice(loss: Step, state: Any) -> Step:
    return by_jaxmp(
        lambda *args: jaxmp.loss_scaling.scale_loss(loss(*args), state.opt_state), state
    )


ONCE_TOO_OFTEN = {
    divided: "divided by the loss scale more often than",
    unscaled_twice: "were divided by the loss scale before",
    scaled_twice: "multiplied by the loss scale 2 times",
    both_twice: "multiplied by the loss scale 2 times",
}


@pytest.mark.parametrize("gradient", ONCE_TOO_OFTEN, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("policy", [F16, BF16])
def test_scaled_or_unscaled_once_too_often(gradient: Any, policy: str) -> None:
    state = state_with(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))
    assert kinds(step_of(gradient, policy), state, X, Y) == {"scaled-twice"}
    findings = jaxmp.audit(step_of(gradient, policy))(state, X, Y).findings
    said = [f.what for f in findings if f.kind == "scaled-twice"]
    assert any(ONCE_TOO_OFTEN[gradient] in what for what in said)


def over_devices(gradient: Step) -> Step:
    """Gradients of parameters that all devices have: JAX adds them up by `psum_invariant`."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    specs = (P(), P("data"), P("data"))
    return jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P())


def added_by_stacking(gradient: Step) -> Step:
    def added(*args: Any) -> Any:
        return jax.tree.map(lambda g: jnp.sum(jnp.stack([g, g]), 0), gradient(*args))

    return added


@pytest.mark.parametrize("add", [over_devices, added_by_stacking])
def test_scaled_twice_and_added_up(add: Callable[[Step], Step]) -> None:
    state = state_with(scaler())
    for gradient, found in ((by_jaxmp, set()), (scaled_twice, {"scaled-twice"})):
        step = step_of(lambda loss, state, g=gradient: add(g(loss, state)))
        assert kinds(step, state, X, Y) == found


class Net(nn.Module):
    """What gradients go through on their way back."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(64)(x)).reshape(-1, 8, 8, 1)
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2)).reshape(-1, 4, 128)
        x = x + nn.MultiHeadDotProductAttention(4)(x, x)
        x = nn.Dropout(0.5, deterministic=False)(nn.LayerNorm()(x), rng=jax.random.key(0))
        x = nn.RNN(nn.GRUCell(16))(x)
        return nn.Dense(1)(jnp.concatenate([x[:, 0], x[:, -1] / jnp.linalg.norm(x[:, -1])], -1))


@pytest.mark.parametrize(
    "policy", [F16, BF16, f"{F16},matmul=float8", f"{BF16},matmul=int8", f"{F16},softmax=f16"]
)
@pytest.mark.parametrize("remat", [False, True])
def test_no_false_alarm(policy: str, remat: bool) -> None:
    model = jaxmp.wrap(Net(), policy)
    params = model.init(jax.random.key(0), X)
    state = jaxmp.TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=jaxmp.dynamic_loss_scale(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9))
        ),
    )
    apply = jax.checkpoint(model.apply) if remat else model.apply

    def loss(params: Any, x: Any, y: Any) -> Any:
        out = apply(params, x)
        return optax.huber_loss(out, y).mean() + 1e-4 * sum(
            jnp.vdot(w, w) for w in jax.tree.leaves(params)
        )

    @functools.partial(jax.jit, static_argnums=4)
    def step(state: Any, x: Any, y: Any, times: Any, twice: bool) -> Any:
        gradient = scaled_twice(loss, state) if twice else by_jaxmp(loss, state)
        grads = gradient(state.params, x, y)
        grads = jax.tree.map(lambda g: jnp.where(times > 0, g * times, 0), grads)
        return state.apply_gradients(grads=grads)

    assert kinds(step, state, X, Y, jnp.float32(0.5), False) == set()
    if "matmul" not in policy:  # the scale of a quantized gradient is a scale and no factor
        assert kinds(step, state, X, Y, jnp.float32(0.5), True) == {"scaled-twice"}


class TestNNX:
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.hidden = nnx.Linear(64, 64, rngs=rngs)
            self.out = nnx.Linear(64, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(jnp.tanh(self.hidden(x)))

    @pytest.mark.parametrize(("scaled", "found"), [(True, set()), (False, {"not-scaled"})])
    def test_a_step(self, scaled: bool, found: set[str]) -> None:
        model = jaxmp.wrap(self.Network(nnx.Rngs(0)), F16)
        optimizer = nnx.Optimizer(model, scaler(), wrt=nnx.Param)

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
            def loss(model: Any) -> Any:
                value = jnp.mean((model(x) - y) ** 2)
                return (
                    jaxmp.loss_scaling.scale_loss(value, optimizer.opt_state) if scaled else value
                )

            grads = nnx.grad(loss)(model)
            if scaled:
                grads = jaxmp.loss_scaling.unscale(grads, optimizer.opt_state)
            optimizer.update(model, grads)

        assert kinds(nnx.jit(step), model, optimizer, X, Y) == found
