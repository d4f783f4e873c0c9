"""The source of an equation: the user's line, and the Flax module."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

import flax
import jax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.attributes import frames, line_number, name_stack, source_summary, traceback
from jaxmp._core.jaxprs.scopes import (
    CAST,
    DEQUANTIZE,
    EMULATED,
    KEPT,
    KEY,
    LAYERS,
    MISSED,
    PARAMETER,
    REGION,
    ROWS,
    SEED,
    SKIPPED,
    TESTED,
    UNFUSED,
    UNSCALE,
)

# The folders of installed packages and of the standard library.
_INSTALLED = {
    *site.getsitepackages(),
    site.getusersitepackages(),
    *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
}
# Libraries that may be elsewhere (on PYTHONPATH, behind a link or a .pth file): they are recognized
# by the folder they were loaded from.
_PACKAGES = (
    "jax", "jaxlib", "jaxmp", "flax", "optax", "jmp", "numpy", "ml_dtypes",
    "chex", "diffrax", "distrax", "einops", "equinox", "haiku", "jaxopt", "jaxtyping", "lineax",
    "optimistix", "orbax",
)  # fmt: skip
# Those that promote types on behalf of their caller.
PROMOTING = tuple(str(Path(module.__path__[0])) + os.sep for module in (jax, flax))
# What IPython calls the cells of a notebook, now and before, and those of its shell.
_CELL = re.compile(r"[\\/]ipykernel_\d+[\\/]\d+\.py$|^<ipython-input-")
_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\(([^()]*)\)")
# Scopes that are not the user's begin with one of these.
_MARKS = (
    *(REGION, KEY, KEPT, SKIPPED, MISSED, EMULATED, UNFUSED, CAST, UNSCALE, TESTED),
    *(SEED, PARAMETER, DEQUANTIZE, ROWS, LAYERS),
)
_NOT_MODULES = ("rematted_computation", *_MARKS)


def level_of_user() -> int:
    """Returns the `stacklevel` of the innermost caller outside of JAX, Flax and jaxmp, to warn."""
    folders = (*PROMOTING, str(Path(__file__).parents[2]) + os.sep, "<")
    for level, frame in enumerate(inspect.stack(0)[1:], start=1):
        file = frame.filename
        if _CELL.search(file) or not (file.startswith(folders) or file == contextlib.__file__):
            return level
    return 1


def is_backward(eqn: JaxprEqn) -> bool:
    """Returns whether an equation belongs to a backward pass."""
    return in_scope(eqn, "transpose(")


def in_scope(eqn: JaxprEqn, scope: str) -> bool:
    """Returns whether the name stack of an equation, as text, contains `scope`."""
    return _names(name_stack(eqn), scope)


@functools.lru_cache(maxsize=4096)
def _names(stack: Any, scope: str) -> bool:
    return scope in str(stack)


def user_line(eqn: JaxprEqn) -> str:
    """Returns ``file.py:line`` of the innermost frame outside of libraries; empty if none is.

    Of a notebook's cell, ``cell:line``.
    """
    return _user_line(traceback(eqn), _libraries())


@functools.lru_cache(maxsize=4096)  # layers of one kind come from the same frames
def _user_line(where: Any, libraries: tuple[str, ...]) -> str:
    for frame in frames(where):
        file = frame[0].co_filename
        name = "cell" if _CELL.search(file) else Path(file).name
        if name == "cell" or not file.startswith(libraries):
            return f"{name}:{line_number(where, frame)}"
    return ""


def in_library(file: str) -> bool:
    """Returns whether a source file is a library's, or not a file at all, as ``<string>``."""
    return file.startswith(_libraries())


def _libraries() -> tuple[str, ...]:
    """Returns the path prefixes of installed packages, of loaded libraries, and of non-files."""
    return _prefixes(tuple(map(sys.modules.get, _PACKAGES)))


@functools.lru_cache(maxsize=16)
def _prefixes(modules: tuple[Any, ...]) -> tuple[str, ...]:
    folders = _INSTALLED.union(*(getattr(module, "__path__", ()) for module in modules))
    folders |= {os.path.realpath(folder) for folder in folders}  # with links resolved, and not
    return ("<", *(folder.rstrip(os.sep) + os.sep for folder in folders))


def library_line(eqn: JaxprEqn) -> str:
    """Returns ``file.py:line`` in a library, where no frame is the user's; empty if unknown."""
    summary = source_summary(eqn).split(" ")[0]
    return ":".join(summary.rsplit("/", 1)[-1].split(":")[:2]) if ":" in summary else ""


def module_path(eqn: JaxprEqn) -> str:
    """Returns an equation's scopes, without transformations and markers: ``Model/layers_0``."""
    return plain_path(str(name_stack(eqn)))


def plain_path(stack: str) -> str:
    """Returns a name stack without transformations and markers."""
    while True:
        plain = _WRAPPER.sub(r"\1", stack)
        if plain == stack:
            break
        stack = plain
    kept: list[str] = []
    for part in stack.split("/"):
        # JAX names an einsum's equations by its letters: ``bth,hd->btd``.
        named = part and "->" not in part and not part.startswith(_NOT_MODULES)
        if named and (not kept or kept[-1] != part):
            kept.append(part)
    # JAX names what it transposes under `jax.checkpoint` twice: ``jvp(A)/B/jvp(A)/B/checkpoint/C``.
    for size in range(len(kept) // 2, 0, -1):
        if kept[:size] == kept[size : 2 * size]:
            return "/".join(kept[size:])
    return "/".join(kept)
