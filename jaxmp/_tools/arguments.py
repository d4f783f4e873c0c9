"""The arguments of a function to measure, and whether it returns a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.trace import is_array, trace
from jaxmp._core.plan.parameters import read_argnums


def check_arguments(name: str, args: Sequence[Any], argnums: int | Sequence[int]) -> list[int]:
    """Checks that arguments are arrays; returns the indices of those that are differentiated.

    Args:
      name: the tool, for messages.
      args: the arguments.
      argnums: the positions of those that are differentiated.
    """
    several = read_argnums(name, argnums)
    check_sizes(name, args, {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name}: runs the program, so its arguments are arrays; args"
                f"{jax.tree_util.keystr(path)} is {leaf}"
            )
    for i in several:
        if args and not -len(args) <= i < len(args):
            raise ValueError(f"{name}: argnums={argnums}, but there are {len(args)} arguments")
    return [i % len(args) for i in several] if args else []


def check_progress(name: str, progress: Any) -> None:
    """Raises unless `progress` is None or can be called with a line of text."""
    if progress is not None and not callable(progress):
        raise TypeError(
            f"{name}: progress is called with a line of text: give print, for example; "
            f"got {progress!r}"
        )


def check_positional(misplaced: Sequence[Any], right_form: str) -> None:
    """Raises if a tool was given more positional arguments than its function and policies."""
    if misplaced:
        name = right_form.partition("(")[0]
        raise TypeError(
            f"{name}: got {len(misplaced)} too many positional arguments. The arguments of a "
            f"function go into a second call, and options are keywords: jaxmp.{right_form}."
        )


def mismatch(fn: Callable[..., Any], *args: Any) -> str:
    """Returns why a function's signature does not take the arguments; empty if it does.

    Example:
      >>> mismatch(lambda x: x, 1), mismatch(lambda x: x, 1, 2)
      ('', '(x): too many positional arguments')
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables have none
        return ""
    try:
        signature.bind(*args)
    except TypeError as error:
        return f"{signature}: {error}"
    return ""


def returns_aux(fn: Callable[..., Any], args: Any) -> bool | None:
    """Returns whether a loss function returns more than the loss; None if it returns no loss."""
    traced = trace(fn, args, {})
    out = traced.rebuild([v.aval for v in compat.closed(traced.jaxpr).jaxpr.outvars])
    if _is_loss(out):
        return False
    if isinstance(out, tuple) and len(out) == 2 and _is_loss(out[0]):
        return True
    return None


def _is_loss(out: Any) -> bool:
    shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
    return shape == () and dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def labels_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Returns the name of each array of a call, and the index of the argument that it is in."""
    try:
        names = list(inspect.signature(fn).bind(*args).arguments)
    except (TypeError, ValueError):
        names = []
    labels, owners = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if is_array(leaf):
            [owner, *rest] = path
            name = names[owner.idx] if len(names) == len(args) else f"args[{owner.idx}]"
            labels.append(name + jax.tree_util.keystr(tuple(rest)))
            owners.append(owner.idx)
    return labels, owners


def check_sizes(name: str, *args: Any) -> None:
    """Checks that every size is a number, for the function `name`, which counts bytes.

    Raises:
      ValueError: if a size is symbolic, as in `jax.export`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if is_array(leaf) and not all(isinstance(n, int) for n in leaf.shape):
            where = jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"{name}: argument {where} has the shape ({', '.join(map(str, leaf.shape))}), "
                "where a size is open, and bytes cannot be counted. Give every size a number."
            )
