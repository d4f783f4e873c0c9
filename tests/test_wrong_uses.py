"""Wrong uses of public functions that were silent or ended in an error of JAX: a row each."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import checkpoint_policies, devices, dtypes, numerics, tree

from support import case, ones, random_key

X = ones(2, 8)
MODEL = nn.Dense(4)
PARAMS = {"kernel": ones(8, 4), "bias": ones(4)}
HALF = {"kernel": ones(8, 4, dtype=jnp.bfloat16), "bias": ones(4, dtype=jnp.bfloat16)}
ADAM = optax.adam(1e-3)
KEY = random_key(0)
SCALED = jaxmp.dynamic_loss_scale(ADAM)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(MODEL.apply({"params": params}, x) ** 2)


def wrapped(**options: Any) -> Any:
    return jaxmp.wrap(MODEL, "mixed_bfloat16", **options)


def capture(**options: Any) -> Any:
    return numerics.capture(loss, "mixed_bfloat16", **options)(PARAMS, X)


def state(**fields: Any) -> Any:
    made = jaxmp.TrainState.create(apply_fn=MODEL.apply, params=PARAMS, tx=SCALED)
    return made.replace(**fields).apply_gradients(grads=PARAMS)


CHAINED = optax.chain(jaxmp.master_weights(ADAM), optax.scale(0.5))
OF_PARAMS = "wrap: params are the names of Linen's collections that hold parameters"
OF_KEY = "key must be one random key, such as"
WRONG: dict[str, tuple[Any, type, str]] = {
    # A collection that the module lacks left all weights data.
    "params= misspelt": (
        lambda: wrapped(params="parms").apply({"params": PARAMS}, X),
        ValueError,
        r"wrap: params=\('parms',\) names no collection .* collections are params",
    ),
    "params= of nothing": (lambda: wrapped(params=()), TypeError, OF_PARAMS),
    "params= a tree": (lambda: wrapped(params=PARAMS), TypeError, OF_PARAMS),
    "params= a flag": (lambda: wrapped(params=True), TypeError, f"{OF_PARAMS}.* got True"),
    "a map of parts of pairs": (
        lambda: jaxmp.PolicyMap((("head",),), default="float32"),
        TypeError,
        "PolicyMap: overrides takes a mapping",
    ),
    "keep_float32 of nothing": (
        lambda: jaxmp.policies.keep_float32(policy="mixed_bfloat16"),
        TypeError,
        "keep_float32: give patterns or classes",
    ),
    "autocast of a class": (
        lambda: jaxmp.autocast(nn.Dense, "mixed_bfloat16"),
        TypeError,
        "autocast: fn is the class Dense, and making an instance computes nothing",
    ),
    "explain of a class": (
        lambda: jaxmp.explain(nnx.Linear, "mixed_bfloat16"),
        TypeError,
        "explain: fn is the class Linear",
    ),
    "sites of a list": (lambda: capture(sites=["a"]), TypeError, "capture: sites is a pattern"),
    "a limit in words": (lambda: capture(limit="1GB"), TypeError, "capture: limit is a number of"),
    "half_dtype of a word": (
        lambda: dtypes.half_dtype("gpu"),
        TypeError,
        "half_dtype: device must be a jax.Device",
    ),
    "describe of a chip": (
        lambda: devices.describe("gpu-h100"),
        TypeError,
        r"describe: device must be a jax.Device.* jaxmp.devices.chips\(\)",
    ),
    "a checkpoint policy that is called": (
        lambda: jax.checkpoint(loss, policy=checkpoint_policies.long_products("attention")),
        TypeError,
        "offload_products, products are policies themselves",
    ),
    "a flag in words": (
        lambda: jaxmp.master_weights(ADAM, remainder="yes"),
        TypeError,
        "master_weights: remainder must be True or False; got 'yes'",
    ),
    "a key in words": (
        lambda: jaxmp.master_weights(ADAM, stochastic_rounding=True, key="a"),
        TypeError,
        f"master_weights: {OF_KEY}.* got 'a'",
    ),
    "a key of a fraction": (
        lambda: jaxmp.store_state(ADAM, "int8", key=1.5),
        TypeError,
        f"store_state: {OF_KEY}",
    ),
    "several keys": (
        lambda: jaxmp.store_state(ADAM, "int8", key=jax.random.split(KEY)),
        TypeError,
        f"store_state: {OF_KEY}",
    ),
    "blocks of 16 bits": (
        lambda: jaxmp.store_state(ADAM, "bfloat16", block_size=64),
        ValueError,
        "store_state: block_size=64 is of 8 bits",
    ),
    "a primitive of no name": (
        lambda: jaxmp.get_policy("mixed_bfloat16,ops=ma\udcd7x:full_precision"),
        ValueError,
        r"ops has 'ma\\udcd7x', which is not Unicode text",
    ),
    "a key for masters": (
        lambda: jaxmp.master_weights(ADAM, key=3),
        ValueError,
        "master_weights: key is for stochastic_rounding=True",
    ),
    # What comes after masters changes the updates: parameters are not those of the masters.
    "masters in front in a chain": (
        lambda: jaxmp.value_and_grad(loss, CHAINED.init(HALF))(HALF, X),
        ValueError,
        "value_and_grad: in an optax.chain another transformation comes after master_weights",
    ),
    "masters in front in a train state": (
        lambda: jaxmp.TrainState.create(
            apply_fn=MODEL.apply,
            params=HALF,
            tx=optax.chain(jaxmp.master_weights(ADAM), optax.scale(0.5)),
        ).apply_gradients(grads=HALF),
        ValueError,
        "comes after master_weights",
    ),
    "a train state of another optimizer": (
        lambda: state(tx=optax.sgd(0.1)),
        ValueError,
        "TrainState.apply_gradients: the state is another optimizer's",
    ),
    "a train state with a bare state": (
        lambda: state(opt_state=ADAM.init(PARAMS)),
        TypeError,
        r"dynamic_loss_scale: update takes .* got 'tuple'",
    ),
    "select with the trees first": (
        lambda: tree.select(PARAMS, True, PARAMS),
        TypeError,
        "select: condition, which comes first",
    ),
    "select of several conditions": (
        lambda: tree.select(jnp.array([True, False]), PARAMS, PARAMS),
        TypeError,
        "select: condition, which comes first",
    ),
    "select of two structures": (
        lambda: tree.select(jnp.array(True), PARAMS, {"w": X}),
        ValueError,
        "select: the two trees must have one structure",
    ),
    "a split of 16 bits": (
        lambda: tree.split_float32(HALF["bias"]),
        TypeError,
        "split_float32: x must be an array of float32; got bfloat16",
    ),
    "a join in the other order": (
        lambda: tree.join_float32(jnp.ones(3, jnp.uint16), jnp.ones(3, jnp.bfloat16)),
        TypeError,
        "join_float32: half must be an array of bfloat16; got uint16",
    ),
    "a lock named by a number": (
        lambda: jaxmp.testing.assert_precision_locked(loss, 3),
        TypeError,
        "lock: path, the second argument, must be a file's; got 3",
    ),
}


def test_wrong_uses_are_refused_by_name() -> None:
    for name, (call, error, message) in WRONG.items():
        with case(name), pytest.raises(error, match=message):
            call()
