"""What an equation with jaxprs inside is, and how it is bound again with others in their place.

This is the only place that knows the shapes of scan, while and cond and of everything that calls a
jaxpr: one entry each in `HIGHER_ORDER`. An analysis goes through them by `dataflow`, a plan by the
facts that `Inner` states, and need not know which primitive it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._jaxprs import aux_outputs, compat
from jaxmp._jaxprs.aux_outputs import Out, Thread, Threaded
from jaxmp._jaxprs.compat import bind


class Inner(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
      jaxpr: the jaxpr, open or closed, as the equation holds it.
      operands: for each of its operands, which operand of the equation it is, or is a slice of.
      results: for each of its results, which result of the equation it becomes, or is stacked into;
        None for one that only steers (a loop's condition).
      shared: of a loop, how many leading operands all iterations share; else None.
      carried: how many operands after those are the first results of the iteration before.
      trips: how often it runs; None if that is not known before it runs.
      reverse: of a loop, whether its last slice is read first.
      chance: where one of several runs, the share of one.
      rule: ``custom_jvp`` or ``custom_vjp``, if it has such a derivative rule of its own; else "".
    """

    jaxpr: Any
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    shared: int | None = None
    carried: int = 0
    trips: Any = 1
    reverse: bool = False
    chance: float = 1.0
    rule: str = ""

    @property
    def loops(self) -> bool:
        """Whether it runs again and again."""
        return self.shared is not None

    @property
    def open_ended(self) -> bool:
        """Whether it runs until a condition says that it is enough."""
        return self.loops and self.trips is None

    @property
    def carries(self) -> range:
        """The operands that its first results are in the next iteration."""
        start = self.shared or 0
        return range(start, start + self.carried)

    @property
    def times(self) -> Any:
        """How often it runs; once, where that is not known."""
        return 1 if self.trips is None else self.trips


class Replacement(Protocol):
    """What takes the place of an inner jaxpr: the same operands and results, in other dtypes."""

    def __call__(self, *arrays: Any) -> list[Any]:
        """Its results, computed here and now."""

    def trace(self) -> Any:
        """Its closed jaxpr."""


class HigherOrder(NamedTuple):
    """A primitive with jaxprs inside.

    Attributes:
      inside: from an equation to its jaxprs, in the order in which they are replaced.
      rebind: from an equation, operands and one replacement for each of its jaxprs to results.
      thread: the same with extra operands and results; None: nothing can be threaded through it.
    """

    inside: Callable[[JaxprEqn], tuple[Inner, ...]]
    rebind: Callable[[JaxprEqn, list[Any], Sequence[Replacement]], list[Any]]
    thread: Thread | None = None


def inside(eqn: JaxprEqn) -> tuple[Inner, ...]:
    """The jaxprs that running an equation runs; none if its primitive is not known to have any.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = lambda c, x: (c * 2 + x, c)
      >>> jaxpr = jax.make_jaxpr(lambda c, xs: jax.lax.scan(step, c, xs))(0.0, jnp.ones(3)).jaxpr
      >>> [inner] = inside(jaxpr.eqns[0])
      >>> inner.operands, inner.results, inner.shared, inner.carried, inner.trips
      ((0, 1), (0, 1), 0, 1, 3)
    """
    known = HIGHER_ORDER.get(compat.kind(eqn))
    return () if known is None else known.inside(eqn)


def steering(eqn: JaxprEqn) -> tuple[int, ...]:
    """The operands that no jaxpr inside reads: they say which of them runs."""
    read = {i for inner in inside(eqn) for i in inner.operands}
    return tuple(i for i in range(len(eqn.invars)) if i not in read)


def rebind(eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Replacement]) -> list[Any]:
    """Binds an equation again, with something else in place of each jaxpr inside.

    Every other parameter stays as it was. Functions with derivative rules of their own are run in
    place, without them: `derivatives` makes the rules of the new function.
    """
    return HIGHER_ORDER[compat.kind(eqn)].rebind(eqn, operands, replacements)


def rebuild(
    eqn: JaxprEqn,
    operands: list[Any],
    replacements: Sequence[Threaded],
    extra_in: Sequence[Any] = (),
) -> Out:
    """Binds an equation again with extra operands and results threaded through its jaxprs.

    Where nothing is threaded, `rebind` leaves the equation more as it was. Derivative rules stay,
    and know nothing of what is threaded: extra results have no tangents.

    Args:
      eqn: the equation.
      operands: its operands.
      replacements: for each of its jaxprs a function of the extra operands and of the operands of
        that jaxpr. It gives the jaxpr's results and a dict of extra results (`aux_outputs.Extra`).
        What else it reads comes in `extra_in`.
      extra_in: arrays that all of them get, in every iteration and on every device.

    Returns:
      The results of the equation, and the extra ones: stacked by scan and shard_map, joined by
      while, neutral where the branch that runs has none.

    Raises:
      TypeError: if nothing can be threaded through the primitive.
      ValueError: if an extra result meets a while loop and does not say how it is joined, or is of
        two shapes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmp._jaxprs.aux_outputs import Extra
      >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x))(jnp.arange(3.0))
      >>> def louder(extra_in, x):
      ...     return [jnp.sin(x)], {"twice": Extra(2 * x + extra_in[0])}
      >>> _, extras = rebuild(jaxpr.eqns[0], [jnp.arange(3.0)], [louder], [jnp.float32(1.0)])
      >>> extras["twice"].value.tolist(), extras["twice"].axes
      ([1.0, 3.0, 5.0], ('scan',))
    """
    known = HIGHER_ORDER.get(compat.kind(eqn))
    if known is None or known.thread is None:
        raise TypeError(
            f"rebuild: nothing can be threaded through {compat.called(eqn)}: its entry in "
            "HIGHER_ORDER has no `thread`"
        )
    return known.thread(eqn, operands, [_observed(r) for r in replacements], extra_in)


