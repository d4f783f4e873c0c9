"""What JAX's documentation does not promise: attributes and parameters that are read here alone.

`compat` has what differs between versions, and `higher_order` the parameters of what has jaxprs
inside. Whatever of all that a JAX to come may change is named by a row of
`tests/_jaxprs/test_compat.py`, and `tests/project/test_package.py` finds what is read elsewhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh, use_abstract_mesh


def setting(name: str) -> Any:
    """A setting of JAX, such as "jax_enable_x64": those of JAX 0.10 are not declared for mypy."""
    return getattr(jax.config, name)


# Values and their types.


def is_tracer(value: Any) -> bool:
    """Whether a value is an array that is being traced."""
    return isinstance(value, jax.core.Tracer)


def is_abstract(value: Any) -> bool:
    """Whether a value is traced into a program, and is not an array that has been computed."""
    if not is_tracer(value):
        return False
    try:
        jex_core.concrete_or_error(None, value)
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def is_reference(atom: Any) -> bool:
    """Whether a variable is a reference to an array, whose dtype is the array's."""
    return hasattr(atom.aval, "inner_aval")


def is_weak(value: Any) -> bool:
    """Whether an array or an aval is weakly typed, as a Python number is."""
    return bool(getattr(value, "weak_type", False))


def is_inexact(value: Any) -> bool:
    """Whether an array or an aval is of floats or complex numbers: others have tangents float0."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def with_weak_type(array: Any, *, weak: bool) -> Any:
    """An array that JAX's promotion makes another dtype of, or not."""
    if is_weak(array) == weak:
        return array
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=weak, sharding=None)


def with_dtype(aval: Any, dtype: np.dtype[Any]) -> Any:
    """The type of an array in another dtype: its sharding and axes of devices are kept."""
    return aval.update(dtype=dtype, weak_type=False)


def tangent_type(aval: Any) -> Any:
    """The type of an array's tangents and cotangents: float0 where it is not differentiated."""
    return aval.to_tangent_aval()


def short_type(atom: Any) -> str:
    """The type of a variable as jaxprs show it: ``float32[8,4]``."""
    return str(atom.aval.str_short())


def varying_axes(aval: Any) -> tuple[Any, ...]:
    """The axes of devices over which a value is known to differ, under `jax.shard_map`."""
    axes = aval.manual_axis_type
    return tuple(axes.varying) if axes else ()


def filled(aval: Any, value: Any) -> Any:
    """An array of one value, of the type `aval`: a scan's carry must begin with that of its end.

    Over an explicit mesh with its sharding, under `jax.shard_map` with the axes it varies over.
    """
    array = jnp.full(aval.shape, value, aval.dtype)
    sharding = explicit_sharding(aval)
    if sharding is not None and not get_abstract_mesh().empty:
        array = jax.sharding.reshard(array, sharding)
    axes = varying_axes(aval)
    return lax.pcast(array, axes, to="varying") if axes else array


# Equations.


