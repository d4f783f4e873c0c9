"""`examples/multihost_launcher.py`: wrong options; how processes end, with quick ones."""

from __future__ import annotations

import importlib
import re
import signal
import sys
import time

import pytest

from support import EXAMPLES, slow_when


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("multihost_launcher")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 0", "--processes must be at least 1, got 0"),
        ("--processes 3", "--batch 64 does not divide by 3 processes"),
        ("--processes two", "invalid int value: 'two'"),
        ("--batch 0", "--batch must be at least 1"),
        ("--seed -1", "--seed must be at least 0"),
        ("--poison 0", "--poison must be at least 1"),
        ("--kill 5", "--kill needs --processes"),
        ("--processes 2 --kill 41", "--kill 41: there are 40 steps"),
        ("--processes 2 --kill 5 --victim 2", "--victim 2: there are 0 to 1"),
        ("--processes 2 --process 1", "--coordinator and --process need each other"),
        ("--coordinator a:1 --processes 2", "--coordinator and --process need each other"),
        ("--coordinator a:1 --process 0", "--coordinator needs --processes"),
        ("--coordinator a:1 --processes 2 --process 2", "--process 2: there are 0 to 1"),
        ("--resume", "--resume needs --checkpoint"),
        ("--resume --checkpoint none", "--resume: there is no checkpoint in none"),
        ("--resume --checkpoint empty", "--resume: there is no checkpoint in empty"),
        ("--checkpoint full", "full holds a run; --resume continues it"),
        ("--checkpoint file", "--checkpoint: file is not a folder"),
        ("--process 2", "--coordinator and --process need each other"),
        ("--proc 2", "unrecognized arguments: --proc 2"),
    ],
)
def test_wrong_options_are_refused(options, message, launcher, monkeypatch, capsys, tmp_path):
    (tmp_path / "empty" / "5.orbax-checkpoint-tmp-1").mkdir(parents=True)  # was being written
    (tmp_path / "full" / "5").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_multihost.py", *options.split()])
    with pytest.raises(SystemExit) as error:
        launcher.parse("what it does")
    assert error.value.code == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out


# What stands for `train_multihost.py`: `process` is which one it is.
CHILD = """
import os, signal, sys, time
process = int(sys.argv[-1])
def step(i):
    print(f"step {i}: loss {i / 8}, scale 8, skipped 0", flush=True)
step(1)
"""
CHILDREN = {
    "all well": ("step(2)", 0, [r"\[0\] step 1: loss", r"\[0\] step 2: loss"]),
    "refused": ("print('error: this', flush=True)\nsys.exit(2)", 2, [r"\] error: this\n$"]),
    "one fails": (
        "step(2)\nif process: sys.exit(7)\ntime.sleep(0.2)\nos.abort()",
        1,
        ["process 1 exited with 7 after step 2", r"process 0 was ended by SIGABRT 0\.\d s later"],
    ),
    "its partner is seen to end before": (
        "if not process: os.abort()\ntime.sleep(0.2)\nos.kill(os.getpid(), signal.SIGSEGV)",
        1,
        [
            "process 1 was ended by SIGSEGV after step 1",
            r"process 0 was ended by SIGABRT 0\.\d s l",
        ],
    ),
    "killed": (
        "for i in range(2, 4): step(i); time.sleep(process * (i == 3) * 60)",
        1,
        [r"\[0\] step 3: loss", "process 1 was ended by SIGKILL after step 3"],
    ),
    "one fails, one stays": (
        "time.sleep(60 * process)\nsys.exit(1)",
        1,
        ["process 0 exited with 1 after step 1", "process 1 hangs after step 1, and is killed"],
    ),
    "one stays, one is aborted": (
        "time.sleep(60 * process)\nos.abort()",
        1,
        ["process 1 hangs after step 1, and is killed", "process 0 was ended by SIGABRT after ste"],
    ),
    "all hang": (
        "time.sleep(60)",
        1,
        ["no process has printed a step for 1 s", "process 0 hangs", "process 1 hangs after step"],
    ),
    "no text": (r"os.write(1, b'\xff\xfe no step\n')", 0, [r"\[1\] .* no step"]),
}


@slow_when(lambda name: name not in {"one fails", "killed"})
@pytest.mark.parametrize("name", CHILDREN)
def test_the_launcher_ends_all_and_tells_how(name, launcher, capfd):
    code, expected, said = CHILDREN[name]
    started = time.monotonic()
    returned = launcher.launch(
        [sys.executable, "-S", "-c", CHILD + code],
        2,
        timeout=1 if name == "all hang" else 30,
        grace=0.5,
        kill=(1, 3),
    )
    out, err = capfd.readouterr()
    assert returned == expected, out
    assert re.search(".*".join(said), out, re.DOTALL), out
    assert "[1] step" not in out, "the first process's steps are enough"
    assert time.monotonic() - started < 20
    assert not err


def test_a_long_silence_is_broken(launcher, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "SILENCE", 0.1)
    command = [sys.executable, "-S", "-c", CHILD + "time.sleep(0.5)\nstep(2)"]
    assert launcher.launch(command, 1, timeout=30, grace=0.5) == 0
    said = r"^launcher: waits for the processes, \d s after their start\n"
    assert re.search(rf"{said}\[0\] step 2: loss", capfd.readouterr().out, re.MULTILINE)


def test_how_to_go_on(launcher, monkeypatch, capsys, tmp_path):
    """The command that was given, without the kill, from what was saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", lambda *args, **options: 1)
    given = ["a b.py", "--processes", "2", "--kill=9", "--checkpoint", "r", "--poison", "3"]
    monkeypatch.setattr(sys, "argv", given)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert launcher.launch_here(launcher.parse("")) == 1
        (tmp_path / "r" / "4").mkdir(parents=True)
        (tmp_path / "r" / "10").mkdir()
        monkeypatch.setattr(sys, "argv", [*given, "--resume"])
        args = launcher.parse("")
        launcher.launch_here(args)
        args.resume = False
        monkeypatch.setattr(sys, "argv", [*given, "--kill", "9"])
        launcher.launch_here(args)
    finally:
        signal.signal(signal.SIGTERM, handler)
    command = f"{sys.executable} 'a b.py' --processes 2 --checkpoint r --poison 3"
    assert capsys.readouterr().out == (
        f"launcher: to go on from the beginning, no checkpoint is whole:\n    {command}\n"
        f"launcher: to go on from step 10:\n    {command} --resume\n"
        f"launcher: to go on from step 10:\n    {command} --resume\n"
    )
