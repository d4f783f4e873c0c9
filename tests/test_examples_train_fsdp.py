"""The example of a fully sharded run: as a user runs it, and what its state is."""

from __future__ import annotations

import re
import sys

import jax
import numpy as np
import pytest
from test_examples import example

from support import EXAMPLES, run_example


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_train_fsdp_as_a_user_runs_it(policy, tmp_path):
    """It makes its own eight devices of a CPU, each of which has an eighth of everything."""
    options = ("--size", "tiny", "--steps", "40", "--policy", policy)
    result = run_example("train_fsdp.py", *options, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    said = rf"importing .*{policy}: initializing .*{policy}: compiling .*40/40"
    assert re.search(said, result.stderr, re.DOTALL)
    out = result.stdout
    count, bytes_here = re.search(
        rf"{policy}: ([\d,]+) parameters over 8 devices \(\w+\), 16 sequences a step\n"
        r"compiled in \d+ s; bytes per device: train state ([\d,]+), temporary [\d,]+",
        out,
    ).groups()
    # A parameter and two moments, of which none but scalars is whole on any device.
    everything = 12 * int(count.replace(",", ""))
    assert 0 <= int(bytes_here.replace(",", "")) - everything / 8 < 64
    losses = [
        float(x) for x in re.findall(r"^step +\d+  loss (\S+)  [\d,]+ tokens/s$", out, re.MULTILINE)
    ]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_train_fsdp_keeps_its_state_in_pieces(monkeypatch, capsys):
    script = example("train_fsdp", monkeypatch)
    size = script.SIZES["tiny"]._replace(width=16, length=16)

    def train(policy):
        return script.train(policy, size, steps=3, batch=1, microbatches=2, seed=0)

    state, losses = train("mixed_bfloat16")
    mesh = state.params["Embed_0"]["embedding"].sharding.mesh
    assert mesh.size == 8
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        assert x.sharding.is_equivalent_to(script.split(mesh, x), x.ndim), path
        assert x.sharding.is_fully_replicated == (x.ndim == 0), path
    assert len(losses) == state.step == 3

    # 2^-8 is what rounding to bfloat16 is worth, and a mean of losses is no worse.
    _, full = train("float32")
    assert losses != full
    np.testing.assert_allclose(losses, full, rtol=2**-8)


@pytest.mark.parametrize("option", ["--steps", "--batch", "--microbatches"])
def test_train_fsdp_refuses_what_cannot_run(option, monkeypatch, capsys):
    script = example("train_fsdp", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py", option, "0"])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_train_fsdp_names_a_precision_once():
    """But for the policies' names, float32 stands in it only where the loss is computed."""
    code = (EXAMPLES / "train_fsdp.py").read_text().split('"""', 2)[2]
    code = code.replace('"mixed_bfloat16"', "")
    found = re.findall(r"\w*float\d+|bf16|f32|f16", re.sub(r"#.*", "", code))
    assert found == ["float32"]
