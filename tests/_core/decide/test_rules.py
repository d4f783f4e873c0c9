"""The rules and reasons of a plan, and that their pages have each of them and no other.

docs/concepts/plan.md has the rules by number: of each, here, what the plan of a small program says;
and there the reasons that `explain` prints for it. docs/concepts/float32.md has all reasons.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._core.plan.why import Kind, Residual

from constructs import BF16, F16
from support import ROOT, gaussian

LOW, WIDE = {BF16: "bfloat16", F16: "float16"}, "float32"
W, B, NARROW, POSE = gaussian(0, 16, 16), gaussian(1, 16), gaussian(2, 4, 32), gaussian(3, 4, 4)
P = {"w": W, "b": B, "narrow": NARROW, "pose": POSE}
X, Y = gaussian(4, 8, 16), gaussian(5, 8, 16)
SINUSOID = np.cos(np.outer(np.arange(16), np.arange(16)) * np.pi / 8).astype(np.float32)
MASK = np.arange(16) < 12

RULES: dict[int, list[tuple[Any, ...]]] = {}


def rule(number: int, op: str, *dtypes: str, policy: str = BF16) -> Callable[..., Any]:
    """Says of a program `fn(params, x, y)` in which dtypes its ops of a name run, in order."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        RULES.setdefault(number, []).append((fn, op, dtypes, policy))
        return fn

    return register


LOWS, WIDES = "low", WIDE


def hidden(p: Any, x: jax.Array) -> jax.Array:
    """A value in 16 bits."""
    return x @ p["w"]


def last(p: Any, h: jax.Array) -> jax.Array:
    """A product that wants a value."""
    return h @ p["w"]


@rule(1, "dot_general", LOWS)
@rule(1, "transpose", LOWS)
def operands_and_what_moves_them(p, x, y):
    return p["w"] @ x.T


@rule(1, "mul", LOWS, WIDES)
def masks_of_what_a_product_reads(p, x, y):
    return last(p, x * MASK), jnp.sum(y * MASK)


@rule(2, "dot_general", LOWS, WIDES, WIDES, LOWS)
def the_authors_word(p, x, y):
    upcast = hidden(p, x).astype(jnp.bfloat16).astype(jnp.float32) @ p["w"]
    exact = jnp.matmul(y, p["w"], precision="highest")
    return upcast, exact, jnp.matmul(y, p["w"], precision="BF16_BF16_F32")


@rule(3, "dot_general", WIDES, LOWS, WIDES, WIDES, LOWS)
def geometry(p, x, y):
    few, many = x[:, :8] @ y[:, :8].T, x[:, :9] @ y[:, :9].T
    pose, scalar = x[:, :4] @ p["pose"], jnp.vdot(x[0], p["b"])
    return few, many, pose, scalar, x[:, :4] @ p["narrow"]


@rule(4, "dot_general", WIDES)
def signals(p, x, y):
    return x @ SINUSOID


@rule(5, "dot_general", WIDES, LOWS)
def angles(p, x, y):
    return jnp.sin(x @ p["w"]), jnp.tanh(y @ p["w"])


@rule(6, "dot_general", WIDES, LOWS)
def nothing_summed(p, x, y):
    return jnp.einsum("i,j->ij", p["b"], x[0]), last(p, x)


@rule(7, "tanh", WIDES, LOWS)
def wanted_by_a_product(p, x, y):
    return jnp.tanh(hidden(p, x)), last(p, jnp.tanh(hidden(p, y)))


@rule(7, "add", LOWS, WIDES)
def wanted_by_a_product_of_sums_by_index(p, x, y):
    at = jnp.arange(8) // 2
    pooled = jax.ops.segment_sum(hidden(p, x) + p["b"], at, 4)
    return last(p, pooled), jax.ops.segment_sum(hidden(p, y) + p["b"], at, 4)


@rule(8, "add", LOWS)
def parameters(p, x, y):
    return last(p, hidden(p, x) + p["b"])


@rule(9, "mul", LOWS, WIDES)
@rule(9, "add", LOWS, WIDES)
def constants(p, x, y):
    factors = last(p, hidden(p, x) * 300.0), last(p, hidden(p, x) * 1e-40)
    return factors, last(p, hidden(p, y) + 8.0), last(p, hidden(p, y) + 9.0)


@rule(10, "add", LOWS)
def computed(p, x, y):
    return last(p, hidden(p, x) + jnp.exp(hidden(p, y)))


