"""Puts what benchmarks printed into the site's pages of tables, while MkDocs builds them.

A line `[Figures](training_steps.json#lm)` becomes the command, the machine and the versions of that
run, and the tables that it printed. `benchmarks/results.py` writes the files.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

PLACE = re.compile(r"^\[Figures\]\((\w+)\.json#(\w+)\)$", re.MULTILINE)


def rendered(run: dict[str, Any]) -> str:
    """A run as Markdown: its tables as they are, its other lines as output."""
    parts = [f"```sh\n{run['command']}\n```", f"*{run['machine']}; {run['versions']}*"]
    for is_table, lines in itertools.groupby(run["printed"], lambda line: line.startswith("|")):
        text = "\n".join(lines).strip("\n")
        if text:
            parts.append(text if is_table else f"```text\n{text}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Replaces each of a page's places by its run."""
    folder = Path(page.file.abs_src_path or "").parent  # of a generated page, none

    def run(place: re.Match[str]) -> str:
        runs = json.loads((folder / f"{place[1]}.json").read_text(encoding="utf-8"))
        return rendered(runs[place[2]])

    return PLACE.sub(run, markdown)
