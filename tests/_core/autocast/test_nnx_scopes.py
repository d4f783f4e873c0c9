"""NNX modules in what tools print: by the paths that a `PolicyMap` takes, and unchanged after."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp

from support import ones

POLICY = "mixed_bfloat16"
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
PRODUCTS = {f"blocks/{i}/{name}" for i in range(2) for name in ("up", "down")} | {"head"}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, x: jax.Array) -> jax.Array:
        return jnp.mean(self(x) ** 2)


@nnx.jit
def made() -> Net:
    return Net(nnx.Rngs(0))


def loss_of(net: Net, x: jax.Array) -> jax.Array:
    return net.loss(x)


def paths(rows: object) -> set[str]:
    return {row.path for row in rows if row.op == "dot_general"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_explain_and_audit_name_the_modules(wrapped: bool) -> None:
    plain = made()
    net, tx = jaxmp.prepare(plain, optax.adam(1e-3), POLICY) if wrapped else (plain, optax.sgd(1.0))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = jaxmp.value_and_grad(loss_of, optimizer.opt_state)(net, x)
        optimizer.update(net, grads)
        return loss

    before = nnx.clone(net)
    policy = "float32" if wrapped else POLICY
    shown = jaxmp.explain(loss_of, policy)(net, X)
    assert paths(shown.rows) == paths(jaxmp.explain(step)(net, optimizer, X).rows) == PRODUCTS
    assert "blocks/*/up ×2" in str(shown)
    assert paths(jaxmp.explain(net.loss, policy)(X).rows) == PRODUCTS
    assert paths(jaxmp.explain(net.loss, policy, only="blocks/*/up")(X).rows) == {
        "blocks/0/up",
        "blocks/1/up",
    }
    audited = jaxmp.audit(step)(net, optimizer, X)
    assert {op.path for op in audited.operations if op.flops} == PRODUCTS
    if not wrapped:
        places = {f.path for f in audited.findings if f.kind == "float32-product"}
        assert places == PRODUCTS
    # Looking changes nothing, the modules' classes neither.
    assert nnx.graphdef(net) == nnx.graphdef(before)
    assert jax.tree.all(jax.tree.map(np.array_equal, net, before))


@pytest.mark.slow
def test_diagnose_names_the_module() -> None:
    net = made()
    net.blocks[1].up.kernel[...] *= 1e6
    first = jaxmp.diagnose(loss_of, "mixed_float16")(net, ones(*X.shape)).first
    assert first.site.path == "blocks/1/up"


def test_a_module_that_is_wrapped_while_a_tool_looks_is_not_wrapped_before() -> None:
    def loss(net: Net, x: jax.Array) -> jax.Array:
        return jnp.mean(jaxmp.wrap(net.blocks[0], POLICY)(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = jaxmp.explain(loss)(made(), X).rows
    assert {row.dtype for row in rows if row.op == "dot_general"} == {"bfloat16"}
