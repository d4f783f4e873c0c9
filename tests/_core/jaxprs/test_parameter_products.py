"""`jaxmp._core.jaxprs.parameter_products`: products that `jax.linear_transpose` can transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from accuracy import eps
from jax import lax
from numpy_reference import reference

import jaxmp

from support import float16_is_slow, gaussian, relative

V, W = gaussian(0, 16, 16, scale=1 / 4), gaussian(1, 16, 16, scale=1 / 4)
KERNEL = gaussian(2, 3, 3, 1, 4)

# Programs that are linear in their first operand, which is a parameter, or in data (`with_data`).
LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda v, w: v @ w,
    "transposed": lambda v, w: w @ v.T[::-1],
    "jit": lambda v, w: jax.jit(jnp.matmul)(v, w) @ w,
    "vmap": lambda v, w: jax.vmap(lambda row: row @ w)(v),
    "scan": lambda v, w: lax.scan(lambda c, _: (c @ w, None), v, None, length=3)[0],
    "cond": lambda v, w: lax.cond(w[0, 0] > 0, lambda v: v @ w, lambda v: v @ w.T, v),
    "remat": lambda v, w: jax.checkpoint(lambda v: (v @ w) @ w)(v),
    "scaled": lambda v, w: (v @ w) * w[0] + v.sum(0),
    "attention": lambda v, w: jax.nn.softmax(w @ w.T) @ v,
    "rows": lambda v, w: v[jnp.array([1, 2, 2])] @ w,
    "convolution": lambda v, w: lax.conv_general_dilated(
        v.reshape(1, 16, 16, 1), KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
}


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_linear_transpose_of_an_autocast_function(policy: str) -> None:
    """An operand that is not transposed stays known: JAX 0.12 stopped at an assertion."""

    def transposes(fn: Callable[[Any, Any], Any]) -> Any:
        def by(f: Callable[[Any, Any], Any]) -> Any:
            out = jax.eval_shape(f, V, W)
            return jax.linear_transpose(lambda v: f(v, W), V)(jnp.cos(jnp.ones(out.shape)))[0]

        of_params, of_data = (jaxmp.autocast(fn, policy, argnums) for argnums in (0, 1))
        return {"as written": by(fn), "params": by(of_params), "data": by(jax.jit(of_data))}

    found = reference(lambda: jax.tree.map(transposes, LINEAR))()
    for of in found.values():
        want = of.pop("as written")
        assert all(relative(got, want) < 4 * eps(policy) for got in of.values())
