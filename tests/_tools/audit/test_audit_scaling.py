"""`audit` of training steps: whether a loss is scaled as its gradients are unscaled."""

from __future__ import annotations

import functools
import itertools
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

from support import ones, random_key, slow_when

F16, BF16 = "mixed_float16", "mixed_bfloat16"
X, Y = ones(4, 64), ones(4, 1)
NETWORK = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(1)])
PARAMS = jax.eval_shape(NETWORK.init, random_key(0), X)

Step = Callable[..., Any]

# Which `value_and_grad` warns of where it sees the policy of the loss.
pytestmark = pytest.mark.filterwarnings("ignore:value_and_grad. the optimizer has a loss scale")


def of_scaling(report):
    """What `audit` finds of loss scaling."""
    kinds = {"not-scaled", "not-unscaled", "scaled-twice", "no-scale"}
    return {f.kind for f in report.findings} & kinds


def kinds(fn, *args):
    return of_scaling(jaxmp.audit(fn)(*args))


def loss_under(policy):
    model = jaxmp.wrap(NETWORK, policy)
    return lambda params, x, y: jnp.mean((model.apply(params, x) - y) ** 2)


def plain(loss, state):
    return jax.grad(loss)


def by_jaxmp(loss, state):
    return lambda *args: jaxmp.value_and_grad(loss, state.opt_state)(*args)[1]


def only_scaled(loss, state):
    return jax.grad(lambda *args: jaxmp.loss_scaling.scale_loss(loss(*args), state.opt_state))


def only_scaled_by_hand(loss, state):
    return jax.grad(lambda *args: loss(*args) * jaxmp.loss_scaling.loss_scale(state.opt_state))


def only_unscaled(loss, state):
    return lambda *a: jaxmp.loss_scaling.unscale(jax.grad(loss)(*a), state.opt_state)


def by_scale_loss(loss, state):
    gradient = only_scaled(loss, state)
    return lambda *args: jaxmp.loss_scaling.unscale(gradient(*args), state.opt_state)


def by_hand(loss, state):
    gradient = only_scaled_by_hand(loss, state)
    scale = jaxmp.loss_scaling.loss_scale(state.opt_state)
    return lambda *args: jax.tree.map(lambda g: g / scale, gradient(*args))


SCALED = (by_jaxmp, by_scale_loss, by_hand)


def step_of(gradient, policy=F16):
    loss = loss_under(policy)

    def step(state, x, y):
        return state.apply_gradients(grads=gradient(loss, state)(state.params, x, y))

    return jax.jit(step)


def state_with(tx, create=jaxmp.TrainState.create):
    return jax.eval_shape(lambda params: create(apply_fn=None, params=params, tx=tx), PARAMS)


def scaler(policy=F16):
    return jaxmp.loss_scale_for(policy, optax.adam(1e-3))


CREATES = (jaxmp.TrainState.create, train_state.TrainState.create)
DYNAMIC = state_with(jaxmp.dynamic_loss_scale(optax.adam(1e-3)))


def test_a_loss_that_is_not_scaled_is_named():
    for create, gradient in itertools.product(CREATES, (plain, only_unscaled)):
        report = jaxmp.audit(step_of(gradient))(state_with(scaler(), create), X, Y)
        assert of_scaling(report) == {"not-scaled"}
        with pytest.raises(
            AssertionError, match=r"the loss (is not multiplied by it|was not mult)"
        ):
            report.assert_no("not-scaled")
        [found] = [f for f in report.findings if f.kind == "not-scaled"]
        assert found.source.startswith("test_audit_scaling.py:")
        assert "jaxmp.value_and_grad(loss_fn, opt_state)" in found.fix
    # One in bfloat16 that is not served, as well.
    assert kinds(step_of(plain, BF16), DYNAMIC, X, Y) == {"not-scaled"}


def test_gradients_that_are_not_divided_are_named():
    for gradient, policy in itertools.product((only_scaled, only_scaled_by_hand), (F16, BF16)):
        report = jaxmp.audit(step_of(gradient, policy))(DYNAMIC, X, Y)
        assert of_scaling(report) == {"not-unscaled"}
        [found] = [f for f in report.findings if f.kind == "not-unscaled"]
        assert "jaxmp.loss_scaling.unscale(grads, opt_state)" in found.fix


