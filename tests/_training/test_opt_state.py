"""What counts as an optimizer's state, and which wrappers of optax bear a scaler inside."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen, nnx
from flax.core import FrozenDict
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from numpy_reference import reference

import jaxmp
from jaxmp import dynamic_loss_scale
from jaxmp.loss_scaling import LossScaleState

from support import case, slow_when
from training import NnxNet

PARAMS = jax.device_put({"w": np.array([1.0, 2.0]), "b": np.array([3.0])})
ADAM = optax.adam(0.1)
SCALED = dynamic_loss_scale(ADAM)


def loss_fn(params):
    return jnp.sum(params["w"]) * jnp.sum(params["b"])


READERS = {
    "loss_scale": jaxmp.loss_scaling.loss_scale,
    "step_was_finite": jaxmp.loss_scaling.step_was_finite,
    "skipped_count": jaxmp.loss_scaling.skipped_count,
    "check_not_stuck": jaxmp.loss_scaling.check_not_stuck,
    "scale_loss": lambda state: jaxmp.loss_scaling.scale_loss(jnp.float32(1), state),
    "unscale": lambda state: jaxmp.loss_scaling.unscale(PARAMS, state),
    "value_and_grad": lambda state: jaxmp.value_and_grad(loss_fn, state),
}
# What the messages tell to write.
CALLS = {name: f"jaxmp.loss_scaling.{name}(opt_state)" for name in READERS} | {
    "scale_loss": "jaxmp.loss_scaling.scale_loss(loss, opt_state)",
    "unscale": "jaxmp.loss_scaling.unscale(grads, opt_state)",
    "value_and_grad": "jaxmp.value_and_grad(loss_fn, opt_state)",
}


class Custom(NamedTuple):
    count: Any


@chex.dataclass
class Dataclass:
    count: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Registered:
    count: Any

    def tree_flatten(self):
        return (self.count,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def nnx_optimizer(tx):
    return nnx.Optimizer(NnxNet(), tx, wrt=nnx.Param)


MASK = {"w": True, "b": False}
LABELS = {"w": "a", "b": "b"}
STATES = {
    "adam": lambda: ADAM.init(PARAMS),
    "sgd": lambda: optax.sgd(0.1).init(PARAMS),
    "EmptyState": optax.EmptyState,
    "nothing": lambda: (),
    "a chain of nothing": lambda: ((), ()),
    "a dict of nothing": lambda: {"opt": {}},
    "masked": lambda: optax.masked(ADAM, MASK).init(PARAMS),
    "partition": lambda: optax.partition({"a": ADAM, "b": optax.sgd(1.0)}, LABELS).init(PARAMS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1).init(PARAMS),
    "named_chain": lambda: optax.named_chain(("adam", ADAM)).init(PARAMS),
    "lbfgs": lambda: optax.lbfgs().init(PARAMS),
    "MultiSteps": lambda: optax.MultiSteps(ADAM, 2).init(PARAMS),
    "in a dict": lambda: {"step": 1, "opt_state": ADAM.init(PARAMS)},
    "in a FrozenDict": lambda: FrozenDict(opt_state=ADAM.init(PARAMS)),
    "beside parameters": lambda: (PARAMS, ADAM.init(PARAMS)),
    "beside the optimizer": lambda: (ADAM, ADAM.init(PARAMS)),
    "shapes": lambda: jax.eval_shape(ADAM.init, PARAMS),
    "train state": lambda: train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=ADAM),
    "train state of sgd": lambda: jaxmp.TrainState.create(
        apply_fn=None, params=PARAMS, tx=optax.sgd(0.1)
    ),
    "nnx.Optimizer": lambda: nnx_optimizer(ADAM),
    "opt_state of nnx": lambda: nnx_optimizer(ADAM).opt_state,
    "opt_state of nnx, sgd": lambda: nnx_optimizer(optax.sgd(0.1)).opt_state,
    "nnx.state": lambda: nnx.state(nnx_optimizer(ADAM)),
    "a NamedTuple of one's own": lambda: Custom(jnp.zeros([], jnp.int32)),
    "a chex dataclass": lambda: Dataclass(count=jnp.zeros([], jnp.int32)),
    "a registered class": lambda: Registered(jnp.zeros([], jnp.int32)),
    "optax.OptState of a schedule": lambda: optax.scale_by_schedule(lambda n: n).init(PARAMS),
}


def test_a_state_without_a_scaler_counts_as_scale_1():
    for name, make in STATES.items():
        with case(name):
            state = make()
            assert float(jaxmp.loss_scaling.loss_scale(state)) == 1
            assert jaxmp.loss_scaling.scale_loss(jnp.float32(3), state) == 3
            value, grads = jaxmp.value_and_grad(loss_fn, state)(PARAMS)
            np.testing.assert_array_equal(value, loss_fn(PARAMS))
            np.testing.assert_array_equal(grads["w"], [3, 3])


class Callable(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return self.w * x


NO_STATES = {
    "Flax's DynamicScale": (DynamicScale, "a 'DynamicScale' of another library"),
    "jmp's loss scale": (lambda: jmp.StaticLossScale(8.0), "a 'StaticLossScale' of another"),
    "the optimizer": (lambda: SCALED, "the optimizer itself"),
    "an optimizer without a scaler": (lambda: ADAM, "the optimizer itself"),
    "MultiSteps": (lambda: optax.MultiSteps(SCALED, 2), "the optimizer itself"),
    "None": (lambda: None, "None"),
    "a string": (lambda: "mixed_float16", "'mixed_float16'"),
    "a class": (lambda: LossScaleState, "LossScaleState"),
    "a function": (lambda: loss_fn, "'loss_fn', which is a function or a model"),
    "tx.init": (lambda: SCALED.init, "'init', which is a function or a model"),
    "a number": (lambda: 65536.0, "one 'float'"),
    "an array": (lambda: jnp.ones(3), r"one 'ArrayImpl' of shape \(3,\)"),
    "parameters": (lambda: PARAMS, "a 'dict' of arrays, which looks like parameters"),
    "frozen parameters": (lambda: FrozenDict(PARAMS), "a 'FrozenDict' of arrays"),
    "variables": (lambda: {"params": PARAMS, "batch_stats": {}}, "a 'dict' of arrays"),
    "a list of parameters": (lambda: [(jnp.ones(2), jnp.ones(1)), ()], "a 'list' of arrays"),
    "a pair of parameters": (lambda: (jnp.ones(2), jnp.ones(1)), "a 'tuple' of arrays"),
    "boxed parameters": (
        lambda: {"w": linen.Partitioned(jnp.ones(2), ("x",))},
        "a 'dict' of arrays",
    ),
    "masked parameters": (lambda: {"w": jnp.ones(2), "b": optax.MaskedNode()}, "a 'dict' of"),
    "lookahead parameters": (lambda: optax.LookaheadParams(PARAMS, PARAMS), "parameters"),
    "the parameters of an NNX module": (lambda: nnx.state(NnxNet()), "a 'State' of arrays"),
    "an NNX module": (NnxNet, "'NnxNet', which is a function or a model"),
    "a Linen module": (lambda: linen.Dense(2), "'Dense'"),
    "an Equinox module": (lambda: Callable(jnp.ones(2)), "'Callable', which is a function or"),
}


def test_what_is_no_state_is_refused():
    for reader, read in READERS.items():
        for name, (make, got) in NO_STATES.items():
            head = rf"{reader}: opt_state must be the optimizer's state, .*; got .*({got})"
            tail = f"Write {re.escape(CALLS[reader])}, where opt_state = tx"
            with case((reader, name)), pytest.raises(TypeError, match=f"{head}.* {tail}"):
                read(make())


def test_arguments_in_each_others_place_are_refused():
    state = SCALED.init(PARAMS)
    with pytest.raises(TypeError, match=r"scale_loss: opt_state must be .*; got one 'ArrayImpl'"):
        jaxmp.loss_scaling.scale_loss(state, jnp.float32(1))
    with pytest.raises(TypeError, match=r"value_and_grad: opt_state must be .*; got 'loss_fn'"):
        jaxmp.value_and_grad(state, loss_fn)
    with pytest.raises(TypeError, match=r"value_and_grad: loss_fn, which .*; got 'LossScaleState'"):
        jaxmp.value_and_grad(state, state)
    # Within a traced step, where the loss is not an array yet.
    with pytest.raises(TypeError, match="scale_loss: opt_state must be"):
        jax.grad(lambda x: jaxmp.loss_scaling.scale_loss(state, x))(1.0)


def test_a_scaler_that_lost_its_type_is_refused():
    """It would count as no scaler, and nothing be scaled."""
    state, of_nnx = SCALED.init(PARAMS), nnx.state(nnx_optimizer(SCALED))
    for lost in (
        of_nnx,
        nnx.to_pure_dict(of_nnx),
        flax.serialization.to_state_dict(state),
        {"opt_state": dict(state._asdict())},
    ):
        for read in READERS.values():
            with pytest.raises(TypeError, match=r"the scaler's state.* has become a plain mapping"):
                read(lost)


def test_a_hand_written_optimizer_needs_no_state_of_a_kind_in_a_train_state():
    """Where the state is known to be one, because the optimizer made it."""
    tx = optax.GradientTransformation(
        lambda params: {"count": jnp.zeros([], jnp.int32)},
        lambda updates, state, params=None: (
            jax.tree.map(lambda u: -u, updates),
            {"count": state["count"] + 1},
        ),
    )
    state = jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    _, grads = state.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    assert (float(state.loss_scale), int(state.skipped_count), int(state.step)) == (1, 0, 1)
    low = {"w": jnp.ones(2, jnp.bfloat16)}
    for options in ({}, {"stochastic_rounding": True}):
        masters = jaxmp.master_weights(tx, **options)
        updates, _ = masters.update(low, masters.init(low), low)
        np.testing.assert_array_equal(updates["w"], [-1, -1])
    with pytest.raises(TypeError, match="known by being a NamedTuple"):
        jaxmp.loss_scaling.loss_scale(tx.init(PARAMS))


# Wrappers of optax around a scaler.

SGD = optax.sgd(0.125)


def every_second(step, **extra_args):
    return step % 2 == 0


def injected(inner):
    return optax.inject_hyperparams(lambda scale: optax.chain(inner, optax.scale(scale)))(scale=1.0)


BEARS = {
    "chain": lambda inner: optax.chain(inner, optax.ema(0.9)),
    "named_chain": lambda inner: optax.named_chain(("scaled", inner)),
    "flatten": optax.flatten,
    "inject_hyperparams": injected,
    "schedule_free": lambda inner: optax.contrib.schedule_free(inner, 0.125),
    "split_real_and_imaginary": optax.contrib.split_real_and_imaginary,
    "with_extra_args_support": optax.with_extra_args_support,
}
REFUSES = {
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "masked": lambda inner: optax.masked(inner, MASK),
    "partition": lambda inner: optax.partition({"a": inner, "b": SGD}, LABELS),
    "multi_transform": lambda inner: optax.multi_transform({"a": SGD, "b": inner}, LABELS),
    "selective_transform": lambda inner: optax.selective_transform(inner, freeze_mask=MASK),
    "conditionally_mask": lambda inner: optax.conditionally_mask(inner, every_second),
    "conditionally_transform": lambda inner: optax.conditionally_transform(inner, every_second),
    "mechanize": optax.contrib.mechanize,
    "sam": lambda inner: optax.contrib.sam(inner, SGD),
    "sam's adversary": lambda inner: optax.contrib.sam(SGD, inner),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
    "in a chain": lambda inner: optax.chain(optax.masked(inner, MASK), optax.clip(1.0)),
}
GRADS = jax.device_put({"w": np.array([1.0, 2.0]), "b": np.array([1.0])})
BAD = {**GRADS, "b": jax.device_put(np.array([np.nan]))}  # as `value_and_grad` returns an overflow


def train(tx, steps):
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    for grads in steps:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def scale_and_skipped(state):
    of = jaxmp.loss_scaling
    return float(of.loss_scale(state)), int(of.skipped_count(state))


@pytest.mark.parametrize("name", BEARS)
def test_wrappers_that_bear_a_scaler_inside(name):
    wrap = BEARS[name]
    tx = wrap(dynamic_loss_scale(SGD, init_scale=1024.0))
    got, _ = train(tx, [GRADS] * 3)
    want, _ = train(wrap(SGD), [GRADS] * 3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
    params, state = train(tx, [BAD] * 3 + [GRADS] * 2)
    assert jaxmp.tree.all_finite(params)
    assert scale_and_skipped(state) == (128, 3)


def test_lookahead_bears_a_scaler_inside():
    params = optax.LookaheadParams.init_synced(PARAMS)
    tx = optax.lookahead(dynamic_loss_scale(SGD, init_scale=1024.0), 2, 0.5)
    state = tx.init(params)
    for grads in (BAD, GRADS):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert scale_and_skipped(state) == (512, 1)
    np.testing.assert_allclose(params.slow["w"], PARAMS["w"] - 0.5 * 0.125 * GRADS["w"])


def test_wrappers_that_do_not_bear_a_scaler_are_refused():
    for name, wrap in REFUSES.items():
        state = wrap(dynamic_loss_scale(SGD)).init(PARAMS)
        with case(name):
            for read in READERS.values():
                message = r"is around a loss scaler: .* The right form is dyn"
                with pytest.raises(ValueError, match=message):
                    read(state)
            assert_a_train_state_refuses(wrap, state, "is around a loss scaler")
            # Without a scaler it is nobody's business.
            assert float(jaxmp.loss_scaling.loss_scale(wrap(SGD).init(PARAMS))) == 1


@slow_when(lambda name: name not in ("masked", "MultiSteps", "apply_if_finite"))
@pytest.mark.parametrize("name", sorted(REFUSES.keys() - {"sam's adversary", "in a chain"}))
def test_what_is_refused_hides_or_keeps_an_overflow(name):
    """In some step of some parameter: it goes into parameters, is not seen, or comes again."""

    def harms(leaf, at):
        tx = REFUSES[name](dynamic_loss_scale(optax.adam(0.125), init_scale=1024.0))
        bad = {**GRADS, leaf: GRADS[leaf].at[0].set(jnp.nan)}
        params, state = train(tx, [bad if i == at else GRADS for i in range(6)])
        [scaler] = (s for s in jax.tree.leaves(state, is_leaf=is_scaler) if is_scaler(s))
        return not jaxmp.tree.all_finite((params, scaler)) or int(scaler.skipped_count) != 1

    def is_scaler(node):
        return isinstance(node, LossScaleState)

    assert any(harms(leaf, at) for leaf in PARAMS for at in (2, 3))


IN_FRONT = {
    "clip": optax.clip(0.5),
    "clip_by_global_norm": optax.clip_by_global_norm(0.5),
    "clip_by_block_rms": optax.clip_by_block_rms(0.5),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": optax.add_decayed_weights(1e-2),
    "centralize": optax.centralize(),
    "scale_by_sign": optax.scale_by_sign(),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "masked": optax.masked(optax.clip(0.5), MASK),
    "several": optax.chain(optax.clip(0.5), optax.add_decayed_weights(1e-2)),
}


def test_what_keeps_nothing_may_be_in_front_of_a_scaler():
    """Gradients are those of the loss, and no overflow is a number: a skip leaves no trace."""

    def train(first, scaler, overflows):
        tx = optax.chain(first, scaler)
        params, state = PARAMS, tx.init(PARAMS)

        @reference
        def step(params, state, factor):
            loss = lambda params: loss_fn(params) * factor  # noqa: E731
            _, grads = jaxmp.value_and_grad(loss, state)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for factor in overflows:
            params, state = step(params, state, np.float32(factor))
        return params, state

    for name, first in IN_FRONT.items():
        want, _ = train(first, ADAM, [1.0, 1.0])
        got, state = train(first, dynamic_loss_scale(ADAM), [1.0, 3e38, 1.0])
        with case(name):
            jax.tree.map(np.testing.assert_array_equal, got, want)
            assert int(jaxmp.loss_scaling.skipped_count(state)) == 1


KEEPING = {
    "moments": lambda inner: optax.chain(optax.scale_by_adam(), optax.identity(), inner),
    "an average": lambda inner: optax.chain(optax.clip(1.0), optax.ema(0.9), inner),
    "a chain": lambda inner: optax.chain(ADAM, inner),
    "a schedule": lambda inner: optax.chain(optax.scale_by_schedule(lambda n: n), inner),
    "by name": lambda inner: optax.named_chain(("average", optax.ema(0.9)), ("scaled", inner)),
    "what hides NaNs": lambda inner: optax.chain(optax.zero_nans(), inner),
    "deeper": lambda inner: optax.chain(optax.trace(0.9), optax.chain(inner, optax.ema(0.9))),
}


def test_a_scaler_after_what_keeps_a_state_is_refused():
    """An overflow would stay in an average, and a schedule count the steps that are skipped."""
    for name, wrap in KEEPING.items():
        state = wrap(dynamic_loss_scale(SGD)).init(PARAMS)
        with case(name):
            for read in READERS.values():
                for holder in (state, {"opt_state": state}, (PARAMS, state)):
                    message = r"which keeps a state.*dynamic_loss_scale\(optax"
                    with pytest.raises(ValueError, match=message):
                        read(holder)
            assert_a_train_state_refuses(wrap, state, "which keeps a state")


def assert_a_train_state_refuses(wrap, state, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.TrainState(0, None, PARAMS, None, state).value_and_grad(loss_fn)
    with pytest.raises(ValueError, match=message):
        jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=wrap(dynamic_loss_scale(SGD)))


def test_a_state_beside_parameters_is_no_chain():
    state = dynamic_loss_scale(SGD).init(PARAMS)
    for holder in ((PARAMS, state), (jnp.zeros(()), PARAMS, {}, (), state), ([PARAMS], (state,))):
        assert float(jaxmp.loss_scaling.loss_scale(holder)) == 2.0**16


def test_the_wrapper_is_named_and_not_what_it_is_made_of():
    """Which is one `optax.masked` for each label."""
    message = r"^loss_scale: optax\.partition at \[1\] is .*multi_tr.*le\(optax\.partition\("
    for name in ("partition", "multi_transform", "selective_transform"):
        wrapped = REFUSES[name](dynamic_loss_scale(SGD))
        state = optax.chain(optax.clip(1.0), wrapped).init(PARAMS)
        with case(name), pytest.raises(ValueError, match=message):
            jaxmp.loss_scaling.loss_scale(state)


def test_hyperparameters_are_injected_inside():
    tx = optax.inject_hyperparams(dynamic_loss_scale)(inner=SGD)
    with pytest.raises(TypeError, match=r"dynamic_loss_scale\(optax.inject_hyperparams"):
        tx.init(PARAMS)
    tx = dynamic_loss_scale(optax.inject_hyperparams(optax.sgd)(learning_rate=0.125))
    got, _ = train(tx, [GRADS])
    jax.tree.map(np.testing.assert_array_equal, got, train(SGD, [GRADS])[0])
