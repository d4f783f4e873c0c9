"""Where an equation was written: the user's line, and the Flax module."""

from __future__ import annotations

import os
import re
import site
import sysconfig
from pathlib import Path
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jaxmp._autocast.equations import CAST_SCOPE
from jaxmp._autocast.rules import REGION

_LIBRARIES = tuple(
    folder + os.sep
    for folder in {
        *site.getsitepackages(),
        *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),  # jaxmp
    }
)
_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\(([^()]*)\)")
_SCOPES_OF_OTHERS = frozenset({"rematted_computation", CAST_SCOPE})


def user_line(eqn: JaxprEqn) -> str:
    """``file.py:line`` of the innermost frame that is in no library; empty if all are."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name: str = frame.file_name
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{Path(name).name}:{frame.line_num}"
    return ""


def library_line(eqn: JaxprEqn) -> str:
    """The line in a library, where no frame is the user's; empty if it is unknown."""
    summary = source_info_util.summarize(eqn.source_info).split(" ")[0]
    return ":".join(summary.rsplit("/", 1)[-1].split(":")[:2]) if ":" in summary else ""


def module_path(eqn: JaxprEqn) -> str:
    """The scopes around an equation without transformations and markers: ``Model/layers_0``."""
    return plain_path(str(eqn.source_info.name_stack))


def plain_path(stack: str) -> str:
    """A name stack without transformations and markers."""
    while True:
        plain = _WRAPPER.sub(r"\1", stack)
        if plain == stack:
            break
        stack = plain
    kept: list[str] = []
    for part in stack.split("/"):
        named = part and part not in _SCOPES_OF_OTHERS and not part.startswith(REGION)
        if named and (not kept or kept[-1] != part):
            kept.append(part)
    return "/".join(kept)
