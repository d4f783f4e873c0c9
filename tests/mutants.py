"""Planted faults of the core, one at a time: which the tests notice.

    python tests/mutants.py --list
    python tests/mutants.py --count 60 --seed 0 --out mutants.json -- -n0

What follows `--` goes to pytest, after `-x -q`. It runs the tests of the rooms below and those of
the public modules, those that name the fault's module first. The faults are drawn from the source
of these rooms, so the same seed draws others when it has changed:

* dtype: float32 for bfloat16 and the other way round;
* cast: `x.astype(d)` or `convert_element_type(x, d)` becomes `x`;
* branch: the condition of an `if` that does not just raise is negated;
* rule: a function that answers yes or no always answers no.

Each runs on a copy of the tree, in a folder of its own. A fault counts as noticed if pytest fails,
an import's failure included, or takes more than `--limit` seconds. One that is not noticed is
either no fault (the result is the same, by a longer way) or a test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
ROOMS: Final = ("_core", "_modules", "_training")
SWAPPED: Final = {"float32": "bfloat16", "bfloat16": "float32", "float16": "float32"}
CASTS: Final = ("astype", "convert_element_type")
COPIED: Final = ("jaxmp", "tests", "benchmarks", "examples", "docs")


class Mutant(NamedTuple):
    """One fault: `new` in place of `old`, from `start` to `end` (characters) in a file."""

    kind: str
    path: str
    line: int
    start: int
    end: int
    new: str

    def __str__(self) -> str:
        return f"{self.kind:7} {self.path}:{self.line}  -> {' '.join(self.new.split())[:70]}"


def mutants() -> Iterator[Mutant]:
    """Every fault that there is to plant."""
    for room in ROOMS:
        for path in sorted((ROOT / "jaxmp" / room).rglob("*.py")):
            yield from _in_file(path)


@functools.cache
def _in_file(path: Path) -> tuple[Mutant, ...]:
    return tuple(_found_in(path))


def _found_in(path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        # Columns are of bytes, and the source is ASCII.
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def mutant(kind: str, node: ast.expr | ast.stmt, new: str) -> Mutant:
        return Mutant(kind, str(path.relative_to(ROOT)), node.lineno, *span(node), new)

    def text(node: ast.expr | ast.stmt) -> str:
        start, end = span(node)
        return source[start:end]

    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("jnp"), attr=name) if name in SWAPPED:
                yield mutant("dtype", node, f"jnp.{SWAPPED[name]}")
            case ast.Attribute(value=ast.Name("np"), attr=name) if name in SWAPPED:
                yield mutant("dtype", node, f'np.dtype("{SWAPPED[name]}").type')
            case ast.Call(func=ast.Attribute(value=value, attr="astype")):
                yield mutant("cast", node, text(value))
            case ast.Call(func=ast.Attribute(attr="convert_element_type"), args=[first, *_]):
                yield mutant("cast", node, text(first))
            case ast.If(test=test, body=body) if not isinstance(body[0], ast.Raise):
                yield mutant("branch", test, f"not ({text(test)})")
            case ast.IfExp(test=test):
                yield mutant("branch", test, f"(not ({text(test)}))")
            case ast.FunctionDef(returns=ast.Name("bool")):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and text(inner) != "return False":
                        yield mutant("rule", inner, "return False")


def drawn(count: int, seed: int) -> list[Mutant]:
    """As many of each kind as of the others, from the whole source."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants():
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for some in by_kind.values():
        rng.shuffle(some)
    order = [some[i] for i in range(count) for some in by_kind.values() if i < len(some)]
    return order[:count]


def tests_for(mutant: Mutant) -> list[str]:
    """The files of tests, those first that should notice the fault."""
    module = Path(mutant.path)

    def rank(file: Path) -> int:
        if module.stem in file.stem:
            return 0
        if module.stem in file.read_text(encoding="utf-8"):
            return 1
        if file.parent.name == module.parent.name != "autocast":
            return 2
        return 3 if file.name == "test_plans.py" else 4

    tests = ROOT / "tests"
    files = [x for room in ROOMS for x in sorted((tests / room).rglob("test_*.py"))]
    files += sorted(tests.glob("test_*.py"))
    return [str(x.relative_to(ROOT)) for x in sorted(files, key=rank)]


def is_noticed(mutant: Mutant, pytest_args: list[str], limit: float) -> tuple[bool, str]:
    """Runs the tests on a copy of the tree with the fault in it; and the first that failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file() and file.name != ".git":  # of a worktree, a file
                shutil.copy(file, copy)
        source = (copy / mutant.path).read_text()
        changed = source[: mutant.start] + mutant.new + source[mutant.end :]
        (copy / mutant.path).write_text(changed)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *pytest_args, *tests_for(mutant)],
                check=False,
                cwd=copy,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return True, f"no end after {limit:.0f} s"
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR", "E   "))]
    return done.returncode != 0, (failed or [""])[-1][:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one fault")
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults, from 0")
    parser.add_argument("--out", type=Path, help="a JSON file of the results")
    parser.add_argument("pytest_args", nargs="*")
    args = parser.parse_args()
    chosen = list(enumerate(drawn(args.count, args.seed)))
    if args.only:
        chosen = [chosen[i] for i in args.only]
    results = []
    for number, mutant in chosen:
        if args.list:
            sys.stdout.write(f"{number:3} {mutant}\n")
            continue
        noticed, by = is_noticed(mutant, args.pytest_args, args.limit)
        results.append({"number": number, **mutant._asdict(), "noticed": noticed, "by": by})
        sys.stdout.write(f"{number:3} {'noticed' if noticed else 'MISSED '} {mutant}  {by}\n")
        sys.stdout.flush()
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))
    if results:
        count = sum(bool(r["noticed"]) for r in results)
        sys.stdout.write(f"{count} of {len(results)} noticed\n")


if __name__ == "__main__":
    main()