@rule(11, "add", WIDES)
@rule(11, "mul", LOWS)
def shared(p, x, y):
    total = jnp.sum(jnp.exp(hidden(p, y)), -1, keepdims=True)
    return last(p, hidden(p, x) + total), last(p, hidden(p, x) * total)


@rule(12, "add", WIDES)
def data(p, x, y):
    return last(p, hidden(p, x) + y)


@rule(13, "max", LOWS)
@rule(13, "select_n", WIDES, LOWS)
def choices(p, x, y):
    h = hidden(p, x)
    return jnp.where(MASK, hidden(p, y), y), last(p, jnp.where(MASK, jnp.maximum(h, 0), 0))


@rule(14, "mul", WIDES, LOWS)
def positions(p, x, y):
    at, scaled = hidden(p, x) * 3.0, hidden(p, y) * 3.0
    return jnp.floor(at), last(p, at), last(p, scaled)


@rule(14, "add", WIDES)
def what_a_logarithm_reads_as_well(p, x, y):
    gate = hidden(p, x) + p["b"]
    return jnp.log(gate), last(p, gate)


@rule(15, "exp", WIDES)
@rule(15, "reduce_sum", WIDES)
def sensitive(p, x, y):
    return last(p, jnp.exp(hidden(p, x))), jnp.sum(hidden(p, y))


@rule(16, "div", WIDES, LOWS)
@rule(16, "sub", WIDES)
def its_own_statistic(p, x, y):
    h, other = hidden(p, x), hidden(p, y)
    norm, of_other = (jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (h, other))
    return last(p, h / norm), last(p, h / of_other), last(p, h - h.sum(-1, keepdims=True))


@rule(17, "tanh", LOWS)
def leaves_a_normalization(p, x, y):
    h = hidden(p, x)
    return last(p, jnp.tanh((h - h.mean(-1, keepdims=True)) * p["b"]))


@rule(18, "broadcast_in_dim", WIDES)
def repeated(p, x, y):
    return last(p, jnp.broadcast_to(hidden(p, x)[:1], (8, 16)))


@rule(18, "slice", WIDES, WIDES)
def read_in_parts(p, x, y):
    h = hidden(p, x)
    return jnp.sum((h[1:] - h[:-1]) ** 2)


def _stream(p: Any, x: jax.Array) -> jax.Array:
    layers = jnp.stack([p["w"]] * 3)
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0]


@rule(19, "add", LOWS)
def a_stream_of_layers(p, x, y):
    return last(p, _stream(p, hidden(p, x)))


@rule(19, "add", WIDES)
def a_stream_that_starts_as_data(p, x, y):
    return last(p, _stream(p, x))


@rule(19, "add", WIDES)
def a_state(p, x, y):
    def step(h, _):
        return h + jnp.tanh(h @ p["w"]), None

    return last(p, lax.scan(step, hidden(p, x), None, 3)[0])


@rule(20, "tanh", LOWS)
@rule(20, "mul", LOWS)
def branches(p, x, y):
    h = hidden(p, x)
    return last(p, lax.cond(y[0, 0] > 0, jnp.tanh, lambda h: h * 2.0, h))


@rule(22, "div", WIDES, policy=F16)
@rule(22, "div", LOWS)
def reciprocals(p, x, y):
    return last(p, 1.0 / hidden(p, x))


@rule(22, "add", WIDES, policy=F16)
@rule(22, "div", LOWS, policy=F16)
def guarded_denominators(p, x, y):
    return last(p, hidden(p, x) / (jnp.abs(hidden(p, y)) + 1e-3))


@rule(22, "dot_general", *[LOWS] * 5, WIDES, policy=F16)
def a_normalizer(p, x, y):
    q, k = jnp.exp(hidden(p, x)), jnp.exp(hidden(p, y))
    return (q @ (k.T @ hidden(p, y))) / (q @ k.sum(0))[:, None]


CASES = [
    pytest.param(*case, id=f"{number} {case[0].__name__} {case[1]}")
    for number, cases in RULES.items()
    for case in cases
]


@pytest.mark.parametrize(("fn", "op", "dtypes", "policy"), CASES)
def test_rule(fn: Callable[..., Any], op: str, dtypes: tuple[str, ...], policy: str) -> None:
    rows = jaxmp.explain(fn, policy)(P, X, Y).rows
    found = [row.dtype for row in rows if row.op == op and row.dtype in (WIDE, LOW[policy])]
    want = [LOW[policy] if dtype == LOWS else dtype for dtype in dtypes]
    assert found == want


