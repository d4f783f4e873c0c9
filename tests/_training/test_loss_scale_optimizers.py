"""Contract suite: what a skip, and no skip, mean for every transformation that optax exports."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxmp

from support import assert_same, ones, slow_when

RATE = {"learning_rate": 0.1}


def norms(updates):
    return jax.tree.map(jnp.linalg.norm, updates)


def every_second(step, **extra_args):
    return step % 2 == 0


# How to make those that take more than a learning rate; a missing name takes none or just that.
ARGUMENTS = {
    "adaptive_grad_clip": lambda f: f(0.1),
    "add_noise": lambda f: f(0.1, 0.5, key=0),
    "apply_if_finite": lambda f: f(optax.adam(0.1), 3),
    "chain": lambda f: f(optax.clip(1.0), optax.adam(0.1)),
    "clip": lambda f: f(0.1),
    "clip_by_block_rms": lambda f: f(0.1),
    "clip_by_global_norm": lambda f: f(0.1),
    "conditionally_mask": lambda f: f(optax.adam(0.1), every_second),
    "conditionally_transform": lambda f: f(optax.adam(0.1), every_second),
    "differentially_private_aggregate": lambda f: f(1.0, 0.1, key=0),
    "dpsgd": lambda f: f(0.1, 1.0, 0.1, seed=0),
    "ema": lambda f: f(0.9),
    "flatten": lambda f: f(optax.adam(0.1)),
    "freeze": lambda f: f({"w": True, "b": False}),
    "galore": lambda f: f(0.1, rank=2),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=optax.linear_schedule(1, 0, 9)),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "lookahead": lambda f: f(optax.adam(0.1), 3, 0.5),
    "masked": lambda f: f(optax.adam(0.1), {"w": True, "b": False}),
    "measure_with_ema": lambda f: f(norms, 0.9),
    "mechanize": lambda f: f(optax.adam(0.1)),
    "multi_transform": lambda f: f({"a": optax.adam(0.1), "b": optax.sgd(1)}, {"w": "a", "b": "b"}),
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
    "noisy_sgd": lambda f: f(0.1, key=0),
    "partition": lambda f: f({"a": optax.adam(0.1), "b": optax.sgd(1)}, {"w": "a", "b": "b"}),
    "scale_by_muon": lambda f: f(
        weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()}
    ),
    "sam": lambda f: f(optax.sgd(0.1), optax.sgd(0.05)),
    "scale": lambda f: f(0.1),
    "scale_by_backtracking_linesearch": lambda f: f(5),
    "scale_by_galore": lambda f: f(rank=2),
    "scale_by_learning_rate": lambda f: f(0.1),
    "scale_by_schedule": lambda f: f(optax.linear_schedule(1.0, 0.0, 9)),
    "scale_by_zoom_linesearch": lambda f: f(5),
    "schedule_free": lambda f: f(optax.sgd(0.1), 0.1),
    "schedule_free_adamw": lambda f: f(0.1),
    "schedule_free_sgd": lambda f: f(0.1),
    "selective_transform": lambda f: f(optax.adam(0.1), freeze_mask={"w": True, "b": False}),
    "snapshot": lambda f: f("norm", norms),
    "split_real_and_imaginary": lambda f: f(optax.adam(0.1)),
    "stateless": lambda f: f(lambda updates, params: jax.tree.map(jnp.sign, updates)),
    "stateless_with_tree_map": lambda f: f(lambda update, param: jnp.sign(update)),
    "trace": lambda f: f(0.9),
    "with_extra_args_support": lambda f: f(optax.adam(0.1)),
}


def exports():
    """Name and function of all that optax exports whose annotation returns a transformation."""
    found = {}
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            returned = str(inspect.signature(function).return_annotation)
            if "GradientTransformation" in returned and not name.startswith("_"):
                found.setdefault(name, function)
    return found


EXPORTS = exports()


def make(name):
    function = EXPORTS[name]
    if name in ARGUMENTS:
        return optax.with_extra_args_support(ARGUMENTS[name](function))
    parameters = inspect.signature(function).parameters
    required = {
        n for n, p in parameters.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD
    }
    assert required <= RATE.keys(), f"{name} takes {required}: say in ARGUMENTS how to make it"
    return optax.with_extra_args_support(function(**{n: RATE[n] for n in required}))


def make_params(name, size=4):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(size, size)), "float32"), "b": ones(4)}
    if name == "scale_by_muon":  # which takes matrices only
        del params["b"]
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


def loss_fn(params):
    return sum(jnp.sum(jnp.tanh(leaf - 2) ** 2) for leaf in jax.tree.leaves(params))


def make_grads(name, params):
    grads = jax.jit(jax.grad(loss_fn))(params.fast if name == "lookahead" else params)
    if name in ("differentially_private_aggregate", "dpsgd"):  # which take one per example
        return jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
    return grads


def extra_args(name, grads, value=1.0):
    if name == "sam":  # which takes none
        return {}
    if name == "sophia":  # whose estimate of the Hessian differentiates the loss
        return {"obj_fn": loss_fn}
    return {"value": jnp.float32(value), "grad": grads, "value_fn": loss_fn}


def types(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), x.dtype, getattr(x, "weak_type", False)), tree)


# One of each kind: moments, random numbers, two sets of parameters, a schedule, an optimizer around
# another, one for each label. Factors, matrices, line searches and second derivatives are slow.
BY_DEFAULT = {
    "adamw",
    "apply_if_finite",
    "inject_hyperparams",
    "lookahead",
    "multi_transform",
    "noisy_sgd",
    "sam",
    "scale_by_schedule",
    "sgd",
}


def test_every_export_is_known():
    assert len(EXPORTS) > 100
    assert EXPORTS.keys() > BY_DEFAULT


@slow_when(lambda name: name not in BY_DEFAULT)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", EXPORTS)
def test_a_skip_leaves_no_trace_in_any_optimizer(name):
    inner = make(name)
    optimizer = jaxmp.dynamic_loss_scale(inner, init_scale=2.0**10)
    params = make_params(name)
    grads = make_grads(name, params)
    # A step makes the state one that a skip could spoil; it is the step of the optimizer alone.
    alone = inner.init(params)
    state = optimizer.init(params)
    want, alone = inner.update(grads, alone, params, **extra_args(name, grads))
    updates, state = optimizer.update(grads, state, params, **extra_args(name, grads))
    assert_same(updates, want)
    assert_same(state.inner_state, alone)

    bad = {**grads, "w": grads["w"].at[..., 1, 2].set(jnp.nan)}
    updates, skipped = optimizer.update(bad, state, params, **extra_args(name, bad, jnp.nan))
    assert_same(updates, jax.tree.map(np.zeros_like, want))
    assert_same(skipped.inner_state, state.inner_state)
    assert not skipped.finite
    assert int(skipped.skipped_count) == 1
    assert float(skipped.loss_scale) == 512

    # And so the next step is the optimizer's own second one.
    want, alone = inner.update(grads, alone, params, **extra_args(name, grads))
    updates, state = optimizer.update(grads, skipped, params, **extra_args(name, grads))
    assert_same(updates, want)
    assert_same(state.inner_state, alone)
    assert types(state) == types(skipped)
