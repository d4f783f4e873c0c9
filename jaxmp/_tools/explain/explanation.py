"""The result of `explain`: a row per equation, each product's recipe or why not, and their text."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp._core.plan.primitives import CALLED, LOW
from jaxmp._core.plan.rules import FLOAT32, governed
from jaxmp._core.plan.why import Residual
from jaxmp._tools import screen
from jaxmp._tools.screen import Printed, table
from jaxmp.formats import bits_in_words
from jaxmp.policy import Policy, get_policy
from jaxmp.recipes import Recipe

_MORE = (
    "All operations: to_text(verbose=True), or .rows. Fewer: explain(…, only='matmul', 'float32' "
    "or a module's path)."
)
# The lines for matmuls and convolutions, if other operations need some as well.
_PRODUCTS = 11
_FEW_BITS = re.compile("(?:int|float)([48])(?!\\d)")


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A matmul or convolution of a program.

    Attributes:
      path: the module path and named scopes around it.
      source: ``file.py:line`` in the user's code.
      dtype: the dtype it multiplies, or two, as in ``float8_e4m3fn*float8_e5m2``.
      count: how often it runs per call.
      backward: whether it belongs to a backward pass.
      why_not: why the recipe does not multiply it; empty if it does, or none was asked to.
      intended: whether that is intended: it is not a layer, or the last one.
    """

    path: str
    source: str
    dtype: str
    count: float
    backward: bool = False
    why_not: str = ""
    intended: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it multiplies operands of 8 bits or 4."""
        return all(map(_FEW_BITS.search, self.dtype.split("*")))


@dataclasses.dataclass(frozen=True, slots=True)
class Quantized(Printed):
    """Every matmul and convolution of a program: quantized, or not and why. Print it.

    Attributes:
      products: one per contraction, in the program's order.
    """

    products: tuple[Product, ...]

    def counts(self) -> dict[str, tuple[float, float]]:
        """Counts, by pass ("forward", "backward"), the products in few bits, and all of them."""
        table = {}
        for name, backward in (("forward", False), ("backward", True)):
            mine = [p for p in self.products if p.backward == backward]
            if mine:
                table[name] = (
                    sum(p.count for p in mine if p.quantized),
                    sum(p.count for p in mine),
                )
        return table

    def reasons(self) -> dict[str, float]:
        """Counts the products that are not in few bits by the reason, most first."""
        why: Counter[str] = Counter()
        for p in self.products:
            if not p.quantized:
                why[p.why_not or f"multiplies {p.dtype}"] += p.count  # type: ignore[assignment]
        return dict(why.most_common())

    @property
    def _bits(self) -> str:
        """The bits of the products that are quantized: ``8 bits``, ``4 bits``, ``8 or 4 bits``."""
        each = {bits for p in self.products if p.quantized for bits in _FEW_BITS.findall(p.dtype)}
        return bits_in_words(map(int, each))

    def summary(self) -> str:
        """Returns a few lines: how many products are in 8 or 4 bits, and why the others are not."""
        shares = [f"{n:g} of {total:g} {name}" for name, (n, total) in self.counts().items()]
        lines = [f"products in {self._bits}  {', '.join(shares) or 'none'}"]
        return "\n".join(lines + [f"  {n:g} not: {why}" for why, n in self.reasons().items()])

    def __str__(self) -> str:
        cells = [("dtype", "times", "pass", "source", "path", f"why not {self._bits}")]
        for p in self.products:
            way, why = "backward" if p.backward else "forward", "" if p.quantized else p.why_not
            cells.append((p.dtype, f"{p.count:g}", way, p.source, p.path, why))
        return "\n".join([*table(cells), "", self.summary()])


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One equation of the program.

    Attributes:
      op: the primitive's name.
      path: the Flax module path and named scopes around it, without transformations.
      source: ``file.py:line`` in the user's code.
      dtype: the dtype the op runs in.
      reason: why it runs in that dtype.
      count: how often it runs per call (lengths of scans around it multiplied; a while loop's body
        and each branch of a cond count once).
      flops: floating-point operations per call, a multiply-add counted as two; of a matmul or
        convolution.
      bytes: bytes of its results per call.
      recipe: of a matmul or convolution, the recipe that multiplies it; None if none does.
      why_not: of a matmul or convolution, why the policy's recipe does not multiply it; empty if it
        does.
      intended: whether that is intended: it is not a layer, or the last one.
      residual: under ``residuals=recompute``, whether the result is saved for the backward pass (if
        that reads it) or rematerialized, or why the policy does not decide that; empty under other
        policies, and for results without a derivative.
      fused: of attention that a kernel computes, the kernel and the chip; else empty.
      not_fused: of attention that none computes, though the policy asks for it, why not.
      unknown: whether autocast does not know the primitive, and leaves it as written.
    """

    op: str
    path: str
    source: str
    dtype: str
    reason: str
    count: int
    flops: int = 0
    bytes: int = 0
    recipe: Recipe | None = None
    why_not: str = ""
    intended: bool = False
    residual: str = ""
    fused: str = ""
    not_fused: str = ""
    unknown: bool = False

    @property
    def why(self) -> str:
        """The reason, and whether the result is saved or rematerialized."""
        return f"{self.reason}; {self.residual}" if self.residual else self.reason

    @property
    def where(self) -> str:
        """The module and the line."""
        return f"{self.source} {self.path}".strip()


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Explanation(screen.Report):
    """The effect of a policy on a program. Print it: similar rows are one, the costliest first.

    `to_text(verbose=True)` has every row.

    Attributes:
      rows: one per equation, in order; only those that `only` selects.
      policy: the policy that `explain` was given; empty if it was float32.
      differentiated: whether the program has backward passes in it.
      overruled: why the policy decides no matmul or convolution, if it does not; else empty.
    """

    rows: tuple[Row, ...]
    policy: str
    differentiated: bool = False
    overruled: str = ""
    _saved: Callable[[], dict[str, int]] = dataclasses.field(default=dict, compare=False)

    @property
    def residual_bytes(self) -> dict[str, int]:
        """The bytes that the parameters' gradient saves for the backward pass, by dtype.

        The arguments themselves do not count. The program is differentiated by tracing: nothing
        runs. Empty if it has no derivative, or has backward passes in it already.
        """
        return self._saved()

    @property
    def _asked(self) -> Policy:
        return get_policy(self.policy or "float32")

    @property
    def _products(self) -> list[Row]:
        return [row for row in self.rows if row.op in LOW]

    def products(self) -> dict[str, int]:
        """Counts the matmuls and convolutions that run per call in each dtype, most first."""
        return _total(self._products, lambda row: row.count)

    def product_flops(self) -> dict[str, int]:
        """Returns the FLOPs of matmuls and convolutions by dtype, most first."""
        return _total(self._products, lambda row: row.flops)

    def quantized(self) -> Quantized:
        """Reports every matmul and convolution: in 8 bits, or why not."""
        products = []
        for r in self._products:
            why, intended = (r.why_not, r.intended) if r.why_not else (r.reason, True)
            product = Product(r.path, r.source, r.dtype, r.count, why_not=why, intended=intended)
            products.append(product)
        return Quantized(tuple(products))

    def summary(self) -> str:
        """Returns a few lines: operations by dtype, residuals, effects of the policy's options."""
        others = _total((r for r in self.rows if r.op not in LOW), lambda row: row.count)
        facts = {
            "policy": self.policy,
            "matmuls, convolutions": self._by_dtype(),
            "other operations": _counts(others),
            "saved for backward pass": screen.by_dtype(self.residual_bytes),
            "of no effect": self.overruled,
        }
        lines = [line for fact in facts.items() if fact[1] for line in screen.labeled(*fact)]
        return "\n".join([*lines, *self._notes(self._asked)])

    def _by_dtype(self) -> str:
        flops = self.product_flops()
        total = sum(flops.values()) or 1
        counts = self.products().items()
        parts = [f"{n:,} {dtype} ({flops[dtype] / total:.1%})" for dtype, n in counts]
        return f"{', '.join(parts)} of {screen.si(total)}FLOPs" if parts else "none"

    def _notes(self, policy: Policy) -> Iterator[str]:
        """Yields lines on the effect of the policy's options."""
        recipe = policy.matmul
        quantizes = recipe is not None and (isinstance(recipe, str) or recipe.quantizes)
        if quantizes or any(p.quantized for p in self.quantized().products):
            yield self.quantized().summary()
            if self.differentiated and not self.policy:
                # They are derivatives of products in few bits, made when those are differentiated.
                yield (
                    "  the program has backward passes, whose products may be in few bits and are "
                    "not counted so here: see jaxmp.audit(…)(…).quantized()"
                )
        yield from self._attention(policy)
        if unknown := sorted({row.op for row in self.rows if row.unknown}):
            yield f"not classified, run as written: {', '.join(unknown)}"
        met = {row.op for row in self.rows}
        unmet = [name for name, _ in policy.ops if met.isdisjoint((name, *CALLED.get(name, ())))]
        if unmet:
            yield f"in the policy's ops, but met nowhere here: {', '.join(unmet)}"
        if policy.reduce_scatter_dtype != np.float32:
            gathered = {row.dtype for row in self.rows if row.op == "all_gather"}
            if not gathered - {FLOAT32.name}:
                yield (
                    "the policy's reduce_scatter_dtype: of no effect, no all_gather of weights here"
                )
        yield from self._residuals(policy)

    def _residuals(self, policy: Policy) -> Iterator[str]:
        """Yields lines on the effect of ``residuals=``, if a policy asks for more than saving."""
        ops = _total(self.rows, lambda row: row.count, by=lambda row: row.residual)
        decided = (Residual.SAVED, Residual.OFFLOADED, Residual.REMATERIALIZED)
        if ops.keys() & decided[1:]:
            others = [f"{ops[each]} {each}" for each in decided[1:] if each in ops]
            saved = f"{ops.get(Residual.SAVED, 0)} operations {Residual.SAVED}"
            yield from screen.labeled("residuals", "; ".join([saved, *others]))
        elif policy.residuals != "save":
            yield from screen.labeled(
                "residuals", f"{policy.residuals}: of no effect, nothing here is rematerialized"
            )
        if self.differentiated and ops.keys() - {""}:
            yield (
                "  differentiated within the program, where what is saved was decided: explain the "
                "loss itself, or see jaxmp.audit for what a whole step rematerializes"
            )
        for why in ops.keys() - {"", *decided}:
            rows = [row for row in self.rows if row.residual == why]
            yield f"  not rematerialized: {_places(rows)}: {why}"

    def _attention(self, policy: Policy) -> Iterator[str]:
        """Yields lines on the attention that kernels compute, and why they do not compute other."""
        if policy.attention is None and not any(row.fused or row.not_fused for row in self.rows):
            return
        by = _total(self.rows, lambda row: row.count, by=lambda row: row.fused)
        counts = [f"{n} by {kernel}" for kernel, n in by.items() if kernel and n]
        yield from screen.labeled("attention", f"{', '.join(counts) or 'none'} fused")
        for row in self.rows:
            if row.not_fused:
                yield f"  {row.count} not: {row.where}: {row.not_fused}"

    def verdict(self) -> str:
        """Returns the answer in a sentence."""
        if self.overruled:
            said = "is of no effect: every matmul and convolution is under another policy."
            return f"{self.policy} {said}"
        counts = self.products()
        total = sum(counts.values())
        if not counts:
            others = screen.counted(sum(row.count for row in self.rows), "operation")
            said = f"no matmul or convolution is among the {others}."
        elif len(counts) == 1:
            said = f"every matmul and convolution runs in {next(iter(counts))}."
        else:
            (dtype, most), *rest = counts.items()
            others = ", ".join(f"{n:,} in {other}" for other, n in rest)
            said = f"{most:,} of {total:,} matmuls and convolutions run in {dtype}, {others}."
        return f"{self.policy}: {said}" if self.policy else said[0].upper() + said[1:]

    def groups(self) -> list[tuple[str, list[Row]]]:
        """Groups rows of one line, dtype and reason, in modules that differ in a layer's number.

        Matmuls and convolutions come first, those with the most FLOPs before others; then all else
        by the bytes of its results.

        Returns:
          For each group its modules as one, such as ``Model/Block_*/Dense_0 ×12``, and its rows.
        """
        found = screen.merged(
            self.rows, lambda r: (r.op in LOW, r.source, r.dtype, r.why), lambda r: r.path
        )
        return sorted(found, key=lambda group: _cost(group[1]), reverse=True)

    def _sections(self, *, verbose: bool) -> Iterator[screen.Section]:
        yield screen.wrapped(self.verdict())
        summary = self.summary().splitlines()
        if verbose:
            yield summary
            cells = [("op", "dtype", "times", "source", "path", "reason")]
            cells += [(r.op, r.dtype, str(r.count), r.source, r.path, r.why) for r in self.rows]
            yield screen.table(cells, widest=48)
            return
        yield screen.truncated(summary, 12, "remark")
        groups = self.groups()
        products = [group for group in groups if group[1][0].op in LOW]
        others = groups[len(products) :]
        full = governed(self._asked).name
        yield lambda room: _by_reason(products, full, min(_PRODUCTS, room) if others else room)
        yield functools.partial(_by_reason, others, full)
        yield [_MORE]


