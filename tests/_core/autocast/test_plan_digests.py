"""Every plan of the corpus is what it was, by a digest of its text.

A digest that differs says that a decision moved, not which: `tests/plan_dump.py` prints plans, and
two prints are compared with `diff`. Where the move is meant, `python tests/plan_dump.py --digests`
writes them anew. JAX lowers library functions differently from version to version, so the digests
are of one, the newest that is tested.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import jax
import plan_dump
import pytest
from numeric_kit import PROGRAMS
from plan_dump import policies_of

# Families of numeric programs in which something overflows or is lost.
RANGES = {"divisors", "gates", "physical units", "ranges", "reciprocals", "returns", "statistics"}

GOLDEN: Any = json.loads(plan_dump.DIGESTS.read_text())
CORPUS = {name: make for name, make in plan_dump.corpus() if not name.startswith("public/")}

pytestmark = pytest.mark.skipif(
    jax.__version__ != GOLDEN["jax"], reason=f"the digests are of JAX {GOLDEN['jax']}"
)


def test_digests_are_of_the_corpus() -> None:
    assert set(GOLDEN["plans"]) == set(CORPUS)
    assert all(set(plans) == {*policies_of(name)} for name, plans in GOLDEN["plans"].items())


def _rarely_alone(name: str, policy: str) -> bool:
    """Whether a plan is another's but for a dtype, so that it rarely changes alone."""
    kind, _, program = name.partition("/")
    if kind == "construct":
        low_softmax = "softmax" in policy and program != "attention"
        return low_softmax or policy in ("mixed_float16", "bfloat16")
    return policy == "mixed_float16" and PROGRAMS[program].family not in RANGES


@pytest.mark.parametrize("often", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CORPUS)
def test_plans_are_what_they_were(name: str, often: bool) -> None:
    for policy in policies_of(name):
        if _rarely_alone(name, policy) == often:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = plan_dump.text_of(name, CORPUS[name], policy)
        assert plan_dump.digest(text) == GOLDEN["plans"][name][policy], (
            f"the plan of {name} under {policy} changed; compare `python tests/plan_dump.py {name}`"
            " before and after, and if it is meant, run `python tests/plan_dump.py --digests`"
        )
