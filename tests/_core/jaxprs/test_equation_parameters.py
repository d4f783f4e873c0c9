"""What inner jits and equations carry is kept: donation, shardings, names, parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from constructs import (
    BF16,
    STACK,
    V,
    W,
    X,
    assert_close,
    data_mesh,
    jit_donated,
    jit_shared,
    remat,
    remat_in_scan,
    remat_names,
    remat_policy,
)
from support import autocast, iter_eqns, jaxpr_of


def _jits(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return [e for e in iter_eqns(jaxpr_of(fn, *args)) if e.primitive.name in ("pjit", "jit")]


def test_donation_of_inner_jits_is_kept() -> None:
    (eqn,) = [
        e for e in _jits(autocast(jit_donated, BF16), X, W, V) if any(e.params["donated_invars"])
    ]
    assert eqn.params["donated_invars"].count(True) == 1
    donated = [v for v, d in zip(eqn.invars, eqn.params["donated_invars"], strict=True) if d]
    assert donated[0].aval.shape == X.shape


def test_donated_buffers_around_autocast() -> None:
    step = jax.jit(autocast(lambda w, x: w - 0.1 * (x.T @ (x @ w)), BF16), donate_argnums=0)
    w = W + 0
    out = step(w, X)
    assert w.is_deleted()
    assert_close(out, W - 0.1 * (X.T @ (X @ W)), dtype="bfloat16", depth=2)


def test_shardings_of_inner_jits_and_constraints_are_kept() -> None:
    mesh = data_mesh()
    rows = NamedSharding(mesh, PartitionSpec("d"))
    whole = NamedSharding(mesh, PartitionSpec())

    def fn(x, w):
        h = jax.jit(jnp.matmul, in_shardings=(rows, whole), out_shardings=rows)(x, w)
        return lax.with_sharding_constraint(jnp.tanh(h), rows) @ w

    x = jnp.tile(X, (4, 1))
    cast = autocast(fn, BF16)
    want = {str(e.params["in_shardings"]) + str(e.params["out_shardings"]) for e in _jits(fn, x, W)}
    got = {
        str(e.params["in_shardings"]) + str(e.params["out_shardings"]) for e in _jits(cast, x, W)
    }
    assert any("'d'" in s for s in want)
    assert {s for s in want if "'d'" in s} == {s for s in got if "'d'" in s}
    constraints = [
        e for e in iter_eqns(jaxpr_of(cast, x, W)) if e.primitive.name == "sharding_constraint"
    ]
    assert [e.params["sharding"].spec for e in constraints] == [PartitionSpec("d")]
    assert_close(jax.jit(cast)(x, W), jnp.tanh(x @ W) @ W, dtype="bfloat16", depth=2)


def test_names_of_inner_jits_are_kept() -> None:
    names = {e.params["name"] for e in _jits(autocast(jit_shared, BF16), X, W, V)}
    assert "dense" in names


def _saved(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of the residuals that the backward pass of `fn` holds."""
    _, pullback = jax.eval_shape(lambda *a: jax.vjp(fn, *a), *args)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pullback))


def test_checkpoint_policy_by_name_is_kept() -> None:
    """Saving by name still works, and what is saved is the 16-bit value."""
    cast = autocast(remat_names, BF16)
    tags = [e for e in iter_eqns(jaxpr_of(cast, X, W, V)) if e.primitive.name == "name"]
    assert [e.params["name"] for e in tags] == ["kept"]
    assert _saved(cast, X, W, V) <= _saved(remat_names, X, W, V)
    nothing = autocast(remat, BF16)
    assert _saved(nothing, X, W, V) <= _saved(remat, X, W, V)


def test_remat_parameters_are_kept() -> None:
    for fn in (remat_policy, remat_in_scan):
        args = (X, STACK) if fn is remat_in_scan else (X, W, V)

        def found(f, args=args):
            return [
                (e.params["prevent_cse"], e.params["policy"])
                for e in iter_eqns(jaxpr_of(f, *args))
                if e.primitive.name in ("checkpoint", "remat", "remat2")
            ]

        assert found(fn)
        assert found(autocast(fn, BF16)) == found(fn)


def _scoped(x, w, v):
    with jax.named_scope("encoder"):
        h = x @ w
        with jax.named_scope("gate"):
            h = jnp.tanh(h)
    return h @ v


def test_named_scopes_and_source_lines_are_kept() -> None:
    for build in (
        lambda f: f,
        lambda f: lambda x, w, v: lax.scan(lambda h, _: (f(h, w, v), None), x, length=2)[0],
        jax.checkpoint,
        jax.jit,
    ):
        eqns = list(iter_eqns(jaxpr_of(autocast(build(_scoped), BF16), X, W, V)))
        inner = [e for e in eqns if e.primitive.name == "dot_general"]
        # Products with parameters stand between two functions with derivative rules, and have the
        # scope of what is around them.
        dots = [e for e in eqns if e.primitive.name == "custom_jvp_call"]
        (tanh,) = [e for e in eqns if e.primitive.name == "tanh"]
        scoped = ["encoder" in str(e.source_info.name_stack) for e in dots]
        assert scoped == [True] * (len(dots) // 2) + [False] * (len(dots) // 2)
        assert "encoder/gate" in str(tanh.source_info.name_stack)
        for eqn in (*dots, *inner, tanh):
            frames = eqn.source_info.traceback.frames
            assert any(f.function_name.endswith("_scoped") for f in frames)
