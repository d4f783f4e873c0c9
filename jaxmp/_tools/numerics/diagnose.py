"""`diagnose`: where values leave their format under a policy, and which operations made NaN."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._core.plan.regions import check_callable
from jaxmp._tools.arguments import check_progress
from jaxmp._tools.numerics.capture import Capture, Readings, prepare
from jaxmp._tools.numerics.measurements import BIAS, OCTAVES
from jaxmp._tools.numerics.origins import Origin
from jaxmp._tools.numerics.statistics import Measured, Record, Statistics
from jaxmp._tools.numerics.survey import Site
from jaxmp._tools.progress import told
from jaxmp._tools.screen import Printed, Section, one_a_place
from jaxmp.policy import PolicyLike, single_policy

# If more than this share of values, or of a norm, is lost, it is worth a line.
_MUCH = 0.01
_MAGNITUDES = 2.0 ** (np.arange(OCTAVES) - BIAS + 0.5)  # the middle of each octave
# The default bounds of the scale in `dynamic_loss_scale`.
_BOUNDS = 1.0, 2.0**24


@dataclasses.dataclass(frozen=True)
class Fault(Printed):
    """An operation that made a non-finite value from finite ones.

    Attributes:
      site: the operation, or the argument that was not finite.
      iteration: of the loops around it, outermost first, counted from 0.
      kind: "overflow" (beyond the range of its dtype), "nan", "infinity" or "argument".
      everywhere: whether the same operation does so in float32, too: then no loss scale and no
        wider format of this operation helps.
      reaches: whether results are not finite because of it.
      why: the reason, in words.
      of: the operation whose result it converts, if it is a conversion.
    """

    site: Site
    iteration: tuple[int, ...]
    kind: str
    everywhere: bool
    reaches: bool
    why: str
    of: Site | None = None

    def __str__(self) -> str:
        """Describes the fault in one line."""
        direction = "backward" if self.site.backward else "forward"
        when = f", iteration {', '.join(map(str, self.iteration))}" if self.iteration else ""
        place = self.site.where or "no module"
        if self.site.op == "argument":
            return f"argument {self.site.path}: {self.why}"
        of = ""
        if self.of is not None:
            line = f" at {self.of.line}" if self.of.line not in ("", self.site.line) else ""
            of = f" of {self.of.op} ({self.of.dtype}{line})"
        return f"{self.site.op}{of} ({self.site.dtype}, {direction}{when}) in {place}: {self.why}"


@dataclasses.dataclass(frozen=True, repr=False)
class NumericsReport(Readings):
    """The report of `diagnose`. Print it.

    Attributes:
      run: the measured run under the policy.
      wide: the record of the same operations in float32.
    """

    run: Capture
    wide: Capture

    @property
    def policy(self) -> str:
        """The policy that it ran under."""
        return self.run.policy

    @functools.cached_property
    def faults(self) -> tuple[Fault, ...]:
        """The operations that made results non-finite, in the order in which they ran."""
        return tuple(self._fault(origin, reaches=True) for origin in self.run.origins())

    @functools.cached_property
    def contained(self) -> tuple[Fault, ...]:
        """The operations that made non-finite values on which no result depends."""
        known = {(o.site.name, o.at) for o in self.run.origins()}
        return tuple(
            self._fault(origin, reaches=False)
            for origin in self.run.all_origins()
            if (origin.site.name, origin.at) not in known
        )

    @property
    def first(self) -> Fault | None:
        """The first of the faults; None if there is none."""
        return self.faults[0] if self.faults else None

    @functools.cached_property
    def predicted(self) -> tuple[Site, ...]:
        """The operations whose results in float32 are beyond the dtype that the policy gives them.

        From the float32 run alone, and without operations that read such a result.
        """
        beyond = {
            m.site.name: m.site
            for m in self._wide()
            if _is_beyond(m.site, float(np.max(m.statistics.largest, initial=0)))
        }
        return tuple(site for site in beyond.values() if beyond.keys().isdisjoint(site.reads))

    @functools.cached_property
    def largest_loss_scale(self) -> float:
        """The largest power of two that keeps every gradient finite; infinite if all do."""
        room = [
            float(jnp.finfo(m.site.dtype).max) / float(np.max(m.statistics.largest))
            for m in self._gradients()
            if np.max(m.statistics.largest, initial=0) > 0
        ]
        return 2.0 ** math.floor(math.log2(min(room) * self.run.loss_scale)) if room else math.inf

    @functools.cached_property
    def smallest_loss_scale(self) -> float:
        """The smallest power of two, from 1 on, at which no gradient loses 1 % of its norm."""
        scale, most = _BOUNDS
        while scale < most and any(self._lost(m, scale)[1] > _MUCH for m in self._gradients()):
            scale *= 2
        return scale

    @functools.cached_property
    def init_scale(self) -> float | None:
        """A loss scale for `dynamic_loss_scale` to begin with; None if gradients overflow at 1.

        A sixteenth of the largest, since other batches have larger gradients, or more if gradients
        need it; within the default bounds of the scaler.
        """
        if self.largest_loss_scale < _BOUNDS[0]:
            return None
        needed = min(self.smallest_loss_scale, self.largest_loss_scale)
        return float(np.clip(max(self.largest_loss_scale / 16, needed), *_BOUNDS))

    @functools.cached_property
    def underflows(self) -> tuple[tuple[Site, float], ...]:
        """The operations that made 0 of more than 1 % of the values that are not 0 in float32.

        With the share in this one step, for its operands as they were; the largest first. Only
        values below the range of the dtype count: 1 - tanh(x)**2 is 0 where tanh(x) rounds to 1,
        which is rounding.
        """
        found = []
        for m in self._whole():
            s = m.statistics.joined()
            flushed = float(s.flushed / max(s.compared - (s.zeros - s.flushed), 1))
            found.append((m.site, min(flushed, self._below_range(m.site))))
        return _most_first(pair for pair in found if pair[1] > _MUCH)

    @functools.cached_property
    def errors(self) -> tuple[tuple[Site, float], ...]:
        """The operations with a rounding error of more than four units in the last place.

        With the relative error in this one step; the largest first.
        """
        found = ((m.site, float(m.statistics.joined().error)) for m in self._whole())
        return _most_first(
            (site, error)
            for site, error in found
            if np.isfinite(error) and error > 4 * float(jnp.finfo(site.dtype).eps)
        )

    def _sections(self, *, verbose: bool) -> Iterator[Section]:  # noqa: ARG002
        faults, contained = (
            one_a_place((str(f).removesuffix(f": {f.why}"), str(f)) for f in several)
            for several in (self.faults, self.contained)
        )
        beyond = one_a_place((str(site), str(site)) for site in self.predicted)
        lost, errors = (
            one_a_place((str(site), f"{said.format(value)}: {site}") for site, value in found)
            for said, found in (
                ("{:.1%} became 0", self.underflows),
                ("relative error {:.2g}", self.errors),
            )
        )
        size = f"{self.run.bytes / 2**20:.1f} MiB of measurements"
        yield {
            "not finite": faults or "nothing: every result is finite",
            "contained": contained,
            "would leave": beyond,
            "underflow": lost,
            "rounding": errors,
            "loss scale": f"{self.run.loss_scale:g}; {self._room()}" if self._gradients() else (),
            "policy": self.policy,
            "measured": f"{len(self.run.sites)} sites, {size}; all of the above is in",
            "": ".faults, .contained, .predicted, .underflows and .errors",
        }

    def runs(self) -> tuple[Record, ...]:
        """Returns both runs."""
        return self.run, self.wide

    def _room(self) -> str:
        """Describes the loss scale to begin with, and the underflow there."""
        forward = next((f for f in self.faults if not f.site.backward), None)
        if forward is not None:
            return f"none helps the {forward.site.op} above, in the forward pass"
        gradients = self._gradients()
        if all(m.site.dtype == "bfloat16" for m in gradients) and self.smallest_loss_scale <= 1:
            return "none is needed"
        if self.init_scale is None:
            largest = max(gradients, key=lambda m: float(np.max(m.statistics.largest)))
            return f"none: gradients overflow at 1 already: {largest.site}"
        lost = [self._lost(m, self.init_scale) for m in gradients]
        sizes = [m.site.size for m in gradients]
        zeros = np.average([share for share, _ in lost], weights=sizes) if any(sizes) else 0.0
        cost, site = max(
            ((cost, m.site) for (_, cost), m in zip(lost, gradients, strict=True)),
            key=lambda pair: pair[0],
        )
        said = f"begin with init_scale=2**{np.log2(self.init_scale):g}"
        if np.isfinite(self.largest_loss_scale):
            said += f", finite up to 2**{np.log2(self.largest_loss_scale):g}"
        said += f": {zeros:.2%} of gradients become 0 there, and "
        if cost <= _MUCH:
            return f"{said}none loses more than {cost:.1g} of its norm"
        return f"{said}{cost:.0%} of the norm of {site}: keep it in float32, or in bfloat16"

    def _lost(self, m: Measured, scale: float) -> tuple[float, float]:
        """Returns the shares of a gradient's values and of its norm that underflow at a loss scale.

        By octaves, in float32. Values below the normal range are rounded by up to half a step.
        """
        counts = np.asarray(m.statistics.joined().octaves, np.float64)
        info = jnp.finfo(m.site.dtype)
        half = float(info.smallest_subnormal) / 2
        magnitudes = _MAGNITUDES * (scale / self.run.loss_scale)
        lost = np.where(magnitudes < float(info.tiny), np.minimum(magnitudes, half), 0)
        norm = np.sum(counts * magnitudes**2)
        if not norm:
            return 0.0, 0.0
        zeros = np.sum(counts[magnitudes < half]) / np.sum(counts)
        return float(zeros), float(np.sqrt(np.sum(counts * lost**2) / norm))

    def _below_range(self, site: Site) -> float:
        """Returns the share of a site's values in float32 that its dtype rounds to 0."""
        statistics = self.wide.sites[site.name].statistics
        if not statistics.is_whole or not jnp.issubdtype(site.dtype, jnp.floating):
            return 1.0
        counts = np.asarray(statistics.joined().octaves, np.float64)
        half = float(jnp.finfo(site.dtype).smallest_subnormal) / 2
        return float(np.sum(counts[half > _MAGNITUDES]) / max(np.sum(counts), 1))

    def _gradients(self) -> list[Measured]:
        """Returns the float32 measurements of gradients that the policy computes in 16 bits."""
        gradients = [
            m
            for m in self._wide()
            if m.site.backward and m.site.dtype in ("float16", "bfloat16")
            and m.statistics.is_whole
        ]  # fmt: skip
        # If the program itself differentiates, multiples of the loss are unknown: take all.
        return [m for m in gradients if m.site.scaled] or gradients

    def _wide(self) -> list[Measured]:
        """Returns the sites in the dtypes of the policy, with their statistics in float32."""
        return [
            Measured(site, self.wide.sites[name].statistics)
            for name, site in self.run.program.sites.items()
        ]

    def _whole(self) -> list[Measured]:
        return [m for m in self.run.sites.values() if m.statistics.is_whole]

    def _fault(self, origin: Origin, *, reaches: bool) -> Fault:
        site, at = origin.site, origin.at
        wide = self.wide.sites[site.name].statistics
        everywhere = bool(wide.is_nan[at] or wide.is_infinite[at])
        kind, why = self._kind(origin, wide, at, everywhere=everywhere)
        of = None
        if site.op == "convert_element_type":
            of = next((self.run.program.sites.get(str(ref)) for ref in site.reads), None)
        return Fault(site, at, kind, everywhere, reaches, why, of)

    def _kind(
        self, origin: Origin, wide: Statistics, at: tuple[int, ...], *, everywhere: bool
    ) -> tuple[str, str]:
        """Returns the kind of a fault, and its reason in words."""
        site = origin.site
        if site.op == "argument":
            return "argument", "the input is not finite"
        if origin.of_infinities:
            return "nan", "NaN from infinities written in the program: a fully masked row?"
        if not everywhere and not origin.nan:
            largest = float(wide.largest[at])
            if not _is_beyond(site, largest):
                return "overflow", "infinite, but finite in float32: operands were rounded before"
            limit = float(jnp.finfo(site.dtype).max)
            how_often = _share_of_overflows(self.run.sites[site.name].statistics, at)
            return "overflow", f"overflow: {largest:.4g} in float32, beyond {limit:g}{how_often}"
        what = "NaN" if origin.nan else "an infinity"
        also = "in float32 as well: no loss scale helps" if everywhere else "not in float32"
        return "nan" if origin.nan else "infinity", f"made {what}, {also}"


