"""Keys of a PolicyMap, and backward passes that multiply outside of modules."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp

from linen_models import BF16, F16, all_counts
from support import case

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def gradients(params, x, g, multiply):
    """Returns the gradients of two layers with a tanh between: five products."""
    up, down = params["up"], params["down"]
    hidden = jnp.tanh(multiply(x, up["kernel"]) + up["bias"])
    before = multiply(g, down["kernel"].T) * (1 - hidden**2)
    return {
        "up": {"kernel": multiply(x.T, before), "bias": before.sum(0)},
        "down": {"kernel": multiply(hidden.T, g), "bias": g.sum(0)},
    }, multiply(before, up["kernel"].T)


class Down(nn.Dense):
    """A layer with a class of its own, for a key."""


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Down(16, name="down")(jnp.tanh(nn.Dense(16, name="up")(x)))


class InRegion(nn.Module):
    @nn.compact
    def __call__(self, x):
        down = nn.Dense(16, name="down")
        return jaxmp.full_precision(down.__call__)(jnp.tanh(nn.Dense(16, name="up")(x)))


class ByHand(nn.Module):
    multiply: object = jnp.matmul
    layers: type = Two

    @nn.compact
    def __call__(self, x):
        def two(layers, x):
            return layers(x)

        def forward(layers, x):
            return layers(x), (layers.variables["params"], x)

        def backward(saved, g):
            params, dx = gradients(*saved, g, self.multiply)
            return {"params": params}, dx

        run = nn.custom_vjp(two, forward_fn=forward, backward_fn=backward)
        return nn.Dense(5, name="head")(run(self.layers(name="layers"), x))


class Derived(nn.Module):
    """A model whose rule is a derivative of JAX's, of a function with a product of its own."""

    @nn.compact
    def __call__(self, x):
        def product(layers, x, w):
            return layers(x) @ w

        def forward(layers, x, w):
            return nn.vjp(product, layers, x, w)

        run = nn.custom_vjp(product, forward_fn=forward, backward_fn=lambda pull, g: pull(g))
        w = self.param("w", nn.initializers.lecun_normal(), (16, 5))
        return run(Two(name="layers"), x, w)


