"""The recipes on other people's code: a few steps of each, where its package is installed."""

from __future__ import annotations

import os
import re

import pytest

from support import ROOT, run_python

RECIPES = ROOT / "examples" / "recipes"
# The package that each needs, or the variable that names a checkout; and the options of a minute.
NEEDS = {
    "equimo_vit.py": ("equimo", "--epochs 1 --seeds 1 --no-preflight"),
    "maxtext_trainer.py": ("maxtext", "--steps 3 --no-preflight"),
    "nnx_vit.py": ("BONSAI", "--epochs 1 --no-preflight"),
    "rejax_ppo.py": ("rejax", "--steps 8192 --seeds 1"),
    "tunix_lora.py": ("tunix", "--steps 3 --no-preflight"),
}


def test_every_recipe_is_tried_and_has_a_page():
    assert {path.name for path in RECIPES.glob("*.py")} - {"shown.py"} == NEEDS.keys()
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs/recipes").glob("*.json"))
    assert set(re.findall(r"examples/recipes/(\w+\.py)", pages)) == NEEDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_recipe_runs(name, tmp_path):
    needs, options = NEEDS[name]
    if needs.isupper():
        if needs not in os.environ:
            pytest.skip(f"{needs} is not set: docs/recipes/ says to what")
    else:
        pytest.importorskip(needs, reason=f"{needs} is not installed: docs/recipes/ says how")
    done = run_python(str(RECIPES / name), *options.split(), folder=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 3, done.stdout
    assert "nan" not in done.stdout
