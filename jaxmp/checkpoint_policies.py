"""Policies for `jax.checkpoint`, `nn.remat` and `nnx.remat`: what to save for the backward pass.

Both save values that are expensive to compute, and rematerialize cheap ones: float32 copies, casts,
activation functions, masks, dropout's random bits, the results of a normalization or a softmax,
given its statistics. In mixed precision these are most of the residuals, since they are float32.

`products` saves the results of matmuls and convolutions, whichever dtype they multiply in, and

* the statistics of rows: sums and maxima that are much smaller than the rows;
* the masks of dropout, one byte per element in place of the four of its random bits;
* whatever is not known to be cheap: the results of a kernel, a callback, a collective or a solver,
  sorted and cumulative values. But no complex values: `jax.checkpoint` cannot save them.

`long_products` saves the same, but not the results of products over a short axis that are larger
than their operands: the scores of attention, contracted over the size of a head. They are the
largest arrays of a transformer, and multiplying them again takes a few percent of its FLOPs. It is
the policy of ``residuals=recompute`` in a `jaxmp.Policy`.

`offload_products` and `offload_long_products` save the same, in the memory of the host: a residual
is copied there in the forward pass, and back in the backward pass, so that it takes host memory and
time on the link. Statistics of rows, too small to be worth a copy each, stay on the device. The
second is the policy of ``residuals=offload``. It pays in scanned layers: where layers are unrolled,
compilers keep copies longer (`jaxmp.preflight`). JAX differentiates it once in reverse mode, also
under `jax.vmap` and `jax.jvp`; a gradient of a gradient is refused, "Expected cotangent type
float32[...] but got float32<host>[...]".

Use them without `prevent_cse=False`: the compiler would find that a rematerialized value was
computed before, and save that.

Example:
  >>> import jax, jax.numpy as jnp, jaxmp
  >>> def layer(w, x):
  ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
  >>> layer = jax.checkpoint(layer, policy=jaxmp.checkpoint_policies.products)
  >>> jax.grad(layer)(jnp.ones((4, 4)), jnp.ones((2, 4))).shape
  (4, 4)
"""

from __future__ import annotations

import math
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import Offloadable
from jax.extend.core import Primitive

from jaxmp._core.host_memory import HOST
from jaxmp._core.jaxprs.attributes import jaxprs_in
from jaxmp._core.jaxprs.compat import CALLS, closed, inner_jaxprs, is_at_most
from jaxmp._core.jaxprs.compiler_hints import no_excess_precision_p
from jaxmp._core.jaxprs.equation_parameters import checkpoint_name, dot_axes, reduced_shape
from jaxmp._core.jaxprs.primitive_table import Flag, flagged
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.printable import shown

__all__ = ["long_products", "offload_long_products", "offload_products", "products"]

# Rematerialized: JAX's primitives, and our own barrier. All others are saved.
_CHEAP = flagged(Flag.CHEAP) | {no_excess_precision_p.name}

# Of the rows of an array. Saved where they are much smaller than it, else rematerialized.
_STATISTICS = flagged(Flag.STATISTIC)
_MUCH_SMALLER = 8

# The longest axis that is short: the largest head of attention in use. Contracting it again takes
# fewer FLOPs per element of the result than an accelerator does while it writes and reads that.
_SHORT = 256

_TO_HOST = Offloadable(src="device", dst=HOST)
# The name (`jax.ad_checkpoint.checkpoint_name`) of what a program has copied to the host.
OFFLOADED: Final = "jaxmp_offloaded"


def products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """Saves the results of products and the statistics of rows; see the module.

    Args:
      primitive: the primitive that computes a value.
      *avals: the types of its operands.
      **params: its parameters.

    Returns:
      Whether the value is saved for the backward pass.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def loss(x, w):
      ...     return jnp.sum(jax.nn.gelu(x @ w))
      >>> kept = jax.checkpoint(loss, policy=jaxmp.checkpoint_policies.products)
      >>> float(jax.grad(kept)(jnp.ones((2, 3)), jnp.zeros((3, 4)))[0, 0])
      0.0

    Source: `jax.checkpoint_policies.dots_saveable`, which saves the products alone.
    """
    _check_called(primitive)
    name = primitive.name
    if any(map(_is_complex, avals)):
        return False
    if name in _STATISTICS:
        return not is_at_most(math.prod(reduced_shape(avals[0], params)), _MUCH_SMALLER - 1)
    if name == "lt":
        # As `jax.random.bernoulli` compares: a mask, made of random bits.
        return bool(avals[0].dtype.kind not in "biu")
    if name in CALLS:
        return not all(map(_is_cheap, jaxprs_in(params)))
    return name not in _CHEAP


