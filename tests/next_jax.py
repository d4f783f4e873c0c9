"""Programs for JAX's next generation of remat, custom_vjp, custom_jvp and scan.

Not collected by itself: `test_next_jax` runs this file in a process per flag, and whoever meets a
new flag can run it by hand::

    JAX_REMAT3=1 python -m pytest -n0 tests/next_jax.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from observed import observe

import jaxmp
from jaxmp._core.jaxprs import compat

from constructs import CONSTRUCTS, loss_of
from linen_models import variables_of

BF16 = "mixed_bfloat16"
X = jax.device_put(np.sin(0.7 * np.arange(48.0) + 0.3).reshape(6, 8))
W = jax.device_put(np.sin(np.arange(64.0)).reshape(8, 8) / 3)
SCAN3 = os.environ.get("JAX_SCAN3") == "1"
scan_runs_as_before = pytest.mark.skipif(SCAN3, reason="JAX cannot differentiate this scan yet")


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, also of jaxprs that an object in the parameters holds."""
    for eqn in compat.closed(jaxpr).jaxpr.eqns:
        yield eqn
        for inner in compat.inner_jaxprs(eqn):
            yield from equations(inner)


def products(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """How many matrix products multiply in each dtype."""
    return Counter(
        str(eqn.invars[0].aval.dtype)
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name == "dot_general"
    )


# --- programs: (w, x) -> scalar ------------------------------------------------------------------

# Of the constructs, those that the next generation traces otherwise.
NAMES = (
    "remat remat_names custom_jvp custom_jvp_nondiff gradient_reversal custom_vjp "
    "custom_vjp_nondiff custom_vjp_closure custom_gradient custom_rules_with_numpy_constants"
)


def construct(name):
    [fn] = [case.fn for case in CONSTRUCTS if case.fn.__name__ == name]

    def program(w, x):
        return loss_of(fn)(x, w, w / 2)

    program.__name__ = name
    return program


def remat_with_cse(w, x):
    return jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w, prevent_cse=False)(x))


def remat_that_saves_products(w, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w, policy=policy)(x))


def remat_in_remat(w, x):
    inner = jax.checkpoint(lambda x: jnp.tanh(x @ w))
    return jnp.sum(jax.checkpoint(lambda x: inner(inner(x)))(x))


def remat_under_vmap(w, x):
    return jnp.sum(jax.vmap(jax.checkpoint(lambda v: jnp.tanh(v @ w) @ w))(x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.LayerNorm()(nn.Dense(8)(x))))


BLOCK = nn.remat(Block)()
VARIABLES = variables_of(BLOCK, X)  # drawn inside of a program, weights would be data


def linen_remat(w, x):
    return jnp.sum(BLOCK.apply(VARIABLES, x @ w) ** 2)


@jax.custom_vjp
def reversed_layer(x, w):
    return jnp.tanh(x @ w)


reversed_layer.defvjp(
    lambda x, w: (reversed_layer(x, w), (x, w)), lambda r, g: (-(g @ r[1].T), 2 * (r[0].T @ g))
)


def custom_vjp_under_vmap(w, x):
    return jnp.sum(jax.vmap(lambda v: reversed_layer(v, w))(jnp.stack([x, 0.5 * x])) ** 2)


@jax.custom_vjp
def picky(x, w):
    return jnp.tanh(x @ w)


def picky_forward(x, w):
    assert w.perturbed
    assert not x.perturbed
    return picky(x.value, w.value), x.value


picky.defvjp(picky_forward, lambda x, g: (None, 3 * (x.T @ g)), symbolic_zeros=True)


def custom_vjp_symbolic_zeros(w, x):
    return jnp.sum(picky(x, w) @ w)


@jax.custom_jvp
def tripled(x, w):
    return jnp.tanh(x @ w)


@tripled.defjvp
def tripled_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return tripled(x, w), 3 * (dx @ w + x @ dw)


@jax.custom_jvp
def sparing(x, w):
    return jnp.tanh(x @ w)


def sparing_jvp(primals, tangents):
    assert isinstance(tangents[0], SymbolicZero)
    return sparing(*primals), -(primals[0] @ tangents[1])


sparing.defjvp(sparing_jvp, symbolic_zeros=True)


def custom_jvp_symbolic_zeros(w, x):
    return jnp.sum(sparing(x, w) @ w)


def activations(w, x):
    return jnp.sum(jax.nn.softmax(jax.nn.relu6(jax.nn.relu(x @ w) @ w) @ w)[:, 0])


