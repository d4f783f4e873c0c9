"""Where an instruction of an HLO program was written, from its metadata."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jaxmp._jaxprs.source import in_library, plain_path

_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
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
        self._files: dict[int, str] = {}
        self._locations: dict[int, tuple[int, int]] = {}
        self._frames: dict[int, tuple[int, int]] = {}
        section = ""
        for line in text.splitlines():
            row = _ROW.match(line)
            if row is None:
                if line.startswith(("%", "ENTRY")):
                    break  # the first computation: the tables are above all of them
                section = line.strip() or section
                continue
            number, name, fields = row.groups()
            values = {key: int(value) for key, value in _FIELD.findall(fields or "")}
            if section == "FileNames":
                self._files[int(number)] = name or ""
            elif section == "FileLocations":
                self._locations[int(number)] = values["file_name_id"], values["line"]
            elif section == "StackFrames":
                # Printed one too large: the outermost frame's parent, which is none, as 1.
                parent = values["parent_frame_id"] - 1
                self._frames[int(number)] = values["file_location_id"], parent

    def of(self, rest: str) -> Place:
        """The place that the text of an instruction, from its operands on, names."""
        name, frame = _OP_NAME.search(rest), _FRAME.search(rest)
        stack = name.group(1) if name else ""
        parts = [p for p in map(_inner, _parts(stack)[:-1]) if not _NOT_WRITTEN.match(p)]
        return Place(
            plain_path("/".join(parts)),
            self._line(int(frame.group(1))) if frame else "",
            "transpose(" in stack,
        )

    def _line(self, frame: int) -> str:
        """The innermost line, from a frame outwards, that is in no library."""
        seen = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            number, line = self._locations.get(location, (0, 0))
            file = self._files.get(number, "")
            if file and not in_library(file):
                return f"{Path(file).name}:{line}"
            frame = parent
        return ""


def _inner(part: str) -> str:
    """What a part of a name stack is without the transformations around it."""
    while match := _TRANSFORMED.match(part):
        part = match.group(1)
    return part


def _parts(stack: str) -> list[str]:
    """The parts of a name stack; slashes in parentheses are of a name."""
    parts, depth = [""], 0
    for char in stack:
        depth += (char == "(") - (char == ")")
        if char == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts
