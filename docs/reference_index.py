"""Puts the first paragraph of each docstring into the reference's index, while MkDocs builds it.

After a line ``* [`jaxmp.wrap`](wrap.md)`` goes what `wrap` says of itself. Sources are read and not
imported: the site is built without JAX.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_ENTRY = re.compile(r"^(\* \[`(jaxmp\.\w+)`\]\(\w+\.md\))$", re.MULTILINE)


def _file(module: str) -> Path | None:
    path = _ROOT / module.replace(".", "/")
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return found[0] if found else None


def docstring(name: str) -> str | None:
    """The docstring of what `name` is where it is defined; None for what has none, a union."""
    module, _, last = name.rpartition(".")
    body = ast.parse(_file(module).read_text(encoding="utf-8")).body
    for node in (n for top in body for n in (top.body if isinstance(top, ast.If) else [top])):
        match node:  # some names are imported `if TYPE_CHECKING` alone
            case ast.ClassDef() | ast.FunctionDef() if node.name == last:
                if text := ast.get_docstring(node):  # an overload has none
                    return text
            case ast.ImportFrom() if last in {alias.name for alias in node.names}:
                if node.module != "jaxmp":  # from which come modules
                    return docstring(f"{node.module}.{last}")
    file = _file(name)
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file else None


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Completes the entries of the index."""

    def complete(entry: re.Match[str]) -> str:
        text = docstring(entry[2])
        return f"{entry[1]}: {' '.join(text.split(chr(10) * 2)[0].split())}" if text else entry[1]

    return _ENTRY.sub(complete, markdown) if page.file.src_uri == "reference/index.md" else markdown
