"""Keys of a PolicyMap for modules in functions with derivative rules of their own."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._core.jaxprs.walk import equations

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
BF16 = "mixed_bfloat16"


def call(module, x):
    return module(x)


def with_rule(module, x):
    """Calls a module in a function whose rule is the module's own derivative."""
    pull = {"forward_fn": lambda m, x: nn.vjp(call, m, x), "backward_fn": lambda v, g: v(g)}
    return nn.custom_vjp(call, **pull)(module, x)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(16, name="up")(x))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        layers = nn.scan(lambda m, x, _: (m(x), None), **options)
        return layers(Dense(name="scanned"), x, None)[0]


class Around(nn.Module):
    """A module that calls another in a function with a rule, in its own `__call__`."""

    @nn.compact
    def __call__(self, x):
        return with_rule(Dense(name="inside"), x)


class Model(nn.Module):
    layers: type = Dense

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="head")(with_rule(self.layers(name="layers"), x))


class InScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        layers = nn.scan(lambda m, x, _: (with_rule(m, x), None), **options)
        return nn.Dense(5, name="head")(layers(Dense(name="layers"), x, None)[0])


def products(fn, *args):
    """Returns the number of products in the program of a call, by the dtype they multiply in."""
    eqns = equations(jax.make_jaxpr(fn)(*args).jaxpr.eqns)
    return Counter(str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "dot_general")


def step(model, keys, default):
    """Returns the parameters, and the gradient function of a wrapped model."""
    wrapped = jaxmp.wrap(model, jaxmp.PolicyMap(keys, default=default))
    return model.init(jax.random.key(0), X), jax.grad(
        lambda p, x: wrapped.apply(p, x).sum(), (0, 1)
    )


MODELS = {
    "a module": (Model(), "layers"),
    "a module of the module": (Model(), "layers/up"),
    "its class": (Model(), Dense),
    "a scan": (Model(Scanned), "layers/**"),
    "in a scan": (InScan(), "layers/up"),
    "remat": (Model(nn.remat(Dense)), "layers"),
    "jit": (Model(nn.jit(Dense)), "layers"),
    "a rule in a rule": (Model(Around), "layers/inside"),
}


@pytest.mark.parametrize(("inside", "default"), [("float32", BF16), (BF16, "float32")])
@pytest.mark.parametrize("name", MODELS)
def test_a_key_holds_in_the_rules_of_a_function(name, inside, default):
    model, key = MODELS[name]
    params, gradient = step(model, {key: inside}, default)
    again = name == "remat"  # the forward product
    expected = {inside.removeprefix("mixed_"): 3 + again, default.removeprefix("mixed_"): 3}
    assert products(gradient, params, X) == expected


class ByHand(nn.Module):
    """A layer whose backward pass is written out."""

    @nn.compact
    def __call__(self, x):
        def forward(layer, x):
            return layer(x), (x, layer.variables["params"]["kernel"])

        def backward(saved, g):
            x, kernel = saved
            return {"params": {"kernel": x.T @ g, "bias": g.sum(0)}}, g @ kernel.T

        run = nn.custom_vjp(call, forward_fn=forward, backward_fn=backward)
        return nn.Dense(5, name="head")(run(nn.Dense(16, name="layer"), x))


@pytest.mark.parametrize(("inside", "default"), [("float32", BF16), (BF16, "float32")])
def test_a_rule_by_hand_has_the_policy_of_the_products_it_is_for(inside, default):
    params, gradient = step(ByHand(), {"layer": inside}, default)
    expected = {inside.removeprefix("mixed_"): 3, default.removeprefix("mixed_"): 3}
    assert products(gradient, params, X) == expected


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="down")(jnp.tanh(nn.Dense(16, name="up")(x)))


@pytest.mark.parametrize(("inside", "default"), [("float32", BF16), (BF16, "float32")])
def test_modules_of_one_function_keep_their_own_policies(inside, default):
    keys = {"layers/down": default, "layers": inside}  # of `up` alone
    params, gradient = step(Model(Two), keys, default)
    expected = {inside.removeprefix("mixed_"): 3, default.removeprefix("mixed_"): 6}
    assert products(gradient, params, X) == expected
