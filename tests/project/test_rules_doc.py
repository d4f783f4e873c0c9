"""The page of rules: each has the reasons that `explain` prints for it; no reason is left out."""

from __future__ import annotations

import re

from jaxmp._core.plan.why import Kind

from support import ROOT

PAGE = (ROOT / "docs/concepts/plan.md").read_text("utf-8")

# Of what runs as written, whatever its operands are; and what passes add about products.
OF_NO_RULE = {
    *(Kind.NOT_FLOAT32, Kind.AS_WRITTEN, Kind.UNLISTED, Kind.NOT_LOOKED_INSIDE, Kind.CLOSES_OVER),
    *(Kind.DROPPED, Kind.RECIPE, Kind.CHOSEN, Kind.NOT_QUANTIZED, Kind.INTENDED, Kind.STORED),
    *(Kind.SOFTMAX, Kind.PICKS, Kind.FUSED, Kind.NOT_FUSED, Kind.NO_KERNEL),
}


def said(kind: Kind) -> str:
    """The sentence of a reason, without its details."""
    names = {"wide": "float32", "low": "16-bit", "bits": "16 bits"}
    return kind.value.format(*["…"] * 3, **names).strip(" :;")


def rows(heading: str) -> dict[int, list[str]]:
    """The numbered rows of the first table under a heading: their cells."""
    table = PAGE.partition(heading)[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+) \| (.*) \|$", table.partition("\n### ")[0], re.MULTILINE)
    return {int(number): cells.split(" | ") for number, cells in found}


def test_each_reason_is_of_one_rule() -> None:
    rules, reasons = rows("These are all the rules:"), rows("### The reasons that explain prints\n")
    assert list(rules) == list(range(1, len(rules) + 1))
    assert set(rules) - set(reasons) == {6}, "which prints the reasons of others"
    listed = [reason for [cell] in reasons.values() for reason in cell.split(" · ")]
    assert sorted(listed) == sorted(said(kind) for kind in Kind if kind not in OF_NO_RULE)


def test_each_reason_is_given_somewhere() -> None:
    sources = sorted((ROOT / "jaxmp").rglob("*.py"))
    code = "\n".join(f.read_text("utf-8") for f in sources if f.name != "why.py")
    assert {f"Kind.{kind.name}" for kind in Kind} <= set(re.findall(r"Kind\.\w+", code))
