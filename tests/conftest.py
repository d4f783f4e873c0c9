"""Set-up of the test run: eight fake CPU devices, and how many examples hypothesis tries.

The default suite runs on CPU; `-m gpu` and `-m tpu` leave the choice of the platform to JAX.
"""

from __future__ import annotations

import os
import re

import hypothesis
import pytest

# Both are read when JAX starts, so nothing here may import it.
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def pytest_configure(config: pytest.Config) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}=8".strip()
    if not re.search(r"(?<!not )\b(gpu|tpu)\b", config.getoption("markexpr")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


# The same examples on every run, so that nobody's change meets somebody else's counterexample;
# HYPOTHESIS_PROFILE=explore looks for new ones. Compiling takes as long as it takes: no deadlines.
hypothesis.settings.register_profile("dev", max_examples=50, derandomize=True, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=300, derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
