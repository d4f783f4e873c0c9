"""The kept results of benchmarks: each is shown once, and what pages quote is what was printed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

import results
from support import ROOT
from test_benchmarks import table

DOCS = ROOT / "docs"
KEPT = results.kept()
PAGES = [page for folder in results.FOLDERS for page in sorted((DOCS / folder).glob("*.md"))]

_spec = importlib.util.spec_from_file_location("result_tables", DOCS / "result_tables.py")
result_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(result_tables)


def sections(page: str) -> dict[str, str]:
    """The text below each heading of a page, by its anchor."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in parts[1::2])
    return dict(zip(slugs, parts[2::2], strict=True))


def placed(text: str) -> list[str]:
    """The runs that a text of a page of tables has a place for, by `file/name`."""
    return [f"{file}/{name}" for file, name in result_tables.PLACE.findall(text)]


def tables(name: str) -> dict[str, dict[str, list[str]]]:
    """The tables that `autocast_aot.py` printed in a run, by their titles, and by row."""
    found = re.findall(r"^\| (\w+ on \S+) .*\n((?:\|.*\n?)*)", "\n".join(KEPT[name]["printed"]), 8)
    return {title: table(rows) for title, rows in found}


def numbers(names: Iterable[str]) -> set[float]:
    """Every number that runs printed."""
    text = "\n".join(line for name in names for line in KEPT[name]["printed"])
    return {float(n) for n in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)}


def is_among(figure: str, printed: set[float]) -> bool:
    """Whether a number was printed, with as many decimals or more."""
    figure = figure.replace(",", "")
    if "e" in figure:
        return float(figure) in printed
    decimals = len(figure.partition(".")[2])
    return any(f"{number:.{decimals}f}" == figure for number in printed)


def test_every_run_is_shown_once_and_whole():
    shown = []
    for path in PAGES:
        source = path.read_text("utf-8")
        shown += placed(source)
        page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(path)))
        built = result_tables.on_page_markdown(source, page=page)
        for run in (KEPT[name] for name in placed(source)):
            assert run["command"] in built
            assert f"*{run['machine']}; {run['versions']}*" in built
            assert set(run["printed"]) <= {*built.splitlines(), ""}
        assert "[Figures]" not in built
    assert sorted(shown) == sorted(KEPT)


def test_files_are_as_they_are_written(tmp_path):
    for folder in results.FOLDERS:
        (tmp_path / folder).mkdir()
    for name, run in KEPT.items():
        results.keep(name, run, tmp_path)
    for path in map(results.file_of, KEPT):
        assert (tmp_path / path.relative_to(DOCS)).read_text("utf-8") == path.read_text("utf-8")
    results.keep("peers/new", {"command": "python x.py", "printed": []}, tmp_path)
    assert results.kept(tmp_path).keys() == {*KEPT, "peers/new"}


