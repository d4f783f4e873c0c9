"""docs/concepts/float32.md has every reason that a plan can give, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from jaxmp._core.plan.why import Kind, Residual

from support import ROOT

PACKAGE = ROOT / "jaxmp"
PAGE = (ROOT / "docs" / "concepts" / "float32.md").read_text(encoding="utf-8")

# Files of the planner whose sentences are messages, headings or names, or known to `of_kinds`.
_FILES = """
    annotations coverage_warnings leaked_tracers nnx_calls parameters primitives program_key regions
    transform why
"""
NO_REASONS = {f"{stem}.py" for stem in _FILES.split()}
# Sentences in the other files that a plan does not show, or shows as part of another one.
NOT_SHOWN = {
    "in parts",  # what is inside decides for itself
    "… at …",  # by_recipe.py: names a product in error messages
    "the product",
    "an unknown line",
    "a product",  # derivative.py, likewise
    "… is …",  # by_recipe.py: before "estimated at"
    "float8 in blocks of 32",  # choice.py: a format
}
# What holds a reason, or a part of one, that may be a single word.
HOLDERS = {"reason", "what"}


class _Sentences(ast.NodeVisitor):
    """Collects the sentences of a module; what is filled in is "…"."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        # The words of two errors become the reason, unless they speak to the user.
        if re.match("raise (NotFusedError|NotImplementedError)", ast.unparse(node)):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & HOLDERS:
            self.found.update(_literals(node.value))
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._keep(_text(node))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._keep(_text(node))

    def _keep(self, text: str) -> None:
        is_message = text.startswith("autocast: ")
        if not is_message and " " in text and re.search("[a-z]{2}", text):
            self.found.add(text)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    parts = [str(v.value) if isinstance(v, ast.Constant) else "…" for v in values]
    return "".join(parts).replace("{}", "…").strip()


def _literals(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.IfExp():
            yield from _literals(node.body)
            yield from _literals(node.orelse)
        case ast.Constant(value=str()):
            yield _text(node)


def of_kinds() -> set[str]:
    """The sentences of the catalogue, without what joins notes to them."""
    kinds = (*Kind, *Residual)
    dtypes = {"wide": "float32", "low": "16-bit", "bits": "16 bits"}
    texts = (kind.value.format("…", "…", **dtypes).replace("'…'", "…") for kind in kinds)
    return {text.strip(" ;:,()") for text in texts} - {"", "…"}


def of_sources() -> set[str]:
    """The reasons that are written in the planner's files, and in `matmul="auto"`'s choice."""
    sentences = _Sentences()
    sentences.found |= of_kinds()
    for room in ("plan", "execute", "products", "decide", "passes", "autocast"):
        for file in (PACKAGE / "_core" / room).rglob("*.py"):
            if file.name not in NO_REASONS:
                sentences.visit(ast.parse(file.read_text(encoding="utf-8")))
    choice = ast.parse((PACKAGE / "_core" / "speed" / "choice.py").read_text(encoding="utf-8"))
    [auto] = [f for f in choice.body if getattr(f, "name", "") == "fastest_recipe"]
    sentences.visit(auto)
    return sentences.found - NOT_SHOWN


def of_page() -> set[str]:
    """The reasons in the first columns of the tables of the page."""
    _, _, tables = PAGE.partition("\n## All reasons\n")
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    return {span for cell in cells for span in re.findall("`([^`]+)`", cell)}


def test_every_reason_is_on_the_page_and_no_other() -> None:
    assert of_sources() == of_page()
