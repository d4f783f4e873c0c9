"""Traced arrays where JAX does not see them are refused, other results that are no arrays not."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

from constructs import BF16, X
from support import ones


class Out:
    def __init__(self, y):
        self.y = y

    def method(self):
        return self.y


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


@dataclasses.dataclass(frozen=True)
class Plain:
    y: jax.Array
    name: str = "plain"


@jax.tree_util.register_pytree_node_class
class Keeping:
    """A pytree that keeps a method of another object, as distributions of distrax do."""

    def __init__(self, y):
        self.y, self.method = y, Out([y]).method

    def tree_flatten(self):
        leaves, tree = jax.tree.flatten({"y": self.y, "method": self.method})
        return leaves[1:], (leaves[0], tree)

    @classmethod
    def tree_unflatten(cls, aux, children):
        new = object.__new__(cls)
        vars(new).update(jax.tree.unflatten(aux[1], [aux[0], *children]))
        return new


def calling(fn):
    return lambda: fn()


def returning(value):
    return lambda: value


def generator(x):
    yield x @ x.T


async def coroutine(x):
    return x


class Color(enum.Enum):
    RED = 1


HOLDERS = {
    "an attribute": (lambda x: Out(x @ x.T), "result, a Out"),
    "a slot": (lambda x: {"a": Slotted(x)}, r"result\['a'\], a Slotted"),
    "a dataclass": (lambda x: (1, [Plain(x + 1)]), r"result\[1\]\[0\], a Plain"),
    "an attribute of an attribute": (lambda x: Out(Out(x + 1)), "result, a Out"),
    "a list in an attribute": (lambda x: Out([{"y": x}]), "result, a Out"),
    "a closure": (lambda x: (x.sum(), lambda: x + 1), r"result\[1\], a function"),
    "a closure of a closure": (lambda x: calling(lambda: x), "a function"),
    "a default": (lambda x: lambda y=x: y, "a function"),
    "a partial": (lambda x: functools.partial(jnp.add, x), "a partial"),
    "a bound method": (lambda x: Out(x).method, "a method"),
    "a jitted closure": (lambda x: jax.jit(lambda: x), "PjitFunction"),
    "a generator": (generator, "a generator"),
    "a map": (lambda x: map(jnp.sin, [x]), "a map"),
    "a method among static data": (lambda x: {"a": Keeping(x)}, "a Keeping, which jax.jit cannot"),
    "that of an inner pytree": (lambda x: Keeping({"b": Keeping(x)}), "a Keeping, which jax.jit"),
    "a cached function": (lambda x: functools.lru_cache(lambda: x), "lru_cache"),
}


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # so does JAX
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_held_tracer_is_refused_at_the_call(run) -> None:
    for fn, place in HOLDERS.values():
        with pytest.raises(TypeError, match=place) as caught:
            run(lambda x, fn=fn: (jaxmp.autocast(fn, BF16)(x), x)[1])(X)
        message = str(caught.value)
        assert message.startswith(f"autocast: {fn.__name__} returns")
        assert "float32[" in message
        assert "register" in message


def test_a_coroutine_is_refused() -> None:
    made = []

    def fn(x):
        made.append(coroutine(x))
        return made[-1]

    with pytest.raises(TypeError, match="a coroutine"):
        jaxmp.autocast(fn, BF16)(X)
    for one in made:  # else Python warns that nobody awaited it, in whichever test collects it
        one.close()


def test_a_wrapped_function_of_a_module_is_named() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x), Out(x)

    model = jaxmp.wrap(Model(), BF16)
    params = model.init(jax.random.key(0), X)
    with pytest.raises(TypeError, match=r"not a pytree and holds a traced array.*a Out"):
        model.apply(params, X)


PASSED = {
    "nothing": None,
    "a string": "label",
    "an enum": Color.RED,
    "a class": Out,
    "a module": types,
    "a dtype": np.dtype("float32"),
    "a NumPy scalar": np.float32(2),
    "strings": np.array(["a"]),
    "a function": lambda y: y + 1,
    "a jitted function": jax.jit(lambda y: y + 1),
    "JAX's": jnp.tanh,
    "one with a rule": jax.nn.relu,
    "a closure over an array": returning(ones(2)),
    "an object with an array": Out(ones(2)),
    "an object with an abstract array": Out(jax.ShapeDtypeStruct((2,), jnp.float32)),
    "a partial": functools.partial(jnp.add, 1),
    "a Linen module": nn.Dense(3),
    "its method": nn.Dense(3).apply,
    "a logger": logging.getLogger("jaxmp"),
    "a dataclass": Plain("no array"),
    "a mesh": jax.sharding.PartitionSpec("x"),
    "an initializer": jax.nn.initializers.normal(),
}


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_holds_no_tracer_is_passed_on(run) -> None:
    found = []

    def outer(x):
        for value in PASSED.values():
            y, out = jaxmp.autocast(lambda x, value=value: (x @ x.T, value), BF16)(x)
            found.append(out)
        return y

    run(outer)(X)
    for out, (name, value) in zip(found, PASSED.items(), strict=True):
        assert out is value, name


def test_an_optimizer_is_passed_on() -> None:
    tx = optax.adam(1e-3)
    assert jaxmp.autocast(lambda x: (x, tx), BF16)(X)[1] == tx


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.vmap(f, axis_size=2)])
def test_tracers_of_a_trace_around_stay_valid(transform) -> None:
    """They are constants of the function, and what holds them is used within that trace."""

    def outer(x):
        _, held = jaxmp.autocast(lambda z: (z @ z.T, Out(x)), BF16)(X)
        return jnp.sum(held.y * 2)

    x = jnp.ones(2) if transform not in (jax.jit, jax.grad) else jnp.float32(1)
    assert jax.tree.all(jax.tree.map(lambda y: bool((y == 2).all()), transform(outer)(x)))


def test_what_an_object_kept_of_a_trace_long_over_is_not_autocasts() -> None:
    """As in a plain call: JAX speaks up where it is used."""
    old = Out(None)
    for trace in (jax.make_jaxpr, jax.vmap, jax.jit):
        trace(lambda x: setattr(old, "y", x + 1) or x)(X)
        assert jaxmp.autocast(lambda x: (x, old), BF16)(X)[1] is old


def test_pytrees_are_pytrees() -> None:
    def fn(x):
        y, pullback = jax.vjp(lambda a: a @ a.T, x)
        return {"pullback": pullback, "partial": jax.tree_util.Partial(jnp.add, y)}

    out = jax.jit(jaxmp.autocast(fn, BF16))(X)
    assert out["partial"](1.0).shape == (6, 6)
    assert out["pullback"](jnp.ones((6, 6)))[0].dtype == jnp.float32
