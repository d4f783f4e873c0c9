"""The tools on programs of the kinds that people train: each tool, one small program of each kind.

NNX steps with their optimizer, steps in a scan, Dropout and BatchNorm, eight devices, float64, a
model of a hundred layers.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from validate_kit import validate

import jaxmp
from jaxmp import numerics
from jaxmp._numerics.run_cache import bytes_of
from jaxmp._numerics.tune_costs import ProductFormat
from jaxmp._numerics.tune_report import Group, Scored, Tuned, Verified
from jaxmp._numerics.tune_solve import front

X = jax.random.normal(jax.random.key(0), (8, 16))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss_of(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean((net(x) - 1) ** 2)


@nnx.jit
def train_step(net: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(net, x)
    optimizer.update(net, grads)
    return loss


def training(policy: str = "float32", seed: int = 0) -> tuple[Net, nnx.Optimizer]:
    net = jaxmp.wrap(Net(nnx.Rngs(seed)), policy)
    return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)


def screen(report: Any) -> str:
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    return str(report)


# NNX: a step with its optimizer, BatchNorm and Dropout.


@pytest.mark.slow
def test_a_step_of_nnx_is_captured_and_changes_nothing() -> None:
    net, optimizer = training("mixed_bfloat16")
    before = list(bytes_of(nnx.state((net, optimizer))))
    run = numerics.capture(train_step, None, grad=False)(net, optimizer, X)
    assert list(bytes_of(nnx.state((net, optimizer)))) == before
    assert not run.origins()
    assert {m.site.dtype for m in run.sites.values() if m.site.op == "dot_general"} == {"bfloat16"}
    assert any(m.site.backward for m in run.sites.values())
    screen(run.compare(run))


@pytest.mark.slow
def test_what_batchnorm_and_dropout_make_is_diagnosed() -> None:
    net = Net(nnx.Rngs(0))
    mean = jnp.copy(net.norm.mean[...])
    report = jaxmp.diagnose(loss_of, "mixed_float16")(net, X)
    assert report.first is None
    np.testing.assert_array_equal(net.norm.mean[...], mean)
    assert int(net.dropout.rngs.count[...]) == 0
    first = jaxmp.diagnose(loss_of, "mixed_float16")(net, 1e6 * X).first
    assert first is not None
    assert (first.site.op, first.kind, first.site.backward) == (
        "convert_element_type",
        "overflow",
        False,
    )
    screen(report)


class WithStatistics(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(16, name="hidden")(x))
        x = nn.Dropout(0.5, deterministic=False)(nn.relu(x))
        return nn.Dense(1, name="head")(x)


@pytest.mark.slow
def test_linen_with_batchnorm_and_dropout_is_diagnosed_and_tuned() -> None:
    model = WithStatistics()
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(rngs, X)

    def loss(params: Any, x: jax.Array) -> Any:
        out, changed = model.apply(
            variables | {"params": params}, x, mutable=["batch_stats"], rngs=rngs
        )
        return jnp.mean((out - 1) ** 2), changed

    assert jaxmp.diagnose(loss, "mixed_bfloat16")(variables["params"], X).first is None
    found = jaxmp.tune(loss, probes=1)(variables["params"], [X])
    assert set(found.assignment) == {"hidden", "head"}
    screen(found)


@pytest.mark.slow
def test_a_step_of_nnx_is_validated() -> None:
    @nnx.jit
    def step(state: Any, x: jax.Array) -> jax.Array:
        net, optimizer = state
        loss, grads = nnx.value_and_grad(loss_of)(net, x)
        optimizer.update(net, grads)
        return loss

    def make_step(policy: Any, seed: int) -> Any:
        return training(policy, seed), lambda state, x: (state, step(state, x))

    def batches(seed: int) -> Any:
        return jax.random.normal(jax.random.key(seed), (4, 8, 16))

    report = validate(make_step, "mixed_bfloat16", 4, 2, batches=batches)
    result = report["mixed_bfloat16"]
    assert all(np.isfinite(result.runs[0].losses))
    assert result.runs[0].losses != report.reference_runs[0].losses
    screen(report)


# Steps in a scan.


def trained(w: jax.Array, batches: jax.Array) -> jax.Array:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x @ w))

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * jax.grad(loss)(w, x), jnp.sum(w)

    return lax.scan(step, w, batches)[0]


def test_a_step_of_a_scan_that_overflows_is_found() -> None:
    batches = jnp.stack([X, X, 1e6 * X, X])
    report = jaxmp.diagnose(trained, "mixed_float16", grad=False)(jnp.eye(16), batches)
    assert report.first is not None
    # All batches are narrowed at once, before the scan, or each in its step.
    assert report.first.kind == "overflow"
    assert report.first.iteration in ((), (2,))
    assert all(fault.iteration in ((), (2,)) for fault in report.faults)
    screen(report)


@pytest.mark.slow
def test_steps_of_a_scan_are_validated_and_tuned() -> None:
    def make_step(policy: Any, seed: int) -> Any:
        steps = jax.jit(jaxmp.autocast(trained, policy))

        def step(w: jax.Array, batches: jax.Array) -> tuple[jax.Array, jax.Array]:
            w = steps(w, batches)
            return w, jnp.mean(w**2)

        return jax.random.normal(jax.random.key(seed), (16, 16)), step

    def batches(seed: int) -> Any:
        return jax.random.normal(jax.random.key(seed), (5, 4, 8, 16))

    report = validate(make_step, "mixed_bfloat16", 5, 2, batches=batches)
    assert report["mixed_bfloat16"].runs[0].final > 0

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(trained(params["w"], x) ** 2)

    found = jaxmp.tune(loss, probes=1)({"w": jnp.eye(16)}, [jnp.stack([X] * 4)])
    assert found.verified.error <= 1e-3


# Eight devices.


def sharded(x: Any) -> Any:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


def test_a_batch_on_eight_devices_is_diagnosed_as_on_one() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    x = X.at[7].set(1e5)
    one, eight = (jaxmp.diagnose(loss, "mixed_float16")(jnp.eye(16), x) for x in (x, sharded(x)))
    assert [str(fault) for fault in eight.faults] == [str(fault) for fault in one.faults]
    assert one.first is not None
    assert eight.compare(one).first is None


@pytest.mark.slow
def test_batches_on_eight_devices_are_validated_as_on_one() -> None:
    def make_step(policy: Any, seed: int) -> Any:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.mean((x @ w - jnp.sin(x)) ** 2)

        grad = jax.jit(jax.value_and_grad(jaxmp.autocast(loss, policy)))

        def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            value, g = grad(w, x)
            return w - 0.1 * g, value

        return jax.random.normal(jax.random.key(seed), (16, 16)), step

    def batches(seed: int) -> Any:
        return jax.random.normal(jax.random.key(seed), (20, 8, 16))

    one = validate(make_step, "mixed_bfloat16", 20, 2, batches=batches)
    eight = validate(make_step, "mixed_bfloat16", 20, 2, batches=lambda s: map(sharded, batches(s)))
    results = [report["mixed_bfloat16"] for report in (one, eight)]
    assert results[0].verdict == results[1].verdict
    np.testing.assert_allclose(*(result.final_loss for result in results), rtol=1e-3)


# float64.


def test_float64_is_captured_diagnosed_and_compared() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    with jax.enable_x64(True):
        w, x = np.eye(16), np.asarray(X, np.float64)
        report = jaxmp.diagnose(loss, "p=f64,c=f32,o=f64")(jnp.asarray(w), jnp.asarray(x))
        exact = numerics.capture(loss, None)(jnp.asarray(w), jnp.asarray(x))
        far = numerics.capture(loss, None)(jnp.asarray(w), jnp.asarray(1e60 * x))
    assert report.first is None
    assert {m.site.dtype for m in exact.sites.values()} == {"float64"}
    assert "float32" in {m.site.dtype for m in report.run.sites.values()}
    assert report.compare(exact).first is None
    assert not far.origins()  # beyond float32's range, and no overflow
    screen(report)


@pytest.mark.slow
def test_float64_is_tuned() -> None:
    """Products of float64 are none that tune decides on, and it says so."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    with jax.enable_x64(True), pytest.raises(ValueError, match="has no float32 matmul"):
        jaxmp.tune(loss)({"w": jnp.eye(16)}, [jnp.asarray(np.asarray(X, np.float64))])


