"""`audit`: what ran in which dtype, what that costs, and which line is to blame."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend.core as jex_core
import jmp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._autocast.flat import is_array, trace
from jaxmp._autocast.jaxpr_compat import closed, dtype_of
from jaxmp._autocast.ops import LOW as CONTRACTIONS
from jaxmp._autocast.ops import classify
from jaxmp._autocast.rules import author_keeps
from jaxmp._autocast.transform import autocast
from jaxmp.devices import describe
from jaxmp.dtypes import multiplies_natively
from jaxmp.inspect.chip import Target, parse_target
from jaxmp.inspect.flops import contraction_flops, matmul_dims, nbytes
from jaxmp.inspect.follow import FLOAT32, LOW, Known, follow
from jaxmp.inspect.place import Place, is_ours, place_inside, place_of
from jaxmp.inspect.report import Finding, Operation, PrecisionReport
from jaxmp.policy import Policy

WRAP = "jaxmp.wrap(model, 'mixed_bfloat16'), or jaxmp.autocast for a function"
DEMOTE = "make the float32 side a Python number, or cast it to the other's dtype"
NARROW = "remove the upcast, or cast back before the next layer"


def audit(
    fn: Callable[..., Any],
    *args: Any,
    policy: str | Policy | jmp.Policy | DTypeLike | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> PrecisionReport:
    """Reports what a function computes in which dtype, what it costs, and why. Nothing runs.

    The function is traced: a forward pass, a loss, or a whole training step; jitted or not; with
    or without autocast in it. Counts are per call: operations in a `lax.scan` are counted as often
    as they run, those in a branch of a cond by the branch's share; a while loop's body once.

    Args:
      fn: a function of any pytrees.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s.
      policy: if given, what `jaxmp.autocast(fn, policy)` does is reported.
      target: the chip to judge dtypes and sizes for, as in `jaxmp.preflight`; by default the device
        that JAX runs on here.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The report: `print` it, or read its `findings`.

    Raises:
      ValueError: if the policy or the target is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
      >>> report = jaxmp.audit(jax.grad(loss), w, w)
      >>> report.contraction_share()
      {'float32': 1.0}
      >>> jaxmp.audit(jax.grad(loss), w, w, policy="mixed_bfloat16").contraction_share()
      {'bfloat16': 1.0}
    """
    if policy is not None:
        fn = autocast(fn, policy)
    jaxpr = trace(fn, args, kwargs).jaxpr
    if target is None:
        # Compute capabilities tell of GPUs, too, that the tables do not have.
        emulated = {str(dtype) for dtype in LOW if not multiplies_natively(dtype)}
        auditor = _Auditor(_here(), emulated)
    else:
        auditor = _Auditor(parse_target(target, "audit"), set())
    follow(jaxpr, _labels(args, kwargs), auditor.visit)
    residuals = Counter[str]()
    _residuals(closed(jaxpr).jaxpr, Place(), residuals, auditor)
    return PrecisionReport(
        operations=tuple(auditor.operations),
        findings=tuple(auditor.findings()),
        arguments=_arguments(args, kwargs),
        residual_bytes=dict(residuals),
    )


def _here() -> Target:
    """The device that JAX runs on, as far as the tables have it."""
    device = describe()
    return Target(
        name=device.chip or f"this {device.platform}",
        platform=device.platform,
        topology="",
        device_count=1,
        hbm_bytes=device.hbm_bytes or 0,
        hbm_bytes_per_second=device.hbm_bytes_per_second or 0,
        tflops=device.tflops,
    )


def _labels(args: Any, kwargs: Any) -> list[str]:
    """What to call each array of a call."""
    with_paths = jax.tree_util.tree_leaves_with_path((args, kwargs))
    return [
        f"the argument {jax.tree_util.keystr(path[1:])}"
        for path, leaf in with_paths
        if is_array(leaf)
    ]


def _arguments(args: Any, kwargs: Any) -> dict[str, dict[str, int]]:
    """Bytes by dtype of every argument, or field of an argument that has fields."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if is_array(leaf) and isinstance(leaf.dtype, np.dtype):
            name = jax.tree_util.keystr(path[1:3])
            table[name][str(leaf.dtype)] += int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    return {name: dict(counts) for name, counts in table.items()}


