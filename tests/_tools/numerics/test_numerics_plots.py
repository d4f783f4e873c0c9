"""Pictures of a run: what they draw, and what they refuse."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import pytest

from jaxmp import numerics
from jaxmp._tools.numerics import plots

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
X = jax.device_put(np.array([2.0, 1e-4, 1.5e-4, 0.0], np.float16))


@pytest.fixture(scope="module")
def run() -> numerics.Capture:
    # Of three numbers that are not 0, the squares of two are 0 in float16.
    return numerics.capture(lambda x: x * x, None, grad=False)(X)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, instead of files."""
    found: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure))
    return found


def test_the_exponents(run, figures):
    run.plot_exponents("x.png")
    activations, formats = figures[0].axes
    heights = {round(bar.get_x()): bar.get_height() for bar in activations.patches}
    # 2, 1e-4 and 1.5e-4 came in; 4 and zeros came out.
    shares = {k: h for k, h in heights.items() if h}
    assert shares == pytest.approx({1: 25, -14: 25, -13: 25, 2: 25})
    assert "2 arrays; 50.0% of the values are 0" in activations.get_title("left")
    assert [label.get_text() for label in formats.get_yticklabels()] == [
        "float16", "bfloat16", "float8_e4m3", "float8_e5m2",
    ]  # fmt: skip
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in formats.patches]
    np.testing.assert_allclose(spans[:2], [(-14, np.log2(65504)), (-24, -14)])
    run.plot_exponents("x.png", sites="x", kinds=["activation"])
    assert "1 array; 25.0% of the values are 0" in figures[1].axes[0].get_title("left")
    numerics.capture(lambda x: x / 0, None, grad=False)(X).plot_exponents("x.png")
    assert "1 of 2 arrays have values that are not finite (not shown)" in figures[2].get_suptitle()


def test_the_underflow(run, figures):
    run.plot_underflow("x.png")
    [figure] = figures
    figure.draw_without_rendering()
    [ax] = figure.axes
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([200 / 3, 0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["(no module)"]
    [legend] = figure.legends  # apart from all else
    for title in (ax.title, ax._left_title):
        assert not legend.get_window_extent().overlaps(title.get_window_extent())
    assert not legend.get_window_extent().overlaps(ax.get_tightbbox())


@pytest.mark.slow
def test_files(run, tmp_path):
    for name, draw in (("a", run.plot_exponents), ("b", run.plot_underflow)):
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG_SIGNATURE)
    with pytest.raises(ValueError, match="there is no folder"):
        run.plot_exponents(tmp_path / "none" / "x.png")


def test_what_is_refused(run, monkeypatch):
    with pytest.raises(ValueError, match=r"kinds has 'bias'; there are 'activation'"):
        run.plot_exponents("x.png", kinds=["bias"])
    with pytest.raises(TypeError, match=r"kinds must be a sequence, as in kinds=\['weight'\]"):
        run.plot_exponents("x.png", kinds="weight")
    with pytest.raises(ValueError, match=r"sites='y'.*The modules are: x"):
        run.plot_exponents("x.png", sites="y")
    without = numerics.capture(lambda x: x * x, None, grad=False, reference=False)(X)
    with pytest.raises(ValueError, match="no operation in 16 bits"):
        without.plot_underflow("x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (run.plot_exponents, run.plot_underflow):
        with pytest.raises(ImportError, match="needs Matplotlib: python -m pip install matplotlib"):
            draw("x.png")


def readings(*of: tuple[int, float, int]) -> list[dict[str, Any]]:
    return [
        {"step_count": step, "loss_scale": scale, "skipped_count": skipped}
        for step, scale, skipped in of
    ]


def test_the_scale_over_time(figures):
    numerics.plot_scale(readings((10, 8.0, 0), (20, 4.0, 1), (30, 4.0, 1), (40, 8.0, 1)), "x.png")
    numerics.plot_scale([8.0, 8.0, 4.0], "x.png")
    [first], [second] = (figure.axes for figure in figures)
    scales, left_out = first.get_lines()
    np.testing.assert_array_equal(scales.get_xydata(), [(10, 8), (20, 4), (30, 4), (40, 8)])
    np.testing.assert_array_equal(left_out.get_xydata(), [(20, 4)])
    title = "Loss scale: 1 of 40 steps were skipped (crosses: since the reading before)"
    assert first.get_title("left") == title
    assert (first.get_xlabel(), first.get_ylabel()) == ("training step", "loss scale")
    [scales] = second.get_lines()
    np.testing.assert_array_equal(scales.get_xydata(), [(1, 8), (2, 8), (3, 4)])


@pytest.mark.parametrize(
    ("history", "error"),
    [
        ([], "history is empty"),
        (
            [{"step_count": 1}],
            r"what jaxmp.numerics.read_monitor returns.*KeyError\('loss_scale'\)",
        ),
        ([object()], "what jaxmp.numerics.read_monitor returns"),
        (readings((2, 1.0, 0), (2, 1.0, 0)), r"history\[1\] is of step 2, and the one before of 2"),
        ([4.0, 0.0], r"the scale of history\[1\] is 0.0"),
    ],
)
def test_wrong_histories(history, error):
    with pytest.raises((TypeError, ValueError), match=f"plot_scale: .*{error}"):
        numerics.plot_scale(history, "x.png")
