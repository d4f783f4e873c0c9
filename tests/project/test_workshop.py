"""What a contributor and a release find: versions and addresses are said once, or agree."""

from __future__ import annotations

import re
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import ROOT, run_python

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
ADDRESS = runpy.run_path(str(ROOT / ".ci" / "address.py"))
# The oldest of each dependency that is allowed.
OLDEST = dict(dependency.split(">=") for dependency in PROJECT["dependencies"])


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    pins = dict(line.split("==") for line in (ROOT / ".ci" / "oldest.txt").read_text().split())
    assert pins.pop("jaxlib") == pins["jax"]
    assert {name: re.sub(r"(?<=\d)\.0$", "", v) for name, v in pins.items()} == {
        name: re.sub(r"(?<=\d\.\d)\.0$", "", v) for name, v in OLDEST.items()
    }


def test_the_conda_recipe_has_the_package_s_version_and_dependencies() -> None:
    recipe = read_yaml(".ci/conda/recipe.yaml")
    assert recipe["context"]["version"] == PROJECT["version"]
    wanted = {name: f">={version}" for name, version in OLDEST.items()}
    wanted["python"] = PROJECT["requires-python"]
    assert dict(package.split() for package in recipe["requirements"]["run"]) == wanted
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_the_citation_has_the_package_s_version() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_classifiers_are_of_pythons_that_are_tested() -> None:
    said = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python ::" in c]
    tested = re.findall(r"find_python (3\.\d+)\)", (ROOT / ".ci" / "run").read_text("utf-8"))
    assert said == tested


def test_the_hosted_jobs_run_what_a_contributor_runs() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["everything"]["steps"]]
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        named = re.findall(r"(?:tests|\.ci)/[\w.]*\w", text)
        assert all((ROOT / name).exists() for name in named)


def test_readme_has_the_badges_of_the_address() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == ADDRESS["with_badges"](readme, ADDRESS["address"]()), "python .ci/address.py"


@pytest.mark.parametrize("repository", ["", "https://example.org/jaxmp"])
def test_links_are_of_the_address_and_there_are_none_without(repository: str) -> None:
    readme = "# jaxmp\n\n<!-- badges -->\nold\n<!-- end -->\n\nText.\n"
    links = [*ADDRESS["urls"](repository).values(), ADDRESS["with_badges"](readme, repository)]
    assert len(links) == (4 if repository else 1)
    assert all("https://" not in link or repository in link for link in links)
    assert all(repository in link for link in links)
    assert "old" not in links[-1]
    assert links[-1].endswith("\n<!-- end -->\n\nText.\n")


def test_each_folder_of_the_package_has_a_folder_of_tests() -> None:
    def folders(root: str, files: str) -> set[str]:
        found = (path.parent.relative_to(ROOT / root) for path in (ROOT / root).rglob(files))
        return {str(folder) for folder in found if folder.parts and folder.parts[0].startswith("_")}

    of_package = folders("jaxmp", "[!_]*.py") - {"_core/passes/fused_attention"}
    assert folders("tests", "test_*.py") == of_package - {"_core", "_core/chips"}


@pytest.mark.slow
def test_a_module_that_compiles_while_it_is_imported_is_not_collected(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    arrays = {"test_jax.py": "jnp.ones(3)", "test_numpy.py": "jax.device_put(np.ones(3))"}
    for name, array in arrays.items():
        text = f"import jax\nimport jax.numpy as jnp\nimport numpy as np\nX = {array}\n"
        (tmp_path / name).write_text(f"{text}def test(): pass\n")
    done = run_python("-m", "pytest", "--collect-only", "-q", folder=tmp_path)
    assert "test_numpy.py::test" in done.stdout, done
    assert re.findall(
        r"^(\S+): in <module>|^E .*?(\S+) compiles while", done.stdout, re.MULTILINE
    ) == [
        ("test_jax.py:4", ""),
        ("", "test_jax.py"),
    ]
