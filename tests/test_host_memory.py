"""A device without memory on its host is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from host_memory_kit import device_with

from jaxmp._core.host_memory import HOST, check_host_memory, is_on_host


def test_a_device_without_host_memory_is_named_with_what_to_use():
    message = (
        r"^residuals=offload needs memory of the kind 'pinned_host', and Chip has 'device'; use "
        r"residuals=recompute\.$"
    )
    with pytest.raises(NotImplementedError, match=message):
        check_host_memory("residuals=offload", "residuals=recompute", device_with("device"))
    with pytest.raises(NotImplementedError, match="and Chip has none; use"):
        check_host_memory("residuals=offload", "residuals=recompute", device_with())


def test_the_device_is_the_default_one_and_has_it():
    check_host_memory("residuals=offload", "residuals=recompute", device_with("device", HOST))
    check_host_memory("residuals=offload", "residuals=recompute")
    with jax.default_device("cpu"):
        check_host_memory("residuals=offload", "residuals=recompute")


def test_where_an_array_is():
    x = jnp.ones(3)
    there = jax.device_put(x, jax.memory.Space.Host)
    assert is_on_host(there)
    assert is_on_host(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there.sharding))
    assert not is_on_host(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert not is_on_host(x)
    assert not is_on_host(3.0)
    seen = []
    jax.make_jaxpr(lambda *xs: seen.extend(map(is_on_host, xs)))(x, there)
    assert seen == [False, True]
