"""What a function that is measured is called with, and whether it returns a loss."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._audit.costs import check_sizes
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.trace import is_array, trace


def check_arguments(args: Sequence[Any], argnums: int | Sequence[int]) -> list[int]:
    """Those arguments that are differentiated, counted from 0, if all of them can be run with."""
    check_sizes("capture", args, {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                "capture: runs the program, so its arguments are arrays; args"
                f"{jax.tree_util.keystr(path)} is {leaf}"
            )
    several = argnums if isinstance(argnums, Sequence) else [argnums]
    for i in several:
        if args and not -len(args) <= i < len(args):
            raise ValueError(f"capture: argnums={argnums}, but there are {len(args)} arguments")
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
            f"{name}: got {len(misplaced)} positional arguments too many. The arguments of a "
            f"function go into a second call, and options are keywords: jaxmp.{right_form}."
        )


def mismatch(fn: Callable[..., Any], *args: Any) -> str:
    """Why a function cannot be called with so many arguments; empty if it can, as far as it says.

    Example:
      >>> mismatch(lambda x: x, 1), mismatch(lambda x: x, 1, 2)
      ('', '(x): too many positional arguments')
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of some callables there is none
        return ""
    try:
        signature.bind(*args)
    except TypeError as error:
        return f"{signature}: {error}"
    return ""


def bytes_of(tree: Any) -> Iterator[bytes]:
    """Yields the dtype and shape of each leaf, and what it holds."""
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes() if array.dtype != object else repr(leaf).encode()


def described(thing: Any) -> str:
    """The `repr` of something, without addresses in memory.

    Example:
      >>> described(lambda: 1)
      '<function <lambda>>'
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def text_of(jaxpr: Any) -> Iterator[bytes]:
    """Yields what a closed jaxpr says, the scopes in it included, and the constants in it."""
    text = jaxpr.pretty_print(name_stack=True, use_color=False)
    yield re.sub(r" at 0x[0-9a-f]+", "", text).encode()
    yield from bytes_of(list(_constants(jaxpr)))


def _constants(jaxpr: Any) -> Iterator[Any]:
    opened, consts = compat.closed(jaxpr)
    yield from consts
    for inner in (inner for eqn in opened.eqns for inner in inside(eqn)):
        yield from _constants(inner.jaxpr)


def returns_aux(fn: Callable[..., Any], args: Any) -> bool | None:
    """Whether a loss function returns more than the loss; None if it returns no loss."""
    traced = trace(fn, args, {})
    out = jax.tree.unflatten(
        traced.tree, [v.aval for v in compat.closed(traced.jaxpr).jaxpr.outvars]
    )
    if _is_loss(out):
        return False
    if isinstance(out, tuple) and len(out) == 2 and _is_loss(out[0]):
        return True
    return None


def _is_loss(out: Any) -> bool:
    shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
    return shape == () and dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def labels_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[str], list[int]]:
    """What to call each array of a call, and which argument it is in."""
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
