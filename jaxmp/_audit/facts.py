"""The facts about a value that an audit follows, each an analysis of its own.

A 16-bit value becomes float32 in one of two ways: the author upcasts it, or it meets a float32
value (an array, a NumPy constant, a parameter) and JAX promotes it. Either is a `Cause`, with the
line where it happened. Values computed from it have the same cause, until they are narrowed again.
A value that was float32 from the start has none.

A value that a conversion made, and that was only moved since, has that conversion as its `Cast`; a
16-bit value records whether autocast narrowed it or a value that it was computed from.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from jaxmp._audit.loss_scale_power import Degree, alike, degree_of
from jaxmp._audit.place import is_ours
from jaxmp._autocast.primitives import CROSSING, IN_PARTS, RANDOM, classify
from jaxmp._jaxprs.attributes import has_effects
from jaxmp._jaxprs.compat import dtype_of
from jaxmp._jaxprs.place import Place
from jaxmp._jaxprs.source import is_promotion

FLOAT32 = np.dtype("float32")
LOW = frozenset(np.dtype(name) for name in ("float16", "bfloat16"))
FLOATS = LOW | {FLOAT32, np.dtype("float64")}


class ValueKind(enum.Enum):
    """Where a value comes from, as far as the fix for a promotion depends on it."""

    ARGUMENT = enum.auto()
    ARRAY = enum.auto()  # a constant that is not a scalar
    OTHER = enum.auto()


class ValueName(NamedTuple):
    """The name of a value in messages, and its kind."""

    text: str
    kind: ValueKind = ValueKind.OTHER

    def __str__(self) -> str:
        return self.text


class Cause(NamedTuple):
    """The cause of a value's float32 dtype.

    Attributes:
      source: the line, ``file.py:line``.
      path: the module path.
      what: the cause in words.
      promoted: the float32 operand for which JAX promoted a 16-bit one; None if it was upcast.
      by_policy: whether autocast upcast it, rather than the author.
    """

    source: str
    path: str
    what: str
    promoted: ValueName | None = None
    by_policy: bool = False


class Cast(NamedTuple):
    """The conversion that made a value.

    Attributes:
      before: the dtype that it was converted from.
      source: the line, ``file.py:line``.
      ours: whether autocast added it.
      only: whether the converted value has no other use.
    """

    before: str
    source: str
    ours: bool
    only: bool


class Promoted(NamedTuple):
    """A 16-bit value that JAX promoted, before it meets the operand that it was promoted for.

    Attributes:
      dtype: its dtype before.
      fresh: whether it was only moved since.
    """

    dtype: str
    fresh: bool = True


class Known(NamedTuple):
    """The facts about a value.

    Attributes:
      why: why it is float32.
      cast: the conversion that made it, if it was only moved since.
      narrowed: whether it is a 16-bit value that autocast narrowed, or computed from one.
      fixed: whether it is computed in the program from literals alone, or a small constant.
      scaled: whether it is computed from the scale of a loss.
      degree: the power of that scale in it: see `loss_scale_power.py`.
      origin: the variable that it is, or is moved or cast from.
      name: its name in messages.
    """

    why: Cause | Promoted | None = None
    cast: Cast | None = None
    narrowed: bool = False
    fixed: bool = False
    scaled: bool = False
    degree: Degree = None
    origin: Any = None
    name: ValueName = ValueName("a value")

    @property
    def cause(self) -> Cause | None:
        """The cause of its float32 dtype, if it is known."""
        return self.why if isinstance(self.why, Cause) else None


# Each fact of an equation's results, given what is known of its operands.


def _why(at: Place, known: list[Known]) -> Cause | Promoted | None:
    eqn = at.eqn
    if eqn.primitive.name == "convert_element_type":
        before = dtype_of(eqn.invars[0])
        if before in LOW and dtype_of(eqn.outvars[0]) == FLOAT32:
            if is_ours(eqn) or not is_promotion(eqn, at.around.readers.get(eqn.outvars[0], ())):
                what = f"an upcast from {before} to float32"
                return Cause(at.source, at.path, what, by_policy=is_ours(eqn))
            return Promoted(str(before))
    ours = [i for i, v in enumerate(eqn.invars) if dtype_of(v) == FLOAT32]
    causes = [cause for i in ours if (cause := known[i].cause) is not None]
    if causes:  # the author's upcasts before autocast's
        return min(causes, key=lambda cause: cause.by_policy)
    promoted = [why for i in ours if isinstance(why := known[i].why, Promoted)]
    # A Python number that meets an earlier promotion is float32 as well, but did not cause it.
    fresh = any(why.fresh for why in promoted)
    partners = [
        known[i].name
        for i in ours
        if known[i].why is None and (fresh or not isinstance(eqn.invars[i], Literal))
    ]
    if promoted and partners:
        what = f"{partners[0]} is float32 and meets a {promoted[0].dtype} value"
        return Cause(at.source, at.path, what, promoted=partners[0])
    if not promoted:
        return None
    return promoted[0] if _moves(at) else promoted[0]._replace(fresh=False)


def _cast(at: Place, known: list[Known]) -> Cast | None:
    eqn = at.eqn
    if eqn.primitive.name == "convert_element_type":
        before, after = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
        if before in FLOATS and after in FLOATS and before != after:
            return Cast(str(before), at.source, is_ours(eqn), only=True)
        return None
    return known[0].cast if known and _moves(at) else None


def _narrowed(at: Place, known: list[Known]) -> bool:
    operands = at.eqn.invars
    if at.eqn.primitive.name == "convert_element_type" and dtype_of(operands[0]) not in LOW:
        return is_ours(at.eqn)
    return any(k.narrowed and dtype_of(v) in LOW for k, v in zip(known, operands, strict=True))


def _fixed(at: Place, known: list[Known]) -> bool:
    made = all(k.fixed for k in known) and not has_effects(at.eqn)
    return made and not at.eqn.primitive.name.startswith(RANDOM)


# Primitives that return their first operand, or a part of it, in some dtype and layout.
_SAME = {"convert_element_type", "name", "stop_gradient", *CROSSING, *IN_PARTS}
_SAME -= {"concatenate", "gather", "split"}


def _origin(at: Place, known: list[Known]) -> Any:
    return known[0].origin if at.eqn.primitive.name in _SAME else None


def name_of(at: Place, known: list[Known]) -> ValueName:
    """Returns the name of an equation's results in messages."""
    if len(known) == 1 and _moves(at):
        return known[0].name
    return ValueName(f"the {at.eqn.primitive.name} at {at.source}")


def _moves(at: Place) -> bool:
    """Returns whether an equation only moves values."""
    return classify(at.eqn.primitive.name, at.eqn.params) == "move"


# Each fact of a value that is one of two.


def _first(a: Any, b: Any) -> Any:
    return b if a is None else a


def _same(a: Any, b: Any) -> Any:
    return a if a == b else None


# Each analysis, by the field of `Known`: the fact of an equation's results, given its place and
# what is known of its operands, and that of a value that is one of two, given theirs.
Analysis = tuple[Callable[[Place, list[Known]], Any], Callable[[Any, Any], Any]]
ANALYSES: dict[str, Analysis] = {
    "why": (_why, _first),
    "cast": (_cast, _same),
    "narrowed": (_narrowed, operator.or_),
    "fixed": (_fixed, operator.and_),
    "scaled": (lambda _, known: any(k.scaled for k in known), operator.or_),
    "degree": (
        lambda at, known: degree_of(at.eqn, [k.degree for k in known]),
        lambda a, b: alike((a, b)),
    ),
    "origin": (_origin, _same),
    "name": (name_of, lambda a, _: a),
}
