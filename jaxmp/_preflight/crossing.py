"""What crosses between the devices of a compiled program, in words and as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jaxmp._preflight.hlo_collectives import Collective


def rows_of_collectives(moved: Sequence[Collective]) -> dict[str, str]:
    """A label and a cell for each kind, dtype and axes of collectives.

    Example:
      >>> rows_of_collectives([Collective("all-gather", "bfloat16", "data", 4_000_000, 20)])
      {'all-gather bfloat16 data': '20 x, 80.0 MB'}
    """
    cells = {}
    for (kind, dtype, axes), group in _grouped(moved).items():
        count, size = sum(one.times for one in group), _bytes(group)
        unknown = sum(not one.known for one in group)
        cell = f"{count} x, {_size(size)}" + (f" ({unknown} ?)" if unknown else "")
        cells[" ".join(filter(None, (kind, dtype, axes)))] = cell
    return cells


def collectives_as_data(moved: Sequence[Collective]) -> list[dict[str, Any]]:
    """The same as plain data; ``known`` is false where a count is of one trip of a loop."""
    return [
        {
            "kind": kind,
            "dtype": dtype,
            "axes": axes,
            "count": sum(one.times for one in group),
            "bytes": _bytes(group),
            "known": all(one.known for one in group),
        }
        for (kind, dtype, axes), group in _grouped(moved).items()
    ]


def remark_on_collectives(moved: Sequence[Collective]) -> str:
    """What to say of collectives of which it is not known how often they run; empty if of none."""
    unknown = sum(not one.known for one in moved)
    if not unknown:
        return ""
    return (
        f"{unknown} of the collectives (?) count once, and run as often as it turns out: in a loop "
        "whose trips the compiled program does not tell, or in a branch."
    )


def _grouped(moved: Sequence[Collective]) -> dict[tuple[str, str, str], list[Collective]]:
    groups = defaultdict(list)
    for one in moved:
        groups[one.kind, one.dtype, one.axes].append(one)
    return dict(groups)


def _size(size: int) -> str:
    """Megabytes, so that cells compare; of what is too small for them, less."""
    if size >= 50_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1000 else f"{size} B"


def _bytes(group: Sequence[Collective]) -> int:
    return sum(one.times * one.bytes for one in group)
