"""`ops={"gather": "compute"}`: tables are looked up, and cross, in 16 bits."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp

from support import autocast, explain, gaussian, iter_eqns

LOW = "mixed_bfloat16,ops=gather:compute"
TABLE = gaussian(0, 16, 8)
# One row 3,000 times: a sum that 16 bits lose.
TOKENS = jax.device_put(np.where(np.arange(4096) < 3000, 5, np.arange(4096) % 16))


def rows(table: jax.Array) -> jax.Array:
    return jnp.take(table, TOKENS, axis=0)


def scatters(fn: Any, *args: Any) -> set[str]:
    """The dtypes in which gradients of rows are added up."""
    eqns = iter_eqns(jax.make_jaxpr(fn)(*args))
    return {e.outvars[0].aval.dtype.name for e in eqns if e.primitive.name == "scatter-add"}


def gradient(policy: str) -> Any:
    fast = autocast(rows, policy)
    weights = np.random.default_rng(1).uniform(size=(4096, 8)).astype(np.float32)
    return jax.grad(lambda table: jnp.sum(weights * fast(table)))


def test_rows_are_rounded_and_nothing_else() -> None:
    got = reference(autocast(rows, LOW))(TABLE)
    assert got.dtype == jnp.float32
    taken = np.asarray(TABLE)[TOKENS]
    np.testing.assert_array_equal(got, taken.astype(jnp.bfloat16).astype(np.float32))
    # Without being asked, rows are what they are.
    np.testing.assert_array_equal(reference(autocast(rows, "mixed_bfloat16"))(TABLE), taken)


def test_gradients_of_rows_are_added_up_in_the_reduce_dtype() -> None:
    want = reference(gradient("float32"))(TABLE)
    wide, narrow = gradient(LOW), gradient(f"{LOW},reduce=bf16")
    assert scatters(wide, TABLE) == {"float32"}
    assert scatters(narrow, TABLE) == {"bfloat16"}
    got = reference(wide)(TABLE)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2.0**-9)  # each of the terms is rounded once
    assert abs(narrow(TABLE)[5] / want[5] - 1).max() > 0.1  # as by hand: 3,000 terms in 16 bits


def test_derivatives_of_other_kinds() -> None:
    fast, along = autocast(rows, LOW), np.cos(TABLE)
    low = along.astype(jnp.bfloat16).astype(np.float32)[TOKENS]

    def cubes(fn: Any) -> Any:
        return lambda table: jnp.sum(fn(table) ** 3)

    for run in (
        lambda t: jax.jvp(fast, (t,), (along,))[1],
        lambda t: jax.linearize(fast, t)[1](along),
    ):
        np.testing.assert_array_equal(reference(run)(TABLE), low)
    tables = np.stack([TABLE, 2 * np.asarray(TABLE)])
    got, want = (reference(jax.vmap(jax.grad(cubes(fn))))(tables) for fn in (fast, rows))
    np.testing.assert_allclose(got, want, rtol=0.02)
    for run in (
        lambda fn: jax.jvp(jax.grad(cubes(fn)), (TABLE,), (along,))[1],
        lambda fn: jax.grad(lambda t: jnp.sum(jax.grad(cubes(fn))(t) * along))(TABLE),
    ):
        got, want = reference(lambda run=run: (run(fast), run(rows)))()
        np.testing.assert_allclose(got, want, rtol=0.03, atol=0.03)


def test_gradients_of_rows_are_held_until_they_are_added_up() -> None:
    """Or XLA for GPUs gathers them, to add those of a product with the same table."""
    eqns = list(iter_eqns(jax.make_jaxpr(gradient(LOW))(TABLE)))
    [added_up] = [e.outvars[0] for e in eqns if e.primitive.name == "scatter-add"]
    [reader] = [e for e in eqns if added_up in e.invars]
    assert reader.primitive.name == "optimization_barrier"


class Tied(nn.Module):
    """A table that is looked up, by itself and inside a region, and multiplied."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(32, 16, name="embed")
        chosen = jnp.argsort(tokens)[:4]
        x = embed(tokens) + self.param("positions", nn.initializers.normal(), (8, 16))
        x = x + nn.Dense(16)(jnp.tanh(nn.LayerNorm()(x)))
        return embed.attend(x[chosen])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["autocast", "wrapped", "wrapped by path"])
def test_one_table_or_all(kind: str) -> None:
    tokens = jnp.arange(8) * 3 % 32
    variables = Tied().init(jax.random.key(2), tokens)
    by_path = jaxmp.PolicyMap({"embed": LOW}, default="mixed_bfloat16")
    apply = {
        "autocast": autocast(Tied().apply, LOW),
        "wrapped": jaxmp.wrap(Tied(), LOW).apply,
        "wrapped by path": jaxmp.wrap(Tied(), by_path).apply,
    }[kind]

    def loss(apply: Any) -> Any:
        return lambda variables: jnp.mean(apply(variables, tokens) ** 2)

    gathers = [
        e.outvars[0].aval
        for e in iter_eqns(jax.make_jaxpr(apply)(variables, tokens))
        if e.primitive.name == "gather" and e.outvars[0].aval.dtype in (jnp.float32, jnp.bfloat16)
    ]
    dtypes = {a.shape: a.dtype.name for a in gathers}
    assert dtypes[8, 16] == "bfloat16"
    if kind == "wrapped by path":  # what else is looked up stays as it was
        assert dtypes[4, 16] == "float32"
    got, want = (jax.grad(loss(a))(variables) for a in (apply, Tied().apply))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == jnp.float32
        assert float(jnp.linalg.norm(g - w)) < 0.03 * float(jnp.linalg.norm(w))


def test_explain_says_who_asked() -> None:
    table = explain(rows, LOW)(TABLE).rows
    [row] = [row for row in table if row.op == "gather"]
    assert (row.dtype, row.reason) == ("bfloat16", "ops={'gather': 'compute'}")


@pytest.mark.parametrize("policy", [LOW, f"{LOW},reduce=bf16"])
def test_a_table_that_is_split_crosses_in_16_bits(policy: str) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        table = jax.device_put(TABLE, NamedSharding(mesh, PartitionSpec("d")))
        chosen = np.arange(32) * 5 % 16
        tokens = jax.device_put(chosen, NamedSharding(mesh, PartitionSpec("d")))

        def fn(table: jax.Array) -> jax.Array:
            gathered = jax.sharding.reshard(table, PartitionSpec())
            found = gathered.at[tokens].get(out_sharding=PartitionSpec("d"))
            return jnp.sum(jnp.sin(found) ** 2)

        step = jax.grad(autocast(fn, policy))
        eqns = list(iter_eqns(jax.make_jaxpr(step)(table)))
        there, *_, back = [e for e in eqns if e.primitive.name == "reshard"]
        got = jax.jit(step)(table)
    assert there.invars[0].aval.dtype == jnp.bfloat16
    assert back.invars[0].aval.dtype == ("bfloat16" if "reduce" in policy else "float32")
    want = reference(jax.grad(lambda t: jnp.sum(jnp.sin(t[chosen]) ** 2)))(TABLE)
    assert np.linalg.norm(np.asarray(got) - want) < 0.01 * np.linalg.norm(want)
