"""Every construct of JAX under `autocast`: one contract for all.

The contract (`CONSTRUCTS`): under a 16-bit policy values and gradients agree with float32 within
the rounding of that type, gradients have their primal's dtype, every contraction that the author
did not pin multiplies in the compute dtype, forward and backward; under the float32 policy the
program is the plain function's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from numpy_reference import reference

from constructs import (
    BF16,
    COMPUTE,
    CONSTRUCTS,
    F16,
    Construct,
    V,
    W,
    X,
    assert_close,
    assert_low,
    data_mesh,
    loss_of,
    mlp,
    project,
)
from support import (
    CONTRACTIONS,
    assert_same_program,
    autocast,
    contraction_dtypes,
    explain,
    float16_is_slow,
    slow_when,
)


def _cases(keep: Callable[[Construct], bool]) -> pytest.MarkDecorator:
    kept = [pytest.param(c, id=c.fn.__name__) for c in CONSTRUCTS if keep(c)]
    return pytest.mark.parametrize("case", kept)


constructs = _cases(lambda case: True)
policies = pytest.mark.parametrize("policy", [BF16, F16])


def _differentiated(fn: Callable[..., Any], case: Construct) -> Callable[..., Any]:
    """The results of `fn` and their derivative: gradients, or tangents where JAX has no more."""
    if not case.diff:
        return lambda *args: (fn(*args), ())

    def reverse(*args: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = fn(*args)
            return project(out), out

        gradients, out = jax.grad(loss, argnums=case.diff, has_aux=True)(*args)
        return out, gradients

    def forward(*args: Any) -> Any:
        def of(*moved: Any) -> Any:
            full = list(args)
            for i, value in zip(case.diff, moved, strict=True):
                full[i] = value
            return fn(*full)

        primals = tuple(args[i] for i in case.diff)
        return jax.jvp(of, primals, tuple(jnp.cos(p) for p in primals))

    return forward if case.forward_only else reverse


# What has a primitive that `numpy_reference` lacks.
COMPILED_ONLY = {
    *("composite", "custom_root", "custom_vmap", "linear_call", "ragged_dot", "reductions"),
    *("shard_map_all_gather", "shard_map_collectives", "shard_map_psum", "vmap_inside"),
}

# One of each kind: by default these are compiled as well, in bfloat16.
OF_EACH_KIND = {
    *("jit_nested", "scan", "while_loop", "cond", "remat_in_scan", "custom_vjp_in_scan"),
    *("shard_map_collectives", "ragged_dot", "reductions", "deep_nest"),
}

# By default: models have loops and jits, `test_offload` compiles what is computed again.
COMPILED_ELSEWHERE = {"jit_nested", "while_loop", "remat_in_scan", "deep_nest"}


@functools.cache
def _expected(index: int, by: Callable[..., Any]) -> Any:
    case = CONSTRUCTS[index]
    return by(_differentiated(case.fn, case))(*case.args)


def _assert_agrees(case: Construct, policy: str, by: Callable[..., Any]) -> None:
    want = _expected(CONSTRUCTS.index(case), by)
    got = by(_differentiated(autocast(case.fn, policy, data=0), case))(*case.args)
    assert_close(got[0], want[0], dtype=COMPUTE[policy], depth=case.depth)
    assert_close(got[1], want[1], dtype=COMPUTE[policy], depth=2 * case.depth)


def test_one_of_each_kind_is_a_construct() -> None:
    assert {case.fn.__name__ for case in CONSTRUCTS} >= OF_EACH_KIND | COMPILED_ONLY


def _one_of_many(case: Construct) -> bool:
    return case.fn.__name__ not in OF_EACH_KIND


@slow_when(lambda case, policy: policy == F16 and _one_of_many(case))
@_cases(lambda case: case.fn.__name__ not in COMPILED_ONLY)
@policies
def test_values_and_derivatives(case: Construct, policy: str) -> None:
    _assert_agrees(case, policy, reference)


@slow_when(lambda case, policy: policy == F16 or _one_of_many(case))
@slow_when(lambda case: case.fn.__name__ in COMPILED_ELSEWHERE)
@constructs
@policies
def test_values_and_derivatives_compiled(case: Construct, policy: str) -> None:
    _assert_agrees(case, policy, jax.jit)


# Without `jax.jit` JAX runs, and differentiates, these in other ways than compiled.
EAGER = {"jit_nested", "scan", "while_loop", "cond", "custom_vjp_in_scan", "shard_map_collectives"}


@slow_when(lambda case: case.fn.__name__ not in EAGER)
@constructs
def test_values_without_jit(case: Construct) -> None:
    got = autocast(case.fn, BF16, data=0)(*case.args)
    want = _expected(CONSTRUCTS.index(case), jax.jit)[0]
    assert_close(got, want, dtype="bfloat16", depth=case.depth)


@constructs
def test_contractions(case: Construct) -> None:
    cast = autocast(case.fn, BF16, data=0)
    if case.low is None:
        assert "*" not in "".join(contraction_dtypes(cast, *case.args))
        return
    low, full = case.low, case.full
    assert contraction_dtypes(case.fn, *case.args) == Counter(float32=low + full)
    assert contraction_dtypes(cast, *case.args) == Counter(bfloat16=low, **_float32(full))
    if not full:
        assert_low(_differentiated(cast, case), case.args, "bfloat16")


@slow_when(_one_of_many)
@constructs
def test_float32_policy_is_the_identity(case: Construct) -> None:
    same = _differentiated(autocast(case.fn, "float32", data=0), case)
    assert_same_program(same, _differentiated(case.fn, case), *case.args)


def _two(case: Construct) -> tuple[Any, Any]:
    """Arguments with a batch of two, and the axes to map over."""
    first, *rest = case.args
    return (np.stack([first, -np.asarray(first)]), *rest), (0,) + (None,) * len(rest)


@slow_when(_one_of_many)
@_cases(lambda case: case.vmappable)
def test_vmap(case: Construct) -> None:
    args, axes = _two(case)
    plain = jax.vmap(case.fn, in_axes=axes)
    inside = jax.vmap(autocast(case.fn, BF16, data=0), in_axes=axes)
    around = autocast(plain, BF16, data=0)
    by = jax.jit if _one_of_many(case) or case.fn.__name__ in COMPILED_ONLY else reference
    want, *found = by(lambda *args: [fn(*args) for fn in (plain, inside, around)])(*args)
    for got in found:
        assert_close(got, want, dtype="bfloat16", depth=case.depth)
    if case.low is not None and not case.full:
        for fn in (inside, around):
            assert_low(fn, args, "bfloat16")


def _float32(count: int) -> dict[str, int]:
    return {"float32": count} if count else {}


def test_explain_agrees_with_the_jaxpr() -> None:
    for case in CONSTRUCTS:
        plan = explain(case.fn, BF16, data=0)(*case.args)
        assert all(row.reason for row in plan.rows)
        rows = [row for row in plan.rows if row.op in CONTRACTIONS]
        assert sum(plan.products().values()) == sum(row.count for row in rows)
        if case.low is not None:
            want = {"bfloat16", *_float32(case.full)}
            assert {row.dtype for row in rows} == want == set(plan.products()), case.fn.__name__
            assert plan.products().get("float32", 0) == case.full


# --- transformations around autocast ---------------------------------------------------------


AROUND = {
    "jit": lambda f: jax.jit(f),
    "value_and_grad": lambda f: jax.value_and_grad(loss_of(f), argnums=(0, 1, 2)),
    "jvp": lambda f: lambda *a: jax.jvp(f, a, tuple(jnp.cos(t) for t in a)),
    "vjp": lambda f: lambda *a: jax.vjp(f, *a)[1](jnp.cos(a[0])),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*(jnp.cos(t) for t in a)),
    "jacfwd": lambda f: lambda x, w, v: jax.jacfwd(f)(x[:1], w, v),
    "jacrev": lambda f: lambda x, w, v: jax.jacrev(f)(x[:1], w, v),
    "hvp": lambda f: (
        lambda x, w, v: jax.jvp(jax.grad(lambda b: loss_of(f)(x, b, v)), (w,), (jnp.cos(w),))[1]
    ),
    "reverse_over_reverse": lambda f: (
        lambda x, w, v: jax.grad(lambda b: jnp.sum(jax.grad(loss_of(f), argnums=1)(x, b, v) ** 2))(
            w
        )
    ),
    "scan": lambda f: lambda x, w, v: lax.scan(lambda h, _: (f(h, w, v), None), x, length=2)[0],
    "while_loop": lambda f: (
        lambda x, w, v: lax.fori_loop(0, jnp.int32(2), lambda _, h: f(h, w, v), x)
    ),
    "cond": lambda f: lambda x, w, v: lax.cond(x[0, 0] < 1e3, f, lambda x, w, v: x, x, w, v),
    "remat": lambda f: jax.grad(loss_of(jax.checkpoint(f)), argnums=(0, 1, 2)),
    "remat_policy": lambda f: jax.grad(
        loss_of(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)),
        argnums=(1, 2),
    ),
    "vmap": lambda f: lambda x, w, v: jax.vmap(f, in_axes=(0, None, None))(x, w, v),
    "vmap_of_grad": lambda f: (
        lambda x, w, v: jax.vmap(jax.grad(loss_of(f), argnums=1), in_axes=(0, None, None))(x, w, v)
    ),
    "vmap_axis_name": lambda f: (
        lambda x, w, v: jax.vmap(lambda a: lax.psum(f(a, w, v), "i"), axis_name="i")(x)
    ),
    "shard_map": lambda f: (
        lambda x, w, v: jax.shard_map(
            f,
            mesh=data_mesh(),
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
        )(x, w, v)
    ),
    "custom_vjp": lambda f: _in_custom_vjp(f),
    "custom_jvp": lambda f: _in_custom_jvp(f),
    "eval_shape_then_call": lambda f: lambda *a: (jax.eval_shape(f, *a), f(*a))[1],
    "associative_scan": lambda f: (
        lambda x, w, v: lax.associative_scan(lambda a, b: f(a, w, v) + b, jnp.stack([x, x, -x]))
    ),
}


def _in_custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *a: (f(*a), a), lambda a, g: tuple(-2 * t for t in jax.vjp(f, *a)[1](g)))
    return jax.grad(loss_of(wrapped), argnums=(0, 1, 2))


def _in_custom_jvp(f):
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def rule(primals, tangents):
        y, dy = jax.jvp(f, primals, tangents)
        return y, 3 * dy

    return jax.grad(loss_of(wrapped), argnums=(0, 1, 2))


# The others are compositions of these.
COMPUTED = {
    *("value_and_grad", "jvp", "hvp", "scan", "cond", "remat", "vmap_of_grad", "vmap_axis_name"),
    *("shard_map", "custom_vjp", "custom_jvp", "eval_shape_then_call", "associative_scan"),
}


@slow_when(lambda name: name not in COMPUTED)
@pytest.mark.parametrize("name", AROUND)
def test_around_autocast(name: str) -> None:
    fn = AROUND[name](autocast(mlp, BF16, data=0))
    by = jax.jit if name in ("shard_map", "vmap_axis_name") else reference
    got, want = by(lambda *args: [f(*args) for f in (fn, AROUND[name](mlp))])(X, W, V)
    assert_close(got, want, dtype="bfloat16", depth=6)


@float16_is_slow
@policies
def test_every_contraction_is_low_with_transformations_around_and_inside(policy: str) -> None:
    for name, around in AROUND.items():
        fn = around(autocast(mlp, policy, data=0))
        assert_low(fn, (X, W, V), COMPUTE[policy])
        if name != "eval_shape_then_call":
            fn = autocast(around(mlp), policy, data=0)
            # The product of a Jacobian's basis, which is made of literals; one example's outer one.
            by_law = int(name in ("jacfwd", "vmap_of_grad"))
            assert contraction_dtypes(fn, X, W, V)["float32"] == by_law, name
