"""`examples/train_multihost.py`: several processes that skip, save, die and resume together."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from support import EXAMPLES, cpu_environment, run_example, run_python

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


@slow
def test_the_checksum_tells_every_bit_and_every_place(monkeypatch):
    """And FSDP splits what divides."""
    monkeypatch.syspath_prepend(EXAMPLES)
    script = importlib.import_module("train_multihost")
    tree = {"w": jnp.arange(24.0).reshape(3, 8), "n": jnp.int32(5), "ok": jnp.asarray(True)}
    whole = script.fingerprint(tree)
    shardings = script.fsdp(jax.sharding.Mesh(jax.devices(), ("data",)), tree)
    assert shardings["w"].spec == jax.sharding.PartitionSpec(None, "data")
    assert shardings["n"].spec == jax.sharding.PartitionSpec()
    assert script.fingerprint(jax.device_put(tree, shardings)) == whole
    others = [
        tree | {"w": tree["w"].at[2, 7].set(np.nextafter(np.float32(23), np.float32(24)))},
        tree | {"w": tree["w"].at[0, 0].set(-0.0)},
        tree | {"w": tree["w"][:, ::-1]},
        tree | {"n": jnp.int32(6)},
        tree | {"ok": jnp.asarray(False)},
    ]
    assert len({whole, *map(script.fingerprint, others)}) == 6


def untouched(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a step that is skipped keeps: all but the scaler's own numbers."""
    own = r"\['opt_state'\]\['(loss_scale|\w+_count|finite)'\]"
    return {name: x for name, x in state.items() if not re.fullmatch(own, name)}


def steps_of(stdout: str, process: int = 0) -> dict[int, str]:
    """Step -> the rest of its line: its loss in full, the scale, how many were skipped."""
    pattern = rf"^\[{process}\] step (\d+): (loss .*)$"
    return {int(step): rest for step, rest in re.findall(pattern, stdout, re.MULTILINE)}


def checksums(stdout: str, word: str) -> dict[int, str]:
    pattern = rf"step (\d+): {word} ([0-9a-f]{{8}})$"
    return {int(step): bits for step, bits in re.findall(pattern, stdout, re.MULTILINE)}


