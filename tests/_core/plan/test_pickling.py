"""Transformed functions are functions to who looks at them, and can be pickled."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmp

from constructs import BF16, W, X, assert_bitwise


def dense(x, w, *, scale=1.0):
    """A layer."""
    return jnp.tanh(x @ w) * scale


@functools.partial(jaxmp.autocast, policy=BF16)
def decorated(x, w):
    return jnp.tanh(x @ w)


class Model:
    def __init__(self):
        self.w = W

    @functools.partial(jaxmp.autocast, policy=BF16)
    def __call__(self, x):
        return x @ self.w

    @classmethod
    def name(cls):
        return cls.__name__


class Linen(nn.Module):
    @nn.compact
    @functools.partial(jaxmp.autocast, policy=BF16)
    def by_argument(self, x):
        return x @ x.T

    def __call__(self, x):
        return self.by_argument(x)


jaxmp_dense = jaxmp.autocast(dense, BF16)
marked = jaxmp.full_precision(dense)
reduced = jaxmp.reduced_precision(dense)


@pytest.mark.parametrize("fn", [jaxmp_dense, marked, reduced, decorated])
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_a_function_of_a_module_pickles(module, fn) -> None:
    fn(X, W)  # what it keeps between calls stays behind
    again = pickle.loads(module.dumps(fn))
    assert_bitwise(again(X, W), fn(X, W))
    assert (again is decorated) == (fn is decorated)
    assert inspect.signature(again) == inspect.signature(fn)


@pytest.mark.parametrize("make", [lambda f: jaxmp.autocast(f, BF16), jaxmp.full_precision])
def test_closures_and_lambdas_cloudpickle(make) -> None:
    offset = 2.0
    fn = make(lambda x: x @ x.T + offset)
    again = pickle.loads(cloudpickle.dumps(fn))
    assert_bitwise(again(X), fn(X))
    nested = pickle.loads(cloudpickle.dumps(jaxmp.autocast(make(jax.jit(fn)), "mixed_float16")))
    assert nested(X).shape == (6, 6)


def test_copies() -> None:
    for copied in (copy.copy(jaxmp_dense), copy.deepcopy(jaxmp_dense)):
        assert_bitwise(copied(X, W), jaxmp_dense(X, W))


def test_it_looks_like_the_function() -> None:
    assert jaxmp_dense.__name__ == jaxmp_dense.__qualname__ == "dense"
    assert jaxmp_dense.__doc__ == "A layer."
    assert jaxmp_dense.__module__ == __name__
    assert jaxmp_dense.__wrapped__ is dense
    assert inspect.unwrap(jaxmp_dense) is dense
    assert inspect.signature(jaxmp_dense) == inspect.signature(dense)
    assert callable(jaxmp_dense)
    assert repr(jaxmp_dense).startswith("autocast(dense, ")
    assert {jaxmp_dense: 1}[jaxmp_dense] == 1
    twice = jaxmp.autocast(jaxmp_dense, "float32")
    assert twice.__wrapped__ is jaxmp_dense
    assert twice(X, W).dtype == jnp.float32


def test_keyword_arguments_by_name() -> None:
    jitted = jax.jit(jaxmp_dense, static_argnames="scale")
    assert_bitwise(
        jitted(X, W, scale=2.0), jax.jit(lambda x, w: jaxmp_dense(x, w, scale=2.0))(X, W)
    )


def test_methods_bind() -> None:
    model = Model()
    assert model(X).shape == X.shape
    assert Model.__call__(model, X).shape == X.shape
    bound = jaxmp.autocast(model.__call__, BF16)
    assert_bitwise(bound(X), model(X))
    variables = Linen().init(jax.random.key(0), X)
    assert Linen().apply(variables, X).shape == (6, 6)


def test_callables_of_every_kind() -> None:
    class Called:
        def __call__(self, x):
            return x @ W

    for fn in (Called(), functools.partial(dense, w=W), functools.partial(jnp.matmul, b=W)):
        assert jaxmp.autocast(fn, BF16)(X).shape == X.shape
        assert jax.jit(jaxmp.autocast(fn, BF16))(X).shape == X.shape
