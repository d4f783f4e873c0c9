"""`audit`: the dtypes of a program's operations, their costs, and the lines to blame."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from jaxmp._core.autocast.nnx_calls import is_any_wrapped, on_scoped_copies
from jaxmp._core.autocast.transform import watched
from jaxmp._core.decide.by_recipe import MULTIPLE
from jaxmp._core.execute.annotations import emulated_at, kept_at, skipped_at, unfused_at
from jaxmp._core.jaxprs.attributes import short_type
from jaxmp._core.jaxprs.compat import closed, dtype_of, variables, with_changed_equations
from jaxmp._core.jaxprs.equation_parameters import block_format, for_platform
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.trace import is_array, trace
from jaxmp._core.plan.flops import product_flops
from jaxmp._core.plan.parameters import read_argnums
from jaxmp._core.plan.plan import Plan
from jaxmp._core.plan.primitives import LOW as CONTRACTIONS
from jaxmp._core.plan.primitives import classify
from jaxmp._core.plan.regions import check_callable
from jaxmp._core.plan.why import Kind
from jaxmp._tools.arguments import check_sizes
from jaxmp._tools.audit.attribution import Judge
from jaxmp._tools.audit.follow import FLOAT32, LOW, Known, Observed, follow, is_ours
from jaxmp._tools.audit.logits import Logits, matmul_dims, nbytes
from jaxmp._tools.audit.report import (
    FIXES,
    LEAVE_PRECISION_OUT,
    OF_BYTES,
    OVERRULED,
    Finding,
    Operation,
    PrecisionReport,
)
from jaxmp._tools.audit.rounding import Rounding
from jaxmp._tools.audit.scaling import NO_SCALE, Scaling, has_optimizer, is_scale
from jaxmp._tools.explain.explain import planned, warn_overruled
from jaxmp._tools.speed.target import Target, on_target, parse_target
from jaxmp.devices import chips, describe
from jaxmp.dtypes import multiplies_natively
from jaxmp.policy import PolicyLike, single_policy

# The backward pass of max-pooling: a window rarely adds more than a few gradients.
_FEW_TERMS = frozenset({"select_and_scatter_add"})


def audit(
    fn: Callable[..., Any],
    policy: PolicyLike | None = None,
    argnums: int | Sequence[int] = 0,
    *,
    target: str | None = None,
) -> Callable[..., PrecisionReport]:
    """Reports the dtype of each operation of a function, its cost, and the reason. Nothing runs.

    The function is traced: a forward pass, a loss, or a whole training step; jitted or not; with
    or without autocast in it. Counts are per call: operations in a `lax.scan` are counted as often
    as they run, those in a branch of a cond by the branch's share; a while loop's body once.

    Args:
      fn: a function of any pytrees.
      policy: if given, the report is of `jaxmp.autocast(fn, policy, argnums)`.
      argnums: which arguments hold the parameters, as for `autocast`.
      target: the chip to judge dtypes and sizes for, as in `jaxmp.preflight`; by default the device
        that JAX runs on here.

    Returns:
      A function with the arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) that returns a
      `PrecisionReport`: `print` it, or read its `findings`. The kinds of faults are "overruled" (a
      policy without effect, since wrapped modules stay under their own, or since all products have
      a `precision=` of their own),
      "inconsistent-recompute" (a product that the backward pass recomputes in another dtype),
      "float32-product", "float64-product", "emulated" (by the chip), "promotion" (of 16-bit
      values), "rounded-result" (of a product, and widened for a cross-entropy: 16-bit results that
      anything else reads are usual, and what autocast rounds is not judged), "sensitive-low"
      (an operation in 16 bits), "round-trip" (casts undone), "misaligned" (sizes), "large-logits"
      (more than a quarter of all residual bytes), "residual" (saved in float32, then narrowed),
      "not-quantized" (a layer that the policy's recipe cannot multiply), "not-fused" (attention
      that no kernel computes, though the policy asks for it), "not-scaled" (the optimizer has a
      loss scale that the loss is not multiplied by), "not-unscaled" (its gradients are not divided
      by it), "scaled-twice" (one of the two is done once too often), "no-scale" (a training
      step, as the state of an optax transformation shows, with a float16 backward pass and no
      scaler) and "unneeded-scale" (a scaler, and no float16 in the backward pass).
      "intended-float32" is not a fault: a product that the author, a policy or autocast keeps in
      float32, for the reason given. Nor are very small products, which are geometry.

    Raises:
      ValueError: if the policy or the target is unknown; at a call, if an argument has a symbolic
        size, as in `jax.export`.
      TypeError: if `fn` is not callable, or is a Flax Linen module.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
      >>> report = jaxmp.audit(jax.grad(loss))(w, w)
      >>> report.product_share()
      {'float32': 1.0}
      >>> jaxmp.audit(jax.grad(loss), "mixed_bfloat16")(w, w).product_share()
      {'bfloat16': 1.0}
    """
    asked = None if policy is None else single_policy("audit", policy)
    check_callable("audit", fn)
    read_argnums("audit", argnums)
    chip = None if target is None else parse_target(target, "audit")

    def traced(*args: Any, **kwargs: Any) -> tuple[Any, str]:
        """Returns the program, and the remark that the policy is overruled."""
        program = on_scoped_copies(fn)
        if asked is None:
            return trace(program, args, kwargs).jaxpr, ""
        plans: list[Plan] = []
        jaxpr = trace(watched(program, asked, argnums, plans.append), args, kwargs).jaxpr
        if not plans:  # the policy changes nothing, but may differ from the one in force
            plans.append(planned(program, asked, argnums, args, kwargs)[0])
        return jaxpr, warn_overruled("audit", plans[-1])

    def audited(*args: Any, **kwargs: Any) -> PrecisionReport:
        check_sizes("audit", args, kwargs)
        jaxpr, overruled = on_target(chip, traced)(*args, **kwargs)
        at = _here() if chip is None else chip
        jaxpr = with_changed_equations(jaxpr, lambda eqn: for_platform(eqn, at.compiler))
        return _report(jaxpr, chip, overruled, args, kwargs)

    return audited


def _report(
    jaxpr: Any, chip: Target | None, overruled: str, args: Any, kwargs: Any
) -> PrecisionReport:
    """Reports on a traced program, for a chip or for the device of this machine."""
    has_wrapped = is_any_wrapped((args, kwargs))
    if chip is None:
        # By compute capabilities, which GPUs have that are not in the tables.
        emulated = {str(dtype) for dtype in LOW if not multiplies_natively(dtype)}
        padded = _has_matrix_units(jax.local_devices()[0])
        auditor = _Auditor(jaxpr, _here(), emulated, padded=padded, has_wrapped=has_wrapped)
    else:
        auditor = _Auditor(jaxpr, chip, set(), padded=True, has_wrapped=has_wrapped)
    with_paths = jax.tree_util.tree_leaves_with_path((args, kwargs))
    paths = [path for path, leaf in with_paths if is_array(leaf)]
    labels = [f"the argument {jax.tree_util.keystr(path[1:])}" for path in paths]
    follow(jaxpr, labels, list(map(is_scale, paths)), auditor.visit)
    residuals = Counter[str]()
    _residuals(Place(jaxpr), residuals, auditor)
    products = [operation for operation in auditor.operations if operation.flops]
    narrowed = any(FLOAT32.name not in operation.in_dtypes for operation in products)
    if not (narrowed or auditor.has_regions):
        for operation in auditor.precise:
            where = operation.source, operation.path
            what = "no product is narrowed: those that could be ask for a precision of their own"
            auditor.note(OVERRULED, what, operation, where, fix=LEAVE_PRECISION_OUT)
    for kind, what, operations in (
        (OVERRULED, overruled, products if overruled else []),
        *auditor.scaling.of_program(),
        *auditor.logits.of_program(residuals.total()),
    ):
        # A step without an optimizer may be scaled elsewhere.
        if kind != NO_SCALE or has_optimizer((args, kwargs)):
            for operation in operations:
                where = operations[0].source, operations[0].path if kind == NO_SCALE else ""
                auditor.note(kind, what, operation, where)
    return PrecisionReport(
        operations=tuple(auditor.operations),
        findings=tuple(auditor.findings()),
        arguments=_arguments(args, kwargs),
        residual_bytes=dict(residuals),
    )


def _here() -> Target:
    """Returns the device that JAX runs on as a target, as far as the tables have it."""
    device = describe()
    known = chips().get(device.chip or "", {})
    return Target(
        name=device.chip or f"this {device.platform}",
        platform=device.platform,
        topology="",
        device_count=1,
        hbm_bytes=device.hbm_bytes or 0,
        hbm_bytes_per_second=device.hbm_bytes_per_second or 0,
        tflops=device.tflops,
        matrix_unit=device.matrix_unit,
        compiler=known.get("compiler", device.platform),
        blocks=tuple(known.get("blocks", ())),
    )


def _has_matrix_units(device: Any) -> bool:
    """Returns whether a device multiplies tiles: TPUs, NVIDIA's GPUs since Volta, others' GPUs."""
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    volta = not major.isdecimal() or int(major) >= 7
    return device.platform != "cpu" and volta


def _arguments(args: Any, kwargs: Any) -> dict[str, dict[str, int]]:
    """Returns the bytes by dtype of every argument, or of every field of one that has fields."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if is_array(leaf) and isinstance(leaf.dtype, np.dtype):
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # NumPy's float64 is JAX's float32
            name = jax.tree_util.keystr(path[1:3])
            table[name][str(dtype)] += int(np.prod(leaf.shape)) * dtype.itemsize
    return {name: dict(counts) for name, counts in table.items()}


