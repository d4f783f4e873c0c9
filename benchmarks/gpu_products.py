"""The products of a layer, forward and backward, as jaxmp, Flax and Qwix multiply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from jaxmp._core.products.derivative import contract, quantize
from jaxmp._core.products.product import ScaledProduct, Sides
from jaxmp.recipes import parse_recipe

LOW = jnp.bfloat16
DENSE = (((1,), (0,)), ((), ()))
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def program(variant: str, recipe: str, m: int, k: int, n: int) -> Program:
    """A function that gives (y, dx, dw), and its arguments, for x [m, k] and w [k, n]."""
    x, w, g = operands(m, k, n)
    if variant == "bfloat16":
        return _with_gradients(jnp.dot), (x, w, g)
    if variant.startswith("Flax"):
        return _module(
            nn.Dense(n, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, **_DENSE), x, w, g
        )
    if variant.startswith("Qwix"):
        dtype = "int8" if "int8" in variant else "float8_e4m3fn"
        # Qwix tells weights from activations by their shapes.
        return _module(_qwix(nn.Dense(n, **_DENSE), dtype), x[None], w, g[None])
    sides = Sides.of(DENSE, 2, 2)
    product = ScaledProduct(
        sides=sides, weight=1, recipe=parse_recipe(recipe), dtype=jnp.dtype(LOW)
    )
    if variant.endswith("multiplied"):
        return _multiplied(product, x, w, g)

    def run(x: Any, w: Any) -> Any:
        return contract(product, (x, w), (product.quantize(x, 0), product.quantize(w, 1)))

    return _with_gradients(run), (x, w, g)


_DENSE = {"use_bias": False, "dtype": LOW, "param_dtype": LOW}


def operands(m: int, k: int, n: int) -> tuple[Any, Any, Any]:
    """Random, as training's are: a GPU multiplies zeros faster."""

    @jax.jit
    def draw(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        x, w, g = (jax.random.normal(i, s, LOW) for i, s in ((a, (m, k)), (b, (k, n)), (c, (m, n))))
        return x, w * LOW(k**-0.5), g * LOW(1e-3)

    return draw(jax.random.key(0))


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, w: Any, g: Any) -> Any:
        y, vjp = jax.vjp(fn, x, w)
        return y, *vjp(g.astype(y.dtype))

    return run


def _multiplied(product: ScaledProduct, x: Any, w: Any, g: Any) -> Program:
    """The three products of operands that are quantized already, each as its product reads it."""
    sides = product.sides
    forward = product.copy(x, 0), product.copy(w, 1)
    backward = []
    for of in (0, 1):
        gradient, _ = sides.gradient(of)
        by_row = product.recipe.granularity == "row"
        left = gradient.contracted[0] if by_row else (0, 1)
        right = gradient.contracted[1] if by_row else (0, 1)
        other = (x, w)[1 - of]
        copies = quantize(g, product.backward(of), left), quantize(other, product.forward, right)
        backward.append(copies)

    def run(forward: Any, backward: Any) -> Any:
        y = product.multiply_scaled(*forward, sides)
        grads = []
        for of, copies in enumerate(backward):
            gradient, order = sides.gradient(of)
            grad = product.multiply_scaled(*copies, gradient, precision=jax.lax.Precision.HIGHEST)
            grads.append(jnp.transpose(grad, order))
        return y, *grads

    return run, (forward, backward)


def _module(module: nn.Module, x: Any, w: Any, g: Any) -> Program:
    """A layer of somebody else's: its weights, and whatever state it keeps, have gradients."""
    variables = dict(jax.jit(module.init)(jax.random.key(1), x))
    variables["params"] = jax.tree.map(lambda _: w, variables["params"])

    def run(x: Any, variables: Any, g: Any) -> Any:
        y, vjp = jax.vjp(lambda x, v: module.apply(v, x), x, variables)
        return y, *vjp(g.astype(y.dtype))

    return run, (x, variables, g)


def _qwix(module: nn.Module, dtype: str) -> nn.Module:
    import qwix

    rule = qwix.QtRule(weight_qtype=dtype, act_qtype=dtype, bwd_qtype=dtype)
    return qwix.quantize_model(module, qwix.QtProvider([rule]))
