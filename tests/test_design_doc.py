"""docs/design.md says what is in the tree: what it quotes, and every file by its room."""

from __future__ import annotations

import re
import tomllib

import pytest

from support import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "jaxmp"
_BLOCK = re.compile(r"```(?:python|toml)\n(.*?)\n```", re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
# Some in the open, which users see, and what is no code of the core.
OUTSIDE = {"__init__.py", "__main__.py"}


def quotations() -> list[tuple[str, str]]:
    """Each quoted block, and the file that is named last before it."""
    found = []
    for block in _BLOCK.finditer(DESIGN):
        files = [s for s in _SPAN.findall(DESIGN[: block.start()]) if re.search(r"/.*\.\w+$", s)]
        found.append((files[-1], block[1]))
    return found


def rooms() -> list[str]:
    """The files and folders in the first column of the table, as paths inside the package."""
    cells = [line.split("|")[1] for line in DESIGN.splitlines() if line.startswith("| `_")]
    found = []
    for cell in cells:
        folder = ""
        for name in _SPAN.findall(cell):  # a file without a folder is in that of the one before
            folder = name.rpartition("/")[0] if "/" in name else folder
            found.append(name if "/" in name or not folder else f"{folder}/{name}")
    return found


def test_it_quotes_an_example_of_each_thing_to_add() -> None:
    assert [file for file, _ in quotations()] == [
        "_jaxprs/primitive_table.py",
        "_jaxprs/higher_order.py",
        "_chips/chips.toml",
        "_autocast/passes.py",
    ]


@pytest.mark.parametrize(("file", "text"), quotations(), ids=[file for file, _ in quotations()])
def test_what_it_quotes_is_in_the_file(file: str, text: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert f"\n{text}\n" in source, f"docs/design.md quotes {file} as it was"


def test_the_entry_that_it_quotes_is_in_the_file() -> None:
    [entry] = [span for span in _SPAN.findall(DESIGN) if span.startswith('"')]
    source = (PACKAGE / "_jaxprs" / "higher_order.py").read_text(encoding="utf-8")
    assert f"    {entry},\n" in source


def test_the_chip_that_it_quotes_is_one() -> None:
    [text] = [text for file, text in quotations() if file.endswith(".toml")]
    [(name, chip)] = tomllib.loads(text).items()
    assert chip["tflops"]
    assert DESIGN.count(name) == 2  # and as a target


def test_every_room_is_there() -> None:
    missing = [room for room in rooms() if not (PACKAGE / room).exists()]
    assert not missing
    assert len(rooms()) == len(set(rooms()))


def test_every_file_of_the_core_has_a_room() -> None:
    folders = {room.split("/")[0] for room in rooms() if "/" in room}
    assert {"_jaxprs", "_autocast", "_modules", "_training", "_audit", "_preflight"} <= folders
    files = {
        str(path.relative_to(PACKAGE))
        for folder in folders
        for path in (PACKAGE / folder).rglob("*.py")
        if path.name not in OUTSIDE
    }
    whole = tuple(room for room in rooms() if room.endswith("/"))
    assert {file for file in files if not file.startswith(whole)} == {
        room for room in rooms() if room.endswith(".py") and "/" in room
    }


def test_every_test_that_it_names_is_there() -> None:
    named = [span for span in _SPAN.findall(DESIGN) if span.startswith("tests/")]
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_it_fits_on_a_page() -> None:
    assert len(DESIGN.splitlines()) <= 130
