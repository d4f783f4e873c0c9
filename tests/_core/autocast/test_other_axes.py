"""Functions in which the axes of a mesh are of another type than outside of them.

`jax.sharding.auto_axes` and `explicit_axes` take their operands to another mesh, and back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

from support import iter_eqns, slow_when

RNG = np.random.default_rng(0)
W1, X = (np.asarray(RNG.normal(size=size) / 4, "float32") for size in ((16, 32), (32, 16)))


def in_auto_axes(w, x):
    layer = jax.sharding.auto_axes(lambda w, x: jnp.tanh(x @ w) @ w.T, out_sharding=P("data"))
    return layer(w, x)


def in_one_auto_axis(w, x):
    layer = jax.sharding.auto_axes(
        lambda w, x: jnp.tanh(x @ w) @ w.T, axes="model", out_sharding=P("data")
    )
    return layer(jax.sharding.reshard(w, P(None, "model")), x)


def looked_up(w, x):
    rows = jnp.zeros(len(x), int)
    return x + w.T.at[rows].get(out_sharding=P("data"))


def in_explicit_axes(w, x):
    layer = jax.sharding.explicit_axes(
        lambda w, x: x @ jax.sharding.reshard(w, P()), in_sharding=(P(None, "model"), P("data"))
    )
    return layer(w, x)


OTHER_AXES = {
    "auto_axes": (AxisType.Explicit, in_auto_axes),
    "one of two": (AxisType.Explicit, in_one_auto_axis),
    "lookup": (AxisType.Explicit, looked_up),
    "explicit_axes": (AxisType.Auto, in_explicit_axes),
}


@slow_when(lambda name, policy: "reduce" in policy)
@slow_when(lambda name, policy: policy == "float32" and name != "explicit_axes")
@pytest.mark.parametrize(
    "policy",
    [
        "float32",
        "mixed_bfloat16,ops=gather:compute",
        "mixed_bfloat16,ops=gather:compute,reduce=bf16",
    ],
)
@pytest.mark.parametrize("name", OTHER_AXES)
def test_axes_of_another_type_inside(name, policy):
    """Weights are narrowed ahead of what takes them there, and their gradients come back."""
    kind, fn = OTHER_AXES[name]
    on = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(on):
        w = jax.device_put(W1, NamedSharding(on, P(None, "model")))
        x = jax.device_put(X, NamedSharding(on, P("data")))

        def loss(w, x):
            return jnp.sum(jnp.tanh(fn(w, x)))

        step = jax.grad(jaxmp.autocast(loss, policy))
        crossing = {
            str(e.invars[0].aval.dtype)
            for e in iter_eqns(jax.make_jaxpr(jaxmp.autocast(loss, policy))(w, x))
            if e.primitive.name == "reshard" and e.invars[0].aval.shape in (W1.shape, W1.T.shape)
        }
        assert crossing == {"float32" if policy == "float32" else "bfloat16"}
        got, want = jax.jit(lambda *args: [run(*args) for run in (step, jax.grad(loss))])(w, x)
        assert got.sharding.is_equivalent_to(want.sharding, 2)
        bound = 1e-6 if policy == "float32" else 0.01
        assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)
