"""Every plan of the corpus is what it was: where one is not, the lines that differ.

If they are meant to, `python tests/plan_dump.py --write` writes the plans anew (two minutes), and
`git diff` shows them all.
"""

from __future__ import annotations

import difflib
import warnings

import jax
import plan_dump
import pytest
from numeric_kit import PROGRAMS
from plan_dump import policies_of

# Families of numeric programs in which something overflows or is lost.
RANGES = {"divisors", "gates", "physical units", "ranges", "reciprocals", "returns", "statistics"}

JAX, WRITTEN = plan_dump.written()
CORPUS = {name: make for name, make in plan_dump.corpus() if not name.startswith("public/")}

pytestmark = pytest.mark.skipif(jax.__version__ != JAX, reason=f"tests/plans are of JAX {JAX}")


def test_plans_are_of_the_corpus() -> None:
    assert set(WRITTEN) == set(CORPUS)
    assert all(set(plans) == {*policies_of(name)} for name, plans in WRITTEN.items())


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
            _, *plan = plan_dump.text_of(name, CORPUS[name], policy).splitlines()
        diff = difflib.unified_diff(WRITTEN[name][policy], plan, "tests/plans", "now", lineterm="")
        if changed := "\n".join(diff):
            pytest.fail(f"the plan of {name} under {policy} changed:\n{changed}", pytrace=False)
