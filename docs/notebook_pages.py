"""Runs the notebooks of `docs/notebooks/`, which are text, and makes a page and an .ipynb of each.

A notebook is a Python file in Jupytext's percent format. It is run when the site is built, from the
first cell on, and fails the build where a cell fails. What a run printed and drew is kept in
`.cache/`, or `$XDG_CACHE_HOME`, until the notebook, jaxmp or a package that it runs on changes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_STYLE = '%config InlineBackend.figure_formats = ["svg"]'


def run(text: str) -> Any:
    """Runs a notebook, given its text; returns it with what its cells printed and drew."""
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    style = nbformat.v4.new_code_cell(_STYLE)
    notebook.cells.insert(0, style)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
        client.execute(cwd=folder)
    notebook.cells.remove(style)
    for cell in notebook.cells:  # without the text of what a plot returns
        outputs = cell.get("outputs", [])
        if any(o.output_type == "display_data" for o in outputs):
            cell.outputs = [o for o in outputs if o.get("data", {}).keys() != {"text/plain"}]
    return notebook


def ran(text: str, cache: Path) -> Any:
    """The same, from the cache if nothing has changed since."""
    packages = [importlib.metadata.version(name) for name in ("jax", "flax", "optax", "matplotlib")]
    sources = [path.read_text("utf-8") for path in sorted((_ROOT / "jaxmp").rglob("*.py"))]
    key = hashlib.sha256(json.dumps([text, _STYLE, packages, sources]).encode()).hexdigest()
    kept = cache / f"{key}.ipynb"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        kept.write_text(nbformat.writes(run(text)), encoding="utf-8")
    return nbformat.reads(kept.read_text("utf-8"), as_version=4)


def links(name: str) -> str:
    """The line below a page's title: the notebook to download, and to open in Colab."""
    address = runpy.run_path(str(_ROOT / ".ci" / "address.py"))["address"]()
    colab = ""
    if address.startswith("https://github.com/"):
        there = address.replace("https://github.com/", "https://colab.research.google.com/github/")
        colab = f" · [Open in Colab]({there}/blob/site/notebooks/{name}.ipynb)"
    return f"[Download this notebook]({name}.ipynb){{ download }}{colab}"


def page(notebook: Any, name: str) -> tuple[str, dict[str, bytes | str]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], dict[str, bytes | str]()
    for cell in notebook.cells:
        is_code = cell.cell_type == "code"
        parts.append(f"```python\n{cell.source}\n```" if is_code else cell.source)
        printed = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            kind = next(k for k in ("image/svg+xml", "image/png", "text/plain") if k in data)
            if kind == "text/plain":
                printed += data[kind]
                continue
            file = f"{name}_{len(pictures)}.{kind[6:9]}"
            pictures[file] = base64.b64decode(data[kind]) if kind == "image/png" else data[kind]
            parts.append(f"![What the cell above draws]({file})")
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    parts.insert(1, links(name))
    return "\n\n".join(parts), pictures


def on_files(files: Files, *, config: Any) -> Files:
    """Adds each notebook's page, its pictures and its .ipynb to the site."""
    for path in sorted(Path(config.docs_dir, "notebooks").glob("*.py")):
        cache = Path(os.environ.get("XDG_CACHE_HOME", _ROOT / ".cache")) / "notebooks"
        notebook = ran(path.read_text("utf-8"), cache)
        text, made = page(notebook, path.stem)
        made |= {f"{path.stem}.md": text, f"{path.stem}.ipynb": nbformat.writes(notebook)}
        for name, content in made.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files
