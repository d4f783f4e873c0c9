"""What benchmarks and recipes printed: kept beside the pages of `docs/`, compared with a new run.

    python benchmarks/results.py                               # the runs that are kept
    python benchmarks/results.py training_steps/mlp --check    # which kept lines it prints no more
    python benchmarks/results.py training_steps/mlp --write    # keeps what it prints now
    python benchmarks/results.py peers/llama --write --command "python benchmarks/autocast_aot.py …"

A file of `docs/benchmarks/` or `docs/recipes/`, `<file>.json`, has the runs of the page `<file>.md`
beside it, which says where each is shown. A run is its command, the machine, the versions, and the
lines printed. Its "varies", where there is one, is a regular expression of what depends on the
machine in a line, such as times, and is not compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = ("benchmarks", "recipes")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin")
PEERS = ("equimo", "equinox", "google-tunix", "gymnax", "jmp", "maxtext", "mixed-precision-for-jax")
PEERS += ("qwix", "rejax")

Run = dict[str, Any]


def kept(docs: Path = DOCS) -> dict[str, Run]:
    """Every run, by `file/name`."""
    return {
        f"{path.stem}/{name}": run
        for folder in FOLDERS
        for path in sorted((docs / folder).glob("*.json"))
        for name, run in json.loads(path.read_text(encoding="utf-8")).items()
    }


def file_of(name: str, docs: Path = DOCS) -> Path:
    """The file of a run, beside the page that shows it."""
    file = name.partition("/")[0]
    folders = [folder for folder in FOLDERS if (DOCS / folder / f"{file}.md").exists()]
    return docs / (folders or FOLDERS)[0] / f"{file}.json"


def keep(name: str, run: Run, docs: Path = DOCS) -> None:
    """Writes one run into its file."""
    of_file, path = name.partition("/")[2], file_of(name, docs)
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps(runs | {of_file: run}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def folder_and_words(command: str) -> tuple[str, list[str]]:
    """Of `cd benchmarks && python fsdp.py`: "benchmarks", and the words after `&&`."""
    *before, program = command.split(" && ")
    return (before[0].removeprefix("cd ") if before else "."), shlex.split(program)


def printed(command: str) -> list[str]:
    """Runs a command from the root: its lines, without one of versions at the start."""
    folder, words = folder_and_words(command)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=ROOT / folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"results.py: exit code {done.returncode}: {command}\n{done.stdout}")
    text = re.sub(r"\A(?:Python|jax) \d\S*, .*\n", "", done.stdout)
    return text.strip("\n").splitlines()


def made_by() -> dict[str, str]:
    """The machine and the versions of a run that is made here."""
    found = {"Python": platform.python_version()}
    for package in (*PACKAGES, *PEERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "versions": ", ".join(f"{package} {version}" for package, version in found.items()),
    }


def no_longer_printed(run: Run, lines: list[str]) -> list[str]:
    """The kept lines that are not among `lines`, however wide, and but for what varies."""

    def compared(line: str) -> str:
        line = re.sub(run["varies"], "", line) if "varies" in run else line
        return re.sub(r"-{2,}", "-", " ".join(line.split()))

    found = {compared(line) for line in lines}
    return [line for line in run["printed"] if compared(line) and compared(line) not in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="by default all that are kept; `file` is all of it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="exit with 1 when a figure differs")
    what.add_argument("--write", action="store_true", help="replace what is kept")
    parser.add_argument(
        "--command", help="with --write: of a new run, or one whose command changed"
    )
    args = parser.parse_args()
    runs = kept()
    if args.command:
        if not args.write or len(args.runs) != 1 or args.runs[0].count("/") != 1:
            parser.error("--command needs --write and one run, as file/name")
        runs[args.runs[0]] = {**runs.get(args.runs[0], {}), "command": args.command}
    names = [n for n in runs if not args.runs or {n, n.partition("/")[0]} & set(args.runs)]
    if not names:
        parser.error(f"no run is called {' or '.join(args.runs)}; there are {', '.join(runs)}")
    failed = False
    for name in names:
        run = runs[name]
        print(f"{name}: {run['command']}", flush=True)
        if args.check:
            gone = no_longer_printed(run, printed(run["command"]))
            print("\n".join(f"  not printed: {line}" for line in gone) or "  as kept", flush=True)
            failed |= bool(gone)
        elif args.write:
            keep(name, {**run, **made_by(), "printed": printed(run["command"])})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