def train(*options: str | int, folder: Path) -> str:
    result = run_example("train_multihost.py", *map(str, options), folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Whole:
    """A run of two processes that nothing interrupts."""

    options = ("--processes", 2, "--steps", 12, "--every", 4)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
    said = "loss nan, scale 32768, skipped 1  SKIPPED: the gradients are not finite"
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


def go_on(count: int, run: Path, folder: Path) -> str:
    """Two steps more of a poisoned run, in `count` processes: the seventh is skipped as well."""
    shutil.copytree(run, folder / "run")
    options = ("--processes", count, "--steps", 8, "--every", 1, "--resume", "--poison", 7)
    return train(*options, "--victim", 0, "--checkpoint", "run", folder=folder)


@slow
def test_a_checkpoint_of_two_processes_goes_on_in_another_number(poisoned, tmp_path):
    """A step that is skipped changes nothing: split anew and saved again, all is as it was."""
    losses = []
    for count in (1, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        stdout = go_on(count, poisoned[0], folder)
        assert f"[0] {count} processes, {count} devices, 64 examples a step" in stdout
        assert checksums(stdout, "starts from") == {6: checksums(poisoned[1], "saves")[6]}
        for process in range(count):
            assert steps_of(stdout, process)[7].startswith("loss nan, scale 16384, skipped 2")
        assert_same_bits(untouched(arrays(poisoned[0], 6)), untouched(arrays(folder / "run", 7)))
        # Then training goes on, on the same batch, which more processes sum in another order.
        made = re.match(r"loss (\S+), scale 16384, skipped 2$", steps_of(stdout)[8])
        losses.append(float(made[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_run_resumes_bitwise(victim, whole, tmp_path):
    """JAX 0.12 aborts the others in C++, 0.10 raises; process 0 has the coordinator."""
    options = (*whole.options, "--checkpoint", "run", "--kill", 10, "--victim", victim)
    result = run_example("train_multihost.py", *map(str, options), folder=tmp_path)
    assert result.returncode == 1
    out = result.stdout
    assert f"launcher: process {victim} was ended by SIGKILL after step 10\n" in out
    other, _, seconds = re.search(
        r"launcher: process (\d) (exited with 1|was ended by SIGABRT) (\S+) s later\n", out
    ).groups()
    assert int(other) == 1 - victim
    assert float(seconds) < 20, "twice the heartbeat"
    start, command = re.search(
        r"^launcher: to go on from step (\d+):\n    (.*)$", out, re.MULTILINE
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


def interfere(folder: Path, *options: str | int, signal_to) -> tuple[int, str, float]:
    """Calls `signal_to(launcher, children)` after step 5: the exit code, the output, seconds."""
    command = [sys.executable, EXAMPLES / "train_multihost.py", "--processes", 2, *options]
    # What a shell starts in the background ignores SIGINT, and so would all that it starts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=cpu_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    signal.signal(signal.SIGINT, handler)
    with started as launcher:
        try:
            lines = []
            for line in launcher.stdout:
                lines.append(line)
                if line.startswith("[0] step 5: loss"):
                    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
                    children = [int(pid) for pid in listed.split()]
                    since = time.monotonic()
                    signal_to(launcher.pid, children)
            code = launcher.wait(30)
            seconds = time.monotonic() - since
        finally:
            launcher.kill()
    assert len(children) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in children), "none is left behind"
    return code, "".join(lines), seconds


@slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_process_that_stops_is_noticed_by_its_heartbeat(tmp_path):
    def stop(launcher, children):
        os.kill(children[1], signal.SIGSTOP)

    options = ("--steps", 3000, "--heartbeat", 5)
    code, out, seconds = interfere(tmp_path, *options, signal_to=stop)
    assert code == 1
    assert "\nlauncher: process 1 hangs after step " in out
    assert re.search(
        r"^launcher: process 0 was ended by SIGABRT after step \d+$", out, re.MULTILINE
    )
    assert "launcher: to go on from the beginning, no checkpoint is whole:\n" in out
    assert seconds < 40, "a heartbeat, and the grace of another and ten seconds"


@slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_all_save_and_stop_when_one_is_told_that_its_machine_goes(tmp_path):
    def terminate(launcher, children):
        os.kill(children[1], signal.SIGTERM)

    options = ("--steps", 3000, "--every", 3000, "--checkpoint", "run")
    code, out, _ = interfere(tmp_path, *options, signal_to=terminate)
    assert code == 0
    (step,) = checksums(out, "saves")
    assert f"[0] stops after step {step}, because one of the processes was told to\n" in out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [str(step)]
    assert arrays(tmp_path / "run", step)["['step']"] == step


@slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_what_interrupts_the_launcher_ends_all(name, tmp_path):
    def interrupt(launcher, children):
        os.kill(launcher, getattr(signal, name))

    code, out, seconds = interfere(tmp_path, "--steps", 3000, signal_to=interrupt)
    assert code == 130
    assert re.search(
        r"^launcher: stopped after step \d+; all processes are killed$", out, re.MULTILINE
    )
    assert "Traceback" not in out
    assert seconds < 10


@slow
def test_a_run_that_is_finished_and_one_that_is_damaged(whole, tmp_path):
    shutil.copytree(whole.folder / "run", tmp_path / "run")
    options = ("--processes", 2, "--steps", 8, "--checkpoint", "run", "--resume")
    out = train(*options, folder=tmp_path)
    assert "[0] the run is finished: it has made 12 steps; a larger --steps continues it\n" in out
    assert out.splitlines()[-1] == whole.stdout.splitlines()[-1]

    for file in (tmp_path / "run" / "12").rglob("manifest.ocdbt"):
        file.write_bytes(b"")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    result = run_example("train_multihost.py", *map(str, options), folder=tmp_path)
    assert result.returncode == 2, result.stdout
    assert re.search(
        r"run/12 is damaged \(.*; nothing was changed: move it away to go on from the one before",
        result.stdout,
    )
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


FAILS = """
import sys
sys.path.insert(0, {examples!r})
import jax
import train_multihost as script
share = script.my_share
def my_share(data, step, args):
    if step == 3 and jax.process_index() == 1:
        raise OSError("no such disk")
    return share(data, step, args)
script.my_share = my_share
script.main()
"""


@slow
def test_an_exception_in_one_process_ends_the_other(tmp_path):
    """At exit, JAX waits five minutes for all to come: the other waits for a gradient."""
    (tmp_path / "fails.py").write_text(FAILS.format(examples=str(EXAMPLES)))
    started = time.monotonic()
    result = run_python("fails.py", "--processes", "2", folder=tmp_path)
    assert result.returncode == 1
    assert "[1] OSError: no such disk\n" in result.stdout
    assert "launcher: process 1 exited with 1 after step 2\n" in result.stdout
    assert time.monotonic() - started < 100


@slow
def test_what_only_the_processes_can_refuse(whole, monkeypatch):
    def refused(*options):
        result = run_example("train_multihost.py", *options, folder=whole.folder)
        assert result.returncode == 2
        return result

    options = ("--processes", "2", "--steps", "20")
    with monkeypatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "3")
        out = refused(*options).stdout
    said = "[0] train_multihost.py: error: --batch 64 does not divide by the 6 devices there are\n"
    assert said in out
    assert "launcher: process" not in out
    assert out.count("error") == 1
    out = refused(*options, "--checkpoint", "run", "--resume", "--seed", "3").stdout
    assert "run has {'batch': 64, 'seed': 0}, and this one {'batch': 64, 'seed': 3}" in out
    assert sorted(path.name for path in (whole.folder / "run").iterdir()) == ["12", "8"]
    said = refused().stderr
    assert "JAX finds no cluster here (" in said
    assert "--processes 2 starts two processes" in said
