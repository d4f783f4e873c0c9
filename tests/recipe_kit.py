"""Products under a recipe, the inputs they are tried on, and a quantizer in NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmp._core.decide.by_recipe import kind_of
from jaxmp._core.products.derivative import contract
from jaxmp._core.products.product import Sides
from jaxmp._tools.preflight.compile_ahead import compile_ahead
from jaxmp._tools.speed.target import parse_target
from jaxmp.recipes import FORMATS

DENSE = (((1,), (0,)), ((), ()))
NUMPY = {
    "float8": ml_dtypes.float8_e4m3fn,  # where no chip says
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3b11": ml_dtypes.float8_e4m3b11fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "int8": np.int8,
}
TINY = np.finfo(np.float32).tiny


def quantized(x, short, axes):
    """Values and scales: powers of two of floats. Inverses are multiplied by, in float32."""
    amax = np.abs(x).max(axis=axes, keepdims=True).astype(np.float32)
    scale = np.maximum(amax * np.float32(1 / FORMATS[short].largest), TINY)
    if short != "int8":
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    return rounded(x, short, scale), scale.astype(np.float64)


def rounded(x, short, scale):
    """The values of a format that are nearest, and no further from zero than its largest."""
    most = FORMATS[short].largest
    values = np.clip(x.astype(np.float32) * (1 / scale.astype(np.float32)), -most, most)
    if short == "int8":
        values = np.rint(values)
    return values.astype(NUMPY[short]).astype(np.float64)


def family(name, seed, *shape):
    r = np.random.default_rng(seed)
    x = r.normal(size=shape)
    if name == "heavy tails":
        x = r.standard_t(1.5, size=shape)
    elif name == "outlier columns":
        x[:, :: shape[1] // 4] *= 100
    elif name == "rows over seven decades":
        x *= 10.0 ** r.uniform(-7, 0, size=(shape[0], 1))
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


FAMILIES = ("normal", "heavy tails", "outlier columns", "rows over seven decades")


def planned(recipe, dims, ranks, dtype, weight=1):
    sides = Sides.of(dims, *ranks)
    return kind_of(recipe)(recipe=recipe, sides=sides, dtype=np.dtype(dtype), weight=weight)


@functools.cache
def product(recipe, dims=DENSE, dtype=jnp.bfloat16, weight=1):
    """The product of float32 `x` and `w`, read in `dtype`."""

    def fn(x, w):
        made = planned(recipe, dims, (x.ndim, w.ndim), dtype, weight)
        x, w = x.astype(dtype), w.astype(dtype)
        return contract(made, (x, w), (made.quantize(x, 0), made.quantize(w, 1)))

    return fn


def all_three(fn, x, w, g, compiler=jax.jit):
    """The product and its gradients, where `g` is that of the product."""
    out = _compiled(fn, compiler)(*(np.asarray(v, np.float32) for v in (x, w, g)))
    return [np.asarray(v).astype(np.float64) for v in out]


@functools.cache
def _compiled(fn, compiler):
    def run(x, w, g):
        y, vjp = jax.vjp(fn, x, w)
        return y, *vjp(g.astype(y.dtype))

    return compiler(run)


def worst_row(got, want):
    return float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())


def operands(name, draw=0):
    """An input, a weight, and the gradient of their product."""
    return (
        family(name, 3 * draw + 1, 256, 512),
        family("normal", 3 * draw + 2, 512, 128),
        family(name, 3 * draw + 3, 256, 128),
    )


def wanted(x, w, g):
    return x @ w, g @ w.T, x.T @ g


def errors(fn, name, draws, compiler=jax.jit):
    """Relative errors of the product and of its gradients, over many draws.

    With heavy tails one element may be most of all draws taken together: the mean of theirs then.
    """
    off, norm = np.zeros((2, draws, 3))
    for i in range(draws):
        drawn = operands(name, i)
        found = all_three(fn, *drawn, compiler)
        for k, (mine, exact) in enumerate(zip(found, wanted(*drawn), strict=True)):
            off[i, k], norm[i, k] = np.sum((mine - exact) ** 2), np.sum(exact**2)
    if name == "heavy tails":
        return np.sqrt(off / norm).mean(0)
    return np.sqrt(off.sum(0) / norm.sum(0))


def compiled_products(chip, recipe):
    """The program of a layer's three products, compiled for a GPU that is not here."""
    target = parse_target(chip)
    if "dnn_version:" not in target.config:  # without it XLA knows of no block-scaled product
        device = 'gpu_device_info {\n  dnn_version: "9.10.0"'
        config = target.config.replace("gpu_device_info {", device, 1)
        target = dataclasses.replace(target, config=config)

    def step(x, w, g):
        y, vjp = jax.vjp(product(recipe), x, w)
        return y, *vjp(g)

    shapes = ((256, 528), (528, 400), (256, 400))  # multiples of 16, not of 32
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    (result,) = compile_ahead(target, [step], args, (), [str(recipe)])
    assert result.program is not None, result.error
    return result.program
