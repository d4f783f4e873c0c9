"""The house's rules: what the root exports, what imports what, what an import loads."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from half_private import HOMES, read_in

import jaxmp

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "jaxmp").rglob("*.py"))

# From the bottom up: a module imports only from those before it, and is of the longest name here
# that it begins with.
ORDER = """
    _core.printable _core.policy_keys devices formats _core.products.scaled
    _core.products.packed dtypes
    _core.weight_format _core.host_memory _core.chips _core.flax _core.flax_classes _core.jaxprs
    _core.quantized_array _core.quantized_parts tree recipes _core.speed policy_fields policy
    policies checkpoint_policies _core.quantize quantized _core.plan _core.execute _core.products
    _core.decide _core.passes _core.autocast _training _modules loss_scaling losses
    _tools.screen _tools.files _tools.arguments _tools.progress _tools.speed _tools.explain
    _tools.audit _tools.lock _tools.preflight _tools.numerics _tools.validate _tools.tune
    _tools.parity _tools.command_functions numerics testing pytest_plugin cli __main__
"""
LAYERS = ORDER.split()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file; names taken from packages too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@functools.cache
def own_imports(name: str) -> set[str]:
    """The modules of jaxmp that one of them imports; a submodule counts instead of its package."""
    found = imports(MODULES[name]) & MODULES.keys()
    return {m for m in found if not any(other.startswith(f"{m}.") for other in found)} - {name}


def test_the_root_exports_these_names():
    names = """
        Policy PolicyLike PolicyMap TrainState __version__ accumulate_gradients audit
        autocast checkpoint_policies dequantize devices diagnose dtypes dynamic_loss_scale
        explain full_precision get_policy loss_scale_for loss_scaling losses
        master_weights numerics parity policies preflight prepare quantize quantized
        recipes reduced_precision static_loss_scale store_state testing tree tune validate
        value_and_grad wrap
    """
    assert jaxmp.__all__ == names.split()


def test_all_is_sorted_and_exists():
    for name in MODULES:
        __import__(name)
        module = sys.modules[name]
        exported = getattr(module, "__all__", [])
        assert list(exported) == sorted(exported), name
        assert all(hasattr(module, export) for export in exported), name


def test_the_root_has_no_public_name_that_it_does_not_export_and_each_has_an_example():
    modules = {n for n in jaxmp.__all__ if inspect.ismodule(getattr(jaxmp, n))}  # loads them all
    public = {
        name
        for name, value in vars(jaxmp).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | modules == set(jaxmp.__all__) - {"__version__"}
    assert len(public) <= 26
    # `import jaxmp.policy as p` is the module, whatever the root exports.
    assert not set(LAYERS) & (set(jaxmp.__all__) - modules)
    for name in set(jaxmp.__all__) - {"__version__", "PolicyLike"}:
        assert ">>>" in (inspect.getdoc(getattr(jaxmp, name)) or ""), name


def test_names_that_were_at_the_root_say_where_they_are():
    for module, names in jaxmp._MOVED.items():
        for name in names.split():
            with pytest.raises(
                AttributeError, match=f"no attribute '{name}'; it is {module}.{name}"
            ):
                getattr(jaxmp, name)
            assert hasattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match=r"it is jaxmp\.recipes\.blockwise_float8"):
        _ = jaxmp.deepseek
    with pytest.raises(AttributeError, match="it is assert_products_in"):
        _ = jaxmp.testing.assert_contractions_in
    with pytest.raises(AttributeError, match="it is assert_replicas_equal"):
        _ = jaxmp.testing.assert_in_step
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = jaxmp.nothing


def test_arrows_go_one_way():
    rooms = {"jaxmp", "jaxmp._core", "jaxmp._tools"}  # which no module imports from
    assert set(LAYERS) == {layer_of(name) for name in MODULES.keys() - rooms}
    assert not [path for path in SOURCES if "jax._src" in path.read_text(encoding="utf-8")]
    arrows = [(name, other) for name in MODULES if name != "jaxmp" for other in own_imports(name)]
    assert not [name for name, other in arrows if other in rooms], "import a module"
    up = [(a, b) for a, b in arrows if LAYERS.index(layer_of(a)) < LAYERS.index(layer_of(b))]
    assert not up, "the first of each pair imports the second, which is above it"


def layer_of(name: str) -> str:
    inside = name.removeprefix("jaxmp.")
    return max((layer for layer in LAYERS if f"{inside}.".startswith(f"{layer}.")), key=len)


def test_nothing_private_is_at_the_root_but_four_rooms():
    private = {path.name for path in (ROOT / "jaxmp").glob("_[!_]*")}
    assert private == {"_core", "_modules", "_tools", "_training"}


def test_no_two_modules_import_each_other():
    # Raises CycleError, which names the cycle.
    tuple(TopologicalSorter({name: own_imports(name) for name in MODULES}).static_order())


# What these read is public: of `jax.Array` and `jax.ShapeDtypeStruct`.
PUBLIC_THERE = {"jaxmp/tree.py": {"update(dtype=)", "weak_type"}}


def test_what_jax_and_flax_do_not_promise_is_read_in_few_files():
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        if name not in HOMES:
            assert read_in(path) == PUBLIC_THERE.get(name, set()), (
                f"{name}: belongs in one of {', '.join(HOMES)}"
            )


NO_VERBS = {"What", "How", "Whether", "Which", "Where", "Why"}


def test_the_docstring_of_a_function_starts_with_a_verb():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            if {"property", "functools.cached_property"}.isdisjoint(
                map(ast.unparse, node.decorator_list)
            ):
                first = (ast.get_docstring(node) or "_").split()[0]
                assert first not in NO_VERBS, f"{path.relative_to(ROOT)}:{node.lineno}"


IMPORTS = """
import json, os, sys
unwanted = ("matplotlib", "rich", "tqdm", "libtpu", "jax_cuda13_plugin", "haiku", "equinox")
loaded = lambda *modules: sorted(set(modules) & sys.modules.keys())
import flax, jmp  # JAX itself loads a CUDA plugin that is installed, and Flax loads rich
before, environment = loaded(*unwanted), dict(os.environ)
import jaxmp
after = loaded(*unwanted), loaded("jax", "jmp")
import jaxmp.cli
import jax
try:
    jax.config.update("jax_platforms", "nonexistent")
    jax.devices()
    said = "a backend was started before"
except RuntimeError as error:
    said = str(error)
print(json.dumps([before, *after, os.environ == environment, said]))
"""


def test_an_import_loads_and_starts_nothing_and_leaves_the_environment_alone():
    """What a program starts after importing jaxmp must find its accelerator."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, needed, unchanged, said = json.loads(run.stdout)
    assert after == before
    assert needed == ["jax", "jmp"], "the probe works"
    assert unchanged
    assert "nonexistent" in said


def test_the_version_is_the_projects_and_the_changelogs_and_the_package_is_typed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert jaxmp.__version__ == project["version"]
    assert f"\n## [{project['version']}]" in changelog
    assert (ROOT / "jaxmp" / "py.typed").exists()