def explicit_sharding(value: Any) -> NamedSharding | None:
    """How the type of a value says that it is sharded; None where it does not say.

    That is over mesh axes of type `AxisType.Explicit` alone; over others the compiler decides.
    """
    aval: Any = getattr(value, "aval", value)  # of a variable or an array, or it is one
    aval = aval if hasattr(aval, "manual_axis_type") else jax.typeof(aval)
    sharding = getattr(aval, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in (
        sharding.mesh.axis_types or ()
    )
    return sharding if explicit else None


def device_count(array: Any) -> int:
    """Over how many devices the compiler may shard an array: not those of `jax.shard_map`.

    The type of an array that is traced has the mesh, whether or not its axes are explicit.
    """
    mesh = jax.typeof(array).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return math.prod(mesh.shape[name] for name in kinds if kinds[name] != AxisType.Manual)


def out_sharding(eqn: jex_core.JaxprEqn) -> Any:
    """How the author of a product says that its result is sharded; None if he does not."""
    return eqn.params.get("out_sharding")


def name_stack(eqn: jex_core.JaxprEqn) -> Any:
    """The named scopes and transformations an equation was made in: it hashes, and `str` reads."""
    return eqn.source_info.name_stack


def names_around(jaxpr: Any) -> tuple[Any, ...]:
    """The named scopes that all equations of an open jaxpr are in, but for those of jaxmp's own."""
    first: tuple[Any, ...]
    first, *others = [eqn.source_info.name_stack.stack for eqn in jaxpr.eqns] or [()]
    count = 0
    for scope in first:
        plain = type(scope).__name__ == "Scope" and not scope.name.startswith("jaxmp")
        if not plain or any(stack[count : count + 1] != (scope,) for stack in others):
            break
        count += 1
    return first[:count]


def without_names(jaxpr: Any, count: int) -> Any:
    """An open jaxpr whose equations are not in the outermost named scopes."""
    if not count:
        return jaxpr
    bare = [
        eqn.replace(
            source_info=eqn.source_info.replace(name_stack=eqn.source_info.name_stack[count:])
        )
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=bare)


def scoped(eqn: jex_core.JaxprEqn, names: tuple[Any, ...], **replaced: Any) -> jex_core.JaxprEqn:
    """An equation in more named scopes, with some parameters replaced."""
    source = eqn.source_info
    named = source.replace(name_stack=source.name_stack + source_info_util.NameStack(names))
    found: jex_core.JaxprEqn = eqn.replace(params=eqn.params | replaced, source_info=named)
    return found


def under(names: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """A context in which what is bound is in these named scopes."""
    stack = source_info_util.current_name_stack() + source_info_util.NameStack(names)
    return source_info_util.user_context(None, name_stack=stack)


def traceback(eqn: jex_core.JaxprEqn) -> Any:
    """Where in Python an equation was made: it hashes; None if that is not known."""
    return eqn.source_info.traceback


def frames(traceback: Any) -> Iterator[tuple[CodeType, int]]:
    """The Python frames of a traceback, innermost first: code, and where in it."""
    return iter(()) if traceback is None else zip(*traceback.raw_frames(), strict=True)


def line_number(traceback: Any, frame: tuple[CodeType, int]) -> int:
    """The line of one of its frames."""
    return int(traceback.code_addr2line(*frame))


def source_summary(eqn: jex_core.JaxprEqn) -> str:
    """``/path/file.py:line:column (function)``, where JAX would say that an equation is."""
    return source_info_util.summarize(eqn.source_info)


def context(eqn: jex_core.JaxprEqn) -> Any:
    """The configuration an equation was made under, for which it hashes; see `in_context`."""
    return eqn.ctx


def in_context(eqn: jex_core.JaxprEqn) -> Any:
    """A context in which what is bound is bound under the configuration of an equation."""
    return eqn.ctx.manager


def on_mesh_of(value: Any) -> AbstractContextManager[Any]:
    """A context in which an array is used on its own mesh.

    The context of an equation that takes it to another mesh is that other mesh.
    """
    sharding = getattr(jax.typeof(value), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or mesh == get_abstract_mesh():
        return contextlib.nullcontext()
    return use_abstract_mesh(mesh)


def has_effects(eqn: jex_core.JaxprEqn) -> bool:
    """Whether an equation does more than return its results."""
    return bool(eqn.effects)


def runs_once(eqn: jex_core.JaxprEqn) -> bool:
    """Whether an equation does something that a second run of it would do again.

    That it names an axis of a mesh, which JAX counts as an effect, is nothing of the kind.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


class PrimitiveCall(NamedTuple):
    """What an equation does, wherever it stands: a primitive and its parameters. It hashes."""

    primitive: jex_core.Primitive
    params: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, eqn: jex_core.JaxprEqn, **replaced: Any) -> Self:
        """That of an equation, with some parameters replaced."""
        return cls(eqn.primitive, tuple((eqn.params | replaced).items()))

    @property
    def returns_several(self) -> bool:
        """Whether it returns a list, and not an array."""
        return bool(self.primitive.multiple_results)

    def __call__(self, *operands: Any, **replaced: Any) -> Any:
        return self.primitive.bind(*operands, **dict(self.params) | replaced)


def holds_jaxprs(parameter: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, or has some in it."""
    return next(jex_core.jaxprs_in_params({"": parameter}), None) is not None


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation."""
    yield from jex_core.jaxprs_in_params(params)


def function_name(jaxpr: Any) -> str:
    """The name of the function that an open jaxpr was traced from."""
    return str(jaxpr.debug_info.func_name)


def leave_out_of_tracebacks(folder: Path) -> None:
    """Makes JAX say that an operation is where the user wrote it, not in a file of this folder."""
    source_info_util.register_exclusion(str(folder))


def known_primitives() -> frozenset[str]:
    """The names of the primitives that have a derivative here, and of JAX's kernels."""
    return frozenset(primitive.name for primitive in ad.primitive_jvps) | {"pallas_call"}


def refuses_forward_mode(error: TypeError) -> bool:
    """Whether an error says that a function with a `custom_vjp` is differentiated forward."""
    return "forward-mode autodiff" in str(error)
