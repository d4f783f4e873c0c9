"""Set-up of the test run: eight fake CPU devices, quick compiles, and how many random programs.

The default suite runs on CPU; `-m gpu` and `-m tpu` leave the choice of the platform to JAX.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import zlib
from importlib.metadata import version

import hypothesis
import pytest

# Both are read when JAX starts, so nothing here may import it.
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def pytest_configure(config: pytest.Config) -> None:
    # A worker comes to hold millions of traced objects, through which Python's collector goes again
    # and again: 8 % of the time.
    gc.set_threshold(50_000, 10, 10)
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        flags = f"{flags} {DEVICE_COUNT_FLAG}=8"
    # As below: they are two thirds of what 0.10 takes to compile a small program. Later versions
    # have no other emitters, and refuse the flag.
    if version("jaxlib").startswith("0.10.") and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        flags = f"{flags} --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags.strip()
    if not re.search(r"(?<!not )\b(gpu|tpu)\b", config.getoption("markexpr")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


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


@pytest.fixture(scope="session", autouse=True)
def _quick_compiles() -> None:
    """On CPU, LLVM's optimizations are a quarter of the suite's time and change nothing it asserts.

    XLA's own passes run all the same. JAX_DISABLE_MOST_OPTIMIZATIONS=0 keeps LLVM's as well; so
    does whatever a test starts as a process of its own.
    """
    if (
        os.environ.get("JAX_PLATFORMS") == "cpu"
        and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ
    ):
        import jax

        jax.config.update("jax_disable_most_optimizations", True)


# The same examples on every run, so that nobody's change meets somebody else's counterexample;
# HYPOTHESIS_PROFILE=explore looks for new ones. Compiling takes as long as it takes: no deadlines.
hypothesis.settings.register_profile("dev", max_examples=5, derandomize=True, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=300, derandomize=True, deadline=None)
hypothesis.settings.register_profile("many", max_examples=6_000, derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
