"""Binding an equation again with more operands and results threaded through its jaxprs.

An extra operand is shared by all that runs inside. An extra result comes out of any depth: a loop
of known length stacks it, any other loop joins it, a branch that has none gives its neutral value.
It has no tangent, and is neither seen by derivative rules nor in the way of them.

One function per primitive, of an equation, its operands, what takes the place of its jaxprs, and
the extra operands; `higher_order.HIGHER_ORDER` says which primitive is threaded by which.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import filled
from jaxmp._jaxprs.compat import bind


@dataclasses.dataclass(frozen=True)
class Join:
    """How the values of an extra result become one, where they are none or not known how many.

    Attributes:
      neutral: what it is where nothing computes it: in a branch that does not have it, in a while
        loop that has not run.
      combine: what the values of two iterations of a while loop are together, in their shape and
        dtype; None: an extra result that meets a while loop is refused.
    """

    neutral: float = 0
    combine: Callable[[Any, Any], Any] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra:
    """An extra result.

    Attributes:
      value: an array.
      join: how several values become one.
      axes: what made the leading axes of `value`, outermost first: "scan", "reversed scan" or
        "devices". Row i of a scan is the iteration that reads slice i and gives slice i, which in a
        reversed scan runs last for i = 0; devices are in the order of the mesh.
    """

    value: Any
    join: Join = dataclasses.field(default=Join(), metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def under(self, axis: str) -> Extra:
        """With a leading axis more, which `value` has already."""
        return dataclasses.replace(self, axes=(axis, *self.axes))


Extras = dict[str, Extra]
Out = tuple[list[Any], Extras]

# What takes the place of an inner jaxpr: from the extra operands and its own to its results, and
# extra results by names that no other result of the equation has.
Threaded = Callable[Concatenate[Sequence[Any], ...], Out]
Thread = Callable[[JaxprEqn, list[Any], Sequence[Threaded], Sequence[Any]], Out]


class TracedBody:
    """A replacement that has been traced: to know its extra results before it is run.

    Attributes:
      jaxpr: its closed jaxpr, without constants.
      consts: the arrays it closes over: leading operands of `jaxpr`.
      extras: the extra results, with types in the place of arrays.
    """

    def __init__(self, fn: Threaded, extra_in: Sequence[Any], arrays: Sequence[Any]) -> None:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(list(extra_in), *arrays)
        self.jaxpr, self.consts = compat.without_consts(jaxpr)
        self._tree = jax.tree.structure(shapes)
        avals = [v.aval for v in compat.closed(self.jaxpr).jaxpr.outvars]
        self.extras: Extras = self.unflatten(avals)[1]

    def __call__(self, extra_in: Sequence[Any], *arrays: Any) -> Out:
        return self.unflatten(jaxpr_as_fun(self.jaxpr)(*self.consts, *extra_in, *arrays))

    def unflatten(self, flat: Sequence[Any]) -> Out:
        """Its results, of those of `jaxpr`."""
        results, extras = jax.tree.unflatten(self._tree, flat)
        return list(results), extras

    def neutral(self) -> Extras:
        """Its extra results where nothing computes them."""
        return {
            name: dataclasses.replace(extra, value=filled(extra.value, extra.join.neutral))
            for name, extra in self.extras.items()
        }


# Calls.


def in_place(
    _eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Of calls that mean nothing but what they call."""
    [called] = replacements
    return called(extra_in, *operands)


