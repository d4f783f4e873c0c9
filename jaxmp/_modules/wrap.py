"""`wrap`: a policy applied to a Flax module."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, TypeVar

import flax.linen as nn

from jaxmp._core.autocast.transform import autocast
from jaxmp._core.flax import nnx
from jaxmp._core.printable import shown
from jaxmp._modules.linen import wrap_linen
from jaxmp.policy import Policy, PolicyLike, PolicyMap, policy_or_default

T = TypeVar("T")


def wrap(
    module: T,
    policy: PolicyLike | None = None,
    *,
    params: str | Collection[str] = "params",
) -> T:
    """Wraps a Flax module, written in float32, so that its methods run under a policy.

    It is `jaxmp.autocast` lifted into Flax. The wrapped module is used as the module itself:

    * Linen: it has the same fields, names and variable tree, so parameters, checkpoints and
      optimizer masks go both ways. `init` creates parameters in ``param_dtype``; parameters that
      are stored in 16 bits are float32 values to the code of the module. All other collections
      (batch statistics, caches) keep their dtypes.
    * NNX: it shares the Variables of the module, at the same paths. What a call changes is changed
      in both. Attributes that are not Variables are its own: call `train()` and `eval()` on the
      wrapped module. Parameters stay as they are stored; see `Policy.cast_to_param`.
    * Any other callable: `autocast`.

    Every public method is wrapped, and so is a function given to `apply` as ``method``. The modules
    inside carry their policies: called past those methods, as in ``wrapped.encoder(x)`` (NNX) or
    ``wrapped.bind(variables).encoder(x)`` (Linen), each call is wrapped by itself. They run under
    the policy of the first of these that applies, with all that is inside them:

    1. a pattern or class of a `PolicyMap` that matches them;
    2. for a layer that its author singled out by ``dtype=float32``: float32. Comparable layers
       (those of its class; or else those with weights, and it is the exception there) were given
       another dtype or none. A dtype passed to every layer, or by the module around it, does not
       count: it is what the policy replaces. Nor does the default of a field of the layer, or of
       one around most layers that their dtype may have come from;
    3. the policy of the module they are in.

    `explain` and `audit` list the layers that stay float32 by 2. If they have more than a tenth of
    the FLOPs of matmuls and convolutions, the first call warns and says how to overrule it.

    A SpectralNorm estimates its norm in float32 under every policy; the layer inside it does not.

    A module wrapped inside a wrapped one, or inside an autocast, keeps its own policy. So does one
    that is itself wrapped once more, under another policy: a warning says so.

    Args:
      module: a Linen or NNX module, or a callable.
      policy: anything `get_policy` takes, a `PolicyMap` included. By default "mixed_half", the
        16-bit format that the default device multiplies natively; a line of log says which.
      params: the collections of a Linen module that hold parameters, such as
        ``("params", "lora")``: those are narrowed where they meet 16-bit values, and all other
        variables (averages, tables that are not trained) are not. In NNX it is every `nnx.Param`.

    Returns:
      A module of the same kind: an instance of a subclass of the module's class, of the same name.
      So are the modules inside. Its methods return float32 results in ``output_dtype``.

    Raises:
      TypeError: if `module` is a class or not callable, or `params` are not names, or not Linen's.
      ValueError: if the policy cannot be read, a Linen module is bound already, or a pattern of a
        `PolicyMap` matches no module (NNX: here; Linen: at the first call).

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxmp
      >>> model = jaxmp.wrap(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), "mixed_bfloat16")
      >>> x = jnp.ones((6, 8))
      >>> params = model.init(jax.random.key(0), x)
      >>> jaxmp.explain(model.apply, "float32")(params, x).products()
      {'bfloat16': 2}
    """
    if isinstance(policy, (nn.Module, nnx.Module)):
        raise TypeError("wrap: the module comes first, and then the policy: wrap(module, policy).")
    resolved = policy_or_default("wrap", policy)
    if isinstance(module, type):
        raise TypeError(
            f"wrap: takes a module, not the class {module.__name__}: wrap an instance, as in "
            f"jaxmp.wrap({module.__name__}(...), policy)."
        )
    collections = (params,) if isinstance(params, str) else params
    named = isinstance(collections, (tuple, list, set, frozenset)) and all(
        isinstance(name, str) for name in collections
    )
    if not named or not collections:
        raise TypeError(
            "wrap: params are the names of Linen's collections that hold parameters, 'params' or "
            f"('params', 'lora'); got {shown(params)}."
        )
    collections = tuple(collections)
    if params != "params" and not isinstance(module, nn.Module):
        raise TypeError(
            "wrap: params= is for Linen modules, which have collections. In an NNX module every "
            "nnx.Param is a parameter, subclasses included; in a function the arguments in "
            "argnums: jaxmp.autocast(fn, policy, argnums)."
        )
    _warn_if_wrapped(module, resolved)
    wrapped: Any
    if isinstance(module, nn.Module):
        wrapped = wrap_linen(module, resolved, collections)
    elif isinstance(module, nnx.Module):
        from jaxmp._modules.nnx import wrap_nnx  # noqa: PLC0415

        wrapped = wrap_nnx(module, resolved)
    elif not callable(module):
        raise TypeError(
            f"wrap: takes a Flax Linen or NNX module or a callable; got {type(module).__name__!r}."
        )
    else:
        wrapped = autocast(module, resolved)
    return wrapped  # type: ignore[no-any-return]


def _warn_if_wrapped(module: Any, policy: Policy | PolicyMap) -> None:
    """Warns if a module has another policy already, which stays in force."""
    before = getattr(type(module), "_jaxmp_policy", None)
    if before is None or before == policy:
        return
    was = "a PolicyMap" if isinstance(before, PolicyMap) else repr(str(before))
    warnings.warn(
        f"wrap: the {type(module).__name__} is wrapped already, under {was}: that stays in force "
        "for what it computes. Give the new policy to the module as it was before.",
        stacklevel=3,
    )
