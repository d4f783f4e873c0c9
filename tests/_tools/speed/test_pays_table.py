"""The table of when 8 bits pay says what is chosen, in Python and on the command line."""

from __future__ import annotations

import json

import pytest

from jaxmp import cli
from jaxmp._core.speed import fastest_recipe, pays
from jaxmp._tools.speed.pays_table import RECIPES, TOKENS, when_it_pays
from jaxmp.devices import chips

from support import slow_when


@slow_when(lambda name: name not in ("gpu-b200", "tpu-v5e"))
@pytest.mark.parametrize("name", chips())
def test_the_table_says_what_pays_says(name):
    table = when_it_pays(name)
    for (n_in, n_out), cells in table.cells.items():
        assert tuple(cells) == RECIPES
        for recipe, cell in cells.items():
            gains = [pays(recipe, table.chip, tokens, n_in, n_out) for tokens in TOKENS]
            assert list(cell.ratios.values()) == [gain.ratio for gain in gains]
            pay = [gain.pays for gain in gains]
            first = TOKENS.index(cell.least) if cell.least else len(TOKENS)
            assert all(pay[first:])
            assert not (first and pay[first - 1])
    recipe, reason = fastest_recipe(table.chip)
    assert f'matmul="auto": {recipe or "none"}: {reason}.' in str(table)


def test_the_table_from_the_command_line(capsys):
    assert cli.main(["preflight", "--table", "--target", "gpu-h100:8"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("4096 x 16384"))
    assert row.split()[3:5] == ["1024+", "(0.67)"]
    assert row.endswith("-")
    assert "mxfp8 is emulated: blocks of 32 are scaled in 16 bits first on gpu-h100" in out
    assert cli.main(["preflight", "--table", "--target", "tpu-v5e", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["auto"]["recipe"] == "int8"
    assert {row["recipe"] for row in table["layers"]} == set(map(str, RECIPES))


def test_mistakes_with_the_table(capsys):
    for arguments, message in (
        (["--table", "--target", "gpu-h10"], "unknown target 'gpu-h10'"),
        (["--table", "module:function"], "takes either --table or module:function"),
        ([], "takes either --table or module:function"),
    ):
        assert cli.main(["preflight", *arguments]) == 2
        assert message in capsys.readouterr().err
