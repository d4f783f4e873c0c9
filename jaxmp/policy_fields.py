"""The fields of a `Policy`: how they are spelled in a string, read, checked and printed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxmp._core.chips.words import word_at_chip
from jaxmp._core.printable import printable, shown
from jaxmp._core.weight_format import (
    WeightFormat,
    activation_format,
    parse_activations,
    parse_weights,
)
from jaxmp.dtypes import (
    DTYPE_NAMES,
    did_you_mean,
    dtype_name,
    half_dtype,
    is_dtype_name,
    parse_dtype,
    plain_name,
    short_dtype_name,
)
from jaxmp.recipes import FORMATS, Recipe, check_goes_with, float8, int8, parse_matmul

# The classes that `Policy.ops` may give a primitive; `jaxmp.autocast` says what each one means.
OP_CLASSES: Final = ("compute", "full_precision", "promote", "move", "as_written")

# The values of `Policy.residuals`.
RESIDUALS: Final = ("save", "recompute", "offload")

# The value of `Policy.attention`, by itself or with the name of a chip.
FUSED: Final = "fused"


class Piece(NamedTuple):
    """A piece of a policy string, and where it starts."""

    text: str
    start: int

    def split(self, separator: str) -> list[Piece]:
        """Splits it, stripping blanks, without losing where each part starts."""
        parts, start = [], self.start
        for text in self.text.split(separator):
            parts.append(Piece(text.strip(), start + len(text) - len(text.lstrip())))
            start += len(text) + len(separator)
        return parts


class MalformedError(ValueError):
    """An error at a position of a policy string, which says what was expected there."""

    def __init__(self, piece: Piece, expected: object) -> None:
        super().__init__(str(expected).rstrip("."))
        self.position = piece.start


class Field(NamedTuple):
    """One field of a `Policy`. Its default and its documentation are in the dataclass.

    Attributes:
      name: the attribute.
      keys: its names in strings; the first one is printed.
      read: takes a caller's value, and the field's name in messages; returns what a policy keeps.
      show: returns the text of a kept value that is not the default.
      parse: returns what `read` takes from the text in a string, where that is not the text itself.
      check: takes a kept value, the name of the compute dtype and the field's name in messages;
        raises if the two do not go together.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[Any, str], Any]
    show: Callable[[Any], str] = str
    parse: Callable[[Piece], Any] = lambda piece: piece.text
    check: Callable[[Any, str, str], None] | None = None


def _float32_or_compute(dtype: Any, compute: str, what: str) -> None:
    if dtype != jnp.float32 and dtype_name(dtype) != compute:
        raise ValueError(
            f"{what} must be float32 or the compute dtype ({compute}); got {dtype_name(dtype)}."
        )


def _read_flag(value: Any, what: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{what} must be True or False; got {shown(value)} of type {type(value).__name__!r}."
        )
    return bool(value)


def _parse_flag(piece: Piece) -> bool:
    if piece.text.lower() not in ("true", "false"):
        raise MalformedError(piece, f"expected true or false, got {shown(piece.text)}")
    return piece.text.lower() == "true"


def _read_recipe(matmul: Any, what: str) -> Recipe | str | None:
    if matmul is None or isinstance(matmul, Recipe):
        return matmul
    if isinstance(matmul, str):
        return parse_matmul(matmul)
    raise TypeError(
        f"{what} takes a recipe, such as jaxmp.recipes.float8(), its string, 'auto', or None; got "
        f"{shown(matmul)} of type {type(matmul).__name__!r}."
    )


def _read_weights(weights: Any, what: str) -> WeightFormat | None:
    return None if weights is None else parse_weights(weights, what)


def _read_activations(activations: Any, what: str) -> str | None:
    return None if activations is None else parse_activations(activations, what)


def check_weights(
    weights: WeightFormat | None, activations: str | None, matmul: Recipe | str | None
) -> None:
    """Refuses weights and activations that do not go together, or with a recipe.

    Raises:
      ValueError: if the recipe's forward products are in few bits, or may be; or if activations are
        of another kind than the weights, or these have several scales in a sum.
    """
    own = isinstance(matmul, str) or (matmul is not None and FORMATS[matmul.forward].scaled)
    if weights is not None and own:
        raise ValueError(
            f"Policy: weights={weights} rounds weights for products in the compute dtype, and "
            f"matmul={matmul} multiplies forward in a format of its own: say one of them."
        )
    if activations is not None and own:
        raise ValueError(
            f"Policy: activations={activations} is for products with stored weights, and "
            f"matmul={matmul} multiplies forward in a format of its own: say one of them."
        )
    if weights is None or activations is None:
        return
    if weights.granularity == "block":
        raise ValueError(
            f"Policy: activations={activations} needs one scale for all weights that are summed, "
            f"and weights={weights} has one for each block: say weights={weights.short}@row."
        )
    if activation_format(activations)[0].integer != weights.format.integer:
        raise ValueError(
            f"Policy: activations={activations} and weights={weights}: integers multiply integers, "
            "and floats floats."
        )