def _by_reason(groups: Iterable[tuple[str, list[Row]]], full: str, room: int) -> list[str]:
    """Formats operations by dtype and reason, each above its costliest places.

    Of operations other than matmuls and convolutions, those in the `full` dtype come first.
    """
    reasons: dict[tuple[str, str], list[tuple[str, list[Row]]]] = defaultdict(list)
    for path, rows in groups:
        reasons[rows[0].dtype, rows[0].why].append((path, rows))
    costs = {key: _cost([r for _, rows in places for r in rows]) for key, places in reasons.items()}
    order = sorted(costs, key=lambda key: (costs[key][1], key[0] == full, costs[key]), reverse=True)
    extra = room - 2 * len(order)  # lines for more than one place of a reason
    blocks = []
    for dtype, why in order:
        places = reasons[dtype, why]
        shown = places[: 1 + max(0, extra)]
        count = screen.counted(sum(r.count for _, rows in places for r in rows), "operation")
        title = f"{dtype}, {why}: {count}, {_size(costs[dtype, why])}"
        if others := len(places) - len(shown):
            title += f", here and in {screen.counted(others, 'other place')}"
        block = screen.wrapped(title, hanging=2)
        block += [f"    {_place(*place)}" for place in shown]
        extra -= len(block) - 2
        blocks.append(block)
    return screen.truncated(blocks, room, "reason")


