"""Everything that differs between the JAX versions we support (0.10 to 0.12), and nothing else.

Inner jaxprs are `ClosedJaxpr` in some parameters and open `Jaxpr` in others up to 0.11; one merged
class from 0.12 on.

JAX's next generation of remat, custom_vjp, custom_jvp, checkpoint_name and scan (0.12, behind the
flags ``JAX_REMAT3=1`` and so on) is one primitive, ``call_hi_primitive``, with an object in its
parameters that holds the jaxpr. Not public; what we know of these objects is in this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core.primitives import remat_p
from jax.interpreters import ad

# Primitives that run one jaxpr once, operands and results one to one → the parameter it is in.
CALLS = {
    "jit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "shard_map": "jaxpr",
    "product_by_parameter": "jaxpr",  # our own: `parameter_products`
    "product_in_float32": "jaxpr",  # `float32_dot`
}

# The objects of `call_hi_primitive`, by class → the primitive they are the next generation of.
_NEXT = {
    "RematTraced": "remat2",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "CheckpointName": "name",
}

# Parameters that running an equation does not read: they are for its transformations.
TRANSFORMATION_RULES: dict[str, frozenset[str]] = {
    "remat2": frozenset({"policy"}),
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees"}),
    "custom_vmap_call": frozenset({"rule"}),
}

# `inline` of a jit that is to leave no trace in the jaxpr that calls it: an enum from 0.12 on,
# where True came to mean "inlined when lowered".
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

# The XLA flag under which the CPU backend sums all bfloat16 products in float32.
CPU_SUMS_FLAG = "--xla_cpu_experimental_ynn_fusion_type=" if jax.__version_info__ >= (0, 12) else ""

# `jax.linear_transpose` of JAX 0.12 takes either all operands of a function with a rule for
# constants, or none, so that each has a call of its own; loops of JAX 0.10 that are differentiated
# twice forget the rules, and are right only if one call has all of them.
RULE_PER_OPERAND = jax.__version_info__ >= (0, 12)

# The class of closed jaxprs: an alias of Jaxpr from 0.12 on, hidden from type checkers.
_CLOSED: Any = getattr(jex_core, "ClosedJaxpr", jex_core.Jaxpr)


class Closed(NamedTuple):
    """An open jaxpr and its constants, whichever class this JAX keeps them in."""

    jaxpr: Any
    consts: tuple[Any, ...]


def closed(jaxpr: Any) -> Closed:
    """Returns the open jaxpr and the constants of an inner jaxpr."""
    return Closed(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


def close(jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    """Closes an open jaxpr over its constants."""
    return _CLOSED(jaxpr, consts)


def part(jaxpr: Any, eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Returns an open jaxpr of some equations of another, with other operands and results."""
    return jaxpr.replace(
        eqns=list(eqns),
        invars=list(invars),
        outvars=list(outvars),
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """Returns a closed jaxpr with other equations of the same variables."""
    opened = closed(jaxpr).jaxpr.replace(eqns=list(eqns))
    return jaxpr.replace(jaxpr=opened) if hasattr(jaxpr, "jaxpr") else opened


def with_changed_equations(
    jaxpr: Any, change: Callable[[Any], Any], without: Sequence[Any] = ()
) -> Any:
    """Returns a jaxpr with other equations at any depth, of the same variables.

    Args:
      jaxpr: the jaxpr, open or closed.
      change: from an equation to the one in its place, or to None for none. The jaxprs in the
        parameters of that one are changed after it.
      without: equations whose effects the new jaxpr does not have.
    """
    effects = frozenset().union(*(eqn.effects for eqn in without))

    @functools.cache
    def program(jaxpr: Any) -> Any:
        opened = closed(jaxpr).jaxpr
        eqns = [inner(new) for eqn in opened.eqns if (new := change(eqn)) is not None]
        opened = opened.replace(eqns=eqns, effects=opened.effects - effects)
        return jaxpr.replace(jaxpr=opened) if hasattr(jaxpr, "jaxpr") else opened

    def inner(eqn: Any) -> Any:
        params = {name: parameter(value) for name, value in eqn.params.items()}
        return eqn.replace(params=params, effects=eqn.effects - effects)

    def parameter(value: Any) -> Any:
        if isinstance(value, tuple):  # the branches of a cond, the four jaxprs of a linear solve
            items = [parameter(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return program(value) if hasattr(value, "eqns") else value

    return program(jaxpr)


def dtype_of(atom: Any) -> np.dtype[Any] | None:
    """Returns the dtype of a variable or literal; None if it is not NumPy's (keys, tokens)."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) else None


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a variable or literal."""
    return tuple(atom.aval.shape)


def is_at_most(size: Any, limit: int) -> bool:
    """Returns whether a size is at most `limit`; False for the symbolic sizes of `jax.export`."""
    return isinstance(size, int) and size <= limit


def like(new: Any, old: Any) -> Any:
    """Returns `new`, as traced, as the class in which the equation held `old`: open or closed.

    Raises:
      TypeError: if `old` is open and `new` needs constants; autocast creates none.
    """
    if isinstance(new, type(old)):
        return new
    if closed(new).consts:
        raise TypeError("autocast: a transformed inner jaxpr needs constants where JAX allows none")
    return closed(new).jaxpr


def without_consts(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns a closed jaxpr with its constants as leading operands, and those constants."""
    opened, consts = closed(jaxpr)
    whole = part(opened, opened.eqns, (*opened.constvars, *opened.invars), opened.outvars)
    return close(whole.replace(constvars=[])), list(consts)


def without_values(jaxpr: Any) -> Any:
    """Returns an open jaxpr with None for the constants that it holds, from 0.12 on."""
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.replace(consts=[None] * len(consts)) if consts else jaxpr


def trace(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Traces `fn` (flat arrays to flat arrays) at `avals` to a closed jaxpr, in jit's trace cache.

    The cache is JAX's own, so it is keyed on everything a trace depends on: avals, mesh, axis
    names, x64, matmul precision. `fn` may be a `jax.jit` function, which keeps its cache between
    calls.
    """
    return trace_of_tree(fn, avals)[0]


def cached_trace(make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a function of `(avals, *args)` that traces the function `make(*args)` at `avals`.

    `make` is called once for each `args`, which are hashable, so that JAX's cache hits.
    """
    made = functools.lru_cache(maxsize=4096)(lambda *args: jax.jit(make(*args)))
    return lambda avals, *args: trace(made(*args), avals)


def trace_of_tree(fn: Callable[..., Any], avals: Sequence[Any]) -> tuple[Any, Any]:
    """Traces a function that returns a tree; returns the closed jaxpr and the tree's shapes."""
    traced = (fn if hasattr(fn, "trace") else jax.jit(fn)).trace(*avals)
    return traced.jaxpr, traced.out_info


def call_jaxpr(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the inner jaxpr of an equation whose primitive is in `CALLS`."""
    held = _held(eqn)
    return eqn.params[CALLS[eqn.primitive.name]] if held is None else _jaxpr_of(held)


# The next generation.


def kind(eqn: jex_core.JaxprEqn) -> str:
    """Returns the primitive's name; for a next-generation equation, its predecessor's."""
    held = _held(eqn)
    name = _NEXT.get(type(held).__name__) if held is not None else None
    if name is None or (name in CALLS and not _one_to_one(eqn, held)):
        return str(eqn.primitive.name)
    return name


def called(eqn: jex_core.JaxprEqn) -> str:
    """Returns a primitive's name for messages; for `call_hi_primitive`, the class of its object."""
    held = _held(eqn)
    return str(eqn.primitive.name) if held is None else type(held).__name__


def is_next_generation(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether an object in an equation's parameters has its jaxpr, as Scan3's."""
    return _held(eqn) is not None


def inner_jaxprs(eqn: jex_core.JaxprEqn) -> Iterator[Any]:
    """Yields every jaxpr in the parameters of an equation, also one that an object there holds."""
    yield from jex_core.jaxprs_in_params(eqn.params)
    if (held := _held(eqn)) is not None and (jaxpr := _jaxpr_of(held)) is not None:
        yield jaxpr


def jaxprs_run(eqn: jex_core.JaxprEqn) -> list[Any]:
    """Returns the inner jaxprs that running an equation runs: of a linear solve's four, `solve`."""
    if eqn.primitive.name == "custom_linear_solve":
        return [eqn.params["jaxprs"].solve]
    return list(inner_jaxprs(eqn))


def bind(eqn: jex_core.JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """Binds the primitive of an equation to other operands, with some parameters replaced."""
    if (held := _held(eqn)) is not None and kind(eqn) == "name":  # of operands of any dtype
        return [checkpoint_name(operands[0], held.name)]
    params = eqn.primitive.get_bind_params(eqn.params | replaced)
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def rematerialized(eqn: jex_core.JaxprEqn, fn: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns `fn` under the remat of a next-generation equation; None for other equations."""
    if (held := _held(eqn)) is None:
        return None
    return jax.checkpoint(fn, policy=held.policy, prevent_cse=held.prevent_cse)


def rematerialize(
    jaxpr: Any, operands: Sequence[Any], policy: Callable[..., bool], *, prevent_cse: bool
) -> list[Any]:
    """Runs an open jaxpr without constants under a `jax.checkpoint`; returns its results.

    Under `jax.checkpoint` itself, JAX differentiates a function at each call; a jaxpr, once.
    """
    return remat_p.bind(  # type: ignore[no-any-return]
        *operands, jaxpr=jaxpr, prevent_cse=prevent_cse, differentiated=False, policy=policy
    )


def widened(eqn: jex_core.JaxprEqn, n_ins: int, n_outs: int) -> dict[str, Any]:
    """Returns the parameters of a jit or remat that have an entry per operand or result, extended.

    The equation gets `n_ins` operands before its own, and `n_outs` results after its own.
    """
    if eqn.primitive.name == "jit":
        [plain] = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns
        of_ins = ("in_shardings", "in_layouts", "donated_invars")
        of_outs = ("out_shardings", "out_layouts")
        ins = {key: plain.params[key] * n_ins + tuple(eqn.params[key]) for key in of_ins}
        return ins | {key: tuple(eqn.params[key]) + plain.params[key] * n_outs for key in of_outs}
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, bool):
        return {}
    return {"prevent_cse": (True,) * n_ins + tuple(prevent_cse)}


class CustomRule(NamedTuple):
    """The parameters of a custom_jvp or custom_vjp equation that describe its rule."""

    name: str
    n_consts: int  # leading operands that the function closes over: not differentiated
    symbolic_zeros: bool


def custom_rule(eqn: jex_core.JaxprEqn) -> CustomRule:
    """Returns the name, closed-over operands and symbolic zeros of a custom derivative rule."""
    held, params = _held(eqn), eqn.params
    if held is None:
        name = params.get("name") or closed(params["call_jaxpr"]).jaxpr.debug_info.func_name
        return CustomRule(
            str(name), params.get("num_consts", 0), bool(params.get("symbolic_zeros"))
        )
    n_consts = len(jax.tree.leaves(held.in_avals[0]))
    return CustomRule(str(held.traced.fun_name), n_consts, bool(held.symbolic_zeros))


def symbolic_zero(aval: Any) -> Any:
    """Returns a cotangent that is known to be zero, for the function that `jax.vjp` returns."""
    return ad.Zero(aval.to_tangent_aval())


def _held(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the object that a `call_hi_primitive` equation keeps in its parameters, or None.

    Before 0.12 these objects tell too little about their jaxprs: such equations are unknown.
    """
    if jax.__version_info__ < (0, 12):
        return None
    return eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None


def _jaxpr_of(held: Any) -> Any:
    for name in ("traced", "traced_fwd"):
        held = getattr(held, name, held)
    return getattr(held, "jaxpr", None)


def _one_to_one(eqn: jex_core.JaxprEqn, held: Any) -> bool:
    """Returns whether an equation has its jaxpr's operands and results: a rule may have more."""
    jaxpr = closed(_jaxpr_of(held)).jaxpr
    shapes = [[getattr(v.aval, "shape", None) for v in of.invars] for of in (jaxpr, eqn)]
    return shapes[0] == shapes[1] and len(jaxpr.outvars) == len(eqn.outvars)


def scan_split(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a scan are constants and how many the carry (0.12 has trees)."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def scan_options(eqn: jex_core.JaxprEqn) -> dict[str, Any]:
    """Returns the options of a scan: its length, direction and unrolling."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def source_of(eqn: jex_core.JaxprEqn) -> AbstractContextManager[Any]:
    """Returns a context in which equations get the source line and name stack of `eqn`."""
    return source_info_util.user_context(
        eqn.source_info.traceback,
        name_stack=source_info_util.current_name_stack() + eqn.source_info.name_stack,
    )
