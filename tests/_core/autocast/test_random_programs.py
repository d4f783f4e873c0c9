"""Random programs under `autocast`: as exact as rounding allows, same dtypes, nothing infinite.

The criterion. `run` computes the float32 program with every result multiplied by `1 ± u` at random
(u = eps/2, the unit roundoff of the 16-bit type), `DRAWS` times; the root mean square of what that
does to a result or a gradient, in the 2-norm, is its `spread`. That is the error of an
implementation that rounds *every* value once, each by as much as rounding can. `autocast` rounds
some of them, by u/sqrt(3) or less on average, so its error should be below one spread. The spread
is an estimate, and errors may happen to agree: `SPREADS` leaves room for both. Where all elements
of a result have one rounding in common they agree altogether: what is beyond is held against the
program whose contractions read rounded operands and which rounds nothing else, of whose error it
may be `FLOORS` times. A transformation that computes statistics or accumulates in 16 bits, drops a
derivative rule or loses a term is outside.

The number of programs is the hypothesis profile's, shared between the two policies: 300 under
HYPOTHESIS_PROFILE=ci, 6,000 under HYPOTHESIS_PROFILE=many (an hour of one core), 10,000 under
HYPOTHESIS_PROFILE=explore, others each time.
`-m hypothesis` selects the tests that draw them.
"""

from __future__ import annotations

import itertools
from collections import Counter

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import FLOAT32_ORDER, FLOORS, ROUNDING, SPREADS
from contraction_floor import rounded_contractions
from hypothesis import strategies as st
from numpy_reference import run
from random_programs import Program, Rounding, random_settings

import jaxmp

from support import assert_same_program, float16_is_slow, iter_eqns

DRAWS = 8
# They are not models: what else they multiply by may be more, and all their products exact.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*argnums does not name as parameters"),
    pytest.mark.filterwarnings("ignore:.*asked for precision=HIGHEST"),
]
PARAMETERS = (2, 3, 4)  # of `random_programs.INPUTS`: the vector and the two matrices

COMPUTE = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
NESTED = {"jit", "scan", "while", "cond", "remat2", "custom_jvp_call", "custom_vjp_call"}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return Program.draw(lambda n: draw(st.integers(0, n - 1)))


def spreads(program: Program, jaxpr: object, want: list[np.ndarray], dtype: object) -> np.ndarray:
    """Per result: the root mean square 2-norm by which random rounding moves it."""
    info = jnp.finfo(dtype)
    unit, tiny = float(info.eps) / 2, float(info.smallest_subnormal) / 2
    squares = np.zeros(len(want))
    for seed in range(DRAWS):
        moved = run(jaxpr, program.arguments(), Rounding(seed, unit, tiny))
        errors = [np.asarray(m, np.float64) - w for m, w in zip(moved, want, strict=True)]
        squares += [np.sum(e**2) for e in errors]
    return np.sqrt(squares / DRAWS)


_checked = itertools.count(1)


def _clear_now_and_then() -> None:
    if next(_checked) % 1000 == 0:
        jax.clear_caches()


def ratios(program: Program, policy: str) -> list[float]:
    """Checks dtypes, shapes and finiteness; returns each result's error in units of its spread.

    Returns none for a program whose results are beyond the compute dtype's range: gradients of
    166,871 are infinite in float16, which a loss scale's skipped step is for.
    """
    fn, args = program.function(), program.arguments()
    plain = jax.make_jaxpr(program.value_and_grad(fn))(*args)
    cast = jax.make_jaxpr(program.value_and_grad(jaxmp.autocast(fn, policy, PARAMETERS)))(*args)
    shapes = [[(v.shape, v.dtype) for v in jaxpr.out_avals] for jaxpr in (plain, cast)]
    assert shapes[0] == shapes[1]
    want, got = ([np.asarray(x, np.float64) for x in run(j, args)] for j in (plain, cast))
    assert all(np.isfinite(w).all() for w in want), "the program itself is not finite"
    if max(np.max(np.abs(w), initial=0) for w in want) >= jnp.finfo(COMPUTE[policy]).max:
        return []
    assert all(np.isfinite(g).all() for g in got)
    # The kernels of ten thousand programs do not fit into memory.
    _clear_now_and_then()
    units = spreads(program, plain, want, COMPUTE[policy])
    errors = [
        max(np.linalg.norm(g - w) - FLOAT32_ORDER * (np.linalg.norm(w) + 1), 0.0)
        for w, g in zip(want, got, strict=True)
    ]
    if any(errors > SPREADS * units):
        floor = rounded_contractions(program.value_and_grad(fn), COMPUTE[policy])(*args)
        floors = [np.linalg.norm(f - w) for f, w in zip(jax.tree.leaves(floor), want, strict=True)]
        # Nothing may be rounded where the program only hands on what it was given (spread 0).
        units = np.where(units > 0, np.maximum(units, np.multiply(floors, FLOORS / SPREADS)), 0)
    return [
        e / unit if unit else np.inf if e else 0.0 for e, unit in zip(errors, units, strict=True)
    ]


