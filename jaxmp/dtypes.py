"""Names of floating dtypes, and the half-precision format that a device multiplies natively.

Example:
  >>> parse_dtype("bf16") is jnp.bfloat16
  True
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._core.printable import shown
from jaxmp.formats import ALL_FORMATS, Format

__all__ = [
    "DTYPE_NAMES",
    "compute_capability",
    "default_device",
    "did_you_mean",
    "dtype_name",
    "half_dtype",
    "is_dtype_name",
    "multiplies_natively",
    "parse_dtype",
    "parse_format",
    "plain_name",
    "short_dtype_name",
]

# Every dtype a policy can hold, the name it prints as first. The keys are JAX's scalar types, as
# jmp's policies hold them: unlike `np.dtype` objects they hash like the `jnp.float32` people write,
# can be called, and compare equal to every other spelling.
DTYPE_NAMES: Final[dict[Any, tuple[str, ...]]] = {
    getattr(jnp, ALL_FORMATS[short].name): ALL_FORMATS[short].names
    for short in ("bf16", "f16", "f32", "f64")
}

# "half" is a name too, but what it means depends on the device.
_DTYPE_BY_NAME = {name: dtype for dtype, names in DTYPE_NAMES.items() for name in names}
_DTYPE_BY_SCALAR = {np.dtype(dtype).type: dtype for dtype in DTYPE_NAMES}

# NVIDIA's tensor cores multiply bfloat16 since Ampere (compute capability 8.0); before it XLA
# converts the operands to float32 first.
_BFLOAT16_COMPUTE_CAPABILITY = (8, 0)
# AMD's since gfx908 (CDNA) and gfx11 (RDNA 3): XLA's RocmComputeCapability.has_bf16_dtype_support
# (xla/stream_executor/rocm/rocm_compute_capability.h).
_BFLOAT16_AMD = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def parse_dtype(value: DTypeLike, what: str = "dtype") -> Any:
    """Returns the JAX scalar type, such as `jnp.bfloat16`, that a name or dtype object stands for.

    Args:
      value: A name ("bf16", "bfloat16", "f16", "float16", "half", "full", "f32", "float32", "f64",
        "float64"; also "fp16", "fp32", "fp64"), in capitals or not; an `np.dtype`; or a scalar type
        such as `jnp.float32` or `np.float32`.
      what: What the dtype is for; error messages start with it.

    Returns:
      One of `jnp.bfloat16`, `jnp.float16`, `jnp.float32`, `jnp.float64`.

    Raises:
      ValueError: If the name is unknown, or the dtype is not a real floating one of 16, 32 or 64
        bits.
      TypeError: If `value` is neither a name nor a dtype. Python's `float` is refused because NumPy
        reads it as float64 and JAX, by default, as float32.

    Example:
      >>> parse_dtype("bf16").__name__, parse_dtype(np.dtype("float32")).__name__
      ('bfloat16', 'float32')
    """
    if isinstance(value, str):
        return _parse_name(value, what)
    scalar = _scalar_type(value)
    if scalar is None:
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        raise TypeError(
            f"{what}: takes a dtype or the name of one ({_all_names()}); got "
            f"{'the class' if isinstance(value, type) else 'a value of type'} {kind!r}."
        )
    if scalar in _DTYPE_BY_SCALAR:
        return _DTYPE_BY_SCALAR[scalar]
    raise ValueError(_unsupported(getattr(scalar, "__name__", str(scalar)), what))


def parse_format(value: Any, known: Iterable[Format], what: str, hint: str = "") -> Format:
    """Returns the format, of those known to the caller, that a name or dtype stands for.

    Args:
      value: A name, in capitals or not, or a dtype.
      known: The formats it may be.
      what: What the format is for; error messages start with it.
      hint: What the message about an unknown format ends with.

    Raises:
      ValueError: If it is none of them.
      TypeError: If `value` is neither a name nor a dtype.

    Example:
      >>> parse_format("fp8", ALL_FORMATS.values(), "format").name
      'float8_e4m3fn'
    """
    by_name = {name: fmt for fmt in known for name in fmt.names}
    printed = ", ".join(dict.fromkeys(fmt.short for fmt in by_name.values()))
    try:
        name = value if isinstance(value, str) else np.dtype(value).name
    except TypeError:
        name = None
    if name is None or value is None:
        raise TypeError(
            f"{what} takes a format ({printed}) or its dtype; got {shown(value)} of type "
            f"{type(value).__name__!r}."
        )
    if plain_name(name) not in by_name:
        raise ValueError(
            f"{what} is {shown(name)}, "
            f"which names no format{did_you_mean(plain_name(name), by_name)}; "
            f"the formats are {printed}.{hint}"
        )
    return by_name[plain_name(name)]


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the full name of a dtype, as NumPy spells it.

    Example:
      >>> dtype_name("bf16")
      'bfloat16'
    """
    return DTYPE_NAMES[parse_dtype(dtype)][-1]


def short_dtype_name(dtype: DTypeLike) -> str:
    """Returns the name a policy prints for a dtype.

    Example:
      >>> short_dtype_name(jnp.bfloat16), short_dtype_name(jnp.float32)
      ('bf16', 'f32')
    """
    return DTYPE_NAMES[parse_dtype(dtype)][0]


