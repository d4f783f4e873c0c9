"""What validate says: the table, JSON, Markdown, pictures; the command line and the examples."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from validate_kit import batches, faulty, make_step, simulated, validate

from jaxmp import cli
from jaxmp._tools.validate import numerics as validate_numerics
from jaxmp._tools.validate.report import ValidationReport
from jaxmp._tools.validate.verdict import FAILS, PASSES, percent

from support import EXAMPLES, ROOT, cpu_environment, one_line, run_example, run_python

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


POLICIES = {"scaled": "mixed_float16", "not scaled": ("mixed_float16", False)}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of float16 with gradients of about 1e-9, below its range: with and without scaling."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.warns(UserWarning, match="the optimizer has no loss scale"):
        return validate(make_step, POLICIES, 50, 2, batches=batches, out=folder)


def test_float16_needs_its_loss_scaled_and_the_table_says_so(report):
    assert report["scaled"].verdict == PASSES
    assert report["not scaled"].verdict == FAILS
    assert "every gradient is exactly zero in 100% of the steps" in one_line(report)
    assert report["scaled"].runs[0].loss_scales[0] == 2.0**16
    with pytest.raises(KeyError, match=r"no policy 'float16'.*'scaled', 'not scaled'"):
        report["float16"]
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("Against float32: 50 steps, seeds 0, 1, final loss of training.")
    assert re.fullmatch(r"float32 against itself: \S+% by seed, \S+% with its .*floor.\.", lines[1])
    [head, base, scaled, not_scaled] = lines[3:7]
    names = "policy, final loss, difference ± noise, gradient norm, curve, skipped, verdict"
    assert head.split() == names.replace(",", "").split()
    assert base.split()[0] == "float32"
    assert scaled.endswith("  0  passes")
    assert not_scaled.endswith("  0  fails")
    assert f"JAX {jax.__version__}" in one_line(report)
    assert "backend: cpu" in one_line(report)
    numbers = {0.0: "+0.00%", 0.5: "+50.00%", -0.00004: "-0.004%", float("nan"): "not finite"}
    assert list(map(percent, numbers)) == list(numbers.values())
    text = report.to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 5
    assert "* not scaled: fails: " in text


def test_json(report):
    data = json.loads(json.dumps(report.to_dict()), parse_constant=pytest.fail)
    assert data["failed"] is True
    assert [policy["verdict"] for policy in data["policies"]] == [PASSES, FAILS]
    assert len(data["policies"][0]["runs"][0]["losses"]) == 50
    assert len(data["perturbed_runs"]) == 2
    short = json.loads(json.dumps(report.to_dict(runs=False)))
    assert "runs" not in short["policies"][0]
    assert "reference_runs" not in short
    late = functools.partial(faulty, fault=lambda _, i: {"loss": np.nan} if i >= 30 else {})
    data = json.loads(json.dumps(validate(late).to_dict()), parse_constant=pytest.fail)
    assert data["policies"][0]["final_loss"] is None


def test_the_picture(report, tmp_path, monkeypatch):
    report.plot(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    assert len(content) < 150_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="python -m pip install matplotlib"):
        report.plot("a.png")


@pytest.mark.slow
def test_pictures_of_odd_runs(tmp_path):
    """Curves that end early, start with NaN, are negative or never finite; one seed, one step."""

    def losses(loss, i):
        return {"loss": np.nan if i < 3 else -loss, "loss_scale": 2.0, "finite": i > 2}

    for k, (making, steps) in enumerate(
        [
            (functools.partial(faulty, fault=lambda _, i: {"loss": np.nan}), 200),
            (functools.partial(simulated, metrics=losses), 40),
            (simulated, 1),
        ]
    ):
        validate(making, steps=steps, seeds=1).plot(tmp_path / f"{k}.png")
        assert (tmp_path / f"{k}.png").read_bytes().startswith(PNG_SIGNATURE)


def test_it_says_whose_numerics_they_are(monkeypatch):
    jax.devices()  # these flags do not exist: the backend has to have started
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_allow_excess_precision=false")
    with jax.default_matmul_precision("highest"):
        numerics = validate_numerics.describe_numerics()
    assert numerics["excess precision"] == "off (XLA_FLAGS)"
    assert numerics["matmul precision"] == "highest"
    assert numerics["XLA_FLAGS"].startswith("--xla_a=1")
    monkeypatch.delenv("XLA_FLAGS")
    numerics = validate_numerics.describe_numerics()
    assert numerics["excess precision"].startswith("allowed")
    assert any("excess precision" in line for line in validate_numerics.remarks_on(numerics))
    tpu = validate_numerics.remarks_on(numerics | {"backend": "tpu"})
    assert any("one bfloat16 pass" in line for line in tpu)
    precise = numerics | {"backend": "tpu", "matmul precision": "highest"}
    assert not any("one bfloat16 pass" in x for x in validate_numerics.remarks_on(precise))


# The command line, and its progress.

PROGRAM = """
from validate_kit import simulated

