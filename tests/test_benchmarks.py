"""The benchmarks start, also where no compiler for accelerators is installed."""

from __future__ import annotations

import pytest

from support import ROOT, run_python, slow_when

PROGRAMS = {
    "autocast_aot": "import autocast_aot; autocast_aot.Cache(None, 1).get('mlp', 'hand', 'cpu')",
    "loss_scale_aot": "import loss_scale_aot",
    "fsdp": "import fsdp",
    "cpu_sums": "import cpu_sums",
    "product_cycles": "import product_cycles",
    "eight_bits_aot": "import eight_bits_aot",
    "when_it_pays": "import when_it_pays; when_it_pays.main()",
}


@slow_when(lambda name: name != "autocast_aot")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_starts(name: str) -> None:
    run = run_python("-c", PROGRAMS[name], folder=ROOT / "benchmarks")
    assert run.returncode == 0, run.stderr[-2000:]


def test_every_benchmark_is_tried() -> None:
    helpers = {"aot", "models"}
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers == set(PROGRAMS)
