"""The numerics that a validation measures: the backend, its versions and its settings."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Final

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import setting
from jaxmp.dtypes import compute_capability, default_device
from jaxmp.policy import Policy, PolicyMap

_EXCESS: Final = re.compile(r"--xla_allow_excess_precision(?:=(\w+))?")


def describe_numerics() -> dict[str, str]:
    """Describes what determines the numerics here: hardware, versions, settings.

    Example:
      >>> describe_numerics()["matmul precision"]
      "JAX's default"
    """
    device = default_device()
    flags = os.environ.get("XLA_FLAGS", "").split()
    # The version is defined in the root package, which is imported before this module.
    version = vars(sys.modules["jaxmp"])["__version__"]
    return {
        "backend": device.platform,
        "device": f"{device.device_kind} ({jax.device_count()} in all)",
        "versions": f"jaxmp {version}, JAX {jax.__version__}, "
        f"jaxlib {metadata.version('jaxlib')}, Flax {flax.__version__}, optax {optax.__version__}, "
        f"NumPy {np.__version__}, Python {platform.python_version()}",
        "matmul precision": str(setting("jax_default_matmul_precision") or "JAX's default"),
        "excess precision": _excess_precision(flags),
        "64 bits": "on" if setting("jax_enable_x64") else "off",
        "random bits": str(setting("jax_default_prng_impl"))
        + ("" if setting("jax_threefry_partitionable") else ", not partitionable"),
        "XLA_FLAGS": " ".join(flags) or "none",
    }


def remarks_on(numerics: Mapping[str, str]) -> tuple[str, ...]:
    """Returns remarks on the numerics of a report, for its readers."""
    said = []
    default = numerics["matmul precision"] == "JAX's default"
    tf32 = (compute_capability(default_device()) or (0, 0)) >= (8, 0)
    if numerics["backend"] == "tpu" and default:
        said.append(
            "float32 here multiplies in one bfloat16 pass, as TPUs do by default; for a reference "
            'in true float32 set jax_default_matmul_precision to "highest"'
        )
    if numerics["backend"] in ("gpu", "cuda") and default and tf32:
        said.append(
            "float32 here may multiply in TF32, as NVIDIA GPUs do by default since Ampere; for a "
            'reference in true float32 set jax_default_matmul_precision to "highest"'
        )
    if numerics["excess precision"].startswith("allowed"):
        said.append(
            "excess precision is allowed: the compiler may leave out a rounding to 16 bits and "
            "back, so another backend may round more; XLA_FLAGS=--xla_allow_excess_precision=false "
            "forbids it"
        )
    if numerics["backend"] == "cpu":
        said.append(
            "these are a CPU's numerics, its order of sums and its float32 products of 16-bit "
            "operands; an accelerator's differ"
        )
    return tuple(said)


def check_cpu_sums(policies: Iterable[Any]) -> None:
    """Raises if the CPU backend's own error would be measured instead of a policy's.

    Raises:
      RuntimeError: on a CPU whose bfloat16 products are summed in bfloat16, if a policy may compute
        in it.
    """
    if default_device().platform != "cpu" or not any(map(_may_be_bfloat16, policies)):
        return
    if _sums_in_bfloat16():
        flag = compat.CPU_SUMS_FLAG or "--xla_cpu_experimental_ynn_fusion_type="
        raise RuntimeError(
            f"validate: on CPU, JAX {jax.__version__} sums some bfloat16 products in bfloat16, "
            "weight gradients among them: that would be measured instead of the policy. "
            f"Set XLA_FLAGS={flag} in the environment before the program starts, or "
            'with os.environ["XLA_FLAGS"] before anything is computed; python -m jaxmp validate '
            "does it by itself."
        )


def with_cpu_sums(flags: str | None) -> str:
    """Returns XLA_FLAGS with the flag that fixes a CPU's sums, if this JAX needs one.

    Example:
      >>> with_cpu_sums("--xla_a=1").startswith("--xla_a=1")
      True
    """
    words = (flags or "").split()
    if compat.CPU_SUMS_FLAG and compat.CPU_SUMS_FLAG not in words:
        words.append(compat.CPU_SUMS_FLAG)
    return " ".join(words)


@functools.cache
def _sums_in_bfloat16() -> bool:
    """Tests the backend: the flag may have been set too late, or a later JAX not need it."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(((x @ w).astype(jnp.float32) - 1) ** 2)

    # All of these are powers of two, and so are the sums: in float32 they are exact.
    x, w = jnp.ones((4, 256, 32), jnp.bfloat16), jnp.full((32, 32), 2 / 32, jnp.bfloat16)
    exact = jnp.full((32, 32), 2 / 32, jnp.bfloat16)
    return bool(jnp.any(jax.jit(jax.grad(loss))(w, x) != exact))


def _may_be_bfloat16(policy: Any) -> bool:
    if isinstance(policy, PolicyMap):
        return any(map(_may_be_bfloat16, (policy.default, *dict(policy.overrides).values())))
    if isinstance(policy, Policy):
        recipe = str(policy.matmul or "")
        return policy.compute_dtype == jnp.bfloat16 or "bf16" in recipe
    return True  # known to make_step alone


def _excess_precision(flags: Iterable[str]) -> str:
    found = [match for flag in flags if (match := _EXCESS.fullmatch(flag))]
    if not found:
        return "allowed (XLA's default)"
    off = (found[-1][1] or "true").lower() in ("false", "0")
    return f"{'off' if off else 'allowed'} (XLA_FLAGS)"
