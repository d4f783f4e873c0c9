"""Steps of one line are run as one function, and leave the program that they made one by one."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_reference import reference

import jaxmp
from jaxmp._core.execute import execute, jit_groups
from jaxmp._core.jaxprs.source import module_path, user_line

from models import CASES
from support import assert_same_program, iter_eqns, jaxpr_of, slow_when

X = jax.device_put(np.linspace(-2, 2, 64).reshape(8, 8))


def autocast(fn: Any, policy: str, steps_of: Any = jit_groups.jit_groups) -> Any:
    """`jaxmp.autocast`, with steps run together as `steps_of` says; `w` is the parameters."""
    argnums = int("w" in inspect.signature(fn).parameters)

    def run(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(execute, "jit_groups", steps_of)
            return jaxmp.autocast(fn, policy, argnums=argnums)(*args)

    return run


def one_by_one(steps: Any) -> Any:
    return ((step,) for step in steps)


def norm(x, w):
    y = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)
    return jax.nn.gelu(y @ w)


def shared_copies(x, w):
    y = jnp.tanh(x @ w) * 3 + 1
    return (y @ w) + y.sum() + (y.T @ w)


def moves(x, w):
    w, x = jnp.concatenate([w.T, w]).reshape(16, 8)[::2], x.T + 1
    return lax.dot(x, w) + jnp.broadcast_to(w[0] * x[1], x.shape)


def saturated(x, w):
    return jnp.where(x > 0, jnp.exp(9 * x), -1e9) @ w


PROGRAMS = {"norm": norm, "shared copies": shared_copies, "moves": moves, "saturated": saturated}
POLICIES = (
    "mixed_bfloat16",
    "mixed_float16",
    "bfloat16,softmax=bf16",
    "mixed_float16,saturate=true",
    "mixed_float8",
    "mixed_bfloat16,residuals=recompute",
)


@slow_when(lambda name, policy: policy != "mixed_bfloat16" or name not in PROGRAMS)
@pytest.mark.filterwarnings("ignore:autocast. float8 products")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*PROGRAMS, "lm", "cnn"])
def test_the_program_is_the_one_made_step_by_step(name: str, policy: str) -> None:
    if name in PROGRAMS:
        fn, args = PROGRAMS[name], (X, X)
    else:
        fn, args = CASES[name].loss(small=True), CASES[name].shapes(small=True)
    together, apart = autocast(fn, policy), autocast(fn, policy, one_by_one)
    assert_same_program(together, apart, *args)

    def places(f: Any) -> list[tuple[str, str, str]]:
        eqns = iter_eqns(jaxpr_of(f, *args))
        return [(e.primitive.name, user_line(e), module_path(e)) for e in eqns]

    assert places(together) == places(apart)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_steps(name: str) -> None:
    def fn(x, w):
        return jnp.sum(jnp.cos(jnp.float32(PROGRAMS[name](x, w))))

    together = autocast(fn, "mixed_bfloat16")
    apart = autocast(fn, "mixed_bfloat16", one_by_one)
    got, want = (reference(jax.grad(f, (0, 1)))(X, np.asarray(X).T) for f in (together, apart))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * np.abs(b).max())


def grouped(fn: Any, *args: Any) -> list[int]:
    """How many steps each line of a program has that is run as one function."""
    found: list[int] = []

    def watched(steps: Any) -> Any:
        steps = list(jit_groups.jit_groups(steps))
        found.extend(len(group) for group in steps if len(group) > 1)
        return steps

    jax.make_jaxpr(autocast(fn, "mixed_bfloat16", watched))(*args)
    return found


def test_lines_are_told_apart() -> None:
    def two(x, w):
        x = jnp.cos(jnp.sin(x @ w))
        return jnp.sin(jnp.cos(jnp.sin(x)))

    def scoped(x, w):
        x = x @ w
        with jax.named_scope("a"):
            y = jnp.sin(jnp.cos(x))
        return y + 1

    assert grouped(two, X, X) == [2, 3]
    assert grouped(scoped, X, X) == [2]


def test_layers_are_one_function() -> None:
    """What occurs in every layer is traced once."""
    traced = []

    def layers(x, w):
        for _ in range(6):
            x = norm(x, w)
        return x

    runner = jit_groups._runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit_groups, "_runner", lambda *ops: (traced.append(ops), runner(*ops))[1])
        jax.make_jaxpr(jaxmp.autocast(layers, "mixed_bfloat16", argnums=1))(X, X)
    assert len(traced) >= 12
    # The first layer reads x, which no product has returned.
    assert len(set(traced)) <= len(traced) // 2


def test_what_is_computed_at_once_is_computed_step_by_step() -> None:
    """A region in float32, called or differentiated without `jax.jit`: to the last bit."""
    fn = jaxmp.autocast(jaxmp.full_precision(saturated), "mixed_bfloat16", argnums=1)
    np.testing.assert_array_equal(fn(X, X), saturated(X, X))
    got, want = (jax.grad(lambda x, f=f: f(x, X).sum())(X) for f in (fn, saturated))
    np.testing.assert_array_equal(got, want)
