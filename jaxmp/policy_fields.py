"""The fields of a `Policy`: how each is spelled in a string, read, checked and printed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxmp._chip_words import word_at_chip
from jaxmp._printable import shown
from jaxmp.dtypes import dtype_name, parse_dtype, short_dtype_name
from jaxmp.recipes import Recipe, check_goes_with, parse_matmul

# The classes that `Policy.ops` may give a primitive; `jaxmp.autocast` says what each one means.
OP_CLASSES: Final = ("compute", "full_precision", "promote", "move", "as_written")

# The values of `Policy.residuals`.
RESIDUALS: Final = ("save", "recompute")

# The value of `Policy.attention`, by itself or with the name of a chip.
FUSED: Final = "fused"


class Piece(NamedTuple):
    """A piece of a policy string, and where it starts."""

    text: str
    start: int

    def split(self, separator: str) -> list[Piece]:
        """Splits it, stripping blanks, without losing where each part starts."""
        parts, start = [], self.start
        for text in self.text.split(separator):
            parts.append(Piece(text.strip(), start + len(text) - len(text.lstrip())))
            start += len(text) + len(separator)
        return parts


class MalformedError(ValueError):
    """An error at a position of a policy string, which says what was expected there."""

    def __init__(self, piece: Piece, expected: object) -> None:
        super().__init__(str(expected).rstrip("."))
        self.position = piece.start


class Field(NamedTuple):
    """One field of a `Policy`. Its default and its documentation are in the dataclass.

    Attributes:
      name: the attribute.
      keys: its names in strings; the first one is printed.
      read: takes a caller's value, and the field's name in messages; returns what a policy keeps.
      show: returns the text of a kept value that is not the default.
      parse: returns what `read` takes from the text in a string, where that is not the text itself.
      check: takes a kept value, the name of the compute dtype and the field's name in messages;
        raises if the two do not go together.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[Any, str], Any]
    show: Callable[[Any], str] = str
    parse: Callable[[Piece], Any] = lambda piece: piece.text
    check: Callable[[Any, str, str], None] | None = None


def _float32_or_compute(dtype: Any, compute: str, what: str) -> None:
    if dtype != jnp.float32 and dtype_name(dtype) != compute:
        raise ValueError(
            f"{what} must be float32 or the compute dtype ({compute}); got {dtype_name(dtype)}."
        )


def _read_flag(value: Any, what: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{what} must be True or False; got {shown(value)} of type {type(value).__name__!r}."
        )
    return bool(value)


def _parse_flag(piece: Piece) -> bool:
    if piece.text.lower() not in ("true", "false"):
        raise MalformedError(piece, f"expected true or false, got {shown(piece.text)}")
    return piece.text.lower() == "true"


def _read_recipe(matmul: Any, what: str) -> Recipe | str | None:
    if matmul is None or isinstance(matmul, Recipe):
        return matmul
    if isinstance(matmul, str):
        return parse_matmul(matmul)
    raise TypeError(
        f"{what} takes a recipe, such as jaxmp.recipes.float8(), its string, 'auto', or None; got "
        f"{shown(matmul)} of type {type(matmul).__name__!r}."
    )


def _read_residuals(residuals: Any, what: str) -> str:
    if residuals not in RESIDUALS:
        raise ValueError(
            f"{what} must be {' or '.join(map(repr, RESIDUALS))}; got {shown(residuals)}."
        )
    return str(residuals)


def _read_attention(attention: Any, what: str) -> str | None:
    if attention is None:
        return None
    if not isinstance(attention, str):
        raise TypeError(
            f"{what} takes None, 'fused' or 'fused@CHIP'; got "
            f"{shown(attention)} of type {type(attention).__name__!r}."
        )
    try:
        read = word_at_chip(attention, FUSED)
    except ValueError as error:
        raise ValueError(f"{what}: {error}.") from None
    if read is None:
        raise ValueError(
            f"{what} is {FUSED!r} or '{FUSED}@CHIP', or absent; got {shown(attention)}."
        )
    return read


def _read_ops(ops: Any, what: str) -> tuple[tuple[str, str], ...]:
    """Returns the overrides as sorted (primitive name, class) pairs."""
    if ops is None:
        return ()
    pairs = tuple(ops.items()) if isinstance(ops, Mapping) else ops
    # Pairs are how a policy keeps them: `dataclasses.replace` hands them back.
    if not (isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)):
        raise TypeError(
            f"{what} takes a mapping from primitives or their names to one of "
            f"{', '.join(OP_CLASSES)}; got {shown(ops)} of type {type(ops).__name__!r}."
        )
    normalized: dict[str, str] = {}
    for primitive, op_class in pairs:
        name = primitive.name if isinstance(primitive, Primitive) else primitive
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Policy: a key of ops must be a primitive or its name; got {shown(name)}."
            )
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(f"{what} has {shown(name)}, which is not Unicode text.")
        if op_class not in OP_CLASSES:
            raise ValueError(f"{what} gives {shown(name)} the {_unknown(op_class)}.")
        if normalized.setdefault(name, op_class) != op_class:
            raise ValueError(
                f"{what} gives {shown(name)} two classes, {normalized[name]!r} and {op_class!r}."
            )
    return tuple(sorted(normalized.items()))


def _unknown(op_class: object) -> str:
    renamed = zip(("low", "full", "follow", "transparent", "own"), OP_CLASSES, strict=True)
    hint = "".join(f", which is {new} now" for old, new in renamed if op_class == old)
    return f"unknown class {shown(op_class)}{hint}; the classes are {', '.join(OP_CLASSES)}"


def _parse_ops(value: Piece) -> dict[str, str]:
    ops: dict[str, str] = {}
    for piece in value.split("|"):
        name, *classes = piece.split(":")
        if len(classes) != 1 or not name.text:
            raise MalformedError(piece, f"expected primitive:class, got {shown(piece.text)}")
        [op_class] = classes
        if op_class.text not in OP_CLASSES:
            raise MalformedError(op_class, _unknown(op_class.text))
        if unquote(name.text) in ops:
            raise MalformedError(name, f"the primitive {shown(name.text)} is set twice")
        ops[unquote(name.text)] = op_class.text
    return ops


def _show_ops(ops: tuple[tuple[str, str], ...]) -> str:
    # A primitive may be called anything; "%3A" keeps the separators unambiguous.
    return "|".join(f"{quote(name, safe='')}:{op_class}" for name, op_class in ops)


_dtype = functools.partial(Field, read=parse_dtype, show=short_dtype_name)
FIELDS: Final = (
    _dtype("param_dtype", ("p", "params")),
    _dtype("compute_dtype", ("c", "compute")),
    _dtype("output_dtype", ("o", "output")),
    _dtype("softmax_dtype", ("softmax",), check=_float32_or_compute),
    _dtype("reduce_dtype", ("reduce",), check=_float32_or_compute),
    _dtype("reduce_scatter_dtype", ("reduce_scatter",), check=_float32_or_compute),
    Field("saturate", ("saturate",), _read_flag, lambda flag: str(flag).lower(), _parse_flag),
    Field("matmul", ("matmul",), _read_recipe, check=check_goes_with),
    Field("residuals", ("residuals",), _read_residuals, parse=lambda piece: piece.text.lower()),
    Field("attention", ("attention",), _read_attention),
    Field("ops", ("ops",), _read_ops, _show_ops, _parse_ops),
)
