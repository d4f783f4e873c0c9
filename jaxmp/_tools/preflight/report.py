"""The report of `preflight`: one result per policy, printed side by side."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxmp._core.speed import StepTime, chip_named, step_time
from jaxmp._tools import screen
from jaxmp._tools.preflight.comparison import IN_USE, PEAK, TIME, Comparison, compared
from jaxmp._tools.preflight.few_bits import bits_of, in_words, lines_of_8_bits, share_of_8_bits
from jaxmp._tools.preflight.hlo import HloProgram
from jaxmp._tools.preflight.hlo_collectives import (
    collectives_as_data,
    remark_on_collectives,
    rows_of_collectives,
)
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.preflight.units import gb, gib, millions, price, seconds
from jaxmp._tools.speed.target import Target

T = TypeVar("T")

# The most rows that are printed.
_ROWS = 24


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PreflightReport(screen.Report):
    """The report of `jaxmp.preflight`, policy by policy. Print it.

    Attributes:
      target: the target that was compiled for.
      policies: one result per policy.
      arguments: bytes of the arguments on one device, by purpose and dtype.
      price_per_hour: of one chip, in any currency; None if it was not given.
    """

    target: Target
    policies: tuple[Preflight, ...]
    arguments: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    price_per_hour: float | None = None

    def __getitem__(self, policy: str) -> Preflight:
        """Returns the result of a policy, by the name it was given."""
        for result in self.policies:
            if result.policy == policy:
                return result
        names = ", ".join(repr(result.policy) for result in self.policies)
        raise KeyError(f"there is no policy {policy!r} in the report; there are {names}")

    def fits(self, policy: str) -> bool:
        """Returns whether the program fits the memory of the target's devices under a policy."""
        result = self[policy]
        return not result.error and result.excess_bytes(self.target) <= 0

    def step_time(self, policy: str) -> StepTime | None:
        """Returns the estimated time of a call, and its source.

        None if the program was not compiled, or multiplies a dtype whose rate is unknown.
        """
        work = self[policy].work
        return None if work is None else step_time(chip_named(self.target.name), work)

    def host_time(self, policy: str) -> float | None:
        """Returns the seconds that a call's moves from and to the host take, at the least.

        None if the bandwidth of the chip's link to its host is unknown, or nothing moves.
        """
        moved, rate = self[policy].host_moved_bytes, chip_named(self.target.name)
        seconds = rate.host_bytes_per_second and max(moved) / rate.host_bytes_per_second
        return seconds or None

    def cost(self, policy: str, steps: int = 1000) -> float | None:
        """Returns the price of `steps` calls on all chips; None without a price, or a time."""
        time = self.step_time(policy)
        if time is None or self.price_per_hour is None:
            return None
        return time.seconds * steps / 3600 * self.target.chip_count * self.price_per_hour

    def compare(
        self,
        compiled: Any,
        policy: str | None = None,
        *,
        stats: Mapping[str, int] | None = None,
        seconds: float | None = None,
    ) -> Comparison:
        """Compares what was predicted with the same step on this machine's device.

        Args:
          compiled: the step, compiled: ``jax.jit(step, donate_argnums=…).lower(*args).compile()``.
            Its compiler's own sizes are read; nothing runs.
          policy: the policy whose result is meant; None: the only one.
          stats: ``device.memory_stats()`` after a step: the most bytes that the process had in use,
            which includes what ran before the step. None on CPUs, which keep none.
          seconds: the time of a step as you measured it.

        Returns:
          A `Comparison`: `print` it.

        Raises:
          KeyError: if the policy is not in the report.
          ValueError: if there are several and none is named, or its program did not compile.
          TypeError: if `compiled` is not a compiled function.
        """
        if policy is None and len(self.policies) > 1:
            names = ", ".join(repr(result.policy) for result in self.policies)
            raise ValueError(f"compare: say which policy was compiled: one of {names}.")
        result = self.policies[0] if policy is None else self[policy]
        if result.program is None:
            why = "failed to compile" if result.error else "does not fit, and has no other figures"
            raise ValueError(f"compare: the program under {result.policy!r} {why}.")
        time = self.step_time(result.policy)
        predicted = {
            "arguments": result.argument_bytes,
            "results": result.output_bytes,
            "results in donated arguments": result.aliased_bytes,
            "temporaries": result.temporary_bytes,
            "code": result.code_bytes,
            PEAK: result.peak_bytes,
            IN_USE: result.peak_bytes,
            TIME: time and time.seconds,
        }
        return compared(result.policy, self.target.name, predicted, compiled, stats, seconds)

    def emulated(self, policy: str) -> dict[str, float]:
        """Returns the FLOPs of products, by dtype, whose operands are widened first.

        Their dtypes are those that the target does not multiply natively, and any that the traced
        program has and the compiled one lacks, while it multiplies wider ones that the traced one
        lacks (float8_e5m2 by float8_e5m2 on an H100).
        """
        result = self[policy]
        compiled = set(result.program.contractions) if result.program else set()
        uninvited = [bits_of(dtype) for dtype in compiled - result.requested.keys()]
        return {
            dtype: flops
            for dtype, flops in result.requested.items()
            if not self.target.multiplies(dtype)
            or (dtype not in compiled and any(bits > bits_of(dtype) for bits in uninvited))
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON."""
        rows = []
        for result in self.policies:
            row = screen.plain(result)
            if result.program is not None:
                del row["program"]["moved"]
                row["program"]["collectives"] = collectives_as_data(result.program.moved)
            row |= {"peak_bytes": result.peak_bytes, "fits": self.fits(result.policy)}
            row["step_time"] = screen.plain(self.step_time(result.policy))
            row["cost_of_1000_steps"] = self.cost(result.policy)
            rows.append(row | {"emulated": self.emulated(result.policy)})
        target = {key: getattr(self.target, key) for key in ("name", "device_count", "hbm_bytes")}
        return {"target": target, "arguments": self.arguments, "policies": rows}

    def _sections(self, *, verbose: bool) -> Iterator[screen.Section]:
        count = screen.counted(self.target.device_count, "device")
        size = gib(self.target.hbm_bytes)
        yield [f"{self.target.name}: {count} of {size}; sizes are of one device"]
        names = [result.policy for result in self.policies]
        cells = [["", *names], *([label, *cells] for label, cells in _rows(self))]
        rows = screen.table(cells, right=range(1, 1 + len(names)))
        yield screen.truncated(rows, sys.maxsize if verbose else _ROWS, "row")
        remarks = [[""] * (i > 0) + remark for i, remark in enumerate(_remarks(self))]
        yield lambda room: screen.truncated(remarks, room, "remark")
        yield list(_trust(self))


def _trust(report: PreflightReport) -> Iterator[str]:
    """Yields lines that say which figures the compiler reports, and how others are estimated."""
    programs = [r.program for r in report.policies if r.program is not None]
    figures = ["memory", "products"]
    figures += ["traffic"] * any(r.bytes_accessed for r in report.policies)
    loops = "What is in a loop counts once"
    if any(program.moved for program in programs):
        figures.append("collectives")
        loops += ", a collective once per iteration"
    yield f"Reported by the compiler: {', '.join(figures)}. {loops}."
    times = [report.step_time(result.policy) for result in report.policies]
    if sources := {time.source for time in times if time}:
        yield from screen.wrapped(
            f"Estimated: the time of a step, by {' and '.join(sorted(sources))} "
            "(benchmarks/roofline.py prints how far it is off)."
        )


def _rows(report: PreflightReport) -> Iterator[tuple[str, list[str]]]:
    results = report.policies
    compiled = [result.program for result in results]
    programs = [program for program in compiled if program is not None]

    def size(label: str, of: Callable[[Preflight], int]) -> tuple[str, list[str]]:
        return _row(label, [of(result) if result.program else None for result in results], gib)

    def each(
        of: Callable[[HloProgram], dict[str, Any]], absent: str = "0"
    ) -> Iterator[tuple[str, list[str]]]:
        """Yields a row for each label that any of the programs has."""
        found = [of(program) if program else None for program in compiled]
        for label in dict.fromkeys(label for one in found for label in one or ()):
            yield label, ["-" if one is None else str(one.get(label, absent)) for one in found]

    yield _row("peak memory", [r.peak_bytes or None for r in results], gib)
    yield size("  arguments", lambda r: r.argument_bytes)
    yield from _of_arguments(report)
    if any(100 * (r.output_bytes - r.aliased_bytes) > r.peak_bytes for r in results):
        yield size("  results", lambda r: r.output_bytes - r.aliased_bytes)
    yield size("  temporaries", lambda r: r.temporary_bytes)
    yield size("  code", lambda r: r.code_bytes)
    if any(r.host_bytes for r in results):
        yield size("host memory", lambda r: r.host_bytes)
        yield size("  moved from and to it", lambda r: sum(r.host_moved_bytes))
        yield _row("  time at its link", [report.host_time(r.policy) for r in results], seconds)
    yield "fits", ["-" if r.error else "yes" if report.fits(r.policy) else "NO" for r in results]
    for name in results[0].largest:
        yield f"largest {name}", [str(r.largest[name]) for r in results]
    if any(r.bytes_accessed for r in results):
        yield _row("traffic", [r.bytes_accessed or None for r in results], gb)
    if any(p.cycles or p.unknown_cycles for p in programs):
        yield _row("estimated cycles", compiled, _cycles)
    times = [report.step_time(r.policy) for r in results]
    if any(times):
        yield _row("estimated step time", [time and time.seconds for time in times], seconds)
    costs = [report.cost(r.policy) for r in results]
    if any(cost is not None for cost in costs):
        yield _row(f"1,000 steps at {report.price_per_hour:g} per chip-hour", costs, price)
    yield from each(lambda p: {f"products {dtype}": n for dtype, n in p.contractions.items()})
    if any(p.products_in_8_bits for p in programs):
        yield _row(f"products in {in_words(programs)}", compiled, share_of_8_bits)
    yield from each(lambda p: {c: n for c, n in p.library_calls.items() if _is_library(c)})
    yield from each(lambda p: rows_of_collectives(p.moved), "-")


def _row(label: str, values: Sequence[T | None], said: Callable[[T], str]) -> tuple[str, list[str]]:
    return label, ["-" if value is None else said(value) for value in values]


def _of_arguments(report: PreflightReport) -> Iterator[tuple[str, list[str]]]:
    """Yields a row for each purpose and dtype of at least 1 % of the bytes of all arguments.

    Another one has the rest: of smaller ones, and what the compiler adds to align and pad arrays.
    """
    total = sum(sum(sizes.values()) for sizes in report.arguments.values())
    if not total:
        return
    shown = 0
    for purpose, sizes in report.arguments.items():
        for dtype, size in sizes.items():
            if 100 * size >= total:
                shown += size
                cells = [size if result.program else None for result in report.policies]
                yield _row(f"    {purpose} {dtype}", cells, gib)
    results = report.policies
    rest = [max(r.argument_bytes - shown, 0) if r.program else None for r in results]
    if any(r and 100 * r >= result.argument_bytes for r, result in zip(rest, results, strict=True)):
        yield _row("    others, padding", rest, gib)


def _cycles(program: HloProgram) -> str:
    """Formats the known cycles, and the number of operations whose cycles are unknown."""
    cycles = "unknown" if program.cycles is None else millions(program.cycles)
    return f"{cycles} (+ {program.unknown_cycles} ?)" if program.unknown_cycles else cycles


def _is_library(target: str) -> bool:
    """Returns whether a custom call is one of NVIDIA's libraries (cuBLAS, cuDNN), or of Pallas."""
    return target.startswith("__cu") or target == "tpu_custom_call"


def _remarks(report: PreflightReport) -> Iterator[list[str]]:
    for result in report.policies:
        for text in _notes(report, result):
            yield screen.wrapped(f"{result.policy}: {text}")
        if result.program and result.program.products_in_8_bits:
            bits = in_words([result.program])
            yield [f"{result.policy}, products in {bits}:", *lines_of_8_bits(result.program)]


def _notes(report: PreflightReport, result: Preflight) -> Iterator[str]:
    """Yields the remarks on a policy, gravest first."""
    if result.error:
        yield f"the compiler failed: {' '.join(result.error.split())[:500]}"
        return
    excess = result.excess_bytes(report.target)
    if excess > 0:
        left = result.available_bytes
        of = f" of the {gib(left)} that the compiler leaves to programs" if left else ""
        yield f"does not fit, by {gib(excess)}{of}."
    for dtype in report.emulated(result.policy):
        if dtype not in result.warned:
            native = report.target.multiplies(dtype)
            why = "" if native else f"{report.target.name} does not multiply it, "
            yield f"{dtype} is emulated: {why}its operands are widened first."
    if result.warned:
        yield f"{result.warned}."
    if result.host_bytes:
        yield _on_host(report, result)
    if result.callbacks:
        calls = ", ".join(f"{count} {name}" for name, count in result.callbacks.items())
        yield f"callbacks are not compiled ({calls}): other arrays stand for their results."
    if result.program is None:
        return
    if said := remark_on_collectives(result.program.moved):
        yield said
    if result.program.unknown_cycles:
        yield (
            f"the compiler does not know the cycles of {result.program.unknown_cycles} "
            "operations, which are not in the sum."
        )


def _on_host(report: PreflightReport, result: Preflight) -> str:
    """Returns whether moves from and to the host hide behind the step."""
    crossing, step = report.host_time(result.policy), report.step_time(result.policy)
    if crossing is None:
        chip = report.target.name.partition(":")[0]
        return f"the bandwidth between {chip} and its host is not published; measure a step."
    if step is None:
        return "whether the moves from and to the host hide behind the step is unknown."
    both = f"{seconds(crossing)} of moves from and to the host, beside {seconds(step.seconds)}"
    if crossing > step.seconds:
        return f"{both} of the step, do not hide behind it."
    return f"{both} of the step, can hide behind it."
