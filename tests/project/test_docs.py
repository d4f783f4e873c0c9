"""The site: programs run as pasted, output is what they print, every public name has an entry."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import jaxmp
from jaxmp._tools.audit.report import KINDS

from doc_blocks import Block, blocks, outputs
from support import HERE, ROOT

DOCS = ROOT / "docs"
PAGES = {str(p.relative_to(DOCS)): p.read_text(encoding="utf-8") for p in DOCS.rglob("*.md")}

# Pages whose blocks are parts of files, or are printed by long runs, and what tries those.
TESTED_ELSEWHERE = {
    "design.md": "project/test_design_doc.py",
    "diagnose.md": "project/test_examples.py",
    "many_devices.md": "project/test_benchmarks.py",
    "validation.md": "_tools/validate/test_validate_report.py",
}
# The programs of the other pages compile for seconds.
QUICK = {
    "choosing.md",
    "coming_from/jmp.md",
    "coming_from/qwix.md",
    "coming_from/torch.md",
    "concepts/autocast_in_300_lines.md",
    "concepts/plan.md",
    "how_to/attention.md",
    "index.md",
}

# Pages whose last digits depend on LLVM's optimizations, which conftest.py turns off.
LAST_DIGITS = {"how_to/parity.md"}

# Messages on the page of errors that other libraries print.
OF_OTHERS = (
    "Cannot mutate",
    "Q must be",
    "Structure mismatch",
    "Unable to load cuDNN",
    "could not determine TPU",
)

OWN = sorted(PAGES.keys() - TESTED_ELSEWHERE.keys())
WITH_PROGRAMS = [name for name in OWN if any(block.runs for block in blocks(PAGES[name]))]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _compiled_as_by_doc_blocks():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in WITH_PROGRAMS]
)
def test_programs_run_and_print_what_is_shown(name, request):
    if name in LAST_DIGITS:
        request.getfixturevalue("_compiled_as_by_doc_blocks")
    for block, printed in outputs(PAGES[name]):
        if block.printed_here():
            assert printed == block.text, f"write it anew: python tests/doc_blocks.py docs/{name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [b for name in OWN for b in blocks(PAGES[name]) if b.needs], ids=lambda b: b.needs
)
def test_what_one_comes_from_runs_where_it_is_installed(block):
    if importlib.util.find_spec(block.needs) is None:
        pytest.skip(f"{block.needs} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", block.text], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_blocks_are_programs_commands_or_output():
    for name in OWN:
        before, found = None, blocks(PAGES[name])
        for block in found:
            assert block.language in {"diff", "python", "sh", "text", "toml", "yaml"}, (name, block)
            if block.language == "text":
                assert before is not None, f"{name}: output of nothing"
                assert "JAX 0." in block.printed_by, f"{name}: printed by which JAX?\n{block.text}"
            before = block if block.language != "text" else None
        # None is overlooked: indented, or with a fence of another kind.
        assert PAGES[name].count("```") == 2 * len(found), name


def lines(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def looks() -> list[tuple[str, str, Block | None]]:
    """Blocks of commands of `python -m jaxmp`, with the output that is shown of the last."""
    return [
        (name, block.text, after if after is not None and after.language == "text" else None)
        for name in OWN
        for block, after in itertools.pairwise([*blocks(PAGES[name]), None])
        if block.language == "sh" and "python -m jaxmp" in block.text
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block", "shown"), looks())
def test_the_command_line_prints_what_is_shown(name, block, shown):
    folder, env = ROOT, {**os.environ, "PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu"}
    if "preflight" in block and "--target gpu" in block:
        pytest.importorskip("jax_cuda13_plugin")
    if "preflight" in block and "--target tpu" in block:
        pytest.importorskip("libtpu")
    for line in lines(block):
        words = shlex.split(line, comments=True)
        if words[0] == "cd":
            folder = folder / words[1]
            continue
        run = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
    if shown is not None and shown.printed_here():
        assert run.stdout == shown.text


# --- questions and errors -----------------------------------------------------------------------


def messages() -> str:
    """Every string in the package; what is filled in is "…"."""
    found = []
    for file in (ROOT / "jaxmp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return re.sub(r"{\w*}", "…", "\n".join(found))


def test_the_errors_that_are_explained_are_raised():
    _, _, page = PAGES["faq.md"].partition("\n## Errors and warnings\n")
    headings = re.findall(r'^### (".*")$', page.partition("\n## ")[0], re.MULTILINE)
    quoted = [text for heading in headings for text in re.findall(r'"([^"]+)"', heading)]
    assert len(quoted) > 30
    of_jaxmp, text = [m for m in quoted if not m.startswith(OF_OTHERS)], messages()
    parts = [part.strip() for message in of_jaxmp for part in message.split("…")]
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("name", ["reference/primitives", "what_runs_where"])
def test_pages_that_programs_write_are_current(name):
    file = DOCS / f"{name.rpartition('/')[2]}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert PAGES[f"{name}.md"] == generator.page(), f"python docs/{file.name}"


# --- the reference ------------------------------------------------------------------------------


def entries() -> set[str]:
    """What the pages of the reference have an entry of: by mkdocstrings, or in words."""
    found = set()
    for name, page in PAGES.items():
        if name.startswith("reference/"):
            found.update(re.findall(r"^::: (jaxmp[\w.]*)$", page, re.MULTILINE))
            found.update(re.findall(r"^## (jaxmp[\w.]*)$", page, re.MULTILINE))
    return found


def public_names() -> set[str]:
    """What the root exports, and what the modules without an underscore do."""
    found = {f"jaxmp.{name}" for name in jaxmp.__all__} - {"jaxmp.__version__"}
    for file in (ROOT / "jaxmp").glob("[a-z]*.py"):
        module = importlib.import_module(f"jaxmp.{file.stem}")
        found.update(f"jaxmp.{file.stem}.{name}" for name in getattr(module, "__all__", ()))
    return found


def is_of_the_root(name: str) -> bool:
    """Whether `jaxmp.policy.Policy` is exported as `jaxmp.Policy`, and has its page there."""
    return name.count(".") == 2 and name.rpartition(".")[2] in jaxmp.__all__


def test_every_public_name_has_an_entry():
    missing = {name for name in public_names() - entries() if not is_of_the_root(name)}
    assert not missing, "give each a page in docs/reference, and a line in mkdocs.yml"
    for name in set(jaxmp.__all__) - {"__version__"}:  # each has a page of its own
        assert f"::: jaxmp.{name}\n" in PAGES[f"reference/{name}.md"]
        assert f"({name}.md)" in PAGES["reference/index.md"]
    for kind, printed in KINDS.items():
        assert f"| `{kind}` | {printed} |" in PAGES["tools.md"]


def test_entries_exist():
    for name in entries():
        module, rest = name, []
        while True:
            try:
                found = importlib.import_module(module)
                break
            except ImportError:
                module, _, last = module.rpartition(".")
                rest.insert(0, last)
        for attribute in rest:
            found = getattr(found, attribute)


def test_the_index_says_what_docstrings_say():
    spec = importlib.util.spec_from_file_location("reference_index", DOCS / "reference_index.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/index.md"))
    built = hook.on_page_markdown(PAGES["reference/index.md"], page=page)
    entries = re.findall(r"^\* \[`jaxmp\.(\w+)`\]\(\1\.md\)(?:: (.*))?$", built, re.MULTILINE)
    assert len(entries) > 30
    for name, summary in ((n, s) for n, s in entries if n != "PolicyLike"):  # a union has none
        value = getattr(jaxmp, name, None) or importlib.import_module(f"jaxmp.{name}")
        assert summary == " ".join(inspect.getdoc(value).split("\n\n")[0].split()), name


def test_every_page_is_in_the_navigation():
    """`mkdocs build --strict` says so too; this needs no MkDocs."""
    assert TESTED_ELSEWHERE.keys() < PAGES.keys()
    assert all((ROOT / "tests" / test).exists() for test in TESTED_ELSEWHERE.values())
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"[\w/]+\.md$", config, re.MULTILINE)
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "docs/notebooks").glob("*.py")]
    assert sorted(named) == sorted([*PAGES, *notebooks])
