"""The grammar of policy strings: text in, the fields of a `Policy` out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmp.dtypes import DTYPE_NAMES, did_you_mean, is_dtype_name, parse_dtype

# What `Policy.ops` may say about a primitive; `jaxmp.autocast` says what each one means.
OP_CLASSES: Final = ("low", "full", "follow", "transparent", "own")

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


class _Piece(NamedTuple):
    """A piece of a policy string, and where it starts."""

    text: str
    start: int


def policy_fields(spec: str) -> dict[str, Any]:
    """The fields of the policy that a string describes; see `jaxmp.get_policy` for the grammar.

    Raises:
      ValueError: If the string names nothing known, or cannot be read; the message says where.
    """
    head, *rest = _split(_Piece(spec, 0), ",")
    fields: dict[str, Any] = {}
    if "=" not in head.text:
        fields = _named_policy(head, spec)
    settings = _read_settings(rest if fields else [head, *rest], spec)
    if not fields:
        fields["param_dtype"] = settings.get("param_dtype", jnp.float32)
        fields["compute_dtype"] = settings.get("compute_dtype", fields["param_dtype"])
        fields["output_dtype"] = settings.get("output_dtype", fields["compute_dtype"])
    return fields | settings


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