class _Auditor:
    """The collector of a program's operations and findings, while the program is walked."""

    def __init__(
        self,
        program: Any,
        chip: Target,
        emulated: set[str],
        *,
        padded: bool,
        has_wrapped: bool,
    ) -> None:
        self.chip, self.emulated, self.padded = chip, emulated, padded
        has = "bfloat16" not in emulated and chip.multiplies("bfloat16")
        self.low = "bfloat16" if has else "float16"
        self.judge = Judge(self.low, has_wrapped=has_wrapped)
        self.scaling, self.rounding, self.logits = Scaling(), Rounding(program), Logits()
        self.operations: list[Operation] = []
        self.precise: list[Operation] = []  # products under a policy, with a precision of their own
        self.has_regions = False  # whether products are in a region that is float32 on purpose
        # (kind, source, path, what, fix) → cost: bytes for the kinds in `OF_BYTES`, else FLOPs.
        self._costs: Counter[tuple[str, str, str, str, str]] = Counter()
        self._sites: dict[Any, dict[str, None]] = defaultdict(dict)  # of the operations, in order

    def visit(self, seen: Observed) -> None:
        """Records an equation as an operation, and notes its findings."""
        eqn, place = seen.eqn, seen.place
        contracts = eqn.primitive.name in CONTRACTIONS or bool(block_format(eqn))
        full = contracts and FLOAT32 in map(dtype_of, eqn.invars[:2])
        self.judge.has_policy |= is_ours(eqn)
        blame = self.judge.contraction(seen) if full else None
        moved = sum(map(nbytes, (*eqn.invars, *eqn.outvars)))
        operation = Operation(
            op=eqn.primitive.name,
            path=place.path,
            source=place.source,
            in_dtypes=tuple(str(v.aval.dtype) for v in eqn.invars if hasattr(v.aval, "dtype")),
            out_dtypes=tuple(str(v.aval.dtype) for v in eqn.outvars if hasattr(v.aval, "dtype")),
            flops=product_flops(eqn) * place.mean_times,
            bytes=moved * place.mean_times,
            count=place.mean_times,
            backward=place.backward,
            again=place.again,
            inserted=is_ours(eqn),
            kept=blame.kept if blame else "",
            skipped=place.first(skipped_at) if contracts else None,
            emulates=(place.first(emulated_at) or "") if contracts else "",
        )
        self.operations.append(operation)
        if contracts and (kept := place.first(kept_at)):
            self.has_regions |= kept.kind in (Kind.REGION, Kind.LAYERS_OWN)
            if kept.kind == Kind.PRECISION:
                self.precise.append(operation)
        if contracts and (unfused := place.first(unfused_at)):
            self.note("not-fused", f"not fused: {unfused}", operation)
        if blame is not None:
            where = blame.source, blame.path
            self.note(blame.kind, blame.what, operation, where, fix=blame.fix)
        elif contracts and not full:
            self._narrow_contraction(eqn, operation)
        elif eqn.primitive.name == "convert_element_type":
            self._round_trip(eqn, operation, seen.known[0])
        else:
            self._sensitive(seen, operation)
        if found := self.scaling.visit(seen, operation):
            self.note(*found, operation, (operation.source, ""))
        if contracts and (rounding := self.rounding.visit(seen, operation)):
            kind, line, what = rounding
            self.note(kind, what, operation, (line, operation.path))
        if contracts and self.rounding.only_in_a_loss(eqn.outvars[0]):
            self.logits.product(eqn, operation)
        cause = seen.out.cause
        if cause is not None and cause.promoted and FLOAT32.name in operation.out_dtypes:
            size = sum(map(nbytes, eqn.outvars)) * place.mean_times
            where, fix = (cause.source, cause.path), self.judge.promotion(cause.promoted)
            self.note("promotion", cause.what, operation, where, fix=fix, cost=size)

    def note(
        self,
        kind: str,
        what: str,
        at: Operation,
        where: tuple[str, str] | None = None,
        *,
        fix: str = "",
        cost: float | None = None,
    ) -> None:
        """Notes a finding on an operation; blames `where`, by default its own line and path."""
        key = kind, *(where or (at.source, at.path)), what, fix or FIXES[kind]
        of_operation = at.bytes if kind in OF_BYTES else at.flops
        self._costs[key] += int(of_operation if cost is None else cost)
        self._sites[key][at.source] = None

    def _narrow_contraction(self, eqn: jex_core.JaxprEqn, operation: Operation) -> None:
        """Notes dtypes that the chip emulates, sizes that it pads, and a recipe's refusal."""
        if "float64" in operation.dtype.split("*"):
            what = "a policy for float32 leaves float64 as it is"
            self.note("float64-product", what, operation)
        if operation.skipped and not operation.skipped.intended:
            what = f"not in {operation.skipped.bits}: {operation.skipped.why}"
            sizes = (matmul_dims(eqn) or {}).values()
            padded = any(size % MULTIPLE for size in sizes)
            pad = f"pad it, or {FIXES['not-quantized']}" if padded else ""
            self.note("not-quantized", what, operation, fix=pad)
        for dtype in self._widened(eqn, operation):
            what = f"{dtype} is not multiplied natively by {self.chip.name}: it is emulated"
            fix = f"multiply in {self.low}: the policy 'mixed_{self.low}'"
            self.note("emulated", what, operation, fix=fix)
        if not self.padded:
            return
        multiple = self._multiple({dtype_of(v) for v in eqn.invars[:2]})
        odd = {n: d for n, d in (matmul_dims(eqn) or {}).items() if d >= 8 and d % multiple}
        if odd:
            shown = ", ".join(f"{name} = {d}" for name, d in odd.items())
            what = f"{shown}: {self.chip.name} takes sizes in multiples of {multiple}"
            fix = f"pad the dimension to a multiple of {multiple}"
            self.note("misaligned", what, operation, fix=fix)

    def _widened(self, eqn: jex_core.JaxprEqn, operation: Operation) -> list[str]:
        """Returns the formats of a product's operands that the chip widens first."""
        chip = self.chip
        if blocks := block_format(eqn):
            return [] if chip.multiplies_blocks(blocks) else [blocks]
        in_blocks = operation.emulates and chip.tflops
        each = operation.dtype.split("*")
        wide = [dtype for dtype in each if dtype in self.emulated or not chip.multiplies(dtype)]
        return [f"{operation.emulates} in blocks", *wide] if in_blocks else wide

    def _multiple(self, dtypes: set[Any]) -> int:
        """Returns the number that the sizes of a narrow matmul should be multiples of.

        The rows and columns of a TPU's matrix units, 128 before v6e (Google: "TPU architecture");
        16 bytes on tensor cores (NVIDIA: "Matrix multiplication background user's guide").
        """
        bytes_each = max(dtype.itemsize for dtype in dtypes if dtype is not None)
        if bytes_each > 2:
            return 1
        return (self.chip.matrix_unit or 128) if self.chip.platform == "tpu" else 16 // bytes_each

    def _sensitive(self, seen: Observed, operation: Operation) -> None:
        """Notes a sensitive operation on 16-bit values, unless autocast made them so."""
        eqn = seen.eqn
        low = {dtype_of(v) for v in (*eqn.invars, *eqn.outvars)} & LOW
        if not low or seen.out.narrowed or operation.op in _FEW_TERMS:
            return
        if classify(operation.op, eqn.params) == "full_precision":
            what = f"{operation.op} runs in {min(str(d) for d in low)}"
            self.note("sensitive-low", what, operation)

    def _round_trip(self, eqn: jex_core.JaxprEqn, operation: Operation, known: Known) -> None:
        """Notes a cast that only undoes an earlier one, unless autocast inserted one of them."""
        cast = known.cast
        if cast is None or cast.before not in operation.out_dtypes:
            return
        narrow = dtype_of(eqn.invars[0]) in LOW
        # Something else may want the narrow value: storing it can be worth the rounding.
        if cast.ours or operation.inserted or (narrow and not cast.only):
            return
        middle = f"{operation.in_dtypes[0]} at {cast.source}"
        lost = "rounded" if narrow else "unchanged"
        what = f"{cast.before} was cast to {middle} and comes back {lost}"
        self.note("round-trip", what, operation)

    def residual(self, var: Any, source: str, path: str, size: float) -> None:
        """Notes a float32 residual that its uses narrow anyway."""
        what = f"{short_type(var)} is kept in float32 for the backward pass, which narrows it"
        self._costs["residual", source, path, what, FIXES["residual"]] += int(size)

    def findings(self) -> Iterable[Finding]:
        """Returns the findings: the gravest kind first, of each kind the costliest."""
        total_flops = sum(op.flops for op in self.operations) or 1
        total_bytes = sum(op.bytes for op in self.operations) or 1
        found = []
        for key, cost in self._costs.items():
            of_bytes = key[0] in OF_BYTES
            unit, total = ("bytes", total_bytes) if of_bytes else ("FLOPs", total_flops)
            found.append(Finding(*key, cost, unit, cost / total, tuple(self._sites[key])))
        return sorted(found, key=Finding.rank)


def _residuals(around: Place, bytes_by_dtype: Counter[str], auditor: _Auditor) -> None:
    """Adds up the residuals of a jaxpr: its forward equations' results that backward ones read."""
    made: dict[Any, Place] = {}
    used: dict[Any, list[jex_core.JaxprEqn]] = defaultdict(list)
    for eqn in closed(around.jaxpr).jaxpr.eqns:
        place = around.at(eqn)
        if place.backward:
            for var in dict.fromkeys(variables(eqn.invars)):
                if var in made:
                    used[var].append(eqn)
        else:
            made.update(dict.fromkeys(eqn.outvars, place))
            for inner in place.all_jaxprs():
                _residuals(inner, bytes_by_dtype, auditor)
    for var, users in used.items():
        size = nbytes(var) * made[var].mean_times
        dtype = dtype_of(var)
        if not size or dtype is None:
            continue
        bytes_by_dtype[str(dtype)] += int(size)
        auditor.logits.residual(var, made[var].mean_times)
        narrowed = all(
            e.primitive.name == "convert_element_type" and dtype_of(e.outvars[0]) in LOW
            for e in users
        )
        if dtype == FLOAT32 and narrowed and not all(map(is_ours, users)):
            auditor.residual(var, made[var].source, made[var].path, size)