@float16_is_slow
@pytest.mark.parametrize("policy", COMPUTE)
@hypothesis.given(program=programs())
@random_settings(share=2)
def test_errors_are_those_of_rounding(policy: str, program: Program) -> None:
    hypothesis.note(str(program))
    found = ratios(program, policy)
    hypothesis.assume(found)
    assert max(found) <= SPREADS, found


@float16_is_slow
@pytest.mark.parametrize("policy", COMPUTE)
@hypothesis.given(program=programs())
@random_settings(share=6)
def test_what_no_product_touches_is_bitwise_float32(policy: str, program: Program) -> None:
    """The law: beside no 16-bit value nothing is narrowed but the operands of contractions."""
    fn, args = program.every_value, program.arguments()
    want = run(jax.make_jaxpr(fn)(*args), args)
    got = run(jax.make_jaxpr(jaxmp.autocast(fn, policy, PARAMETERS))(*args), args)
    for a, b, untouched in zip(want, got, program.untouched(), strict=True):
        if untouched:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("policy", COMPUTE)
def test_typical_errors_are_below_one_spread(policy: str) -> None:
    """A single program is allowed `SPREADS`; as a population they must do much better."""
    found = np.concatenate([ratios(Program.from_seed(seed), policy) for seed in range(24)])
    assert np.quantile(found, 0.5) < 0.25
    assert np.quantile(found, 0.95) < 1.0


@hypothesis.given(program=programs())
@random_settings(share=6)
def test_float32_policy_is_the_identity(program: Program) -> None:
    """The same equations in the same order, and so the same bits under any compiler."""
    fn, args = program.function(), program.arguments()
    plain, cast = map(program.value_and_grad, (fn, jaxmp.autocast(fn, "float32")))
    assert_same_program(plain, cast, *args)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_compiled_programs(seed: int) -> None:
    """What the suite evaluates equation by equation is what `jit` computes."""
    program = Program.from_seed(seed)
    fn, args = program.function(), program.arguments()
    compiled = jax.jit(program.value_and_grad(fn))(*args)
    identity = jax.jit(program.value_and_grad(jaxmp.autocast(fn, "float32")))(*args)
    for a, b in zip(compiled, identity, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    jaxpr = jax.make_jaxpr(program.value_and_grad(fn))(*args)
    want = [np.asarray(x, np.float64) for x in run(jaxpr, args)]
    limits = spreads(program, jaxpr, want, jnp.bfloat16)
    for a, w in zip(compiled, want, strict=True):
        np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-5 * (1 + np.linalg.norm(w)))
    cast = jax.jit(program.value_and_grad(jaxmp.autocast(fn, "mixed_bfloat16", PARAMETERS)))(*args)
    for a, w, limit in zip(cast, want, limits, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - w)
        assert error <= SPREADS * limit + FLOAT32_ORDER * (np.linalg.norm(w) + 1)


def test_the_suite_covers_what_it_claims() -> None:
    """More than forty primitives, every construct, and shared functions that are called twice."""
    seen: Counter[str] = Counter()
    shared = 0
    for seed in range(40):
        program = Program.from_seed(seed)
        jaxpr = jax.make_jaxpr(program.function())(*program.arguments())
        eqns = list(iter_eqns(jaxpr))
        seen.update({e.primitive.name for e in eqns})
        jits = Counter(id(e.params["jaxpr"]) for e in eqns if e.primitive.name == "jit")
        shared += any(n > 1 for n in jits.values())
    assert len(seen) >= 60
    assert seen.keys() >= NESTED
    assert shared >= 10


@pytest.mark.slow
def test_the_criterion_sees_a_coarse_program() -> None:
    """Rounding each value four times as coarsely as the type does is out of bounds somewhere."""
    outside = 0
    for seed in range(10):
        program = Program.from_seed(seed)
        args = program.arguments()
        jaxpr = jax.make_jaxpr(program.value_and_grad(program.function()))(*args)
        want = [np.asarray(x, np.float64) for x in run(jaxpr, args)]
        coarse = run(jaxpr, args, Rounding(99, 8 * ROUNDING))
        limits = SPREADS * spreads(program, jaxpr, want, jnp.bfloat16)
        errors = [np.asarray(c, np.float64) - w for c, w in zip(coarse, want, strict=True)]
        outside += any(np.linalg.norm(e) > x for e, x in zip(errors, limits, strict=True))
    assert outside >= 8