def test_a_loss_that_is_scaled_in_any_way_is_fine():
    for gradient, create in itertools.product(SCALED, CREATES):
        assert kinds(step_of(gradient), state_with(scaler(), create), X, Y) == set()


def test_float16_without_a_scaler_is_named_and_other_dtypes_need_none():
    for optimizer in (optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)):
        assert kinds(step_of(plain), state_with(optimizer), X, Y) == {"no-scale"}
    for policy in (BF16, "float32"):
        for optimizer in (optax.adam(1e-3), scaler(policy)):
            report = jaxmp.audit(step_of(plain, policy))(state_with(optimizer), X, Y)
            assert of_scaling(report) == set()
            report.assert_no("unneeded-scale")


@slow_when(lambda gradient: gradient is by_hand)
@pytest.mark.parametrize("gradient", SCALED, ids=lambda fn: fn.__name__)
def test_a_scaler_that_no_gradient_needs_is_named_and_costs_what_its_operations_do(gradient):
    report = jaxmp.audit(step_of(gradient, BF16))(DYNAMIC, X, Y)
    [found] = report.findings
    assert (found.kind, found.unit) == ("unneeded-scale", "bytes")
    assert found.source.startswith("test_audit_scaling.py:")
    parameters = sum(4 * leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert found.cost >= parameters  # gradients are read, to be tested
    assert "loss scale without float16 gradients" in str(report)
    with pytest.raises(AssertionError, match="no gradient is float16"):
        report.assert_no("unneeded-scale")
    # With float32, one loop may serve every policy.
    x, y = jnp.ones((16, 64)), jnp.ones((16, 1))  # sizes that a recipe takes
    for policy in (F16, "float32", f"{F16},matmul=float8"):
        jaxmp.audit(step_of(gradient, policy))(DYNAMIC, x, y).assert_no("unneeded-scale")


def test_parts_of_a_step_are_not_judged():
    """Gradients alone may be of a loss that is scaled elsewhere; an update, of one that was."""
    state = state_with(scaler())
    assert kinds(jax.grad(loss_under(F16)), PARAMS, X, Y) == set()
    assert kinds(lambda s, grads: s.apply_gradients(grads=grads), state, PARAMS) == set()


def test_accumulated_in_a_scan():
    def step(state, xs, ys, gradient):
        def add(total, batch):
            grads = gradient(loss_under(F16), state)(state.params, *batch)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=jax.lax.scan(add, zeros, (xs, ys))[0])

    args = state_with(scaler()), jnp.stack([X, X]), jnp.stack([Y, Y])
    assert kinds(lambda *a: step(*a, plain), *args) == {"not-scaled"}
    assert kinds(lambda *a: step(*a, by_jaxmp), *args) == set()


def divided(loss, state):
    def gradient(*args):
        grads = by_jaxmp(loss, state)(*args)
        return jax.tree.map(lambda g: g / jaxmp.loss_scaling.loss_scale(state.opt_state), grads)

    return gradient


def unscaled_twice(loss, state):
    gradient = by_jaxmp(loss, state)
    return lambda *args: jaxmp.loss_scaling.unscale(gradient(*args), state.opt_state)


def both_twice(loss, state):
    gradient = scaled_twice(loss, state)
    return lambda *args: jaxmp.loss_scaling.unscale(gradient(*args), state.opt_state)


def scaled_twice(loss, state):
    return by_jaxmp(
        lambda *args: jaxmp.loss_scaling.scale_loss(loss(*args), state.opt_state), state
    )


ONCE_TOO_OFTEN = {
    divided: "divided by the loss scale more often than",
    unscaled_twice: "were divided by the loss scale before",
    scaled_twice: "multiplied by the loss scale 2 times",
    both_twice: "multiplied by the loss scale 2 times",
}


