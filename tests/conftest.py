"""Set-up of the test run: eight fake CPU devices, quick compiles, and how many random programs.

The default suite runs on CPU; `-m gpu` and `-m tpu` leave the choice of the platform to JAX.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Generator
from importlib.metadata import version

import hypothesis
import pytest

# Both are read when JAX starts, so nothing here may import it.
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000, 10, 10)
    if not re.search(r"(?<!not )\b(gpu|tpu)\b", config.getoption("markexpr")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if on_cpu := os.environ.get("JAX_PLATFORMS") == "cpu":
        # LLVM's optimizations are a quarter of the time, and change nothing that is asserted; XLA's
        # own passes run all the same. JAX_DISABLE_MOST_OPTIMIZATIONS=0 keeps LLVM's as well.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        _keep_what_is_compiled(config)
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        flags = f"{flags} {DEVICE_COUNT_FLAG}=8"
    # They are two thirds of what 0.10 takes to compile a small program. Later versions have no
    # other emitters, and refuse the flag.
    if (
        version("jaxlib").startswith("0.10.")
        and on_cpu
        and os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    ):
        flags = f"{flags} --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags.strip()


def _keep_what_is_compiled(config: pytest.Config) -> None:
    """JAX's compilation cache, in pytest's: of the workers, the processes that tests start, and the
    next run. With `-p no:cacheprovider`, in a folder that is deleted after the run.

    Anybody else's JAX_COMPILATION_CACHE_DIR is left alone. JAX writes an entry in place, so that
    one process may read half of what another is writing: it warns of it, and compiles. The warning
    is ignored (pyproject.toml).
    """
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # a worker has its controller's
        return
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = str(config.cache.mkdir("jax"))
    else:
        folder = tempfile.mkdtemp(prefix="jaxmp-compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="I/N",
        help="run the I-th of N shares of the tests, as which all together are everything",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("share") is None:
        return
    read = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", config.getoption("share"))
    if read is None or int(read[1]) > int(read[2]):
        raise pytest.UsageError(
            f"--share takes I/N, such as 1/2; got {config.getoption('share')!r}"
        )
    mine, shares = int(read[1]), int(read[2])
    kept = [i for i in items if zlib.crc32(_together(i).encode()) % shares == mine - 1]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
    items[:] = kept


def _together(item: pytest.Item) -> str:
    """What a share has all of or nothing: a test, by its name alone, so that it stays in its share
    when others come and go; in a file that names a parameter `TOGETHER`, all tests of one value,
    for which things are compiled once.
    """
    parameter = getattr(getattr(item, "module", None), "TOGETHER", None)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return f"{item.path.name}[{params[parameter]}]" if parameter in params else item.nodeid


def pytest_itemcollected(item: pytest.Item) -> None:
    """`support.slow_when`: marks a test that has the condition's parameters, where it holds."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for node, mark in list(item.iter_markers_with_node("slow_when")):
        (condition,) = mark.args
        names = inspect.signature(condition).parameters
        if missing := names.keys() - params.keys():
            if node is item:  # a whole file's mark is for those of its tests that have them
                raise pytest.UsageError(
                    f"{item.nodeid}: slow_when asks for {', '.join(sorted(missing))}, which is no "
                    "parameter of it"
                )
        elif condition(*(params[name] for name in names)):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that compiles while it is imported is an error, at the line that compiles."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    from jax import monitoring

    def refuse(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            raise RuntimeError(
                f"{collector.nodeid} compiles while it is imported, in every worker and for every "
                "choice of tests: take arrays from NumPy (or support's gaussian, ones, "
                "random_key), or make them in a function when they are first used"
            )

    monitoring.register_event_duration_secs_listener(refuse)
    try:
        return (yield)
    finally:
        monitoring.unregister_event_duration_listener(refuse)


@pytest.fixture(scope="module", autouse=True)
def _collect_what_is_new() -> None:
    """Python's collector goes through what the tests of this file make, and nothing before it.

    A worker comes to hold millions of traced objects, and a collection to take seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an entry with each program that is planned."""
    from jaxmp._core.autocast import transform

    found: list[int] = []
    plan_program = transform.plan_program
    monkeypatch.setattr(transform, "plan_program", lambda *a: found.append(1) or plan_program(*a))
    return found


# The same examples on every run, so that nobody's change meets somebody else's counterexample;
# HYPOTHESIS_PROFILE=explore looks for new ones. Compiling takes as long as it takes: no deadlines.
hypothesis.settings.register_profile("dev", max_examples=5, derandomize=True, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=300, derandomize=True, deadline=None)
hypothesis.settings.register_profile("many", max_examples=6_000, derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
