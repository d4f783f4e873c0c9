"""The options of `train_multihost.py`, and what starts its processes on one machine.

The launcher stands for what starts a process on each host of a cluster. It distributes nothing: it
shows what the processes print, ends them when one of them dies or all hang, and says how to go on.
"""

from __future__ import annotations

import argparse
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

END = ""  # in place of a line, when a process has ended
SILENCE = 5  # seconds without a line, after which there is one to say so


def parse(description: str) -> argparse.Namespace:
    """The options, checked as far as they can be without JAX."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    count = {"type": int, "metavar": "N"}
    parser.add_argument("--processes", **count, help="start so many on this machine's CPU")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0: be one of N")
    parser.add_argument("--process", **count, help="which of them, from 0, with --coordinator")
    parser.add_argument("--steps", **count, default=40, help="default: %(default)s")
    parser.add_argument("--batch", **count, default=64, help="of all processes; default 64")
    parser.add_argument("--seed", **count, default=0, help="default: %(default)s")
    parser.add_argument("--checkpoint", metavar="DIR", help="keep checkpoints here")
    parser.add_argument("--every", **count, default=10, help="steps between them; default 10")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    parser.add_argument("--heartbeat", **count, default=10, help="silent so long: dead; default 10")
    parser.add_argument("--timeout", **count, default=120, help="seconds without a step: all hang")
    parser.add_argument("--poison", **count, help="an inf in one process's batch of this step")
    parser.add_argument("--kill", **count, help="kill -9 one process after this step")
    parser.add_argument("--victim", **count, default=-1, help="the one of both; default: the last")
    args = parser.parse_args()
    check_numbers(parser, args)
    check_checkpoint(parser, args)
    return args


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("processes", "steps", "batch", "every", "heartbeat", "timeout", "poison", "kill"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if args.seed < 0:
        parser.error(f"--seed must be at least 0, got {args.seed}")

    if (args.coordinator is None) != (args.process is None):
        parser.error("--coordinator and --process need each other")
    if args.processes is None:
        if args.coordinator is not None:
            parser.error("--coordinator needs --processes, the number of all")
        if args.kill is not None:
            parser.error("--kill needs --processes: the launcher kills")
    else:
        if args.batch % args.processes:
            parser.error(f"--batch {args.batch} does not divide by {args.processes} processes")
        for name, value in (("process", args.process or 0), ("victim", max(args.victim, 0))):
            if not 0 <= value < args.processes:
                parser.error(f"--{name} {value}: there are 0 to {args.processes - 1}")
    if args.kill is not None and args.kill > args.steps:
        parser.error(f"--kill {args.kill}: there are {args.steps} steps")


def check_checkpoint(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.checkpoint is None:
        if args.resume:
            parser.error("--resume needs --checkpoint")
    else:
        try:
            steps = saved_steps(args.checkpoint)
        except OSError as error:
            parser.error(f"--checkpoint: {args.checkpoint} is not a folder ({error.strerror})")
        if args.resume and not steps:
            parser.error(f"--resume: there is no checkpoint in {args.checkpoint}")
        if steps and not args.resume:
            parser.error(f"{args.checkpoint} holds a run; --resume continues it")


def saved_steps(folder: str) -> list[int]:
    """The steps of a folder's checkpoints; one that is not whole has another name."""
    folder = epath.Path(folder)
    names = [f.name for f in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())


