"""Walks through jaxprs, by lattices of their own: what each result is made of, what each operand
is wanted for. Nested loops and branches, up to the point where nothing grows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import closed
from jaxmp._core.jaxprs.dataflow import (
    Inside,
    demand_fixpoint,
    demanded,
    fixpoint,
    forward,
    transfer_inner,
)
from jaxmp._core.jaxprs.higher_order import inside

Facts = frozenset[str]
NOTHING: Facts = frozenset()
A, B, C, STACK = jax.device_put((np.float32(1), np.float32(2), np.float32(3), np.ones(3)))


def repeat(body: Callable[..., Any], start: Any) -> Any:
    """A loop of one carry."""
    return lax.fori_loop(0, 3, lambda _, c: body(c), start)


def loop(body: Callable[..., Any], *start: Any) -> Any:
    """A loop of several carries."""
    return lax.scan(lambda c, _: (body(*c), None), start, None, length=9)[0]


# A lattice: which operands of the program a value is made of, and by which of these operations.
TELLING = ("sin", "cos", "tan", "exp")


class Sources:
    """The forward walk; counts how often it enters an inner jaxpr."""

    def __init__(self) -> None:
        self.entered = 0

    def run(self, jaxpr: Any, ins: Sequence[Facts]) -> list[Facts]:
        self.entered += 1
        return forward(jaxpr, ins, self.equation, operator.or_, NOTHING)

    def equation(self, eqn: JaxprEqn, ins: list[Facts], _: Inside[Facts]) -> list[Facts]:
        return told(eqn, ins, lambda ins: transfer_inner(eqn, ins, self.run, operator.or_))


def told(eqn: JaxprEqn, ins: list[Facts], inside: Inside[Facts]) -> list[Facts]:
    """What the results of an equation are made of."""
    if (outs := inside(ins)) is not None:
        return outs
    name = eqn.primitive.name
    return [NOTHING.union(*ins, [name] if name in TELLING else [])] * len(eqn.outvars)


def sources(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Of each result: the operands, by letter, and the operations it is made of."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    given = [frozenset(letter) for letter in "abcdefg"[: len(args)]]
    outs = forward(jaxpr, given, told, operator.or_, NOTHING)
    assert outs == Sources().run(jaxpr, given)
    return [" ".join(sorted(out)) for out in outs]


def round_and_round(n: int) -> Callable[..., Any]:
    """A loop whose carries move on by one: the last is the first after n iterations."""

    def fn(*args: jax.Array) -> Any:
        return loop(lambda *c: (c[-1], *c[:-1]), jnp.sin(args[0]), *args[1:n])

    return fn


FORWARD: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {
    "a call in a call": (
        lambda a, b: jax.jit(lambda a: jax.checkpoint(lambda a: jnp.sin(a) + b)(a))(a),
        ["a b sin"],
    ),
    "either branch": (
        lambda a, b: lax.cond(True, lambda a, b: (a, b), lambda a, b: (jnp.sin(b), b), a, b),
        ["a b sin", "b"],
    ),
    "what selects is not an operand of the branches": (
        lambda a, b: lax.cond(a > 0, lambda b: b, lambda b: b * 2, b),
        ["b"],
    ),
    "a loop that forgets": (
        lambda a, b: repeat(lambda c: jnp.sin(b), a),
        ["b sin"],
    ),
    "what each iteration returns": (
        lambda a, b: lax.scan(lambda c, _: (c + b, c), a, None, length=3),
        ["a b", "a b"],
    ),
    "what it goes through": (
        lambda a, b: lax.scan(lambda c, x: (c, jnp.sin(x)), a, jnp.ones(3) * b),
        ["a", "b sin"],
    ),
    "round through another": (
        lambda a, b: loop(lambda c, d: (d, jnp.sin(c)), a, b),
        ["a b sin", "a b sin"],
    ),
    "a while loop": (
        lambda a, b: lax.while_loop(lambda c: c < jnp.exp(b), lambda c: jnp.sin(c), a),
        ["a sin"],
    ),
    "what the inner loop learns of the outer": (
        lambda a, b: loop(lambda c, d: repeat(lambda e: e[::-1], (d, jnp.sin(c))), a, b),
        ["a b sin", "a b sin"],
    ),
    "a branch in a loop in a branch": (
        lambda a, b: lax.cond(
            True,
            lambda a, b: repeat(lambda c: lax.cond(True, jnp.sin, lambda c: c * b, c), a),
            lambda a, b: jnp.cos(a),
            a,
            b,
        ),
        ["a b cos sin"],
    ),
}


def test_what_results_are_made_of() -> None:
    for name, (fn, expected) in FORWARD.items():
        assert sources(fn, A, B) == list(expected), name


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_loop_is_walked_until_nothing_grows_and_no_longer(n: int) -> None:
    args = [A] * n
    jaxpr = jax.make_jaxpr(round_and_round(n))(*args)
    walk = Sources()
    outs = walk.run(jaxpr, [frozenset(letter) for letter in "abcdefg"[:n]])
    assert {" ".join(sorted(out)) for out in outs} == {" ".join([*"abcdefg"[:n], "sin"])}
    # The program, n walks of its body that learn something and at last one that does not, one to
    # return; a single carry has nothing to learn.
    assert walk.entered <= 1 + n + 2


def test_the_facts_of_a_bodys_operands() -> None:
    def fn(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return lax.scan(lambda k, x: ((k[0] + a, x), k[0]), (b, c), STACK)

    [eqn] = [e for e in jax.make_jaxpr(fn)(A, B, C).jaxpr.eqns if e.primitive.name == "scan"]
    [body] = inside(eqn)
    ins = [frozenset({name}) for name in ("shared", "first", "second", "stack")][: len(eqn.invars)]
    facts = fixpoint(body, ins, Sources().run, operator.or_)
    assert [" ".join(sorted(fact)) for fact in facts] == [
        "shared",
        "first shared",
        "second stack",
        "stack",
    ]


# The lattice of demands: by which operations, and as which result, an operand is wanted.


def wanted_of(jaxpr: Any, wanted: Sequence[Facts]) -> list[Facts]:
    opened = closed(jaxpr).jaxpr
    of: dict[Any, Facts] = {}

    def want(atom: Any, demand: Facts) -> None:
        if hasattr(atom, "val"):
            return
        of[atom] = of.get(atom, NOTHING) | demand

    for atom, demand in zip(opened.outvars, wanted, strict=True):
        want(atom, demand)
    for eqn in reversed(opened.eqns):
        outs = [of.get(v, NOTHING) for v in eqn.outvars]
        operands = demanded(eqn, outs, wanted_of, operator.or_, NOTHING)
        if operands is None:
            name = eqn.primitive.name
            union = NOTHING.union(*outs)
            told = union | {name} if union and name in TELLING else union
            operands = [told] * len(eqn.invars)
        for atom, demand in zip(eqn.invars, operands, strict=True):
            want(atom, demand)
    return [of.get(v, NOTHING) for v in opened.invars]


def wanted(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Of each operand: the results, by number, and the operations that want it."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    outs = [frozenset({str(i)}) for i in range(len(jaxpr.jaxpr.outvars))]
    return [" ".join(sorted(demand)) for demand in wanted_of(jaxpr, outs)]


BACKWARD: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {
    "in a call": (lambda a, b: jax.jit(lambda b, a: (jnp.sin(b), a))(b, a), ["1", "0 sin"]),
    "by either branch": (
        lambda a, b: lax.cond(True, lambda a, b: jnp.sin(a), lambda a, b: jnp.cos(a) * b, a, b),
        ["0 cos sin", "0"],
    ),
    "by no branch": (lambda a, b: lax.cond(True, lambda a: 1.0, lambda a: 2.0, a), ["", ""]),
    "a carry that is forgotten": (
        lambda a, b: repeat(lambda c: jnp.sin(b), a),
        ["", "0 sin"],
    ),
    "a carry, by what iterations return": (
        lambda a, b: lax.scan(lambda c, _: (c * b, jnp.sin(c)), a, None, length=3)[1],
        ["0 sin", "0 sin"],
    ),
    "a carry, by the iteration after the next": (
        lambda a, b: loop(lambda c, d: (d, jnp.sin(c)), a, b)[0],
        ["0 sin", "0 sin"],
    ),
    "a carry that nobody wants": (
        lambda a, b: loop(lambda c, d: (c + 1, jnp.sin(d)), a, b)[0],
        ["0", ""],
    ),
    "what a loop goes through": (
        lambda a, b: lax.scan(lambda c, x: (c + x, jnp.sin(x)), a, jnp.ones(3) * b),
        ["0", "0 1 sin"],
    ),
    "a while loop's condition wants nothing": (
        lambda a, b: lax.while_loop(lambda c: c < jnp.exp(b), lambda c: c + 1, a),
        ["0", ""],
    ),
    "a loop in a loop": (
        lambda a, b: repeat(lambda c: repeat(lambda d: jnp.cos(d) * jnp.sin(b), c), a),
        ["0 cos", "0 cos sin"],
    ),
    "round through a loop in a loop": (
        lambda a, b: loop(lambda c, d: repeat(lambda e: e[::-1], (jnp.sin(d), c)), a, b)[0],
        ["0 sin", "0 sin"],
    ),
    "under remat in a branch": (
        lambda a, b: lax.cond(True, jax.checkpoint(lambda a: jnp.sin(a) * b), lambda a: a, a),
        ["0 sin", "0"],
    ),
}


def test_what_operands_are_wanted_for() -> None:
    for name, (fn, expected) in BACKWARD.items():
        assert wanted(fn, A, B) == list(expected), name


def test_the_demands_on_a_bodys_operands() -> None:
    def fn(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return lax.scan(lambda k, x: ((k[1], jnp.sin(k[0]) + a), x * 2), (b, c), STACK)

    [eqn] = [e for e in jax.make_jaxpr(fn)(A, B, C).jaxpr.eqns if e.primitive.name == "scan"]
    [body] = inside(eqn)
    outs = [frozenset({"first"}), NOTHING, frozenset({"returned"})]
    demands = demand_fixpoint(body, outs, wanted_of, operator.or_)
    told = [" ".join(sorted(demand)) for demand in demands]
    assert told == ["first sin", "first sin", "first sin", "returned"]


def test_an_equation_without_jaxprs_inside_is_not_walked_through() -> None:
    [eqn] = jax.make_jaxpr(jnp.sin)(A).jaxpr.eqns
    assert transfer_inner(eqn, [NOTHING], Sources().run, operator.or_) is None
    assert demanded(eqn, [NOTHING], wanted_of, operator.or_, NOTHING) is None
