"""The programs of `next_jax` under each flag of JAX's next generation, where this JAX knows it."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from support import ROOT

FLAGS = ("JAX_REMAT3", "JAX_CUSTOM_VJP3", "JAX_CUSTOM_JVP3", "JAX_SCAN3")


def run_under(*flags: str) -> None:
    if jax.__version_info__ < (0, 12):
        pytest.skip("looked inside from JAX 0.12 on")
    missing = [flag for flag in flags if not hasattr(jax.config, flag.lower())]
    if missing:
        pytest.skip(f"this JAX has no {', '.join(missing)}")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "tests/next_jax.py"],
        cwd=ROOT,
        env={**os.environ, **dict.fromkeys(flags, "1")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS], ids="+".join)
def test_programs_under_flags(flags: tuple[str, ...]) -> None:
    run_under(*flags)
