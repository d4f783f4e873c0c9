"""The fenced blocks of a page of documentation: to run its programs, and to write their output.

A page's programs run one after the other in one namespace. A block of text after one of them is
its output. Which JAX printed it, the page says once ("The outputs on this page are of JAX 0.12."),
or the paragraph above the block. Another library's program says in its title where it runs: "where
torch is installed", by itself; or "not run here".

    python tests/doc_blocks.py docs/get_started.md

writes the output of each program into the page, with the JAX at hand; it refuses another JAX than
the page names.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

_OF_PAGE = re.compile(r"^The outputs? on this page (?:is|are) of JAX \d+\.\d+", re.MULTILINE)
_FENCE = re.compile(r"^```(\w+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


class Block(NamedTuple):
    """What is between two fences.

    Attributes:
      language: "python", "text" or "sh".
      title: what else is on the line of the first fence.
      text: the lines in between.
      printed_by: the sentence that names the JAX that printed a block of output: of the paragraph
        above it, or of the page.
      start: where `text` begins in the page.
    """

    language: str
    title: str
    text: str
    printed_by: str
    start: int

    @property
    def runs(self) -> bool:
        """With the page's others."""
        return self.language == "python" and "not run" not in self.title and self.needs is None

    @property
    def needs(self) -> str | None:
        """The other library that it takes, and by itself."""
        found = re.search(r"\(run where (\w+) is installed\)", self.title)
        return found[1] if found else None

    def printed_here(self) -> bool:
        """Whether the JAX at hand is the one that printed it."""
        return any(jax.__version__.startswith(v) for v in _versions(self.printed_by))


def _versions(text: str) -> list[str]:
    return re.findall(r"JAX (\d+\.\d+)", text)


def blocks(page: str) -> list[Block]:
    found, end = [], 0
    of_page = _OF_PAGE.search(page)
    for match in _FENCE.finditer(page):
        by = page[end : match.start()].strip().split("\n\n")[-1]
        if of_page and not _versions(by):
            by = of_page[0]
        found.append(Block(match[1], match[2].strip(), match[3], by, match.start(3)))
        end = match.end()
    return found


def run(program: str, scope: dict) -> dict:
    """Runs a program under the name that reports give to its lines."""
    exec(compile(program, "example.py", "exec", dont_inherit=True), scope)
    return scope


def outputs(page: str) -> Iterator[tuple[Block, str]]:
    """Runs a page; each block of output, and what the program before it has printed."""
    scope: dict = {"__name__": "page"}
    printed = None
    for block in blocks(page):
        if block.runs:
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out):
                    run(block.text, scope)
            except Exception as error:
                error.add_note(f"in the block at line {page.count(chr(10), 0, block.start)}")
                raise
            printed = out.getvalue()
        elif block.language == "text" and printed is not None:
            yield block, printed
            printed = None
        else:
            printed = None


def write(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = list(outputs(page))
    for block, printed in reversed(found):
        if not block.printed_here():
            raise SystemExit(f"{path}: not of JAX {jax.__version__}: {block.printed_by}")
        page = page[: block.start] + printed + page[block.start + len(block.text) :]
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write(Path(argument).resolve())