def diagnose(
    fn: Callable[..., Any],
    policy: PolicyLike | None = None,
    argnums: int | Sequence[int] = 0,
    *,
    grad: bool | None = None,
    loss_scale: float = 1.0,
    sites: str = "**",
    progress: Callable[[str], Any] | None = None,
) -> Callable[..., NumericsReport]:
    """Finds where a program's numbers leave their format under a policy.

    The program runs twice, measured: under the policy, and with the same operations in float32. A
    loss is differentiated. The report tells

    * the first operation that made a result non-finite, forward or backward, with its module, line
      and iteration, and whether float32 does the same;
    * the operations that would overflow, from the float32 run alone;
    * the share of values that became 0, and the rounding error, operation by operation;
    * the loss scale to begin with, and the underflow at it.

    Args:
      fn: as for `jaxmp.numerics.capture`, as are `argnums`, `grad`, `loss_scale`, `sites` and
        `progress`.
      policy: as for `autocast`; None: the program as written, with its wrapped modules.
      argnums: which argument is differentiated.
      grad: whether to differentiate.
      loss_scale: the factor of the loss.
      sites: a pattern of module paths.
      progress: called with a line of text before each slow step, which is compiling. By default,
        lines are printed if stderr is a terminal, from the first second on.

    Returns:
      A function of the arguments of `fn` that returns the report.

    Raises:
      ValueError: if the policy is unknown, or `sites` matches nothing.
      TypeError: if `fn` is not callable.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> w, x = jnp.full((16, 8), 300.0), 100 * jnp.ones((4, 16))
      >>> report = jaxmp.diagnose(loss, "mixed_float16")(w, x)
      >>> report.first.site.op, report.first.kind, report.first.everywhere
      ('dot_general', 'overflow', False)
      >>> [site.op for site in report.predicted if not site.backward]
      ['dot_general']
    """
    check_progress("diagnose", progress)
    if policy is not None:
        single_policy("diagnose", policy)  # raises here, not at the first call
    check_callable("diagnose", fn)

    @functools.wraps(fn)
    def diagnosed(*args: Any, **kwargs: Any) -> NumericsReport:
        with told(progress) as tell:
            tell(f"diagnose: traces the program{'' if policy is None else f' under {policy}'}")
            prepared = prepare(
                fn, policy, args, kwargs, name="diagnose",
                argnums=argnums, grad=grad, loss_scale=loss_scale, sites=sites,
            )  # fmt: skip
            run = prepared.run(tell)
            tell("diagnose: the same operations in float32")
            return NumericsReport(run, dataclasses.replace(prepared, wide=True).run())

    return diagnosed


def _is_beyond(site: Site, largest: float) -> bool:
    """Returns whether a magnitude becomes infinite in the dtype of a site."""
    if site.dtype not in ("float16", "bfloat16"):
        return False
    with np.errstate(over="ignore"):
        return bool(np.isinf(np.float64(largest).astype(jnp.dtype(site.dtype)).astype(np.float64)))


def _share_of_overflows(of: Statistics, at: tuple[int, ...]) -> str:
    """Describes the share of values that overflowed; empty if none of the sample did."""
    if not of.is_whole or not of.overflowed[at]:
        return ""
    return f", in {of.overflowed[at] / of.compared[at]:.2g} of its values"


def _most_first(
    pairs: Iterable[tuple[Site, float]],
) -> tuple[tuple[Site, float], ...]:
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
