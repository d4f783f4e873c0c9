"""Policies: the dtypes of parameters, computation and outputs, as plain data.

A `Policy` is a `jmp.Policy`, so libraries that take one of those (Haiku, for one) take ours.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast, overload

import jax.numpy as jnp
import jmp
from jax.typing import DTypeLike

from jaxmp._core.policy_keys import LayerRange, check_key, covers, key_matches, ranged, shadowed
from jaxmp._core.printable import shown
from jaxmp.dtypes import default_device, dtype_name, parse_dtype
from jaxmp.policy_fields import FIELDS, check_weights, format_policy, parse_policy
from jaxmp.recipes import Recipe
from jaxmp.tree import cast_floating

__all__ = ["Policy", "PolicyLike", "PolicyMap", "get_policy"]

T = TypeVar("T")

# The functions that take a policy, but not a function with arguments.
_OF_MODULES = ("get_policy", "wrap", "prepare", "PolicyMap", "TrainState.create")


@dataclasses.dataclass(frozen=True, repr=False)
class Policy(jmp.Policy):  # type: ignore[misc]  # jmp ships no types
    """The dtypes that a model stores, multiplies in and returns.

    Policies are immutable, hashable, comparable and picklable; two are equal when they mean the
    same, however their dtypes were written. `str(policy)` is its name and its other settings,
    as `get_policy` reads it, and `dataclasses.replace` makes a changed copy.

    Attributes:
      param_dtype: The dtype that parameters are stored in. Under float64 the policy governs float64
        values, which `jaxmp.autocast` then narrows in the place of float32.
      compute_dtype: The dtype that products (matmuls, convolutions) multiply in.
      output_dtype: The dtype that the transformed function returns.
      softmax_dtype: The dtype of the exponential and the division of a softmax: float32, or the
        compute dtype, which saves the memory of a float32 copy of every attention matrix. The sum
        is float32 either way.
      reduce_dtype: The dtype in which the gradients of float32 parameters leave their products and
        lookups, and in which they are summed over devices: float32, or the compute dtype, with half
        the bytes to send. On GPUs a convolution's leave it in the compute dtype either way: XLA has
        no other convolution of 16-bit operands there.
      reduce_scatter_dtype: The dtype in which devices send gradients that are summed in float32,
        where that can be chosen: for arrays that `lax.all_gather` gathers under `jax.shard_map`.
        The compute dtype halves their bytes, and rounds each device's part once.
      saturate: Whether to clip computed values beyond the range of the compute dtype, which for
        float16 ends at 65504. False leaves them infinite: the gradients are then not finite, and a
        loss scaler skips the step. True clips them to the largest finite value, where they are
        narrowed and where a float16 operation returns them, so that the step is made with a result
        that may be wrong; `jaxmp.explain` says where. The gradient ignores the clipping, and
        gradients themselves are not clipped. Infinities that are not an overflow pass: a mask's,
        log(0) and 1/0, but not through a product. (Literals and masks, such as an attention mask's
        -1e9, are clipped either way.)
      matmul: The format in which each of a layer's three products multiplies: a recipe, such as
        `jaxmp.recipes.float8()`, or its string, such as "float8"; None for the compute dtype.
        "auto" is the recipe that the default device multiplies fast, for the layers for which it is
        estimated to pay; "auto@gpu-h100" decides for another chip. `jaxmp.explain` says what it
        took, and why.
      weights: The few bits that weights are trained for (quantization-aware training), as they will
        be stored by `jaxmp.quantize(params, policy)`: "int8", "int4", "float8" or "e2m1", and what
        shares a scale: "int4@row", "int4@tensor", "int4@32", blocks of so many; None: the dtype
        that they have. The matrices of at least 4,096 elements among the parameters are rounded,
        from the values that they have, where the model reads them: the forward pass is, to the bit,
        the served one, and the gradient ignores the rounding. A product multiplies them in the
        compute dtype.
      activations: The 8 bits in which activations are multiplied with weights in few bits, those
        that are trained with `weights` and those that `jaxmp.quantize` stored with one scale for
        each sum: "int8", with integers, or "float8", with floats; None: the compute dtype. Each row
        has a scale of its own, from its largest magnitude; in "int8@static" and "float8@static",
        each weight has one for its inputs, which `jaxmp.quantize` found from batches (`calibrate`)
        and beyond which they are clipped. Their gradient ignores the rounding.
      residuals: What is saved for the backward pass: "save", whatever JAX finds that it reads, or
        "recompute", what `jaxmp.checkpoint_policies.long_products` saves: float32 and
        elementwise values are rematerialized. That saves memory and takes time: more of it on TPUs,
        where XLA rematerializes much by itself. "offload" saves the same in the memory of the host,
        but for the statistics of rows: each array moves over the host's link and back. That is for
        scanned layers, and is differentiated once. Neither has an effect where the program has a
        `jax.checkpoint` of its own; they cannot see one around the transformed function, which is
        not needed. `jaxmp.explain` says where, `jaxmp.preflight` what is saved and what it costs. A
        `jaxmp.QuantizedArray` that a product reads is saved as it is stored.
      attention: What computes attention: None, the program's own operations; or "fused", the kernel
        of the default device (cuDNN's on NVIDIA from compute capability 8.0, Pallas' on TPU), which
        saves no array of scores; "fused@gpu-h100" is another chip's. It sums in another order
        and rounds at other places, and has only a first, reverse-mode derivative. It is not used
        where it does not fit, and `jaxmp.explain` and `jaxmp.audit` say where and why. On several
        TPUs it needs `jax.shard_map(check_vma=False)`: no compiler splits Pallas' kernels.
      ops: Overrides of how `jaxmp.autocast` treats single primitives: a mapping from a primitive,
        or the name of one, to one of the classes in `jaxmp.policy_fields.OP_CLASSES`. Kept
        as a sorted tuple of (primitive name, class) pairs.

    The dtypes are float32 unless they are given, as names or dtype objects, see
    `jaxmp.dtypes.parse_dtype`; they are kept as JAX's scalar types, such as `jnp.bfloat16`.

    Raises:
      ValueError: If a dtype is not a real floating one of 16, 32 or 64 bits, `softmax_dtype`,
        `reduce_dtype` or `reduce_scatter_dtype` is neither float32 nor the compute dtype, `matmul`
        has formats that do not go with the compute dtype or with `weights`, `weights` names no
        format, `residuals` is none of "save", "recompute" and "offload", `attention` is not "fused"
        or names no chip, or `ops` names an unknown class.
      TypeError: If a dtype is neither a name nor a dtype, `saturate` is not a bool, `matmul` is not
        a recipe, or `ops` is not such a mapping.

    Example:
      >>> policy = Policy(compute_dtype="bfloat16", ops={"exp": "promote"})
      >>> policy
      get_policy('mixed_bfloat16,ops=exp:promote')
      >>> str(policy)
      'mixed_bfloat16,ops=exp:promote'
    """

    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    output_dtype: DTypeLike = jnp.float32
    softmax_dtype: DTypeLike = dataclasses.field(default=jnp.float32, kw_only=True)
    reduce_dtype: DTypeLike = dataclasses.field(default=jnp.float32, kw_only=True)
    reduce_scatter_dtype: DTypeLike = dataclasses.field(default=jnp.float32, kw_only=True)
    saturate: bool = dataclasses.field(default=False, kw_only=True)
    # Typed loosely: given as strings, too, and kept as a recipe and a format.
    matmul: Any = dataclasses.field(default=None, kw_only=True)
    weights: Any = dataclasses.field(default=None, kw_only=True)
    activations: str | None = dataclasses.field(default=None, kw_only=True)
    residuals: str = dataclasses.field(default="save", kw_only=True)
    attention: str | None = dataclasses.field(default=None, kw_only=True)
    # Likewise: given as a mapping and kept as a tuple.
    ops: Any = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        first = self.param_dtype
        if isinstance(first, str) and ("mixed" in first or "=" in first):
            raise ValueError(
                f"Policy: takes dtypes, and {shown(first)} is the name of a policy: "
                f"jaxmp.get_policy({shown(first)})."
            )
        for field in FIELDS:
            value = field.read(getattr(self, field.name), f"Policy: {field.name}")
            object.__setattr__(self, field.name, value)
        compute = dtype_name(self.compute_dtype)
        for field in FIELDS:
            if field.check is not None:
                field.check(getattr(self, field.name), compute, f"Policy: {field.name}")
        check_weights(self.weights, self.activations, self.matmul)

    def cast_to_param(self, x: T) -> T:
        """Casts floating leaves to `param_dtype`; see `jaxmp.tree.cast_floating` for which."""
        return cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: T) -> T:
        """Casts floating leaves to `compute_dtype`; see `jaxmp.tree.cast_floating` for which."""
        return cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: T) -> T:
        """Casts floating leaves to `output_dtype`; see `jaxmp.tree.cast_floating` for which."""
        return cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns this policy with another output dtype.

        Example:
          >>> str(get_policy("mixed_bfloat16").with_output_dtype("bf16"))
          'p=f32,c=bf16,o=bf16'
        """
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        return format_policy(self)

    def __repr__(self) -> str:
        return f"get_policy({str(self)!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class PolicyMap:
    """The policy that each module of a model runs under, by its path or its class.

    A pattern is a glob over the module path as the parameter tree shows it, matched component by
    component: `"head"`, `"encoder/layers_*/norm*"`. `**` stands for any number of components, none
    included. A key may also be a module class, which matches its instances. A module that several
    keys match has the policy of the first. It holds for everything inside the module, except where
    a key matches a module further inside. All else runs under `default`.

    Layers that one `nn.scan` runs are one module. `"layers[:2]"` is its first two, `"layers[-1:]"`
    its last, `"layers[0:2]/mlp"` a module inside the first two: the scan runs in parts, each
    under its own policies. Its parameters are one stack, so that with such a key all policies of
    the map have the same `param_dtype` and `weights`. (Linen's; not for NNX modules.)

    Of the policies of modules inside, `compute_dtype` and the refinements count: the wrapped model
    returns the `output_dtype` of its own policy, and a float32 module passes on float32.

    Maps are immutable, hashable and comparable, and picklable if their classes are. `jaxmp.wrap`
    takes them, and raises if a pattern matches no module, or only those that keys before it match;
    paths are relative to the wrapped module.

    Attributes:
      overrides: A mapping from patterns and classes to policies (or what `get_policy` reads as
        one), in order of precedence. Kept as a tuple of (key, Policy) pairs.
      default: The policy, or what `get_policy` reads as one, of the modules no key matches.

    Raises:
      ValueError: If a pattern is empty or has an empty component, a range of layers has none, a
        policy cannot be read or does not go with ranges, or a key has no effect, since one before
        it matches all that it does.
      TypeError: If `overrides` is not a mapping, or a key is neither a string nor a class.

    Example:
      >>> policies = PolicyMap({"head": "float32"}, default="mixed_bfloat16")
      >>> policies.policy_at(("head",)), policies.policy_at(("block_0", "Dense_0"))
      (get_policy('float32'), None)
    """

    overrides: Any
    default: Any = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        overrides = self.overrides
        pairs = tuple(overrides.items()) if isinstance(overrides, Mapping) else overrides
        # Pairs are how a map keeps them: `dataclasses.replace` hands them back.
        if not (
            isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
        ):
            raise TypeError(
                "PolicyMap: overrides takes a mapping from path patterns or module classes to "
                f"policies; got {shown(overrides)} of type {type(overrides).__name__!r}."
            )
        for key, _ in pairs:
            check_key(key)
        read = tuple((key, single_policy("PolicyMap", policy)) for key, policy in pairs)
        for i, (key, policy) in enumerate(read):
            for before, other in read[:i]:
                if policy != other and covers(before, key):
                    raise ValueError(f"PolicyMap: {shadowed(key, [before])}")
        object.__setattr__(self, "overrides", read)
        object.__setattr__(self, "default", single_policy("PolicyMap: default", self.default))
        self._check_stacks()

    def _check_stacks(self) -> None:
        """Raises if a key has a range, and the policies would store one stack in several ways."""
        key = next((key for key, _ in self.overrides if ranged(key)), None)
        if key is None:
            return
        for name in ("param_dtype", "weights"):
            said = {getattr(p, name): None for p in (self.default, *dict(self.overrides).values())}
            if len(said) > 1:
                values = " and ".join(shown(str(getattr(v, "__name__", v))) for v in said)
                raise ValueError(
                    f"PolicyMap: the key {shown(key)} is for some layers of a scan, whose "
                    f"parameters are one array; the policies have {name} {values}. Give all the "
                    "same."
                )

    def policy_at(
        self, path: Sequence[str] | None, module_class: type | None = None
    ) -> Policy | None:
        """Returns the policy of the first key that matches a module, or None if none does.

        Keys with a range match no module as a whole; see `layer_policies_at`.

        Args:
          path: The module's path, one string per component; empty for the outermost module; None
            if it is not known.
          module_class: Its class.
        """
        for key, policy in self.overrides:
            if key_matches(key, path, module_class):
                return cast("Policy", policy)
        return None

    def layer_policies_at(
        self, path: Sequence[str], module_class: type | None = None
    ) -> list[tuple[str, LayerRange, Policy]]:
        """Returns the policies of some layers for a module that a scan runs, last match first.

        Each comes with the path of the scan's module, and the range of layers.
        """
        found: list[tuple[str, LayerRange, Policy]] = []
        for key, policy in self.overrides:
            if key_matches(key, path, module_class):
                break  # for all layers: later keys have no effect
            parts = ranged(key)
            if parts is not None and key_matches(parts.pattern, path):
                # `**` stands for any number of components: the scan's path is the one that matches.
                scan = next(
                    path[:i] for i in range(len(path) + 1) if key_matches(parts.scan, path[:i])
                )
                found.insert(0, ("/".join(scan), parts.layers, policy))
        return found

    def has_layers(self, path: Sequence[str]) -> bool:
        """Returns whether some key has a range of the layers of the module at a path."""
        parts = (ranged(key) for key, _ in self.overrides)
        return any(part is not None and key_matches(part.scan, path) for part in parts)

    def keys_of(
        self, path: Sequence[str] | None, module_class: type | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the keys that match a module: those with its policy, and those without effect."""
        in_force: list[Any] = []
        others: list[Any] = []
        first: Policy | None = None  # of all layers
        for key, policy in self.overrides:
            parts = ranged(key)
            if key_matches(parts.pattern if parts else key, path, module_class):
                (in_force if first in (None, policy) else others).append(key)
                first = first if parts or first else policy
        return in_force, others

    def __repr__(self) -> str:
        names = {k if isinstance(k, str) else k.__name__: str(v) for k, v in self.overrides}
        return f"PolicyMap({names!r}, default={str(self.default)!r})"


PolicyLike: TypeAlias = str | jmp.Policy | PolicyMap | DTypeLike
"""What `get_policy` reads: a string, a `Policy`, a `PolicyMap`, a `jmp.Policy`, or a dtype."""


def policy_or_default(where: str, spec: PolicyLike | None) -> Policy | PolicyMap:
    """Returns the policy that `get_policy` reads; for None, "mixed_half", which is then logged.

    Example:
      >>> policy_or_default("wrap", "float32")
      get_policy('float32')
    """
    if spec is not None:
        return read_policy(where, spec)
    policy = get_policy("mixed_half")
    logging.getLogger("jaxmp").warning(
        "%s: no policy was named; on this %s it is %s.", where, default_device().platform, policy
    )
    return policy


def single_policy(where: str, spec: PolicyLike) -> Policy:
    """Returns the policy that `get_policy` reads, which must not be a map of them.

    Example:
      >>> single_policy("audit", "float32")
      get_policy('float32')
    """
    policy = read_policy(where, spec)
    if isinstance(policy, PolicyMap):
        raise TypeError(
            f"{where}: takes one policy; a PolicyMap is for the modules inside a Flax module, and "
            f"for jaxmp.wrap. Got {shown(spec)}."
        )
    return policy


@overload
def get_policy(spec: PolicyMap) -> PolicyMap: ...
@overload
def get_policy(spec: str | jmp.Policy | DTypeLike) -> Policy: ...
def get_policy(spec: PolicyLike) -> Policy | PolicyMap:
    """Returns the policy that a string, another policy or a dtype describes.

    A string is one of

    * a name: "mixed_bfloat16", "mixed_float16" and "mixed_half" (float32 parameters and outputs,
      16-bit compute), or a dtype ("float32", "bf16", …) for parameters, compute and outputs
      alike. Capitals and hyphens do not matter, and PyTorch Lightning's names for the same are
      understood: "bf16-mixed", "16-mixed", "bf16-true";
    * jmp's form, "p=f32,c=bf16,o=f32" or "params=float32,compute=bfloat16,output=float32", where
      parameters default to float32, compute to the parameters' dtype and output to the compute
      dtype;
    * either of them with refinements: "mixed_bfloat16,softmax=bf16", "mixed_bfloat16,reduce=bf16",
      "mixed_bfloat16,residuals=recompute", "mixed_bfloat16,attention=fused",
      "mixed_float16,saturate=true,ops=exp:promote|my_primitive:full_precision". In the names of
      primitives "%3A" stands for ":" and so on, as in a URL.

    As a dtype, "half" is bfloat16 where the default device multiplies it natively, else float16;
    see `jaxmp.dtypes.half_dtype`. So is the compute dtype of "mixed_half". The policy has the one
    that was chosen in it, and so has its string. Alone, "half" and "fp16" are refused: by one
    library they mean mixed precision, by another 16 bits throughout.

    Args:
      spec: The string; a `Policy` or `PolicyMap`, returned as it is; a `jmp.Policy`, converted; or
        a dtype object, which means what its name does.

    Raises:
      ValueError: If the string names nothing known, or cannot be read; the message says where.
      TypeError: If `spec` is none of these.

    Example:
      >>> get_policy("mixed_bfloat16,softmax=bf16")
      get_policy('mixed_bfloat16,softmax=bf16')
      >>> get_policy("c=f16") == get_policy("params=float32,compute=float16,output=float16")
      True
    """
    return read_policy("get_policy", spec)


def read_policy(where: str, spec: PolicyLike) -> Policy | PolicyMap:
    """Reads as `get_policy` does, for the function that `where` names in messages."""
    if isinstance(spec, (Policy, PolicyMap)):
        return cast("Policy | PolicyMap", spec)
    if isinstance(spec, jmp.Policy):
        return Policy(spec.param_dtype, spec.compute_dtype, spec.output_dtype)
    if isinstance(spec, str):
        return Policy(**parse_policy(spec))
    if isinstance(spec, Recipe):
        raise TypeError(
            f"{where}: {str(spec)!r} is a recipe, the matmul of a policy: say "
            f"'mixed_bfloat16,matmul={spec}', or Policy(..., matmul=recipe)."
        )
    hint = ""
    if not where.startswith(_OF_MODULES):
        hint = f" The arguments of a function go into a second call: {where}(fn, policy)(*args)."
    if isinstance(spec, dict):
        hint = f" For policies by path: jaxmp.PolicyMap(paths, default=policy).{hint}"
    elif callable(spec) and not isinstance(spec, type):
        hint = " The function or module comes first, the policy second: are the two swapped?"
    try:
        dtype = parse_dtype(spec, where)
    except TypeError:
        raise TypeError(
            f"{where}: a policy is a string such as 'mixed_bfloat16' or 'p=f32,c=bf16,o=f32', a "
            f"Policy, a jmp.Policy or a dtype; got {shown(spec)} "
            f"of type {type(spec).__name__!r}.{hint}"
        ) from None
    return Policy(dtype, dtype, dtype)
