"""`explain`, `audit` and `preflight` of programs of every kind: they answer, on a screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import _screen

from support import needs_gpu_compiler

MIXED = "mixed_bfloat16"
F32 = jnp.float32
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(*sizes: int, dtype: Any = F32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def nnx_step() -> Program:
    """A step with an optimizer, both of which it changes."""
    net = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), jnp.tanh,
                         nnx.Linear(32, 16, rngs=nnx.Rngs(1)))  # fmt: skip
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - x) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    return step, (net, optimizer, shape(8, 16))


def sharded() -> Program:
    """Parameters and batch over eight devices."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    return step, (shape(64, 64, sharding=split), shape(64, 64, sharding=split))


def scanned() -> Program:
    """Many steps in one call."""

    def steps(params: Any, batches: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return w - 0.1 * grad, loss

        return jax.lax.scan(step, params, batches)

    return steps, (shape(32, 32), shape(10, 8, 32))


class Stateful(nn.Module):
    """Layers with statistics and with noise."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3))(x))
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(x))
        return nn.Dense(10)(x.mean((1, 2)))


def stateful() -> Program:
    model = Stateful()
    x, key = shape(16, 8, 8, 3), jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda k, x: model.init({"params": k, "dropout": k}, x), key, x)

    def loss(params: Any, rest: Any, x: Any, key: Any) -> Any:
        y, updated = model.apply(
            {"params": params, **rest}, x, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return jnp.mean(y**2), updated

    rest = {"batch_stats": variables["batch_stats"]}
    return jax.value_and_grad(loss, has_aux=True), (variables["params"], rest, x, key)


def deep() -> Program:
    """A hundred layers, each written out."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss), ([shape(16, 16) for _ in range(100)], shape(32, 16))


PROGRAMS = {each.__name__: each for each in (nnx_step, sharded, scanned, stateful, deep)}


def check_screen(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= _screen.LINES
    assert max(map(len, lines)) <= _screen.COLUMNS


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_and_audit_fit_a_screen(name: str) -> None:
    fn, args = PROGRAMS[name]()
    explained = jaxmp.explain(fn, MIXED)(*args)
    check_screen(str(explained))
    written, mixed = jaxmp.audit(fn)(*args), jaxmp.audit(fn, MIXED)(*args)
    check_screen(str(written))
    check_screen(str(mixed))
    assert written.product_share() == {"float32": 1.0}
    assert mixed.product_share() == {"bfloat16": 1.0}
    count = sum(op.count for op in mixed.operations if op.flops)
    assert count == sum(explained.products().values())
    mixed.assert_no("float32-product", "overruled")


@pytest.mark.filterwarnings("ignore:autocast. 100% of what products multiply is float64")
def test_a_float64_program_fits_a_screen_and_is_told_of() -> None:
    with jax.enable_x64(True):
        fn, args = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), [shape(8, 8, dtype=np.float64)] * 2
        check_screen(str(jaxmp.explain(fn, MIXED)(*args)))
        report = jaxmp.audit(fn, MIXED)(*args)
        narrowed = jaxmp.audit(fn, "p=f64,c=f32,o=f64")(*args)
    check_screen(str(report))
    assert {f.kind for f in report.findings} == {"float64-product"}
    assert narrowed.product_share() == {"float32": 1.0}


@needs_gpu_compiler
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "deep"])
def test_preflight_fits_a_screen(name: str) -> None:
    fn, args = PROGRAMS[name]()
    target = "gpu-h100:8" if name == "sharded" else "gpu-h100"
    report = jaxmp.preflight(fn, ["float32", MIXED], target=target, price_per_hour=2.5)(*args)
    check_screen(str(report))
    audited = jaxmp.audit(fn, MIXED)(*args)
    result = report[MIXED]
    assert result.requested == audited.product_flops()
    assert report.step_time(MIXED).seconds > 0
    assert report.cost(MIXED) > 0
    assert result.device_count == (8 if name == "sharded" else 1)


@needs_gpu_compiler
@pytest.mark.slow
def test_preflight_of_many_layers_fits_a_screen() -> None:
    fn, args = deep()
    check_screen(str(jaxmp.preflight(fn, ["float32", MIXED], target="gpu-h100")(*args)))


@needs_gpu_compiler
@pytest.mark.slow
def test_of_a_float64_program_no_time_is_said() -> None:
    with jax.enable_x64(True):
        args = [shape(8, 8, dtype=np.float64)] * 2
        report = jaxmp.preflight(jnp.matmul, target="gpu-h100", price_per_hour=1)(*args)
    check_screen(str(report))
    assert report.step_time("as written") is report.cost("as written") is None
