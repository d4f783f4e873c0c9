"""Arguments and results of an autocast function: pytrees, static values, what comes back."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_reference import reference

import jaxmp
from jaxmp._tools.lock.lock import lock

from constructs import BF16, CONSTRUCTS, XWV, V, W, X, assert_bitwise, assert_close
from support import autocast, iter_eqns, jaxpr_of


class Pair(NamedTuple):
    first: Any
    second: Any


@partial(jax.tree_util.register_dataclass, data_fields=["w", "count"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    w: Any
    count: Any
    name: str


def test_pytrees_in_and_out() -> None:
    def fn(batch, params, *, scale):
        h = batch["x"] @ params.first.w * scale
        return {"out": Pair(h, None), "count": params.first.count + 1, "name": params.first}

    params = Pair(Layer(W, jnp.int32(4), "dense"), None)
    fns = (autocast(fn, BF16), fn)
    got, want = (reference(lambda *a, f=f: f(*a, scale=2.0))({"x": X}, params) for f in fns)
    assert got["name"].name == "dense"
    assert_close(got, want, dtype="bfloat16", depth=1)
    gradient = jax.grad(
        lambda p: autocast(fn, BF16)({"x": X}, p, scale=2.0)["out"].first.sum(), allow_int=True
    )
    gradient = jax.eval_shape(gradient, params)
    assert gradient.first.w.dtype == jnp.float32


@jax.tree_util.register_pytree_with_keys_class
class Distribution:
    """A class that computes with its arrays whenever JAX makes one, as those of TFP do."""

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = loc, scale
        self.precision = 1 / jnp.square(scale)

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return ((key("loc"), self.loc), (key("scale"), self.scale)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


def test_a_result_that_is_made_of_arrays_alone() -> None:
    """Not of shapes or variables in their place, in no tool either."""

    def fn(x: Any, w: Any) -> Any:
        return Distribution(x @ w, 2.0), {"name": "policy"}

    low = autocast(fn, BF16)
    for run in (low, jax.jit(lambda *args: low(*args)[0])):
        made = run(X, W)
        made = made[0] if isinstance(made, tuple) else made
        assert made.loc.dtype == jnp.float32
        assert made.precision == 0.25
    assert jaxmp.explain(low)(X, W).products() == {"bfloat16": 1}
    assert "bfloat16" in jaxmp.audit(low)(X, W).verdict()
    assert list(lock(low)(X, W).results) == ["0/loc"]  # a number is not an array
    assert jaxmp.parity(fn, low)(X, W).same


def test_static_keyword_string_and_callable_arguments() -> None:
    def fn(x, w, activation, mode, *, train, steps=1, key=None, names=("a", "b")):
        assert isinstance(train, bool)
        assert isinstance(steps, int)
        assert isinstance(mode, str)
        assert key is None
        if mode == "deep":
            for _ in range(steps):
                x = activation(x @ w)
        return x if train else -x

    cast = autocast(fn, BF16)
    for mode, train, steps in [("deep", True, 2), ("deep", False, 3), ("flat", True, 1)]:
        got = cast(X, W, jnp.tanh, mode, train=train, steps=steps)
        assert_close(
            got, fn(X, W, jnp.tanh, mode, train=train, steps=steps), dtype="bfloat16", depth=3
        )


def test_static_python_scalars_do_not_collide_in_the_cache() -> None:
    """`1`, `1.0` and `True` are equal and hash alike, and 0.0 is -0.0; they are other arguments."""
    cast = autocast(lambda x, s: (x * s, type(s).__name__), BF16)
    assert [cast(X, s)[1] for s in (1, 1.0, True, 1)] == ["int", "float", "bool", "int"]
    one = jnp.ones(())
    assert [bool(jnp.signbit(cast(one, s)[0])) for s in (0.0, -0.0)] == [False, True]


def test_results_that_are_not_arrays() -> None:
    def fn(x, w):
        return x @ w, "label", None, 3, 2.5, True, jnp.tanh

    got = autocast(fn, BF16)(X, W)
    assert got[1:] == ("label", None, 3, 2.5, True, jnp.tanh)
    assert type(got[3]) is int
    assert type(got[4]) is float
    assert type(got[5]) is bool


def test_argument_returned_unchanged() -> None:
    """A float32 argument that only passes through is returned bit for bit."""
    got = autocast(lambda x, w: (x, w, x @ w), BF16)(X, W)
    assert_bitwise(got[:2], (X, W))


@pytest.mark.parametrize("index", [0, 1])
def test_argument_returned_by_a_branch_is_exact(index: int) -> None:
    """Another branch's low result is widened; where both are low, so is the result."""

    def branches(x, w, index):
        return lax.switch(index, [lambda a: a, lambda a: a @ w], x)

    fn = autocast(branches, BF16)
    got = jax.jit(fn)(X, W, index)
    if index == 0:
        np.testing.assert_array_equal(got, X)
    else:
        np.testing.assert_allclose(got, X @ W, rtol=2**-6, atol=2**-6)

    def then_multiply(x, w, index):
        return branches(x @ w, w, index) @ w

    [step] = [
        e
        for e in iter_eqns(jaxpr_of(autocast(then_multiply, BF16), X, W, index))
        if e.primitive.name == "cond"
    ]
    assert step.outvars[0].aval.dtype == jnp.bfloat16


