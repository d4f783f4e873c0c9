"""The tools of `numerics` on kinds of programs and arguments that are easily forgotten."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import NamedSharding, PartitionSpec
from public_models import build
from test_numerics_capture import measured

import jaxmp
from jaxmp import numerics
from jaxmp._tools.files import bytes_of
from jaxmp._tools.numerics.capture import prepare
from jaxmp._tools.numerics.measurements import Measurements, look
from jaxmp._tools.numerics.origins import Walk
from jaxmp._tools.numerics.statistics import Statistics, unpack
from jaxmp._tools.numerics.survey import Loop, Site, SurveyedProgram

from support import gaussian, slow_when

X, W = gaussian(0, 4, 8), gaussian(1, 8, 8, scale=1 / 3)


def ops(run: numerics.Capture) -> list[str]:
    return [origin.site.op for origin in run.origins()]


# Programs.


@pytest.mark.slow
def test_a_loop_that_ends_elsewhere_for_each_element() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        def until_small(row: jax.Array) -> jax.Array:
            return lax.while_loop(lambda h: jnp.sum(h**2) > 1, lambda h: jnp.tanh(h @ w) / 2, row)

        return jax.vmap(until_small)(x * jnp.arange(4.0)[:, None])

    run = numerics.capture(fn, None, grad=False)(W, X)
    np.testing.assert_array_equal(run.results, jax.jit(fn)(W, X))
    np.testing.assert_allclose(run.measured_results, run.results, atol=1e-6)
    [product] = [m for m in run.sites.values() if m.site.op == "dot_general"]
    assert product.statistics.runs >= 2


def test_complex_numbers_are_measured() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.abs(jnp.fft.fft(x))

    run = numerics.capture(lambda x: fn(jnp.exp(1e3 * jnp.abs(x))), None, grad=False)(X)
    assert ops(run) == ["exp"]
    run = numerics.capture(fn, None, grad=False)(jnp.full((2, 8), 3e38))  # finite as it comes in
    assert ops(run) == ["fft"]
    [fft] = [m for m in run.sites.values() if m.site.op == "fft"]
    assert fft.site.dtype == "complex64"


def test_float64_is_not_infinite_beyond_float32() -> None:
    with jax.enable_x64(True):
        found = measured(jnp.array([1e300, -1e-300, 0.0, 2.0]))
        infinite = measured(jnp.array([1e300, jnp.inf]))
    assert not found.is_infinite
    assert (found.zeros, found.infinities) == (1, 0)
    np.testing.assert_allclose(
        [found.largest, found.smallest], [np.finfo("f").max, np.finfo("f").tiny]
    )
    assert infinite.is_infinite


@slow_when(lambda shape: shape in ((100_000,), (300, 2, 5)))
@pytest.mark.parametrize("shape", [(100_000,), (3, 70_001), (300, 2, 5), (0, 8)])
def test_a_look_makes_nothing_larger_than_what_it_looks_at(shape: tuple[int, ...]) -> None:
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    jaxpr = jax.make_jaxpr(lambda x: look(x[None]))(x)
    made = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars]
    assert max(made) <= max(x.size + 128 * 16, 16 * 128)
    [sample] = np.asarray(look(x[None]).sample)
    assert len(set(sample.tolist())) == len(sample)  # none twice, and nothing else
    assert len(sample) >= min(x.size, 1000)


def solved(w: jax.Array, x: jax.Array) -> jax.Array:
    def speed(y: jax.Array, t: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(y @ w)

    return jnp.mean(odeint(speed, x[0], jnp.array([0.0, 1.0]), w)[-1] ** 2)


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.softmax(h @ w) @ w.T, None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x, length=3)[0] ** 2)


def test_a_loss_of_loops_is_the_same() -> None:
    plain = jax.jit(jax.value_and_grad(jaxmp.autocast(layers, "mixed_bfloat16")))
    results = prepare(layers, "mixed_bfloat16", (W, X)).results()
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(plain(W, X)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_the_gradients_of_a_solver_are_the_same_but_for_the_order_of_sums() -> None:
    """XLA fuses the sums of one loop in two ways, with and without what is measured.

    In float32 the two differ by 2e-6 of the largest gradient, and such a difference may turn one
    rounding to bfloat16 over.
    """

    def run(policy: str) -> tuple[jax.Array, jax.Array]:
        return jax.jit(jax.value_and_grad(jaxmp.autocast(solved, policy)))(W, X)

    value, got = prepare(solved, "mixed_bfloat16", (W, X)).results()
    want_value, want = run("mixed_bfloat16")
    allowed = 2**-13 * jnp.abs(want).max()
    assert value == want_value
    np.testing.assert_allclose(got, want, rtol=0, atol=allowed)
    assert jnp.abs(got - run("float32")[1]).max() > 2 * allowed


# The order of what went wrong.


def site(name: str, *loops: Loop) -> Site:
    return Site(name, "log", "", "", "activation", "float32", (), loops=loops)


def nan_in(*at: tuple[int, ...], shape: tuple[int, ...]) -> Statistics:
    is_nan = np.zeros(shape, bool)
    for one in at:
        is_nan[one] = True
    return unpack(1, Measurements(np.where(is_nan, np.float32(np.nan).view("i4"), 0)))


def test_nested_loops_run_iteration_by_iteration() -> None:
    outer, inner = Loop("outer"), Loop("inner")
    several = [site(f"before {i}", outer) for i in range(3)]
    several += [site("inside", outer, inner), site("after", outer), site("last")]
    measured = {one.name: nan_in(shape=(2, 9)[: len(one.loops)]) for one in several}
    measured["before 2"] = nan_in((0,), shape=(2,))
    measured["inside"] = nan_in((0, 1), (0, 8), (1, 0), shape=(2, 9))
    measured["after"] = nan_in((0,), shape=(2,))
    measured["last"] = nan_in((), shape=())
    walk = Walk(SurveyedProgram({one.name: one for one in several}, ()), measured)
    assert [(origin.site.name, origin.at) for origin in walk.everywhere()] == [
        ("before 2", (0,)),
        ("inside", (0, 1)),
        ("inside", (0, 8)),
        ("after", (0,)),
        ("inside", (1, 0)),
        ("last", ()),
    ]


# What it is called with.


def test_arguments_that_cannot_be_measured() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w)

    with pytest.raises(ValueError, match=r"nothing to measure: .*give jnp.float32\(x\)"):
        numerics.capture(lambda n, x: x + int(n), None)(3.0, jnp.arange(3))
    with pytest.raises(TypeError, match=r"arguments are arrays; args\[0\]\['w'\] is Shape"):
        numerics.capture(lambda p, x: loss(p["w"], x), None)({"w": jax.eval_shape(lambda: W)}, X)
    with pytest.raises(ValueError, match="grad=True, but the function returns neither a floating"):
        numerics.capture(lambda w, x: x @ w, None, grad=True)(W, X)
    with pytest.raises(ValueError, match="argnums=5, but there are 2 arguments"):
        numerics.capture(loss, None, argnums=5)(W, X)


def test_which_argument_is_a_weight() -> None:
    for argnums in (-1, [1]):
        prepared = prepare(lambda x, w: jnp.sum(x @ w), None, (X, W), argnums=argnums)
        given = [site for site in prepared.program.sites.values() if site.op == "argument"]
        assert [site.kind for site in given] == ["activation", "weight"]


def test_a_run_knows_its_policy() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x * x.astype(jnp.bfloat16)

    assert prepare(fn, "mixed_bfloat16", (X,)).policy == "mixed_bfloat16"
    assert prepare(fn, None, (X,)).policy == "as written, in bfloat16, float32"


# What people train: NNX steps with their optimizer, on eight devices, in float64.

BATCH = gaussian(0, 8, 16)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


@pytest.mark.slow
def test_a_step_of_nnx_is_captured_and_changes_nothing() -> None:
    @nnx.jit
    def train_step(net: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - 1) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    net = jaxmp.wrap(Net(nnx.Rngs(0)), "mixed_bfloat16")
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    before = list(bytes_of(nnx.state((net, optimizer))))
    run = numerics.capture(train_step, None, grad=False)(net, optimizer, BATCH)
    assert list(bytes_of(nnx.state((net, optimizer)))) == before
    assert not run.origins()
    assert {m.site.dtype for m in run.sites.values() if m.site.op == "dot_general"} == {"bfloat16"}
    assert any(m.site.backward for m in run.sites.values())


def square_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_a_batch_on_eight_devices_is_diagnosed_as_on_one() -> None:
    x = BATCH.at[7].set(1e5)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    one, eight = (jaxmp.diagnose(square_loss, "mixed_float16")(jnp.eye(16), x) for x in (x, split))
    assert [str(fault) for fault in eight.faults] == [str(fault) for fault in one.faults]
    assert one.first is not None


def test_float64_is_captured_and_diagnosed() -> None:
    with jax.enable_x64(True):
        w, x = jnp.eye(16, dtype=jnp.float64), jnp.asarray(BATCH, jnp.float64)
        report = jaxmp.diagnose(square_loss, "p=f64,c=f32,o=f64")(w, x)
        exact = numerics.capture(square_loss, None)(w, x)
        far = numerics.capture(square_loss, None)(w, 1e60 * x)
        with pytest.raises(ValueError, match="has no float32 matmul"):
            jaxmp.tune(lambda p, x: square_loss(p["w"], x))({"w": w}, [x])
    assert report.first is None
    assert {m.site.dtype for m in exact.sites.values()} == {"float64"}
    assert "float32" in {m.site.dtype for m in report.run.sites.values()}
    assert not far.origins()  # beyond float32's range, and no overflow


# Batch statistics, a recurrence, experts, a graph, a kernel with a derivative rule of its own.
MODELS = ("resnet_batchnorm", "lstm_seq2seq", "mixture_of_experts", "gnn", "flash_attention")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_public_models_are_measured_and_nothing_is_found(name: str) -> None:
    model = build(name)
    report = jaxmp.diagnose(model.loss, "mixed_bfloat16")(model.params, model.batch(0))
    assert report.faults == ()
    assert report.predicted == ()
    ran = [m for m in report.run.sites.values() if (m.statistics.joined().runs or 0) > 0]
    assert {m.site.backward for m in ran} == {True, False}
    assert any(m.site.dtype == "bfloat16" for m in ran)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scanned_lm", "resnet_batchnorm"])
def test_float32_predicts_what_overflows_in_float16(name: str) -> None:
    model = build(name)
    # Some kernels so large that what they multiply leaves float16.
    leaves, tree = jax.tree.flatten(model.params)
    grown = [x * 3e4 if x.ndim > 1 and i % 3 == 0 else x for i, x in enumerate(leaves)]
    grown = [jnp.clip(x, -6e4, 6e4) for x in grown]
    report = jaxmp.diagnose(model.loss, "mixed_float16")(
        jax.tree.unflatten(tree, grown), model.batch(0)
    )
    found = (*report.faults, *report.contained)
    overflowed = {f.site.name for f in found if f.kind == "overflow" and not f.site.backward}
    predicted = {site.name for site in report.predicted if not site.backward}
    assert predicted & overflowed
    # What reads something that is not finite already is not asked: it has no number to overflow.
    asked = {name for name in predicted | overflowed if not spoilt(report.run.sites, name)}
    assert predicted & asked == overflowed & asked


def spoilt(sites: dict[str, numerics.Measured], name: str) -> bool:
    """Whether what a site reads is not finite."""
    reads = [sites[ref].statistics.joined() for ref in sites[name].site.reads if ref in sites]
    return any(s.is_nan or s.is_infinite for s in reads)
