"""Text of strangers, made fit to print: names in files, module names, paths, what a caller passed.

A terminal obeys escape codes, and characters that override the direction of text hide what is
written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

__all__ = ["keys_of", "printable", "show", "shown"]


def printable(text: str) -> str:
    r"""Escapes all characters that are not printable, but for line breaks, as `repr` does.

    Those are control characters, overrides of the direction of text, characters without a width,
    and spaces other than the common one.

    Example:
      >>> print(printable("encoder\x1b[31m/\u202elayer"))
      encoder\x1b[31m/\u202elayer
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shown(value: Any, most: int = 80) -> str:
    """Returns the `repr` of a value in one line, cut to `most` characters.

    Example:
      >>> shown("ab"), shown("a" * 10**6, most=10)
      ("'ab'", "'aaaaaaaa…")
    """
    if isinstance(value, str) and len(value) > most:  # a repr of megabytes is not made
        value = value[: most + 1]
    elif isinstance(value, int) and abs(value) >= 10**most:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split(" ")).replace("\n", " ")
    except ValueError:  # an integer inside has more digits than Python prints
        text = f"a {type(value).__name__}"
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def keys_of(path: Iterable[Any]) -> tuple[str, ...]:
    """Returns the entries of a path in a pytree as text: keys, attributes and positions."""
    names = ("key", "name", "idx")
    return tuple(str(next((getattr(e, n) for n in names if hasattr(e, n)), e)) for e in path)


def show(path: tuple[Any, ...]) -> str:
    """Returns a path in a pytree as messages show it; "the root" for the tree itself."""
    return jax.tree_util.keystr(path) or "the root"
