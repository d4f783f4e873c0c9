"""`examples/qwix_handover.py`: what it prints, and what it says where Qwix is missing."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from support import EXAMPLES

PROGRAM = EXAMPLES / "qwix_handover.py"


def run():
    return subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="needs qwix")
def test_the_hand_over_keeps_what_was_learnt():
    done = run()
    assert done.returncode == 0, done.stderr
    shares = [float(s) for s in re.findall(r"accuracy +([\d.]+)%", done.stdout)]
    float32, weights, calibrated, before, after = shares
    assert float32 > 98
    assert min(weights, calibrated) > float32 - 2
    assert before < 10
    assert after > 90


@pytest.mark.slow
def test_without_qwix_it_says_what_to_install():
    code = (
        f"import runpy, sys; sys.modules['qwix'] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"runpy.run_path({str(PROGRAM)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs Qwix: pip install" in done.stderr
