"""Every plan of the corpus is what it was: where one is not, the lines that differ.

If they are meant to, `python tests/plan_dump.py --write` writes the plans anew (two minutes), and
`git diff` shows them all.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from typing import Any

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


# Plans that are compared by default: of a numeric program of each family but the long ones, and of
# constructs under every kind of policy.
LONG = {"ensemble_of_streams_on_shared_data", "stream_of_fifty_layers_from_data"}
OF_EACH_FAMILY = {
    program.family: name for name, program in reversed(PROGRAMS.items()) if name not in LONG
}.values()
OF_EACH_KIND = {
    *("attention", "scan", "while_loop", "cond", "remat_in_scan", "custom_vjp_in_scan"),
    *("jit_nested", "grad_of_scan_inside", "shard_map_collectives"),
}


def _by_default(name: str, policy: str) -> bool:
    kind, _, program = name.partition("/")
    if kind == "numeric":
        ranges = PROGRAMS[program].family in RANGES
        return program in OF_EACH_FAMILY and (policy != "mixed_float16" or ranges)
    # Another's but for a dtype, so that it rarely changes alone.
    low_softmax = "softmax" in policy and program != "attention"
    if low_softmax or policy in ("mixed_float16", "bfloat16"):
        return False
    return policy == "mixed_bfloat16" or program in OF_EACH_KIND


def _cases() -> Iterator[Any]:
    for name in CORPUS:
        often = [policy for policy in policies_of(name) if _by_default(name, policy)]
        if often:
            yield pytest.param(name, often, id=name)
        if rarely := [policy for policy in policies_of(name) if policy not in often]:
            yield pytest.param(name, rarely, id=f"{name}-rarely", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "policies"), [*_cases()])
def test_plans_are_what_they_were(name: str, policies: list[str]) -> None:
    for policy in policies:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, *plan = plan_dump.text_of(name, CORPUS[name], policy).splitlines()
        diff = difflib.unified_diff(WRITTEN[name][policy], plan, "tests/plans", "now", lineterm="")
        if changed := "\n".join(diff):
            pytest.fail(f"the plan of {name} under {policy} changed:\n{changed}", pytrace=False)