def test_rule_21_what_is_written_is_clipped_and_what_is_computed_is_not() -> None:
    def fn(p: Any, x: jax.Array) -> Any:
        h = hidden(p, x)
        return last(p, jnp.where(MASK, h, -1e9) * 1e-4), last(p, h * 1e3 * 1e3)

    masked, scaled = jaxmp.autocast(fn, F16)({"w": W}, X)
    assert np.isfinite(masked).all()
    assert not np.isfinite(scaled).all()


# --- the pages ------------------------------------------------------------------------------------

RULES_PAGE, REASONS_PAGE = (
    (ROOT / "docs/concepts" / name).read_text("utf-8") for name in ("plan.md", "float32.md")
)

# Of what runs as written, whatever its operands are; and what passes add about products.
OF_NO_RULE = {
    *(Kind.NOT_FLOAT32, Kind.AS_WRITTEN, Kind.UNLISTED, Kind.NOT_LOOKED_INSIDE, Kind.CLOSES_OVER),
    *(Kind.DROPPED, Kind.RECIPE, Kind.CHOSEN, Kind.NOT_QUANTIZED, Kind.INTENDED, Kind.STORED),
    *(Kind.STORED_WITH, Kind.STORED_RANGE, Kind.SOFTMAX, Kind.PICKS, Kind.FUSED, Kind.NOT_FUSED),
    Kind.NO_KERNEL,
}


def said(kind: Kind | Residual) -> str:
    """The sentence of a reason, without its details."""
    names = {"wide": "float32", "low": "16-bit", "bits": "16 bits"}
    return kind.value.format(*["…"] * 3, **names).strip(" ;:,()")


def rows(heading: str) -> dict[int, list[str]]:
    """The numbered rows of the first table under a heading: their cells."""
    table = RULES_PAGE.partition(heading)[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+) \| (.*) \|$", table.partition("\n### ")[0], re.MULTILINE)
    return {int(number): cells.split(" | ") for number, cells in found}


def test_the_page_has_these_rules_and_at_most_22() -> None:
    numbers = list(rows("These are all the rules:"))
    assert numbers == sorted({*RULES, 21}) == list(range(1, len(numbers) + 1))
    assert len(numbers) <= 22


def test_each_reason_is_of_one_rule() -> None:
    rules, reasons = rows("These are all the rules:"), rows("### The reasons that explain prints\n")
    assert set(rules) - set(reasons) == {6}, "which prints the reasons of others"
    listed = [reason for [cell] in reasons.values() for reason in cell.split(" · ")]
    assert sorted(listed) == sorted(said(kind) for kind in Kind if kind not in OF_NO_RULE)


def test_each_reason_is_given_somewhere() -> None:
    sources = sorted((ROOT / "jaxmp").rglob("*.py"))
    code = "\n".join(f.read_text("utf-8") for f in sources if f.name != "why.py")
    assert {f"Kind.{kind.name}" for kind in Kind} <= set(re.findall(r"Kind\.\w+", code))


# Files of the planner whose sentences are messages, headings or names, or the catalogue's.
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


def of_sources() -> set[str]:
    """The reasons that are written in the planner's files, and in `matmul="auto"`'s choice."""
    sentences = _Sentences()
    sentences.found |= {said(kind).replace("'…'", "…") for kind in (*Kind, *Residual)} - {"", "…"}
    for room in ("plan", "execute", "products", "decide", "passes", "autocast"):
        for file in (ROOT / "jaxmp" / "_core" / room).rglob("*.py"):
            if file.name not in NO_REASONS:
                sentences.visit(ast.parse(file.read_text(encoding="utf-8")))
    choice = ast.parse((ROOT / "jaxmp/_core/speed/choice.py").read_text("utf-8"))
    [auto] = [f for f in choice.body if getattr(f, "name", "") == "fastest_recipe"]
    sentences.visit(auto)
    return sentences.found - NOT_SHOWN


def test_every_reason_is_on_the_page_and_no_other() -> None:
    # In the first columns of its tables.
    _, _, tables = REASONS_PAGE.partition("\n## All reasons\n")
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    assert of_sources() == {span for cell in cells for span in re.findall("`([^`]+)`", cell)}
