"""Runs a program and measures its sites, as written or with float32 instead of 16 bits.

`Probe` adds extra results to the program, arrays by name; `read_out` makes statistics of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.host_memory import is_on_host
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import explicit_sharding
from jaxmp._core.jaxprs.aux_outputs import Extra, Extras, Join, Out, Threaded
from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.jaxprs.higher_order import Inner, rebuild
from jaxmp._core.jaxprs.primitive_table import Flag, flagged
from jaxmp._core.jaxprs.walk import evaluate
from jaxmp._tools.numerics.measurements import (
    FLOAT32,
    JOINS,
    OCTAVES,
    PIECES,
    Measurements,
    Sampled,
    join,
    look,
    measure,
    pieces_per_iteration,
)
from jaxmp._tools.numerics.statistics import Statistics, unpack
from jaxmp._tools.numerics.survey import SurveyedProgram, is_measured, looked_into, site_names

# Dtypes that are replaced by float32.
LOW = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16)))
_POLYMORPHIC = flagged(Flag.POLYMORPHIC)
_DTYPES = ("new_dtype", "preferred_element_type")
# The bytes of values and counts that NumPy computes at once: fewer, and calling it takes longer
# than its computation; more, and they leave the cache.
_BATCH = 2**22


# A site, its value, and the same computed in float32, if known.
_Seen = tuple[str, Any, Any]
_ALONE = Join()


def run_by_name(
    jaxpr: Any,
    arrays: Sequence[Any],
    bind: Callable[[JaxprEqn, list[Any], str], Out],
    prefix: str,
    *,
    wide: bool,
) -> Out:
    """Runs a program with `bind(eqn, operands, name)`; joins the extra results of its equations.

    Names are those of `Place.name`, after `prefix`; `wide`: in float32 instead of 16 bits.
    """
    extras: Extras = {}
    number = itertools.count()

    def as_run(atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        return _widened(atoms, arrays) if wide else list(arrays)

    def bound(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        operands = as_run(eqn.invars, operands)
        results, more = bind(eqn, operands, f"{prefix}{next(number)}")
        extras.update(more)
        return as_run(eqn.outvars, results)

    results = evaluate(jaxpr, arrays, bound)
    return as_run(compat.closed(jaxpr).jaxpr.outvars, results), extras


def run_inside(
    eqn: JaxprEqn, operands: list[Any], name: str, run: Callable[[Any, Sequence[Any], str], Out]
) -> Out:
    """Binds an equation by its name, with `run` for its jaxprs, their arguments and names."""

    def part(jaxpr: Any, prefix: str) -> Threaded:
        return lambda extra_in, *arrays: run(jaxpr, arrays, prefix)  # noqa: ARG005

    inner = looked_into(eqn)
    parts = [part(one.jaxpr, f"{name}.{k}/") for k, one in enumerate(inner)]
    if inner[0].rule:  # its rule is not needed: nothing is differentiated here
        return parts[0]((), *operands)
    return rebuild(eqn, operands, parts)


@dataclass(frozen=True)
class Probe:
    """A way to run and measure a program; `reference` and `wide` are as for `capture`."""

    whole: Callable[[str], bool]  # whether a site is measured fully, or only for non-finite values
    returned: Callable[[str], bool] = lambda _: False  # whether its value is an extra result
    reference: bool = True
    wide: bool = False
    looks: bool = True  # whether anything is measured
    pieces: Callable[[str], int] = lambda _: PIECES  # of the sample of its value, per iteration
    called: bool = False  # whether values are passed on to the jaxpr around, and measured there

    def run(self, jaxpr: Any, arrays: Sequence[Any], prefix: str = "") -> Out:
        """Runs a program; returns its results, and the extra results that `read_out` takes."""
        opened, consts = compat.closed(jaxpr)
        seen: list[_Seen] = []
        if not prefix and self.looks:
            given = (("argument", opened.invars, arrays), ("constant", opened.constvars, consts))
            for kind, atoms, several in given:
                values = _widened(atoms, several) if self.wide else several
                for i, (atom, x) in enumerate(zip(atoms, values, strict=True)):
                    if is_measured(atom):
                        seen.append((f"{kind} {i}", x, None))
        bind = functools.partial(self._equation, seen)
        results, extras = run_by_name(jaxpr, arrays, bind, prefix, wide=self.wide)
        return results, extras | (_passed(seen) if self.called else self._kept(prefix, seen))

    def _kept(self, prefix: str, seen: Sequence[_Seen]) -> Extras:
        """Returns the extra results of a jaxpr: values, and measurements of the other values."""
        extras: Extras = {}
        looks: list[Sampled] = []
        for site, value, reference in seen:
            if not self.returned(site):
                alone = [None if x is None else _here(x)[None] for x in (value, reference)]
                whole, pieces = self.whole(site), self.pieces(site)
                looks.append(look(*alone, whole=whole, pieces=pieces))
                continue
            extras[f"{site} value"] = Extra(value, _ALONE)
            if reference is not None:
                extras[f"{site} reference"] = Extra(reference, _ALONE)
        if extras:  # values do not show whether their branch ran
            extras[f"{prefix}runs"] = Extra(jnp.int32(1), JOINS.counts)
        if looks:
            for name, array in measure(looks)._asdict().items():
                if array is not None:
                    extras[f"{prefix}{name}"] = Extra(array, getattr(JOINS, name))
        return extras

    def _equation(self, seen: list[_Seen], eqn: JaxprEqn, operands: list[Any], name: str) -> Out:
        """Binds an equation, and adds what is to be measured to `seen`."""
        inner = looked_into(eqn)
        if inner:
            called = _is_call(eqn, inner[0])
            probe = replace(self, called=called)
            if inner[0].open_ended:  # it cannot stack the values of its iterations
                few = pieces_per_iteration(math.inf)
                probe = replace(probe, returned=lambda _: False, pieces=lambda _: few)
            out = run_inside(eqn, operands, name, probe.run)
            if called:
                seen += _taken(out[1])
            return out
        results = in_float32(eqn, operands) if self.wide else None
        if results is None:
            results = compat.bind(eqn, as_written(eqn, operands) if self.wide else operands)
        if not self.looks:
            return results, {}
        names = site_names(eqn, name)
        low = self.reference and not self.wide and any(dtype_of(v) in LOW for v in eqn.outvars)
        wider = in_float32(eqn, operands) if low and any(names) else None
        references = wider or [None] * len(names)
        seen += [
            (site, result, reference if dtype_of(var) in LOW and self.whole(site) else None)
            for var, site, result, reference in zip(
                eqn.outvars, names, results, references, strict=True
            )
            if site is not None
        ]
        return results, {}


def _is_call(eqn: JaxprEqn, inner: Inner) -> bool:
    """Returns whether an inner jaxpr runs once, as often as the one around it."""
    return not inner.loops and inner.chance == 1 and eqn.primitive.name != "shard_map"


def _passed(seen: Sequence[_Seen]) -> Extras:
    """Returns the extra results of a jaxpr whose values are measured in the one around it."""
    return {
        f"{site} passed{i}": Extra(x, _ALONE)
        for site, *pair in seen
        for i, x in enumerate(pair)
        if x is not None
    }


def _taken(extras: Extras) -> list[_Seen]:
    """Removes from extra results what `_passed` made of them, and returns that."""
    sites = [name.removesuffix(" passed0") for name in extras if name.endswith(" passed0")]
    values = [extras.pop(f"{site} passed0").value for site in sites]
    references = [extras.pop(f"{site} passed1", None) for site in sites]
    return [
        (site, value, None if reference is None else reference.value)
        for site, value, reference in zip(sites, values, references, strict=True)
    ]


def _here(x: Any) -> Any:
    """Moves an array from the host, and replicates one of explicit sharding on all devices."""
    if is_on_host(x):
        x = jax.device_put(x, jax.memory.Space.Device)
    return x if explicit_sharding(x) is None else jax.sharding.reshard(x, jax.P())


def _widened(atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    return [
        lax.convert_element_type(x, FLOAT32) if dtype_of(atom) in LOW else x
        for atom, x in zip(atoms, arrays, strict=True)
    ]


def in_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Computes an equation in float32 instead of 16 bits; None if its primitive cannot run so."""
    if eqn.primitive.name not in _POLYMORPHIC:
        return None
    wide = _widened(eqn.invars, operands)
    if eqn.primitive.name == "reduce_precision" and dtype_of(eqn.invars[0]) in LOW:
        return wide
    dtypes = {
        key: FLOAT32
        for key in _DTYPES
        if eqn.params.get(key) is not None and np.dtype(eqn.params[key]) in LOW
    }
    return compat.bind(eqn, wide, **dtypes)


