"""What a tool says while it takes long: on a terminal, from the first second on."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp import numerics
from jaxmp._tools import progress
from jaxmp._tools.progress import told

from support import ones

W, X = ones(16, 16), ones(4, 16)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w / 16) ** 2)


TOOLS: dict[str, Callable[[], Any]] = {
    "diagnose": lambda: jaxmp.diagnose(loss, "mixed_bfloat16")(W, X),
    "capture": lambda: numerics.capture(loss, "mixed_bfloat16")(W, X),
    "parity": lambda: jaxmp.parity(loss, loss)(W, X),
    "tune": lambda: jaxmp.tune(loss)(W, [X]),
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_takes_long_says_so(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    TOOLS[tool]()
    assert f"{tool}: " in terminal.getvalue()


def test_the_first_second_is_silent_and_the_step_that_exceeds_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with told(None) as tell:
        tell("short")
    assert not terminal.getvalue()
    monkeypatch.setattr(progress, "_PATIENCE", 0.2)
    with told(None) as tell:
        tell("short")
        tell("long")
        time.sleep(0.6)
        tell("next")
    with told(None) as tell:
        tell("short again")
    time.sleep(0.4)
    assert terminal.getvalue() == "long\nnext\n"


def test_what_is_given_is_called_and_without_a_terminal_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    said: list[str] = []
    for given in (said.append, None):
        with told(given) as tell:
            tell("a step")
            time.sleep(0.1)
    assert (said, capsys.readouterr().err) == (["a step"], "")
