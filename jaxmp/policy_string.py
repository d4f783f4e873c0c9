"""Policies as strings: text in, the fields of a `Policy` out, and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Final

import jax.numpy as jnp

from jaxmp._printable import printable, shown
from jaxmp.dtypes import (
    DTYPE_NAMES,
    did_you_mean,
    dtype_name,
    half_dtype,
    is_dtype_name,
    parse_dtype,
    plain_name,
)
from jaxmp.policy_fields import FIELDS, MalformedError, Piece
from jaxmp.recipes import float8, int8


def _named(param: Any, compute: Any, output: Any, **others: Any) -> dict[str, Any]:
    return {"param_dtype": param, "compute_dtype": compute, "output_dtype": output, **others}


# The policies that have a name; a policy that two of them fit has the first one's. As in Keras,
# "mixed" ones are named by their compute dtype: parameters and outputs are float32, so that the
# loss is computed in it. A plain dtype name means that dtype throughout.
_NAMED: Final = {
    "mixed_float8": _named(jnp.float32, jnp.bfloat16, jnp.float32, matmul=float8()),
    "mixed_int8": _named(jnp.float32, jnp.bfloat16, jnp.float32, matmul=int8()),
    "mixed_bfloat16": _named(jnp.float32, jnp.bfloat16, jnp.float32),
    "mixed_float16": _named(jnp.float32, jnp.float16, jnp.float32),
    **{dtype_name(dtype): _named(dtype, dtype, dtype) for dtype in DTYPE_NAMES},
}

# Other libraries' names for the same, as `plain_name` writes them: PyTorch Lightning's "bf16-mixed"
# and "16-true"; and the common "mixed_fp16".
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

# Names that mean different things in different libraries, and what their users may mean.
_MIXED_OR_NOT: Final = (
    "say 'mixed_float16' for float32 parameters and float16 computation, 'float16' for float16 "
    "throughout"
)
_MIXED: Final = (
    "say 'mixed_bfloat16', 'mixed_float16', or 'mixed_half' for the one that the device multiplies"
)
_EIGHT_BITS: Final = "say 'mixed_float8': values stay in 16 bits, layers multiply in 8"
_FOREIGN: Final = {
    "half": "say 'mixed_half' for float32 parameters and 16-bit computation, 'bfloat16' or "
    "'float16' for 16 bits throughout, parameters too",
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
        "TF32 is how JAX multiplies float32, not a dtype: use 'float32' under "
        "jax.default_matmul_precision('tensorfloat32')",
    ),
}

# The most characters of a policy's string: `ops` may name some hundred primitives.
_LONGEST: Final = 10_000
_FIELD_BY_KEY: Final = {key: field for field in FIELDS for key in field.keys}


def format_policy(policy: Any) -> str:
    """Returns the string of a policy: its name if it has one, and its other settings."""
    values = {field.name: getattr(policy, field.name) for field in FIELDS}
    name = next((name for name, named in _NAMED.items() if named.items() <= values.items()), "")
    # In a string the compute and output dtype default to the parameters'.
    refinements = {f.name: f.default for f in dataclasses.fields(policy) if f.kw_only}
    unsaid = refinements | _NAMED.get(name, {})
    said = (f for f in FIELDS if values[f.name] != unsaid.get(f.name))
    settings = [f"{field.keys[0]}={field.show(values[field.name])}" for field in said]
    return ",".join([name, *settings] if name else settings)


def parse_policy(spec: str) -> dict[str, Any]:
    """Returns the fields of the policy that a string describes; `jaxmp.get_policy` has the grammar.

    Raises:
      ValueError: If the string names nothing known, or cannot be read; the message says where.
    """
    if len(spec) > _LONGEST:
        raise ValueError(
            f"get_policy: a policy's string has at most {_LONGEST:,} characters; got "
            f"{len(spec):,}: {shown(spec)}."
        )
    head, *rest = Piece(spec, 0).split(",")
    try:
        if "=" not in head.text:
            return _named_policy(head) | _read_settings(rest)
        fields = _read_settings([head, *rest])
    except MalformedError as error:
        start = max(0, error.position - 60)  # what is shown of a long one
        line = spec.replace("\n", " ")
        before = printable(line[start : error.position])
        after = printable(line[error.position : error.position + 60])
        raise ValueError(
            f"get_policy: cannot read {shown(spec, 200)} at position {error.position}: {error}.\n"
            f"    {before}{after}\n    {' ' * len(before)}^"
        ) from None
    param = fields.get("param_dtype", jnp.float32)
    compute = fields.get("compute_dtype", param)
    return _named(param, compute, compute) | fields


def _named_policy(piece: Piece) -> dict[str, Any]:
    if not piece.text:
        raise MalformedError(piece, "expected the name of a policy, or key=value")
    name = plain_name(piece.text)
    name = _SYNONYMS.get(name, name)
    if name in _FOREIGN:
        raise ValueError(
            f"get_policy: {shown(piece.text)} does not name a policy here; {_FOREIGN[name]}."
        )
    if name == "mixed_half":
        name = f"mixed_{dtype_name(half_dtype())}"
    if name in _NAMED:
        return _NAMED[name]
    if is_dtype_name(name):
        dtype = parse_dtype(name, "get_policy")
        return _named(dtype, dtype, dtype)
    names = itertools.chain(_NAMED, ("mixed_half",), *DTYPE_NAMES.values())
    known = sorted({*names} - {*_FOREIGN})
    raise ValueError(
        f"get_policy: Unknown dtype or policy name {shown(piece.text)}"
        f"{did_you_mean(name, known)}; the names are {', '.join(known)}, and "
        "'p=f32,c=bf16,o=f32' spells a policy out."
    )


def _read_settings(pieces: Iterable[Piece]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for piece in pieces:
        key, *values = piece.split("=")
        if len(values) != 1 or not key.text or not values[0].text:
            raise MalformedError(piece, f"expected key=value, got {shown(piece.text)}")
        if key.text not in _FIELD_BY_KEY:
            expected = f"unknown key {shown(key.text)}; the keys are {', '.join(_FIELD_BY_KEY)}"
            raise MalformedError(key, expected)
        field = _FIELD_BY_KEY[key.text]
        if field.name in settings:
            raise MalformedError(key, f"{field.name} is set twice")
        given = field.parse(values[0])
        try:
            settings[field.name] = field.read(given, key.text)
        except ValueError as error:
            raise MalformedError(values[0], error) from None
    return settings