def plain_name(name: str) -> str:
    """Returns a name as jaxmp writes them: in lower case, with underscores.

    Example:
      >>> plain_name("BF16-mixed")
      'bf16_mixed'
    """
    return name.lower().replace("-", "_")


def is_dtype_name(name: str) -> bool:
    """Returns whether JAX has a dtype of this name, whether or not policies take it.

    Example:
      >>> is_dtype_name("bf16"), is_dtype_name("complex64"), is_dtype_name("mixed_bfloat16")
      (True, True, False)
    """
    if name == "half" or name in _DTYPE_BY_NAME:
        return True
    # `jnp` has more classes and attributes than dtypes; these are what dtypes' names start with.
    looks_like_one = name.startswith(("bool", "int", "uint", "float", "complex"))
    return looks_like_one and _scalar_type(getattr(jnp, name, None)) is not None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the known name nearest to an unknown one, or nothing.

    Example:
      >>> did_you_mean("b16", ["bf16", "f64"]), did_you_mean("mixed_bf", ["mixed_bfloat16"])
      (" (did you mean 'bf16'?)", " (did you mean 'mixed_bfloat16'?)")
    """
    if len(name) > 100:  # comparing takes square time
        return ""
    known = list(known)
    begun = [each for each in known if name and each.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def half_dtype(device: Any = None) -> Any:
    """Returns the 16-bit dtype that a device multiplies natively: bfloat16 where it can.

    bfloat16 has float32's range, so it needs no loss scaling; float16 is the answer only for GPUs
    that would emulate bfloat16: NVIDIA's before compute capability 8.0, AMD's before CDNA (gfx908)
    and RDNA 3 (gfx11), and GPUs whose compute capability is unknown.

    Args:
      device: A `jax.Device`, or a device of a topology description. By default the one that
        `jax.default_device` names, else the first local device, which starts the backend.

    Returns:
      `jnp.bfloat16` or `jnp.float16`.

    Example:
      >>> half_dtype(jax.local_devices(backend="cpu")[0]).__name__
      'bfloat16'
    """
    device = default_device() if device is None else _device("half_dtype", device)
    if device.platform in ("cpu", "tpu"):
        return jnp.bfloat16
    capability = compute_capability(device)
    if capability is None:
        native = str(getattr(device, "compute_capability", "")).startswith(_BFLOAT16_AMD)
    else:
        native = capability >= _BFLOAT16_COMPUTE_CAPABILITY
    return jnp.bfloat16 if native else jnp.float16


def multiplies_natively(dtype: DTypeLike, device: Any = None) -> bool:
    """Returns whether a device multiplies a 16-bit dtype natively, rather than through float32.

    A CPU counts as native in both, as it serves to try out programs. A TPU multiplies
    bfloat16 only, and every GPU float16; for bfloat16 on GPUs see `half_dtype`.

    Args:
      dtype: bfloat16 or float16, as a name or a dtype.
      device: As for `half_dtype`.

    Example:
      >>> multiplies_natively("float16", jax.local_devices(backend="cpu")[0])
      True
    """
    device = default_device() if device is None else _device("multiplies_natively", device)
    if parse_dtype(dtype, "multiplies_natively: dtype") == jnp.float16:
        return bool(device.platform != "tpu")
    return half_dtype(device) is jnp.bfloat16


def _device(function: str, device: Any) -> Any:
    if not hasattr(device, "platform"):
        raise TypeError(
            f"{function}: device must be a jax.Device, one of jax.devices(); got {shown(device)}."
        )
    return device


def default_device() -> Any:
    """Returns the device that `jax.default_device` names, else the first local one.

    Example:
      >>> default_device() in jax.local_devices()
      True
    """
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.local_devices()[0]


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Returns the CUDA compute capability; None if there is none ("gfx90a", other platforms).

    Example:
      >>> compute_capability(jax.local_devices(backend="cpu")[0])
    """
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return int(major), int(minor)


def _scalar_type(value: Any) -> type | None:
    """Returns the NumPy scalar type of a dtype or scalar type; None if `value` is neither."""
    if isinstance(value, np.dtype):
        return value.type
    if isinstance(value, type):
        # `jnp.float32` is a class that carries its dtype. Instances that do (arrays) are not
        # dtypes, though `np.dtype` would take them for one.
        if isinstance(getattr(value, "dtype", None), np.dtype):
            return np.dtype(value).type
        if issubclass(value, np.generic):
            return value
    return None


def _parse_name(name: str, what: str) -> Any:
    plain = plain_name(name)
    if plain == "half":
        return half_dtype()
    if plain in _DTYPE_BY_NAME:
        return _DTYPE_BY_NAME[plain]
    if is_dtype_name(plain):
        raise ValueError(_unsupported(name, what))
    names = [*_DTYPE_BY_NAME, "half"]
    raise ValueError(
        f"{what}: Unknown dtype {shown(name)}{did_you_mean(plain, names)}; "
        f"the names are {_all_names()}."
    )


def _unsupported(name: str, what: str) -> str:
    return (
        f"{what}: takes a real floating dtype of 16, 32 or 64 bits ({_all_names()}); got "
        f"{shown(name)}."
    )


def _all_names() -> str:
    return ", ".join(sorted([*_DTYPE_BY_NAME, "half"]))
