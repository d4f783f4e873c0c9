"""`examples/terminal.py`: signs of life, Ctrl-C wherever it is pressed, where to write."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from support import EXAMPLES, cpu_environment


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("terminal")


def test_what_takes_long_shows_that_it_lives(terminal, monkeypatch, capfd):
    monkeypatch.setattr(terminal, "SECONDS", 0.05)
    before = signal.set_wakeup_fd(-1)
    with terminal.waiting("compiling"):
        time.sleep(0.3)
    assert signal.set_wakeup_fd(before) == -1, "as it was"
    with terminal.waiting("importing", show=False):
        time.sleep(0.1)
    out, err = capfd.readouterr()
    assert re.fullmatch(r"compiling \.\.\.( 0 s \.\.\.){2,} 0\.\d s\n", err)
    assert not out


def test_an_exception_comes_through(terminal, capfd):
    with pytest.raises(ZeroDivisionError), terminal.waiting("compiling"):
        raise ZeroDivisionError
    assert capfd.readouterr().err == "compiling ..."


# What Python cannot interrupt, as a compilation is.
COMPILES = """
import hashlib
from terminal import start, waiting
def main():
    print("begins")
    with waiting("compiling"):
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
start(main)
"""


def test_ctrl_c_ends_a_compilation_at_once():
    # What a shell starts in the background ignores SIGINT, and so would all that it starts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = subprocess.Popen(
        [sys.executable, "-c", COMPILES],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, handler)
    with started as program:
        try:
            assert program.stderr.read(len("compiling ...")) == "compiling ..."
            assert program.stdout.readline() == "begins\n", "through a pipe as well"
            program.send_signal(signal.SIGINT)
            assert program.wait(10) == 130
            assert program.stderr.read() == "\nstopped (compiling)\n"
        finally:
            program.kill()


def test_ctrl_c_waits_for_a_step_and_twice_for_nothing(terminal, monkeypatch, capfd):
    def exit_now(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_now)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with terminal.CtrlC() as ctrl_c:
            assert not ctrl_c.pressed
            signal.raise_signal(signal.SIGINT)
            assert ctrl_c.pressed
            assert "stops after this step" in capfd.readouterr().err
            with pytest.raises(SystemExit) as error:
                signal.raise_signal(signal.SIGINT)
            assert error.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with terminal.CtrlC() as ctrl_c:
            signal.raise_signal(signal.SIGINT)
            assert not ctrl_c.pressed, "in the background it is not for us"
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_elsewhere_is_no_traceback(terminal, capfd):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as error:
        terminal.start(main)
    assert error.value.code == 130
    assert capfd.readouterr().err == "\nstopped\n"


def test_a_file_that_cannot_be_written_is_refused_before_the_work(terminal, tmp_path, capfd):
    parser = argparse.ArgumentParser()
    (tmp_path / "kept.png").write_bytes(b"kept")
    terminal.check_file(parser, "--plot", tmp_path / "kept.png")
    terminal.check_file(parser, "--plot", tmp_path / "new.png")
    assert [p.name for p in tmp_path.iterdir()] == ["kept.png"], "and nothing is left behind"
    assert (tmp_path / "kept.png").read_bytes() == b"kept"
    for path, reason in [
        (tmp_path / "none" / "x.png", "there is no folder "),
        (tmp_path, "cannot be written (Is a directory)"),
    ]:
        with pytest.raises(SystemExit) as error:
            terminal.check_file(parser, "--plot", path)
        assert error.value.code == 2
        assert reason in capfd.readouterr().err


def test_what_falls_fast_is_measured_often_at_first(terminal):
    assert sorted(terminal.eighths(300)) == [38, 76, 114, 152, 190, 228, 266, 300]
    at_first = terminal.often_at_first(300)
    assert at_first >= terminal.eighths(300)
    assert sorted(n for n in at_first if n < 38) == [0, 1, 2, 4, 8, 16, 32]
    assert terminal.often_at_first(1) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_lm.py", "train_multihost.py"])
def test_ctrl_c_while_it_imports(name, tmp_path):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env=cpu_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, handler)
    with started as program:
        said = "importing JAX, Flax and Orbax"
        assert program.stderr.read(len(said)) == said
        program.send_signal(signal.SIGINT)
        assert program.wait(10) == 130
        assert program.stderr.read() == f" ...\nstopped ({said})\n"
