"""The rows of `autocast_aot.py`, and how they are printed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Row:
    """One measured variant of a model; `autocast_aot.py` describes its fields, the columns."""

    model: str
    variant: str
    target: str
    gb_accessed: float | None
    temp_mib: float | None
    peak_mib: float | None
    mcycles: float | None
    saved_mib: float
    low: float
    forward: dict[str, int]
    backward: dict[str, int]
    gradient_error: float | None
    loss_error: float | None
    seconds: float


COLUMNS = ("gb_accessed", "temp_mib", "peak_mib", "mcycles", "saved_mib", "gradient_error")


def ratios(row: Row, hand: Row) -> dict[str, float]:
    """A row over its twin, for every column that both have."""
    values = {name: (getattr(row, name), getattr(hand, name)) for name in COLUMNS}
    return {name: x / y for name, (x, y) in values.items() if x is not None and y}


def show(rows: list[Row], compared: list[tuple[Row, Row]]) -> None:
    """Prints one model's rows, and the ratios of those that are compared, in Markdown."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}" if value < 1 else f"{value:.2f}"

    def counts(by_dtype: dict[str, int]) -> str:
        return " + ".join(f"{n} {dtype}" for dtype, n in sorted(by_dtype.items()))

    heads = ("GB", "temp MiB", "peak MiB", "Mcycles", "saved MiB", "grad err", "loss err")
    table = [(f"{rows[0].model} on {rows[0].target}", *heads, "low", "forward", "backward")]
    for row in rows:
        numbers = [number(getattr(row, name)) for name in COLUMNS[:-1]]
        errors = [f"{e:.2e}" if e else "-" for e in (row.gradient_error, row.loss_error)]
        audit = (f"{row.low:.1%}", counts(row.forward), counts(row.backward))
        table.append((row.variant, *numbers, *errors, *audit))
    for row, hand in compared:
        found = ratios(row, hand)
        cells = [f"{found[name]:.3f}" if name in found else "-" for name in COLUMNS]
        table.append((f"{row.variant} / {hand.variant}", *cells, "", "", "", ""))

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    alignments = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
    print()
    for cells in (table[0], alignments, *table[1:]):
        print("| " + " | ".join(c.rjust(w) if i else c.ljust(w)
                                for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
              + " |")  # fmt: skip
