"""What autocast makes of fixed small models, in figures that are the same on every machine.

    python tests/cost_table.py

writes those of the JAX at hand into cost_table.json, beside those of others. `test_cost.py`
compares: what moves a figure has to move it there, where a reader of the change sees it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import jaxmp

from aot import contraction_counts, residuals_by_dtype
from models import CASES
from support import iter_eqns, jaxpr_of

FILE = Path(__file__).with_suffix(".json")
JAX = ".".join(jax.__version__.split(".")[:2])
POLICIES = ("mixed_bfloat16", "mixed_bfloat16,residuals=recompute")
OF_TRANSFORMERS = ("mixed_bfloat16,softmax=bf16", "mixed_float8")
ROWS = [
    (model, policy)
    for model, case in CASES.items()
    if model not in ("gpt2", "vocab")  # at their small sizes, they are lm
    for policy in (*POLICIES, *(OF_TRANSFORMERS if case.has_softmax else ()))
]


def figures(model: str, policy: str) -> dict[str, dict[str, int]]:
    """Of the gradient of a model's loss, at its small size.

    Returns:
      "contractions": how many run per call, by the dtypes multiplied; "converts": how many casts
      between floating dtypes there are; "residual bytes": what is kept for the backward pass.
    """
    case = CASES[model]
    shapes = case.shapes(small=True)
    loss = jaxmp.autocast(case.loss(small=True), policy)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))  # so that it is traced once
    converts: Counter[str] = Counter()
    for eqn in iter_eqns(jaxpr_of(step, *shapes)):
        if eqn.primitive.name == "convert_element_type":
            converts[f"{eqn.invars[0].aval.dtype}->{eqn.outvars[0].aval.dtype}"] += 1
    kept = residuals_by_dtype(loss, *shapes)
    return {
        "contractions": dict(sorted(contraction_counts(step, *shapes).items())),
        "converts": {pair: n for pair, n in sorted(converts.items()) if pair.count("float") == 2},
        "residual bytes": {dtype: round(mib * 2**20) for dtype, mib in sorted(kept.items())},
    }


def table() -> dict[str, Any]:
    """By JAX's version, the model and the policy."""
    return json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}


def main() -> None:
    rows: dict[str, Any] = {}
    for model, policy in ROWS:
        rows.setdefault(model, {})[policy] = figures(model, policy)
    every = {**table(), JAX: rows}
    FILE.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
