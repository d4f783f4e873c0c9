"""A report of every matmul and convolution: in 8 bits, or why not."""

from __future__ import annotations

import dataclasses
from collections import Counter

from jaxmp._screen import Printed, table


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A matmul or convolution of a program.

    Attributes:
      path: the module path and named scopes around it.
      source: ``file.py:line`` in the user's code.
      dtype: the dtype it multiplies, or two, as in ``float8_e4m3fn*float8_e5m2``.
      count: how often it runs per call.
      backward: whether it belongs to a backward pass.
      why_not: why the recipe does not multiply it; empty if it does, or none was asked to.
      intended: whether that is intended: it is not a layer, or the last one.
    """

    path: str
    source: str
    dtype: str
    count: float
    backward: bool = False
    why_not: str = ""
    intended: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it multiplies 8-bit operands."""
        return all("int8" in dtype or "float8" in dtype for dtype in self.dtype.split("*"))


@dataclasses.dataclass(frozen=True, slots=True)
class Quantized(Printed):
    """Every matmul and convolution of a program: quantized, or not and why. Print it.

    Attributes:
      products: one per contraction, in the program's order.
    """

    products: tuple[Product, ...]

    def counts(self) -> dict[str, tuple[float, float]]:
        """Counts, by pass ("forward", "backward"), the products in 8 bits, and all of them."""
        table = {}
        for name, backward in (("forward", False), ("backward", True)):
            mine = [p for p in self.products if p.backward == backward]
            if mine:
                table[name] = (
                    sum(p.count for p in mine if p.quantized),
                    sum(p.count for p in mine),
                )
        return table

    def reasons(self) -> dict[str, float]:
        """Counts the products that are not in 8 bits by the reason, most first."""
        why: Counter[str] = Counter()
        for p in self.products:
            if not p.quantized:
                why[p.why_not or f"multiplies {p.dtype}"] += p.count  # type: ignore[assignment]
        return dict(why.most_common())

    def summary(self) -> str:
        """Returns a few lines: how many products are in 8 bits, and why the others are not."""
        shares = [f"{n:g} of {total:g} {name}" for name, (n, total) in self.counts().items()]
        lines = [f"products in 8 bits  {', '.join(shares) or 'none'}"]
        return "\n".join(lines + [f"  {n:g} not: {why}" for why, n in self.reasons().items()])

    def __str__(self) -> str:
        cells = [("dtype", "times", "pass", "source", "path", "why not 8 bits")]
        for p in self.products:
            way, why = "backward" if p.backward else "forward", "" if p.quantized else p.why_not
            cells.append((p.dtype, f"{p.count:g}", way, p.source, p.path, why))
        return "\n".join([*table(cells), "", self.summary()])
