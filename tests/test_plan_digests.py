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

GOLDEN: Any = json.loads(plan_dump.DIGESTS.read_text())
CORPUS = {name: make for name, make in plan_dump.corpus() if not name.startswith("public/")}

pytestmark = pytest.mark.skipif(
    jax.__version__ != GOLDEN["jax"], reason=f"the digests are of JAX {GOLDEN['jax']}"
)


def test_digests_are_of_the_corpus() -> None:
    assert set(GOLDEN["plans"]) == set(CORPUS)


@pytest.mark.parametrize("name", CORPUS)
def test_plan_is_what_it_was(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = plan_dump.text_of(name, CORPUS[name])
    assert plan_dump.digest(text) == GOLDEN["plans"][name], (
        f"the plan of {name} changed; compare `python tests/plan_dump.py {name}` before and after, "
        "and if it is meant, run `python tests/plan_dump.py --digests`"
    )
