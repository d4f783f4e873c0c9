"""Recipes: the format in which each of the three products of a layer multiplies.

A layer multiplies its input by its weights, ``y = x @ w``; its derivative is two more products: one
for the gradient of the input, ``dx = dy @ w.T``, and one for the gradient of the weights,
``dw = x.T @ dy``. A recipe, the `matmul` of a policy, names a format for each, and what shares a
scale.

Example:
  >>> import jaxmp
  >>> jaxmp.Policy("float32", "bfloat16", "float32", matmul=float8("e5m2"))
  get_policy('mixed_bfloat16,matmul=float8:e5m2:e5m2')
"""

from __future__ import annotations

import dataclasses
from typing import Final

from jaxmp._core.chips.words import word_at_chip
from jaxmp._core.printable import shown
from jaxmp.dtypes import did_you_mean, parse_format, plain_name
from jaxmp.formats import ALL_FORMATS, Format, bits_in_words

__all__ = [
    "AUTO",
    "FORMATS",
    "Format",
    "Recipe",
    "blockwise_float8",
    "check_goes_with",
    "float8",
    "int8",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "parse_matmul",
    "parse_recipe",
    "products",
]


# The formats that products multiply in, by the names that recipes print. "float8" is a role: what
# the chip multiplies that has three bits of fraction, and e4m3 where no chip says.
_FLOAT8 = ("e4m3", "e5m2", "e4m3b11", "e4m3fnuz", "e5m2fnuz")
FORMATS: Final = {
    "float8": Format("float8_e4m3fn", "float8", ("fp8", "f8")),
    **{s: ALL_FORMATS[s] for s in (*_FLOAT8, "int8", "e2m1", "bf16", "f16", "f32")},
    "e4m3": Format("float8_e4m3fn", "e4m3", ("e4m3fn", "float8_e4m3")),
}
# What the weights multiply a gradient of a format with, where they are in 16 bits forward.
_WITH: Final = {"e5m2": "e4m3", "e5m2fnuz": "e4m3fnuz"}
# A float8 for weights and activations → that for gradients which is multiplied with it.
_GRADIENTS: Final = {
    "float8": "e5m2",
    "e4m3": "e5m2",
    "e4m3b11": "e5m2",
    "e4m3fnuz": "e5m2fnuz",
}
_NAMES_OF_FORMATS: Final = {name for fmt in FORMATS.values() for name in fmt.names}

