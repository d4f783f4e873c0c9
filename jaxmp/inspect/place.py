"""Where an equation stands: its line and module, how often it runs, and in which pass."""

from __future__ import annotations

import re
import site
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.extend import source_info_util

from jaxmp.autocast.equations import CAST_SCOPE
from jaxmp.autocast.rules import REGION, Rules, region_rules

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {
        *site.getsitepackages(),
        *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
        _PACKAGE,
    }
)
_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\(([^()]*)\)")


_SCOPES_OF_OTHERS = frozenset({"rematted_computation", CAST_SCOPE})


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      path: the module path and named scopes around it, without those of transformations.
      source: ``file.py:line`` of the user's code.
      times: how often it runs per call: lengths of scans multiplied; a while loop's body counts
        once, a branch of a cond by its share.
      backward: whether it belongs to a backward pass.
      region: the rules of the autocast region it stands in, or None.
    """

    path: str = ""
    source: str = ""
    times: float = 1
    backward: bool = False
    region: Rules | None = None


def place_of(eqn: jex_core.JaxprEqn, around: Place) -> Place:
    """The place of an equation in a jaxpr that stands at `around`."""
    stack = str(eqn.source_info.name_stack)
    here = "/".join(filter(None, (around.path, _module_path(stack))))
    return Place(
        path=here,
        source=user_line(eqn) or around.source or _innermost_line(eqn),
        times=around.times,
        backward=around.backward or "transpose(" in stack,
        region=region_rules(eqn) or around.region,
    )


def place_inside(eqn: jex_core.JaxprEqn, place: Place) -> Place:
    """The place of the jaxprs inside an equation that stands at `place`."""
    if eqn.primitive.name == "scan":
        return place._replace(times=place.times * eqn.params["length"])
    if eqn.primitive.name == "cond":
        return place._replace(times=place.times / len(eqn.params["branches"]))
    return place


def is_ours(eqn: jex_core.JaxprEqn) -> bool:
    """Whether autocast added an equation."""
    return CAST_SCOPE in str(eqn.source_info.name_stack)


def user_line(eqn: jex_core.JaxprEqn) -> str:
    """``file.py:line`` of the innermost frame that is in no library; empty if all are."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name: str = frame.file_name
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{Path(name).name}:{frame.line_num}"
    return ""


def _innermost_line(eqn: jex_core.JaxprEqn) -> str:
    """The line in a library, where no frame is the user's; empty if it is unknown."""
    summary = source_info_util.summarize(eqn.source_info).split(" ")[0]
    return ":".join(summary.rsplit("/", 1)[-1].split(":")[:2]) if ":" in summary else ""


def _module_path(stack: str) -> str:
    """A name stack without transformations and markers: ``jvp(Model)/layers_0`` → same path."""
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