def launch_here(args: argparse.Namespace) -> int:
    """Starts `--processes` of them, and says how to go on if one has died."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    code = launch(
        [sys.executable, *sys.argv],
        args.processes,
        timeout=args.timeout,
        grace=args.heartbeat + 10,
        kill=None if args.kill is None else (args.victim % args.processes, args.kill),
    )
    if code in {0, 2}:
        return code
    again = re.sub(r" --kill[ =]\d+", "", shlex.join([sys.executable, *sys.argv]))
    steps = saved_steps(args.checkpoint) if args.checkpoint else []
    if steps and not args.resume:
        again += " --resume"
    where = f"from step {steps[-1]}" if steps else "from the beginning, no checkpoint is whole"
    say(f"to go on {where}:\n    {again}")
    return code


class Process:
    """One of them: a thread puts what it prints, and at last `END`, into a queue of all."""

    def __init__(self, index: int, command: list[str], env: dict, lines: queue.SimpleQueue):
        self.index, self.lines = index, lines
        self.step = "before its first step"
        self.popen = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the launcher, which ends them
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        with self.popen.stdout as stdout:
            for line in stdout:
                self.lines.put((self, line))
        self.popen.wait()
        self.lines.put((self, END))

    def show(self, line: str) -> int | None:
        """Prints a line, and returns the step it is of; all have the same, so one's will do."""
        match = re.match(r"step (\d+): loss ", line)
        if match:
            self.step = f"after step {match[1]}"
        if not match or self.index == 0 or "SKIPPED" in line:
            print(f"[{self.index}] {line.rstrip()}", flush=True)
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
      command: What `--processes`, `--coordinator` and `--process` are added to.
      count: The number of processes.
      timeout: If none of them prints a step for so many seconds, they hang.
      grace: Seconds that the others have to notice that one has died.
      kill: (process, step): that process gets kill -9 after that step.

    Returns:
      0 if all did well, 2 if all refused what was asked for, 130 after Ctrl-C, else 1.
    """
    lines, processes = queue.SimpleQueue(), []
    # Held meanwhile, so that nobody else gets the port before process 0 has it, too.
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{port.getsockname()[1]}"
        own = {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_BIND_ADDRESS": coordinator}
        env = os.environ | own | {"PYTHONUNBUFFERED": "1"}
        command = [*command, "--processes", str(count), "--coordinator", coordinator, "--process"]
        try:
            say(f"starts {count} processes, which import JAX and compile a step first")
            processes.extend(Process(i, [*command, str(i)], env, lines) for i in range(count))
            return watch(processes, lines, timeout, grace, kill)
        except KeyboardInterrupt:
            at = processes[0].step if processes else "at its start"
            say(f"stopped {at}; all processes are killed")
            return 130
        finally:
            for process in processes:
                process.popen.kill()
                process.reader.join(5)


def say(message: str) -> None:
    print(f"launcher: {message}", flush=True)


def next_line(lines, started, deadline) -> tuple[Process, str] | None:
    """A line and whose it is, or None at the deadline."""
    while True:
        left = max(0, deadline - time.monotonic())
        try:
            return lines.get(timeout=min(left, SILENCE))
        except queue.Empty:
            if left <= SILENCE:
                return None
            say(f"waits for the processes, {time.monotonic() - started:.0f} s after their start")


def watch(processes, lines, timeout, grace, kill) -> int:
    """Waits until all have ended; once one has ended badly, no longer than the grace."""
    running, bad = list(processes), []
    started = time.monotonic()
    deadline = started + timeout
    while running:
        if (found := next_line(lines, started, deadline)) is None:
            break
        process, line = found
        if line == END:
            running.remove(process)
            if process.popen.returncode:
                bad.append((process, time.monotonic()))
                deadline = bad[0][1] + grace
        elif (step := process.show(line)) is not None:
            if not bad:
                deadline = time.monotonic() + timeout
            if (process.index, step) == kill:
                process.popen.kill()

    if not running and not bad:
        return 0
    if not running and {process.popen.returncode for process, _ in bad} == {2}:
        return 2  # which they have explained
    # The others end by an exception or an abort of JAX's: one that ended by itself was the first.
    rank = {-signal.SIGABRT: 2, 1: 1}
    bad.sort(key=lambda end: rank.get(end[0].popen.returncode, 0))
    dead = []
    for process, at in bad:
        when = f"{abs(at - bad[0][1]):.1f} s later" if dead else process.step
        dead.append(f"launcher: process {process.index} {process.how} {when}")
    hung = [f"launcher: process {p.index} hangs {p.step}, and is killed" for p in running]
    if not bad:
        hung.insert(0, f"launcher: no process has printed a step for {timeout:g} s")
    # If all that ended were aborted, it is for one that hangs.
    aborted = all(process.popen.returncode == -signal.SIGABRT for process, _ in bad)
    print(*(hung + dead if aborted else dead + hung), sep="\n", flush=True)
    return 1
