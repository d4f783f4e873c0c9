"""Runs a program and measures its sites, as it is or with float32 in the place of 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.aux_outputs import Extras, Out, Threaded
from jaxmp._jaxprs.compat import dtype_of
from jaxmp._jaxprs.higher_order import rebuild
from jaxmp._jaxprs.primitive_table import Flag, flagged
from jaxmp._numerics.statistics import FLOAT32, Look, look, measure
from jaxmp._numerics.survey import is_measured, looked_into, site_names

# Dtypes that are replaced by float32.
LOW = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16)))
_POLYMORPHIC = flagged(Flag.POLYMORPHIC)
_DTYPES = ("new_dtype", "preferred_element_type")


@dataclasses.dataclass(frozen=True)
class Probe:
    """How a program is run; `twins` and `wide` are those of `capture`."""

    whole: Callable[[str], bool]  # whether all is measured at a site; else what is not finite
    twins: bool = True
    wide: bool = False
    looks: bool = True  # whether anything is measured

    def run(self, jaxpr: Any, arrays: Sequence[Any], prefix: str = "") -> Out:
        """The results of a program, and what was measured."""
        opened, consts = compat.closed(jaxpr)
        env: dict[Any, Any] = {}
        extras: Extras = {}
        looks: list[Look] = []

        def read(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return env[atom]
            return self._widened(atom.val) if dtype_of(atom) in LOW else atom.val

        def write(var: Any, array: Any) -> None:
            env[var] = self._widened(array) if dtype_of(var) in LOW else array

        atoms = (*opened.constvars, *opened.invars)
        for var, array in zip(atoms, (*consts, *arrays), strict=True):
            write(var, array)
        if not prefix and self.looks:
            for kind, vs in (("argument", opened.invars), ("constant", opened.constvars)):
                for i, var in enumerate(vs):
                    if is_measured(var):
                        looks.append(look(env[var], whole=self.whole(f"{kind} {i}")))
        for i, eqn in enumerate(opened.eqns):
            with compat.source_of(eqn):
                operands = [read(atom) for atom in eqn.invars]
                results, more, seen = self._equation(eqn, operands, f"{prefix}{i}")
            extras |= more
            looks += seen
            for var, result in zip(eqn.outvars, results, strict=True):
                write(var, result)
        extras |= measure(f"{prefix}", looks)
        return [read(atom) for atom in opened.outvars], extras

    def _widened(self, array: Any) -> Any:
        return lax.convert_element_type(array, FLOAT32) if self.wide else array

    def _part(self, jaxpr: Any, prefix: str) -> Threaded:
        """A jaxpr inside an equation, measured in its place."""
        return lambda extra_in, *arrays: self.run(jaxpr, arrays, prefix)  # noqa: ARG005

    def _equation(
        self, eqn: JaxprEqn, operands: list[Any], name: str
    ) -> tuple[list[Any], Extras, list[Look]]:
        inner = looked_into(eqn)
        if inner:
            parts = [self._part(one.jaxpr, f"{name}.{k}/") for k, one in enumerate(inner)]
            if inner[0].rule:  # it is not differentiated here
                return (*parts[0]((), *operands), [])
            return (*rebuild(eqn, operands, parts), [])
        results = _in_float32(eqn, operands) if self.wide else None
        if results is None:
            results = compat.bind(eqn, _as_written(eqn, operands) if self.wide else operands)
        if not self.looks:
            return results, {}, []
        names = site_names(eqn, name)
        low = self.twins and not self.wide and any(dtype_of(v) in LOW for v in eqn.outvars)
        twins = (_in_float32(eqn, operands) if low and any(names) else None) or [None] * len(names)
        looks = [
            look(result, twin if dtype_of(var) in LOW else None, whole=self.whole(site))
            for var, site, result, twin in zip(eqn.outvars, names, results, twins, strict=True)
            if site is not None
        ]
        return results, {}, looks


def _in_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """The results of an op computed in float32 instead of 16 bits; None where nobody knows how."""
    if eqn.primitive.name not in _POLYMORPHIC:
        return None
    wide = [
        lax.convert_element_type(x, FLOAT32) if dtype_of(atom) in LOW else x
        for atom, x in zip(eqn.invars, operands, strict=True)
    ]
    if eqn.primitive.name == "reduce_precision" and dtype_of(eqn.invars[0]) in LOW:
        return wide
    dtypes = {
        key: FLOAT32
        for key in _DTYPES
        if eqn.params.get(key) is not None and np.dtype(eqn.params[key]) in LOW
    }
    return compat.bind(eqn, wide, **dtypes)


def _as_written(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Operands in the dtypes in which an op was written to take them."""
    return [
        lax.convert_element_type(x, dtype) if (dtype := dtype_of(atom)) in LOW else x
        for atom, x in zip(eqn.invars, operands, strict=True)
    ]
