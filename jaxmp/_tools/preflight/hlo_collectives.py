"""The collectives of an HLO program: their bytes, mesh axes and runs, and the report on them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._tools.preflight.hlo_text import Computations, Instruction, members, runs, sizes_by_dtype

# The names and sizes of a mesh's axes, the major ones first.
Mesh = tuple[tuple[str, int], ...]
Groups = Sequence[Sequence[int]]

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
# TPUs overlap one collective with several fusions, which all repeat it; one starts it. The
# channel does not identify it: shard_map gives all its collectives the same one.
_REPEATED = '"async_collective_fusion_config"'
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
_CHAIN = re.compile(r'\bchannel_id=\d+|\bchain_id="\d+"')
# A reduce-scatter on TPUs is a computation: an all-reduce, and each device's slice of it.
_SCATTERS = "all-reduce-scatter"

# {{0,1},{2,3}}, or {} of all devices.
# [2,4]<=[4,2]T(1,0): the numbers in order, reshaped to [4,2], transposed, reshaped to [2,4].
# mesh['a'=2,'b'=4] {'b'}: the axes of a mesh that are joined; 'b':(2)2 is a part of one.
_GROUPS = re.compile(
    r"""\breplica_groups=(?:
    \{(?P<listed>(?:\{[\d,]*\},?)*)\}
    |\[(?P<shape>[\d,]+)\](?P<iota><=\[[\d,]+\](?:T\([\d,]+\))?)
    |mesh\[(?P<mesh>[^\]]*)\](?:,\ *device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?
     \ *\{(?P<joined>[^}]*)\}
    )""",
    re.VERBOSE,
)
_IOTA = re.compile(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"(?:'([^']*)'|([^',=\s]+))=(\d+)")
_PART = re.compile(r"(?:'([^']*)'|([^',:\s]+))(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """The values of one dtype that a collective of an optimized program moves.

    Attributes:
      kind: ``all-gather``, ``all-reduce``, ….
      dtype: of the values, ``bfloat16``.
      axes: the axes of the arguments' mesh that it crosses, ``data`` or ``data+model``; where its
        groups are not axes, the number of devices in each: ``groups of 4``.
      bytes: of its results on one device, when it runs once.
      times: how often it runs: a loop's body as often as the loop has trips.
      known: False if it is in a loop whose trip count the compiled program does not state, which
        counts once, or in one of several branches.
    """

    kind: str
    dtype: str
    axes: str
    bytes: int
    times: int = 1
    known: bool = True


def collectives(program: Computations, mesh: Mesh = (), devices: int = 0) -> tuple[Collective, ...]:
    """Returns the collectives of a program, an asynchronous one once.

    Args:
      program: its computations.
      mesh: the mesh over which it is partitioned.
      devices: the number of devices it is for, where that is known.
    """
    often = runs(program)
    found = []
    for instruction in _once(program):
        name = instruction.computation
        kind = instruction.op.removesuffix("-start")
        axes = axes_of(instruction.rest, mesh, devices)
        sizes = sizes_by_dtype(_results(instruction))
        if kind == "all-reduce" and name.startswith(_SCATTERS):
            kind, sizes = "reduce-scatter", _scattered(instruction, program) or sizes
        found += [
            Collective(kind, dtype, axes, size, *often[name]) for dtype, size in sizes.items()
        ]
    return tuple(found)


def _once(program: Computations) -> Iterator[Instruction]:
    """Yields each collective of a program once, also one that several fusions repeat."""
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


def _scattered(reduced: Instruction, program: Computations) -> Counter[str]:
    """Returns the bytes by dtype of the slices that are taken of an all-reduce's results."""
    around = program[reduced.computation].instructions
    results = {reduced.name} | {
        i.name for i in around if i.op == "get-tuple-element" and reduced.name in i.operands()
    }
    slices = [i for i in around if i.op == "dynamic-slice" and i.operands()[0] in results]
    return sizes_by_dtype(" ".join(i.shape for i in slices))


def _results(instruction: Instruction) -> str:
    """Returns the shape of a collective's results.

    A ``-start`` instruction has the shape (operands, results, handles …), except for all-reduce,
    which has its results' alone, unless JAX 0.12's XLA made it asynchronous on GPUs: that has its
    operands in a tuple of their own.
    """
    parts = members(instruction.shape)
    started = instruction.op.endswith("-start") and len(parts) > 1
    if not started or (instruction.op == "all-reduce-start" and not parts[0].startswith("(")):
        return instruction.shape
    return parts[1]


def axes_of(rest: str, mesh: Mesh = (), devices: int = 0) -> str:
    """Returns the axes of a mesh that a collective crosses.

    Args:
      rest: the text of the instruction, from its operands on.
      mesh: the mesh over whose devices, in its order, the program is partitioned.
      devices: the number of devices the program is for, where that is known.

    Returns:
      ``data``, or of several ``data+model``. Where its groups are not axes of the mesh, the number
      of devices in each: ``groups of 4``. Empty if the text names no groups.

    Example:
      >>> axes_of("%x), replica_groups=[2,4]<=[4,2]T(1,0)", (("data", 4), ("model", 2)))
      'data'
      >>> axes_of("%x), replica_groups={{0,1},{2,3}}")
      'groups of 2'
    """
    pairs = _PAIRS.search(rest)
    size = math.prod(n for _, n in mesh) if mesh else devices
    everyone = [range(size)] if size else []
    groups = _listed(pairs.group(1)) if pairs else _groups(rest, everyone)
    of_replicas = "channel_id=" in rest and "use_global_device_ids=true" not in rest
    if of_replicas and groups == [[0]]:  # all devices that share the one replica of a program
        groups = everyone
    if not groups:
        return ""
    crossed = _crossed(groups, mesh)
    members = math.prod(n for name, n in mesh if name in crossed)
    if crossed and (pairs or all(len(group) == members for group in groups)):
        return "+".join(crossed)
    sizes = [len(group) for group in (_chains(groups) if pairs else groups)]
    few, many = min(sizes), max(sizes)
    return f"groups of {few}" if few == many else f"groups of {few} to {many}"


