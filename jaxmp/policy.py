"""Policies: which dtype parameters, computation and outputs have, as plain data.

A `Policy` is a `jmp.Policy`, so whatever takes one of those (Haiku, for one) takes ours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import quote, unquote

import jax.numpy as jnp
import jmp
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from jaxmp.dtypes import (
    DTYPE_NAMES,
    did_you_mean,
    dtype_name,
    is_dtype_name,
    parse_dtype,
    short_dtype_name,
)
from jaxmp.tree import cast_floating

__all__ = ["OP_CLASSES", "Policy", "get_policy"]

T = TypeVar("T")

# What `Policy.ops` may say about a primitive; `jaxmp.autocast` says what each one means.
OP_CLASSES: Final = ("low", "full", "follow", "transparent", "own")


@dataclasses.dataclass(frozen=True, repr=False)
class Policy(jmp.Policy):  # type: ignore[misc]  # jmp ships no types
    """Says which dtypes a model stores, multiplies in and returns.

    Policies are immutable, hashable, comparable and picklable; two are equal when they mean the
    same, however their dtypes were written. `str(policy)` is a string that `get_policy` reads back,
    and `dataclasses.replace` makes a changed copy.

    Attributes:
      param_dtype: What parameters are stored as.
      compute_dtype: What contractions (matrix products, convolutions) multiply in.
      output_dtype: What the transformed function returns.
      softmax_dtype: What the exponential and the division of a softmax run in: float32, or the
        compute dtype, which saves the memory of a float32 copy of every attention matrix. The sum
        is float32 either way.
      ops: Overrides of how `jaxmp.autocast` treats single primitives: a mapping from a primitive,
        or the name of one, to one of the classes in `OP_CLASSES`. Kept as a sorted tuple of
        (primitive name, class) pairs.

    The dtypes may be given as names or dtype objects, see `jaxmp.dtypes.parse_dtype`; they are kept
    as JAX's scalar types, such as `jnp.bfloat16`.

    Raises:
      ValueError: If a dtype is not a real floating one of 16, 32 or 64 bits, `softmax_dtype` is
        neither float32 nor the compute dtype, or `ops` names an unknown class.
      TypeError: If a dtype is neither a name nor a dtype, or `ops` is not such a mapping.

    Example:
      >>> policy = Policy("float32", "bfloat16", "float32", ops={"exp": "follow"})
      >>> policy
      Policy('float32', 'bfloat16', 'float32', ops={'exp': 'follow'})
      >>> str(policy)
      'p=full,c=bf16,o=full,ops=exp:follow'
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    softmax_dtype: DTypeLike = dataclasses.field(default=jnp.float32, kw_only=True)
    # Typed loosely because it is given as a mapping and kept as a tuple.
    ops: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for field in ("param_dtype", "compute_dtype", "output_dtype", "softmax_dtype"):
            dtype = parse_dtype(getattr(self, field), f"Policy: {field}")
            object.__setattr__(self, field, dtype)
        object.__setattr__(self, "ops", _normalize_ops(self.ops))
        if self.softmax_dtype not in (jnp.float32, self.compute_dtype):
            raise ValueError(
                "Policy: softmax_dtype must be float32 or the compute dtype "
                f"({dtype_name(self.compute_dtype)}); got {dtype_name(self.softmax_dtype)}."
            )

    def cast_to_param(self, x: T) -> T:
        """Casts floating leaves to `param_dtype`; see `jaxmp.tree.cast_floating` for which."""
        return cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: T) -> T:
        """Casts floating leaves to `compute_dtype`; see `jaxmp.tree.cast_floating` for which."""
        return cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: T) -> T:
        """Casts floating leaves to `output_dtype`; see `jaxmp.tree.cast_floating` for which."""
        return cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns this policy with another output dtype.

        Example:
          >>> str(get_policy("mixed_bfloat16").with_output_dtype("bf16"))
          'p=full,c=bf16,o=bf16'
        """
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        parts = [
            f"p={short_dtype_name(self.param_dtype)}",
            f"c={short_dtype_name(self.compute_dtype)}",
            f"o={short_dtype_name(self.output_dtype)}",
        ]
        if self.softmax_dtype != jnp.float32:
            parts.append(f"softmax={short_dtype_name(self.softmax_dtype)}")
        if self.ops:
            # A primitive may be called anything; "%3A" keeps the separators unambiguous.
            ops = "|".join(f"{quote(name, safe='')}:{op_class}" for name, op_class in self.ops)
            parts.append(f"ops={ops}")
        return ",".join(parts)

    def __repr__(self) -> str:
        names = (self.param_dtype, self.compute_dtype, self.output_dtype)
        parts = [repr(dtype_name(dtype)) for dtype in names]
        if self.softmax_dtype != jnp.float32:
            parts.append(f"softmax_dtype={dtype_name(self.softmax_dtype)!r}")
        if self.ops:
            parts.append(f"ops={dict(self.ops)!r}")
        return f"Policy({', '.join(parts)})"


# What Keras calls its policies: parameters, compute and output dtype. Ours return float32, so that
# the loss after a "mixed" model is computed in it; a plain dtype name means that dtype throughout.
_MIXED_POLICIES: Final[dict[str, tuple[DTypeLike, DTypeLike, DTypeLike]]] = {
    "mixed_bfloat16": (jnp.float32, jnp.bfloat16, jnp.float32),
    "mixed_float16": (jnp.float32, jnp.float16, jnp.float32),
}

_FIELD_BY_KEY: Final = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "softmax": "softmax_dtype",
    "ops": "ops",
}


def get_policy(spec: str | jmp.Policy | DTypeLike) -> Policy:
    """Returns the policy that a string, another policy or a dtype describes.

    A string is one of

    * a name: "mixed_bfloat16" and "mixed_float16" (float32 parameters and outputs, 16-bit compute),
      or a dtype ("float32", "bf16", "half", …) for parameters, compute and outputs alike;
    * jmp's form, "p=f32,c=bf16,o=f32" or "params=float32,compute=bfloat16,output=float32", where
      parameters default to float32, compute to the parameters' dtype and output to the compute
      dtype;
    * either of them with refinements: "mixed_bfloat16,softmax=bf16",
      "mixed_float16,ops=exp:follow|my_primitive:full". In the names of primitives "%3A" stands for
      ":" and so on, as in a URL.

    "half" is bfloat16 where the default device multiplies it natively, else float16; see
    `jaxmp.dtypes.half_dtype`.

    Args:
      spec: The string; a `Policy`, returned as it is; a `jmp.Policy`, converted; or a dtype object,
        which means what its name does.

    Raises:
      ValueError: If the string names nothing known, or cannot be read; the message says where.
      TypeError: If `spec` is none of these.

    Example:
      >>> get_policy("mixed_bfloat16,softmax=bf16")
      Policy('float32', 'bfloat16', 'float32', softmax_dtype='bfloat16')
      >>> get_policy("c=f16") == get_policy("params=float32,compute=float16,output=float16")
      True
    """
    if isinstance(spec, Policy):
        return cast("Policy", spec)
    if isinstance(spec, jmp.Policy):
        return Policy(spec.param_dtype, spec.compute_dtype, spec.output_dtype)
    if isinstance(spec, str):
        return _parse_policy(spec)
    try:
        dtype = parse_dtype(spec, "get_policy")
    except TypeError:
        raise TypeError(
            "get_policy: takes a string such as 'mixed_bfloat16' or 'p=f32,c=bf16,o=f32', a "
            f"Policy, a jmp.Policy or a dtype; got {spec!r} of type {type(spec).__name__!r}."
        ) from None
    return Policy(dtype, dtype, dtype)


class _Piece(NamedTuple):
    """A piece of a policy string, and where it starts."""

    text: str
    start: int


def _parse_policy(spec: str) -> Policy:
    head, *rest = _split(_Piece(spec, 0), ",")
    fields: dict[str, Any] = {}
    if "=" not in head.text:
        fields = _named_policy(head, spec)
    settings = _read_settings(rest if fields else [head, *rest], spec)
    if not fields:
        fields["param_dtype"] = settings.get("param_dtype", jnp.float32)
        fields["compute_dtype"] = settings.get("compute_dtype", fields["param_dtype"])
        fields["output_dtype"] = settings.get("output_dtype", fields["compute_dtype"])
    return Policy(**(fields | settings))


def _named_policy(piece: _Piece, spec: str) -> dict[str, Any]:
    if not piece.text:
        raise _malformed(spec, piece.start, "expected the name of a policy, or key=value")
    if piece.text in _MIXED_POLICIES:
        param, compute, output = _MIXED_POLICIES[piece.text]
    elif is_dtype_name(piece.text):
        param = compute = output = parse_dtype(piece.text, "get_policy")
    else:
        known = [*_MIXED_POLICIES, "half", *itertools.chain(*DTYPE_NAMES.values())]
        raise ValueError(
            f"get_policy: Unknown dtype or policy name {piece.text!r}"
            f"{did_you_mean(piece.text, known)}; the names are {', '.join(sorted(known))}, and "
            "'p=f32,c=bf16,o=f32' spells a policy out."
        )
    return {"param_dtype": param, "compute_dtype": compute, "output_dtype": output}


def _read_settings(pieces: Iterable[_Piece], spec: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for piece in pieces:
        key, *values = _split(piece, "=")
        if len(values) != 1 or not key.text or not values[0].text:
            raise _malformed(spec, piece.start, f"expected key=value, got {piece.text!r}")
        if key.text not in _FIELD_BY_KEY:
            expected = f"unknown key {key.text!r}; the keys are {', '.join(_FIELD_BY_KEY)}"
            raise _malformed(spec, key.start, expected)
        field = _FIELD_BY_KEY[key.text]
        if field in settings:
            raise _malformed(spec, key.start, f"{field} is set twice")
        if field == "ops":
            settings[field] = _read_ops(values[0], spec)
        else:
            try:
                settings[field] = parse_dtype(values[0].text, key.text)
            except ValueError as error:
                raise _malformed(spec, values[0].start, str(error).rstrip(".")) from None
    return settings


def _read_ops(value: _Piece, spec: str) -> dict[str, str]:
    ops: dict[str, str] = {}
    for piece in _split(value, "|"):
        name, *classes = _split(piece, ":")
        if len(classes) != 1 or not name.text:
            expected = f"expected primitive:class, got {piece.text!r}"
            raise _malformed(spec, piece.start, expected)
        if classes[0].text not in OP_CLASSES:
            expected = f"unknown class {classes[0].text!r}; the classes are {', '.join(OP_CLASSES)}"
            raise _malformed(spec, classes[0].start, expected)
        if unquote(name.text) in ops:
            raise _malformed(spec, name.start, f"the primitive {name.text!r} is set twice")
        ops[unquote(name.text)] = classes[0].text
    return ops


def _split(piece: _Piece, separator: str) -> list[_Piece]:
    """Splits a piece, stripping blanks, without losing where each part starts."""
    parts, start = [], piece.start
    for text in piece.text.split(separator):
        parts.append(_Piece(text.strip(), start + len(text) - len(text.lstrip())))
        start += len(text) + len(separator)
    return parts


def _malformed(spec: str, position: int, expected: str) -> ValueError:
    return ValueError(
        f"get_policy: cannot read {spec!r} at position {position}: {expected}.\n"
        f"    {spec}\n    {' ' * position}^"
    )


def _normalize_ops(ops: Any) -> tuple[tuple[str, str], ...]:
    """The overrides as sorted (primitive name, class) pairs."""
    if ops is None:
        return ()
    pairs = tuple(ops.items()) if isinstance(ops, Mapping) else ops
    # Pairs are how a policy keeps them: `dataclasses.replace` hands them back.
    if not (isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)):
        raise TypeError(
            "Policy: ops takes a mapping from primitives or their names to one of "
            f"{', '.join(OP_CLASSES)}; got {ops!r} of type {type(ops).__name__!r}."
        )
    normalized: dict[str, str] = {}
    for primitive, op_class in pairs:
        name = primitive.name if isinstance(primitive, Primitive) else primitive
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Policy: a key of ops must be a primitive or its name; got {primitive!r}."
            )
        if op_class not in OP_CLASSES:
            raise ValueError(
                f"Policy: ops gives {name!r} the unknown class {op_class!r}; the classes are "
                f"{', '.join(OP_CLASSES)}."
            )
        if normalized.setdefault(name, op_class) != op_class:
            raise ValueError(
                f"Policy: ops gives {name!r} two classes, {normalized[name]!r} and {op_class!r}."
            )
    return tuple(sorted(normalized.items()))
