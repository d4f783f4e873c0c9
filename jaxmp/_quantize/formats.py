"""The formats that weights are stored in, and what shares a scale."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp.dtypes import did_you_mean, plain_name


class Format(NamedTuple):
    """A format that weights are stored in.

    Attributes:
      name: the name of its dtype.
      largest: the largest magnitude used; symmetric, so -128 and -8 are left out.
      granularity: what shares a scale unless the caller says.
    """

    name: str
    largest: float
    granularity: str

    @property
    def integer(self) -> bool:
        """Whether its values are evenly spaced."""
        return self.name.startswith("int")

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return jnp.dtype(self.name)


FORMATS: Final = {
    f.name: f
    for f in (
        Format("int8", 127.0, "row"),
        # 15 levels for a row of thousands of weights are too few.
        Format("int4", 7.0, "block"),
        Format("float8_e4m3fn", 448.0, "row"),
    )
}
_BY_NAME: Final = {
    **FORMATS,
    "i8": FORMATS["int8"],
    "i4": FORMATS["int4"],
    "e4m3": FORMATS["float8_e4m3fn"],
    "e4m3fn": FORMATS["float8_e4m3fn"],
    "float8": FORMATS["float8_e4m3fn"],
    "float8_e4m3": FORMATS["float8_e4m3fn"],
}

GRANULARITIES: Final = ("tensor", "row", "block")
BLOCK_SIZE: Final = 64


def parse_format(spec: object) -> Format:
    """The format that a name or dtype stands for.

    Raises:
      ValueError: if it is none that weights are stored in.
      TypeError: if it is neither a name nor a dtype.

    Example:
      >>> parse_format("int8").name, parse_format(np.int8).name
      ('int8', 'int8')
    """
    name = spec if isinstance(spec, str) else _dtype_name(spec)
    known = _BY_NAME.get(plain_name(name))
    if known is None:
        raise ValueError(
            f"quantize: weights are not stored in {name!r}"
            f"{did_you_mean(plain_name(name), list(_BY_NAME))}; the formats are "
            f"{', '.join(map(repr, FORMATS))}. For 16 bits, cast: policy.cast_to_param(params)."
        )
    return known


def _dtype_name(spec: Any) -> str:
    try:
        return str(np.dtype(spec).name)
    except TypeError:
        raise TypeError(
            f"quantize: format takes a name ({', '.join(map(repr, FORMATS))}), or a mapping from "
            f"path patterns to names; got {spec!r} of type {type(spec).__name__!r}."
        ) from None


def check_granularity(granularity: object, block_size: object) -> None:
    """Raises unless both are what `jaxmp.quantize` takes.

    Raises:
      ValueError: if the granularity is unknown, or the size of blocks is below 2.
      TypeError: if the size of blocks is no integer.
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
