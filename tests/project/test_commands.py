"""Every command of the README and of docs/, as the page has it: its options are there, it runs.

So are those of what benchmarks and recipes printed, in `docs/benchmarks/*.json` for example.

What a page shows of commands is printed by them: test_docs.py and test_readme.py see to that.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxmp import cli

from results import file_of, folder_and_words, kept
from support import ROOT, run_python

# By the program: what makes it cheap enough to run here. All else is as the page has it.
RUN = {
    "benchmarks/cpu_sums.py": "",
    "benchmarks/scaling.py": "",
    "benchmarks/when_it_pays.py": "",
    "examples/train_digits_nnx.py": "--steps 3",
    "examples/train_fsdp.py": "--size tiny --steps 2",
    "examples/train_lm.py": "--size tiny --steps 2",
    "examples/validate_digits.py": "--steps 2 --seeds 2",
    "jaxmp audit": "",
    "jaxmp devices": "",
    "jaxmp lock": "",
    "jaxmp validate": "--steps 2 --seeds 2",
}
# Of the others, only that their options are there.
NOT_RUN = {
    # They compile, time or train for minutes to hours; test_benchmarks.py starts each, or a part.
    *(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")),
    # Run by tests of their own.
    *(f"examples/recipes/{path.name}" for path in (ROOT / "examples/recipes").glob("*.py")),
    *("examples/diagnose_overflow.py", "examples/qwix_handover.py", "examples/train_multihost.py"),
    # They rewrite pages and tables, print every plan, or are what runs this.
    *("docs/primitives.py", "docs/what_runs_where.py", "tests/cost_table.py"),
    *("tests/doc_blocks.py", "tests/plan_dump.py"),
    *("mkdocs", "pip", "pytest"),
    "jaxmp preflight",  # needs a compiler for the target; test_docs.py runs what shows output
} - RUN.keys()
PAGES = [
    "README.md",
    ".github/CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
]
# Programs whose options are in another file.
OPTIONS_IN = {
    "train_digits_nnx.py": "digits_report.py",
    "train_multihost.py": "multihost_launcher.py",
}


class Command(NamedTuple):
    """A command, its page, and the folder to run it in."""

    page: str
    folder: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """What it runs: a file as seen from the root, or a module's name (and subcommand)."""
        if self.words[0] != "python":
            return self.words[0]
        if self.words[1] != "-m":
            return os.path.normpath(Path(self.folder, self.words[1]))
        return " ".join(self.words[2 : 4 if self.words[2] == "jaxmp" else 3])

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def read(page: str) -> list[Command]:
    """Fenced blocks of commands, indented ones, and what stands between single backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^\n|\A)((?:^ {4}\S.*\n(?:^ {8}.*\n)*)+)", text, re.MULTILINE)
    starts = r"(?:python3? |pip |mkdocs )"
    blocks += [" ".join(code.split()) for code in re.findall(rf"`({starts}[^`]+)`", text)]
    found = []
    for block in blocks:
        folder = "."
        for line in re.sub(r"\\\n", " ", block).splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words[:1] == ["cd"]:
                    folder = words[1]
                elif words and re.match(starts, f"{words[0]} "):
                    found.append(Command(page, folder, tuple(words)))
    return found


def of_results() -> list[Command]:
    """The commands of the kept results of benchmarks."""
    found = []
    for name, run in kept().items():
        folder, words = folder_and_words(run["command"])
        page = str(file_of(name).relative_to(ROOT))
        found.append(Command(page, folder, tuple(words)))
    return found


COMMANDS = list(dict.fromkeys([command for page in PAGES for command in read(page)] + of_results()))


def test_every_command_is_read():
    """Wherever a line or a piece of code begins with Python, it is among them."""
    text = "".join((ROOT / page).read_text("utf-8") for page in PAGES)
    lines = len(re.findall(r"^(?: {4})?(?:python|pip|mkdocs) ", text, re.MULTILINE))
    assert len([c for page in PAGES for c in read(page)]) >= lines > 40
    assert len(of_results()) > 30
    found = {c.program for c in COMMANDS}
    assert RUN.keys() <= found <= RUN.keys() | NOT_RUN


class Parsed(BaseException):
    """Raised in place of the work."""


PARSE_ARGS = argparse.ArgumentParser.parse_args


def parse_only(self, args=None, namespace=None):
    raise Parsed(PARSE_ARGS(self, args, namespace))


@pytest.mark.parametrize("program", sorted({command.program for command in COMMANDS}))
def test_its_options_are_there(program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    # The same words are on several pages.
    asked = {c.words: c for c in COMMANDS if c.program == program}
    for words, command in asked.items():
        if program == "pip":
            groups = re.findall(r"\[([\w,-]+)\]", shlex.join(words))
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            extras = {extra for group in groups for extra in group.split(",")}
            assert extras <= project["optional-dependencies"].keys(), command
        elif program.startswith("jaxmp "):
            args = PARSE_ARGS(cli._parser(), words[3:])
            named = [getattr(args, name, None) for name in ("function", "batches")]
            for spec in filter(None, named):
                module, _, function = spec.partition(":")
                if module != "module":  # a placeholder
                    source = (ROOT / command.folder / f"{module}.py").read_text(encoding="utf-8")
                    defined = rf"^(def {function}\b|{function} = )"
                    assert re.search(defined, source, re.MULTILINE), command
        elif program.endswith(".py"):
            file = ROOT / program
            parser = file.parent / OPTIONS_IN.get(file.name, file.name)
            if "argparse" not in parser.read_text(encoding="utf-8"):
                assert not words[2:] or file.stem == "doc_blocks", command
                continue
            with monkeypatch.context() as patch:
                patch.syspath_prepend(file.parent)
                patch.setattr(sys, "argv", [str(file), *words[2:]])
                try:
                    runpy.run_path(str(file), run_name="__main__")
                except ModuleNotFoundError as error:
                    assert file.parent.name == "recipes"
                    pytest.skip(f"{error}: docs/recipes/ says how to install it")
                except Parsed:
                    continue
                pytest.fail(f"{command}: no options were parsed")
        else:
            assert program in {"mkdocs", "pytest"}


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.program in RUN], ids=str)
def test_it_runs(command, tmp_path):
    words = list(command.words[1:])
    if "module:function" in words:
        pytest.skip("a placeholder")
    if command.folder == "examples/recipes":
        pytest.skip("it needs what its page installs: see test_on_real_code.py")
    folder = ROOT / command.folder if command.folder != "." else tmp_path
    if words[0].endswith(".py"):
        words[0] = str(ROOT / command.program)
    words += shlex.split(RUN[command.program])
    if "--out" in words and folder != tmp_path:
        words += ["--out", str(tmp_path / "out")]
    done = run_python(*words, folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
