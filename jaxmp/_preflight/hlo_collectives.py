"""The collectives of an HLO program: what each moves, over which axes of a mesh, and how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._preflight.hlo_groups import Mesh, axes_of
from jaxmp._preflight.hlo_loops import runs
from jaxmp._preflight.hlo_text import (
    Computation,
    Computations,
    Instruction,
    members,
    sizes_by_dtype,
)

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# TPUs overlap one collective with several fusions, each of which repeats it; one starts it. Its
# channel is not enough to tell it: shard_map gives all its collectives the same.
_REPEATED = '"async_collective_fusion_config"'
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
_CHAIN = re.compile(r'\bchannel_id=\d+|\bchain_id="\d+"')
# TPUs' reduce-scatter: a computation of an all-reduce, and each device's slice of it.
_SCATTERS = "all-reduce-scatter"


class Collective(NamedTuple):
    """Values of one dtype that a collective of an optimised program moves.

    Attributes:
      kind: ``all-gather``, ``all-reduce``, ….
      dtype: of what crosses, ``bfloat16``.
      axes: the axes of the arguments' mesh that it crosses, ``data`` or ``data+model``; where its
        groups are no axes, how many devices take part: ``groups of 4``.
      bytes: of its results on one device, when it runs once.
      times: how often it runs: a loop's body as often as the loop has trips.
      known: False if it is in a loop whose trips the compiled program does not tell, which counts
        once, or in one of several branches.
    """

    kind: str
    dtype: str
    axes: str
    bytes: int
    times: int = 1
    known: bool = True


def collectives(program: Computations, mesh: Mesh = (), devices: int = 0) -> tuple[Collective, ...]:
    """The collectives of a program, a started one once.

    Args:
      program: its computations.
      mesh: the mesh over which it is partitioned.
      devices: how many devices it is for, where that is known.
    """
    often = runs(program)
    found = []
    for instruction in _once(program):
        computation = program[instruction.computation]
        kind = instruction.op.removesuffix("-start")
        axes = axes_of(instruction.rest, mesh, devices)
        sizes = sizes_by_dtype(_results(instruction))
        if kind == "all-reduce" and computation.name.startswith(_SCATTERS):
            kind, sizes = "reduce-scatter", _scattered(instruction, computation) or sizes
        found += [
            Collective(kind, dtype, axes, size, *often[computation.name])
            for dtype, size in sizes.items()
        ]
    return tuple(found)


def _once(program: Computations) -> Iterator[Instruction]:
    """The collectives of a program, those that several fusions repeat where they are started."""
    found = []
    for computation in program.values():
        starts = any(_STARTS in instruction.rest for instruction in computation.instructions)
        found += [
            (_REPEATED in instruction.rest and not starts, instruction)
            for instruction in computation.instructions
            if instruction.op.removesuffix("-start") in KINDS
        ]
    chains = set()
    for repeats, instruction in sorted(found, key=lambda pair: pair[0]):
        chain = (instruction.op, *_CHAIN.findall(instruction.rest))
        if not repeats or chain not in chains:
            yield instruction
        chains.add(chain)


def _scattered(reduced: Instruction, computation: Computation) -> Counter[str]:
    """Bytes by dtype of the slices that are taken of an all-reduce's results."""
    results = {reduced.name} | {
        i.name
        for i in computation.instructions
        if i.op == "get-tuple-element" and reduced.name in i.operands()
    }
    slices = [i for i in computation.instructions if i.op == "dynamic-slice"]
    return sizes_by_dtype(" ".join(i.shape for i in slices if i.operands()[0] in results))


def _results(instruction: Instruction) -> str:
    """The shape of what a collective returns.

    One that was started has the shape (operands, results, handles …), but for all-reduce, which
    has its results' alone, unless it is one that JAX 0.12's XLA makes asynchronous on GPUs: that
    has its operands in a tuple of their own.
    """
    parts = members(instruction.shape)
    started = instruction.op.endswith("-start") and len(parts) > 1
    if not started or (instruction.op == "all-reduce-start" and not parts[0].startswith("(")):
        return instruction.shape
    return parts[1]