def _read_residuals(residuals: Any, what: str) -> str:
    if residuals not in RESIDUALS:
        raise ValueError(
            f"{what} must be {', '.join(map(repr, RESIDUALS[:-1]))} or {RESIDUALS[-1]!r}; got "
            f"{shown(residuals)}."
        )
    return str(residuals)


def _read_attention(attention: Any, what: str) -> str | None:
    if attention is None:
        return None
    if not isinstance(attention, str):
        raise TypeError(
            f"{what} takes None, 'fused' or 'fused@CHIP'; got "
            f"{shown(attention)} of type {type(attention).__name__!r}."
        )
    try:
        read = word_at_chip(attention, FUSED)
    except ValueError as error:
        raise ValueError(f"{what}: {error}.") from None
    if read is None:
        raise ValueError(
            f"{what} is {FUSED!r} or '{FUSED}@CHIP', or absent; got {shown(attention)}."
        )
    return read


def _read_ops(ops: Any, what: str) -> tuple[tuple[str, str], ...]:
    """Returns the overrides as sorted (primitive name, class) pairs."""
    if ops is None:
        return ()
    pairs = tuple(ops.items()) if isinstance(ops, Mapping) else ops
    # Pairs are how a policy keeps them: `dataclasses.replace` hands them back.
    if not (isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)):
        raise TypeError(
            f"{what} takes a mapping from primitives or their names to one of "
            f"{', '.join(OP_CLASSES)}; got {shown(ops)} of type {type(ops).__name__!r}."
        )
    normalized: dict[str, str] = {}
    for primitive, op_class in pairs:
        name = primitive.name if isinstance(primitive, Primitive) else primitive
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Policy: a key of ops must be a primitive or its name; got {shown(name)}."
            )
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(f"{what} has {shown(name)}, which is not Unicode text.")
        if op_class not in OP_CLASSES:
            raise ValueError(f"{what} gives {shown(name)} the {_unknown(op_class)}.")
        if normalized.setdefault(name, op_class) != op_class:
            raise ValueError(
                f"{what} gives {shown(name)} two classes, {normalized[name]!r} and {op_class!r}."
            )
    return tuple(sorted(normalized.items()))


def _unknown(op_class: object) -> str:
    renamed = zip(("low", "full", "follow", "transparent", "own"), OP_CLASSES, strict=True)
    hint = "".join(f", which is {new} now" for old, new in renamed if op_class == old)
    return f"unknown class {shown(op_class)}{hint}; the classes are {', '.join(OP_CLASSES)}"


def _parse_ops(value: Piece) -> dict[str, str]:
    ops: dict[str, str] = {}
    for piece in value.split("|"):
        name, *classes = piece.split(":")
        if len(classes) != 1 or not name.text:
            raise MalformedError(piece, f"expected primitive:class, got {shown(piece.text)}")
        [op_class] = classes
        if op_class.text not in OP_CLASSES:
            raise MalformedError(op_class, _unknown(op_class.text))
        if unquote(name.text) in ops:
            raise MalformedError(name, f"the primitive {shown(name.text)} is set twice")
        ops[unquote(name.text)] = op_class.text
    return ops


def _show_ops(ops: tuple[tuple[str, str], ...]) -> str:
    # A primitive may be called anything; "%3A" keeps the separators unambiguous.
    return "|".join(f"{quote(name, safe='')}:{op_class}" for name, op_class in ops)


_dtype = functools.partial(Field, read=parse_dtype, show=short_dtype_name)
FIELDS: Final = (
    _dtype("param_dtype", ("p", "params")),
    _dtype("compute_dtype", ("c", "compute")),
    _dtype("output_dtype", ("o", "output")),
    _dtype("softmax_dtype", ("softmax",), check=_float32_or_compute),
    _dtype("reduce_dtype", ("reduce",), check=_float32_or_compute),
    _dtype("reduce_scatter_dtype", ("reduce_scatter",), check=_float32_or_compute),
    Field("saturate", ("saturate",), _read_flag, lambda flag: str(flag).lower(), _parse_flag),
    Field("matmul", ("matmul",), _read_recipe, check=check_goes_with),
    Field("weights", ("weights",), _read_weights),
    Field("activations", ("activations",), _read_activations),
    Field("residuals", ("residuals",), _read_residuals, parse=lambda piece: piece.text.lower()),
    Field("attention", ("attention",), _read_attention),
    Field("ops", ("ops",), _read_ops, _show_ops, _parse_ops),
)


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
