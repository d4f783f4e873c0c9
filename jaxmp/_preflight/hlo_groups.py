"""Which devices an HLO collective joins, and which axes of a mesh that is."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

# The names and sizes of a mesh's axes, the major ones first.
Mesh = tuple[tuple[str, int], ...]

# {{0,1},{2,3}}, or {} of all devices.
_LISTED = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
# [2,4]<=[4,2]T(1,0): the numbers in order, reshaped to [4,2], transposed, reshaped to [2,4].
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4] {'b'}: the axes of a mesh that are joined; 'b':(2)2 is a part of one.
_NAMED = re.compile(
    r"\breplica_groups=mesh\[([^\]]*)\](?:, *device_ids=\(((?:[^()]|\([^()]*\))*)\))? *\{([^}]*)\}"
)
_AXIS = re.compile(r"(?:'([^']*)'|([^',=\s]+))=(\d+)")
_PART = re.compile(r"(?:'([^']*)'|([^',:\s]+))(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LIST = re.compile(r"\{([\d,]*)\}")

Groups = tuple[tuple[int, ...], ...]


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
    size = math.prod(n for _, n in mesh) if mesh else devices
    pairs = _PAIRS.search(rest)
    if pairs:
        return _moved(_numbers(pairs.group(1)), mesh)
    found = next(filter(None, (p.search(rest) for p in (_LISTED, _IOTA, _NAMED))), None)
    if found is None:
        return ""
    of_replicas = "channel_id=" in rest and "use_global_device_ids=true" not in rest
    return _joined(found.group(), mesh, size, of_replicas=of_replicas)


@functools.lru_cache(maxsize=256)
def _joined(text: str, mesh: Mesh, size: int, *, of_replicas: bool) -> str:
    """The axes that the groups of a ``replica_groups=…`` are.

    Where it numbers replicas, all devices that share the one replica of a program take part.
    """
    groups = _groups(text, size)
    if of_replicas and groups == ((0,),):
        groups = _groups("replica_groups={}", size)
    if not groups:
        return ""
    crossed = _crossed(groups, mesh)
    members = math.prod(mesh[axis][1] for axis in crossed or ())
    if crossed and all(len(group) == members for group in groups):
        return _name(mesh, crossed)
    return _counted([len(group) for group in groups])


def _moved(pairs: Groups, mesh: Mesh) -> str:
    """The axes along which pairs of a source and a target are apart."""
    apart = tuple(pair for pair in pairs if len(set(pair)) > 1)
    crossed = _crossed(apart, mesh)
    return _name(mesh, crossed) if crossed else _counted(_chains(pairs))


def _crossed(groups: Groups, mesh: Mesh) -> list[int] | None:
    """The axes along which the members of a group differ; None if they are not of the mesh."""
    sizes = [n for _, n in mesh]
    if not mesh or max(map(max, groups), default=0) >= math.prod(sizes):
        return None
    found = set()
    for group in groups:
        along = np.array(np.unravel_index(group, sizes))
        found |= set(np.flatnonzero(along.min(1) != along.max(1)).tolist())
    return sorted(found)


def _name(mesh: Mesh, axes: Sequence[int]) -> str:
    return "+".join(mesh[axis][0] for axis in axes)


def _counted(sizes: Sequence[int]) -> str:
    few, many = min(sizes, default=0), max(sizes, default=0)
    return f"groups of {few}" if few == many else f"groups of {few} to {many}"


def _chains(pairs: Groups) -> list[int]:
    """How many devices each chain or ring of pairs joins."""
    chain = {device: {device} for pair in pairs for device in pair}
    for source, target in pairs:
        if chain[source] is not chain[target]:
            chain[source] |= chain[target]
            for device in chain[target]:
                chain[device] = chain[source]
    return [len(joined) for joined in {id(joined): joined for joined in chain.values()}.values()]


def _groups(text: str, size: int) -> Groups:
    """The groups that a text lists, in any of XLA's three notations."""
    listed, iota, named = (pattern.search(text) for pattern in (_LISTED, _IOTA, _NAMED))
    if listed:
        return _numbers(listed.group(1)) or ((tuple(range(size)),) if size else ())
    if iota:
        shape, dims, order = (_ints(part or "") for part in iota.groups())
        return _rows(_tiled(dims, order).reshape(shape))
    if named is None:
        return ()
    axes = [(quoted or plain, int(n)) for quoted, plain, n in _AXIS.findall(named.group(1))]
    parts = [
        (quoted or plain, int(before or 1), int(n or 0))
        for quoted, plain, before, n in _PART.findall(named.group(3))
    ]
    return _along(axes, named.group(2) or "", parts)


def _along(axes: list[tuple[str, int]], devices: str, joined: list[tuple[str, int, int]]) -> Groups:
    """The groups along axes of a mesh, or along parts of axes.

    Args:
      axes: the names and sizes.
      devices: the numbers of the devices where they are not in order, listed or as an iota.
      joined: the name of an axis, the size of what is before the part, and that of the part; zero
        if it is the whole axis.
    """
    dims: list[int] = []
    apart: list[int] = []
    together: list[int] = []
    for name, size in axes:
        spans = [(at, at * (n or size)) for axis, at, n in joined if axis == name]
        cuts = sorted({1, size}.union(*spans))
        for low, high in itertools.pairwise(cuts):
            inside = any(a <= low and high <= b for a, b in spans)
            (together if inside else apart).append(len(dims))
            dims.append(high // low)
    count = math.prod(dims)
    numbers = np.arange(count)
    if devices:
        iota = _IOTA.search(f"replica_groups=[{count}]<={devices.partition('<=')[2] or devices}")
        given = _tiled(_ints(iota[2]), _ints(iota[3] or "")) if iota else np.array(_ints(devices))
        numbers = given.reshape(-1)
    if numbers.size != count:
        return ()
    members = math.prod(dims[axis] for axis in together)
    return _rows(numbers.reshape(dims).transpose(apart + together).reshape(-1, members))


def _tiled(dims: list[int], order: list[int]) -> np.ndarray:
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in table.reshape(-1, table.shape[-1]).tolist())


def _numbers(text: str) -> Groups:
    return tuple(tuple(_ints(group)) for group in _LIST.findall(text) if group)


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
