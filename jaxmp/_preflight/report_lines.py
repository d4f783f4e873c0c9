"""Parts of reports: aligned tables, what crosses between devices, and products in 8 bits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmp._preflight.hlo import Multiplied, Program
from jaxmp._preflight.hlo_collectives import Collective

# More lines of 8-bit products than these are not printed.
MOST = 20
_NUMBER = re.compile(r"_\d+\b")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]


def rows_of_collectives(moved: Sequence[Collective]) -> dict[str, str]:
    """A label and a cell for each kind, dtype and axes of collectives.

    Example:
      >>> rows_of_collectives([Collective("all-gather", "bfloat16", "data", 4_000_000, 20)])
      {'all-gather bfloat16 data': '20 x, 80.0 MB'}
    """
    unknown = Counter(one[:3] for one in moved if not one.known)
    cells = {}
    for row in collectives_as_data(moved):
        of = row["kind"], row["dtype"], row["axes"]
        cell = f"{row['count']} x, {_size(row['bytes'])}"
        cells[" ".join(filter(None, of))] = cell + (f" ({unknown[of]} ?)" if unknown[of] else "")
    return cells


def collectives_as_data(moved: Sequence[Collective]) -> list[dict[str, Any]]:
    """The same as plain data; ``known`` is false where a count is of one trip of a loop."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in moved:
        new = {"kind": one.kind, "dtype": one.dtype, "axes": one.axes}
        row = rows.setdefault(one[:3], new | {"count": 0, "bytes": 0, "known": True})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["known"] &= one.known
    return list(rows.values())


def remark_on_collectives(moved: Sequence[Collective]) -> str:
    """What to say of collectives of which it is not known how often they run; empty if of none."""
    unknown = sum(not one.known for one in moved)
    if not unknown:
        return ""
    return (
        f"{unknown} of the collectives (?) count once, and run as often as it turns out: in a loop "
        "whose trips the compiled program does not tell, or in a branch."
    )


def share_of_8_bits(program: Program) -> str:
    """How many products are in 8 bits, of how many: ``48 of 66``."""
    return f"{len(program.products_in_8_bits)} of {len(program.products)}"


def lines_of_8_bits(program: Program) -> Iterator[str]:
    """A line for each kind of 8-bit product: how many, by what, of what, where; then what is left.

    Layers that differ in a number alone are one kind.
    """
    kinds = Counter(map(_kind, program.products_in_8_bits))
    for kind, count in kinds.most_common(MOST):
        yield f"  {count} x {kind}"
    if len(kinds) > MOST:
        yield f"  and {len(kinds) - MOST} kinds more"
    left = Counter(p.dtype or "of an unknown dtype" for p in program.products if not p.in_8_bits)
    if left:
        yield f"  not in 8 bits: {', '.join(f'{count} {dtype}' for dtype, count in left.items())}"


def _size(size: int) -> str:
    """Megabytes, so that cells compare; of what is too small for them, less."""
    if size >= 50_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1000 else f"{size} B"


def _kind(product: Multiplied) -> str:
    place = str(product.place._replace(path=_NUMBER.sub("_*", product.place.path)))
    return f"{product.op} {' x '.join(product.operands)} -> {product.result}: {place}"
