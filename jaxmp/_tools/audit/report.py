"""The report of `audit`: operations, findings, and their text, in which alike ones are merged."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmp._core.jaxprs.primitive_table import of_kind
from jaxmp._core.plan.why import Skipped
from jaxmp._tools import screen
from jaxmp._tools.explain.explanation import Product, Quantized

OVERRULED = "overruled"
# The kinds of findings, the gravest first, since the costs of two kinds may differ in their units.
# All but the last are faults: of the program, or of the policy or target that it is audited for.
KINDS = {
    OVERRULED: "policy that decides nothing",
    "not-scaled": "gradients of a loss that was not scaled",
    "not-unscaled": "gradients that still have the loss scale as a factor",
    "scaled-twice": "gradients scaled or unscaled once too often",
    "no-scale": "backward pass in float16 without a loss scale",
    "inconsistent-recompute": "product recomputed in another dtype",
    "float32-product": "matmul or convolution in float32",
    "float64-product": "matmul or convolution in float64",
    "emulated": "matmul or convolution in a dtype that this device emulates",
    "promotion": "16-bit values promoted to float32",
    "rounded-result": "product rounded before a cross-entropy",
    "sensitive-low": "sensitive operation in 16 bits",
    "round-trip": "cast there and back",
    "unneeded-scale": "loss scale without float16 gradients",
    "misaligned": "sizes that the chip pads",
    "large-logits": "logits saved for the backward pass",
    "residual": "float32 saved for the backward pass",
    "not-quantized": "layer that the recipe does not multiply",
    "not-fused": "attention that no kernel computes",
    "intended-float32": "matmul or convolution kept in float32",
}
# The kinds whose cost is in bytes; the cost of all others is in FLOPs.
_OF_SCALING = ("not-scaled", "not-unscaled", "scaled-twice", "unneeded-scale")
OF_BYTES = frozenset(
    [*_OF_SCALING, "promotion", "sensitive-low", "round-trip", "residual", "large-logits"]
)
FAULTS = tuple(kind for kind in KINDS if kind != "intended-float32")

# The fix for each kind of finding whose fix does not depend on the program.
FIXES = {
    OVERRULED: "audit the model as it was before jaxmp.wrap, or without a policy",
    "not-scaled": "differentiate with jaxmp.value_and_grad(loss_fn, opt_state), or with the "
    "value_and_grad of the train state",
    "not-unscaled": "jaxmp.loss_scaling.unscale(grads, opt_state) behind the gradient of what "
    "jaxmp.loss_scaling.scale_loss returned; or jaxmp.value_and_grad(loss_fn, opt_state), which "
    "does both",
    "scaled-twice": "scale the loss and divide its gradients in one place: "
    "jaxmp.value_and_grad(loss_fn, opt_state) does both",
    "no-scale": "jaxmp.loss_scale_for(policy, optimizer), and gradients of a scaled loss",
    "inconsistent-recompute": "preferred_element_type=jnp.float32 in both passes",
    "float64-product": "give float32, or turn jax_enable_x64 off; or a policy for float64, "
    "'p=f64,c=f32,o=f64'",
    "rounded-result": "return float32 by preferred_element_type=jnp.float32; its backward products "
    "are float32 then, unless a jax.custom_vjp narrows the gradient",
    "sensitive-low": "cast up before it, or leave the model in float32 to autocast",
    "round-trip": "use the value from before the casts",
    "unneeded-scale": "jaxmp.loss_scale_for(policy, optimizer), which scales for float16 alone; "
    "nothing, if it is there to skip steps that are not finite",
    "large-logits": "the loss without them, of the last layer's weights and of what it takes: "
    "jaxmp.losses.linear_cross_entropy(x, table, labels)",
    "residual": "narrow it before it is saved",
    "not-quantized": "give the module a policy without `matmul`: jaxmp.PolicyMap",
    "not-fused": "write it as a kernel takes it, or leave `attention` out of the module's policy",
}

# The fix for products that have a precision of their own.
LEAVE_PRECISION_OUT = (
    "leave precision= out where the layer or product is written, and the policy decides"
)

# The number of places shown for a group of alike findings.
_PLACES = 4
_MORE = "All of them: to_text(verbose=True), or .findings and .operations; --all on a command line."
# Primitives that compute; derivative rules of autocast's own rematerialize casts and masks as well.
_ARITHMETIC = of_kind("compute", "full_precision", "promote")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding(screen.Printed):
    """Something that costs more than it must, or is less precise than it should be.

    Attributes:
      kind: as `audit` lists them.
      source: the line to blame, ``file.py:line``.
      path: the module path there.
      what: the problem, in words.
      fix: what to do.
      cost: the FLOPs or bytes per call that it concerns.
      unit: "FLOPs" or "bytes".
      share: the cost as a share of the FLOPs of all matmuls and convolutions, or of all operations'
        bytes.
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
        """Returns a sort key: kinds in the order of `KINDS`, the costliest of each first."""
        return list(KINDS).index(self.kind), -self.cost

    def __str__(self) -> str:
        where = f"{self.source} {self.path}".strip()
        line = f"{KINDS[self.kind]}, {self.share:.1%} of the {self.unit}: {where}: {self.what}"
        if others := [s for s in self.sites if s not in (self.source, "")]:
            line += f"\n    seen at {', '.join(others)}"
        return f"{line}\n    fix: {self.fix}" if self.kind in FAULTS else line


