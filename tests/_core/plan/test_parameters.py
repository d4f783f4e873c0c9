"""Which arrays of a call are parameters: by position, by collection, by the kind of Variable."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmp
from jaxmp._core.plan.parameters import by_position, of_variables, overlooked, place_of

from constructs import BF16
from support import gaussian

W, B, X = gaussian(0, 16, 16), gaussian(1, 16), gaussian(2, 8, 16)


def found(fn: Callable[..., Any], argnums: Any, *args: Any, **kwargs: Any) -> list[bool]:
    return by_position(fn, argnums)(args, kwargs)


def of_three(a: Any, b: Any, c: Any) -> None: ...


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, [True, False, False]),
        (1, [False, True, False]),
        (-1, [False, False, True]),
        ((0, 2), [True, False, True]),
        ([], [False, False, False]),
    ],
)
def test_positions_are_those_of_jax_grad(argnums: Any, expected: list[bool]) -> None:
    assert found(of_three, argnums, X, X, X) == expected


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 2)])
def test_an_argument_by_its_name_has_its_position(argnums: Any) -> None:
    by_place = found(of_three, argnums, X, X, X)
    assert found(of_three, argnums, X, c=X, b=X) == by_place
    assert found(of_three, argnums, a=X, b=X, c=X) == by_place


def test_every_array_of_an_argument_is_what_it_is() -> None:
    assert found(of_three, 0, {"x": (X, X)}, [X], None) == [True, True, False]
    assert found(of_three, (0, 2), (X, 1.0, "name"), 2, X) == [True, True]


def test_of_variables_those_in_params_are() -> None:
    variables = {"batch_stats": {"mean": X}, "params": {"kernel": X, "bias": X}}
    assert found(of_three, 0, variables, X, X) == [False, True, True, False, False]
    assert not any(found(of_three, 1, variables, X, X)[:3])


def test_of_modules_every_param_is_wherever_it_is() -> None:
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(norm, is_leaf=lambda v: isinstance(v, nnx.Variable))
    expected = [isinstance(v, nnx.Param) for v in leaves]
    assert any(expected)
    assert not all(expected)
    assert found(of_three, 0, X, norm, X) == [True, *expected, False]
    assert of_variables((X, norm), {}) == [False, *expected]


@pytest.mark.parametrize("argnums", [3, -4, (0, 7)])
def test_a_position_that_is_none_is_refused(argnums: Any) -> None:
    with pytest.raises(ValueError, match=r"argnums=.*of_three has 3 arguments"):
        found(of_three, argnums, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("argnums", ["w", 1.0, (0, "w"), None, True])
def test_positions_are_integers(argnums: Any) -> None:
    for tool in (jaxmp.autocast, jaxmp.explain):
        if argnums is True:
            continue  # an int to Python, as to jax.grad
        with pytest.raises(TypeError, match="argnums must be an integer or a sequence of integers"):
            tool(of_three, BF16, argnums)(1.0, 2.0, 3.0)


def test_places_are_told_as_they_are_written() -> None:
    args, kwargs = ({"w": W, "flag": 3}, X), {"bias": B}
    assert place_of(args, kwargs, 0) == "argument 0['w']"
    assert place_of(args, kwargs, 1) == "argument 1"
    assert place_of(args, kwargs, 2) == "the argument 'bias'"


def layer(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w + b) @ w


def dtypes_of_add(argnums: Any) -> list[str]:
    rows = jaxmp.explain(layer, BF16, argnums)(W, B, X).rows
    return [row.dtype for row in rows if row.op == "add"]


def test_what_is_named_is_narrowed_beside_16_bits_and_nothing_else() -> None:
    assert dtypes_of_add((0, 1)) == ["bfloat16"]
    assert dtypes_of_add(0) == ["float32"]


def test_every_tool_takes_positions() -> None:
    step = jaxmp.autocast(layer, BF16, argnums=(0, 1))
    wide = jaxmp.audit(layer, policy=BF16, argnums=0)(W, B, X)
    named = jaxmp.audit(layer, policy=BF16, argnums=(0, 1))(W, B, X)
    assert wide != named  # what the bias is decides what is kept
    assert step(W, B, X).dtype == jnp.float32


def _program(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args)


def test_weights_that_nobody_names_are_found() -> None:
    def one(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ w

    def stack(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.sin(x), w)[0]

    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.sin(q) @ jnp.sin(k).T)

    assert overlooked(_program(lambda x, w: x @ w, X, W), [False, False]) is None  # either may be
    assert overlooked(_program(one, X, W), [False, False]) == ([1], 1.0)
    assert overlooked(_program(one, X, W), [False, True]) is None
    assert overlooked(_program(stack, X, jnp.stack([W, W])), [False, False]) == ([1], 1.0)
    assert overlooked(_program(attention, X, X), [False, False]) is None
    two = _program(lambda x, v, w: jnp.tanh(jnp.sin(x) @ v) @ w, X, W, W)
    assert overlooked(two, [False, True, False]) is None  # no more than half
    assert overlooked(two, [False, False, False]) == ([1, 2], 1.0)
    # Divided by its norm, a parameter is one; multiplied by one, as after a normalization, not.
    normed = _program(lambda x, w, u: x @ (w / jnp.sum(u @ w)), X, W, W)
    assert overlooked(normed, [False, True, False]) is None
    scaled = _program(lambda x, w, s: (x * s) @ w, X, W, W[0, :1])
    assert overlooked(scaled, [False, False, True]) == ([1], 1.0)


def test_they_are_named_in_a_warning_once() -> None:
    def fn(scale: jax.Array, x: jax.Array, net: dict[str, jax.Array]) -> jax.Array:
        return jnp.tanh(jnp.sin(x) @ net["w"]) @ net["w"] * scale

    cast = jaxmp.autocast(fn, BF16)
    said = r"100% of the FLOPs of the layers of fn read argument 2\['w'\]"
    with pytest.warns(UserWarning, match=said):
        cast(B, X, {"w": W})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast(B, X, {"w": W})
        jaxmp.autocast(fn, BF16, argnums=2)(B, X, {"w": W})


def test_all_of_them_are_named() -> None:
    def fn(_: Any, x: jax.Array, *ws: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(jnp.sin(x) @ w)
        return x

    for count, named in ((2, "argument 2, argument 3, which"), (5, "argument 4 and 2 more, which")):
        with pytest.warns(UserWarning, match=named):
            jaxmp.autocast(fn, BF16)((), X, *[W] * count)


def test_a_wrapped_module_knows_its_variables_wherever_they_stand() -> None:
    model = jaxmp.wrap(nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(16)]), BF16)
    variables = model.init(jax.random.key(0), X)
    rows = jaxmp.explain(lambda x, v: model.apply(v, x), argnums=1)(X, variables).rows
    assert [row.dtype for row in rows if row.op == "add"] == ["bfloat16", "float32"]