class _Auditor:
    """Collects operations, and what may be wrong with them, while the program is walked."""

    def __init__(self, chip: Target, emulated: set[str]) -> None:
        self.chip, self.emulated = chip, emulated
        self.operations: list[Operation] = []
        # (kind, source, path, what, fix) → cost: FLOPs of contractions, bytes of all else.
        self._costs: Counter[tuple[str, str, str, str, str]] = Counter()
        self._sites: dict[Any, Counter[str]] = defaultdict(Counter)

    def visit(self, eqn: jex_core.JaxprEqn, place: Place, known: list[Known], out: Known) -> None:
        """Records an equation."""
        moved = sum(map(nbytes, (*eqn.invars, *eqn.outvars)))
        operation = Operation(
            op=eqn.primitive.name,
            path=place.path,
            source=place.source,
            in_dtypes=tuple(str(v.aval.dtype) for v in eqn.invars if hasattr(v.aval, "dtype")),
            out_dtypes=tuple(str(v.aval.dtype) for v in eqn.outvars if hasattr(v.aval, "dtype")),
            flops=contraction_flops(eqn) * place.times,
            bytes=moved * place.times,
            count=place.times,
            backward=place.backward,
            inserted=is_ours(eqn),
        )
        self.operations.append(operation)
        if eqn.primitive.name in CONTRACTIONS:
            self._contraction(eqn, operation, place, known)
        elif eqn.primitive.name == "convert_element_type":
            self._round_trip(eqn, operation, known[0])
        else:
            self._sensitive(eqn, operation)
        cause = out.cause
        if cause is not None and cause.promoted and FLOAT32.name in operation.out_dtypes:
            size = sum(map(nbytes, eqn.outvars)) * place.times
            self._note("promotion", cause.source, cause.path, cause.what, DEMOTE, size, operation)

    def _note(
        self, kind: str, source: str, path: str, what: str, fix: str, cost: float, at: Operation
    ) -> None:
        key = kind, source, path, what, fix
        self._costs[key] += int(cost)
        self._sites[key][at.source] += 1

    def _contraction(
        self,
        eqn: jex_core.JaxprEqn,
        operation: Operation,
        place: Place,
        known: list[Known],
    ) -> None:
        dtypes = {dtype_of(v) for v in eqn.invars[:2]}
        if FLOAT32 in dtypes:
            source, path, what, fix = _why_float32(eqn, place, known)
            kind = "float32-contraction"
            self._note(kind, source, path, what, fix, operation.flops, operation)
            return
        where = operation.source, operation.path
        for dtype in operation.dtype.split("*"):
            if dtype in self.emulated or not self.chip.multiplies(dtype):
                what = f"{dtype} is not multiplied natively by {self.chip.name}: it is emulated"
                fix = "use the policy 'half', which asks the device, or 16 bits where it was 8"
                self._note("emulated", *where, what, fix, operation.flops, operation)
        multiple = self._multiple(dtypes)
        odd = {n: d for n, d in (matmul_dims(eqn) or {}).items() if d >= 8 and d % multiple}
        if odd:
            shown = ", ".join(f"{name} = {d}" for name, d in odd.items())
            what = f"{shown}: {self.chip.name} takes sizes in multiples of {multiple}"
            fix = f"pad the dimension to a multiple of {multiple}"
            self._note("misaligned", *where, what, fix, operation.flops, operation)

    def _multiple(self, dtypes: set[Any]) -> int:
        """What the sizes of a narrow matrix product should be multiples of.

        128 lanes on a TPU (Google: "Cloud TPU performance guide"); 16 bytes on tensor cores
        (NVIDIA: "Matrix multiplication background user's guide").
        """
        bytes_each = max(dtype.itemsize for dtype in dtypes if dtype is not None)
        if bytes_each > 2:
            return 1
        return 128 if self.chip.platform == "tpu" else 16 // bytes_each

    def _sensitive(self, eqn: jex_core.JaxprEqn, operation: Operation) -> None:
        low = {dtype_of(v) for v in (*eqn.invars, *eqn.outvars)} & LOW
        if low and classify(eqn.primitive.name, eqn.params) == "full":
            what = f"{eqn.primitive.name} runs in {min(str(d) for d in low)}"
            fix = "jaxmp keeps it float32; by hand: cast up before it"
            place = operation.source, operation.path
            self._note("sensitive-low", *place, what, fix, operation.bytes, operation)

    def _round_trip(self, eqn: jex_core.JaxprEqn, operation: Operation, known: Known) -> None:
        """Notes a cast that only undoes an earlier one, unless autocast inserted both."""
        cast = known.cast
        if cast is None or cast.before not in operation.out_dtypes:
            return
        narrow = dtype_of(eqn.invars[0]) in LOW
        # Something else may want the narrow value: storing it can be worth the rounding.
        if (cast.ours and operation.inserted) or (narrow and not cast.only):
            return
        middle = f"{operation.in_dtypes[0]} at {cast.source}"
        lost = "rounded" if narrow else "unchanged"
        what = f"{cast.before} was cast to {middle} and comes back {lost}"
        fix = "use the value from before the casts"
        where = operation.source, operation.path
        self._note("round-trip", *where, what, fix, operation.bytes, operation)

    def residual(self, var: Any, source: str, path: str, size: float) -> None:
        """Notes a float32 residual that its uses narrow anyway."""
        what = f"{var.aval.str_short()} is kept in float32 for the backward pass, which narrows it"
        key = "residual", source, path, what, "narrow it before it is saved"
        self._costs[key] += int(size)

    def findings(self) -> Iterable[Finding]:
        """The findings, the costliest kind and place first."""
        total_flops = sum(op.flops for op in self.operations) or 1
        total_bytes = sum(op.bytes for op in self.operations) or 1
        found = []
        for key, cost in self._costs.items():
            kind, source, path, what, fix = key
            of_flops = kind in ("float32-contraction", "emulated", "misaligned")
            found.append(
                Finding(
                    kind=kind,
                    source=source,
                    path=path,
                    what=what,
                    fix=fix,
                    cost=cost,
                    unit="FLOPs" if of_flops else "bytes",
                    share=cost / (total_flops if of_flops else total_bytes),
                    sites=tuple(self._sites[key]),
                )
            )
        return sorted(found, key=Finding.rank)