# The part of an operand that shares one scale:
GRANULARITIES: Final = {
    "tensor": "all of it",
    "row": "what is multiplied with one row or column of the other",
    "block": "1 x 128 of activations and gradients, 128 x 128 of weights",
    "mx": "32 along what is summed; the scale is a power of two",
    "nv": "1 x 16 of activations and gradients, 16 x 16 of weights; all of it shares another",
}
# Of gradients in 4 bits, how they are rounded; of the two operands of a weight gradient in 4 bits,
# the Hadamard transform. The first is the default; formats of more bits have the last.
ROUNDINGS: Final = ("stochastic", "nearest")
HADAMARDS: Final = ("random", "plain", "none")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The format of each of a layer's products. Hashable; `str` of it reads back.

    Attributes:
      forward: the format of the input and of the weights: a key of `FORMATS`.
      grad_input: of the product that gives the gradient of the input. In 8 bits, it is the format
        of the gradient that comes in, and the weights are multiplied as they were forward.
      grad_weight: of the product that gives the gradient of the weights; likewise.
      granularity: what shares a scale: a key of `GRANULARITIES`.
      rounding: of the gradient that comes in, in 4 bits: one of `ROUNDINGS`. Empty for the default.
      hadamard: of the operands of the product that gives the gradient of the weights, in 4 bits:
        one of `HADAMARDS`. Empty for the default.

    Raises:
      ValueError: if a format, granularity or option is unknown, or they do not go together.

    Example:
      >>> recipe = Recipe("e4m3", "e5m2", "bf16", granularity="row")
      >>> recipe == parse_recipe(str(recipe))
      True
    """

    forward: str
    grad_input: str
    grad_weight: str
    granularity: str = "tensor"
    rounding: str = ""
    hadamard: str = ""

    def __post_init__(self) -> None:
        for field in ("forward", "grad_input", "grad_weight"):
            fmt = parse_format(getattr(self, field), FORMATS.values(), f"products: {field}")
            # Blocks are e4m3 on every chip.
            role = fmt.short == "float8" and self.granularity in ("block", "mx")
            object.__setattr__(self, field, "e4m3" if role else fmt.short)
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"products: granularity must be one of {', '.join(map(repr, GRANULARITIES))}; got "
                f"{self.granularity!r}"
            )
        for field, short in self.formats.items():
            why = _refused(short, field, self.granularity)
            if why:
                raise ValueError(f"products: {field} is {short!r} {why}")
            both = FORMATS[self.forward].scaled and FORMATS[short].scaled
            if both and short not in (self.forward, _GRADIENTS.get(self.forward)):
                raise ValueError(
                    f"products: {field} is {short!r} and forward {self.forward!r}, and nothing "
                    f"multiplies the two; say {field}={self.forward!r} or 'bf16'"
                )
        gradients = [f for f in ("grad_input", "grad_weight") if self.formats[f] == "e2m1"]
        rotated = [f for f in gradients if f == "grad_weight"]
        for option, known, of in (
            ("rounding", ROUNDINGS, gradients),
            ("hadamard", HADAMARDS, rotated),
        ):
            object.__setattr__(self, option, _option(option, getattr(self, option), known, of))

    @property
    def formats(self) -> dict[str, str]:
        """The three formats by product."""
        return {
            "forward": self.forward,
            "grad_input": self.grad_input,
            "grad_weight": self.grad_weight,
        }

    def operand_of(self, gradient: str) -> str:
        """Returns the format that a gradient of few bits is multiplied with: a key of `FORMATS`.

        Example:
          >>> Recipe("bf16", "e5m2", "e5m2").operand_of("e5m2")
          'e4m3'
        """
        if FORMATS[self.forward].scaled:
            return self.forward
        return _WITH.get(gradient, gradient)

    def with_float8(self, short: str) -> Recipe:
        """Returns the recipe with a chip's format, a key of `FORMATS`, in place of ``"float8"``.

        Example:
          >>> str(float8("e5m2").with_float8("e4m3fnuz"))
          'e4m3fnuz:e5m2fnuz:e5m2fnuz'
        """
        if "float8" not in self.formats.values():
            return self
        of = {"float8": short, "e5m2": _GRADIENTS[short]}
        forward, grad_input, grad_weight = (of.get(f, f) for f in self.formats.values())
        return Recipe(forward, grad_input, grad_weight, self.granularity)

    @property
    def quantizes(self) -> bool:
        """Whether any product multiplies operands of 8 bits or 4."""
        return any(FORMATS[short].scaled for short in self.formats.values())

    @property
    def few_bits(self) -> str:
        """The bits of the operands that it quantizes, in words: ``"8 bits"``, ``"4 bits"``."""
        formats = (FORMATS[short] for short in self.formats.values())
        return bits_in_words(fmt.bits for fmt in formats if fmt.scaled)

    def __str__(self) -> str:
        usual = dataclasses.replace(self, rounding="", hadamard="")
        formats = list(self.formats.values())
        text = formats[0] if len(set(formats)) == 1 else ":".join(formats)
        text = text if self.granularity == "tensor" else f"{text}@{self.granularity}"
        options = [
            word
            for word, (field, value) in _OPTIONS.items()
            if getattr(self, field) == value != getattr(usual, field)
        ]
        return "+".join([_NAMES.get(usual, text), *options])


# The options of a recipe in its string, `nvfp4+nearest`: field and value.
_OPTIONS: Final = {
    "nearest": ("rounding", "nearest"),
    "plain_hadamard": ("hadamard", "plain"),
    "no_hadamard": ("hadamard", "none"),
}


def _refused(short: str, field: str, granularity: str) -> str:
    """Returns the reason why a format does not go with a granularity, or ''."""
    if short == "e2m1" and granularity not in ("nv", "mx"):
        return (
            f"with granularity {granularity!r}: 4 bits need a scale for every few values; use "
            "granularity='nv' or 'mx'"
        )
    if short in (*_FLOAT8, "float8") and granularity == "nv":
        return "with granularity 'nv', which is of 'e2m1' alone; use granularity='mx'"
    if short == "int8" and granularity != "row":
        return (
            f"with granularity {granularity!r}: what one scale covers spans too much for 8 "
            "integer bits; use granularity='row'"
        )
    if short in _FLOAT8[1:] and granularity in ("block", "mx"):
        return (
            f"with granularity {granularity!r}: blocks are e4m3 throughout, since training "
            "diverges with e5m2 gradients in them"
        )
    if short in _WITH and field == "forward":
        return (
            f"where two bits of fraction lose more than the range gains; use {_WITH[short]!r}, "
            f"and {short!r} for gradients alone"
        )
    return ""


def _option(name: str, given: str, known: tuple[str, ...], read_by: list[str]) -> str:
    """Returns an option's value: its default if it is empty.

    Args:
      name: its name.
      given: what is given.
      known: what it may be: first the default, last what it is where no product reads it.
      read_by: the products in 4 bits that read it.

    Raises:
      ValueError: if it is unknown, or no product reads it.
    """
    value = given or known[0 if read_by else -1]
    if value not in known:
        raise ValueError(
            f"products: {name} must be one of {', '.join(map(repr, known))}; got {given!r}"
        )
    if value != known[-1] and not read_by:
        raise ValueError(
            f"products: {name} is {given!r}, which is of gradients in 4 bits, and there are none "
            f"that it is of; say grad_weight='e2m1', or leave {name} out"
        )
    return value


def products(
    forward: str = "float8",
    grad_input: str | None = None,
    grad_weight: str | None = None,
    *,
    granularity: str = "tensor",
    rounding: str = "",
    hadamard: str = "",
) -> Recipe:
    """Returns a recipe: the format of each of a layer's three products.

    Args:
      forward: ``"float8"``, that of the chip; ``"e4m3"``, ``"e4m3b11"`` (TPU v5e, v5p and v6e),
        ``"e4m3fnuz"`` (AMD MI300), ``"int8"``, ``"e2m1"``, ``"bf16"``, ``"f16"`` or ``"f32"``, or
        NumPy's name of it.
      grad_input: the format of the product that gives the gradient of the input; `forward` if None.
        Here ``"e5m2"`` may stand as well, with ``"e4m3fnuz"`` it is ``"e5m2fnuz"``.
      grad_weight: the format of the product that gives the gradient of the weights; `grad_input` if
        None.
      granularity: what shares a scale: ``"tensor"``, ``"row"``, ``"block"`` (1 x 128 of
        activations, 128 x 128 of weights), ``"mx"`` (32, with scales that are powers of two) or
        ``"nv"`` (1 x 16 of activations, 16 x 16 of weights, and all of it; of e2m1).
      rounding: of gradients in e2m1: ``"stochastic"`` or ``"nearest"``; see `nvfp4`.
      hadamard: of the operands of a weight gradient in e2m1: ``"random"``, ``"plain"`` or
        ``"none"``; see `nvfp4`.

    Returns:
      A `Recipe`.

    Raises:
      ValueError: if a format, granularity or option is unknown, or they do not go together.

    Example:
      >>> str(products("e4m3", "e5m2"))
      'e4m3:e5m2:e5m2'
      >>> str(products("bf16", "e2m1", granularity="nv"))
      'bf16:e2m1:e2m1@nv'
      >>> str(products("f32", "bf16"))
      'f32:bf16:bf16'
    """
    grad_input = forward if grad_input is None else grad_input
    grad_weight = grad_input if grad_weight is None else grad_weight
    return Recipe(forward, grad_input, grad_weight, granularity, rounding, hadamard)


def float8(gradient: str = "float8", *, granularity: str = "tensor") -> Recipe:
    """Returns the recipe of float8 products, in the format of three bits that the chip multiplies.

    That is e4m3 on NVIDIA's GPUs, TPU7x and where no chip says; e4m3b11fnuz on TPU v5e, v5p and
    v6e. The chip is this process's device, or the one that a program is traced for, as by
    `jaxmp.preflight`. What is stored, weights and state, does not depend on it.

    Args:
      gradient: the format of the gradient that comes in: ``"float8"`` or ``"e5m2"``.
      granularity: ``"tensor"``, or ``"row"`` where gradients span decades from row to row.

    Example:
      >>> str(float8()), str(float8("e5m2", granularity="row"))
      ('float8', 'float8:e5m2:e5m2@row')
    """
    return products("float8", gradient, granularity=granularity)


def int8() -> Recipe:
    """Returns the recipe of products of 8-bit integers, with one scale for each row.

    Example:
      >>> str(int8())
      'int8'
    """
    return products("int8", granularity="row")


def mxfp8() -> Recipe:
    """Returns the microscaling recipe: e4m3, with a power of two for every 32 summed values.

    Source: OCP Microscaling Formats (MX) Specification 1.0 (2023).

    Example:
      >>> mxfp8().granularity
      'mx'
    """
    return products("e4m3", granularity="mx")


def blockwise_float8() -> Recipe:
    """Returns DeepSeek-V3's recipe: e4m3, a scale for 1 x 128 activations and 128 x 128 weights.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.

    Example:
      >>> blockwise_float8().granularity
      'block'
    """
    return products("e4m3", granularity="block")


def nvfp4(*, rounding: str = "stochastic", hadamard: str = "random") -> Recipe:
    """Returns NVIDIA's recipe of 4 bits: e2m1, with an e4m3 scale for 16 values, and one for all.

    All three products are in 4 bits. Activations and gradients have a scale for 1 x 16, weights for
    16 x 16, so that the weights and their transpose are quantized alike. Inputs and weights are
    rounded to nearest even. The random bits of stochastic rounding are a hash of the values that
    are rounded: they differ from step to step as these do, without a key or state. Gradients that
    are the same to the bit are rounded alike, whether rematerialized, resumed or sharded.

    To leave a part of a model in 16 bits, as is usual for its last blocks, give it a policy without
    `matmul`. To train the last steps with a forward pass in bfloat16, compile a second step with
    ``products("bf16", "e2m1", granularity="nv")``.

    Args:
      rounding: of the gradients that come in: ``"stochastic"``, which is unbiased, or
        ``"nearest"``.
      hadamard: what rotates both operands of the product that gives the gradient of the weights, 16
        tokens at a time, which spreads outliers: ``"random"``, a Hadamard transform with NVIDIA's
        16 random signs, ``"plain"``, one without, or ``"none"``.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025), arXiv 2509.25149.

    Example:
      >>> str(nvfp4()), str(nvfp4(rounding="nearest", hadamard="plain"))
      ('nvfp4', 'nvfp4+nearest+plain_hadamard')
    """
    return products("e2m1", granularity="nv", rounding=rounding, hadamard=hadamard)


def mxfp4(*, rounding: str = "stochastic", hadamard: str = "random") -> Recipe:
    """Returns the microscaling recipe of 4 bits: e2m1, a power of two for every 32 summed values.

    Weights are quantized along the sums of each product. Otherwise it is as `nvfp4`, and so are its
    options. It is emulated on every chip: XLA dequantizes such operands itself.

    Source: OCP Microscaling Formats (MX) Specification 1.0 (2023).

    Example:
      >>> str(mxfp4(hadamard="none"))
      'mxfp4+no_hadamard'
    """
    return products("e2m1", granularity="mx", rounding=rounding, hadamard=hadamard)


_NAMES: Final = {
    float8(): "float8",
    int8(): "int8",
    mxfp8(): "mxfp8",
    mxfp4(): "mxfp4",
    nvfp4(): "nvfp4",
    blockwise_float8(): "blockwise_float8",
}
_NAMED: Final = {name: recipe for recipe, name in _NAMES.items()}


def parse_recipe(text: str) -> Recipe:
    """Returns the recipe of a string: a name, or ``e4m3:e5m2:bf16@row``, the formats in order.

    Options follow: ``nvfp4+nearest``, ``+plain_hadamard``, ``+no_hadamard``.

    Raises:
      ValueError: if it names nothing known, or cannot be read.

    Example:
      >>> parse_recipe("e4m3:e5m2:bf16@row") == products("e4m3", "e5m2", "bf16", granularity="row")
      True
    """
    name, *words = plain_name(text.strip()).split("+")
    options = {}
    for word in words:
        if word not in _OPTIONS:
            raise ValueError(
                f"products: {shown(text)} has the option {word!r}{did_you_mean(word, _OPTIONS)}; "
                f"the options are {', '.join(_OPTIONS)}"
            )
        field, value = _OPTIONS[word]
        if field in options:
            raise ValueError(f"products: {shown(text)} says {field} twice: say it once")
        options[field] = value
    if name in _NAMED:
        return dataclasses.replace(_NAMED[name], **options)
    formats, _, granularity = name.partition("@")
    parts = formats.replace("/", ":").split(":")
    if len(parts) > 3:
        raise ValueError(
            f"products: cannot read {shown(text)}: a layer has "
            f"three products, and {len(parts)} formats "
            "are given"
        )
    if len(parts) == 1 and not granularity and parts[0] not in _NAMES_OF_FORMATS:
        known = [*_NAMED, *FORMATS]
        raise ValueError(
            f"products: {shown(text)} names no recipe{did_you_mean(name, known)}; the names are "
            f"{', '.join(_NAMED)}, and 'e4m3:e5m2:e5m2@row' spells one out"
        )
    return products(*parts, granularity=granularity or "tensor", **options)


# A policy's `matmul` instead of a recipe: the one that the chip multiplies fast.
AUTO: Final = "auto"


def parse_matmul(text: str) -> Recipe | str:
    """Reads a policy's `matmul` from a string: a recipe, or ``auto``, which is kept as it is.

    ``auto`` is the recipe that the default device multiplies fast, for each layer for which it is
    estimated to be faster; ``auto@gpu-h100`` decides for another chip.

    Raises:
      ValueError: if it is neither, or names no chip.

    Example:
      >>> parse_matmul("auto@tpu-v5e"), str(parse_matmul("float8"))
      ('auto@tpu-v5e', 'float8')
    """
    try:
        auto = word_at_chip(text, AUTO)
    except ValueError as error:
        raise ValueError(f"products: {error}") from None
    return auto or parse_recipe(text)


def check_goes_with(matmul: Recipe | str | None, compute: str, what: str = "matmul") -> None:
    """Refuses formats that do not go with the dtype that a policy computes in.

    Args:
      matmul: a policy's `matmul`; a string is ``auto``.
      compute: the name of its compute dtype.
      what: its name in messages.

    Raises:
      ValueError: if it multiplies in 8 bits and computes in 32, says two dtypes forward, or mixes
        two 16-bit dtypes.

    Example:
      >>> check_goes_with(float8(), "bfloat16")
    """
    formats = matmul.formats if isinstance(matmul, Recipe) else {}
    narrow = [short for short in formats.values() if FORMATS[short].scaled]
    if (narrow or isinstance(matmul, str)) and compute not in ("bfloat16", "float16"):
        operands = narrow[0] if narrow else "in 8 bits"
        raise ValueError(
            f"{what}={str(matmul)!r} multiplies {operands}, and needs a compute_dtype of 16 "
            f"bits; got {compute}. Say compute_dtype='bfloat16'."
        )
    for field, short in formats.items():
        fmt = FORMATS[short]
        if field == "forward" and not fmt.scaled and fmt.name != compute:
            raise ValueError(
                f"{what}={str(matmul)!r} multiplies {fmt.name} forward, where "
                f"compute_dtype says {compute}: say one or the other."
            )
        if fmt.bits == 16 and compute not in (fmt.name, "float32"):
            raise ValueError(
                f"{what}={str(matmul)!r} has {field} in {fmt.name}, and compute_dtype is "
                f"{compute}: one 16-bit dtype has the other's range or precision, never both."
            )