def _observed(replacement: Threaded) -> Threaded:
    """A replacement whose extra results have no tangents."""

    def run(extra_in: Sequence[Any], *arrays: Any) -> Out:
        results, extras = replacement(extra_in, *arrays)
        return results, lax.stop_gradient(extras)

    return run


def _one(jaxpr: Any, eqn: JaxprEqn, **facts: Any) -> tuple[Inner, ...]:
    return (Inner(jaxpr, tuple(range(len(eqn.invars))), tuple(range(len(eqn.outvars))), **facts),)


# Calls.


def _call(eqn: JaxprEqn, rule: str = "") -> tuple[Inner, ...]:
    return _one(compat.call_jaxpr(eqn), eqn, rule=rule)


def _run_in_place(
    _eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Replacement]
) -> list[Any]:
    [called] = replacements
    return called(*operands)


def _rebind_parameters(
    names: Sequence[str], eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Replacement]
) -> list[Any]:
    """Of what has each of its jaxprs in a parameter: scan, while, jit and remat."""
    rematted = compat.rematerialized(eqn, replacements[0])
    if rematted is not None:
        return list(rematted(*operands))
    new = {
        name: compat.like(r.trace(), eqn.params[name])
        for name, r in zip(names, replacements, strict=True)
    }
    return bind(eqn, operands, **new)


_rebind_jaxpr = partial(_rebind_parameters, ("jaxpr",))


def sums_as_given(eqn: JaxprEqn) -> bool:
    """Whether it is a `shard_map` whose transpose adds up the gradients of what all devices have.

    With `check_vma` it is a `pvary` inside that does.
    """
    return eqn.primitive.name == "shard_map" and not eqn.params["check_vma"]


def _rebind_shard_map(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Replacement]
) -> list[Any]:
    [called] = replacements

    def threaded(_extra_in: Sequence[Any], *arrays: Any) -> Out:
        return called(*arrays), {}

    return aux_outputs.through_shard_map(eqn, operands, [threaded], ())[0]


# Branches.


def _branches(eqn: JaxprEqn) -> tuple[Inner, ...]:
    branches = eqn.params["branches"]
    operands, results = range(1, len(eqn.invars)), range(len(eqn.outvars))
    return tuple(
        Inner(branch, tuple(operands), tuple(results), chance=1 / len(branches))
        for branch in branches
    )


def _rebind_branches(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Replacement]
) -> list[Any]:
    old = eqn.params["branches"]
    new = tuple(compat.like(r.trace(), o) for r, o in zip(replacements, old, strict=True))
    return bind(eqn, operands, branches=new)


# Loops.


def _scan(eqn: JaxprEqn) -> tuple[Inner, ...]:
    n_consts, n_carry = compat.scan_split(eqn)
    trips, reverse = eqn.params["length"], compat.scan_options(eqn)["reverse"]
    jaxpr = eqn.params["jaxpr"]
    return _one(jaxpr, eqn, shared=n_consts, carried=n_carry, trips=trips, reverse=reverse)


def _while(eqn: JaxprEqn) -> tuple[Inner, ...]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    n_carry = len(eqn.outvars)
    carry = tuple(range(n_cond + n_body, n_cond + n_body + n_carry))
    test = Inner(
        eqn.params["cond_jaxpr"], (*range(n_cond), *carry), (None,), shared=n_cond, trips=None
    )
    body = Inner(
        eqn.params["body_jaxpr"],
        (*range(n_cond, n_cond + n_body), *carry),
        tuple(range(n_carry)),
        shared=n_body,
        carried=n_carry,
        trips=None,
    )
    return test, body


_rebind_while = partial(_rebind_parameters, ("cond_jaxpr", "body_jaxpr"))


HIGHER_ORDER: dict[str, HigherOrder] = {
    **dict.fromkeys(compat.CALLS, HigherOrder(_call, _run_in_place, aux_outputs.in_place)),
    **{
        f"{rule}_call": HigherOrder(partial(_call, rule=rule), _run_in_place, aux_outputs.beside)
        for rule in ("custom_jvp", "custom_vjp")
    },
    **dict.fromkeys(("jit", "remat2"), HigherOrder(_call, _rebind_jaxpr, aux_outputs.through_call)),
    "shard_map": HigherOrder(_call, _rebind_shard_map, aux_outputs.through_shard_map),
    "cond": HigherOrder(_branches, _rebind_branches, aux_outputs.through_branches),
    "scan": HigherOrder(_scan, _rebind_jaxpr, aux_outputs.through_scan),
    "while": HigherOrder(_while, _rebind_while, aux_outputs.through_while),
}
