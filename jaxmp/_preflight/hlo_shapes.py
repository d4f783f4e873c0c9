"""Shapes in the text of an HLO program: dtypes, members of tuples, bytes."""

from __future__ import annotations

import math
import re
from collections import Counter

SHAPE = re.compile(r"\b(pred|[subf]\w*\d+\w*|c64|c128)\[([\d,]*)\]")

# HLO's names of dtypes → NumPy's.
_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e8m0fnu": "float8_e8m0fnu",
    "f8e4m3": "float8_e4m3", "f8e3m4": "float8_e3m4", "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2fnuz": "float8_e5m2fnuz", "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
    "f4e2m1fn": "float4_e2m1fn", "c64": "complex64", "c128": "complex128", "s2": "int2",
    "u2": "uint2", "s4": "int4", "u4": "uint4", "s8": "int8", "s16": "int16", "s32": "int32",
    "s64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_BITS = re.compile(r"\d+")


def dtype_of(shape: str) -> str:
    """The dtype of an array, or of the first of a tuple's, in NumPy's words."""
    match = SHAPE.search(shape)
    return _DTYPES.get(match.group(1), match.group(1)) if match else ""


def type_of(shape: str) -> str:
    """The type of an array, or of the first of a tuple's: ``float8_e4m3fn[512,256]``."""
    match = SHAPE.search(shape)
    return f"{dtype_of(shape)}[{match.group(2)}]" if match else ""


def sizes_by_dtype(shape: str) -> Counter[str]:
    """Bytes by dtype of an array, or of a tuple's."""
    sizes: Counter[str] = Counter()
    for dtype, dims in SHAPE.findall(shape):
        count = math.prod(int(d) for d in dims.split(",") if d)
        sizes[_DTYPES.get(dtype, dtype)] += math.ceil(count * _bits(dtype) / 8)
    return sizes


def members(shape: str) -> list[str]:
    """The shapes in a tuple's shape; the shape itself if it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    found, depth = [""], 0
    for char in shape[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            found.append("")
        else:
            found[-1] += char
    return [member.strip() for member in found]


def _bits(dtype: str) -> int:
    """The bits of an element, by HLO's name of its dtype."""
    bits = _BITS.search(dtype)
    return int(bits.group()) if bits else 8
