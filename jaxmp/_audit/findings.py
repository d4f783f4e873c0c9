"""The findings of `audit`: their kinds, and their text, in which alike findings are merged."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from jaxmp import _screen

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


@dataclasses.dataclass(frozen=True, slots=True)
class Finding(_screen.Printed):
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
        groups[f.kind, _screen.of_any_layer(f.what), _screen.of_any_layer(f.fix)].append(f)
    return sorted(groups.values(), key=lambda group: (group[0].rank()[0], -_cost(group)))


def on_a_screen(groups: Sequence[Sequence[Finding]], room: int) -> list[str]:
    """Formats groups of `alike` findings, as many as fit in `room` lines; intended ones last."""
    faults = [group for group in groups if group[0].kind in FAULTS]
    blocks = [_block(f"{i}. ", group) for i, group in enumerate(faults, 1)]
    intended = [_block("- ", group) for group in groups[len(faults) :]]
    if intended:
        intended[0] = ["On purpose:", *intended[0]]
    return _screen.truncated([*blocks, *intended], room, "finding")


def _block(bullet: str, group: Sequence[Finding]) -> list[str]:
    """Formats what the findings of a group have in common, their places, and the fix."""
    first, indent = group[0], len(bullet)
    share = sum(f.share for f in group)
    what = _screen.merged_text([f.what for f in group])
    title = f"{bullet}{KINDS[first.kind]}, {share:.1%} of the {first.unit}: "
    places = _screen.merged(group, lambda f: f.source, lambda f: f.path)
    places.sort(key=lambda place: _cost(place[1]), reverse=True)
    if len(places) == 1:
        lines = _screen.wrapped(f"{title}{_where(*places[0])}: {what}", hanging=indent)
    else:
        shown = [
            f"{' ' * indent}{sum(f.share for f in of):6.1%}  {_where(path, of)}"
            for path, of in places
        ]
        lines = _screen.wrapped(f"{title}{what}", hanging=indent)
        *listed, last = _screen.truncated(shown, _PLACES, "place")
        lines += [*listed, last if last.startswith(" ") else f"{' ' * (indent + 8)}{last}"]
    if first.kind in FAULTS:
        fix = _screen.merged_text([f.fix for f in group])
        lines += _screen.wrapped(f"fix: {fix}", indent, hanging=indent + 5)
    return lines


def _where(path: str, group: Sequence[Finding]) -> str:
    return f"{group[0].source} {path}".strip()


def _cost(group: Sequence[Finding]) -> int:
    return sum(f.cost for f in group)