def _place(path: str, rows: Sequence[Row]) -> str:
    ops = list(dict.fromkeys(row.op for row in rows))
    named = ", ".join(ops[:3]) + (", …" if len(ops) > 3 else "")
    return (
        f"{_size(_cost(rows)):12s} {rows[0].source} {screen.tail(path, 50)}".rstrip() + f": {named}"
    )


def _size(cost: tuple[bool, int, int]) -> str:
    contracts, flops, size = cost
    return f"{screen.si(flops)}FLOPs" if contracts else f"{screen.si(size)}B"


def _cost(rows: Sequence[Row]) -> tuple[bool, int, int]:
    """Returns a key to sort groups by."""
    return rows[0].op in LOW, sum(r.flops for r in rows), sum(r.bytes for r in rows)


def _places(rows: list[Row]) -> str:
    """Describes where the first of some rows is, and how many more there are."""
    first = f"{rows[0].op} at {rows[0].where}" if rows[0].where else rows[0].op
    return first + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")


def _total(
    rows: Iterable[Row], count: Callable[[Row], Any], by: Callable[[Row], str] | None = None
) -> dict[str, Any]:
    """Sums `count` over rows by their dtypes, or by something else, most first."""
    found: Counter[str] = Counter()
    for row in rows:
        found[by(row) if by else row.dtype] += count(row)
    return dict(found.most_common())


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {dtype}" for dtype, n in counts.items()) or "none"
