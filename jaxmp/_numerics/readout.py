"""Reads the extra results of a run that `probe` made: what was measured of each site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmp._jaxprs.aux_outputs import Extra
from jaxmp._numerics.statistics import (
    JOINS,
    Look,
    Measurements,
    Statistics,
    join,
    look,
    measure,
    unpack,
)
from jaxmp._numerics.survey import SurveyedProgram

# Values are measured so many at once: calling NumPy for one takes longer than what it computes.
_BATCH = 64


def read_out(
    program: SurveyedProgram, extras: Mapping[str, Extra], whole: Callable[[str], bool]
) -> dict[str, Statistics]:
    """Returns the statistics of each site, in the order in which they ran.

    Args:
      program: the program that ran.
      extras: its extra results: values, ``{site} value``, what they would be in float32,
        ``{site} twin``, and how often their jaxpr ran, ``{jaxpr}runs``; of all other sites of a
        jaxpr one array for each of the names of `Measurements`, ``{jaxpr}top`` and so on.
      whole: whether all was measured at a site.
    """
    found = dict(_of_values(extras)) | dict(_of_others(program, extras, whole))
    return {name: unpack(site.size, found[name]) for name, site in program.sites.items()}


def _of_values(extras: Mapping[str, Extra]) -> Iterator[tuple[str, Measurements]]:
    """Measures the values that were returned."""
    names = [name.removesuffix(" value") for name in extras if name.endswith(" value")]
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        looks = [_look(extras[f"{name} value"], extras.get(f"{name} twin")) for name in batch]
        ends = np.cumsum([len(one.top) for one in looks])[:-1]
        by_site = zip(*(np.split(array, ends) for array in measure(looks)), strict=True)
        for name, arrays in zip(batch, by_site, strict=True):
            runs = extras[f"{_jaxpr_of(name)}runs"]
            yield name, _by_iteration(_where_it_ran(arrays, np.asarray(runs.value)), runs.axes)


def _look(value: Extra, twin: Extra | None) -> Look:
    """Looks at the values of all iterations."""
    leading = len(value.axes)
    several = []
    for extra in (value, twin):
        array = None if extra is None else np.asarray(extra.value)
        if array is not None:
            n = int(np.prod(array.shape[:leading], dtype=np.int64))
            array = array.reshape(n, *array.shape[leading:])
        several.append(array)
    return look(*several)


def _where_it_ran(arrays: Sequence[Any], runs: Any) -> list[Any]:
    """What was measured, by iteration; where a branch was not taken, as of no value at all."""
    several = []
    for array, how in zip(arrays, JOINS, strict=True):
        array = array.reshape((*runs.shape, *array.shape[1:]))
        ran = runs.reshape(runs.shape + (1,) * (array.ndim - runs.ndim)) > 0
        several.append(np.where(ran, array, np.array(how.neutral).astype(array.dtype)))
    return several


def _of_others(
    program: SurveyedProgram, extras: Mapping[str, Extra], whole: Callable[[str], bool]
) -> Iterator[tuple[str, Measurements]]:
    """What the program measured itself: of a jaxpr's sites together, in their order."""
    looked, measured = Counter[str](), Counter[str]()
    for name in program.sites:
        if f"{name} value" in extras:
            continue
        jaxpr = _jaxpr_of(name)
        top = extras[f"{jaxpr}top"]
        arrays = [np.asarray(top.value)[..., looked[jaxpr]]]
        looked[jaxpr] += 1
        if whole(name):
            rest = [extras[f"{jaxpr}{field}"].value for field in Measurements._fields[1:]]
            arrays += [np.asarray(value)[..., measured[jaxpr], :] for value in rest]
            measured[jaxpr] += 1
        yield name, _by_iteration(arrays, top.axes)


def _by_iteration(arrays: Sequence[Any], axes: Sequence[str]) -> Measurements:
    """What was measured on all devices, by iteration in the order in which they ran."""
    order = tuple(slice(None, None, -1 if axis == "reversed scan" else 1) for axis in axes)
    ran = Measurements(*(array[order] for array in arrays))
    devices = tuple(i for i, axis in enumerate(axes) if axis == "devices")
    return join(ran, devices) if devices else ran


def _jaxpr_of(site: str) -> str:
    """The name of the jaxpr that a site is in."""
    return site[: site.rfind("/") + 1]