# A hundred layers.

LAYERS = 100


@pytest.mark.slow
def test_a_hundred_layers_fit_a_screen(tmp_path: Any) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i, w in enumerate(params):
            with jax.named_scope(f"block_{i}"):
                x = x + (1e-9 * jnp.tanh(x @ w)).astype(jnp.float16)
        return jnp.mean(x**2)

    report = jaxmp.diagnose(loss, "mixed_float16")([jnp.eye(4)] * LAYERS, X[:, :4])
    assert f"×{LAYERS}" in screen(report)
    screen(report.compare(report))
    screen(report.run.compare(report.wide))
    numerics.save(report, tmp_path / "report.npz")
    assert str(numerics.load(tmp_path / "report.npz")) == str(report)
    assert (tmp_path / "report.npz").stat().st_size < 2**20
    report.plot_underflow(tmp_path / "underflow.png")
    report.plot_exponents(tmp_path / "exponents.png")


def test_a_hundred_tuned_layers_fit_a_screen() -> None:
    ways = ((ProductFormat(),), (ProductFormat("bfloat16"),))
    names = [f"block_{i}/{name}" for i in range(LAYERS) for name in ("up", "down")]
    groups = tuple(
        Group((tuple(name.split("/")),), 1, ways, (0, 1), (1.0, 0.5), (0.0, 1e-3 * (i % 3)))
        for i, name in enumerate(names)
    )
    policies = tuple(map(jaxmp.get_policy, ("float32", "mixed_bfloat16")))
    solutions = front([group.costs for group in groups], [group.errors for group in groups])
    scored = Scored(
        None, policies, ("float32", "mixed_bfloat16"), groups, solutions, len(groups), "", None,
        {i: Verified(0.9, 0.1) for i in range(len(solutions.costs))},
    )  # fmt: skip
    text = screen(Tuned(0.05, scored, solutions.within(0.05)))
    assert "block_*/up" in text
