"""`benchmarks/serving.py`: what it compiles, and the table of losses at its smallest size."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import serving
from support import ROOT


@pytest.mark.slow
def test_what_weights_are_stored_in():
    stored = {}
    for name in serving.FORMATS:
        _, (params, _) = serving.serving_program(4, 1, 16, name)
        stored[name] = serving.stored_mib(params)
    share = {name: mib / stored["bf16"] for name, mib in stored.items()}
    # A scale of 4 bytes for each 1024 weights, and for each 32, 64 and 128; norms and biases.
    assert 0.5 < share["int8"] < 0.505
    for block in (32, 64, 128):
        assert share[f"int4 block {block}"] == pytest.approx((4 + 32 / block) / 16, abs=2e-3)


@pytest.mark.slow
def test_the_table_of_losses():
    command = [sys.executable, "benchmarks/serving.py", "accuracy", "--size", "tiny", "--seeds=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = re.findall(r"^(.+?)  +([\d.]+) +[+-][\d.]+%  +([\d.]+) ", done.stdout, re.MULTILINE)
    loss = {name: float(first) for name, first, _ in rows}
    assert loss["int8"] == pytest.approx(loss["float32"], rel=2e-3)
    assert loss["float8"] == pytest.approx(loss["float32"], rel=1e-2)
    assert loss["float32"] * 1.001 < loss["int4 block 32"] < loss["float32"] * 1.1
    for name in serving.CALIBRATED:
        assert loss["float32"] < loss[f"{name}, calibrated"] < loss[name]
