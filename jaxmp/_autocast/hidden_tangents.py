"""Which float32 values of a derivative rule are tangents that were in another dtype for a while.

A plan knows of every float32 value whether it is a tangent: narrowing one must stay linear. Of
values in other dtypes (complex64, an author's bfloat16) a plan knows nothing, so what becomes
float32 again is found here, before planning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast import jaxpr_compat
from jaxmp._autocast.demand import ours
from jaxmp._autocast.jaxpr_compat import closed


def hidden_tangents(jaxpr: Any, tangents: Sequence[bool]) -> frozenset[Any]:
    """The float32 results, at any depth, of equations that read a tangent in another dtype.

    Args:
      jaxpr: that of a derivative rule.
      tangents: which of its operands are tangents.
    """
    walk = _Walk()
    walk.run(jaxpr, tangents)
    return frozenset(walk.found)


class _Walk:
    def __init__(self) -> None:
        self.found: set[Any] = set()

    def run(self, jaxpr: Any, tangents: Sequence[bool]) -> list[bool]:
        """Which results of a jaxpr are tangents, given which of its operands are."""
        opened = closed(jaxpr).jaxpr
        linear = {var for var, given in zip(opened.invars, tangents, strict=True) if given}

        def reads(atom: Any) -> bool:
            return not isinstance(atom, Literal) and atom in linear

        for eqn in opened.eqns:
            read = [reads(atom) for atom in eqn.invars]
            if not any(read):
                continue
            outs = self._results(eqn, read)
            linear.update(var for var, out in zip(eqn.outvars, outs, strict=True) if out)
            if any(is_read and not ours(v) for is_read, v in zip(read, eqn.invars, strict=True)):
                self.found.update(var for var in eqn.outvars if var in linear and ours(var))
        return [reads(atom) for atom in opened.outvars]

    def _results(self, eqn: JaxprEqn, read: list[bool]) -> list[bool]:
        """Which results of an equation are tangents; more than are, where its kind is unknown."""
        outs = [False] * len(eqn.outvars)
        inner = list(jaxpr_compat.inner_jaxprs(eqn))
        if not inner:
            return [True] * len(outs)
        while True:
            before = list(read)
            for jaxpr in inner:
                found = self.run(jaxpr, _last(read, len(closed(jaxpr).jaxpr.invars)))
                if len(found) != len(outs):  # the condition of a while loop
                    continue
                outs = [a or b for a, b in zip(outs, found, strict=True)]
            if eqn.primitive.name == "scan":
                n_consts, n_carry = jaxpr_compat.scan_split(eqn)
            elif eqn.primitive.name == "while":
                n_consts, n_carry = len(read) - len(outs), len(outs)
            else:
                return outs
            # What an iteration makes of the carry, the next one finds.
            for i in range(n_carry):
                read[n_consts + i] |= outs[i]
            if read == before:
                return outs


def _last(read: list[bool], count: int) -> list[bool]:
    """The last `count`: operands before those of an inner jaxpr are an index or constants."""
    return [any(read)] * (count - len(read)) + read[-count:] if count else []
