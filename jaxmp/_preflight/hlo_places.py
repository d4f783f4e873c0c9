"""Where an instruction of an HLO program was written, from its metadata."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jaxmp._jaxprs.source import in_library, plain_path
from jaxmp._preflight.hlo_text import Instruction, split

_FIELD = re.compile(r"(\w+)=(\d+)")
# What JAX and `jax.export` put into names, around what users write.
_NOT_WRITTEN = re.compile(
    r"^(?:jit\(.*\)|call_exported|while|body|cond|closed_call|branch_\d+_fun)$"
)
_TRANSFORMED = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")


class Place(NamedTuple):
    """Where an instruction comes from; what is not known is empty.

    Attributes:
      path: the module path and named scopes around it.
      source: ``file.py:line``, the innermost that is in no library.
      backward: whether it belongs to a backward pass.
    """

    path: str = ""
    source: str = ""
    backward: bool = False

    def __str__(self) -> str:
        words = (self.source, self.path, "backward" if self.backward else "forward")
        return " ".join(word for word in words if word)


class Places:
    """The tables at the head of a program that metadata points into."""

    def __init__(self, text: str) -> None:
        self._files = _rows(text, "FileNames")
        self._locations = _rows(text, "FileLocations")
        self._frames = _rows(text, "StackFrames")

    def of(self, instruction: Instruction) -> Place:
        """The place that the metadata of an instruction names."""
        stack = instruction.attribute("op_name")
        parts = [p for p in map(_inner, [*split(stack, "/")][:-1]) if not _NOT_WRITTEN.match(p)]
        source = self._line(int(instruction.attribute("stack_frame_id") or 0))
        return Place(plain_path("/".join(parts)), source, "transpose(" in stack)

    def _line(self, frame: int) -> str:
        """The innermost line, from a frame outwards, that is in no library."""
        while frame in self._frames:
            fields = _fields(self._frames[frame])
            location = _fields(self._locations.get(fields["file_location_id"], ""))
            file = self._files.get(location.get("file_name_id", 0), "").strip('"')
            if file and not in_library(file):
                return f"{Path(file).name}:{location['line']}"
            # Printed one too large: the outermost frame's parent, which is none, as 1.
            frame = min(fields["parent_frame_id"], frame) - 1
        return ""


def _rows(text: str, table: str) -> dict[int, str]:
    """The rows of a table at the head of a program, by number."""
    found = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else []
    return {int(number): row for number, _, row in (line.partition(" ") for line in rows)}


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in _FIELD.findall(row)}


def _inner(part: str) -> str:
    """What a part of a name stack is without the transformations around it."""
    while match := _TRANSFORMED.match(part):
        part = match.group(1)
    return part