def _crossed(groups: Groups, mesh: Mesh) -> list[str]:
    """Returns the axes along which members of a group differ; none for devices outside the mesh."""
    sizes = [n for _, n in mesh]
    if not mesh or max(map(max, groups)) >= math.prod(sizes):
        return []
    places = [np.unravel_index(group, sizes) for group in groups]
    return [name for i, (name, _) in enumerate(mesh) if any(np.ptp(place[i]) for place in places)]


def _chains(pairs: Groups) -> Groups:
    """Returns the devices of each chain or ring that the pairs form."""
    chains: list[set[int]] = []
    for pair in pairs:
        met = [chain for chain in chains if chain.intersection(pair)]
        chains = [chain for chain in chains if chain not in met] + [set(pair).union(*met)]
    return [list(chain) for chain in chains]


def _groups(rest: str, everyone: Groups) -> Groups:
    """Parses the groups in a text, in any of XLA's three notations."""
    found = _GROUPS.search(rest)
    if found is None:
        return []
    if found["shape"]:
        rows = _numbers(found["iota"]).reshape(_ints(found["shape"]))
        return [list(row) for row in rows.reshape(-1, rows.shape[-1]).tolist()]
    if found["mesh"] is None:
        return _listed(found["listed"]) or everyone
    sizes = {quoted or plain: int(n) for quoted, plain, n in _AXIS.findall(found["mesh"])}
    count = math.prod(sizes.values())
    devices = _numbers(found["ids"] or f"<=[{count}]")
    if devices.size != count:
        return []
    # With the joined axes (or parts of them) set to 0, the devices of a group have equal places.
    places = dict(zip(sizes, np.unravel_index(np.arange(count), [*sizes.values()]), strict=True))
    for quoted, plain, before, part in _PART.findall(found["joined"]):
        name = quoted or plain
        size = int(part or sizes[name])
        after = sizes[name] // (int(before or 1) * size)
        places[name] = places[name] - places[name] // after % size * after
    groups = defaultdict(list)
    for device, place in zip(devices.tolist(), zip(*places.values(), strict=True), strict=True):
        groups[place].append(device)
    return list(groups.values())


def _numbers(text: str) -> np.ndarray:
    """Parses a list of devices, or an iota such as ``<=[4,2]T(1,0)``; keeps their order."""
    iota = _IOTA.search(text)
    if iota is None:
        return np.array(_ints(text))
    dims, order = _ints(iota[1]), _ints(iota[2] or "")
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims))).reshape(-1)


def _listed(text: str) -> Groups:
    return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def sent_bytes(moved: Sequence[Collective], devices: int) -> int:
    """Returns the bytes that a device sends in the collectives of a program, as rings.

    An all-reduce is a reduce-scatter and an all-gather; a reduce-scatter, of whose results a device
    has one part, is assumed to be over all devices.

    Example:
      >>> sent_bytes([Collective("reduce-scatter", "float32", "data", 100, 2)], 8)
      1400
    """
    parts = {"all-reduce": 2, "reduce-scatter": devices - 1}
    return sum(one.bytes * one.times * parts.get(one.kind, 1) for one in moved)


def rows_of_collectives(moved: Sequence[Collective]) -> dict[str, str]:
    """Returns a label and a cell for each kind, dtype and axes of collectives.

    Example:
      >>> rows_of_collectives([Collective("all-gather", "bfloat16", "data", 4_000_000, 20)])
      {'all-gather bfloat16 data': '20 x, 80.0 MB'}
    """
    unknown = Counter(one[:3] for one in moved if not one.known)
    cells = {}
    for row in collectives_as_data(moved):
        of = row["kind"], row["dtype"], row["axes"]
        cell = f"{row['count']} x, {_size(row['bytes'])}"
        cells[" ".join(filter(None, of))] = cell + (f" ({unknown[of]} ?)" if unknown[of] else "")
    return cells


def collectives_as_data(moved: Sequence[Collective]) -> list[dict[str, Any]]:
    """Returns the same rows as plain data; ``known`` is false if a number of runs is unknown."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in moved:
        new = {"kind": one.kind, "dtype": one.dtype, "axes": one.axes}
        row = rows.setdefault(one[:3], new | {"count": 0, "bytes": 0, "known": True})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["known"] &= one.known
    return list(rows.values())


def remark_on_collectives(moved: Sequence[Collective]) -> str:
    """Returns a remark on collectives whose number of runs is unknown; empty if there are none."""
    unknown = sum(not one.known for one in moved)
    if not unknown:
        return ""
    return (
        f"{unknown} of the collectives (?) are counted once, but are in a branch, or in a loop "
        "whose number of iterations the compiled program does not contain."
    )


def _size(size: int) -> str:
    """Formats bytes in megabytes, so that cells are comparable; small numbers in kB or B."""
    if size >= 50_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1000 else f"{size} B"