def _why_float32(
    eqn: jex_core.JaxprEqn, place: Place, known: list[Known]
) -> tuple[str, str, str, str]:
    """Whom to blame for a float32 contraction: line, path, what happened, and the remedy."""
    here = place.source, place.path
    if place.region is not None and place.region.low is None:
        return *here, "in a region that a policy or the author keeps float32", "intended"
    kept = author_keeps(eqn)
    if kept is not None:
        return *here, kept, "intended"
    cause = next((k.cause for k in known if k.cause is not None), None)
    if cause is not None:
        return cause.source, cause.path, cause.what, DEMOTE if cause.promoted else NARROW
    return *here, "nothing in the program narrows its operands", WRAP


def _residuals(jaxpr: Any, around: Place, bytes_by_dtype: Counter[str], auditor: _Auditor) -> None:
    """Adds up what forward equations of a jaxpr make and backward equations of it read."""
    made: dict[Any, Place] = {}
    used: dict[Any, list[jex_core.JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        place = place_of(eqn, around)
        if place.backward:
            for var in {v for v in eqn.invars if not isinstance(v, jex_core.Literal)}:
                if var in made:
                    used[var].append(eqn)
        else:
            made.update(dict.fromkeys(eqn.outvars, place))
            for inner in jex_core.jaxprs_in_params(eqn.params):
                _residuals(inner, place_inside(eqn, place), bytes_by_dtype, auditor)
    for var, users in used.items():
        size = nbytes(var) * made[var].times
        dtype = dtype_of(var)
        if not size or dtype is None:
            continue
        bytes_by_dtype[str(dtype)] += int(size)
        narrowed = all(
            e.primitive.name == "convert_element_type" and dtype_of(e.outvars[0]) in LOW
            for e in users
        )
        if dtype == FLOAT32 and narrowed:
            auditor.residual(var, made[var].source, made[var].path, size)
