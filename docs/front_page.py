"""Draws the picture of the front page, of what `benchmarks/` printed, while MkDocs builds."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from mkdocs.structure.files import File, Files

# The rows of the table of docs/benchmarks/training_steps.md, by what they are called here.
ROWS = {
    "float32": "float32",
    "hand, float32 softmax": "bfloat16, by hand",
    "jaxmp": "mixed_bfloat16",
    "jaxmp, fused": "… attention=fused",
    "jaxmp, recompute": "… residuals=recompute",
}


def peaks(printed: list[str]) -> dict[str, float]:
    """The peak memory of each row of the first table, in GiB."""
    first = itertools.takewhile(lambda line: line.startswith("|"), printed)
    header, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in first)
    column = header.index("peak MiB")
    table = {row[0]: row[column] for row in rows}
    return {called: float(table[name]) / 1024 for name, called in ROWS.items()}


def picture(docs: Path) -> str:
    """The peak memory of a training step by policy, as an SVG."""
    runs = json.loads((docs / "benchmarks" / "training_steps.json").read_text("utf-8"))
    found = peaks(runs["lm"]["printed"])
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    colors = ["#94a3b8", "#94a3b8", "#0f766e", "#14b8a6", "#14b8a6"]
    bars = axes.barh(list(found), list(found.values()), color=colors)
    axes.bar_label(bars, fmt="{:.2f} GiB", padding=3)
    axes.invert_yaxis()
    axes.set_xlim(right=max(found.values()) * 1.15)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_title("Peak memory of a language model's training step on a TPU v5e", fontsize=11)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the picture to the site."""
    drawn = picture(Path(config.docs_dir))
    files.append(File.generated(config, "images/memory.svg", content=drawn))
    return files
