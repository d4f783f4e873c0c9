"""Reads the text of an optimised HLO program: contractions, collectives, library calls, cycles."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

from jaxmp._preflight.hlo_places import Place, Places

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?[^=]*?\)?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[subf]\w*\d+\w*|c64|c128)\[([\d,]*)\]")
_OPERAND = re.compile(r"%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# An operation whose cycles the TPU compiler does not know has the largest 63- or 64-bit integer.
_UNKNOWN_CYCLES = 2**62
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

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
# What XLA writes into a tuple's shape, and among operands, from the sixth on: /*index=5*/.
_COMMENT = re.compile(r"/\*.*?\*/")


class Multiplied(NamedTuple):
    """A matrix product or convolution of an optimised program.

    Attributes:
      op: ``dot``, ``convolution``, or what library call it is.
      dtype: what it multiplies, ``float8_e4m3fn``, or of two ``bfloat16*float32``.
      operands: the operands, ``float8_e4m3fn[512,256]``. Where the compiler has turned or reshaped
        them, as it multiplies them.
      result: the result, likewise.
      place: where it was written.
    """

    op: str
    dtype: str
    operands: tuple[str, ...]
    result: str
    place: Place

    @property
    def in_8_bits(self) -> bool:
        """Whether it multiplies 8-bit operands (or 4-bit ones), and no others."""
        return all(dtype.startswith(_NARROW) for dtype in self.dtype.split("*"))


_NARROW = ("float8_", "int8", "uint8", "float4_", "int4", "uint4")


class Program(NamedTuple):
    """What an optimised program does.

    Attributes:
      contractions: matrix products and convolutions by what they multiply, library calls included.
        A loop's body counts once.
      collectives: (kind, dtype) → (how many, bytes of their results on one device).
      library_calls: how many custom calls there are of each target.
      cycles: the schedule's estimated cycles, where the compiler gives them (TPU), without those of
        `unknown_cycles`.
      products: the contractions, one by one.
      unknown_cycles: how many operations there are whose cycles the compiler does not know.
    """

    contractions: dict[str, int]
    collectives: dict[tuple[str, str], tuple[int, int]]
    library_calls: dict[str, int]
    cycles: int | None
    products: tuple[Multiplied, ...] = ()
    unknown_cycles: int = 0

    @property
    def products_in_8_bits(self) -> tuple[Multiplied, ...]:
        """Those of the products that multiply 8-bit operands."""
        return tuple(product for product in self.products if product.in_8_bits)


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
    channels: set[tuple[str, str]] = set()
    places = Places(text)
    products: list[Multiplied] = []
    collectives: dict[tuple[str, str], tuple[int, int]] = {}
    calls: Counter[str] = Counter()
    for line in text.splitlines():
        match = _INSTRUCTION.match(_COMMENT.sub("", line))
        if match is None:
            continue
        name, shape, op, rest = match.groups()
        shapes[name] = shape
        target = _TARGET.search(rest) if op == "custom-call" else None
        if target:
            calls[target.group(1)] += 1
        multiplies = target is not None and _multiplies(target.group(1))
        if op in ("dot", "convolution") or multiplies:
            operands = [shapes.get(o, "") for o in _OPERAND.findall(_arguments(rest))[:2]]
            products.append(
                Multiplied(
                    target.group(1) if target else op,
                    "*".join(sorted({_dtype(operand) for operand in operands} - {""})),
                    tuple(map(_type, operands)),
                    _type(shape),
                    places.of(rest),
                )
            )
        kind = op.removesuffix("-start")
        if kind in _COLLECTIVES and not op.endswith("-done"):
            # TPUs overlap one collective with several fusions, each of which then repeats it.
            channel = _CHANNEL.search(rest)
            if channel and (kind, channel.group(1)) in channels:
                continue
            if channel:
                channels.add((kind, channel.group(1)))
            for dtype, size in _results(shape, op).items():
                count, total = collectives.get((kind, dtype), (0, 0))
                collectives[kind, dtype] = count + 1, total + size
    cycles = [int(count) for count in _CYCLES.findall(text)]
    known = [count for count in cycles if count < _UNKNOWN_CYCLES]
    return Program(
        dict(Counter(product.dtype for product in products).most_common()),
        collectives,
        dict(calls),
        sum(known) if known else None,
        tuple(products),
        len(cycles) - len(known),
    )


def _multiplies(target: str) -> bool:
    """Whether a library call is a matrix product or a convolution (not attention: many)."""
    words = ("matmul", "gemm", "blockScaledDot")
    return any(word in target for word in words) or target.startswith("__cudnn$conv")


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


def _type(shape: str) -> str:
    """The type of an array, or of the first of a tuple's: ``float8_e4m3fn[512,256]``."""
    match = _SHAPE.search(shape)
    return f"{_dtype(shape)}[{match.group(2)}]" if match else ""


def _results(shape: str, op: str) -> dict[str, int]:
    """Bytes by dtype of what a collective returns.

    One that was started has the shape (operands, results, handles …), but for all-reduce, which
    has its results' alone.
    """
    if op.endswith("-start") and op != "all-reduce-start":
        members = _members(shape)
        shape = members[1] if len(members) > 1 else shape
    sizes: Counter[str] = Counter()
    for dtype, dims in _SHAPE.findall(shape):
        count = math.prod(int(d) for d in dims.split(",") if d)
        sizes[_DTYPES.get(dtype, dtype)] += math.ceil(count * _bits(dtype) / 8)
    return dict(sizes)


def _members(shape: str) -> list[str]:
    """The shapes in a tuple's shape; the shape itself if it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    members, depth = [""], 0
    for char in shape[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            members.append("")
        else:
            members[-1] += char
    return members


def _bits(dtype: str) -> int:
    """The bits of an element, by HLO's name of its dtype."""
    bits = _BITS.search(dtype)
    return int(bits.group()) if bits else 8
