"""Whose conversion is it? Decided by where a function is, not by its name alone."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxmp

from constructs import BF16, W, X
from support import contraction_dtypes

LOW = X.astype(jnp.bfloat16)


def promote_dtype(x):
    """A user's own helper: it upcasts because its author wants float32."""
    return x.astype(jnp.float32)


def widen(x):
    return jnp.asarray(x, jnp.float32)


def test_a_users_helper_keeps_its_upcast_whatever_its_name() -> None:
    for helper in (promote_dtype, widen):
        fn = jaxmp.autocast(lambda x, w, helper=helper: helper(x) @ w, BF16)
        assert contraction_dtypes(fn, LOW, W) == {"float32": 1}


def test_a_users_file_named_as_ours_is_the_users(tmp_path) -> None:
    """`marks.widen` is jaxmp's only in jaxmp's own file."""
    path = tmp_path / "flax" / "marks.py"
    path.parent.mkdir()
    source = "def widen(x):\n    return x.astype('float32')\npromote_dtype = widen\n"
    scope: dict = {}
    exec(compile(source, str(path), "exec"), scope)
    fn = jaxmp.autocast(lambda x, w: scope["widen"](x) @ w, BF16)
    assert contraction_dtypes(fn, LOW, W) == {"float32": 1}


def test_flax_promotes_and_does_not_upcast() -> None:
    """Its layers widen a 16-bit input to their parameters' dtype: nobody asked for float32."""
    linen, params = nn.Dense(4), nn.Dense(4).init(jax.random.key(0), X)
    assert contraction_dtypes(jaxmp.autocast(linen.apply, BF16), params, LOW) == {"bfloat16": 1}
    dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    assert contraction_dtypes(jaxmp.autocast(lambda x: dense(x), BF16), LOW) == {"bfloat16": 1}
