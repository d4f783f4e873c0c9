"""All numeric programs, and a table of their errors.

    PYTHONPATH=.:tests python -m numeric_programs bfloat16 [a part of a name or a family ...]

prints loss error / gradient error of each against float64: of autocast's version, of the one
written by hand, and of the floor. See `numeric_kit.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable

import numeric_distances  # noqa: F401
import numeric_geometry  # noqa: F401
import numeric_learning  # noqa: F401
import numeric_networks  # noqa: F401
import numeric_planning  # noqa: F401
import numeric_ranges  # noqa: F401
import numeric_recurrences  # noqa: F401
import numeric_statistics  # noqa: F401
import numeric_streams  # noqa: F401
import numeric_time  # noqa: F401
import numeric_weather  # noqa: F401
from numeric_kit import PROGRAMS, VARIANTS, complaints, error


def table(names: Iterable[str] = PROGRAMS, dtype: str = "bfloat16") -> list[tuple[str, ...]]:
    """Name, errors by variant, and "WORSE" where autocast's are not what they may be."""
    return [
        (name, *(str(error(name, v, dtype)) for v in VARIANTS), complaints(name, dtype) and "WORSE")
        for name in names
    ]


def _matching(words: list[str]) -> list[str]:
    return [
        name
        for name, p in PROGRAMS.items()
        if not words or any(word in name or word in p.family for word in words)
    ]


if __name__ == "__main__":
    _, dtype, *words = [*sys.argv, "bfloat16"][: max(2, len(sys.argv))]
    rows = (row for name in _matching(words) for row in table([name], dtype))
    for name, *cells in itertools.chain([(f"loss / gradient error, {dtype}", *VARIANTS)], rows):
        sys.stdout.write(f"{name:48} {' '.join(f'{cell:20}' for cell in cells)}\n")
        sys.stdout.flush()
