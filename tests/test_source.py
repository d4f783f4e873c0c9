"""Whose line it is, wherever JAX is installed and whatever a project's folder is called."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

from jaxmp._jaxprs import source

from support import ROOT, run_python, slow_when

# What JAX needs to be imported, and what jaxmp does.
LINKED = ("jax", "jaxlib", "flax", "optax", "jmp", "numpy", "numpy.libs", "ml_dtypes")

PROGRAM = """
import json

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmp


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)  # model


def product(x, w):
    x = jnp.where(x > 0, x, 0.0)
    return jnp.sum(x @ w)  # product


x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
params = jax.eval_shape(Model().init, jax.random.key(0), x)
audited = jaxmp.audit(product)(x, x).operations
explained = jaxmp.explain(jax.grad(product), "mixed_bfloat16")(x, x).rows
in_flax = jaxmp.audit(Model().apply)(params, x).operations
print(json.dumps({
    "jax": jax.__file__,
    "product": [op.source for op in (*audited, *explained) if op.op == "dot_general"],
    "model": [op.source for op in in_flax if op.op == "dot_general"],
    "all": [op.source for op in (*audited, *explained)],
}))
"""


def line_of(text):
    [line] = [i for i, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# {text}")]
    return f"train.py:{line}"


def check(found):
    assert set(found["product"]) == {line_of("product")}
    assert set(found["model"]) == {line_of("model")}
    assert all(source.startswith("train.py:") for source in found["all"])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A folder with the libraries in it, as links."""
    folder = tmp_path_factory.mktemp("links") / "libs"
    folder.mkdir()
    home = Path(importlib.util.find_spec("jax").origin).parents[1]
    for name in LINKED:
        if (home / name).exists():
            (folder / name).symlink_to(home / name)
    return folder


def run(project, libraries, monkeypatch):
    project.mkdir(parents=True, exist_ok=True)
    (project / "train.py").write_text(PROGRAM)
    path = filter(None, (str(libraries or ""), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    ran = run_python("train.py", folder=project)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_jax_on_the_python_path(libraries, tmp_path, monkeypatch):
    found = run(tmp_path / "project", libraries, monkeypatch)
    assert found["jax"].startswith(f"{libraries}{os.sep}")  # otherwise this tests nothing
    check(found)


@pytest.mark.slow
def test_jax_behind_a_linked_folder(libraries, tmp_path, monkeypatch):
    (tmp_path / "linked").symlink_to(libraries)
    found = run(tmp_path / "project", tmp_path / "linked", monkeypatch)
    assert found["jax"].startswith(f"{tmp_path / 'linked'}{os.sep}")
    check(found)


@slow_when(lambda name: name != "numpy/jax")
@pytest.mark.parametrize("name", ["jax_experiments", "flax", "numpy/jax", "site-packages-of-mine"])
def test_a_project_whose_name_is_that_of_a_library(name, tmp_path, monkeypatch):
    check(run(tmp_path / name, None, monkeypatch))


@pytest.mark.slow
def test_a_project_beside_the_libraries(libraries, monkeypatch):
    check(run(libraries, libraries, monkeypatch))


def test_a_library_that_is_loaded_later_is_known_then(tmp_path, monkeypatch):
    """Equinox, say, where it is not installed but on the path."""

    package = tmp_path / "equinox"
    monkeypatch.delitem(sys.modules, "equinox", raising=False)
    assert not source.in_library(str(package / "__init__.py"))
    module = types.ModuleType("equinox")
    module.__path__ = [str(package)]
    monkeypatch.setitem(sys.modules, "equinox", module)
    assert source.in_library(str(package / "__init__.py"))
    assert not source.in_library(f"{package}_of_mine/model.py")
    assert source.in_library(str(ROOT / "jaxmp" / "cli.py"))
    assert not source.in_library(str(ROOT / "examples" / "train_lm.py"))
