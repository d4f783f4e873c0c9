"""Recipes and a backward pass that is in the program: `jaxmp.autocast(jax.grad(loss))`."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxmp

from linen_models import variables_of

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
BF16 = "mixed_bfloat16"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32, name="down")(nn.gelu(nn.Dense(32, name="up")(x))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        x, _ = nn.scan(Block, **options)(name="layers")(x, None)
        return nn.Dense(32, name="head")(x)


@pytest.mark.parametrize("matmul", ["nvfp4", "float8"])
@pytest.mark.parametrize("by_path", [False, True])
def test_a_scan_s_backward_products_are_not_taken_for_layers(matmul, by_path):
    policy = f"{BF16},matmul={matmul}"
    if by_path:  # the regions of modules inside the scan
        policy = jaxmp.PolicyMap({"**/up": policy, "**/down": policy}, default=BF16)
    variables = variables_of(Scanned(), X)
    wrapped = jaxmp.wrap(Scanned(), policy)
    step = jax.grad(lambda v, x: (wrapped.apply(v, x) ** 2).sum())
    explained = jaxmp.explain(step)(variables, X)
    assert "not counted so here: see jaxmp.audit" in explained.summary()
    found = explained.quantized()
    assert sum(p.count for p in found.products if p.quantized) == 6  # of 18: the forward pass's
