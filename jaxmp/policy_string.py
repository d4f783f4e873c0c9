"""The grammar of policy strings: text in, the fields of a `Policy` out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmp._chip_words import word_at_chip
from jaxmp.dtypes import (
    DTYPE_NAMES,
    did_you_mean,
    half_dtype,
    is_dtype_name,
    parse_dtype,
    plain_name,
)
from jaxmp.recipes import Recipe, parse_matmul, parse_recipe

# What `Policy.ops` may say about a primitive; `jaxmp.autocast` says what each one means.
OP_CLASSES: Final = ("low", "full", "follow", "transparent", "own")

# What `Policy.residuals` may be.
RESIDUALS: Final = ("save", "recompute")

# What `Policy.attention` may be, by itself or with the name of a chip.
FUSED: Final = "fused"

# What Keras calls its policies, by their compute dtype. Parameters and outputs are float32, so that
# the loss after a "mixed" model is computed in it; a plain dtype name means that dtype throughout.
_MIXED_POLICIES: Final[dict[str, DTypeLike | None]] = {
    "mixed_bfloat16": jnp.bfloat16,
    "mixed_float16": jnp.float16,
    "mixed_half": None,  # whichever of the two the device multiplies
    "mixed_float8": jnp.bfloat16,
    "mixed_int8": jnp.bfloat16,
}
# Those of them whose products are in 8 bits.
_MATMUL: Final = {"mixed_float8": "float8", "mixed_int8": "int8"}

# What other libraries call the same, as `plain_name` writes it: PyTorch Lightning's "bf16-mixed"
# and "16-true", people's "mixed_fp16".
_SYNONYMS: Final = {
    **dict.fromkeys(("mixed_bf16", "bf16_mixed", "bfloat16_mixed"), "mixed_bfloat16"),
    **dict.fromkeys(("mixed_f16", "mixed_fp16", "mixed_16"), "mixed_float16"),
    **dict.fromkeys(("f16_mixed", "fp16_mixed", "float16_mixed", "16_mixed"), "mixed_float16"),
    **dict.fromkeys(("mixed_fp8", "mixed_f8", "fp8_mixed"), "mixed_float8"),
    "half_mixed": "mixed_half",
    "bf16_true": "bfloat16",
    "16_true": "float16",
    "32_true": "float32",
    "64_true": "float64",
    "32": "float32",
    "64": "float64",
}

# Names that mean one thing here and another there, and what their users may mean.
_MIXED_OR_NOT: Final = (
    "say 'mixed_float16' for float32 parameters and float16 computation, 'float16' for float16 "
    "throughout"
)
_MIXED: Final = (
    "say 'mixed_bfloat16', 'mixed_float16', or 'mixed_half' for the one that the device multiplies"
)
_EIGHT_BITS: Final = "say 'mixed_float8': values stay in 16 bits, layers multiply in 8"
_FOREIGN: Final = {
    "fp16": _MIXED_OR_NOT,
    "16": _MIXED_OR_NOT,
    "o0": "say 'float32'",
    "o1": "say 'mixed_float16', or 'mixed_bfloat16' where the device has it",
    "o2": "say 'mixed_float16', or 'mixed_bfloat16' where the device has it",
    "o3": "say 'float16'",
    **dict.fromkeys(("amp", "auto", "autocast", "mixed", "mixed_float", "mixed_precision"), _MIXED),
    **dict.fromkeys(("fp8", "f8", "float8"), _EIGHT_BITS),
    **dict.fromkeys(
        ("tf32", "tensorfloat32"),
        "that is how float32 is multiplied, which is JAX's to say: use 'float32' under "
        "jax.default_matmul_precision('tensorfloat32')",
    ),
}

_FIELD_BY_KEY: Final = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "softmax": "softmax_dtype",
    "reduce": "reduce_dtype",
    "wire": "wire_dtype",
    "saturate": "saturate",
    "matmul": "matmul",
    "residuals": "residuals",
    "attention": "attention",
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
    name = plain_name(piece.text)
    name = _SYNONYMS.get(name, name)
    if name in _FOREIGN:
        raise ValueError(
            f"get_policy: {piece.text!r} does not name a policy here; {_FOREIGN[name]}."
        )
    if name in _MIXED_POLICIES:
        param = output = jnp.float32
        compute = _MIXED_POLICIES[name] or half_dtype()
    elif is_dtype_name(name):
        param = compute = output = parse_dtype(name, "get_policy")
    else:
        known = [*_MIXED_POLICIES, "half", *itertools.chain(*DTYPE_NAMES.values())]
        raise ValueError(
            f"get_policy: Unknown dtype or policy name {piece.text!r}"
            f"{did_you_mean(name, known)}; the names are {', '.join(sorted(known))}, and "
            "'p=f32,c=bf16,o=f32' spells a policy out."
        )
    fields = {"param_dtype": param, "compute_dtype": compute, "output_dtype": output}
    return fields | ({"matmul": parse_recipe(_MATMUL[name])} if name in _MATMUL else {})


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
        elif field == "saturate":
            settings[field] = _read_flag(values[0], spec)
        elif field == "matmul":
            settings[field] = _read_recipe(values[0], spec)
        elif field == "residuals":
            settings[field] = _read_residuals(values[0], spec)
        elif field == "attention":
            settings[field] = _read_attention(values[0], spec)
        else:
            try:
                settings[field] = parse_dtype(values[0].text, key.text)
            except ValueError as error:
                raise _malformed(spec, values[0].start, str(error).rstrip(".")) from None
    return settings


def _read_recipe(value: _Piece, spec: str) -> Recipe | str:
    try:
        return parse_matmul(value.text)
    except ValueError as error:
        raise _malformed(spec, value.start, str(error)) from None


def _read_flag(value: _Piece, spec: str) -> bool:
    if value.text.lower() not in ("true", "false"):
        raise _malformed(spec, value.start, f"expected true or false, got {value.text!r}")
    return value.text.lower() == "true"


def _read_residuals(value: _Piece, spec: str) -> str:
    if value.text.lower() not in RESIDUALS:
        expected = f"expected {' or '.join(RESIDUALS)}, got {value.text!r}"
        raise _malformed(spec, value.start, expected)
    return value.text.lower()


def _read_attention(value: _Piece, spec: str) -> str:
    try:
        return parse_attention(value.text)
    except ValueError as error:
        raise _malformed(spec, value.start, str(error).rstrip(".")) from None


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


def parse_attention(text: str) -> str:
    """What a string says of a policy's `attention`: ``fused``, or ``fused@CHIP``.

    Raises:
      ValueError: if it is neither, or names no chip.

    Example:
      >>> parse_attention("fused@gpu-h100")
      'fused@gpu-h100'
    """
    try:
        read = word_at_chip(text, FUSED)
    except ValueError as error:
        raise ValueError(f"attention: {error}.") from None
    if read is None:
        raise ValueError(f"attention is {FUSED!r} or '{FUSED}@CHIP', or left out; got {text!r}.")
    return read


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
