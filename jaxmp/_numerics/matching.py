"""Which sites of two runs are the same."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from jaxmp._numerics.record import Record
from jaxmp._numerics.survey import Site

# What two sites must agree in that are not matched as below, the strictest first: an operation may
# have moved, lines move between commits, and batches may have other sizes.
_KEYS: tuple[Callable[[Site], Hashable], ...] = (
    lambda s: (s.path, s.op, s.backward, s.line, s.shape),
    lambda s: (s.path, s.op, s.backward, s.line),
    lambda s: (s.path, s.op, s.backward, s.line.rpartition(":")[0], s.shape),
    lambda s: (s.path, s.op, s.backward, s.line.rpartition(":")[0]),
)


def matched(this: Record, other: Record) -> Iterator[tuple[str, str]]:
    """The names of sites in both.

    Of a module's line, forward or backward, the operations are laid side by side so that as many as
    may be are the same: another policy adds some in between. Of what is left over, the nth is the
    nth, where as many are left in both.
    """
    left = (dict(this.sites), dict(other.sites))
    for strictness, key in enumerate((_place, *_KEYS)):
        groups: tuple[dict[Hashable, list[str]], ...] = (defaultdict(list), defaultdict(list))
        for sites, group in zip(left, groups, strict=True):
            for name, entry in sites.items():
                group[key(entry.site)].append(name)
        for like, names in groups[0].items():
            others = groups[1].get(like, [])
            if not strictness:
                twins = list(_aligned(names, this, others, other))
            elif len(names) == len(others):
                twins = list(zip(names, others, strict=True))
            else:
                continue
            for name, twin in twins:
                yield name, twin
                del left[0][name], left[1][twin]


def _place(site: Site) -> Hashable:
    return site.path, site.line, site.backward


def _aligned(
    names: Sequence[str], this: Record, others: Sequence[str], other: Record
) -> Iterator[tuple[str, str]]:
    """Two sequences of sites side by side, where they are the same operations."""
    a, b = (
        [(of.sites[name].site.op, of.sites[name].site.shape) for name in some]
        for some, of in ((names, this), (others, other))
    )
    if a == b:
        yield from zip(names, others, strict=True)
        return
    for block in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            yield names[block.a + k], others[block.b + k]
