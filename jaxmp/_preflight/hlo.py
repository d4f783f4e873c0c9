"""Reads the text of an optimised HLO program: contractions, collectives, library calls, cycles."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from jaxmp._preflight.hlo_collectives import Collective, collectives
from jaxmp._preflight.hlo_groups import Mesh
from jaxmp._preflight.hlo_places import Place, Places
from jaxmp._preflight.hlo_text import Instruction, computations, type_of

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# An operation whose cycles the TPU compiler does not know has the largest 63- or 64-bit integer.
_UNKNOWN_CYCLES = 2**62
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


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
      library_calls: how many custom calls there are of each target.
      cycles: the schedule's estimated cycles, where the compiler gives them (TPU), without those of
        `unknown_cycles`.
      products: the contractions, one by one.
      unknown_cycles: how many operations there are whose cycles the compiler does not know.
      moved: the collectives, one by one; each says how often it runs.
    """

    contractions: dict[str, int]
    library_calls: dict[str, int]
    cycles: int | None
    products: tuple[Multiplied, ...] = ()
    unknown_cycles: int = 0
    moved: tuple[Collective, ...] = ()

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, dtype) → (how often, bytes of the results on one device, in all).

        A loop's body counts as often as the loop has trips.
        """
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for one in self.moved:
            count, size = found.get((one.kind, one.dtype), (0, 0))
            found[one.kind, one.dtype] = count + one.times, size + one.times * one.bytes
        return found

    @property
    def products_in_8_bits(self) -> tuple[Multiplied, ...]:
        """Those of the products that multiply 8-bit operands."""
        return tuple(product for product in self.products if product.in_8_bits)


def read_hlo(text: str, mesh: Mesh = ()) -> Program:
    """Reads the text of a compiled program.

    Args:
      text: as ``compiled.as_text()`` has it.
      mesh: the names and sizes of the axes of the mesh that its arguments are sharded over.

    Example:
      >>> read_hlo('''
      ...   %a = bf16[8,8]{1,0} parameter(0)
      ...   ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
      ... ''').contractions
      {'bfloat16': 1}
    """
    program = computations(text)
    places = Places(text)
    products: list[Multiplied] = []
    calls: Counter[str] = Counter()
    for computation in program.values():
        for instruction in computation.instructions:
            target = ""
            if instruction.op == "custom-call":
                target = instruction.attribute("custom_call_target")
                calls[target] += 1
            if instruction.op in ("dot", "convolution") or _multiplies(target):
                products.append(_product(instruction, target, computation.by_name, places))
    cycles = [int(count) for count in _CYCLES.findall(text)]
    known = [count for count in cycles if count < _UNKNOWN_CYCLES]
    return Program(
        dict(Counter(product.dtype for product in products).most_common()),
        dict(calls),
        sum(known) if known else None,
        tuple(products),
        len(cycles) - len(known),
        collectives(program, mesh, _devices(text)),
    )


def _product(
    instruction: Instruction, target: str, around: dict[str, Instruction], places: Places
) -> Multiplied:
    """A product, of the library call `target` if it is one."""
    operands = [type_of(around[o].shape) for o in instruction.operands()[:2] if o in around]
    return Multiplied(
        target or instruction.op,
        "*".join(sorted({operand.partition("[")[0] for operand in operands} - {""})),
        tuple(operands),
        type_of(instruction.shape),
        places.of(instruction),
    )


def _multiplies(target: str) -> bool:
    """Whether a library call is a matrix product or a convolution (not attention: many)."""
    words = ("matmul", "gemm", "blockScaledDot")
    return any(word in target for word in words) or target.startswith("__cudnn$conv")


def _devices(text: str) -> int:
    """How many devices a program is for; zero if its head does not say."""
    head = text.lstrip().partition("\n")[0]
    counts = [int(count) for count in _DEVICES.findall(head)]
    return max(counts, default=0)
