"""Binding an equation again with extra operands and results threaded through its inner jaxprs.

An extra operand is shared by all inner jaxprs. An extra result comes out of any depth: a scan
stacks it, a while loop joins it, and a branch that has none returns its neutral value. It has no
tangent, and derivative rules neither see it nor are changed by it.

There is one function per kind of primitive, of an equation, its operands, the replacements of its
jaxprs, and the extra operands; `higher_order.HIGHER_ORDER` says which primitives use which.
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

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import filled
from jaxmp._core.jaxprs.compat import bind


@dataclasses.dataclass(frozen=True)
class Join:
    """The value of an extra result where it is computed never, or an unknown number of times.

    Attributes:
      neutral: the value where nothing computes it: in a branch that does not have it, in a while
        loop that has not run.
      combine: merges the values of two iterations of a while loop, in their shape and dtype; with
        None, an extra result in a while loop is refused.
    """

    neutral: float = 0
    combine: Callable[[Any, Any], Any] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra:
    """An extra result.

    Attributes:
      value: an array.
      join: its value in branches and while loops.
      axes: the kinds of the leading axes of `value`, outermost first: "scan", "reversed scan" or
        "devices". Row i of a scan is the iteration that reads and returns slice i; in a reversed
        scan i = 0 runs last. Devices are in the order of the mesh.
    """

    value: Any
    join: Join = dataclasses.field(default=Join(), metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def under(self, axis: str) -> Extra:
        """Returns this result with one more leading axis named, which `value` has already."""
        return dataclasses.replace(self, axes=(axis, *self.axes))


Extras = dict[str, Extra]
Out = tuple[list[Any], Extras]

# A replacement of an inner jaxpr: from the extra operands and the jaxpr's own to its results, and
# to extra results by names that are unique within the equation.
Threaded = Callable[Concatenate[Sequence[Any], ...], Out]
Thread = Callable[[JaxprEqn, list[Any], Sequence[Threaded], Sequence[Any]], Out]


class TracedBody:
    """A replacement that is traced first, so that its extra results are known before it runs.

    Attributes:
      jaxpr: its closed jaxpr, without constants.
      consts: the arrays it closes over: leading operands of `jaxpr`.
      extras: the extra results, with avals in the place of arrays.
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
        """Returns the results and the extra results, given the flat results of `jaxpr`."""
        results, extras = jax.tree.unflatten(self._tree, flat)
        return list(results), extras

    def neutral(self) -> Extras:
        """Returns the extra results with their neutral values, for where nothing computes them."""
        return {
            name: dataclasses.replace(extra, value=filled(extra.value, extra.join.neutral))
            for name, extra in self.extras.items()
        }


# Calls.


def in_place(
    _eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Runs the replacement in place of a call that has no meaning beyond its jaxpr."""
    [called] = replacements
    return called(extra_in, *operands)


def run_alongside(
    eqn: JaxprEqn, operands: list[Any], replacements: Sequence[Threaded], extra_in: Sequence[Any]
) -> Out:
    """Binds a function with a custom derivative rule unchanged, and runs the replacement as well.

    The replacement runs for its extra results alone: they are those of the function itself, even
    where it is differentiated and its forward rule runs instead. XLA merges the common
    computations of both, but not loops; what a body prints is printed twice.
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
    """Rebinds a jit or remat; its name, shardings, donation, policy and so on are kept."""
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
    """Rebinds a shard_map: extra operands are replicated, extra results get a device axis first."""
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
    """Rebinds a cond whose branches all return every extra result that any of them has."""
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
    """Rebinds a scan: its iterations share extra operands, and extra results are stacked."""
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
    """Rebinds a while loop that carries extra results and combines in those of each iteration.

    They start at their neutral values. The condition's are combined too; it runs once more than the
    body. Under vmap, it may differ between elements: the loop runs while it is true for any of
    them, and the elements that are finished keep their values.
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

    # The body computes the next condition, and its extra results: a loop's condition can return
    # nothing but a bool.
    first = tested(start, body.neutral())
    _, results, extras = lax.while_loop(lambda state: jnp.any(state[0]), step, first)
    return results, extras


def _where(chosen: Any, new: Any, old: Any) -> Any:
    """Selects `new` where `chosen` is true, along its leading axes, and `old` elsewhere."""
    return jnp.where(jnp.expand_dims(chosen, tuple(range(chosen.ndim, jnp.ndim(new)))), new, old)


def _both(olds: Extras, news: Extras) -> Extras:
    """Returns the extra results of either, and those of both combined."""
    joined = dict(olds) | news
    for name in olds.keys() & news.keys():
        old, new = olds[name], news[name]
        _check_alike("a while loop", name, old, new)
        value = old.join.combine(old.value, new.value)  # type: ignore[misc]  # checked before
        joined[name] = dataclasses.replace(old, value=value)
        _check_alike("a while loop, combined,", name, old, joined[name])
    return joined


def _check_alike(where: str, name: str, old: Extra, new: Extra) -> None:
    """Raises unless two values of an extra result have the same shape, dtype, Join and axes."""
    kinds = [f"{x.value.dtype}{list(x.value.shape)}, {x.join}, {x.axes}" for x in (old, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"rebuild: extra result {name!r} of {where} is {kinds[0]} and is {kinds[1]}: give it "
            "one shape, dtype, Join and axes, or two names"
        )
