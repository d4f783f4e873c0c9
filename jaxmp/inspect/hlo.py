"""Reads the text of an optimised HLO program: contractions, collectives, library calls, cycles."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?[^=]*?\)?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[subf]\w*\d+\w*|c64|c128)\[([\d,]*)\]")
_OPERAND = re.compile(r"%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# HLO's names of dtypes → NumPy's.
_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_BITS = re.compile(r"\d+")


class Program(NamedTuple):
    """What an optimised program does.

    Attributes:
      contractions: matrix products and convolutions by what they multiply, library calls included.
        A loop's body counts once.
      collectives: (kind, dtype) → (how many, bytes of their results on one device).
      library_calls: how many custom calls there are of each target.
      cycles: the schedule's estimated cycles, where the compiler gives them (TPU).
    """

    contractions: dict[str, int]
    collectives: dict[tuple[str, str], tuple[int, int]]
    library_calls: dict[str, int]
    cycles: int | None


def read_hlo(text: str) -> Program:
    """Reads the text of a compiled program.

    Example:
      >>> read_hlo('''
      ...   %a = bf16[8,8]{1,0} parameter(0)
      ...   ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
      ... ''').contractions
      {'bfloat16': 1}
    """
    shapes: dict[str, str] = {}
    contractions: Counter[str] = Counter()
    collectives: dict[tuple[str, str], tuple[int, int]] = {}
    calls: Counter[str] = Counter()
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, op, rest = match.groups()
        shapes[name] = shape
        target = _TARGET.search(rest) if op == "custom-call" else None
        if target:
            calls[target.group(1)] += 1
        multiplies = target is not None and _multiplies(target.group(1))
        if op in ("dot", "convolution") or multiplies:
            operands = _OPERAND.findall(_arguments(rest))[:2]
            dtypes = {_dtype(shapes.get(operand, "")) for operand in operands} - {""}
            contractions["*".join(sorted(dtypes))] += 1
        kind = op.removesuffix("-start")
        if kind in _COLLECTIVES and not op.endswith("-done"):
            for dtype, size in _results(shape, is_start=op.endswith("-start")):
                count, total = collectives.get((kind, dtype), (0, 0))
                collectives[kind, dtype] = count + 1, total + size
    cycles = _CYCLES.findall(text)
    return Program(
        dict(contractions.most_common()),
        collectives,
        dict(calls),
        sum(map(int, cycles)) if cycles else None,
    )


def _multiplies(target: str) -> bool:
    """Whether a library call is a matrix product or a convolution (not attention: many)."""
    return "matmul" in target or "gemm" in target or target.startswith("__cudnn$conv")


def _arguments(rest: str) -> str:
    """The text up to the parenthesis that closes an instruction's operands."""
    depth = 1
    for i, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return _SHAPE.sub("", re.sub(r"\{[^{}]*\}", "", rest[:i]))
    return rest


def _dtype(shape: str) -> str:
    match = _SHAPE.search(shape)
    return _DTYPES.get(match.group(1), match.group(1)) if match else ""


def _results(shape: str, *, is_start: bool) -> list[tuple[str, int]]:
    """(dtype, bytes) of what a collective produces; a started one has its operands first."""
    found = [
        (_DTYPES.get(dtype, dtype), math.prod(int(d) for d in dims.split(",") if d) * _bytes(dtype))
        for dtype, dims in _SHAPE.findall(shape)
    ]
    return found[len(found) // 2 :] if is_start and len(found) > 1 else found


def _bytes(dtype: str) -> int:
    bits = _BITS.search(dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1
