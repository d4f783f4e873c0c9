"""The report of `audit`: operations, findings, and their text."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxmp import _screen
from jaxmp._audit.findings import FAULTS, KINDS, Finding, alike, on_a_screen
from jaxmp._autocast.product_report import Product, Quantized
from jaxmp._autocast.why import Skipped
from jaxmp._jaxprs.primitive_table import of_kind

_MORE = "All of them: to_text(verbose=True), or .findings and .operations; --all on a command line."
# Primitives that compute; derivative rules of autocast's own rematerialize casts and masks as well.
_ARITHMETIC = of_kind("compute", "full_precision", "promote")


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
      flops: floating-point operations of a product per call, a multiply-add as two; else 0.
      bytes: bytes of its operands and results per call, as if nothing were fused.
      count: how often it runs per call.
      backward: whether it belongs to a backward pass.
      inserted: whether autocast added it.
      again: whether it is rematerialized for the backward pass, by a `jax.checkpoint` or a policy
        with ``residuals=recompute``.
      kept: why autocast keeps a product in float32 of its own accord; else empty.
      skipped: why a policy's recipe does not apply to a product; else None.
      emulates: the format whose values a product multiplies in a wider one, because the device
        lacks it; else empty.
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
        """The dtype that a product multiplies, or both, as in ``bfloat16*float32``."""
        return "*".join(sorted(set(self.in_dtypes[:2])))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PrecisionReport(_screen.Report):
    """The report of `jaxmp.audit`. Print it, or all of it: `to_text(verbose=True)`.

    Attributes:
      operations: one per equation, in order.
      findings: the gravest and costliest first.
      arguments: bytes by dtype of each argument, or of each field of one that has fields.
      residual_bytes: bytes by dtype of the residuals (saved for the backward pass), without the
        arguments themselves.
    """

    operations: tuple[Operation, ...]
    findings: tuple[Finding, ...]
    arguments: dict[str, dict[str, int]]
    residual_bytes: dict[str, int]

    def product_flops(self, *, backward: bool | None = None) -> dict[str, float]:
        """Returns the FLOPs of matmuls and convolutions by the dtype they multiply, most first.

        Args:
          backward: only those of the backward pass (True) or only the others (False).
        """
        flops: Counter[str] = Counter()
        for op in self.operations:
            if op.flops and backward in (None, op.backward):
                flops[op.dtype] += op.flops  # type: ignore[assignment]  # a float counts as well
        return dict(flops.most_common())

    def product_share(self, *, backward: bool | None = None) -> dict[str, float]:
        """Returns the products' FLOPs by dtype, like `product_flops`, as shares of their sum."""
        flops = self.product_flops(backward=backward)
        total = sum(flops.values())
        return {dtype: count / total for dtype, count in flops.items()}

    def casts(self, *, inserted: bool | None = None) -> dict[str, tuple[float, float]]:
        """Returns the number and bytes of the casts between floats, by ``bfloat16->float32``.

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
                    before, after = (jnp.dtype(name).itemsize for name in pair)
                    count, size = table.get("->".join(pair), (0.0, 0.0))
                    written = op.bytes * after / (before + after)
                    table["->".join(pair)] = count + op.count, size + written
        return table

    def quantized(self) -> Quantized:
        """Returns every product, forward and backward: in 8 bits, or not and why. Print it."""
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
        """Raises if there are findings of the given kinds; by default, of any kind of fault.

        Args:
          *kinds: as in `Finding.kind`. "intended-float32" is not a fault: name it to refuse it as
            well.

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
        """Returns a few lines: FLOPs, residuals, casts and arguments by dtype."""
        return "\n".join([*self._computed(), *self._arguments(merged=False)])

    def _computed(self) -> Iterator[str]:
        for name, backward in (("forward", False), ("backward", True)):
            if share := self.product_share(backward=backward):
                text = ", ".join(f"{part:.1%} {dtype}" for dtype, part in share.items())
                total = _screen.si(sum(self.product_flops(backward=backward).values()))
                yield from _screen.labeled(f"matmul, conv {name}", f"{text} of {total}FLOPs")
        if self.residual_bytes:
            saved = _screen.by_dtype(self.residual_bytes)
            yield from _screen.labeled("saved for backward pass", saved)
        again = [op for op in self.operations if op.again]
        if any(op.op in _ARITHMETIC for op in again):
            flops = _screen.si(sum(op.flops for op in again))
            others = sum(op.count for op in again if not op.flops)
            yield from _screen.labeled(
                "rematerialized", f"{flops}FLOPs, {others:g} other operations"
            )
        for by, inserted in (("the author", False), ("autocast", True)):
            if casts := self.casts(inserted=inserted):
                parts = [
                    f"{count:g} {pair} ({_screen.si(size)}B written)"
                    for pair, (count, size) in sorted(casts.items())
                ]
                yield from _screen.labeled(f"casts by {by}", ", ".join(parts))
        products = self.quantized()
        if any(p.quantized for p in products.products) or any(op.skipped for op in self.operations):
            yield from products.summary().splitlines()

    def _arguments(self, *, merged: bool) -> Iterator[str]:
        """Yields lines on bytes of arguments; `merged`, one for layers that differ in number."""
        found = [(name, [sizes]) for name, sizes in self.arguments.items()]
        if merged:
            items = self.arguments.items()
            groups = _screen.merged(items, lambda _: None, lambda item: item[0], _screen.OF_LAYER)
            found = [(name, [sizes for _, sizes in group]) for name, group in groups]
        width = max((len(name) for name, _ in found), default=0)
        for name, sizes in found:
            total = sum(map(Counter, sizes), Counter[str]())
            yield f"argument {name:{max(width, 15)}s} {_screen.by_dtype(total)}"

    def verdict(self) -> str:
        """Returns the verdict in a sentence: the products' dtypes, and the gravest finding."""
        share = self.product_share()
        parts = ", ".join(f"{part:.1%} {dtype}" for dtype, part in share.items())
        of = f"Matmuls and convolutions: {parts}" if parts else "No matmul or convolution"
        faults = [group for group in alike(self.findings) if group[0].kind in FAULTS]
        if not faults:
            return f"{of}. No findings."
        found = _screen.counted(len(faults), "finding")
        count = sum(map(len, faults))
        places = f" in {_screen.counted(count, 'place')}" if count > len(faults) else ""
        return f"{of}. {found}{places}, first: {KINDS[faults[0][0].kind]}."

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON."""
        return {
            "product_flops": {
                "forward": self.product_flops(backward=False),
                "backward": self.product_flops(backward=True),
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

    def _sections(self, *, verbose: bool) -> Iterator[_screen.Section]:
        yield _screen.wrapped(self.verdict())
        if verbose:
            yield self.summary().splitlines()
            yield [f"{i}. {finding}" for i, finding in enumerate(self.findings, 1)]
            return
        computed = _screen.truncated(self._computed(), 12, "remark")
        room = max(3, 10 - len(computed))
        yield computed + _screen.truncated(self._arguments(merged=True), room, "argument")
        yield functools.partial(on_a_screen, alike(self.findings))
        yield [_MORE]
