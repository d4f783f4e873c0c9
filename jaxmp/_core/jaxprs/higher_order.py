"""The inner jaxprs of an equation, and binding it again with replacements for them.

This is the only module that knows the parameters of scan, while and cond and of every primitive
that calls a jaxpr: one entry each in `HIGHER_ORDER`. An analysis goes through them by `dataflow`, a
plan by the attributes of `Inner`, without knowing the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs import aux_outputs, compat
from jaxmp._core.jaxprs.aux_outputs import Out, Thread, Threaded
from jaxmp._core.jaxprs.compat import bind


class Inner(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
      jaxpr: the jaxpr, open or closed, as the equation holds it.
      operands: for each of its operands, the operand of the equation that it is, or is a slice of.
      results: for each of its results, the result of the equation that it becomes, or is stacked
        into; None for a loop's condition.
      shared: of a loop, the number of leading operands that all iterations share; else None.
      carried: the number of operands after those that are the first results of the previous one.
      trips: the number of times it runs; None if that is not known in advance.
      reverse: of a loop, whether its last slice is read first.
      chance: of a branch, one over the number of branches; else 1.
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
        """Whether it is the body or the condition of a loop."""
        return self.shared is not None

    @property
    def open_ended(self) -> bool:
        """Whether it is part of a loop that runs until a condition is false."""
        return self.loops and self.trips is None

    @property
    def carries(self) -> range:
        """The operands that its first results become in the next iteration."""
        start = self.shared or 0
        return range(start, start + self.carried)

    @property
    def times(self) -> Any:
        """The number of times it runs; 1 where that is not known."""
        return 1 if self.trips is None else self.trips


class Replacement(Protocol):
    """A function in place of an inner jaxpr, with its operands and results in other dtypes."""

    def __call__(self, *arrays: Any) -> list[Any]:
        """Computes its results."""

    def trace(self) -> Any:
        """Returns its closed jaxpr."""


class HigherOrder(NamedTuple):
    """A primitive with jaxprs inside.

    Attributes:
      inside: returns the jaxprs of an equation, in the order in which they are replaced.
      rebind: returns the results, given the equation, operands and one replacement per inner jaxpr.
      thread: the same with extra operands and results; None: nothing can be threaded through it.
    """

    inside: Callable[[JaxprEqn], tuple[Inner, ...]]
    rebind: Callable[[JaxprEqn, list[Any], Sequence[Replacement]], list[Any]]
    thread: Thread | None = None


def inside(eqn: JaxprEqn) -> tuple[Inner, ...]:
    """Returns the jaxprs that running an equation runs; none if its primitive is not in the table.

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
    """Returns the operands that no inner jaxpr reads: they select the one that runs."""
    read = {i for inner in inside(eqn) for i in inner.operands}
    return tuple(i for i in range(len(eqn.invars)) if i not in read)


def rebind(eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Replacement]) -> list[Any]:
    """Binds an equation again, with a replacement for each inner jaxpr.

    Every other parameter stays as it was. Functions with custom derivative rules are run in place,
    without the rules: `derivatives` makes those of the new function.
    """
    return HIGHER_ORDER[compat.kind(eqn)].rebind(eqn, operands, replacements)


def rebuild(
    eqn: JaxprEqn,
    operands: list[Any],
    replacements: Sequence[Threaded],
    extra_in: Sequence[Any] = (),
) -> Out:
    """Binds an equation again with extra operands and results threaded through its jaxprs.

    Where nothing is threaded, `rebind` changes less of the equation. Derivative rules stay, and do
    not see what is threaded: extra results have no tangents.

    Args:
      eqn: the equation.
      operands: its operands.
      replacements: for each of its jaxprs a function of the extra operands and of the operands of
        that jaxpr. It returns the jaxpr's results and a dict of extra results
        (`aux_outputs.Extra`). All other arrays that it reads are in `extra_in`.
      extra_in: arrays that all of them get, in every iteration and on every device.

    Returns:
      The results of the equation, and the extra ones: stacked by scan and shard_map, joined by
      while, neutral where the branch that runs has none.

    Raises:
      TypeError: if nothing can be threaded through the primitive.
      ValueError: if an extra result in a while loop has a Join without `combine`, or an extra
        result has two shapes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmp._core.jaxprs.aux_outputs import Extra
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
    """Stops the gradients of a replacement's extra results."""

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
    """Rebinds a primitive that has each inner jaxpr in a parameter: scan, while, jit or remat."""
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
    """Returns whether it is a `shard_map` whose transpose sums gradients of replicated operands.

    With `check_vma`, a `pvary` inside sums them.
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
        f"{rule}_call": HigherOrder(
            partial(_call, rule=rule), _run_in_place, aux_outputs.run_alongside
        )
        for rule in ("custom_jvp", "custom_vjp")
    },
    **dict.fromkeys(("jit", "remat2"), HigherOrder(_call, _rebind_jaxpr, aux_outputs.through_call)),
    "shard_map": HigherOrder(_call, _rebind_shard_map, aux_outputs.through_shard_map),
    "cond": HigherOrder(_branches, _rebind_branches, aux_outputs.through_branches),
    "scan": HigherOrder(_scan, _rebind_jaxpr, aux_outputs.through_scan),
    "while": HigherOrder(_while, _rebind_while, aux_outputs.through_while),
}
