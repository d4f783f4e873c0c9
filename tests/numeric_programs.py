"""All numeric programs, and a table of their errors.

    PYTHONPATH=.:tests python -m numeric_programs bfloat16 [a part of a name or a family ...]

prints loss error / gradient error of each against float64: of autocast's version, of the one
written by hand, and of the floor. See `numeric_kit.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numeric_learning
import numeric_time  # noqa: F401
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
    print(f"{'loss / gradient error, ' + dtype:48}", *(f"{v:20}" for v in VARIANTS))
    for name in _matching(words):
        for row in table([name], dtype):
            print(f"{row[0]:48}", *(f"{cell:20}" for cell in row[1:]), flush=True)
