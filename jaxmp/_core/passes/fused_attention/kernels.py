"""The kernels that compute attention on a chip, and the arrays that each of them supports.

Arrays are ``[batch, length, heads, features]``; there may be more heads of queries than of keys, in
groups that share one. A bias and a mask are ``[batch, heads, queries, keys]``, of size 1 along axes
that they broadcast over. On a platform other than the kernel's, the same attention runs without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core.jaxprs.compat import cached_trace
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.plan.rules import FLOAT16
from jaxmp._core.speed import Chip


class KernelCall(NamedTuple):
    """The parameters of attention, apart from its arrays.

    Attributes:
      scale: the factor of the scores.
      causal: whether each query attends only to the keys up to its own position.
    """

    scale: float
    causal: bool


class Kernel(NamedTuple):
    """A kernel for attention.

    Attributes:
      name: its name in messages.
      platform: JAX's name of the platform that it is compiled for.
      run: computes attention from a `KernelCall`, queries, keys, values, and a bias and a mask,
        each may be None.
    """

    name: str
    platform: str
    run: Callable[..., Any]


def library(
    call: KernelCall,
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: Any = "cudnn",
    mapped: bool = False,
) -> Any:
    """Computes attention by `jax.nn`; refuses vmap with a mask or bias that all heads share."""
    lengths, shared = (q.shape[1], k.shape[1]), [x for x in (bias, mask) if x is not None]
    if not mapped and q.shape[2] > 1 and any(x.shape[1] == 1 for x in shared):
        q = _unmapped(q)
    bias, mask = (
        None if x is None else jnp.broadcast_to(x, (*x.shape[:2], *lengths)) for x in (bias, mask)
    )
    return jax.nn.dot_product_attention(
        q, k, v, bias, mask, scale=call.scale, is_causal=call.causal, implementation=implementation
    )


# Without a kernel: the softmax between the products is in float32.
plain = functools.partial(library, implementation="xla", mapped=True)


@jax.custom_batching.custom_vmap
def _refuse_map(q: Any) -> Any:
    return q


@_refuse_map.def_vmap
def _(_size: int, _mapped: Any, _q: Any) -> Any:
    raise NotImplementedError(
        "autocast: cuDNN's attention is not mapped with a mask or bias that all heads share. Write "
        "jaxmp.autocast(jax.vmap(f), policy) in the place of jax.vmap(jaxmp.autocast(f, policy)), "
        "or leave attention='fused' out of the policy"
    )


@jax.custom_vjp
def _unmapped(q: Any) -> Any:
    """Returns the queries, which refuse vmap: JAX would then lay out a mask for each head."""
    return _refuse_map(q)


_unmapped.defvjp(lambda q: (_refuse_map(q), None), lambda _, tangent: (tangent,))


def flash(call: KernelCall, q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None) -> Any:
    """Computes attention by the kernel for TPUs that comes with JAX.

    Raises:
      NotImplementedError: for a bias, a mask or float16, or a length not a multiple of `_BLOCK`.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention  # noqa: PLC0415 (slow to load)

    if bias is not None or mask is not None:
        # The kernel takes them as an array as large as the scores, with a gradient as large.
        raise NotImplementedError("it supports no bias, and of masks the causal one only")
    if q.dtype == FLOAT16:
        raise NotImplementedError("TPUs do not multiply float16")
    for name, n in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if n % _BLOCK:
            raise NotImplementedError(f"{n} {name} are not a multiple of {_BLOCK}")
    shared = q.shape[2] // k.shape[2]
    q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, shared, axis=1) if shared > 1 else x for x in (k, v))
    out = flash_attention.flash_attention(q, k, v, causal=call.causal, sm_scale=call.scale)
    return jnp.moveaxis(out, 1, 2)


_BLOCK = 128
CUDNN = Kernel("cuDNN", "cuda", library)
FLASH = Kernel("Pallas", "tpu", flash)


def kernel_of(chip: Chip) -> Kernel | None:
    """Returns the kernel of a chip; None if it has none.

    Example:
      >>> from jaxmp._core.speed import chip_named
      >>> [getattr(kernel_of(chip_named(n)), "name", None) for n in ("gpu-h100", "gpu-t4")]
      ['cuDNN', None]
    """
    if chip.platform == "tpu":
        return FLASH
    # From compute capability 8.0 on, as for bfloat16.
    return CUDNN if chip.compiler == "cuda" and chip.sixteen_bits == "bfloat16" else None


def refusal(kernel: Kernel, call: KernelCall, arrays: Sequence[Any], *, varying: bool) -> str:
    """Returns why a kernel refuses attention, forward or backward, in its words; or empty.

    `arrays` are the types of its operands, `varying` if known to differ over mesh axes, as under
    `jax.shard_map`.
    """
    if varying and kernel is FLASH:
        why = "it does not say over which devices its result differs: say check_vma=False"
        return f"{kernel.name} refuses it: {why}"
    try:
        _with_gradient(arrays, kernel, call)
    except _REFUSALS as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        return f"{kernel.name} refuses it: {said or type(error).__name__}"
    return ""


# The exceptions that kernels raise for unsupported attention.
_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)


@cached_trace
def _with_gradient(kernel: Kernel, call: KernelCall) -> Callable[..., Any]:
    def both(q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None) -> Any:
        out, back = jax.vjp(lambda *floats: kernel.run(call, *floats, mask), q, k, v, bias)
        return back(out)

    return both


@functools.lru_cache(maxsize=256)
def attention(kernel: Kernel, call: KernelCall) -> Callable[..., Any]:
    """Returns attention by a kernel, which can be differentiated once, in reverse mode.

    Returns:
      A function of queries, keys, values, a bias and a mask, to an array like the queries.
    """
    # The casts are not the author's. On other platforms nothing as large as the scores is saved.
    ours = jax.named_scope(CAST)
    elsewhere = jax.checkpoint(ours(functools.partial(plain, call)), prevent_cse=False)
    branches = {kernel.platform: ours(functools.partial(kernel.run, call))}

    def run(*arrays: Any) -> Any:
        return lax.platform_dependent(*arrays, default=elsewhere, **branches)

    @jax.custom_vjp
    def fused_attention(*arrays: Any) -> Any:
        return run(*arrays)

    fused_attention.defvjp(lambda *arrays: jax.vjp(run, *arrays), _once)
    return fused_attention


@jax.custom_jvp
def _once(back: Callable[[Any], Any], tangent: Any) -> Any:
    """Runs a backward pass, which has no derivative itself."""
    return back(tangent)


@_once.defjvp
def _(_primals: Any, _tangents: Any) -> Any:
    raise NotImplementedError(
        "autocast: the kernel of fused attention has a first derivative, and no second one. Leave "
        "attention='fused' out of the policy where a gradient is differentiated"
    )
