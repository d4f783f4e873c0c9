"""What `audit` returns: operations, findings, and how they print."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from jaxmp._autocast.product_report import Product, Quantized
from jaxmp._autocast.why import Skipped
from jaxmp._jaxprs.primitive_table import of_kind

OVERRULED = "overruled"
# The kinds of findings, the gravest first: of two kinds, the costs are in different units. All but
# the last are faults, of the program or of what it is audited for.
KINDS = {
    OVERRULED: "policy that decides nothing",
    "not-scaled": "gradients of a loss that was not scaled",
    "not-unscaled": "gradients that still have the loss scale as a factor",
    "scaled-twice": "gradients scaled or unscaled once too often",
    "no-scale": "backward pass in float16 without a loss scale",
    "inconsistent-recompute": "product recomputed in another dtype",
    "float32-contraction": "contraction in float32",
    "float64-contraction": "contraction in float64",
    "emulated": "contraction in a dtype that this device emulates",
    "promotion": "16-bit values promoted to float32",
    "rounded-result": "product rounded before a cross-entropy",
    "sensitive-low": "sensitive operation in 16 bits",
    "round-trip": "cast there and back",
    "misaligned": "sizes that the chip pads",
    "residual": "float32 kept for the backward pass",
    "not-quantized": "layer that the recipe does not multiply",
    "not-fused": "attention that no kernel computes",
    "intended-float32": "contraction kept in float32",
}
# Those whose cost is in bytes; all others have theirs in FLOPs.
_OF_SCALING = ("not-scaled", "not-unscaled", "scaled-twice")
OF_BYTES = frozenset([*_OF_SCALING, "promotion", "sensitive-low", "round-trip", "residual"])
FAULTS = tuple(kind for kind in KINDS if kind != "intended-float32")


# Classes of what computes; casts and masks are made again by derivatives of autocast's own as well.
_ARITHMETIC = of_kind("low", "full", "follow")

_NUMBER = re.compile(r"(\d+)")


class PrecisionError(AssertionError):
    """Raised by `PrecisionReport.assert_no` and `jaxmp.testing`: a program is not as asserted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One equation of the program.

    Attributes:
      op: the primitive's name.
      path: the module path and named scopes.
      source: ``file.py:line`` in the user's code.
      in_dtypes: the dtypes of its operands.
      out_dtypes: the dtypes of its results.
      flops: floating-point operations per call, a multiply-add counted as two; of contractions.
      bytes: bytes of its operands and results per call, as if nothing were fused.
      count: how often it runs per call.
      backward: whether it belongs to a backward pass.
      inserted: whether autocast added it.
      again: whether it computes again, for the backward pass, what a `jax.checkpoint` or a policy
        with ``residuals=recompute`` did not keep.
      kept: why autocast keeps a contraction in float32 of its own accord; empty for all else.
      skipped: why a policy's recipe does not multiply a contraction; None for all else.
      emulates: the format whose values a contraction multiplies in a wider one, where the device
        lacks it; empty for all else.
    """

    op: str
    path: str
    source: str
    in_dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    flops: float
    bytes: float
    count: float
    backward: bool
    inserted: bool = False
    again: bool = False
    kept: str = ""
    skipped: Skipped | None = None
    emulates: str = ""

    @property
    def dtype(self) -> str:
        """What a contraction multiplies: one dtype, or two, as in ``bfloat16*float32``."""
        return "*".join(sorted(set(self.in_dtypes[:2])))


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs more than it must, or is less precise than it should be.

    Attributes:
      kind: as `audit` lists them.
      source: the line to blame, ``file.py:line``.
      path: the module path there.
      what: what is the case.
      fix: what to do.
      cost: FLOPs or bytes per call that are concerned.
      unit: which of the two.
      share: of all contractions' FLOPs, or of all operations' bytes.
      sites: the lines of the operations concerned.
    """

    kind: str
    source: str
    path: str
    what: str
    fix: str
    cost: int
    unit: str
    share: float
    sites: tuple[str, ...] = ()

    def rank(self) -> tuple[int, int]:
        """A key to sort by: kinds in the order of `KINDS`, the costliest of each first."""
        return list(KINDS).index(self.kind), -self.cost

    def __str__(self) -> str:
        where = f"{self.source} {self.path}".strip()
        line = f"{KINDS[self.kind]}, {self.share:.1%} of the {self.unit}: {where}: {self.what}"
        others = [s for s in self.sites if s not in (self.source, "")]
        if others:
            shown = ", ".join(others[:4]) + (", …" if len(others) > 4 else "")
            line += f"\n    seen at {shown}"
        return f"{line}\n    fix: {self.fix}" if self.kind in FAULTS else line


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionReport:
    """What `jaxmp.audit` found. Print it.

    Attributes:
      operations: one per equation, in order.
      findings: the gravest and costliest first.
      arguments: bytes by dtype of each argument, or field of one that has fields.
      residual_bytes: by dtype, bytes of what the forward pass keeps for the backward pass, without
        the arguments themselves.
    """

    operations: tuple[Operation, ...]
    findings: tuple[Finding, ...]
    arguments: dict[str, dict[str, int]]
    residual_bytes: dict[str, int]

    def contraction_flops(self, *, backward: bool | None = None) -> dict[str, float]:
        """FLOPs of contractions by the dtype they multiply, most first.

        Args:
          backward: only those of the backward pass (True) or of all else (False).
        """
        flops: Counter[str] = Counter()
        for op in self.operations:
            if op.flops and backward in (None, op.backward):
                flops[op.dtype] += op.flops  # type: ignore[assignment]  # a float counts as well
        return dict(flops.most_common())

    def contraction_share(self, *, backward: bool | None = None) -> dict[str, float]:
        """The share of contractions' FLOPs by dtype, as `contraction_flops`; they add up to one."""
        flops = self.contraction_flops(backward=backward)
        total = sum(flops.values())
        return {dtype: count / total for dtype, count in flops.items()}

    def casts(self, *, inserted: bool | None = None) -> dict[str, tuple[float, float]]:
        """Conversions between floats, as ``bfloat16->float32``: how many, and bytes written.

        Args:
          inserted: only those that autocast added (True) or that the author wrote (False).
        """
        table: dict[str, tuple[float, float]] = {}
        for op in self.operations:
            if inserted not in (None, op.inserted):
                continue
            if op.op == "convert_element_type" and op.in_dtypes != op.out_dtypes:
                pair = (*op.in_dtypes, *op.out_dtypes)
                if all("float" in dtype for dtype in pair):
                    before, after = map(_itemsize, pair)
                    count, size = table.get("->".join(pair), (0.0, 0.0))
                    written = op.bytes * after / (before + after)
                    table["->".join(pair)] = count + op.count, size + written
        return table

    def quantized(self) -> Quantized:
        """Every contraction, forward and backward: in 8 bits, or not and why. Print it."""
        return Quantized(
            tuple(
                Product(
                    path=op.path,
                    source=op.source,
                    dtype=op.emulates or op.dtype,
                    count=op.count,
                    backward=op.backward,
                    why_not=op.skipped.why if op.skipped else op.kept,
                    intended=op.skipped.intended if op.skipped else bool(op.kept),
                )
                for op in self.operations
                if op.flops
            )
        )

    def assert_no(self, *kinds: str) -> None:
        """Raises if there are findings of some kinds; of any kind of fault if none is named.

        Args:
          *kinds: as in `Finding.kind`. "intended-float32" is no fault: name it to refuse that, too.

        Raises:
          PrecisionError: (an AssertionError) that lists them.
          ValueError: if a kind is unknown.
        """
        unknown = set(kinds) - KINDS.keys()
        if unknown:
            raise ValueError(
                f"assert_no: unknown kind {min(unknown)!r}; the kinds are {', '.join(KINDS)}."
            )
        found = [f for f in self.findings if f.kind in (kinds or FAULTS)]
        if found:
            raise PrecisionError("\n".join(map(str, found)))

    def summary(self) -> str:
        """A few lines: FLOPs, residuals, casts and arguments by dtype."""
        lines = []
        for name, backward in (("forward", False), ("backward", True)):
            share = self.contraction_share(backward=backward)
            if share:
                text = ", ".join(f"{part:.1%} {dtype}" for dtype, part in share.items())
                total = sum(self.contraction_flops(backward=backward).values())
                lines.append(f"contractions, {name:8s}  {text} of {_si(total)}FLOPs")
        if self.residual_bytes:
            lines.append(f"kept for backward       {_by_dtype(self.residual_bytes)}")
        again = [op for op in self.operations if op.again]
        if any(op.op in _ARITHMETIC for op in again):
            flops = sum(op.flops for op in again)
            others = sum(op.count for op in again if not op.flops)
            lines.append(f"computed again          {_si(flops)}FLOPs, {others:g} other operations")
        for by, inserted in (("the author", False), ("autocast", True)):
            for pair, (count, size) in sorted(self.casts(inserted=inserted).items()):
                lines.append(f"casts by {by:14s} {count:g} {pair}, {_si(size)}B written")
        products = self.quantized()
        if any(p.quantized for p in products.products) or any(op.skipped for op in self.operations):
            lines.append(products.summary())
        for name, by_dtype in self.arguments.items():
            lines.append(f"argument {name:14s} {_by_dtype(by_dtype)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "contraction_flops": {
                "forward": self.contraction_flops(backward=False),
                "backward": self.contraction_flops(backward=True),
            },
            "residual_bytes": self.residual_bytes,
            "arguments": self.arguments,
            "casts": {
                pair: {"count": count, "bytes": size}
                for pair, (count, size) in self.casts().items()
            },
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "operations": [dataclasses.asdict(op) for op in self.operations],
        }

    def __str__(self) -> str:
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            return self._table()
        found = _of_repeated_layers(self.findings)
        faults = [f"{i}. {f}" for i, f in enumerate((f for f in found if f.kind in FAULTS), 1)]
        intended = [f"- {f}" for f in found if f.kind not in FAULTS]
        lines = [self.summary(), "", *(faults or ["Nothing to remark."])]
        return "\n".join([*lines, *(["", "On purpose:", *intended] if intended else [])])

    def _table(self) -> str:
        """The report for a terminal."""
        from rich.console import Console  # noqa: PLC0415 (an extra)
        from rich.table import Table  # noqa: PLC0415

        table = Table("", "finding", "where", "what", "fix", show_lines=True)
        for i, f in enumerate(_of_repeated_layers(self.findings), 1):
            share = f"{KINDS[f.kind]}, {f.share:.1%} of the {f.unit}"
            table.add_row(str(i), share, f"{f.source}\n{f.path}", f.what, f.fix)
        console = Console(file=io.StringIO(), force_terminal=True)
        console.print(self.summary(), highlight=False)
        console.print(table)
        return str(console.file.getvalue())  # type: ignore[attr-defined]


def _of_repeated_layers(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for those that differ in a layer's number alone: ``Block_*/Dense_0``."""
    groups: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for f in findings:
        groups[f.kind, f.source, _NUMBER.sub("*", f.path), f.what, f.fix].append(f)
    merged = [
        dataclasses.replace(
            group[0],
            path=_common(f.path for f in group),
            cost=sum(f.cost for f in group),
            share=sum(f.share for f in group),
            sites=tuple(dict.fromkeys(site for f in group for site in f.sites)),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=Finding.rank)


def _common(paths: Iterable[str]) -> str:
    """Paths that differ in numbers alone, in one: ``*`` for the numbers that differ."""
    split = [re.split(_NUMBER, path) for path in paths]
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def _itemsize(dtype: str) -> int:
    return 2 if dtype.endswith("16") else 8 if dtype.endswith("64") else 4 if "32" in dtype else 1


def _by_dtype(sizes: dict[str, int]) -> str:
    return ", ".join(f"{_si(size)}B {dtype}" for dtype, size in sizes.items())


def _si(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or prefix == "T":
            return f"{number:.3g} {prefix}"
        number /= 1000
    raise AssertionError("unreachable")