def test_a_constant_returned_by_a_branch_widens_nothing() -> None:
    def fn(x, w, flag):
        h = lax.cond(flag, lambda: x @ w, lambda: jnp.zeros_like(x))
        return jnp.sum(h)

    [step] = [
        e for e in iter_eqns(jaxpr_of(autocast(fn, BF16), X, W, True)) if e.primitive.name == "cond"
    ]
    assert step.outvars[0].aval.dtype == jnp.bfloat16


def test_shape_dtype_structs() -> None:
    spec = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W, V)]
    for case in CONSTRUCTS[::4]:
        if case.args is XWV:
            got = jax.eval_shape(autocast(case.fn, BF16), *spec)
            want = jax.eval_shape(case.fn, *spec)
            assert jax.tree.structure(got) == jax.tree.structure(want)
            assert [(a.shape, a.dtype) for a in jax.tree.leaves(got)] == [
                (a.shape, a.dtype) for a in jax.tree.leaves(want)
            ], case.fn.__name__


def test_output_dtype() -> None:
    def fn(x, w):
        return x @ w, x.astype(jnp.float16), jnp.argmax(x), {"loss": jnp.mean(x)}

    for policy, output in [
        (BF16, "float32"),
        ("p=f32,c=bf16,o=bf16", "bfloat16"),
        ("p=f32,c=bf16,o=f16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ]:
        out, half, index, metrics = jax.eval_shape(autocast(fn, policy), X, W)
        assert out.dtype == metrics["loss"].dtype == output, policy
        assert half.dtype == jnp.float16
        assert index.dtype == jnp.int32
        loss = lambda w: autocast(fn, policy)(X, w)[0].astype(jnp.float32).sum()  # noqa: B023, E731
        assert jax.eval_shape(jax.grad(loss), W).dtype == jnp.float32
    assert [y.dtype for y in autocast(fn, "bfloat16")(X, W)[:2]] == [jnp.bfloat16, jnp.float16]


def test_16_bit_param_dtype_narrows_float32_arguments() -> None:
    x = jnp.float32(1 + 2.0**-12) * jnp.ones((2, 2))
    ints = jnp.arange(3)
    out, passed = autocast(lambda x, i: (x, i), "bfloat16")(x, ints)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    assert passed.dtype == ints.dtype
    # Values beyond the range of the narrow type must not become infinite.
    huge = autocast(lambda x: x, "float16")(jnp.full((2,), jnp.finfo(jnp.float32).min))
    assert np.isfinite(np.asarray(huge, np.float32)).all()


@pytest.mark.parametrize("steers", [lambda x: x > 0, float])
def test_python_that_takes_the_value_of_an_array(steers: Any) -> None:
    """It runs under an eager `jax.grad`; autocast traces, and says so beside JAX's error."""

    def fn(w, x):
        return jnp.sum(x @ w) * (2.0 if steers(x.sum()) else 1.0)

    jax.grad(fn)(W, X)
    for run in (autocast(fn, BF16), jax.grad(autocast(fn, BF16)), jax.jit(autocast(fn, BF16))):
        with pytest.raises(jax.errors.ConcretizationTypeError) as error:
            run(W, X)
        [note] = [n for n in error.value.__notes__ if "autocast traces" in n]
        assert "jax.lax.cond" in note
        if steers is not float:
            assert isinstance(error.value, jax.errors.TracerBoolConversionError)
    flagged = autocast(lambda w, x, *, flag: fn(w, x) if flag else jnp.sum(w), BF16)
    np.testing.assert_array_equal(flagged(W, X, flag=False), jnp.sum(W))
