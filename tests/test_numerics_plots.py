"""Pictures of a run: what they draw, and what they refuse."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import numerics
from jaxmp._numerics import plots

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
X = jnp.array([2.0, 1e-4, 1.5e-4, 0.0], jnp.float16)


@pytest.fixture(scope="module")
def run() -> numerics.Capture:
    # Of three numbers that are not 0, the squares of two are 0 in float16.
    return numerics.capture(lambda x: x * x, None, X, grad=False)


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn from here on, instead of files."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    return figures


def test_the_exponents(run, monkeypatch):
    figures = drawn(monkeypatch)
    run.plot_exponents("x.png")
    activations, formats = figures[0].axes
    heights = {round(bar.get_x()): bar.get_height() for bar in activations.patches}
    # 2, 1e-4 and 1.5e-4 came in; 4 and zeros came out.
    shares = {k: h for k, h in heights.items() if h}
    assert shares == pytest.approx({1: 25, -14: 25, -13: 25, 2: 25})
    assert "2 sites, 50.0% zeros" in activations.get_title("left")
    assert [label.get_text() for label in formats.get_yticklabels()] == [
        "float16", "bfloat16", "float8_e4m3", "float8_e5m2",
    ]  # fmt: skip
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in formats.patches]
    np.testing.assert_allclose(spans[:2], [(-14, np.log2(65504)), (-24, -14)])


def test_only_chosen_sites(run, monkeypatch):
    figures = drawn(monkeypatch)
    run.plot_exponents("x.png", sites="x", kinds=["activation"])
    assert "1 site, 25.0% zeros" in figures[0].axes[0].get_title("left")


def test_the_underflow(run, monkeypatch):
    figures = drawn(monkeypatch)
    run.plot_underflow("x.png")
    [ax] = figures[0].axes
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([200 / 3, 0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["(no module)"]


@pytest.mark.slow
def test_files(run, tmp_path):
    for name, draw in (("a", run.plot_exponents), ("b", run.plot_underflow)):
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG_SIGNATURE)
    with pytest.raises(ValueError, match="there is no folder"):
        run.plot_exponents(tmp_path / "none" / "x.png")


def test_what_is_refused(run):
    with pytest.raises(ValueError, match=r"kinds has 'bias'; there are 'activation'"):
        run.plot_exponents("x.png", kinds=["bias"])
    with pytest.raises(ValueError, match=r"sites='y'.*The modules are: x"):
        run.plot_exponents("x.png", sites="y")
    without = numerics.capture(lambda x: x * x, None, X, grad=False, twins=False)
    with pytest.raises(ValueError, match="no operation in 16 bits"):
        without.plot_underflow("x.png")


def test_without_matplotlib(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (run.plot_exponents, run.plot_underflow):
        with pytest.raises(ImportError, match=r"needs Matplotlib: pip install 'jaxmp\[plots\]'"):
            draw("x.png")
