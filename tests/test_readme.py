"""README: its programs run as pasted, its commands from a clone, and its output names versions."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp

from doc_blocks import blocks, run
from support import contraction_dtypes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = [block.text for block in blocks(README) if block.runs]


def test_every_fenced_block_is_a_program_or_output():
    assert {block.language for block in blocks(README)} == {"python", "text"}
    assert len(PROGRAMS) == 7


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.split("\n\n")[1][:20])
def test_each_program_runs_alone(program):
    run(program, {"__name__": "readme"})


def test_the_programs_run_one_after_the_other(capsys):
    scope: dict = {"__name__": "readme"}
    for program in PROGRAMS:
        run(program, scope)
    out = capsys.readouterr().out
    assert "bfloat16" in out, "the audit of the first"
    assert "65536.0 0 True" in out, "the state of the scaler"
    assert "overflow: 1.28e+05 in float32" in out, "what diagnose found"
    assert {str(x.dtype) for x in jax.tree.leaves(scope["grads"])} == {"float32"}
    assert scope["loss"].dtype == "float32"


def test_what_the_first_program_trains_is_parameters():
    """Copied to a model with BatchNorm, it must not train the averages."""
    scope = run(PROGRAMS[0], {"__name__": "readme"})
    assert "params" not in scope["state"].params
    assert scope["params"] is scope["variables"]["params"]


def test_the_8_bit_program_prints_what_is_said(capsys):
    run(PROGRAMS[1], {"__name__": "readme"})
    assert f"```text\n{capsys.readouterr().out}```" in README


def test_the_policy_map_fits_the_model_beside_it():
    scope = run(PROGRAMS[2], {"__name__": "readme"})
    model, variables = scope["model"], scope["variables"]
    dtypes = contraction_dtypes(model.apply, variables, jnp.ones((4, 8)))
    # block_0 and the routers and the head are float32; the other block's layer is not.
    assert dtypes == {"float32": 4, "bfloat16": 1}


def test_the_nnx_program_keeps_its_averages():
    scope = run(PROGRAMS[5], {"__name__": "readme"})
    assert isinstance(scope["model"], nnx.Module)
    assert not np.allclose(scope["model"].norm.mean[...], 0)
    assert float(jaxmp.loss_scale(scope["optimizer"].opt_state)) == 2.0**16


def test_installation_is_from_a_clone():
    """The package is on no index."""
    assert "jaxmp[" not in README
    installs = re.findall(r"pip install\s+(.*?)[`\n]", README)
    assert installs
    assert all(arguments.startswith("-e ") for arguments in installs)


def test_the_files_that_commands_name_exist():
    for file in re.findall(r"\b((?:examples|benchmarks|docs)/\w+\.\w+)", README):
        assert (ROOT / file).exists(), file


def test_output_names_the_version_that_printed_it():
    for block in blocks(README):
        assert block.language != "text" or "JAX 0.12" in block.above[-50:]


def test_the_cures_of_the_limits_are_programs():
    a = jnp.full((4, 8), 1.001)

    def full(a):
        return jaxmp.full_precision(jnp.matmul)(a, a.T)

    low = jaxmp.autocast(full, "mixed_bfloat16")
    np.testing.assert_array_equal(low(a), full(a))
    assert "jaxmp.full_precision(jnp.matmul)(a, b)" in README
    assert contraction_dtypes(low, a) == {"float32": 1}

    def step(x, w):
        return x - 1e-3 * (x @ w)

    def euler(x, w):
        for _ in range(100):
            x = jaxmp.full_precision(step)(x, w)
        return x

    x, w = jnp.ones((1, 4)), jnp.eye(4)
    np.testing.assert_allclose(jaxmp.autocast(euler, "mixed_bfloat16")(x, w), 0.999**100, rtol=1e-5)
    assert "jaxmp.full_precision(step)" in README
