"""How the gradient of a softmax in a loop is laid out in a TPU's memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from numpy_reference import reference

import jaxmp
from jaxmp._core.jaxprs.compiler_hints import LANES, laid_out
from jaxmp._core.passes.softmax_vjp import SoftmaxDot

from support import needs_tpu_compiler, slow_when

BF16 = "mixed_bfloat16"


def inputs(queries: int = LANES, keys: int = 32, layers: int = 2) -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    shapes = (layers, 8, 8), (2, queries, 2, 8), (2, keys, 2, 8)
    return tuple(jnp.asarray(draw.normal(size=s) / 2, jnp.float32) for s in shapes)


def attention(x: Any, w: Any, keys: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", x @ w, keys)
    return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), keys)


def in_a_loop(ws: Any, x: Any, keys: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (attention(x, w, keys), None), x, ws)[0] ** 2)


def in_a_function_in_a_loop(ws: Any, x: Any, keys: Any) -> Any:
    layer = jax.checkpoint(jax.jit(attention))
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w, keys), None), x, ws)[0] ** 2)


def in_no_loop(ws: Any, x: Any, keys: Any) -> Any:
    for w in ws:
        x = attention(x, w, keys)
    return jnp.mean(x**2)


def grouped_in_a_loop(ws: Any, x: Any, keys: Any) -> Any:
    """Two queries' heads read one of keys: rows are the last axis that only queries have."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        read = jax.nn.dot_product_attention(x @ w, keys[:, :, :1], keys[:, :, :1])
        return x + read, None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def autocast_as_in_no_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`jaxmp.autocast` that lays nothing out."""
    group = SoftmaxDot._group

    def autocast(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
        def plain(*args: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(SoftmaxDot, "_group", lambda *a, **_: group(*a, looped=False))
                return jaxmp.autocast(lambda *a: fn(*a), policy)(*args)

        return plain

    return autocast


def orders(loss: Callable[..., Any], platform: str, *args: Any) -> list[list[int]]:
    """The layouts that the gradient of a loss asks for, from the innermost axis outwards."""
    step = jax.jit(jax.grad(jaxmp.autocast(loss, BF16), (0, 1, 2)))
    text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"@LayoutConstraint.*?result_layouts = \[dense<\[([\d, ]*)\]>", text)
    return [[int(axis) for axis in each.split(",")] for each in found]


def test_in_a_loop_queries_are_innermost() -> None:
    """XLA writes layouts from the innermost axis on."""
    for loss in (in_a_loop, in_a_function_in_a_loop):
        assert orders(loss, "tpu", *inputs()) == [[2, 3, 1, 0]], loss


def test_of_groups_of_heads_too() -> None:
    [order] = orders(grouped_in_a_loop, "tpu", *inputs())
    assert order[:2] == [3, 4]
    assert sorted(order) == [0, 1, 2, 3, 4]


def test_elsewhere_nothing_is_asked_for() -> None:
    for platform in ("cpu", "cuda", "rocm"):
        assert orders(in_a_loop, platform, *inputs()) == [], platform
    # Out of loops the compiler finds layouts that suit all readers.
    assert orders(in_no_loop, "tpu", *inputs()) == []
    # Few queries would be filled up to the number of lanes.
    assert orders(in_a_loop, "tpu", *inputs(queries=LANES - 1)) == []
    assert orders(in_a_loop, "tpu", *inputs(queries=1)) == []


def test_nor_of_queries_whose_number_is_left_open() -> None:
    n = export.symbolic_shape("n")[0]
    ws, x, keys = inputs()
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (ws, x, keys)]
    shapes[1] = jax.ShapeDtypeStruct((2, n, 2, 8), jnp.float32)
    step = jax.jit(jax.grad(jaxmp.autocast(in_a_loop, BF16), (0, 1, 2)))
    exported = export.export(step, platforms=["tpu"])(*shapes)
    assert "LayoutConstraint" not in exported.mlir_module()


@slow_when(lambda loss, mapped: (loss is grouped_in_a_loop) == mapped)
@pytest.mark.parametrize("loss", [in_a_loop, grouped_in_a_loop], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("mapped", [False, True])
def test_it_changes_no_number(loss: Any, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ws, x, keys = inputs()
    if mapped:
        x, keys = (np.stack([a, -np.asarray(a) / 2]) for a in (x, keys))

    def gradients(fn: Any) -> Any:
        grad = jax.grad(fn, (0, 1, 2))
        return reference(jax.vmap(grad, (None, 0, 0)) if mapped else grad)(ws, x, keys)

    plain = autocast_as_in_no_loop(monkeypatch)
    found = (gradients(fn) for fn in (jaxmp.autocast(loss, BF16), plain(loss, BF16)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow
@needs_tpu_compiler
def test_a_tpu_then_copies_no_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were copied to the other layout in each iteration, of which bytes count one."""
    args = inputs(queries=512, keys=512, layers=4)
    plain = autocast_as_in_no_loop(monkeypatch)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    moved, plainly = (
        jaxmp.preflight(jax.grad(fn), target="tpu-v5e")(*shapes).policies[0].bytes_accessed
        for fn in (jaxmp.autocast(in_a_loop, BF16), plain(in_a_loop, BF16))
    )
    assert moved < 0.9 * plainly


class TestLaidOut:
    """The primitive."""

    def test_it_is_the_array(self) -> None:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        for transform in (lambda fn: fn, jax.jit):
            np.testing.assert_array_equal(transform(lambda x: laid_out(x, (1, 0)))(x), x)

    def test_mapped_axes_are_outermost(self) -> None:
        x = jax.ShapeDtypeStruct((2, 5, 3), jnp.float32)
        for axis, order in enumerate([(0, 2, 1), (1, 2, 0), (2, 1, 0)]):
            fn = jax.vmap(lambda x: laid_out(x, (1, 0)), axis, axis)
            [eqn] = jax.make_jaxpr(fn)(x).eqns
            assert eqn.params["order"] == order

    def test_its_cotangent_is_laid_out_alike(self) -> None:
        x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        transposed = jax.linear_transpose(lambda x: laid_out(x, (1, 0)), x)
        [eqn] = jax.make_jaxpr(transposed)(x).eqns
        assert eqn.primitive.name == "laid_out"
        assert eqn.params["order"] == (1, 0)

    def test_any_derivative(self) -> None:
        def cubed(x: Any) -> Any:
            return jnp.sum(laid_out(x, (1, 0)) ** 3)

        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        second = reference(lambda x: jax.jvp(jax.grad(cubed), (x,), (jnp.ones_like(x),))[1])(x)
        np.testing.assert_allclose(second, 6 * x)
