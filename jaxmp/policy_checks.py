"""What the fields of a `Policy` may be, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Primitive

from jaxmp.policy_string import OP_CLASSES, RESIDUALS
from jaxmp.recipes import Recipe, parse_matmul


def check_residuals(residuals: Any) -> None:
    """Raises unless it is a word for what is kept for the backward pass."""
    if residuals not in RESIDUALS:
        raise ValueError(
            f"Policy: residuals must be {' or '.join(map(repr, RESIDUALS))}; got {residuals!r}."
        )


def read_recipe(matmul: Any) -> Recipe | str | None:
    """The recipe that a value or a string says; None and "auto" as they are."""
    if matmul is None or isinstance(matmul, Recipe):
        return matmul
    if isinstance(matmul, str):
        return parse_matmul(matmul)
    raise TypeError(
        "Policy: matmul takes a recipe, such as jaxmp.float8(), its string, 'auto', or None; got "
        f"{matmul!r} of type {type(matmul).__name__!r}."
    )


def normalize_ops(ops: Any) -> tuple[tuple[str, str], ...]:
    """The overrides as sorted (primitive name, class) pairs."""
    if ops is None:
        return ()
    pairs = tuple(ops.items()) if isinstance(ops, Mapping) else ops
    # Pairs are how a policy keeps them: `dataclasses.replace` hands them back.
    if not (isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)):
        raise TypeError(
            "Policy: ops takes a mapping from primitives or their names to one of "
            f"{', '.join(OP_CLASSES)}; got {ops!r} of type {type(ops).__name__!r}."
        )
    normalized: dict[str, str] = {}
    for primitive, op_class in pairs:
        name = primitive.name if isinstance(primitive, Primitive) else primitive
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Policy: a key of ops must be a primitive or its name; got {primitive!r}."
            )
        if op_class not in OP_CLASSES:
            raise ValueError(
                f"Policy: ops gives {name!r} the unknown class {op_class!r}; the classes are "
                f"{', '.join(OP_CLASSES)}."
            )
        if normalized.setdefault(name, op_class) != op_class:
            raise ValueError(
                f"Policy: ops gives {name!r} two classes, {normalized[name]!r} and {op_class!r}."
            )
    return tuple(sorted(normalized.items()))