def beside(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Of functions with a derivative rule of their own: bound as they were, rule and all.

    The replacement runs next to the call, for its extra results alone: they are those of the
    function itself also where it is differentiated and its forward rule runs in its place. XLA
    merges what both compute, but not loops; what a body prints is printed twice.
    """
    [called] = replacements
    traced = TracedBody(called, extra_in, operands)
    results = bind(eqn, operands)
    if not traced.extras:
        return results, {}
    _, extras = traced(*lax.stop_gradient((list(extra_in), *operands)))
    return results, extras


def through_call(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Of jit and remat: name, shardings, donation, policy and the rest stay."""
    [called] = replacements

    def shared(*arrays: Any) -> Out:
        return called(extra_in, *arrays)

    rematted = compat.rematerialized(eqn, shared)
    if rematted is not None:
        results, extras = rematted(*operands)
        return list(results), extras
    traced = TracedBody(called, extra_in, operands)
    more = [*traced.consts, *extra_in]
    params = compat.widened(eqn, len(more), len(jax.tree.leaves(traced.extras)))
    jaxpr = compat.like(traced.jaxpr, eqn.params["jaxpr"])
    return traced.unflatten(bind(eqn, [*more, *operands], jaxpr=jaxpr, **params))


def through_shard_map(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Extra operands are the same on all devices; an extra result gets a leading axis of them."""
    [called] = replacements
    params = eqn.params
    manual = tuple(a for a in params["mesh"].axis_names if a in params["newly_manual_axes"])

    def local(extra_in: Sequence[Any], *arrays: Any) -> Out:
        results, extras = called(extra_in, *arrays)
        return list(results), jax.tree.map(lambda x: x[None], extras)

    mapped: Callable[..., Any] = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(manual)),
        check_vma=params["check_vma"],
        axis_names=set(manual),
    )
    results, extras = mapped(list(extra_in), *operands)
    return list(results), {name: extra.under("devices") for name, extra in extras.items()}


# Branches.


def through_branches(
    _eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Every branch gives every extra result that one of them has."""
    index, *arrays = operands
    traced = [TracedBody(branch, extra_in, arrays) for branch in replacements]
    wanted: Extras = {}
    for branch in traced:
        for name, extra in branch.extras.items():
            _check_alike("the branches of a cond", name, wanted.setdefault(name, extra), extra)

    def whole(branch: TracedBody, extra_in: Sequence[Any], *arrays: Any) -> Out:
        results, extras = branch(extra_in, *arrays)
        for other in traced:
            extras = other.neutral() | extras
        return results, extras

    branches = [functools.partial(whole, branch) for branch in traced]
    out: Out = lax.switch(index, branches, list(extra_in), *arrays)
    return out


# Loops.


def through_scan(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Extra operands are shared by the iterations; extra results are stacked like its own."""
    [body] = replacements
    n_consts, n_carry = compat.scan_split(eqn)
    consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Out]:
        results, extras = body(extra_in, *consts, *carry, *slices)
        return results[:n_carry], (results[n_carry:], extras)

    options = compat.scan_options(eqn)
    carry, (stacked, extras) = lax.scan(step, carry, operands[n_consts + n_carry :], **options)
    axis = "reversed scan" if options["reverse"] else "scan"
    return [*carry, *stacked], {name: extra.under(axis) for name, extra in extras.items()}


def through_while(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Extra results are carried, from their neutral value, and joined with those of an iteration.

    Those of the condition as well, which runs once more than the body. Under vmap, a condition may
    differ from element to element: the loop goes on while one is true, and what is done stays.
    """
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    given, start = operands[: n_test + n_body], operands[n_test + n_body :]
    test = TracedBody(replacements[0], extra_in, [*given[:n_test], *start])
    body = TracedBody(replacements[1], extra_in, [*given[n_test:], *start])
    for name, extra in (test.extras | body.extras).items():
        if extra.join.combine is None:
            raise ValueError(
                f"rebuild: extra result {name!r} cannot be stacked by a while loop, which runs "
                "nobody knows how often: give it a Join that says how to `combine` two values"
            )

    def tested(carry: list[Any], extras: Extras) -> tuple[Any, list[Any], Extras]:
        [go], found = test(extra_in, *given[:n_test], *carry)
        return go, carry, _both(extras, found)

    def step(state: tuple[Any, list[Any], Extras]) -> tuple[Any, list[Any], Extras]:
        go, carry, extras = state
        results, found = body(extra_in, *given[n_test:], *carry)
        if go.ndim:
            results = [_where(go, *pair) for pair in zip(results, carry, strict=True)]
        return tested(results, _both(extras, found))

    # The condition is computed at the end of the iteration before: a loop's condition can return
    # nothing else.
    first = tested(start, body.neutral())
    _, results, extras = lax.while_loop(lambda state: jnp.any(state[0]), step, first)
    return results, extras


def _where(chosen: Any, new: Any, old: Any) -> Any:
    """`new` where `chosen` is true, along its leading axes, and `old` elsewhere."""
    return jnp.where(jnp.expand_dims(chosen, tuple(range(chosen.ndim, jnp.ndim(new)))), new, old)


def _both(olds: Extras, news: Extras) -> Extras:
    """The extra results of either, those of both combined."""
    joined = dict(olds) | news
    for name in olds.keys() & news.keys():
        old, new = olds[name], news[name]
        _check_alike("a while loop", name, old, new)
        value = old.join.combine(old.value, new.value)  # type: ignore[misc]  # checked before
        joined[name] = dataclasses.replace(old, value=value)
        _check_alike("a while loop, combined,", name, old, joined[name])
    return joined


def _check_alike(where: str, name: str, old: Extra, new: Extra) -> None:
    """Raises where an extra result is not of one kind."""
    kinds = [f"{x.value.dtype}{list(x.value.shape)}, {x.join}, {x.axes}" for x in (old, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"rebuild: extra result {name!r} of {where} is {kinds[0]} and is {kinds[1]}: give it "
            "one shape, dtype, Join and axes, or two names"
        )
