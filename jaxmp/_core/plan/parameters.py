"""Parameters among the arrays of a call. All other arrays are data."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.jaxprs.dataflow import Inside, forward
from jaxmp._core.jaxprs.equation_parameters import contracted, product_axes
from jaxmp._core.jaxprs.trace import is_array, name_of
from jaxmp._core.plan.flops import contraction_flops
from jaxmp._core.plan.primitives import LOW, MOVING

Argnums = int | Sequence[int]
# From the `(args, kwargs)` of a call to whether each of their arrays is a parameter.
Parameters = Callable[[Any, Any], list[bool]]


def by_position(fn: Callable[..., Any], argnums: Argnums) -> Parameters:
    """Returns the `Parameters` of a function, by the positions of arguments in its signature."""
    named = named_arguments(fn, argnums)

    def parameters(args: Any, kwargs: Any) -> list[bool]:
        given = {**dict(enumerate(args)), **{name: kwargs[name] for name in sorted(kwargs)}}
        holds = named(args, kwargs)
        return [x for key, arg in given.items() for x in _of_argument(arg, named=key in holds)]

    return parameters


def named_arguments(
    fn: Callable[..., Any], argnums: Argnums
) -> Callable[[Any, Any], set[int | str]]:
    """Returns which `(args, kwargs)` of a call of a function `argnums` names: indices, and names.

    Raises:
      TypeError: if `argnums` are not integers.
    """
    positions = read_argnums("autocast", argnums)
    names = _names(fn)

    def named(args: Any, kwargs: Any) -> set[int | str]:
        count = max(len(args), len(names), 1)
        if not all(-count <= i < count for i in positions):
            raise ValueError(
                f"autocast: argnums={argnums}, but {name_of(fn)} has {count} arguments here."
            )
        found = {i % len(args) if i < 0 and args else i for i in positions}
        return {*found, *(name for name in kwargs if names.get(name) in found)}

    return named


def read_argnums(
    name: str, argnums: Argnums, option: str = "argnums", held: str = "are parameters"
) -> tuple[int, ...]:
    """Returns positions of arguments as a tuple.

    Args:
      name: the function that is called, for messages.
      argnums: the positions.
      option: the name of its option.
      held: what the arguments there are, or hold.

    Raises:
      TypeError: if they are not integers.
    """
    positions = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(positions, (tuple, list)) or not all(type(i) is int for i in positions):
        raise TypeError(
            f"{name}: {option} must be an integer or a sequence of integers, as in jax.grad: the "
            f"positions of the arguments that {held}; got {argnums!r}."
        )
    return tuple(positions)


def _names(fn: Callable[..., Any]) -> dict[str, int]:
    try:
        return {name: i for i, name in enumerate(inspect.signature(fn).parameters)}
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _of_argument(argument: Any, *, named: bool) -> list[bool]:
    """Returns whether each array of an argument is a parameter; `named` if `argnums` names it.

    Of named Flax variables, those in the collection "params"; of NNX Variables, every `nnx.Param`.
    """
    collections = isinstance(argument, Mapping) and "params" in argument
    found: list[bool] = []
    paths = jax.tree.leaves_with_path(argument, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, leaf in paths:
        if isinstance(leaf, nnx.Variable):
            found += [isinstance(leaf, nnx.Param)] * sum(map(is_array, jax.tree.leaves(leaf)))
        elif is_array(leaf):
            found.append(named and (not collections or getattr(path[0], "key", "") == "params"))
    return found


def of_variables(args: Any, kwargs: Any) -> list[bool]:
    """Returns which arrays of a call with NNX modules are parameters: Params, wherever they are."""
    return _of_argument((args, kwargs), named=False)


def place_of(args: Any, kwargs: Any, operand: int) -> str:
    """Describes where in a call an array is, given its number among the call's arrays."""
    paths = jax.tree.leaves_with_path((args, kwargs))
    (kind, where, *inside), _ = [found for found in paths if is_array(found[1])][operand]
    name = f"argument {where.idx}" if kind.idx == 0 else f"the argument {where.key!r}"
    return f"{name}{jax.tree_util.keystr(tuple(inside))}"


def overlooked(jaxpr: Any, parameters: Sequence[bool]) -> tuple[list[int], float] | None:
    """Finds operands that layers multiply by like weights, but that are not parameters.

    Returns:
      Those operands, the one that most FLOPs multiply by first, and the share of the layers' FLOPs
      that multiply by any of them; None if that is at most half.
    """
    flops: Counter[int] = Counter()
    seen: set[int] = set()
    # A parameter; neither an argument nor a constant; one of two arguments, not known which.
    known, computed, unclear = -1, -2, -3

    def transfer(
        eqn: JaxprEqn, ins: list[int | None], inside: Inside[int | None]
    ) -> Sequence[int | None]:
        if eqn.primitive.name in LOW:
            if id(eqn) not in seen and (known in ins[:2] or _has_no_batch(eqn)):
                seen.add(id(eqn))
                arguments = [i for i in ins[:2] if i not in (None, computed)]
                if None not in ins[:2] and arguments:
                    told = len(arguments) == 1 or arguments[-1] == known
                    flops[arguments[-1] if told else unclear] += contraction_flops(eqn)
            return [computed] * len(eqn.outvars)
        if (outs := inside(ins)) is not None:
            return outs
        moves = eqn.primitive.name in MOVING | {"convert_element_type"} and len(ins) == 1
        if eqn.primitive.name == "broadcast_in_dim" and shape_of(eqn.outvars[0]) != (
            shape_of(eqn.invars[0])
        ):  # along the batch, such as a bias
            return [computed if ins[0] == known else ins[0]]
        if eqn.primitive.name in ("mul", "div") and known in ins:  # such as one over its norm
            return [known]
        if moves or set(ins) <= {None, known}:  # computed from parameters
            return [next((i for i in ins if i is not None), None)] * len(eqn.outvars)
        return [computed] * len(eqn.outvars)

    given = [known if parameter else i for i, parameter in enumerate(parameters)]
    forward(jaxpr, given, transfer, lambda a, b: a if a == b else computed, None)
    total, missed = sum(flops.values()), sum(n for i, n in flops.items() if i >= 0)
    if 2 * missed <= total:
        return None
    return [i for i, _ in flops.most_common() if i >= 0], missed / total


def _has_no_batch(eqn: JaxprEqn) -> bool:
    """Returns whether a contraction may be a layer's: attention batches over heads and examples."""
    batch = eqn.primitive.name == "dot_general" and product_axes(eqn)[1][0]
    return not batch and contracted(eqn) != 1
