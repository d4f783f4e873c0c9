"""`examples/train_digits_nnx.py`, run as a user runs it."""

from __future__ import annotations

import importlib
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp

from support import EXAMPLES, run_example

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_train_digits_compares_two_policies(tmp_path):
    # One run, many checks: starting a process costs more than any of them.
    options = ("--steps", "80", "--batch", "64", "--seed", "3", "--runs", "2")
    result = run_example("train_digits_nnx.py", *options, "--compare", "float32", folder=tmp_path)
    assert result.returncode == 0, result.stderr

    row = r"^(\S+) +(\d+\.\d\d) +(\d+\.\d\d) +(\d+\.\d\d) +([+-]\d+\.\d\d)?  +(.*)$"
    low, full = re.findall(row, result.stdout, re.MULTILINE)
    assert (low[0], low[5]) == ("mixed_bfloat16", "3 bfloat16")
    assert (full[0], full[4], full[5]) == ("float32", "", "3 float32")
    low_accuracy, full_accuracy = ([float(x) for x in run[1:4]] for run in (low, full))
    for *each, mean in (low_accuracy, full_accuracy):
        assert mean == pytest.approx(sum(each) / 2, abs=0.011)
        assert min(each) > 80, "far more than chance is learned in 80 steps"
    assert float(low[4]) == pytest.approx(low_accuracy[2] - full_accuracy[2], abs=0.011)
    assert abs(float(low[4])) < 3, "the same init and the same data end close"
    assert re.search(r"^accuracy \(%\) +seed 3 +seed 4 +mean", result.stdout, re.MULTILINE)

    losses = re.findall(r"steps/s, loss=(\d+\.\d+)", result.stderr)
    assert losses, "the progress bar"
    assert len(set(losses)) > 4, "another precision and another seed go another way"
    assert (tmp_path / "digits.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.slow
def test_train_digits_scales_the_loss_of_float16(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    script = importlib.import_module("train_digits_nnx")
    run = script.train("mixed_float16", steps=40, batch=64, seed=0)
    assert "mixed_float16: the loss scale is 65536, 0 steps were skipped" in capsys.readouterr().out
    assert run.matmuls == {"float16": 3}
    assert list(run.accuracy) == [0, 1, 2, 4, 5, 10, 15, 20, 25, 30, 35, 40]
    assert run.final > 80, "far more than chance is learned in 40 steps"
    assert run.losses[-1] < run.losses[0] / 2


def test_a_step_that_overflows_leaves_no_trace(monkeypatch):
    """Neither in the parameters nor in BatchNorm's averages, which would be NaN for good."""
    monkeypatch.syspath_prepend(EXAMPLES)
    script = importlib.import_module("train_digits_nnx")
    model = jaxmp.wrap(script.CNN(nnx.Rngs(0)), "mixed_float16")
    tx = jaxmp.loss_scale_for("mixed_float16", optax.adamw(2e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    (images, digits), _ = script.read_digits()
    images, digits = images[:64], digits[:64]
    script.train_step(model, optimizer, images, digits)
    kept = jax.tree.map(np.asarray, nnx.state(model, (nnx.Param, nnx.BatchStat)))
    script.train_step(model, optimizer, images + np.float32("inf"), digits)
    assert int(jaxmp.loss_scaling.skipped_count(optimizer.opt_state)) == 1
    now = nnx.state(model, (nnx.Param, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, now, kept)


def test_train_digits_names_no_precision():
    """The claim of the example: but for the policies' names, no floating dtype stands in it."""
    source = (EXAMPLES / "train_digits_nnx.py").read_text().split('"""', 2)[2]
    code = source.replace('"mixed_bfloat16"', "")
    assert not re.findall(r"dtype=|float\d+|bf16|f32|f16", code)
