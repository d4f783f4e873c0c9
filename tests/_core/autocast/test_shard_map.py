"""`jax.shard_map` and autocast, inside its body and around it: all that crosses devices in one.

Each collective stands between two layers, in a loss that is summed over all devices. Beside it is
what it does to the blocks of all devices on one (`COLLECTIVES`), and that loss in float64 is the
oracle. In 16 bits each rounding errs by at most u = eps/2 of its value, each by chance: n of them
by about sqrt(n) * u (Higham and Mary, 2019, https://doi.org/10.1137/18M1226312), n being the number
of 16-bit results in the program. Seen: a half of it at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp

from support import (
    LOW_DTYPES,
    assert_same_program,
    contraction_dtypes,
    iter_eqns,
    relative,
    slow_when,
)

RNG = np.random.default_rng(0)
WIDTH = 32
ROWS = 64  # of all devices


def normal(*shape, scale=1.0):
    return jax.device_put((RNG.normal(size=shape) * scale).astype(np.float32))


ARGS = (normal(ROWS, 12), normal(12, WIDTH, scale=0.25), normal(WIDTH, 8, scale=0.2))
WEIGHTS = (ARGS[1].shape, ARGS[2].shape)


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def blocks(h, n):
    return h.reshape(n, -1, WIDTH)


class Collective(NamedTuple):
    """What crosses devices, between two layers.

    Attributes:
      local: On one device, of its block and the number of devices.
      whole: The same of all blocks, which are its first axis.
      crossing: What JAX makes of it, forward and backward, and in which dtypes arrays cross then.
    """

    local: Callable[[Any, int], Any]
    whole: Callable[[Any, int], Any]
    crossing: str


def on_all(h, n):
    return jnp.broadcast_to(h, (n, *h.shape))


def held(extreme):
    """Of a running maximum nobody wants a derivative, and JAX has none."""
    return lambda h, _: h - extreme(lax.stop_gradient(h))


COLLECTIVES = {
    "psum": Collective(
        lambda h, _: lax.psum(h, "d"), lambda h, n: on_all(h.sum(0), n), "psum:float32"
    ),
    "pmax": Collective(
        held(lambda h: lax.pmax(h, "d")), held(lambda h: h.max(0, keepdims=True)), "pmax:low"
    ),
    "psum_scatter": Collective(
        lambda h, n: lax.psum_scatter(h.reshape(n, -1, WIDTH), "d"),
        lambda h, n: blocks(h.sum(0), n),
        "reduce_scatter:float32 all_gather:float32",
    ),
    "psum_scatter, tiled": Collective(
        lambda h, _: lax.psum_scatter(h, "d", tiled=True),
        lambda h, n: blocks(h.sum(0), n),
        "reduce_scatter:float32 all_gather:float32",
    ),
    "all_gather": Collective(
        lambda h, _: lax.all_gather(h, "d"), on_all, "all_gather:low reduce_scatter:low"
    ),
    "all_gather, tiled": Collective(
        lambda h, _: lax.all_gather(h, "d", tiled=True),
        on_all,
        "all_gather:low reduce_scatter:low",
    ),
    "all_to_all": Collective(
        lambda h, n: lax.all_to_all(h.reshape(n, -1, WIDTH), "d", 0, 0),
        lambda h, n: jnp.swapaxes(h.reshape(n, n, -1, WIDTH), 0, 1),
        "all_to_all:low all_to_all:low",
    ),
    "all_to_all, tiled": Collective(
        lambda h, _: lax.all_to_all(h, "d", 1, 0, tiled=True),
        lambda h, n: jnp.moveaxis(h.reshape(n, -1, n, WIDTH // n), 2, 0),
        "all_to_all:low all_to_all:low",
    ),
    "ppermute": Collective(
        lambda h, n: lax.ppermute(h, "d", ring(n)),
        lambda h, _: jnp.roll(h, 1, 0),
        "ppermute:low ppermute:low",
    ),
    "ppermute, open": Collective(  # the first device is sent nothing, and has zeros
        lambda h, n: lax.ppermute(h, "d", ring(n)[:-1]),
        lambda h, _: jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]]),
        "ppermute:low ppermute:low",
    ),
    "pbroadcast": Collective(  # JAX has it on GPUs alone, and its transpose of it fails
        lambda h, _: h + lax.pbroadcast(lax.stop_gradient(h), "d", 1),
        lambda h, _: h + lax.stop_gradient(h[1]),
        "pbroadcast:low",
    ),
    "axis_index": Collective(
        lambda h, _: h * (1 + lax.axis_index("d")).astype(h.dtype) / 4,
        lambda h, n: h * (1 + jnp.arange(n))[:, None, None] / 4,
        "",
    ),
    "pcast": Collective(
        lambda h, _: h + lax.pcast(jnp.ones(WIDTH), "d", to="varying"), lambda h, _: h + 1, ""
    ),
}


def layer(h, w):
    return jnp.tanh(h @ w)


def on_one_device(name, n):
    def loss(x, w, v):
        h = COLLECTIVES[name].whole(blocks(layer(x, w), n), n)
        return jnp.mean(jnp.square(layer(h.reshape(-1, WIDTH), v)))

    return loss


class Over(NamedTuple):
    """A mesh, the axes of it that the body sees, and a policy."""

    mesh: tuple[int, ...]
    policy: str


# XLA on CPU ends the process where bfloat16 is summed over devices in a body that does not see all
# axes, also without jaxmp; float16 it sums.
MESHES = {
    "manual": Over((8,), "mixed_bfloat16"),
    "partly automatic": Over((4, 2), "mixed_float16"),
}


def mesh_of(shape):
    axes = ("d", "m")[: len(shape)]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape))


def on_many(name, mesh, where, policy, *, check_vma):
    """The same over the devices of axis "d"; what other axes split is XLA's to see to."""
    n = mesh.shape["d"]

    def local(x, w, v):
        h = COLLECTIVES[name].local(layer(x, w), n).reshape(-1, WIDTH)
        return jnp.mean(jnp.square(layer(h, v)))[None]

    if where == "inside":
        local = jaxmp.autocast(local, policy, argnums=(1, 2))

    def loss(x, w, v):
        specs = (P("d"), P(), P())
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=specs,
            out_specs=P("d"),
            check_vma=check_vma,
            axis_names={"d"},
        )
        return jnp.mean(mapped(x, w, v))

    return jaxmp.autocast(loss, policy, argnums=(1, 2)) if where == "around" else loss


