"""What the plans of a program and of all jaxprs inside it share."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from typing import Any

from jaxmp._autocast.demand import Demands
from jaxmp._autocast.plan import NO_ORIGINS, DType, OriginId, Plan, Value
from jaxmp._autocast.provenance import COMPUTED, joined
from jaxmp._autocast.roots import Roots
from jaxmp._autocast.rules import Rules


class Planning(abc.ABC):
    """What the plans of a program and of all jaxprs inside it share.

    Args:
      tangents: values that are tangents although no operand says so; see `hidden_tangents`.
    """

    def __init__(self, tangents: frozenset[Any] = frozenset()) -> None:
        self.tangents = tangents
        self.roots = Roots()
        self.demands = Demands(self.roots)
        self.recomputes = False  # whether rules of any equation ask for that
        self._numbers = itertools.count(1)

    def fresh(self, *, exponential: bool = False) -> OriginId:
        """A new identity for a low value."""
        return OriginId(next(self._numbers), exponential)

    @abc.abstractmethod
    def plan(
        self,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        *,
        outs: Sequence[DType | None] | None = None,
        summed: Sequence[bool] = (),
        roots: Sequence[str] = (),
    ) -> Plan:
        """The plan of a jaxpr (open or closed).

        Args:
          jaxpr: the jaxpr.
          ins: how each operand is kept.
          wanted: the demand on each result.
          rules: the policy in force.
          outs: the dtype each result must leave in, None being float32 or not ours; if not given,
            each leaves as it is kept.
          summed: which results are sums carried through a loop, to be computed in float32.
          roots: what the operands, of any dtype, are made of; if not given, as their values say.
        """

    def kept(self, dtype: DType | None, operands: Sequence[Value | None]) -> Value:
        """A result kept in `dtype`, made from `operands`."""
        values = [v for v in operands if v is not None]
        origins: frozenset[OriginId] = NO_ORIGINS
        low = [v for v in values if v.dtype is not None]
        if dtype is None:
            origins = origins.union(*(v.origins for v in values))
        else:
            # One low operand: a masked or scaled copy of it, whose statistics are its own. Several:
            # something new (a residual sum).
            if len({v.origins for v in low}) == 1:
                origins = low[0].origins
            origins |= {self.fresh()}
        provenance = COMPUTED if dtype else joined([v.provenance for v in values])
        return Value(dtype, origins, tangent=any(v.tangent for v in values), provenance=provenance)
