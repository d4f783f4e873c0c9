"""`examples/train_multihost.py`: several processes that skip, save, die and resume together."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from support import EXAMPLES, run_example, run_python

slow = pytest.mark.slow


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whole, whichever processes wrote it."""
    path = folder / str(step) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=how))
    return {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(state)}


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert len(one) > 10
    for name, x in one.items():
        assert x.dtype == other[name].dtype
        assert x.tobytes() == other[name].tobytes(), name


def untouched(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a step that is left out keeps: all but the scaler's own numbers."""
    own = r"\['opt_state'\]\['(loss_scale|\w+_count|finite)'\]"
    return {name: x for name, x in state.items() if not re.fullmatch(own, name)}


def steps_of(stdout: str, process: int = 0) -> dict[int, str]:
    """Step -> the rest of its line: its loss in full, the scale, how many were left out."""
    return dict(
        (int(step), rest)
        for step, rest in re.findall(rf"^\[{process}\] step (\d+): (loss .*)$", stdout, re.M)
    )


def checksums(stdout: str, word: str) -> dict[int, str]:
    return {int(s): x for s, x in re.findall(rf"step (\d+): {word} ([0-9a-f]{{8}})$", stdout, re.M)}


def train(*options: str | int, folder: Path) -> str:
    result = run_example("train_multihost.py", *map(str, options), folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Whole:
    """A run of two processes that nothing interrupts."""

    options = ("--processes", 2, "--steps", 12, "--every", 4, "--heartbeat", 5)

    def __init__(self, folder: Path) -> None:
        self.stdout = train(*self.options, "--checkpoint", "run", folder=folder)
        self.state = arrays(folder / "run", 12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> tuple[Path, str]:
    """A run of two whose sixth batch has an inf in one process's part; checkpoints of 5 and 6."""
    folder = tmp_path_factory.mktemp("poisoned")
    options = ("--processes", 2, "--steps", 6, "--every", 1, "--poison", 6)
    return folder / "run", train(*options, "--checkpoint", "run", folder=folder)


@slow
def test_an_overflow_in_one_process_skips_the_step_in_both(poisoned, whole):
    folder, stdout = poisoned
    said = "loss nan, scale 32768, left out 1  LEFT OUT: the gradients are not finite"
    assert steps_of(stdout)[6] == steps_of(stdout, 1)[6] == said
    before, after = arrays(folder, 5), arrays(folder, 6)
    assert_same_bits(untouched(before), untouched(after))
    assert len(untouched(after)) == len(after) - 6
    assert (before["['step']"], after["['step']"]) == (5, 5)
    changed = {name for name, x in after.items() if x.tobytes() != before[name].tobytes()}
    names = "loss_scale", "skipped_count", "consecutive_skipped_count", "growth_count", "finite"
    assert changed == {f"['opt_state']['{name}']" for name in names}
    assert after["['opt_state']['skipped_count']"] == 1
    # Until then, and in all that the others' data decide, it is the run without.
    five = {step: line for step, line in steps_of(whole.stdout).items() if step < 6}
    assert {step: line for step, line in steps_of(stdout).items() if step < 6} == five


@slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_checkpoint_of_two_processes_goes_on_in_another_number(count, poisoned, tmp_path):
    """The seventh step is left out, so what was saved, split anew and saved again is as it was."""
    source, before = poisoned
    subprocess.run(["cp", "-r", str(source), str(tmp_path / "run")], check=True)
    options = ("--processes", count, "--steps", 8, "--every", 1, "--resume", "--poison", 7)
    stdout = train(*options, "--victim", 0, "--checkpoint", "run", folder=tmp_path)
    assert f"[0] {count} processes, {count} devices, 64 examples a step" in stdout
    assert checksums(stdout, "starts from") == {6: checksums(before, "saves")[6]}
    for process in range(count):
        assert steps_of(stdout, process)[7].startswith("loss nan, scale 16384, left out 2")
    assert_same_bits(untouched(arrays(source, 6)), untouched(arrays(tmp_path / "run", 7)))
    # And training goes on: the same batch, whoever reads it, is summed in another order at most.
    loss = float(steps_of(stdout)[8].split()[1].strip(","))
    assert 1.5 < loss < 2.3
    seen = poisoned_losses.setdefault(8, loss)
    assert loss == pytest.approx(seen, rel=1e-3)


poisoned_losses: dict[int, float] = {}


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_run_resumes_bitwise(victim, whole, tmp_path):
    """JAX 0.12 aborts the others in C++, 0.10 raises; process 0 has the coordinator."""
    options = (*whole.options, "--checkpoint", "run", "--kill", 10, "--victim", victim)
    result = run_example("train_multihost.py", *map(str, options), folder=tmp_path)
    assert result.returncode == 1
    out = result.stdout
    assert f"launcher: process {victim} was ended by SIGKILL after step 10\n" in out
    (other, code, seconds) = re.search(
        r"launcher: process (\d) (exited with 1|was ended by SIGABRT) (\S+) s later\n", out
    ).groups()
    assert int(other) == 1 - victim
    assert float(seconds) < 10, "twice the heartbeat"
    start, command = re.search(
        r"^launcher: to go on from step (\d+):\n    (.*)$", out, re.M
    ).groups()
    assert start in {"4", "8"}, "the last may not have been whole"

    python, *arguments = shlex.split(command)
    assert python == sys.executable
    resumed = run_python(*arguments, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stdout
    assert checksums(resumed.stdout, "starts from").keys() == {int(start)}
    steps = steps_of(whole.stdout)
    assert steps_of(resumed.stdout) == {k: v for k, v in steps.items() if k > int(start)}
    assert_same_bits(arrays(tmp_path / "run", 12), whole.state)
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