def placed(mesh):
    specs = (P("d"), P(None, "m"), P("m")) if "m" in mesh.axis_names else (P("d"), P(), P())
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(ARGS, specs, strict=True)]


CROSSING = ("psum", "psum_invariant", "pmax", "pmin", "ppermute", "pbroadcast", "all_to_all")
CROSSING += ("all_gather", "reduce_scatter")


def activations_cross(jaxpr):
    """The dtypes in which arrays that are not weights cross devices, by primitive."""
    return {
        f"{eqn.primitive.name.removesuffix('_invariant')}:{eqn.invars[0].aval.dtype}"
        for eqn in iter_eqns(jaxpr)
        if eqn.primitive.name in CROSSING
        and eqn.invars[0].aval.ndim > 1
        and eqn.invars[0].aval.shape not in WEIGHTS
    }


def bound(jaxpr):
    results = [v.aval for eqn in iter_eqns(jaxpr) for v in eqn.outvars]
    low = [a.dtype for a in results if str(getattr(a, "dtype", None)) in LOW_DTYPES]
    assert len(low) > 10  # it is a policy of 16 bits
    return len(low) ** 0.5 * eps(low[0]) / 2


def gradient(fn):
    return jax.value_and_grad(fn, argnums=(0, 1, 2))


# Each collective in each setting, any two choices of which are together in one; by default, three.
SETTINGS = (
    ("manual", "inside", True),
    ("manual", "around", False),
    ("partly automatic", "inside", False),
    ("partly automatic", "around", True),
)
DEFAULT = {("ppermute", 0), ("psum", 1), ("all_gather, tiled", 3)}


@slow_when(lambda name, setting: (name, setting) not in DEFAULT)
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_loss_over_devices_is_that_of_one(name, setting):
    over, where, check_vma = SETTINGS[setting]
    shape, policy = MESHES[over]
    low = policy.removeprefix("mixed_")
    mesh = mesh_of(shape)
    fn = gradient(on_many(name, mesh, where, policy, check_vma=check_vma))
    jaxpr = jax.make_jaxpr(fn)(*ARGS)
    assert contraction_dtypes(fn, *ARGS) == {low: 6}  # two layers, three products each
    want = COLLECTIVES[name].crossing.replace("low", low).split()
    assert activations_cross(jaxpr) == set(want)
    if name == "pbroadcast":
        return
    got = jax.jit(fn)(*placed(mesh))
    with jax.enable_x64(True):
        exact = [np.asarray(x, "float64") for x in ARGS]
        want = reference(gradient(on_one_device(name, mesh.shape["d"])))(*exact)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == jnp.float32
        assert relative(g, w) < bound(jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_float32_policy_leaves_it_as_it_is(name):
    written, *ours = (
        on_many(name, mesh_of((8,)), place, "float32", check_vma=True)
        for place in ("nowhere", "inside", "around")
    )
    for fn in ours:
        assert_same_program(gradient(written), gradient(fn), *ARGS)
