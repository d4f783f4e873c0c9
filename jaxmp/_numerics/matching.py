"""Matches the operations of one program with those of another."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from jaxmp._numerics.record import Measured
from jaxmp._numerics.survey import Site

# The keys in which two sites must agree that `aligned` left over, the strictest first: an operation
# may have moved, lines move between commits, and batches may have other sizes.
_KEYS: tuple[Callable[[Site], Hashable], ...] = (
    lambda s: (s.path, s.op, s.backward, s.line, s.shape),
    lambda s: (s.path, s.op, s.backward, s.line),
    lambda s: (s.path, s.op, s.backward, s.line.rpartition(":")[0], s.shape),
    lambda s: (s.path, s.op, s.backward, s.line.rpartition(":")[0]),
)


def matched(
    this: Mapping[str, Measured], other: Mapping[str, Measured]
) -> Iterator[tuple[str, str]]:
    """Yields the two names of each site that is in both programs.

    The operations of a module's line, forward or backward, are aligned so that as many as possible
    are the same: another policy adds some in between. Of those left over, the nth is matched with
    the nth, if equally many are left in both.
    """
    left = [{name: one.site for name, one in run.items()} for run in (this, other)]
    for strictness, key in enumerate((_place, *_KEYS)):
        groups: tuple[dict[Hashable, list[Site]], ...] = (
            defaultdict(list),
            defaultdict(list),
        )
        for unmatched, group in zip(left, groups, strict=True):
            for site in unmatched.values():
                group[key(site)].append(site)
        for like, sites in groups[0].items():
            others = groups[1].get(like, [])
            if not strictness:
                twins = aligned(sites, others)
            else:
                twins = list(zip(sites, others, strict=True)) if len(sites) == len(others) else []
            for site, twin in twins:
                yield site.name, twin.name
                del left[0][site.name], left[1][twin.name]


def _place(site: Site) -> Hashable:
    return site.path, site.line, site.backward


def aligned(sites: Sequence[Site], others: Sequence[Site]) -> list[tuple[Site, Site]]:
    """Aligns two sequences of sites; returns the pairs of equal operations and shapes."""
    a, b = ([(site.op, site.shape) for site in some] for some in (sites, others))
    if a == b:
        return list(zip(sites, others, strict=True))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(sites[i + k], others[j + k]) for i, j, size in blocks for k in range(size)]