def by_name(policy, seed):
    return simulated({"float32": 0.0, "mixed_float16": 0.001, "float16": 0.1}[policy], seed)
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`python -m jaxmp validate …` in a folder with a program: its exit code and messages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program_to_validate.py").write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "program_to_validate", raising=False)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # and back again, after it

    def run(function, *options):
        options = (*options, "--steps", "20", "--seeds", "2", "--out", "runs", "--key", "1")
        code = cli.main(["validate", f"program_to_validate:{function}", *options])
        return code, capsys.readouterr()

    return run


def test_the_command_line(command, tmp_path, monkeypatch):
    monkeypatch.setattr(ValidationReport, "plot", lambda self, path: path.touch())
    code, printed = command("by_name", "--policy", "mixed_float16")
    assert code == 0
    assert "mixed_float16  " in printed.out
    assert {path.name for path in (tmp_path / "runs").glob("report.*")} == {
        "report.json",
        "report.md",
        "report.png",
    }
    assert (tmp_path / "runs" / "report.md").read_text().startswith("Against float32: 20 steps")
    code, printed = command("by_name", "--policy", "mixed_float16", "float16", "--json")
    assert code == 1
    assert json.loads(printed.out)["failed"] is True
    if flag := validate_numerics.with_cpu_sums(""):
        assert flag in os.environ["XLA_FLAGS"].split()


def test_the_command_line_is_strict_if_asked(command, monkeypatch):
    module = types.ModuleType("program_to_validate")
    module.ignoring = lambda policy, seed: simulated("float32", seed)
    seeds = []
    module.batches = lambda seed: seeds.append(seed) or range(20)
    monkeypatch.setitem(sys.modules, "program_to_validate", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = ("--policy", "float16", "--batches", "program_to_validate:batches")
    assert command("ignoring", *options)[0] == 0
    assert seeds == [0, 1, 0, 1, 0, 1], "float32, perturbed, float16"
    assert not Path("runs/report.png").exists()
    code, printed = command("ignoring", *options, "--strict")
    assert code == 1
    assert "proves nothing" in printed.out


def test_mistakes_on_the_command_line_are_told_in_one_line(command):
    written = r"write module:function, make_step\(policy, seed\)"
    for function, policy, message in (
        ("nothing", "float16", "has no 'nothing'"),
        ("PROGRAM.x", "float16", written),
        ("by_name", "flaot16", "float16"),
        ("by_name", "float32", "is what the others are compared with"),
    ):
        code, printed = command(function, "--policy", policy)
        assert code == 2
        assert re.search(message, printed.err)
        assert len(printed.err.strip().splitlines()) == 1


def test_progress_is_a_bar_on_stderr_unless_it_is_not_wanted(capsys):
    validate(seeds=1)
    assert re.search(r"it, seed 0: 100%.* 120/120 .*steps/s", capsys.readouterr().err)
    validate(seeds=1, progress=False)
    assert not capsys.readouterr().err


def test_progress_is_a_line_for_each_run_without_tqdm(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    validate(seeds=1)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].endswith("seed 0: 0/120 steps")
    assert re.fullmatch(r".*it, seed 0: \d+/120 steps", printed[-1])
    validate(seeds=1, progress=False)
    assert not capsys.readouterr().err


# The examples.


@pytest.mark.slow
def test_the_example_of_the_documentation(tmp_path):
    [code] = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/validation.md").read_text(), re.DOTALL
    )
    (tmp_path / "example.py").write_text(code + "assert report.passed\n")
    result = run_python("example.py", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "mixed_float16: passes" in result.stdout


@pytest.mark.slow
def test_validate_digits(tmp_path):
    result = run_example("validate_digits.py", "--out", "runs", "--seeds", "3", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    data = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert {policy["label"]: policy["verdict"] for policy in data["policies"]} == {
        "mixed_bfloat16": PASSES,
        "mixed_float16, loss scaled": PASSES,
        "mixed_float16, loss not scaled": FAILS,
    }
    assert "gradients underflow" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_validate_lm(tmp_path):
    env = cpu_environment()
    command = [
        *(sys.executable, "-m", "jaxmp", "validate", "validate_lm:make_step"),
        *("--batches", "validate_lm:batches", "--policy", "mixed_bfloat16", "mixed_float16"),
        *("--steps", "20", "--seeds", "1", "--out", str(tmp_path)),
    ]
    done = subprocess.run(
        command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(PNG_SIGNATURE)
