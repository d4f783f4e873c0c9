"""`examples/diagnose_overflow.py`: what it prints, what it draws, and the page that shows it."""

from __future__ import annotations

import re

import jax
import pytest

from support import ROOT, run_example

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PAGE = ROOT / "docs" / "diagnose.md"


def blocks() -> str:
    """What the page shows of the printed output."""
    return "\n".join(re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.mark.slow
def test_the_overflow_is_found_compared_and_mended(tmp_path):
    result = run_example("diagnose_overflow.py", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    unwrapped = re.sub(r"\n {16}", " ", result.stdout)
    half, beside, mended = re.split(r"^float16.*\n-+\n", unwrapped, flags=re.MULTILINE)[1:]
    where = r"integer_pow \(float16, forward\) in Sounds/power at diagnose_overflow\.py:\d+"
    overflow = r"overflow: \S+ in float32, beyond 65504, in \S+ of its values"
    assert re.search(rf"^not finite +{where}: {overflow}$", half, re.MULTILINE)
    assert re.search(rf"^would leave +{where}$", half, re.MULTILINE)
    first = re.search(r"^first +(.*)$", beside, re.MULTILINE)[1]
    assert first.startswith("integer_pow (float16, bfloat16, forward) in Sounds/power at ")
    assert first.endswith("not finite here")
    assert re.search(r"^not finite +nothing: every result is finite$", mended, re.MULTILINE)
    assert re.search(r"became 0: convert_element_type \(float16, backward\) in Sounds/", mended)
    for name in ("exponents.png", "underflow.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG_SIGNATURE)
    assert "Sounds/power" in (tmp_path / "comparison.md").read_text()
    if jax.__version__.startswith("0.12."):  # other versions have other operations
        same_anywhere = (
            "first ",
            "loss scale ",
            "measured ",
            "not finite ",
            "sites ",
            "would leave ",
        )
        kept = [line for line in blocks().splitlines() if line.startswith(same_anywhere)]
        assert len(kept) == 8
        assert set(kept) <= set(result.stdout.splitlines())


def test_the_pages_pictures_are_there():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE.read_text())
    assert len(pictures) == 2
    for picture in pictures:
        data = (PAGE.parent / picture).read_bytes()
        assert data.startswith(PNG_SIGNATURE)
        assert len(data) < 120_000
