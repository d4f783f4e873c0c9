"""What `tests/mutants.py` plants is code that differs from what was there."""

from __future__ import annotations

import ast
import bisect
from collections import defaultdict

import mutants
import pytest


@pytest.mark.slow
def test_every_mutant_is_another_program() -> None:
    by_file = defaultdict(list)
    for mutant in mutants.mutants():
        by_file[mutant.path].append(mutant)
    assert len(by_file) > 50
    for path, some in by_file.items():
        source = (mutants.ROOT / path).read_text()
        before = ast.parse(source).body
        for mutant in some[:5]:
            changed = source[: mutant.start] + mutant.new + source[mutant.end :]
            after = ast.parse(changed).body
            # One statement differs: the last that begins before the change.
            place = bisect.bisect([node.lineno for node in before], mutant.line) - 1
            assert ast.dump(after[place]) != ast.dump(before[place]), mutant


def test_a_seed_draws_the_same_mutants() -> None:
    some = mutants.drawn(40, seed=3)
    assert some == mutants.drawn(40, seed=3)
    assert some != mutants.drawn(40, seed=4)
    assert {mutant.kind for mutant in some} == {"dtype", "cast", "branch", "rule"}
