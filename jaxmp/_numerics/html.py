"""A table as one HTML page that needs nothing else: rows to sort and to filter, bars in cells."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
      text: what it shows.
      value: what it is sorted by, if not by its text.
      bar: where a bar starts and ends, as shares of the cell's width.
    """

    text: str
    value: float | None = None
    bar: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
      cells: one for each column.
      mark: "", "first" or "differs": how it is set off.
    """

    cells: Sequence[Cell]
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      heading: what stands over it.
      help: what it means, shown when the heading is pointed at.
    """

    heading: str
    help: str = ""


def page(
    title: str,
    summary: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
    notes: Iterable[tuple[str, Iterable[str]]] = (),
) -> str:
    """The page.

    Args:
      title: its heading.
      summary: text above the table, shown as it is.
      columns: the table's.
      rows: the table's.
      notes: lists below the table, each with a heading.
    """
    heads = "".join(
        f'<th title="{html.escape(column.help)}"><button type="button">'
        f"{html.escape(column.heading)}</button></th>"
        for column in columns
    )
    below = "".join(
        f"<h2>{html.escape(heading)}</h2>\n<ul>"
        + "".join(f"<li>{html.escape(line)}</li>\n" for line in lines)
        + "</ul>\n"
        for heading, lines in notes
    )
    body = "\n".join(map(_row, rows))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<pre>{html.escape(summary)}</pre>\n"
        '<p><label>Rows that contain <input id="filter" type="search"></label> '
        '<output id="count"></output> Click a heading to sort.</p>\n'
        f'<div class="table"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        f"</table></div>\n{below}<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _row(row: Row) -> str:
    mark = f' class="{html.escape(row.mark)}"' if row.mark else ""
    return f"<tr{mark}>{''.join(map(_cell, row.cells))}</tr>"


def _cell(cell: Cell) -> str:
    attributes = ""
    if cell.value is not None:
        # What is no number comes last.
        value = -math.inf if math.isnan(cell.value) else cell.value
        attributes = f' data-value="{str(value).replace("inf", "Infinity")}"'
    bar = ""
    if cell.bar is not None:
        start, end = (100 * min(max(x, 0.0), 1.0) for x in cell.bar)
        # A bar is seen, however short.
        bar = f'<i style="left:{start:.1f}%;width:max({max(end - start, 0):.1f}%,2px)"></i>'
        bar = f'<span class="bar">{bar}</span>'
    return f"<td{attributes}>{html.escape(cell.text)}{bar}</td>"


_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; color: #1c1917; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1.05rem; }
pre { background: #f5f5f4; padding: .8rem 1rem; white-space: pre-wrap; }
.table { max-height: 85vh; overflow: auto; border: 1px solid #d6d3d1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: #f5f5f4; z-index: 1; }
th button { font: inherit; font-weight: 600; border: 0; background: none; padding: .4rem .6rem;
  cursor: pointer; white-space: nowrap; width: 100%; text-align: left; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
td { padding: .2rem .6rem; border-top: 1px solid #e7e5e4; white-space: nowrap; }
td[data-value] { text-align: right; }
tr.differs td { background: #fef3c7; }
tr.first td { background: #fecaca; font-weight: 600; }
.bar { display: block; position: relative; height: 5px; min-width: 90px; background: #e7e5e4; }
.bar i { position: absolute; top: 0; bottom: 0; background: #1d4ed8; }
"""

_SCRIPT = """
"use strict";
const body = document.querySelector("tbody");
const heads = [...document.querySelectorAll("th")];
const rows = [...body.rows];
const key = (row, i) => {
  const cell = row.cells[i];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
};
const order = (a, b) => typeof a === "number" && typeof b === "number"
  ? (a < b ? -1 : a > b ? 1 : 0)
  : String(a).localeCompare(String(b), undefined, {numeric: true});
heads.forEach((head, i) => head.addEventListener("click", () => {
  const numbers = rows.length > 0 && typeof key(rows[0], i) === "number";
  const before = head.getAttribute("aria-sort");
  const descending = before ? before === "ascending" : numbers && i > 0;
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const blank = row => key(row, i) === -Infinity;
  rows.sort((a, b) => blank(a) - blank(b)
    || (descending ? -1 : 1) * order(key(a, i), key(b, i)));
  body.append(...rows);
}));
const filter = document.getElementById("filter");
const count = document.getElementById("count");
const show = () => {
  const wanted = filter.value.toLowerCase();
  let shown = 0;
  for (const row of rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows.length}.`;
};
filter.addEventListener("input", show);
show();
"""
