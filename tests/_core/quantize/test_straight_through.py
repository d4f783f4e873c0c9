"""Training for few bits: the forward pass is that of the model that is served, to the bit."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp

from support import gaussian, random_key, slow_when

POLICY = "mixed_bfloat16"
FORMATS = (
    ("int8", "row"),
    ("int8", "tensor"),
    ("int4", "block"),
    ("int4", "row"),
    ("float8", "row"),
    ("e2m1", "block"),
)
X = np.random.default_rng(2).normal(size=(32, 64)).astype("float32")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(128, name="up")(x))), None


class Linen(nn.Module):
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(layer, length=3, **options)()(x, None)[0]
        for i in range(2):
            x, _ = layer(name=f"layers_{i}")(x, None)
        return x


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@functools.cache
def function():
    params = {
        "table": {"embedding": gaussian(0, 64, 64, scale=1 / 8)},
        "up": gaussian(1, 64, 128, scale=1 / 8),
    }

    def model(params, x):
        rows = params["table"]["embedding"][jnp.arange(32) % 7]
        return jnp.tanh((x + rows) @ params["up"]) @ params["up"].T @ params["table"]["embedding"].T

    return model, params


@functools.cache
def linen(scan=False, remat=False):
    model = Linen(scan, remat)
    return model.apply, jax.jit(model.init)(random_key(0), X)


def module():
    graphdef, state = nnx.split(Nnx())
    return lambda state, x: nnx.merge(graphdef, state)(x), state


MODELS = {
    "function": function,
    "linen": linen,
    "scan": functools.partial(linen, scan=True),
    "scan of remat": functools.partial(linen, scan=True, remat=True),
    "nnx": module,
}


# Each format, and each way to share a scale; "linen" and "scan" are less of the same.
QUICK = {"function": FORMATS[4:], "scan of remat": FORMATS[2:3], "nnx": FORMATS[1:2]}


@pytest.mark.parametrize("fmt", FORMATS, ids="-".join)
@slow_when(lambda kind, fmt: fmt not in QUICK.get(kind, ()))
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_trained_is_what_is_served(kind, fmt):
    model, params = MODELS[kind]()
    quantize = functools.partial(
        jaxmp.quantize, format=fmt[0], granularity=fmt[1], block_size=32, min_size=4096
    )

    def trained(params, x):
        return model(quantize(params, straight_through=True), x)

    def loss(fn, params, x):
        return jnp.mean(fn(params, x).astype(jnp.float32) ** 2)

    low = jax.jit(jaxmp.autocast(trained, POLICY))
    served = jax.jit(jaxmp.autocast(model, POLICY))(quantize(params), X)
    np.testing.assert_array_equal(low(params, X), served)
    assert np.abs(served - reference(model)(params, X)).max() > 1e-3  # it is rounded
    # The gradient is that at the rounded weights: in bfloat16 as exactly as products are.
    rounded = reference(lambda params: jaxmp.dequantize(quantize(params)))(params)
    exact = reference(jax.grad(functools.partial(loss, model)))(rounded, X)
    same = reference(jax.grad(functools.partial(loss, trained)))(params, X)
    grads = reference(jax.grad(functools.partial(loss, low)))(params, X)
    for want, one, got in zip(*map(jax.tree.leaves, (exact, same, grads)), strict=True):
        assert one.dtype == got.dtype == jnp.float32
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


def test_weights_that_were_trained_for_it_lose_less():
    """A teacher of two layers, learned by a student that is served in int4 by row."""
    few = functools.partial(jaxmp.quantize, format="int4", granularity="row", min_size=1)
    r = np.random.default_rng(1)
    params = {
        k: np.float32(r.normal(size=n)) for k, n in {"up": (32, 64), "down": (64, 16)}.items()
    }
    student = {k: w + np.float32(0.3 * r.normal(size=w.shape)) for k, w in params.items()}
    x = np.float32(r.normal(size=(256, 32)))

    def model(params, x):
        return jnp.tanh(x @ params["up"] / 6) @ params["down"] / 8

    target, tx = reference(model)(params, x), optax.adam(3e-3)

    def trained_with(rounded):
        loss = jaxmp.autocast(lambda p: jnp.mean((model(rounded(p), x) - target) ** 2), POLICY)

        @jax.jit
        def run(p):
            def step(carry, _):
                p, state = carry
                updates, state = tx.update(jax.grad(loss)(p), state, p)
                return (optax.apply_updates(p, updates), state), None

            return jax.lax.scan(step, (p, tx.init(p)), None, length=300)[0][0]

        served = few(run(student))
        return float(jnp.mean((jaxmp.autocast(model, POLICY)(served, x) - target) ** 2))

    after, before = (
        trained_with(functools.partial(few, straight_through=True)),
        trained_with(lambda p: p),
    )
    assert after < 0.9 * before


@pytest.mark.slow
def test_under_fsdp_it_is_the_same():
    model, params = function()
    few = functools.partial(jaxmp.quantize, format="int8", straight_through=True)
    fn = jax.jit(jax.grad(jaxmp.autocast(lambda p, x: jnp.mean(model(few(p), x) ** 2), POLICY)))
    want = fn(params, X)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        split = jax.device_put(params, jax.NamedSharding(mesh, P("data")))
        got = fn(split, jax.device_put(X, jax.NamedSharding(mesh, P("data"))))
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.linalg.norm(one - other) <= 0.01 * np.linalg.norm(other)


def test_a_weight_that_is_quantized_is_refused():
    q = jaxmp.quantize({"w": jnp.ones((64, 64))})
    with pytest.raises(ValueError, match="w is quantized already"):
        jaxmp.quantize(q, straight_through=True)
