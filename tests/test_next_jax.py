"""The programs of `next_jax` under each flag of JAX's next generation, where this JAX knows it."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from support import ROOT

FLAGS = ("JAX_REMAT3", "JAX_CUSTOM_VJP3", "JAX_CUSTOM_JVP3", "JAX_SCAN3")


def run_under(*flags: str, keyword: str = "") -> None:
    if jax.__version_info__ < (0, 12):
        pytest.skip("looked inside from JAX 0.12 on")
    missing = [flag for flag in flags if not hasattr(jax.config, flag.lower())]
    if missing:
        pytest.skip(f"this JAX has no {', '.join(missing)}")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "-k",
            keyword,
            "tests/next_jax.py",
        ],
        cwd=ROOT,
        env={**os.environ, **dict.fromkeys(flags, "1")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


@pytest.mark.slow
def test_one_of_each_kind_under_all_flags() -> None:
    run_under(*FLAGS, keyword="everything or activations or linen or zeros or scan or forward")


@pytest.mark.slow
def test_all_flags_together() -> None:
    run_under(*FLAGS)


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_one_flag_at_a_time(flag: str) -> None:
    run_under(flag)


@pytest.mark.slow
def test_today_s_jax() -> None:
    run_under()
