"""Eight devices compute what one does, however the state of training is split over them.

Ten steps of gradient descent with momentum, in which every layout must come to the parameters of
one device; keep every leaf of the train state where it was; compile once; and use every buffer that
it is given. (Adam divides gradients that are near zero by their size: layouts differ by a hundredth
then, in float32 too. Explicit meshes are in `test_explicit_sharding`.)

How near is near: two layouts add the same numbers in another order. In float32 that is 1e-6 of a
parameter. In 16 bits a sum that comes out otherwise in float32 may be rounded to the other of its
neighbors; and a sum that is made in parts, of a gradient over devices or of a contraction that is
split, is rounded for each part. Each rounding errs by up to u = eps/2 of its value, each by chance:
of n of them on the way from parameters to gradients the gradient then errs by about sqrt(n) * u of
itself (Higham and Mary, 2019, https://doi.org/10.1137/18M1226312), and two runs differ by
2 * sqrt(n) * u = sqrt(n) * eps. The parameters are sums of gradients: they differ by that much of
the way that they have gone. Seen: a tenth of it (n is 43: 0.3 * eps of the way).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accuracy import eps
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._tools.preflight.hlo import read_hlo

from support import LOW_DTYPES, iter_eqns, slow_when

STEPS = 10
OVERFLOW = 6  # the step in which, under float16, one row overflows
RNG = np.random.default_rng(0)
BATCHES = [
    (RNG.normal(size=(32, 16)).astype("float32"), RNG.normal(size=(32, 8)).astype("float32"))
    for _ in range(STEPS)
]


class Layout(NamedTuple):
    """A mesh; where the batch and the two large weights are; what crosses devices."""

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    batch: P
    up: P
    down: P
    collectives: set[str]


SUMS, BOTH = {"all-reduce"}, {"all-reduce", "all-gather"}
LAYOUTS = {
    "dp": Layout((8,), ("data",), P("data"), P(), P(), SUMS),
    "fsdp": Layout((8,), ("data",), P("data"), P(None, "data"), P("data", None), BOTH),
    "tp": Layout((8,), ("model",), P(), P(None, "model"), P("model", None), SUMS),
    "fsdp_tp": Layout(
        (4, 2), ("data", "model"), P("data"), P("data", "model"), P("model", "data"), BOTH
    ),
}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(h)))
        return nn.Dense(8, name="head")(x)


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.down(nnx.gelu(self.up(self.norm(x)))))


def optimizer(policy):
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(0.03, momentum=0.9))
    return jaxmp.loss_scale_for(policy, tx, init_scale=1024.0, growth_interval=4)


def linen(policy):
    """A state of training, `step(state, batch) -> (state, loss)`, and what is in the state."""
    model = jaxmp.wrap(Linen(), policy)
    params = jax.jit(Linen().init)(jax.random.key(0), BATCHES[0][0])["params"]
    tx = optimizer(policy)
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, batch):
        def loss_fn(params, batch):
            return jnp.mean(jnp.square(model.apply({"params": params}, batch[0]) - batch[1]))

        loss, grads = state.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return state, step, lambda state: (state.params, state.opt_state)


def nnx_(policy):
    model = jaxmp.wrap(Nnx(), policy)
    trained = nnx.Optimizer(model, optimizer(policy), wrt=nnx.Param)
    graph, state = nnx.split((model, trained))

    def step(state, batch):
        def loss_fn(model, batch):
            return jnp.mean(jnp.square(model(batch[0]) - batch[1]))

        model, trained = nnx.merge(graph, state)
        loss, grads = jaxmp.value_and_grad(loss_fn, trained.opt_state)(model, batch)
        trained.update(model, grads)
        return nnx.state((model, trained)), loss

    def parts(state):
        _, trained = nnx.merge(graph, state)
        return nnx.to_pure_dict(state)[0], trained.opt_state

    return state, step, parts


KINDS = {"linen": linen, "nnx": nnx_}


def batches(policy):
    """One row of one batch overflows float16, and is in the hands of one device."""
    for i, (x, y) in enumerate(BATCHES):
        if policy == "mixed_float16" and i == OVERFLOW:
            y = y.copy()
            y[29] = 1e30
        yield x, y


class Run(NamedTuple):
    """What a run of ten steps came to."""

    losses: list[float]
    params: Any
    way: Any  # of each parameter, the sum of the norms of its steps
    skipped: int
    scale: float


def norm(x):
    return float(np.linalg.norm(np.asarray(x, "float64")))


def run(policy, state, step, parts) -> Run:
    losses, after = [], jax.tree.map(np.asarray, parts(state)[0])
    way = jax.tree.map(lambda _: 0.0, after)
    for batch in batches(policy):
        before = after
        state, loss = step(state, batch)
        losses.append(float(loss))
        after = jax.tree.map(np.asarray, parts(state)[0])
        way = jax.tree.map(lambda w, a, b: w + norm(a - b), way, after, before)
    opt_state = parts(state)[1]
    skipped, scale = (
        jaxmp.loss_scaling.skipped_count(opt_state),
        jaxmp.loss_scaling.loss_scale(opt_state),
    )
    return Run(losses, after, way, int(skipped), float(scale))


@functools.cache
def on_one_device(kind, policy) -> Run:
    state, step, parts = KINDS[kind](policy)
    return run(policy, state, jax.jit(step), parts)


@functools.cache
def rounded_values(kind, policy) -> int:
    """How many results of a step are of 16 bits."""
    state, step, _ = KINDS[kind](policy)
    return sum(
        str(getattr(v.aval, "dtype", None)) in LOW_DTYPES
        for eqn in iter_eqns(jax.make_jaxpr(step)(state, BATCHES[0]))
        for v in eqn.outvars
    )


def placement(layout, mesh):
    """Returns a function from a path in a train state, and its leaf, to where that is.

    Moments lie where their parameters do, which are known by their names.
    """

    def place(path, leaf):
        names = jax.tree_util.keystr(path)
        spec = P()
        if leaf.ndim:
            spec = next((getattr(layout, n) for n in ("up", "down") if f"'{n}'" in names), P())
        if leaf.ndim == 1:  # a bias has the last axis of its weight
            spec = P(spec[-1] if len(spec) else None)
        return NamedSharding(mesh, spec)

    return place


# All that crosses devices, both dtypes of 16 bits, Linen and NNX.
DEFAULT = ("fsdp_tp", "mixed_float16", "linen")  # in which a step is left out, too


@slow_when(lambda layout, policy, kind: (layout, policy, kind) != DEFAULT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_are_those_of_one_device(layout, policy, kind):
    place = LAYOUTS[layout]
    mesh = jax.make_mesh(place.mesh, place.axes, axis_types=(AxisType.Auto,) * len(place.axes))
    state, step, parts = KINDS[kind](policy)
    at = jax.tree_util.tree_map_with_path(placement(place, mesh), state)
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(at)) == (layout != "dp")
    data, whole = NamedSharding(mesh, place.batch), NamedSharding(mesh, P())
    # A buffer that is given and not used is a warning, and warnings are errors.
    step = jax.jit(step, in_shardings=(at, data), out_shardings=(at, whole), donate_argnums=0)
    state = jax.device_put(state, at)
    # One program for all steps: it refuses a state of other types or other shardings.
    compiled = step.lower(state, BATCHES[0]).compile()
    kinds = {kind for kind, _ in read_hlo(compiled.as_text()).collectives}
    assert kinds == place.collectives

    def watched(state, batch):
        state, loss = compiled(state, batch)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        for (path, x), want in zip(leaves, jax.tree.leaves(at), strict=True):
            assert x.sharding.is_equivalent_to(want, x.ndim), path
        return state, loss

    got, want = run(policy, state, watched, parts), on_one_device(kind, policy)
    skips = policy == "mixed_float16"
    assert (got.skipped, got.scale) == (want.skipped, want.scale) == (skips, 1024.0**skips)
    relative = 1e-6
    if policy == "float32":
        bounds = jax.tree.map(lambda w: relative * norm(w), want.params)
    else:
        n = rounded_values(kind, policy)
        assert n > 30  # it is a policy of 16 bits
        relative = n**0.5 * eps(policy)
        bounds = jax.tree.map(lambda way: relative * way, want.way)
    leaves = jax.tree_util.tree_leaves_with_path(got.params)
    rest = (jax.tree.leaves(want.params), jax.tree.leaves(bounds))
    for (path, g), w, bound in zip(leaves, *rest, strict=True):
        assert norm(g - w) <= bound, jax.tree_util.keystr(path)
    # They have learned, and each by the same: a loss errs as a gradient does.
    assert want.losses[-1] < 0.8 * want.losses[0]
    np.testing.assert_allclose(got.losses, want.losses, rtol=relative)
