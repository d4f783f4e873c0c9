"""How far off products in 4 bits are: relative errors of a layer's three products, by recipe.

    python benchmarks/four_bits_errors.py

For 256 tokens of a layer 512/512, mean of 8 draws: the product, the gradient of the input and that
of the weights, relative to float64 in the norm. Inputs and gradients that come in are normal, of
Student's t with 1.5 degrees of freedom, or normal with 8 columns that are 50 times as large.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.decide.by_recipe import kind_of
from jaxmp._core.products.derivative import contract
from jaxmp._core.products.product import Sides
from jaxmp.recipes import Recipe, parse_recipe

RECIPES = (
    "float8", "mxfp8", "nvfp4", "nvfp4+plain_hadamard", "nvfp4+no_hadamard", "nvfp4+nearest",
    "nvfp4+nearest+no_hadamard", "mxfp4", "mxfp4+nearest+no_hadamard",
)  # fmt: skip
INPUTS = ("normal", "t(1.5)", "outlier columns")
TOKENS, WIDTH, DRAWS = 256, 512, 8


def three_products(recipe: Recipe, x, w, g):
    sides = Sides.of((((1,), (0,)), ((), ())), 2, 2)
    product = kind_of(recipe)(recipe=recipe, sides=sides, weight=1, dtype=np.dtype("float32"))

    def layer(x, w):
        return contract(product, (x, w), (product.quantize(x, 0), product.quantize(w, 1)))

    y, vjp = jax.vjp(layer, x, w)
    return y, *vjp(g)


def drawn(kind: str, draw: np.random.Generator) -> np.ndarray:
    shape = TOKENS, WIDTH
    x = draw.standard_t(1.5, shape) if kind == "t(1.5)" else draw.normal(size=shape)
    if kind == "outlier columns":
        x[:, :: WIDTH // 8] *= 50
    return x.astype(jnp.bfloat16)


def errors(recipe: str, kind: str) -> np.ndarray:
    fn = jax.jit(lambda *given: three_products(parse_recipe(recipe), *given))
    found = []
    for seed in range(DRAWS):
        draw = np.random.default_rng(seed)
        x, g = drawn(kind, draw), drawn(kind, draw)
        w = draw.normal(size=(WIDTH, WIDTH)).astype(jnp.bfloat16)
        got = fn(x, w, g.astype(np.float32))
        x, w, g = (v.astype(np.float64) for v in (x, w, g))
        exact = x @ w, g @ w.T, x.T @ g
        norm = np.linalg.norm
        found.append([norm(mine - y) / norm(y) for mine, y in zip(got, exact, strict=True)])
    return np.mean(found, axis=0)


def main() -> None:
    print(f"JAX {jax.__version__}: errors of y, dx, dw\n")
    print(f"| recipe | {' | '.join(INPUTS)} |\n| :-- |{' --: |' * len(INPUTS)}")
    for recipe in RECIPES:
        rows = (" ".join(f"{e:.3f}" for e in errors(recipe, kind)) for kind in INPUTS)
        print(f"| {recipe} | {' | '.join(rows)} |", flush=True)


if __name__ == "__main__":
    main()
