"""Which devices an HLO collective joins, and which axes of a mesh that is."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

# The names and sizes of a mesh's axes, the major ones first.
Mesh = tuple[tuple[str, int], ...]
Groups = Sequence[Sequence[int]]

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


def axes_of(rest: str, mesh: Mesh = (), devices: int = 0) -> str:
    """The axes of a mesh that a collective crosses.

    Args:
      rest: the text of the instruction, from its operands on.
      mesh: the mesh over whose devices, in its order, the program is partitioned.
      devices: how many devices the program is for, where that is known.

    Returns:
      ``data``, or of several ``data+model``. Where its groups are no axes of the mesh, how many
      devices take part: ``groups of 4``. Empty if it does not say.

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
    """The axes along which the members of a group differ; none if they are not of the mesh."""
    sizes = [n for _, n in mesh]
    if not mesh or max(map(max, groups)) >= math.prod(sizes):
        return []
    places = [np.unravel_index(group, sizes) for group in groups]
    return [name for i, (name, _) in enumerate(mesh) if any(np.ptp(place[i]) for place in places)]


def _chains(pairs: Groups) -> Groups:
    """The devices that each chain or ring of pairs joins."""
    chains: list[set[int]] = []
    for pair in pairs:
        met = [chain for chain in chains if chain.intersection(pair)]
        chains = [chain for chain in chains if chain not in met] + [set(pair).union(*met)]
    return [list(chain) for chain in chains]


def _groups(rest: str, everyone: Groups) -> Groups:
    """The groups that a text names, in any of XLA's three notations."""
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
    # Devices of one group are at the same place, when all are at the start of what is joined.
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
    """The devices that a list, or an iota such as ``<=[4,2]T(1,0)``, names, in its order."""
    iota = _IOTA.search(text)
    if iota is None:
        return np.array(_ints(text))
    dims, order = _ints(iota[1]), _ints(iota[2] or "")
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims))).reshape(-1)


def _listed(text: str) -> Groups:
    return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
