"""The command line: whose mistake it is, and what is printed of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp import cli
from jaxmp.devices import chips

PROGRAM = """
import jax, jax.numpy as jnp
import numpy as np

x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

def product(x, w):
    return x @ w

def make():
    return product, (x, x)

def make_list():
    return product, [x, x]

def step(x, *, learning_rate=0.1):
    return x * learning_rate

def no_arguments():
    return jnp.ones(3)

def only_the_function():
    return product

def array_for_arguments():
    return product, np.ones((2, 8, 8), np.float32)

def one_struct():
    return step, x

def dictionary():
    return product, {"x": x, "w": x}

def three():
    return product, x, x

table = {"a": 1}
without_a_signature = dict

def model_of_the_user():
    def fn(x):
        raise ValueError("the user's own mistake")
    return fn, (x,)

def shapes_that_differ():
    return product, (x, jax.ShapeDtypeStruct((7, 8), jnp.float32))

def too_few():
    return product, (x,)

def factory_that_fails():
    raise TypeError("while the factory ran")

def wrong_policy_inside():
    import jaxmp
    return jaxmp.autocast(product, "mixed_bflaot16"), (x, x)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(PROGRAM)
    (folder / "imports_nothing_there.py").write_text("import nothing_there\n")
    (folder / "attribute_at_import.py").write_text("import json\njson.no_such_function\n")
    (folder / "fails_at_import.py").write_text("raise ValueError('at import')\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    return folder


@pytest.fixture
def audit(folder, monkeypatch, capsys):
    """`python -m jaxmp audit FUNCTION` in the folder of a project: its exit code and messages."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in ("train", "imports_nothing_there", "attribute_at_import", "fails_at_import"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(function, *options, command="audit"):
        code = cli.main([command, function, *options])
        return code, capsys.readouterr()

    return run


def test_a_factory_works(audit):
    for function in ("train:make", "train:make_list"):
        code, printed = audit(function)
        assert code == 0
        assert "matmul or convolution in float32" in printed.out
        assert not printed.err
    assert audit("train:make", "--fail-on", "float32-product")[0] == 1
    assert audit("train:make", "--policy", "mixed_bfloat16", "--fail-on", "float32-product")[0] == 0
    _, printed = audit("train:make", "--json")
    assert json.loads(printed.out)["product_flops"]["forward"]["float32"] > 0


TAKES = r"a function without arguments that returns \(fn, args\)"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("train", "write module:function, .*; got 'train'"),
        ("train:", "write module:function"),
        (":make", "write module:function"),
        ("train.py:make", "write module:function.*got 'train.py:make'.*as in 'train:make'"),
        ("./train:make", "write module:function.*as in 'train:make'"),
        ("train:Model.make", "write module:function, [^;]*; got 'train:Model.make'$"),
        ("nowhere:make", "cannot find 'nowhere:make': there is no module 'nowhere'"),
        ("package.nowhere:make", "there is no module 'package.nowhere'"),
        ("train.nowhere:make", "cannot find 'train.nowhere:make'"),
        ("train:mak", r"the module 'train' has no 'mak' \(did you mean 'make'\?\)"),
        # The function itself instead of one that returns it.
        ("train:product", rf"train:product takes arguments, \(x, w\); name {TAKES}"),
        ("train:step", rf"train:step takes arguments, .*; name {TAKES}.*return step, \(…,\)"),
        ("train:no_arguments", "train:no_arguments returned .*Array.*; it must return"),
        ("train:only_the_function", "returned the function 'product' alone; it must return"),
        ("train:table", rf"train:table is a dict; name {TAKES}"),
        ("train:x", "train:x is a ShapeDtypeStruct; name"),
        ("train:array_for_arguments", "its arguments in a .*ndarray; .*a tuple"),
        ("train:one_struct", r"its arguments in a ShapeDtypeStruct; .*a tuple: \(fn, \(x,\)\)"),
        ("train:dictionary", "its arguments in a dict"),
        ("train:three", r"returned a tuple of 3; it must return \(fn, args\)"),
        ("train:without_a_signature", "returned a dict"),
        ("json", "write module:function"),
    ],
)
def test_what_is_no_factory_is_told_in_one_line(audit, function, message):
    code, printed = audit(function)
    assert code == 2
    assert printed.err.startswith("jaxmp: ")
    assert "\n" not in printed.err.strip()
    assert re.search(message, printed.err), printed.err


def test_what_jaxmp_refuses_is_told_in_one_line(audit):
    for options, message in (
        (["--policy", "mixed_bflaot16"], "mixed_bfloat16"),
        (["--policy", "p=f32,c=f64,o=f32"], "compute"),
        (["--target", "gpu-h10"], "gpu-h100"),
    ):
        code, printed = audit("train:make", *options)
        assert code == 2
        assert message in printed.err
        assert len(printed.err.strip().splitlines()) == 1


def test_what_the_users_code_raises_keeps_its_traceback(audit):
    for function, error in (
        ("train:model_of_the_user", ValueError),
        ("train:shapes_that_differ", TypeError),
        ("train:too_few", TypeError),
        ("train:factory_that_fails", TypeError),
        ("train:wrong_policy_inside", ValueError),  # the line to mend is the user's
        ("imports_nothing_there:make", ModuleNotFoundError),
        ("attribute_at_import:make", AttributeError),
        ("fails_at_import:make", ValueError),
    ):
        with pytest.raises(error):
            audit(function)


@pytest.mark.parametrize("command", ["", "audit", "preflight", "validate", "devices"])
def test_help_has_an_example_that_parses(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as error:
        cli.main([*command.split(), "--help"])
    assert error.value.code == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 100 for line in printed.splitlines())
    if command:
        example = printed.partition("example (")[2].partition("\n")[2].replace("\\\n", " ")
        python, m, name, *arguments = shlex.split(example)
        assert (python, m, name, arguments[0]) == ("python", "-m", "jaxmp", command)
        cli._parser().parse_args(arguments)


def test_commands_kinds_of_findings_and_versions_are_listed(capsys):
    assert cli.main([]) == 2
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("audit", "preflight", "validate", "devices"))
    with pytest.raises(SystemExit):
        cli.main(["audit", "--help"])
    printed = "".join(capsys.readouterr().out.split())  # lines are broken after hyphens, too
    assert "float32-product" in printed
    assert "intended-float32" in printed
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert f"jax {jax.__version__}" in capsys.readouterr().out


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "describe", stopped)
    assert cli.main(["devices"]) == 130
    assert capsys.readouterr().err == "\njaxmp: stopped\n"
    monkeypatch.setattr(cli, "validate", stopped)
    options = ["--policy", "bfloat16", "--steps", "1", "--out", "x"]
    assert cli.main(["validate", "os.path:join", *options]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["devices"]) == 141
    assert not capsys.readouterr().err


def test_intended_products_do_not_fail_a_check(audit, monkeypatch):
    def make():
        x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        return (lambda w, x: jnp.dot(x, w, precision="highest") @ w), (x, x)

    monkeypatch.setitem(sys.modules, "exact", types.SimpleNamespace(make=make))
    options = ["--policy", "mixed_bfloat16", "--fail-on"]
    assert audit("exact:make", *options, "float32-product")[0] == 0
    assert audit("exact:make", *options, "intended-float32")[0] == 1


def test_devices_and_of_which_there_are_figures(capsys):
    assert cli.main(["devices"]) == 0
    assert "no figures for it, only for TPUs and GPUs in the table" in capsys.readouterr().out
    assert cli.main(["devices", "--json"]) == 0
    platform = json.loads(capsys.readouterr().out)[0]["platform"]
    assert platform == jax.local_devices()[0].platform


def test_policies_are_named_as_by_the_other_commands():
    """Each one after --policy, or several after one."""
    rest = ["--steps", "1", "--out", "x"]
    for words in (["--policy", "a", "b"], ["--policy", "a", "--policy", "b"]):
        args = cli._parser().parse_args(["validate", "m:f", *words, *rest])
        assert args.policy == ["a", "b"]


def test_the_table_of_chips_is_nobodys_to_change():
    chips()["gpu-t4"]["tflops"]["bfloat16"] = 1e9
    chips().pop("tpu-v5e")
    assert "bfloat16" not in chips()["gpu-t4"]["tflops"]
    assert "tpu-v5e" in chips()


def test_an_audit_of_another_policy_than_the_one_asked_for_fails(audit, monkeypatch):
    """A model that a switch of its configuration has wrapped under float32."""

    def make(policy="float32"):
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return jaxmp.wrap(jnp.matmul, policy), (x, x)

    monkeypatch.setitem(sys.modules, "wrapped", types.SimpleNamespace(make=make))
    with pytest.warns(UserWarning, match="decides no product here"):
        code, printed = audit("wrapped:make", "--policy", "mixed_bfloat16")
    assert code == 1
    assert "1. policy that decides nothing, 100.0% of the FLOPs" in printed.out
    assert audit("wrapped:make")[0] == 0
