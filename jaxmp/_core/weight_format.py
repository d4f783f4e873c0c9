"""The few bits of weights and of what they are multiplied by: formats, and what shares a scale."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import numpy as np

from jaxmp._core.printable import shown
from jaxmp.dtypes import parse_format
from jaxmp.formats import ALL_FORMATS, Format

GRANULARITIES: Final = ("tensor", "row", "block")
BLOCK_SIZE: Final = 64
# What `format` may be, a mapping's values too.
STORED: Final = tuple(ALL_FORMATS[short] for short in ("int8", "int4", "e4m3", "e2m1"))
# What `Policy.activations` may be, by itself or with "@static".
ACTIVATIONS: Final = (ALL_FORMATS["int8"], ALL_FORMATS["e4m3"])
STATIC: Final = "static"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """The few bits that weights are stored in. Hashable; `str` of it reads back.

    Attributes:
      short: the format: a key of `ALL_FORMATS`.
      granularity: what shares a scale: one of `GRANULARITIES`.
      block_size: how many weights of a sum share one, in blocks; 0 otherwise.

    Example:
      >>> str(parse_weights("int4")), str(parse_weights("int4@32")), str(parse_weights("fp8@row"))
      ('int4', 'int4@32', 'e4m3')
    """

    short: str
    granularity: str
    block_size: int

    @property
    def format(self) -> Format:
        """The number format."""
        return ALL_FORMATS[self.short]

    def __str__(self) -> str:
        if self == parse_weights(self.short):
            return self.short
        return f"{self.short}@{self.block_size or self.granularity}"


def parse_weights(
    value: Any,
    what: str = "weights",
    granularity: str | None = None,
    block_size: int = BLOCK_SIZE,
    hint: str = "",
) -> WeightFormat:
    """Returns the format that a name, dtype or string such as ``"int4@row"`` stands for.

    Args:
      value: a format, or one with what shares a scale: ``@row``, ``@tensor``, or ``@32``, blocks of
        so many.
      what: what it is for; errors start with it.
      granularity: what shares a scale where `value` does not say; None: blocks for 4 bits, rows for
        8.
      block_size: the size of blocks where `value` does not say.
      hint: what the message about an unknown format ends with.

    Raises:
      ValueError: if it names no format, or what shares a scale is unknown, or said twice.
      TypeError: if it is neither a name nor a dtype.
    """
    if isinstance(value, WeightFormat):
        return value
    name, at, shares = value.partition("@") if isinstance(value, str) else (value, "", "")
    fmt = parse_format(name.strip() if isinstance(name, str) else name, STORED, what, hint)
    if at and granularity is not None:
        raise ValueError(
            f"{what} is {shown(value)}, which says what shares a scale, and so does granularity="
            f"{granularity!r}: say one."
        )
    if at:
        said = shares.strip().lower()
        is_size = re.fullmatch("[0-9]{1,9}", said)
        granularity, block_size = ("block", int(said)) if is_size else (said, BLOCK_SIZE)
        if granularity not in GRANULARITIES or block_size < 2:
            raise ValueError(
                f"{what} is {shown(value)}: after the @ is what shares a scale, "
                f"{', '.join(GRANULARITIES)}, or the number of weights in a block, 2 or more."
            )
    if granularity is None:
        # The 15 levels of int4 are too few for a row of thousands of weights.
        granularity = "row" if fmt.bits == 8 else "block"
    return WeightFormat(fmt.short, granularity, int(block_size) if granularity == "block" else 0)


def parse_activations(value: Any, what: str = "activations") -> str:
    """Returns the spelling of a format of activations: ``"int8"``, or ``"int8@static"``.

    Raises:
      ValueError: if it names no format of 8 bits, or says something else after the ``@``.
      TypeError: if it is neither a name nor a dtype.

    Example:
      >>> parse_activations("float8"), parse_activations("int8 @ static")
      ('e4m3', 'int8@static')
    """
    name, at, scales = value.partition("@") if isinstance(value, str) else (value, "", "")
    fmt = parse_format(name.strip() if isinstance(name, str) else name, ACTIVATIONS, what)
    if not at:
        return fmt.short
    if scales.strip().lower() != STATIC:
        raise ValueError(
            f"{what} is {shown(value)}: after the @ is {STATIC}, for scales that jaxmp.quantize "
            "stored (calibrate=); without it, each row has a scale of its own, found as it comes."
        )
    return f"{fmt.short}@{STATIC}"


def activation_format(activations: str) -> tuple[Format, bool]:
    """Returns the format of a policy's ``activations``, and whether its scales are stored."""
    short, _, scales = activations.partition("@")
    return ALL_FORMATS[short], scales == STATIC


def check_granularity(granularity: object, block_size: object) -> None:
    """Raises unless both are what `jaxmp.quantize` takes.

    Raises:
      ValueError: if the granularity is unknown, or the size of blocks is below 2.
      TypeError: if the size of blocks is not an integer.
    """
    if granularity not in (None, *GRANULARITIES):
        raise ValueError(
            f"quantize: granularity is {granularity!r}; it is one of "
            f"{', '.join(map(repr, GRANULARITIES))}, or None for the format's own."
        )
    if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)):
        raise TypeError(
            f"quantize: block_size is how many weights share a scale, an integer; got "
            f"{block_size!r} of type {type(block_size).__name__!r}."
        )
    if block_size < 2:
        raise ValueError(f"quantize: block_size must be at least 2; got {block_size}.")
