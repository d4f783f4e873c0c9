"""docs/design.md says what is in the tree: what it quotes, each room, and how to add to it."""

from __future__ import annotations

import re
import tomllib

import numpy as np
from accuracy import eps

from jaxmp._core.jaxprs.higher_order import HIGHER_ORDER
from jaxmp.devices import chips

from doc_blocks import Block, blocks, run
from support import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "jaxmp"
_SPAN = re.compile(r"`([^`\n]+)`")
BLOCKS = [block for block in blocks(DESIGN) if block.language != "text"]


def file_of(block: Block) -> str | None:
    """The file that a block is quoted from; None for a program."""
    found = re.fullmatch(r'title="(.+)"', block.title)
    return found and found[1]


def rows() -> list[str]:
    """The first cells of the tables."""
    return [line.split("|")[1] for line in DESIGN.splitlines() if line.startswith("| `")]


def names(suffix: str) -> list[str]:
    """What the first cells name: files of `_core/`, or folders of the package."""
    found = [name for row in rows() for name in _SPAN.findall(row)]
    return [name for name in found if name.endswith(suffix)]


def test_it_has_an_example_of_each_thing_to_add_as_it_is_in_the_file() -> None:
    sections = re.findall(r"^## To add (.+)$", DESIGN, re.MULTILINE)
    assert len(sections) == len(BLOCKS) == 5
    assert [file_of(block) for block in BLOCKS] == [
        "jaxmp/_core/jaxprs/primitive_table.py",
        "jaxmp/_core/jaxprs/higher_order.py",
        None,
        "jaxmp/_core/chips/chips.toml",
        None,
    ]
    for block in BLOCKS:
        if file := file_of(block):
            source = (ROOT / file).read_text(encoding="utf-8")
            assert f"\n{block.text}" in source, f"docs/design.md quotes {file} as it was"
    [entry] = [span for span in _SPAN.findall(DESIGN) if span.startswith('"')]
    source = (PACKAGE / "_core" / "jaxprs" / "higher_order.py").read_text(encoding="utf-8")
    assert f"    {entry},\n" in source
    assert entry.split('"')[1] in HIGHER_ORDER
    [(name, chip)] = tomllib.loads(BLOCKS[3].text).items()
    assert chips()[name].items() >= chip.items()
    assert DESIGN.count(name) == 2, "and as a target"
    assert len(DESIGN.splitlines()) <= 130, "it fits on a page"


def test_its_pass_and_its_recipe_run() -> None:
    scope = {"__name__": "page"}
    for block in BLOCKS:
        if file_of(block) is None:
            run(block.text, scope)
    tanh = [s for s in scope["plan"].steps if s.eqn.primitive.name == "tanh"]
    assert [type(step.op) for step in tanh] == [scope["RationalTanh"]]
    x, out = np.asarray(scope["x"], np.float64), np.asarray(scope["out"], np.float64)
    # The formula, and not tanh: they are up to 0.024 apart. Three roundings to 16 bits.
    rounding = 3 * eps("bfloat16")
    np.testing.assert_allclose(out, x * (27 + x**2) / (27 + 9 * x**2), rtol=rounding)
    assert np.abs(out - np.tanh(x)).max() > 0.02
    assert [p.dtype for p in scope["products"].products] == ["float8_e4m3fn", "bfloat16"]


def test_every_folder_of_the_package_has_a_room() -> None:
    inits = [x for at in ("*", "_core/*", "_tools/*") for x in PACKAGE.glob(f"{at}/__init__.py")]
    folders = [path.parent.name + "/" for path in inits]
    assert sorted(names("/")) == sorted(folders)


def test_every_file_that_it_names_is_there() -> None:
    files = names(".py")
    assert len(files) > 15
    assert len(files) == len(set(files))
    missing = [name for name in files if not (PACKAGE / "_core" / name).exists()]
    assert not missing
    elsewhere = [s for s in _SPAN.findall(DESIGN) if re.fullmatch(r"_\w+/[\w/]+\.\w+", s)]
    assert all((PACKAGE / name).exists() for name in elsewhere)
    tests = [span for span in _SPAN.findall(DESIGN) if span.startswith("tests/")]
    assert tests
    assert all((ROOT / name).exists() for name in tests)


def test_every_class_of_its_picture_is_there() -> None:
    [picture, *_] = [block.text for block in blocks(DESIGN) if block.language == "text"]
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    drawn = set(re.findall(r"\b([A-Z]\w+)", picture)) - {"Decisions"}
    assert len(drawn) > 8
    assert {"Traced", "Facts", "Decision", "Plan", "Step", "OperandCast", "Op", "Why"} <= drawn
    missing = [name for name in drawn if not re.search(rf"^class {name}\b", source, re.MULTILINE)]
    assert not missing
