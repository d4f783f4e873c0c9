"""What the programs here share: signs of life, an orderly Ctrl-C, when to measure."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Self

INTERRUPTED = 130  # the exit code of what Ctrl-C has ended
SECONDS = 4  # between signs of life


def tell(text: str) -> None:
    """To stderr at once, which a handler of signals may do as well; `print` is not for those."""
    os.write(2, text.encode())


@contextlib.contextmanager
def waiting(what: str, *, show: bool = True) -> Iterator[None]:
    """Says what is being done, every few seconds that it still is, and lets Ctrl-C end it at once.

    Python itself sees Ctrl-C between two of its instructions, and a compilation is one of them.
    """
    if not show:
        yield
        return
    started = time.perf_counter()
    awake, wakes = socket.socketpair()
    wakes.settimeout(0)  # as `set_wakeup_fd` wants it

    def watch() -> None:
        while True:
            if not select.select([awake], [], [], SECONDS)[0]:
                tell(f" {time.perf_counter() - started:.0f} s ...")
            elif (told := awake.recv(1)) == bytes([signal.SIGINT]):
                tell(f"\nstopped ({what})\n")
                os._exit(INTERRUPTED)
            elif not told:
                return

    thread = threading.Thread(target=watch, daemon=True)
    before = signal.set_wakeup_fd(wakes.fileno())  # gets the number of each signal
    thread.start()
    try:
        tell(f"{what} ...")
        yield
    except KeyboardInterrupt:
        thread.join(1)  # which ends the program
        raise
    finally:
        signal.set_wakeup_fd(before)
        wakes.close()
        thread.join()
        awake.close()
    tell(f" {time.perf_counter() - started:.1f} s\n")  # the watcher writes no more


class CtrlC:
    """Ctrl-C, noted for a loop to end between two steps. A second one ends the program at once."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> Self:
        self.before = signal.getsignal(signal.SIGINT)
        if self.before is not signal.SIG_IGN:  # as it is of what a shell starts in the background
            signal.signal(signal.SIGINT, self.note)
        return self

    def note(self, *_: object) -> None:
        if self.pressed:
            tell("\nstopped at once: what was being written is left out\n")
            os._exit(INTERRUPTED)
        self.pressed = True
        tell("\nstops after this step; Ctrl-C again stops at once\n")

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)


def stop(message: str) -> NoReturn:
    """Ends the program, which Ctrl-C was pressed in."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(INTERRUPTED)


def start(main: Callable[[], None]) -> None:
    """Runs a program: its lines come at once through a pipe, too, and Ctrl-C is not an error."""
    sys.stdout.reconfigure(line_buffering=True)
    try:
        main()
    except KeyboardInterrupt:
        stop("\nstopped")


def check_file(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Refuses a path that nothing can be written to: now, and not after the work."""
    if not path.parent.is_dir():
        parser.error(f"{option}: there is no folder {path.parent}")
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        parser.error(f"{option}: {path} cannot be written ({error.strerror})")
    if new:
        path.unlink()


def eighths(steps: int) -> set[int]:
    """After which of `steps` steps an eighth of them, two, ... and all are made."""
    eighth = -(-steps // 8)
    return {*range(eighth, steps, eighth), steps}


def often_at_first(steps: int) -> set[int]:
    """When to measure what changes fastest at first: after 0, 1, 2, 4, ... steps, and eighths."""
    powers = {2**i for i in range(steps.bit_length())}
    return {0, *(n for n in powers if n < min(eighths(steps))), *eighths(steps)}