def alike(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups findings of one kind, reason and fix, apart from layer numbers; gravest first."""
    groups: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for f in findings:
        groups[f.kind, screen.of_any_layer(f.what), screen.of_any_layer(f.fix)].append(f)
    return sorted(groups.values(), key=lambda group: (group[0].rank()[0], -_cost(group)))


def on_a_screen(groups: Sequence[Sequence[Finding]], room: int) -> list[str]:
    """Formats groups of `alike` findings, as many as fit in `room` lines; intended ones last."""
    faults = [group for group in groups if group[0].kind in FAULTS]
    blocks = [_block(f"{i}. ", group) for i, group in enumerate(faults, 1)]
    intended = [_block("- ", group) for group in groups[len(faults) :]]
    if intended:
        intended[0] = ["On purpose:", *intended[0]]
    return screen.truncated([*blocks, *intended], room, "finding")


def _block(bullet: str, group: Sequence[Finding]) -> list[str]:
    """Formats what the findings of a group have in common, their places, and the fix."""
    first, indent = group[0], len(bullet)
    share = sum(f.share for f in group)
    what = screen.merged_text([f.what for f in group])
    title = f"{bullet}{KINDS[first.kind]}, {share:.1%} of the {first.unit}: "
    places = screen.merged(group, lambda f: f.source, lambda f: f.path)
    places.sort(key=lambda place: _cost(place[1]), reverse=True)
    if len(places) == 1:
        lines = screen.wrapped(f"{title}{_where(*places[0])}: {what}", hanging=indent)
    else:
        shown = [
            f"{' ' * indent}{sum(f.share for f in of):6.1%}  {_where(path, of)}"
            for path, of in places
        ]
        lines = screen.wrapped(f"{title}{what}", hanging=indent)
        *listed, last = screen.truncated(shown, _PLACES, "place")
        lines += [*listed, last if last.startswith(" ") else f"{' ' * (indent + 8)}{last}"]
    if first.kind in FAULTS:
        fix = screen.merged_text([f.fix for f in group])
        lines += screen.wrapped(f"fix: {fix}", indent, hanging=indent + 5)
    return lines


def _where(path: str, group: Sequence[Finding]) -> str:
    return f"{group[0].source} {path}".strip()


def _cost(group: Sequence[Finding]) -> int:
    return sum(f.cost for f in group)


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
class PrecisionReport(screen.Report):
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

    def _narrowed_by_author(self) -> list[str]:
        """Returns where the program itself narrows float32 values, such as by a layer's dtype."""
        pairs = {(("float32",), (dtype,)) for dtype in ("bfloat16", "float16")}
        casts = [
            op
            for op in self.operations
            if op.op == "convert_element_type" and (op.in_dtypes, op.out_dtypes) in pairs
            if not (op.inserted or op.backward or op.again)
        ]
        places = screen.merged(casts, lambda op: op.source, lambda op: op.path)
        places.sort(key=lambda place: -sum(op.count for op in place[1]))
        return [f"{ops[0].source} {path}".strip() for path, ops in places]

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
                total = screen.si(sum(self.product_flops(backward=backward).values()))
                yield from screen.labeled(f"matmul, conv {name}", f"{text} of {total}FLOPs")
        if self.residual_bytes:
            saved = screen.by_dtype(self.residual_bytes)
            yield from screen.labeled("saved for backward pass", saved)
        again = [op for op in self.operations if op.again]
        if any(op.op in _ARITHMETIC for op in again):
            flops = screen.si(sum(op.flops for op in again))
            others = sum(op.count for op in again if not op.flops)
            yield from screen.labeled(
                "rematerialized", f"{flops}FLOPs, {others:g} other operations"
            )
        for by, inserted in (("the author", False), ("autocast", True)):
            if casts := self.casts(inserted=inserted):
                parts = [
                    f"{count:g} {pair} ({screen.si(size)}B written)"
                    for pair, (count, size) in sorted(casts.items())
                ]
                yield from screen.labeled(f"casts by {by}", ", ".join(parts))
        if narrowed := self._narrowed_by_author():
            yield from screen.labeled("narrowed by the author", screen.named(narrowed, 2))
        products = self.quantized()
        if any(p.quantized for p in products.products) or any(op.skipped for op in self.operations):
            yield from products.summary().splitlines()

    def _arguments(self, *, merged: bool) -> Iterator[str]:
        """Yields lines on bytes of arguments; `merged`, one for layers that differ in number."""
        found = [(name, [sizes]) for name, sizes in self.arguments.items()]
        if merged:
            items = self.arguments.items()
            groups = screen.merged(items, lambda _: None, lambda item: item[0], screen.OF_LAYER)
            found = [(name, [sizes for _, sizes in group]) for name, group in groups]
        width = max((len(name) for name, _ in found), default=0)
        for name, sizes in found:
            total = sum(map(Counter, sizes), Counter[str]())
            yield f"argument {name:{max(width, 15)}s} {screen.by_dtype(total)}"

    def verdict(self) -> str:
        """Returns the verdict in a sentence: the products' dtypes, and the gravest finding."""
        share = self.product_share()
        parts = ", ".join(f"{part:.1%} {dtype}" for dtype, part in share.items())
        of = f"Matmuls and convolutions: {parts}" if parts else "No matmul or convolution"
        faults = [group for group in alike(self.findings) if group[0].kind in FAULTS]
        if not faults:
            return f"{of}. No findings."
        found = screen.counted(len(faults), "finding")
        count = sum(map(len, faults))
        places = f" in {screen.counted(count, 'place')}" if count > len(faults) else ""
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

    def _sections(self, *, verbose: bool) -> Iterator[screen.Section]:
        yield screen.wrapped(self.verdict())
        if verbose:
            yield self.summary().splitlines()
            yield [f"{i}. {finding}" for i, finding in enumerate(self.findings, 1)]
            return
        computed = screen.truncated(self._computed(), 12, "remark")
        room = max(3, 10 - len(computed))
        yield computed + screen.truncated(self._arguments(merged=True), room, "argument")
        yield functools.partial(on_a_screen, alike(self.findings))
        yield [_MORE]