def test_what_differs_is_named():
    run = {"printed": ["| a | 1.00 |", "| :-- | --: |", "", "host: 3 s"], "varies": "^host: .*"}
    same = ["| a    | 1.00 |", "| :----- | ---: |", "host: 900 s"]
    assert results.no_longer_printed(run, same) == []
    changed = ["| a    | 1.01 |", *same[1:]]
    assert results.no_longer_printed(run, changed) == ["| a | 1.00 |"]
    del run["varies"]
    assert results.no_longer_printed(run, same) == ["host: 3 s"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eight_bits/when_it_pays", "eight_bits/scaling"])
def test_what_takes_seconds_prints_what_is_kept(name):
    run = KEPT[name]
    assert results.no_longer_printed(run, results.printed(run["command"])) == []


# --- what pages quote ---------------------------------------------------------------------------

ANSWERS = sections((DOCS / "benchmarks.md").read_text("utf-8"))
# Of the models, not of what they were measured at.
SIZES = {"1024", "4096", "197"}


def sources(answer: str) -> set[str]:
    """The runs whose tables or commands an answer points to."""
    found = set()
    for file, anchor in re.findall(r"\]\(benchmarks/(\w+)\.md#?([\w-]*)\)", answer):
        page = (DOCS / "benchmarks" / f"{file}.md").read_text("utf-8")
        found.update(placed(sections(page)[anchor] if anchor else page))
    code = " ".join(answer.replace("\\\n", " ").split())
    return found | {name for name, run in KEPT.items() if run["command"] in code}


@pytest.mark.parametrize("title", [title for title, text in ANSWERS.items() if sources(text)])
def test_an_answer_has_the_figures_of_its_tables(title):
    """Every number with decimals or three digits; the two tables are looked at below."""
    prose = re.sub(r"^(?: {4}|\|).*$|`[^`]*`|\]\([^)]*\)", "", ANSWERS[title], flags=re.MULTILINE)
    found = re.findall(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?!\.?\w)", prose)
    quoted = {n.rstrip(",") for n in found if "." in n or len(n) > 2} - SIZES
    printed = numbers(sources(ANSWERS[title]))
    assert sorted(n for n in quoted if not is_among(n, printed)) == []


def test_every_command_of_an_answer_is_kept():
    commands = re.findall(
        r"^ {4}((?:cd \S+ && )?python (?:.*\\\n)*.*)", "".join(ANSWERS.values()), 8
    )
    others = ("python -m pip", "python benchmarks/gpu.py", "python benchmarks/results.py")
    asked = {" ".join(c.replace("\\\n", " ").split()) for c in commands}
    asked = {c for c in asked if not c.startswith(others)}
    assert asked <= {run["command"] for run in KEPT.values()}
    assert len(asked) > 10
    assert sum(bool(sources(text)) for text in ANSWERS.values()) > 8


def test_the_peaks_are_those_of_the_language_model():
    rows = table(ANSWERS["how-much-memory-on-a-tpu-and-on-a-gpu"])
    printed = tables("training_steps/lm")
    shown = {row: cells for row, cells in rows.items() if re.match(r"\d", cells[0])}
    assert len(shown) == 6
    for row, cells in shown.items():
        peaks = [printed[f"lm on {target}"][row][2] for target in ("tpu-v5e", "gpu-h100")]
        assert cells == peaks, row


def test_the_ratios_are_those_of_the_models():
    rows = table(ANSWERS["is-it-as-good-as-written-by-hand"])
    printed = {}
    for name in (n for n in KEPT if n.startswith("training_steps/")):
        printed |= tables(name)
    models = {row.strip("`"): cells for row, cells in rows.items() if row.startswith("`")}
    assert len(models) == 10
    for model, cells in models.items():
        gpu = printed[f"{model} on gpu-h100"]["jaxmp / hand"]
        tpu = printed.get(f"{model} on tpu-v5e", {"jaxmp / hand": ["-"] * 4 + gpu[4:]})
        tpu = tpu["jaxmp / hand"]
        assert cells == [*tpu[:4], *gpu[1:3], *tpu[4:6]], model


def test_the_readme_s_ratios_are_those_of_the_language_model():
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    both = tables("training_steps/lm")
    columns = {"lm on tpu-v5e": 1, "lm on gpu-h100": 1}
    ratios = []
    for title, column in columns.items():
        rows = both[title]
        ours, by_hand = (float(rows[row][column]) for row in ("jaxmp", "hand, float32 softmax"))
        ratios.append(f"{ours / by_hand:.2f}")
    assert "{} of the temporaries on a TPU v5e and {} on an H100".format(*ratios) in readme


# Page -> run -> the figures that it quotes of it.
QUOTED = {
    "README.md": {"training_steps/lm": ["8231", "3096"]},
    "docs/how_to/memory.md": {"training_steps/lm": ["0.44"], "attention/fused": ["427", "1,859"]},
}


@pytest.mark.parametrize("page", QUOTED)
def test_what_other_pages_quote_was_printed(page):
    text = (ROOT / page).read_text("utf-8")
    for name, figures in QUOTED[page].items():
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){figure}(?![\d.])", text), f"{page} lacks {figure}"
            assert is_among(figure, numbers([name])), f"{name} did not print {figure}"
