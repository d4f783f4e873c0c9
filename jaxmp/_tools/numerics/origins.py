"""Traces non-finite values back to the operations that made them from finite operands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jaxmp._core.jaxprs.scopes import SEED
from jaxmp._tools.numerics.statistics import Statistics
from jaxmp._tools.numerics.survey import INFINITY, Loop, Refs, Site, SurveyedProgram, running_order

# An iteration of each loop around a site, outermost first.
At = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """An operation that made a non-finite value, in one iteration.

    Attributes:
      site: the operation.
      at: the iterations of the loops that it is in, counted in the order in which they run.
      nan: whether it made NaN; else an infinity.
      of_infinities: whether it made NaN from infinities that the program has on purpose, such as
        the mask of a softmax.
    """

    site: Site
    at: At
    nan: bool
    of_infinities: bool = False


class Walk:
    """A search for origins among the sites of a program, given their statistics."""

    def __init__(self, program: SurveyedProgram, measured: Mapping[str, Statistics]) -> None:
        self._program = program
        self._measured = measured
        self._when = running_order(program.sites)

    def of_results(self) -> list[Origin]:
        """Returns the origins of non-finite values in the results, in the order they ran."""
        return self._origins(
            (name, at, nan)
            for refs in self._program.results
            for nan in (True, False)
            for name, at in self._bad(refs, None, (), nan=nan)
        )

    def everywhere(self) -> list[Origin]:
        """Returns the origins of all sites' non-finite values, also of those that nothing reads."""
        return self._origins(
            (name, at, nan)
            for name in self._program.sites
            for nan in (True, False)
            for at in self._iterations(name, (), nan=nan)
        )

    def _origins(self, bad_sites: Iterable[tuple[str, At, bool]]) -> list[Origin]:
        """Returns the origins of non-finite values, each a site, an iteration, and whether NaN."""
        found: list[Origin] = []
        seen: set[tuple[str, At, bool]] = set()
        waiting = list(bad_sites)
        while waiting:
            name, at, nan = waiting.pop()
            if (name, at, nan) in seen:
                continue
            seen.add((name, at, nan))
            site = self._program.sites[name]
            if nan and (bad := list(self._bad(site.reads, site, at, nan=True))):
                waiting += [(*b, True) for b in bad]
                continue
            bad = list(self._bad(site.reads, site, at, nan=False))
            if not bad:
                if nan or not site.endless:
                    found.append(Origin(site, at, nan))
                continue
            if nan and all(map(self._on_purpose, bad)):
                found.append(Origin(site, at, nan, of_infinities=True))
                continue
            waiting += [(*b, False) for b in bad]
        return sorted(found, key=lambda o: self._when(o.site, o.at))

    def _on_purpose(self, bad: tuple[str, At]) -> bool:
        """Returns whether an infinity was written in the program, and moved or chosen since."""
        waiting, seen = [bad], set()
        while waiting:
            name, at = waiting.pop()
            if (name, at) in seen:
                continue
            seen.add((name, at))
            site = self._program.sites[name]
            more = list(self._bad(site.reads, site, at, nan=False))
            if not more and not site.endless:
                return False
            waiting += more
        return True

    def _bad(
        self, refs: Refs, reader: Site | None, at: At, *, nan: bool
    ) -> Iterator[tuple[str, At]]:
        """Yields the non-finite sites that a site reads in an iteration, with their iterations."""
        loops = reader.loops if reader else ()
        waiting = [(ref, loops, at) for ref in refs]
        passed: set[tuple[str, At]] = set()
        while waiting:
            ref, inside, at = waiting.pop()
            if ref in (INFINITY, SEED):
                continue
            if ref not in self._program.carries:
                shared = _shared(inside, self._program.sites[ref].loops)
                for when in self._iterations(ref, at[:shared], nan=nan):
                    yield ref, when
                    break
                continue
            if (ref, at) in passed:
                continue
            passed.add((ref, at))
            carry = self._program.carries[ref]
            if carry.loop is None:
                waiting += [(r, inside, at) for r in (*carry.start, *carry.back)]
                continue
            if carry.loop not in inside:  # read from outside the loop: its final value
                waiting += [(r, inside, at) for r in (*carry.back, *carry.start)]
                continue
            depth = inside.index(carry.loop)
            if at[depth] > 0:
                here = (*at[:depth], at[depth] - 1)
                waiting += [(r, inside[: depth + 1], here) for r in carry.back]
            else:
                waiting += [(r, inside[:depth], at[:depth]) for r in carry.start]

    def _iterations(self, name: str, start: At, *, nan: bool) -> list[At]:
        """Returns the iterations in which a site is not finite, in the order in which they ran."""
        measured = self._measured[name]
        flags = measured.is_nan if nan else measured.is_infinite
        return [(*start, *map(int, at)) for at in np.argwhere(np.asarray(flags)[start])]


def _shared(a: tuple[Loop, ...], b: tuple[Loop, ...]) -> int:
    """Returns the number of loops that two places have in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))  # noqa: B905
