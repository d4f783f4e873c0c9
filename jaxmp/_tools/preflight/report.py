"""The report of `preflight`: one result per policy, printed side by side."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxmp._core.speed import StepTime, Work, chip_named, step_time
from jaxmp._tools import screen
from jaxmp._tools.preflight.comparison import IN_USE, PEAK, TIME, Comparison, compared
from jaxmp._tools.preflight.hlo import HloProgram, Multiplied
from jaxmp._tools.preflight.hlo_collectives import (
    collectives_as_data,
    remark_on_collectives,
    rows_of_collectives,
    sent_bytes,
)
from jaxmp._tools.preflight.size_search import Largest
from jaxmp._tools.preflight.units import gb, gib, millions, price, seconds
from jaxmp._tools.speed.target import Target
from jaxmp.formats import bits_in_words

T = TypeVar("T")

AS_WRITTEN = "as written"
# The most lines of 8-bit products that are printed, and the most rows.
MOST, _ROWS = 8, 24
_NUMBER = re.compile(r"_\d+\b")
_BITS = re.compile(r"(?:float|int|complex)(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Preflight:
    """One program compiled for a target. Sizes are of one device.

    Attributes:
      policy: the policy, or "as written".
      error: the compiler's message, if it failed for another reason than memory; all else is empty
        then.
      argument_bytes: of arguments: parameters, optimizer state, batch.
      output_bytes: of results.
      temporary_bytes: of temporaries.
      code_bytes: of the compiled program itself, which is in the device's memory too.
      aliased_bytes: of results that reuse the buffers of donated arguments.
      host_argument_bytes, host_output_bytes, host_temporary_bytes, host_aliased_bytes: the same in
        the memory of the host, of which the peak has none.
      required_bytes: the peak, where the compiler refuses a program that does not fit (TPU). It
        reports nothing else of such a program, so that all other figures are zero.
      available_bytes: the memory that the compiler then leaves to programs, which is a little less
        than the chip's.
      bytes_accessed: memory traffic, where the compiler reports it (TPU). A loop's body counts
        once.
      program: the optimized program.
      requested: FLOPs of matmuls and convolutions by dtype, in the program before it was compiled.
      callbacks: the number of callbacks to Python that are not compiled, by primitive.
      device_count: the number of devices that the program is split over.
      largest: the result of `max_batch`, by "batch", and of `max_length`, by "length".
      warned: the warning about the policy's recipe on the target: that its 8-bit products are
        emulated, or no faster.
    """

    policy: str = AS_WRITTEN
    error: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    aliased_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0
    host_temporary_bytes: int = 0
    host_aliased_bytes: int = 0
    required_bytes: int = 0
    available_bytes: int = 0
    bytes_accessed: float | None = None
    program: HloProgram | None = None
    requested: dict[str, float] = dataclasses.field(default_factory=dict)
    callbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    device_count: int = 1
    largest: dict[str, Largest] = dataclasses.field(default_factory=dict)
    warned: str = ""

    @property
    def peak_bytes(self) -> int:
        """The memory needed: arguments, results, temporaries and code, less what is aliased."""
        data = self.argument_bytes + self.output_bytes + self.temporary_bytes - self.aliased_bytes
        return self.required_bytes or data + self.code_bytes

    @property
    def host_bytes(self) -> int:
        """The memory needed on the host."""
        results = self.host_output_bytes - self.host_aliased_bytes
        return self.host_argument_bytes + self.host_temporary_bytes + results

    @property
    def host_moved_bytes(self) -> tuple[int, int]:
        """The bytes moved from the host and to it, if each array is moved once."""
        temporaries = self.host_temporary_bytes
        return self.host_argument_bytes + temporaries, self.host_output_bytes + temporaries

    @property
    def work(self) -> Work | None:
        """The work of one device in a call; None if the program was not compiled."""
        if self.program is None:
            return None
        products, others, kernels = self.program.traffic
        flops = {dtype: count / self.device_count for dtype, count in self.requested.items()}
        for dtype, count in self.program.attention_flops:
            flops[dtype] = flops.get(dtype, 0) + count
        return Work(
            flops,
            products,
            others,
            kernels,
            sent_bytes(self.program.moved, self.device_count),
            self.program.cycles_run,
        )

    def excess_bytes(self, target: Target) -> int:
        """Returns the bytes needed beyond the memory of a target's device; at most 0 if it fits."""
        return self.peak_bytes - (self.available_bytes or target.hbm_bytes)


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
        """Compares what was predicted with the same step on the device at hand.

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
        uninvited = [_bits(dtype) for dtype in compiled - result.requested.keys()]
        return {
            dtype: flops
            for dtype, flops in result.requested.items()
            if not self.target.multiplies(dtype)
            or (dtype not in compiled and any(bits > _bits(dtype) for bits in uninvited))
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
        yield _row(f"products in {_few_bits(programs)}", compiled, share_of_8_bits)
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
            bits = _few_bits([result.program])
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
    beside = f"{seconds(crossing)} of moves from and to the host, beside {seconds(step.seconds)}"
    if crossing > step.seconds:
        return f"{beside} of the step, do not hide behind it."
    return f"{beside} of the step, can hide behind it."


def _bits(dtype: str) -> int:
    """Returns the bits of the narrowest of a product's dtypes: 8 of ``float8_e5m2*float32``."""
    return min(map(int, _BITS.findall(dtype)), default=64)


def _few_bits(programs: Sequence[HloProgram]) -> str:
    """Returns the bits of the products of few bits of programs: ``8 bits``, ``8 or 4 bits``."""
    each = {_bits(product.dtype) for p in programs for product in p.products_in_8_bits}
    return bits_in_words(each)


def share_of_8_bits(program: HloProgram) -> str:
    """Formats the number of products in 8 bits, and of all products: ``48 of 66``."""
    return f"{len(program.products_in_8_bits)} of {len(program.products)}"


def lines_of_8_bits(program: HloProgram) -> Iterator[str]:
    """Yields a line for each kind of 8-bit product, and one for the products in other dtypes.

    A kind is an operation, its operands and result, and its place without the number of the layer.
    """
    kinds = Counter(map(_kind, program.products_in_8_bits))
    for kind, count in kinds.most_common(MOST):
        yield f"  {count} x {kind}"
    if len(kinds) > MOST:
        yield f"  and {len(kinds) - MOST} more kinds"
    left = Counter(p.dtype or "of an unknown dtype" for p in program.products if not p.in_8_bits)
    if left:
        others = ", ".join(f"{count} {dtype}" for dtype, count in left.items())
        yield f"  not in {_few_bits([program])}: {others}"


def _kind(product: Multiplied) -> str:
    place = str(product.place._replace(path=_NUMBER.sub("_*", product.place.path)))
    return f"{product.op} {' x '.join(product.operands)} -> {product.result}: {place}"
