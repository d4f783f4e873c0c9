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

from support import slow_when

# Families of numeric programs in which something overflows or is lost.
RANGES = {"gates", "physical units", "ranges", "reciprocals", "returns", "statistics"}

GOLDEN: Any = json.loads(plan_dump.DIGESTS.read_text())
CORPUS = {name: make for name, make in plan_dump.corpus() if not name.startswith("public/")}

pytestmark = pytest.mark.skipif(
    jax.__version__ != GOLDEN["jax"], reason=f"the digests are of JAX {GOLDEN['jax']}"
)


def test_digests_are_of_the_corpus() -> None:
    assert set(GOLDEN["plans"]) == set(CORPUS)
    assert all(set(plans) == {*policies_of(name)} for name, plans in GOLDEN["plans"].items())


def _as_bfloat16_is(name: str, policy: str) -> bool:
    """Whether float16, which differs in what overflows or saturates, is of less interest."""
    _, _, program = name.partition("numeric/")
    return policy == "mixed_float16" and program != "" and PROGRAMS[program].family not in RANGES


@slow_when(_as_bfloat16_is)
@pytest.mark.parametrize(("name", "policy"), [(n, p) for n in CORPUS for p in policies_of(n)])
def test_plan_is_what_it_was(name: str, policy: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = plan_dump.text_of(name, CORPUS[name], policy)
    assert plan_dump.digest(text) == GOLDEN["plans"][name][policy], (
        f"the plan of {name} changed; compare `python tests/plan_dump.py {name}` before and after, "
        "and if it is meant, run `python tests/plan_dump.py --digests`"
    )