def as_written(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Converts operands back to the 16-bit dtypes that an equation was written for."""
    return [
        lax.convert_element_type(x, dtype) if (dtype := dtype_of(atom)) in LOW else x
        for atom, x in zip(eqn.invars, operands, strict=True)
    ]


def read_out(
    program: SurveyedProgram, extras: Mapping[str, Extra], whole: Callable[[str], bool]
) -> dict[str, Statistics]:
    """Returns the statistics of each site, in the order in which they ran.

    Args:
      program: the program that ran.
      extras: its extra results: values, ``{site} value``, the same computed in float32,
        ``{site} reference``, and how often their jaxpr ran, ``{jaxpr}runs``; for all other sites of
        a jaxpr, one array for each of the names of `Measurements`, ``{jaxpr}top`` and so on.
      whole: returns whether a site was measured fully.
    """
    found = dict(_of_values(extras)) | dict(_of_others(program, extras, whole))
    return {name: unpack(site.size, found[name]) for name, site in program.sites.items()}


def _of_values(extras: Mapping[str, Extra]) -> Iterator[tuple[str, Measurements]]:
    """Yields the measurements of the values that were returned."""
    names = [name.removesuffix(" value") for name in extras if name.endswith(" value")]
    values = [extras[f"{name} value"] for name in names]
    ends = dict(zip(names, itertools.accumulate(map(_bytes_of, values)), strict=True))
    for _, several in itertools.groupby(names, lambda name: ends[name] // _BATCH):
        batch = list(several)
        looks = [_look(extras[f"{name} value"], extras.get(f"{name} reference")) for name in batch]
        rows = np.cumsum([len(one.sample) for one in looks])[:-1]
        by_site = zip(*(np.split(array, rows) for array in measure(looks)), strict=True)
        for name, arrays in zip(batch, by_site, strict=True):
            runs = extras[f"{_jaxpr_of(name, extras, 'runs')}runs"]
            yield name, _by_iteration(_where_it_ran(arrays, np.asarray(runs.value)), runs.axes)


def _bytes_of(value: Extra) -> int:
    """Returns the bytes of the values of all iterations, and of their octaves."""
    array = np.asarray(value.value)
    return array.nbytes + 4 * OCTAVES * int(np.prod(array.shape[: len(value.axes)]))


def _look(value: Extra, reference: Extra | None) -> Sampled:
    """Samples the values of all iterations."""
    several = [np.asarray(extra.value) for extra in (value, reference) if extra is not None]
    leading = len(value.axes)
    n = math.prod(several[0].shape[:leading])
    rows = (array.reshape(n, *array.shape[leading:]) for array in several)
    return look(*rows, pieces=pieces_per_iteration(max(n, 1)))


def _where_it_ran(arrays: Sequence[Any], runs: Any) -> list[Any]:
    """Returns measurements by iteration; where a branch was not taken, neutral ones."""
    several = []
    for array, how in zip(arrays, JOINS, strict=True):
        array = array.reshape((*runs.shape, *array.shape[1:]))
        ran = runs.reshape(runs.shape + (1,) * (array.ndim - runs.ndim)) > 0
        several.append(np.where(ran, array, np.array(how.neutral).astype(array.dtype)))
    return several


def _of_others(
    program: SurveyedProgram, extras: Mapping[str, Extra], whole: Callable[[str], bool]
) -> Iterator[tuple[str, Measurements]]:
    """Yields the measurements that the program made itself, in one array for a jaxpr's sites."""
    looked, measured = Counter[str](), Counter[str]()
    for name in program.sites:
        if f"{name} value" in extras:
            continue
        jaxpr = _jaxpr_of(name, extras, "top")
        top = extras[f"{jaxpr}top"]
        arrays = [np.asarray(top.value)[..., looked[jaxpr]]]
        looked[jaxpr] += 1
        if whole(name):
            rest = [extras[f"{jaxpr}{field}"].value for field in Measurements._fields[1:]]
            arrays += [np.asarray(value)[..., measured[jaxpr], :] for value in rest]
            measured[jaxpr] += 1
        yield name, _by_iteration(arrays, top.axes)


def _by_iteration(arrays: Sequence[Any], axes: Sequence[str]) -> Measurements:
    """Joins measurements over devices, and puts iterations into the order in which they ran."""
    order = tuple(slice(None, None, -1 if axis == "reversed scan" else 1) for axis in axes)
    ran = Measurements(*(array[order] for array in arrays))
    devices = tuple(i for i, axis in enumerate(axes) if axis == "devices")
    return join(ran, devices) if devices else ran


def _jaxpr_of(site: str, extras: Mapping[str, Extra], field: str) -> str:
    """Returns the name of the jaxpr that a site was measured in, by one of its extra results."""
    *path, _ = site.split("/")
    around = ("".join(f"{part}/" for part in path[:depth]) for depth in range(len(path), -1, -1))
    return next(jaxpr for jaxpr in around if f"{jaxpr}{field}" in extras)
