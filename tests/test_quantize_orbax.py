"""Quantized weights saved and restored with Orbax, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxmp
from jaxmp.quantized import is_quantized

from support import slow_when

FORMATS = ("int8", "int4", "float8_e4m3fn")


def roundtrip(path, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, like)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@slow_when(lambda fmt: fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tree_and_its_target_made_from_shapes(tmp_path, fmt):
    params = {
        "layer": {"kernel": jax.random.normal(jax.random.key(0), (64, 96)), "bias": jnp.ones(96)}
    }
    q = jaxmp.quantize(params, fmt)
    like = jax.eval_shape(lambda p: jaxmp.quantize(p, fmt), params)
    back = roundtrip(tmp_path / "q", q, like)
    assert is_quantized(back["layer"]["kernel"])
    assert_same_bits(back, q)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_an_nnx_state(tmp_path, fmt):
    module = nnx.Linear(64, 96, rngs=nnx.Rngs(0))
    q = jaxmp.quantize(nnx.state(module), fmt)
    back = roundtrip(tmp_path / "q", q, jax.eval_shape(lambda: q))
    assert_same_bits(back, q)
    nnx.update(module, back)
    assert module(jnp.ones((1, 64))).shape == (1, 96)


@pytest.mark.slow
def test_shards(tmp_path):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    q = jaxmp.quantize(jax.device_put(jnp.ones((64, 96)), sharding), "int4", block_size=8)
    assert q.scale.sharding.spec == jax.sharding.PartitionSpec("a", None)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), q)
    assert_same_bits(roundtrip(tmp_path / "q", {"w": q}, {"w": like}), {"w": q})