class Rematerialized(nn.Module):
    """A model whose backward pass calls modules."""

    @nn.compact
    def __call__(self, x):
        def forward(layers, x):
            return layers(x), (layers.variables, x)

        def backward(saved, g):
            return jax.vjp(Two(parent=None).apply, *saved)[1](g)

        run = nn.custom_vjp(Two.__call__, forward_fn=forward, backward_fn=backward)
        return run(Two(name="layers"), x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(16, name="dense")(x), None


class ScannedByHand(nn.Module):
    """A model of scanned layers whose backward pass has one product for each."""

    @nn.compact
    def __call__(self, x):
        def backward(params, g):
            kernels = params["params"]["dense"]["kernel"]
            zeros = jax.tree.map(jnp.zeros_like, params)
            return zeros, g @ kernels[1].T @ kernels[0].T

        def call(layers, x):
            return layers(x, None)[0]

        run = nn.custom_vjp(
            call,
            forward_fn=lambda layers, x: (call(layers, x), layers.variables),
            backward_fn=backward,
        )
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        return run(nn.scan(Layer, **options)(name="layers"), x)


def counts(model, keys, default=BF16):
    """Returns the products forward and backward of a wrapped Linen model, by their dtypes."""
    wrapped = jaxmp.wrap(model, jaxmp.PolicyMap(keys, default=default))
    return all_counts(wrapped, model.init(jax.random.key(0), X), X)


@pytest.mark.parametrize(("inside", "default"), [("float32", BF16), (BF16, "float32")])
def test_a_backward_pass_by_hand_over_several_policies_is_refused(inside, default):
    message = (
        rf"wrap: a backward pass by hand \({__name__}.py:\d+\) multiplies outside of modules, "
        rf"where the PolicyMap's key 'layers/down' \({inside}\) .* would run under {default}, "
    )
    with pytest.raises(ValueError, match=message):
        counts(ByHand(), {"layers/down": inside}, default)
    with pytest.raises(ValueError, match=r"keys 'layers/up' \(float32\) and 'Dense' \(mixed_f"):
        counts(ByHand(), {"layers/up": "float32", nn.Dense: F16})


def test_a_backward_pass_by_hand_may_say_its_policy():
    for multiply, expected in [
        (jaxmp.full_precision(jnp.matmul), {"float32": 6, "bfloat16": 4}),
        (jaxmp.autocast(jnp.matmul, BF16), {"float32": 1, "bfloat16": 9}),
    ]:
        with case(expected):
            assert counts(ByHand(multiply), {"layers/down": "float32"}) == expected


def test_what_does_not_change_products_is_no_other_policy():
    for keys in (
        {"layers/down": BF16},
        {"layers/down": f"{BF16},softmax=bf16"},
        {"layers/down": "c=bf16,o=bf16"},
        {"head": BF16},
    ):
        with case(keys):
            assert counts(ByHand(), keys) == {"bfloat16": 10}
    # A region of the author's is no key's.
    assert counts(ByHand(layers=InRegion), {"head": BF16}) == {"float32": 1, "bfloat16": 9}


def test_a_backward_pass_by_hand_of_a_scan_has_the_policy_of_the_scan():
    assert counts(ScannedByHand(), {"layers": "float32"}) == {"float32": 3}
    with pytest.raises(ValueError, match=r"'layers/dense' \(float32\) would have no effect"):
        counts(ScannedByHand(), {"layers/dense": "float32"})


def test_a_derivative_of_jax_has_the_policies_of_its_modules():
    expected = {"float32": 3, "bfloat16": 6}
    assert counts(Derived(), {"layers/down": "float32"}) == expected
    assert counts(Derived(), {"layers/up": "float32"}) == expected
    assert counts(Rematerialized(), {Down: "float32"}) == {"float32": 4, "bfloat16": 4}


# --- NNX -----------------------------------------------------------------------------------------


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.down = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


@nnx.custom_vjp
def by_hand(layers, x):
    return layers(x)


def forward_by_hand(layers, x):
    params = {
        name: {"kernel": layer.kernel[...], "bias": layer.bias[...]}
        for name, layer in (("up", layers.up), ("down", layers.down))
    }
    return layers(x), (params, x)


def backward_by_hand(saved, g):
    (of_layers, _), g = g
    params, dx = gradients(*saved, g, jnp.matmul)
    for name, layer in params.items():
        for field, gradient in layer.items():
            of_layers[name][field][...] = gradient
    return of_layers, dx


by_hand.defvjp(forward_by_hand, backward_by_hand)


def product(layers, x):
    return layers(x) @ x


def pullback(fn, layers, x):
    graph, state = nnx.split(layers)
    return jax.vjp(lambda state, x: fn(nnx.merge(graph, state), x), state, x)


derived = nnx.custom_vjp(product)
derived.defvjp(functools.partial(pullback, product), lambda pull, g: pull(g[1]))

rematerialized = nnx.custom_vjp(Layers.__call__)
rematerialized.defvjp(
    lambda layers, x: (layers(x), (layers, x)),
    lambda saved, g: pullback(Layers.__call__, *saved)[1](g[1]),
)


class Model(nnx.Module):
    def __init__(self, call):
        self.layers, self.call = Layers(nnx.Rngs(0)), call

    def __call__(self, x):
        return self.call(self.layers, x)


def nnx_counts(call, keys):
    graph, state = nnx.split(jaxmp.wrap(Model(call), jaxmp.PolicyMap(keys, default=BF16)))

    class Split:
        @staticmethod
        def apply(state, x):
            return nnx.merge(graph, state)(x)

    return all_counts(Split, state, X)


def test_nnx_rules():
    assert nnx_counts(derived, {"layers/down": "float32"}) == {"float32": 3, "bfloat16": 6}
    assert nnx_counts(derived, {"layers": "float32"}) == {"float32": 6, "bfloat16": 3}
    assert nnx_counts(rematerialized, {"layers/down": "float32"}) == {"float32": 4, "bfloat16": 4}
    assert nnx_counts(by_hand, {"layers": "float32"}) == {"float32": 7}
    message = r"wrap: a backward pass by hand .* key 'layers/down' \(float32\) would have no eff"
    with pytest.raises(ValueError, match=message):
        nnx_counts(by_hand, {"layers/down": "float32"})