def test_scaled_or_unscaled_once_too_often():
    for (gradient, said), policy in itertools.product(ONCE_TOO_OFTEN.items(), (F16, BF16)):
        report = jaxmp.audit(step_of(gradient, policy))(DYNAMIC, X, Y)
        assert of_scaling(report) == {"scaled-twice"}, gradient
        assert any(said in f.what for f in report.findings if f.kind == "scaled-twice")


def over_devices(gradient):
    """Gradients of parameters that all devices have: JAX adds them up by `psum_invariant`."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    specs = (P(), P("data"), P("data"))
    return jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P())


def added_by_stacking(gradient):
    def added(*args):
        return jax.tree.map(lambda g: jnp.sum(jnp.stack([g, g]), 0), gradient(*args))

    return added


def test_scaled_twice_and_added_up():
    for add in (over_devices, added_by_stacking):
        for gradient, found in ((by_jaxmp, set()), (scaled_twice, {"scaled-twice"})):
            step = step_of(lambda loss, state, g=gradient, a=add: a(g(loss, state)))
            assert kinds(step, state_with(scaler()), X, Y) == found


class Net(nn.Module):
    """What gradients go through on their way back."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x)).reshape(-1, 8, 8, 1)
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2)).reshape(-1, 4, 128)
        x = x + nn.MultiHeadDotProductAttention(4)(x, x)
        x = nn.Dropout(0.5, deterministic=False)(nn.LayerNorm()(x), rng=jax.random.key(0))
        x = nn.RNN(nn.GRUCell(16))(x)
        return nn.Dense(1)(jnp.concatenate([x[:, 0], x[:, -1] / jnp.linalg.norm(x[:, -1])], -1))


@slow_when(lambda policy, remat: (policy, remat) != (f"{F16},softmax=f16", True))
@pytest.mark.parametrize(
    "policy", [F16, BF16, f"{F16},matmul=float8", f"{BF16},matmul=int8", f"{F16},softmax=f16"]
)
@pytest.mark.parametrize("remat", [False, True])
def test_no_false_alarm(policy, remat):
    model = jaxmp.wrap(Net(), policy)
    transforms = optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9)
    tx = jaxmp.dynamic_loss_scale(optax.chain(*transforms))
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    create = functools.partial(jaxmp.TrainState.create, apply_fn=None, tx=tx)
    state = jax.eval_shape(lambda params: create(params=params), params)
    apply = jax.checkpoint(model.apply) if remat else model.apply

    def loss(params, x, y):
        decay = sum(jnp.vdot(w, w) for w in jax.tree.leaves(params))
        return optax.huber_loss(apply(params, x), y).mean() + 1e-4 * decay

    @functools.partial(jax.jit, static_argnums=4)
    def step(state, x, y, times, twice):
        gradient = scaled_twice(loss, state) if twice else by_jaxmp(loss, state)
        grads = gradient(state.params, x, y)
        grads = jax.tree.map(lambda g: jnp.where(times > 0, g * times, 0), grads)
        return state.apply_gradients(grads=grads)

    assert kinds(step, state, X, Y, jnp.float32(0.5), False) == set()
    if "matmul" not in policy:  # the scale of a quantized gradient is a scale and no factor
        assert kinds(step, state, X, Y, jnp.float32(0.5), True) == {"scaled-twice"}


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def test_a_step_in_nnx():
    model = jaxmp.wrap(Network(nnx.Rngs(0)), F16)
    optimizer = nnx.Optimizer(model, scaler(), wrt=nnx.Param)

    def step(model, optimizer, scaled):
        def loss(model):
            value = jnp.mean((model(X) - Y) ** 2)
            return jaxmp.loss_scaling.scale_loss(value, optimizer.opt_state) if scaled else value

        grads = nnx.grad(loss)(model)
        if scaled:
            grads = jaxmp.loss_scaling.unscale(grads, optimizer.opt_state)
        optimizer.update(model, grads)

    for scaled, found in ((True, set()), (False, {"not-scaled"})):
        jitted = nnx.jit(functools.partial(step, scaled=scaled))
        assert kinds(jitted, model, optimizer) == found
