"""Values are dropped after the last step that reads them, wherever a program runs eagerly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

from linen_models import variables_of
from support import gaussian, slow_when

DEPTH = 8
X = gaussian(0, 64, 48)


class MLP(nn.Module):
    spy: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(DEPTH):
            x = self.spy(nn.gelu(nn.LayerNorm()(nn.Dense(x.shape[-1])(x))))
        return x


def _at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _vmapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(fn, in_axes=(None, 0))


def _in_a_rule(fn: Callable[..., Any]) -> Callable[..., Any]:
    ruled = jax.custom_vjp(fn)
    ruled.defvjp(lambda v, x: (ruled(v, x), (v, x)), lambda saved, g: jax.vjp(fn, *saved)[1](g))
    return ruled


def _sharded(fn: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False)


def _unrolled(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loop(variables: Any, x: jax.Array) -> jax.Array:
        with jax.disable_jit():
            return jax.lax.scan(lambda h, _: (fn(variables, h), None), x, length=2)[0]

    return loop


@slow_when(lambda around, policy: policy != "mixed_bfloat16" or around in (_vmapped, _sharded))
@pytest.mark.parametrize("around", [_at_once, _vmapped, _in_a_rule, _unrolled, _sharded])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16,saturate=true", "mixed_int8"])
def test_an_eager_call_keeps_no_more_than_flax(around: Any, policy: str) -> None:
    counts: list[int] = []

    def count() -> int:
        return sum(array.size == X.size for array in jax.live_arrays())

    def counted(x: Any) -> Any:
        counts.append(count())
        return x

    def spy(x: jax.Array) -> jax.Array:
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(counted, kind, x, vmap_method="expand_dims")

    model = MLP(spy)
    variables = variables_of(model, X)

    def most(fn: Callable[..., Any]) -> int:
        counts.clear()
        gc.collect()
        before = count()
        jax.block_until_ready(fn(variables, X))
        assert len(counts) >= DEPTH
        return max(counts) - before

    plain = around(model.apply)
    # Which arrays the operation before has let go of when the callback runs is a matter of threads.
    assert most(jaxmp.autocast(plain, policy)) <= most(plain) + DEPTH // 2
