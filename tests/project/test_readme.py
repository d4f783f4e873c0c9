"""README: its programs run as pasted, its commands from a clone, and its output names versions."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp

from doc_blocks import blocks, run
from support import contraction_dtypes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMITS = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
(PROGRAM,) = (block.text for block in blocks(README) if block.runs)


def test_every_fenced_block_is_a_program_or_output():
    found = blocks(README)
    languages = " ".join(block.language for block in found)
    assert languages == "sh text diff diff python text text"
    assert all("JAX 0.12" in b.printed_by[-50:] for b in found if b.language == "text")
    assert len(README.splitlines()) <= 200
    # The lines to add are those of the program: two, and the one more of float16.
    diffs = [block.text for block in found if block.language == "diff"]
    added = [[line[2:] for line in diff.splitlines() if line.startswith("+")] for diff in diffs]
    assert [len(lines) for lines in added] == [2, 1]
    assert all(line in PROGRAM for lines in added for line in lines)


def test_the_program_runs_and_prints_its_audit(capsys):
    scope = run(PROGRAM, {"__name__": "readme"})
    out = capsys.readouterr().out
    assert "matmul, conv forward     100.0% bfloat16" in out
    assert "matmul, conv backward    100.0% bfloat16" in out
    assert {str(x.dtype) for x in jax.tree.leaves(scope["state"].params)} == {"float32"}
    assert scope["loss"].dtype == "float32"
    # Copied to a model with BatchNorm, it must not train the averages.
    assert "params" not in scope["state"].params
    assert scope["params"] is scope["variables"]["params"]


def test_every_link_leads_somewhere():
    defined = re.findall(r"^\[(\w+)\]: https://\S+$", README, re.MULTILINE)
    used = re.findall(r"\[[^\]]+\]\[([a-z]\w+)\]", README)
    assert set(used) == set(defined)
    for target in re.findall(r"\]\(([^)]+)\)", README):
        file, _, anchor = target.partition("#")
        text = README if not file else ""
        if file.endswith(".md"):
            text = (ROOT / file).read_text("utf-8")
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert (ROOT / file).exists(), target
        assert not anchor or anchor in {title.lower().replace(" ", "-") for title in titles}, target


def test_every_cell_of_the_comparison_has_a_link():
    rows = [line for line in README.splitlines() if line.startswith("|") and "PyTorch" in line]
    (head,) = rows
    table = README[README.index(head) :].split("\n\n")[0].splitlines()
    for row in table[2:]:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        assert len(cells) == 8, name
        assert all(cell == "–" or "](" in cell or "][" in cell for cell in cells), name


def test_installation_is_from_a_clone():
    """The package is on no index."""
    assert "jaxmp[" not in README
    installs = re.findall(r"pip install\s+(.*?)[`\n]", README)
    assert installs
    assert all(arguments.removeprefix("--no-compile ").startswith("-e ") for arguments in installs)
    for file in re.findall(r"(?<![\w/])((?:examples|benchmarks|docs)/\w+\.\w+)", README):
        assert (ROOT / file).exists(), file


def test_the_first_table_is_of_what_is_printed():
    table = README[README.index("| | float32 | mixed_bfloat16 |") :].split("\n\n")[0]
    shown = "".join(block.text for block in blocks(README) if block.language == "text")
    for row in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for figure in (figure for cell in cells for figure in re.findall(r"\d+\.?\d*", cell)):
            assert figure in shown or "H100" in name, f"{name}: {figure}"


def test_what_the_example_prints_is_what_its_docstring_says():
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / "train_lm.py").read_text("utf-8")))
    shown = next(block.text for block in blocks(README) if block.language == "text")
    assert textwrap.indent(shown, "    ").rstrip() in docstring


def test_the_cures_of_the_limits_are_programs():
    a = jnp.full((4, 8), 1.001)

    def full(a):
        return jaxmp.full_precision(jnp.matmul)(a, a.T)

    low = jaxmp.autocast(full, "mixed_bfloat16")
    np.testing.assert_array_equal(low(a), jax.jit(full)(a))
    assert "jaxmp.full_precision(jnp.matmul)(a, b)" in LIMITS
    assert contraction_dtypes(low, a) == {"float32": 1}

    def step(x, w):
        return x - 1e-3 * (x @ w)

    def euler(x, w):
        for _ in range(100):
            x = jaxmp.full_precision(step)(x, w)
        return x

    x, w = jnp.ones((1, 4)), jnp.eye(4)
    np.testing.assert_allclose(
        jaxmp.autocast(euler, "mixed_bfloat16", argnums=1)(x, w), 0.999**100, rtol=1e-5
    )
    assert "jaxmp.full_precision(step)" in LIMITS