def long_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """Saves the same as `products`, without the scores of attention; see the module.

    Those are the result of a product with a batch axis, such as the heads, that contracts an axis
    of at most 256 into more elements than both its operands have.

    Args:
      primitive: the primitive that computes a value.
      *avals: the types of its operands.
      **params: its parameters.

    Returns:
      Whether the value is saved for the backward pass.

    Example:
      >>> import flax.linen as nn, jaxmp
      >>> Layer = nn.remat(
      ...     nn.SelfAttention, policy=jaxmp.checkpoint_policies.long_products)

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
    (2022), section 5.
    """
    _check_called(primitive)
    if primitive.name == "dot_general" and _is_short(avals, params):
        return False
    return products(primitive, *avals, **params)


def offload_products(primitive: Primitive, *avals: Any, **params: Any) -> Any:
    """Saves what `products` saves, in host memory, but for the statistics of rows; see the module.

    Args:
      primitive: the primitive that computes a value.
      *avals: the types of its operands.
      **params: its parameters.

    Returns:
      What `jax.checkpoint` does with the value: copies it to the host, saves or rematerializes it.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def loss(x, w):
      ...     return jnp.sum(jax.nn.gelu(x @ w))
      >>> kept = jax.checkpoint(loss, policy=jaxmp.checkpoint_policies.offload_products)
      >>> float(jax.jit(jax.grad(kept))(jnp.ones((2, 3)), jnp.zeros((3, 4)))[0, 0])
      0.0

    Source: `jax.checkpoint_policies.offload_dot_with_no_batch_dims`.
    """
    return _offloading(products, primitive, avals, params)


def offload_long_products(primitive: Primitive, *avals: Any, **params: Any) -> Any:
    """Saves what `long_products` saves, in host memory, but for the statistics of rows.

    Args:
      primitive: the primitive that computes a value.
      *avals: the types of its operands.
      **params: its parameters.

    Returns:
      What `jax.checkpoint` does with the value: copies it to the host, saves or rematerializes it.

    Example:
      >>> import flax.linen as nn, jaxmp
      >>> Layer = nn.remat(
      ...     nn.SelfAttention, policy=jaxmp.checkpoint_policies.offload_long_products)
    """
    return _offloading(long_products, primitive, avals, params)


def is_offloaded(choice: Any) -> bool:
    """Returns whether a policy's choice for a value is to save it in host memory."""
    return isinstance(choice, Offloadable)


def _offloading(policy: Any, primitive: Primitive, avals: Any, params: Any) -> Any:
    _check_called(primitive)
    if checkpoint_name(primitive, params) == OFFLOADED:
        return _TO_HOST
    saves = policy(primitive, *avals, **params)
    return _TO_HOST if saves and primitive.name not in _STATISTICS else saves


def _check_called(primitive: Any) -> None:
    if not isinstance(primitive, Primitive):
        raise TypeError(
            f"jaxmp.checkpoint_policies: {', '.join(__all__)} are policies themselves, which "
            f"JAX calls with a primitive; got {shown(primitive)}. Write "
            "jax.checkpoint(fn, policy=jaxmp.checkpoint_policies.products)."
        )


def _is_short(avals: Any, params: Any) -> bool:
    """Returns whether a product contracts a short axis, in batches, into more than it reads."""
    (contracted, _), (batch, _) = dot_axes(params)
    left, right = (aval.shape for aval in avals[:2])
    if not batch or not all(isinstance(size, int) for size in (*left, *right)):
        return False  # the symbolic sizes of `jax.export` are not known
    length = math.prod(left[i] for i in contracted)
    read = math.prod(left) + math.prod(right)
    pairs = math.prod(left) * math.prod(right)
    result = pairs // max(1, length**2 * math.prod(left[i] for i in batch))
    return bool(length <= _SHORT and result > read)


def _is_cheap(jaxpr: Any) -> bool:
    """Returns whether all in a jaxpr is cheap to rematerialize, or a statistic of rows."""
    for eqn in equations(closed(jaxpr).jaxpr.eqns):
        known = eqn.primitive.name in _CHEAP | _STATISTICS or any(True for _ in inner_jaxprs(eqn))
        if not known and not any(_is_complex(v.aval) for v in eqn.invars):
            return False
    return True


def _is_complex(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, np.complexfloating)
