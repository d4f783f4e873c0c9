"""The report on the collectives of a program: rows of a table, data for JSON, and a remark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxmp._preflight.hlo_collectives import Collective


def sent_bytes(moved: Sequence[Collective], devices: int) -> int:
    """Returns the bytes that a device sends in the collectives of a program, as rings.

    An all-reduce is a reduce-scatter and an all-gather; a reduce-scatter, of whose results a device
    has one part, is assumed to be over all devices.

    Example:
      >>> sent_bytes([Collective("reduce-scatter", "float32", "data", 100, 2)], 8)
      1400
    """
    parts = {"all-reduce": 2, "reduce-scatter": devices - 1}
    return sum(one.bytes * one.times * parts.get(one.kind, 1) for one in moved)


def rows_of_collectives(moved: Sequence[Collective]) -> dict[str, str]:
    """Returns a label and a cell for each kind, dtype and axes of collectives.

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
    """Returns the same rows as plain data; ``known`` is false if a number of runs is unknown."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in moved:
        new = {"kind": one.kind, "dtype": one.dtype, "axes": one.axes}
        row = rows.setdefault(one[:3], new | {"count": 0, "bytes": 0, "known": True})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["known"] &= one.known
    return list(rows.values())


def remark_on_collectives(moved: Sequence[Collective]) -> str:
    """Returns a remark on collectives whose number of runs is unknown; empty if there are none."""
    unknown = sum(not one.known for one in moved)
    if not unknown:
        return ""
    return (
        f"{unknown} of the collectives (?) are counted once, but are in a branch, or in a loop "
        "whose number of iterations the compiled program does not contain."
    )


def _size(size: int) -> str:
    """Formats bytes in megabytes, so that cells are comparable; small numbers in kB or B."""
    if size >= 50_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1000 else f"{size} B"
