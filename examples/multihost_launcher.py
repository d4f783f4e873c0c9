"""Starts the processes of `train_multihost.py` on this machine, and tells how they ended.

It stands for what starts one process on each host of a cluster. It distributes nothing.
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

from etils import epath

END = ""  # no line that is read is empty: each has its line feed


class Process:
    """One of them: a thread puts what it prints, and `END`, into a queue of all."""

    def __init__(self, index: int, command: list[str], lines: queue.SimpleQueue) -> None:
        self.index, self.lines = index, lines
        self.step = "before its first step"
        self.popen = subprocess.Popen(
            command,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the launcher, which ends them
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            self.lines.put((self, line))
        self.popen.wait()
        self.lines.put((self, END))

    def show(self, line: str) -> int | None:
        """Prints a line, and returns the step that it tells of; the steps of one are enough."""
        match = re.match(r"step (\d+): loss ", line)
        if match:
            self.step = f"after step {match[1]}"
        if not match or self.index == 0 or "LEFT OUT" in line:
            print(f"[{self.index}] {line}", end="", flush=True)
        return int(match[1]) if match else None

    @property
    def how(self) -> str:
        code = self.popen.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def launch(
    command: list[str],
    count: int,
    *,
    timeout: float,
    grace: float,
    kill: tuple[int, int] | None = None,
) -> int:
    """Runs `count` processes of `command`, and ends all of them when one ends badly.

    Args:
      command: What `--coordinator`, `--processes` and `--process` are added to.
      count: The number of processes.
      timeout: So many seconds in which none of them prints a step are a hang.
      grace: Seconds that the others have to notice that one has died.
      kill: (process, step): that process gets kill -9 after that step.

    Returns:
      0 if all did well, 2 if they refused what was asked for, 130 after Ctrl-C, else 1.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lines, processes = queue.SimpleQueue(), []
    # Held, so that nobody else gets the port before process 0 has it as well.
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{port.getsockname()[1]}"
        os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = coordinator
        try:
            for i in range(count):
                which = ["--processes", str(count), "--coordinator", coordinator]
                processes.append(Process(i, [*command, *which, "--process", str(i)], lines))
            return watch(processes, lines, timeout, grace, kill)
        except KeyboardInterrupt:
            print("launcher: interrupted, ends all processes", flush=True)
            return 130
        finally:
            for process in processes:
                process.popen.kill()
                process.popen.wait()


def watch(processes, lines, timeout, grace, kill) -> int:
    """Waits until all have ended; after one has ended badly, for the grace."""
    ended, since = [], None
    deadline = time.monotonic() + timeout
    while len(ended) < len(processes):
        try:
            process, line = lines.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if line == END:
            ended.append((process, time.monotonic()))
            if process.popen.returncode and since is None:
                since, deadline = time.monotonic(), time.monotonic() + grace
        elif (step := process.show(line)) is not None:
            if since is None:
                deadline = time.monotonic() + timeout
            if (process.index, step) == kill:
                process.popen.kill()
    # Who was aborted (in JAX 0.12, by the runtime) was so because another one had died.
    bad = [(process, at) for process, at in ended if process.popen.returncode]
    bad.sort(key=lambda end: -end[0].popen.returncode in {signal.SIGABRT, -1})
    for i, (process, at) in enumerate(bad):
        when = process.step if i == 0 else f"{at - since:.1f} s later"
        print(f"launcher: process {process.index} {process.how} {when}")
    for process in processes:
        if process not in [p for p, _ in ended]:
            why = f"printed no step for {timeout:g} s" if not bad else f"had not ended {grace:g} s later"
            print(f"launcher: process {process.index} {why} and is killed, {process.step}")
    if len(ended) == len(processes) and not bad:
        return 0
    return 2 if bad and bad[0][0].popen.returncode == 2 else 1


def saved_steps(folder: str) -> list[int]:
    """The steps of the whole checkpoints in a folder: one that is being written has another name."""
    folder = epath.Path(folder)
    return sorted(int(f.name) for f in folder.iterdir() if f.name.isdigit()) if folder.exists() else []
