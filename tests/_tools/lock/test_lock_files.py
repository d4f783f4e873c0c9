"""The commands, the fixture, and files that are not locks."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import pytest

from jaxmp import cli
from jaxmp.testing import assert_precision_locked

from support import ROOT

PROGRAM = """
import jax, jax.numpy as jnp

x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)

def loss(params, x):
    h = jnp.tanh(x @ params["hidden"])
    return jnp.mean(h @ params["head"])

def make():
    return jax.grad(loss), ({"hidden": x, "head": x}, x)
"""
FAULT = ('x @ params["hidden"]', 'x @ params["hidden"].astype(jnp.float32)')


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`python -m jaxmp lock` in the folder of a project: its exit code and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(*options, program=PROGRAM):
        monkeypatch.delitem(sys.modules, "train", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        (tmp_path / "train.py").write_text(program)
        return cli.main(["lock", "train:make", *options]), capsys.readouterr()

    yield run
    sys.modules.pop("train", None)


def test_a_newcomers_path(run, tmp_path):
    code, printed = run()
    assert (code, printed.err) == (0, "")
    assert printed.out.startswith("precision.lock: 3 modules. Commit it")
    text = (tmp_path / "precision.lock").read_text("utf-8")
    assert run("--check")[0] == 0

    code, printed = run("--check", program=PROGRAM.replace(*FAULT))
    assert code == 1
    assert "First in the program: hidden, forward.casts at train.py:7." in printed.out
    assert "was bfloat16*bfloat16 -> bfloat16\n" in printed.out
    assert (tmp_path / "precision.lock").read_text("utf-8") == text

    code, printed = run("--update", program=PROGRAM.replace(*FAULT))
    assert code == 0
    assert "hidden" in printed.out
    assert run("--check", program=PROGRAM.replace(*FAULT))[0] == 0
    assert run("--check")[0] == 1


def test_a_file_is_not_written_over(run):
    run("--out", "a.lock")
    code, printed = run("--out", "a.lock")
    assert code == 2
    assert "a.lock: compare with it by --check, rewrite it by --update" in printed.err


def test_what_is_no_lock_is_refused_and_left_as_it_is(run, tmp_path):
    file = tmp_path / "precision.lock"
    for text, said in (
        ("[project]\nname = 'x'\n", "is not a precision lock of jaxmp"),
        ("<<<<<<< HEAD\nprecision_lock = 1\n", "cannot read .*precision.lock: Invalid"),
        ("precision_lock = 1\nmodule = 3\n", "is damaged in line 2: module = 3 must be a dict"),
        (
            "precision_lock = 1\n[module.a]\nsaved = [3]\n",
            "damaged in line 3: module.a.saved has 3",
        ),
        ("precision_lock = 1\n[arguments]\n0 = 3\n", "arguments.0 = 3 must be a str"),
        ("precision_lock = 1\nother = 3\n", "'other' is not a part of a lock"),
        ('precision_lock = 1\n[module."a_{0-1}"]\n[module.a_1]\n', "'a_1' is in it twice"),
    ):
        file.write_text(text)
        for option in ("--check", "--update"):
            code, printed = run(option)
            assert code == 2
            assert "precision.lock" in printed.err
        with pytest.raises(ValueError, match=said):
            assert_precision_locked(jnp.sin, file)(1.0)
        assert file.read_text() == text


def test_another_version_is_refused_and_rewritten(run, tmp_path):
    file = tmp_path / "precision.lock"
    file.write_text("precision_lock = 2\n")
    code, printed = run("--check")
    assert code == 2
    assert "precision.lock has the format 2, and this jaxmp reads 1" in printed.err
    assert run("--update")[0] == 0
    assert run("--check")[0] == 0


def test_wrong_uses(run):
    for options, said in (
        (("--check",), "there is no file precision.lock. Write it with"),
        (("--out", "nowhere/x.lock"), "cannot write nowhere/x.lock: No such file"),
        (("--policy", "mixed_bflaot16"), "did you mean 'mixed_bfloat16'?"),
    ):
        code, printed = run(*options)
        assert code == 2
        assert said in printed.err
    with pytest.raises(TypeError, match="lock"):
        assert_precision_locked("x.lock", jnp.sin)
    with pytest.raises(SystemExit):
        run("--check", "--update")


@pytest.mark.slow
def test_the_lock_of_the_example_is_that_of_its_step(monkeypatch, capsys):
    """As a user's CI has it."""
    monkeypatch.chdir(ROOT / "examples")
    assert cli.main(["lock", "lm_step:small", "--check"]) == 0, capsys.readouterr().out


def test_the_fixture(tmp_path, monkeypatch, capsys):
    """Two runs of pytest, the first of which writes a file."""
    step = "    precision_lock(lambda x: x @ x, {file!r})(jnp.ones((4, 4), {dtype!r}))\n"
    checks = {"none": ("y.lock", "float32"), "same": ("x.lock", "bfloat16")}
    checks["other"] = ("x.lock", "float32")

    def write(name, tests):
        body = (
            f"def test_{test}(precision_lock):\n{step.format(file=file, dtype=dtype)}"
            for test, (file, dtype) in tests.items()
        )
        (tmp_path / name).write_text("import jax.numpy as jnp\n" + "".join(body))

    write("test_write.py", {"write": ("x.lock", "bfloat16")})
    write("test_check.py", checks)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["jaxmp.pytest_plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:faulthandler\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "conftest", raising=False)  # and put back after the test
    plain = ["-q", "-p", "no:cacheprovider"]
    assert pytest.main([*plain, "--update-precision-locks", "test_write.py"]) == 0
    assert (tmp_path / "x.lock").exists()
    assert pytest.main([*plain, "test_check.py"]) == 1
    said = capsys.readouterr().out
    assert "2 failed, 1 passed" in said
    assert "there is no file" in said
    assert "float32*float32" in said
