"""Runs the commands of the README and of docs/ as written, in a clone: all of them take hours.

    python tests/run_commands.py                      # every one
    python tests/run_commands.py autocast_aot vit     # those with all of these words
    python tests/run_commands.py --minutes 15

What `test_commands.py` runs in CI is made cheap, and what compiles for minutes is only parsed
there. Here nothing is changed: each command is run in its folder of one clone of what is committed,
by the Python at hand, and has a line: its exit code, its seconds, and the longest time it printed
nothing. Under it are the rows of the tables it printed that its page does not show: figures that
are another's, or that depend on the machine. Exit code 1 if one failed or took longer than it may.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support import ROOT
from test_commands import COMMANDS, Command

# Installing, what serves until it is stopped, what rewrites the tree, and what would run this.
LEFT_OUT = {"pip", "mkdocs", "pytest", "tests/doc_blocks.py", "tests/cost_table.py"}


def wanted(command: Command, words: list[str]) -> bool:
    placeholder = "module:function" in command.words
    named = all(any(word in part for part in command.words) for word in words)
    return command.program not in LEFT_OUT and not placeholder and named


def not_shown(printed: str, page: str) -> list[str]:
    """The rows of the Markdown tables that were printed that a page has not, however wide."""

    def rows(text: str) -> list[str]:
        lines = (line.strip() for line in text.splitlines())
        return [" ".join(line.split()) for line in lines if line.startswith("|") and "--" not in line]

    shown = set(rows(page))
    return [row for row in rows(printed) if row not in shown]


def run(command: Command, clone: Path, seconds: float) -> tuple[int, float, float, str]:
    """Its exit code, how long it took, its longest silence, and what it printed."""
    started = last = time.monotonic()
    silence, printed = 0.0, b""
    process = subprocess.Popen(
        [sys.executable, *command.words[1:]],
        cwd=clone / command.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(clone)},
    )
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    while chunk := process.stdout.read1(65536):
        now = time.monotonic()
        silence, last, printed = max(silence, now - last), now, printed + chunk
    code = process.wait()
    timer.cancel()
    now = time.monotonic()
    return code, now - started, max(silence, now - last), printed.decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="what a command has to have in it")
    parser.add_argument("--minutes", type=float, default=15, help="default: %(default)s")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "jaxmp")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for command in COMMANDS:
            if not wanted(command, args.words):
                continue
            print(f"{command.page}: {shlex.join(command.words)}", flush=True)
            code, took, silence, printed = run(command, clone, 60 * args.minutes)
            print(f"  exit code {code}, {took:.0f} s, silent for {silence:.0f} s", flush=True)
            for row in not_shown(printed, (ROOT / command.page).read_text()):
                print(f"  {row}", flush=True)
            if code:
                failed += 1
                print(printed[-2000:], flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
