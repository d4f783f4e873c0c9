"""A follower goes through a program once more than it learns, and reports once, with places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxmp._core.jaxprs.follow import Follower
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.walk import walk

A, TABLE = jax.device_put((np.float32(1), np.arange(3.0)))


class Sources(Follower[frozenset[str]]):
    """Which operands, constants and numbers a value is made of; reports every cosine."""

    nothing: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def literal(self, literal: Literal) -> frozenset[str]:
        return frozenset({str(literal.val)})

    def constant(self, var: Any, value: Any) -> frozenset[str]:
        return frozenset({f"constant{list(var.aval.shape)}"} if value is not None else ())

    def transfer(
        self, at: Place, ins: list[frozenset[str]], *, last: bool
    ) -> Sequence[frozenset[str]]:
        if last and at.eqn.primitive.name == "cos":
            self.seen.append((at.name, " ".join(sorted(ins[0]))))
        return [self.nothing.union(*ins)] * len(at.eqn.outvars)

    def join(self, a: frozenset[str], b: frozenset[str]) -> frozenset[str]:
        return a | b


def followed(fn: Callable[..., Any], *args: Any) -> tuple[list[str], list[tuple[str, str]]]:
    jaxpr, sources = jax.make_jaxpr(fn)(*args), Sources()
    outs = sources.run(Place(jaxpr), [frozenset(letter) for letter in "abc"[: len(args)]])
    return [" ".join(sorted(out)) for out in outs], sources.seen


def test_numbers_and_constants_are_known() -> None:
    assert followed(lambda a: a * TABLE, A)[0] == ["a constant[3]"]
    assert followed(lambda a: a * 2.0, A)[0] == ["2.0 a"]


def test_a_loops_body_is_reported_once_with_all_that_its_carry_may_be() -> None:
    def fn(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: ((c[1], jnp.cos(c[0])), None), (a, b), None, length=4)[0][0]

    assert followed(fn, A, A) == (["a b"], [("0.0/0", "a b")])


def test_branches_are_each_reported_and_joined() -> None:
    def fn(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.cond(True, jnp.cos, lambda _: jnp.cos(b), a)

    outs, seen = followed(fn, A, A)
    assert outs == ["a b"]
    assert sorted(facts for _, facts in seen) == ["a", "b"]
    assert len({name for name, _ in seen}) == 2


def test_places() -> None:
    @jax.named_scope("outer")
    def fn(a: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("inner"):
                return lax.cond(c > 0, jnp.cos, jnp.sin, c), None

        return lax.scan(body, a, None, length=6)[0]

    places = {at.eqn.primitive.name: at for at in walk(Place(jax.make_jaxpr(fn)(A)))}
    at = places["cos"]
    assert (at.path, at.times, at.mean_times) == ("outer/inner", 6, 3)
    assert at.source.startswith("test_follow.py:")
    assert [place.eqn.primitive.name for place in at.chain() if place.eqn] == [
        "cos",
        "cond",
        "scan",
    ]
    assert at.first(lambda eqn: eqn.params.get("length")) == 6
    assert (at.backward, at.again, at.within) == (False, False, "")
    backward = walk(Place(jax.make_jaxpr(jax.grad(fn))(A)))
    assert any(at.backward for at in backward)


def test_the_place_in_a_primitive_that_is_not_in_the_table() -> None:
    x = jnp.zeros((3, 3))
    [at] = [
        at
        for at in walk(Place(jax.make_jaxpr(jnp.linalg.solve)(x, x)))
        if at.eqn.primitive.name == "custom_linear_solve"
    ]
    assert list(at.jaxprs()) == []
    inner = next(at.all_jaxprs())
    assert inner.within == "custom_linear_solve" != at.within
    assert next(walk(inner)).within == "custom_linear_solve"