def everything(w, x):
    return jnp.sum(jax.checkpoint(lambda x: reversed_layer(tripled(x, w), w))(x) @ w)


PROGRAMS = [
    *map(construct, NAMES.split()),
    *(remat_with_cse, remat_that_saves_products, remat_in_remat, remat_under_vmap, linen_remat),
    *(custom_vjp_under_vmap, custom_vjp_symbolic_zeros, custom_jvp_symbolic_zeros),
    *(activations, everything),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_product_is_low_and_the_gradient_is_the_author_s(program: Any) -> None:
    fast = jaxmp.autocast(program, BF16)
    want, got = jax.jit(jax.grad(program))(W, X), jax.jit(jax.grad(fast))(W, X)
    assert got.dtype == jnp.float32
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.03
    for fn, plain in ((fast, program), (jax.grad(fast), jax.grad(program))):
        counts = products(fn, W, X)
        assert set(counts) == {"bfloat16"}
        # As many as without autocast: what was rematerialized still is, and nothing else.
        assert counts.total() == products(plain, W, X).total()
    assert set(jaxmp.explain(program, BF16)(W, X).products()) == {"bfloat16"}
    for fn, dtype in ((fast, "bfloat16"), (program, "float32")):
        for audited in (fn, jax.grad(fn)):
            operations = jaxmp.audit(audited)(W, X).operations
            assert {op.dtype for op in operations if op.flops} == {dtype}


# A rule that closes over a value finds it gone when what was traced before is differentiated.
SELF_CONTAINED = [p for p in PROGRAMS if p.__name__ != "custom_vjp_closure"]


@pytest.mark.parametrize("program", SELF_CONTAINED, ids=lambda program: program.__name__)
def test_what_is_seen_inside_comes_out_also_under_grad(program: Any) -> None:
    out, extras = jax.jit(observe(program))(W, X)
    assert out == jax.jit(program)(W, X)
    assert len(extras) == products(program, W, X).total()
    gradient, again = jax.jit(jax.grad(observe(program), has_aux=True))(W, X)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(program))(W, X), rtol=1e-5, atol=1e-5)
    assert again.keys() == extras.keys()
    for name, extra in extras.items():
        assert float(extra.value) > 0
        np.testing.assert_allclose(again[name].value, extra.value, rtol=1e-6)


def test_what_is_seen_is_what_numpy_sees() -> None:
    x, w = np.asarray(X, np.float64), np.asarray(W, np.float64)
    want, h = [], x
    for _ in range(3):
        want.append(np.abs(h @ w).max())
        h = np.tanh(h @ w) if len(want) < 3 else h @ w
    _, extras = jax.jit(jax.grad(observe(everything), has_aux=True))(W, X)
    got = [float(extra.value) for extra in extras.values()]
    np.testing.assert_allclose(sorted(got), sorted(want), rtol=1e-5)


@scan_runs_as_before
def test_layers_in_a_scan() -> None:
    def program(w, x):
        body = jax.checkpoint(lambda h, v: (tripled(reversed_layer(h, v), v), None))
        return jnp.sum(lax.scan(body, x, jnp.stack([w, w / 2]))[0])

    fast = jaxmp.autocast(program, BF16)
    want, got = jax.jit(jax.grad(program))(W, X), jax.jit(jax.grad(fast))(W, X)
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.03
    assert set(products(jax.grad(fast), W, X)) == {"bfloat16"}


@pytest.mark.skipif(not SCAN3, reason="needs JAX_SCAN3=1")
def test_a_scan_that_cannot_be_looked_inside_is_reported() -> None:
    def program(w, x):
        return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x @ w, None, length=3)[0])

    with pytest.warns(UserWarning, match=r"Scan3 \(.*\) is not looked inside, and runs 1 float32"):
        got = jaxmp.autocast(program, BF16)(W, X)
    np.testing.assert_allclose(got, program(W, X), atol=0.02)
    rows = jaxmp.explain(program, BF16)(W, X).rows
    assert any("not looked inside" in row.reason for row in rows)


def test_forward_mode_and_vmap_of_the_gradient() -> None:
    def program(w, x):
        return jnp.sum(jax.checkpoint(lambda x: tripled(x, w))(x))

    fast = jaxmp.autocast(program, BF16)
    for transformed in (
        lambda f: jax.jvp(f, (W, X), (W, X)),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(W, X[:, None]),
    ):
        for got, want in zip(
            *(jax.tree.leaves(transformed(f)) for f in (fast, program)), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))
