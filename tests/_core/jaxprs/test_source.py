"""Whose line it is, wherever JAX is installed and whatever a project's folder is called."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from jaxmp._core.jaxprs import source

from constructs import BF16, W, X
from support import ROOT, contraction_dtypes, run_python, slow_when

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


# A project's folder, in one of its own, and how its libraries are found: where they are installed,
# in a folder of links, or behind a link to that. None: beside them.
CASES = [
    ("numpy/jax", "libs"),
    ("project", "linked"),
    ("jax_experiments", ""),
    ("flax", ""),
    ("numpy/jax", ""),
    ("site-packages-of-mine", ""),
    (None, "libs"),
]


@slow_when(lambda name, path: (name, path) != CASES[0])
@pytest.mark.parametrize(("name", "path"), CASES)
def test_lines_are_those_of_the_project(name, path, libraries, tmp_path, monkeypatch):
    (tmp_path / "linked").symlink_to(libraries)
    path = {"libs": libraries, "linked": tmp_path / "linked", "": None}[path]
    found = run(tmp_path / name if name else libraries, path, monkeypatch)
    # Otherwise this tests nothing.
    assert path is None or found["jax"].startswith(f"{path}{os.sep}")
    assert set(found["product"]) == {line_of("product")}
    assert set(found["model"]) == {line_of("model")}
    assert all(source.startswith("train.py:") for source in found["all"])


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


# Whose conversion it is: by where a function is, not by its name alone.

LOW = jax.device_put(np.asarray(X, jnp.bfloat16))


def promote_dtype(x):
    """A user's own helper: it upcasts because its author wants float32."""
    return x.astype(jnp.float32)


def widen(x):
    return jnp.asarray(x, jnp.float32)


def test_a_users_helper_keeps_its_upcast_whatever_its_name() -> None:
    for helper in (promote_dtype, widen):
        fn = jaxmp.autocast(lambda x, w, helper=helper: helper(x) @ w, BF16)
        assert contraction_dtypes(fn, LOW, W) == {"float32": 1}


def test_a_users_file_named_as_ours_is_the_users(tmp_path) -> None:
    """`marks.widen` is jaxmp's only in jaxmp's own file."""
    path = tmp_path / "flax" / "marks.py"
    path.parent.mkdir()
    source = "def widen(x):\n    return x.astype('float32')\npromote_dtype = widen\n"
    scope: dict = {}
    exec(compile(source, str(path), "exec"), scope)
    fn = jaxmp.autocast(lambda x, w: scope["widen"](x) @ w, BF16)
    assert contraction_dtypes(fn, LOW, W) == {"float32": 1}


def test_flax_promotes_and_does_not_upcast() -> None:
    """Its layers widen a 16-bit input to their parameters' dtype: nobody asked for float32."""
    linen, params = nn.Dense(4), nn.Dense(4).init(jax.random.key(0), X)
    assert contraction_dtypes(jaxmp.autocast(linen.apply, BF16), params, LOW) == {"bfloat16": 1}
    dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    assert contraction_dtypes(jaxmp.autocast(lambda x: dense(x), BF16), LOW) == {"bfloat16": 1}


@pytest.mark.parametrize("file", ["run/ipykernel_12/345678.py", "<ipython-input-3-0a1b2c3d>"])
def test_a_line_of_a_notebook_is_the_users(file) -> None:
    """Its file has a number for a name, or none."""
    scope: dict = {}
    source = "import jax.numpy as jnp\n\ndef fn(w, x):\n    return jnp.tanh(x @ w)\n"
    exec(compile(source, file, "exec"), scope)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    rows = jaxmp.explain(scope["fn"], "mixed_bfloat16")(x, x).rows
    assert {row.source for row in rows} == {"cell:4"}
    asks = "import jaxmp\n\njaxmp.autocast(fn, 'mixed_bfloat16,ops=tanhh:compute')(x, x)\n"
    with pytest.warns(UserWarning, match="tanhh") as caught:
        exec(compile(asks, file, "exec"), {**scope, "x": jnp.ones((8, 8))})
    assert [warning.filename for warning in caught] == [file]
