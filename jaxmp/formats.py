"""Number formats: their names in policies, recipes and stored weights, and their limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

__all__ = ["ALL_FORMATS", "Format"]


class Format(NamedTuple):
    """A number format.

    Attributes:
      name: JAX's name of the dtype.
      short: the name that policies and recipes print.
      aliases: other names that are understood.

    Example:
      >>> e4m3 = ALL_FORMATS["e4m3"]
      >>> e4m3.bits, e4m3.fraction_bits, e4m3.largest, e4m3.step
      (8, 3, 448.0, 0.001953125)
    """

    name: str
    short: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, the one that is printed first, JAX's last."""
        return (self.short, *self.aliases, self.name)

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return jnp.dtype(self.name)

    @property
    def integer(self) -> bool:
        """Whether its values are evenly spaced."""
        return self.name.startswith("int")

    @property
    def scaled(self) -> bool:
        """Whether values are divided by a scale to fit, and quantized."""
        return self.bits <= 8

    @property
    def bits(self) -> int:
        """Its size."""
        return int(self._info.bits)

    @property
    def largest(self) -> float:
        """The largest magnitude that is used; symmetric, so integers leave out -128 and -8."""
        return float(self._info.max)

    @property
    def fraction_bits(self) -> int:
        """The number of bits of the fraction that are stored; 0 for integers."""
        return 0 if self.integer else int(self._info.nmant)

    @property
    def step(self) -> float:
        """The distance between the smallest numbers."""
        return 1.0 if self.integer else float(self._info.smallest_subnormal)

    @property
    def _info(self) -> Any:
        return jnp.iinfo(self.dtype) if self.integer else jnp.finfo(self.dtype)


# By the names that are printed. OFP8: Micikevicius et al., "FP8 Formats for Deep Learning" (2022);
# e2m1: OCP Microscaling Formats (MX) Specification 1.0 (2023). The fnuz formats, which have no
# infinity and no negative zero: Noune et al., "8-bit Numerical Formats for Deep Neural Networks"
# (2022); e4m3b11 is that with an exponent bias of 11. jmp calls float32 "full".
ALL_FORMATS: Final = {
    f.short: f
    for f in (
        Format("bfloat16", "bf16"),
        Format("float16", "f16", ("fp16",)),
        Format("float32", "f32", ("full", "fp32")),
        Format("float64", "f64", ("fp64",)),
        Format("float8_e4m3fn", "e4m3", ("e4m3fn", "float8_e4m3", "float8", "fp8", "f8")),
        Format("float8_e5m2", "e5m2"),
        Format("float8_e4m3b11fnuz", "e4m3b11", ("e4m3b11fnuz",)),
        Format("float8_e4m3fnuz", "e4m3fnuz"),
        Format("float8_e5m2fnuz", "e5m2fnuz"),
        Format("float4_e2m1fn", "e2m1"),
        Format("int8", "int8", ("i8",)),
        Format("int4", "int4", ("i4",)),
    )
}


def format_of(dtype: Any) -> Format:
    """Returns the format of a dtype of `ALL_FORMATS`."""
    return next(fmt for fmt in ALL_FORMATS.values() if fmt.name == np.dtype(dtype).name)


def bits_in_words(bits: Iterable[int]) -> str:
    """Returns numbers of bits in words, most first; 8, the usual few, if none is given.

    Example:
      >>> bits_in_words([4]), bits_in_words([4, 8, 8]), bits_in_words([])
      ('4 bits', '8 or 4 bits', '8 bits')
    """
    each = sorted({*bits}, reverse=True) or [8]
    return f"{' or '.join(map(str, each))} bits"
