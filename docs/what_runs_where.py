"""Writes the table of docs/what_runs_where.md: what each chip multiplies, and how that is known.

    python docs/what_runs_where.py

The table is of `jaxmp/_core/chips/chips.toml`, the recipes, and the machines in the results of
`benchmarks/gpu.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from jaxmp._core.passes.fused_attention.kernels import kernel_of
from jaxmp._core.speed import Chip, chip_named, fastest_recipe
from jaxmp.devices import chips
from jaxmp.recipes import FORMATS

HERE = Path(__file__).parent
PAGE = HERE / "what_runs_where.md"
HEADINGS = (
    "chip",
    "known from",
    "bfloat16",
    "float16",
    "float8",
    "int8",
    "4 bits",
    "blocks of few bits",
    "`matmul=auto`",
    "`attention=fused`",
)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def cell(chip: Chip, dtype: str) -> str:
    """What a chip does with the operands of a product in a dtype."""
    known = dtype in chip.relative
    if not chip.multiplies(dtype):
        return f"widened, {chip.share(dtype):.2f}" if known else "widened"
    if known:
        return f"{chip.share(dtype):.2f}"
    share = chip.share(dtype)
    if dtype.endswith("float16") or share < 1:
        return "native"
    return f"native, {share:.0f} times slower" if share > 1 else "native, no faster"


def row(name: str, run: str) -> tuple[str, ...]:
    """A chip's row; `run` has the machines of the benchmarks that ran."""
    chip, described = chip_named(name), chips()[name]
    # CUDA 13 compiles from capability 7.5 on.
    capability = described.get("config", {}).get("compute_capability", [0])
    compiled = "topologies" in described or capability >= [7, 5]
    eight = cell(chip, FORMATS[chip.float8].name)
    four = [n for n in ("int4", "float4_e2m1fn") if n in chip.tflops]
    recipe, _ = fastest_recipe(chip)
    kernel = kernel_of(chip)
    return (
        f"`{name}`",
        "run" if name[4:].upper() in run else "compiled" if compiled else "data sheet",
        cell(chip, "bfloat16"),
        cell(chip, "float16"),
        eight if eight == "widened" else f"{chip.float8}: {eight}",
        cell(chip, "int8"),
        ", ".join(n.removeprefix("float4_").removesuffix("fn") for n in four) or "widened",
        ", ".join(described.get("blocks", ())) or "widened",
        str(recipe) if recipe else "16 bits",
        kernel.name if kernel else "no kernel",
    )


def page() -> str:
    """The page with its table written anew."""
    results = json.loads((HERE / "benchmarks" / "gpu.json").read_text(encoding="utf-8"))
    run = " ".join(result["machine"] for result in results.values())
    words = re.sub(r"[^\w ]", " ", run).split()
    rows = [HEADINGS, tuple(":--" for _ in HEADINGS)]
    rows += [row(name, " ".join(words)) for name in chips()]
    table = "".join(f"| {' | '.join(each)} |\n" for each in rows)
    return TABLE.sub(lambda _: table, PAGE.read_text(encoding="utf-8"), count=1)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
