"""The notebooks: short, in the navigation, and with a picture each. The site's build runs them."""

from __future__ import annotations

import ast
import re

import pytest

from support import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
GALLERY = (ROOT / "docs" / "gallery.md").read_text("utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_found(path):
    text = path.read_text("utf-8")
    ast.parse(text)
    code = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 60
    assert text.startswith("# %% [markdown]\n# # ")
    assert f"notebooks/{path.stem}.md" in CONFIG
    assert f"](notebooks/{path.stem}.md)" in GALLERY
    pictures = set(re.findall(rf"notebooks/{path.stem}_(\d)\.", GALLERY))
    assert len(pictures) == 1


def test_there_are_nine():
    assert len(NOTEBOOKS) == 9
