"""Runs the commands of the README and of docs/ as written, in a clone: all of them take hours.

    python tests/run_commands.py                      # every one
    python tests/run_commands.py autocast_aot vit     # those with all of these words
    python tests/run_commands.py --minutes 15

What `test_commands.py` runs in CI is made cheap, and what compiles for minutes is only parsed
there. Here nothing is changed: each command is run in its folder of one clone of what is committed,
by the Python at hand, and has a line: its exit code, its seconds, and the longest time it printed
nothing. Under it are the lines that its page shows below it, up to the next command, and that it
did not print: figures that are no longer so, or that depend on the machine. Exit code 1 if one
failed or took longer than it may. Benchmarks are left to `benchmarks/results.py --check`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support import ROOT

sys.path.append(str(ROOT / "tests" / "project"))
from test_commands import COMMANDS, Command

# Installing, what serves until it is stopped, what rewrites the tree, and what would run this.
LEFT_OUT = {"pip", "mkdocs", "pytest", "tests/doc_blocks.py", "tests/cost_table.py"}


def wanted(command: Command, words: list[str]) -> bool:
    placeholder = "module:function" in command.words
    named = all(any(word in part for part in command.words) for word in words)
    of_results = command.page.startswith("docs/benchmarks")
    return command.program not in LEFT_OUT and not placeholder and not of_results and named


def shown_below(command: Command) -> list[str]:
    """The rows of tables and the lines of output between a command and the next one or heading."""
    words = (rf"""['"]?{re.escape(word)}['"]?""" for word in command.words)
    whole = "^.*" + r"[\s\\]+".join(words) + "$"  # not the beginning of a longer one
    page = (ROOT / command.page).read_text(encoding="utf-8")
    _, *below = re.split(whole, page, maxsplit=1, flags=re.MULTILINE)
    if not below:
        return []
    ends = r"^(?:#+ | {4}python | {4}cd |```(?:sh|python)$)"
    section = re.split(ends, below[0], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\|.*$", section, re.MULTILINE)
    return [line for block in [*blocks, *rows] for line in block.splitlines()]


def not_printed(command: Command, printed: str) -> list[str]:
    """What the page shows below a command that it did not print, however wide."""

    def narrow(line: str) -> str:
        return re.sub(r"-+", "-", " ".join(line.split()))

    lines = {narrow(line) for line in printed.splitlines()}
    shown = map(narrow, shown_below(command))
    return [line for line in shown if line not in lines and line not in ("", "…")]


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
    failed, before = 0, ""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "jaxmp")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for command in COMMANDS:
            if not wanted(command, args.words):
                continue
            print(f"{command.page}: {shlex.join(command.words)}", flush=True)
            code, took, silence, printed = run(command, clone, 60 * args.minutes)
            print(f"  exit code {code}, {took:.0f} s, silent for {silence:.0f} s", flush=True)
            before += printed  # a page may show what several commands print below the last of them
            if shown_below(command):
                for line in not_printed(command, before):
                    print(f"  not printed: {line}", flush=True)
                before = ""
            if code:
                failed += 1
                print(printed[-2000:], flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
