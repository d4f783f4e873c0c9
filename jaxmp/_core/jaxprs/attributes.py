"""Attributes and parameters that JAX does not document; no other module reads them.

`compat` has what differs between versions, and `higher_order` the parameters of equations with
inner jaxprs. Each of these that a later JAX may change is named by a row of
`tests/_core/jaxprs/test_compat.py`; `tests/project/test_package.py` fails where others read them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
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
    """Returns a setting of JAX, such as "jax_enable_x64"; to mypy, JAX 0.10 declares none."""
    return getattr(jax.config, name)


# Values and their types.


def is_tracer(value: Any) -> bool:
    """Returns whether a value is a tracer."""
    return isinstance(value, jax.core.Tracer)


def is_abstract(value: Any) -> bool:
    """Returns whether a value is a tracer that has no concrete value, as under `jax.jit`."""
    if not is_tracer(value):
        return False
    try:
        jex_core.concrete_or_error(None, value)
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def evaluates_now() -> bool:
    """Returns whether operations are run and not traced: nothing transforms what calls this."""
    return bool(jex_core.get_opaque_trace_state() == _EVALUATING)


with jax.ensure_compile_time_eval():
    _EVALUATING = jex_core.get_opaque_trace_state()


def is_committed(value: Any) -> bool:
    """Returns whether an array was put on its devices, and is not moved where others are."""
    return isinstance(value, jax.Array) and bool(value.committed)


def is_reference(atom: Any) -> bool:
    """Returns whether a variable is a reference to an array; its dtype is the array's."""
    return hasattr(atom.aval, "inner_aval")


def is_weak(value: Any) -> bool:
    """Returns whether an array or an aval is weakly typed, as a Python number is."""
    return bool(getattr(value, "weak_type", False))


def is_inexact(value: Any) -> bool:
    """Returns whether a number, array or aval is floating or complex: has tangents of its dtype."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (float, complex))
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def with_weak_type(array: Any, *, weak: bool) -> Any:
    """Returns the array with a weak type, which promotion may change, or with a strong one."""
    if is_weak(array) == weak:
        return array
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=weak, sharding=None)


def with_dtype(aval: Any, dtype: np.dtype[Any]) -> Any:
    """Returns an aval in another dtype, strongly typed; its sharding and varying axes are kept."""
    return aval.update(dtype=dtype, weak_type=False)


def tangent_type(aval: Any) -> Any:
    """Returns the aval of an array's tangents and cotangents: float0 for integers and booleans."""
    return aval.to_tangent_aval()


def short_type(atom: Any) -> str:
    """Returns the type of a variable as jaxprs print it: ``float32[8,4]``."""
    return str(atom.aval.str_short())


def varying_axes(aval: Any) -> tuple[Any, ...]:
    """Returns the mesh axes over which a value is known to vary, under `jax.shard_map`."""
    axes = aval.manual_axis_type
    return tuple(axes.varying) if axes else ()


def filled(aval: Any, value: Any) -> Any:
    """Returns an array of one value and of the type `aval`: a scan's carry must keep its type.

    It has the sharding of `aval` over an explicit mesh, and its varying axes under `jax.shard_map`.
    """
    array = jnp.full(aval.shape, value, aval.dtype)
    sharding = explicit_sharding(aval)
    if sharding is not None and not get_abstract_mesh().empty:
        array = jax.sharding.reshard(array, sharding)
    axes = varying_axes(aval)
    return lax.pcast(array, axes, to="varying") if axes else array


# Equations.


def explicit_sharding(value: Any) -> NamedSharding | None:
    """Returns the sharding in the type of a value; None where the type has none.

    Only a mesh with an axis of type `AxisType.Explicit` has one; else the compiler decides.
    """
    aval: Any = getattr(value, "aval", value)  # `value` is a variable, an array or an aval
    aval = aval if hasattr(aval, "manual_axis_type") else jax.typeof(aval)
    sharding = getattr(aval, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in (
        sharding.mesh.axis_types or ()
    )
    return sharding if explicit else None


def device_count(array: Any) -> int:
    """Returns the number of devices that the compiler may shard an array over.

    The manual axes of `jax.shard_map` do not count. A tracer's type has the mesh, explicit or not.
    """
    mesh = jax.typeof(array).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return math.prod(mesh.shape[name] for name in kinds if kinds[name] != AxisType.Manual)


def out_sharding(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the `out_sharding` that a product was called with; None if it had none."""
    return eqn.params.get("out_sharding")


def name_stack(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the named scopes and transformations around an equation: hashable, text by `str`."""
    return eqn.source_info.name_stack


def names_around(jaxpr: Any) -> tuple[Any, ...]:
    """Returns the outer named scopes that an open jaxpr's equations share, up to one of jaxmp's."""
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
    """Returns an open jaxpr whose equations lack their `count` outermost named scopes."""
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
    """Returns an equation in more named scopes, with some parameters replaced."""
    source = eqn.source_info
    named = source.replace(name_stack=source.name_stack + source_info_util.NameStack(names))
    found: jex_core.JaxprEqn = eqn.replace(params=eqn.params | replaced, source_info=named)
    return found


def renamed(eqn: jex_core.JaxprEqn, rename: Callable[[str], str | None]) -> jex_core.JaxprEqn:
    """Returns an equation with its named scopes renamed, without those that become None."""
    source, scopes = eqn.source_info, []
    for scope in source.name_stack.stack:
        if type(scope).__name__ != "Scope":
            scopes.append(scope)
        elif (name := rename(scope.name)) is not None:
            scopes.append(type(scope)(name))
    stack = source_info_util.NameStack(tuple(scopes))
    found: jex_core.JaxprEqn = eqn.replace(source_info=source.replace(name_stack=stack))
    return found


def scope_names(eqn: jex_core.JaxprEqn) -> list[str]:
    """Returns the named scopes around an equation, the innermost last."""
    stack = eqn.source_info.name_stack.stack
    return [scope.name for scope in stack if type(scope).__name__ == "Scope"]


def under(names: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Returns a context in which primitives are bound in these named scopes."""
    stack = source_info_util.current_name_stack() + source_info_util.NameStack(names)
    return source_info_util.user_context(None, name_stack=stack)


def traceback(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the Python traceback of an equation, which is hashable; None if it is not known."""
    return eqn.source_info.traceback


def frames(traceback: Any) -> Iterator[tuple[CodeType, int]]:
    """Returns the frames of a traceback, innermost first: code objects and instruction offsets."""
    return iter(()) if traceback is None else zip(*traceback.raw_frames(), strict=True)


def line_number(traceback: Any, frame: tuple[CodeType, int]) -> int:
    """Returns the line number of a frame of a traceback."""
    return int(traceback.code_addr2line(*frame))


def source_summary(eqn: jex_core.JaxprEqn) -> str:
    """Returns JAX's own location of an equation, ``/path/file.py:line:column (function)``."""
    return source_info_util.summarize(eqn.source_info)


def context(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the configuration an equation was traced under, hashable; see `in_context`."""
    return eqn.ctx


def in_context(eqn: jex_core.JaxprEqn) -> Any:
    """Returns a context in which primitives are bound under the configuration of an equation."""
    return eqn.ctx.manager


def on_mesh_of(value: Any) -> AbstractContextManager[Any]:
    """Returns a context in which an array is used on its own mesh.

    The context of an equation that moves it to another mesh has that other mesh.
    """
    sharding = getattr(jax.typeof(value), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or mesh == get_abstract_mesh():
        return contextlib.nullcontext()
    return use_abstract_mesh(mesh)


def moves_between_devices(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether an equation puts arrays on other devices, or in another memory."""
    return any(device is not None for device in eqn.params.get("devices", ()))


def has_effects(of: Any) -> bool:
    """Returns whether an equation or a jaxpr has side effects."""
    return bool(of.effects)


def runs_once(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether an equation has an effect that running it twice would repeat.

    Naming a mesh axis, which JAX counts as an effect, is not one of these.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


class PrimitiveCall(NamedTuple):
    """An equation without its operands: a primitive and its parameters. Hashable."""

    primitive: jex_core.Primitive
    params: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, eqn: jex_core.JaxprEqn, **replaced: Any) -> Self:
        """Returns the primitive and parameters of an equation, some of these replaced."""
        return cls(eqn.primitive, tuple((eqn.params | replaced).items()))

    @property
    def returns_several(self) -> bool:
        """Whether the primitive returns a list of arrays, and not one array."""
        return bool(self.primitive.multiple_results)

    def __call__(self, *operands: Any, **replaced: Any) -> Any:
        return self.primitive.bind(*operands, **dict(self.params) | replaced)


def holds_jaxprs(parameter: Any) -> bool:
    """Returns whether a parameter of an equation is a jaxpr, or contains one."""
    return next(jex_core.jaxprs_in_params({"": parameter}), None) is not None


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation."""
    yield from jex_core.jaxprs_in_params(params)


def function_name(jaxpr: Any) -> str:
    """Returns the name of the function that an open jaxpr was traced from."""
    return str(jaxpr.debug_info.func_name)


def leave_out_of_tracebacks(folder: Path) -> None:
    """Makes JAX attribute operations to the user's lines, and not to a file of this folder."""
    source_info_util.register_exclusion(str(folder))


def known_primitives() -> frozenset[str]:
    """Returns the names of the primitives with a registered JVP rule, and ``pallas_call``."""
    return frozenset(primitive.name for primitive in ad.primitive_jvps) | {"pallas_call"}


def refuses_forward_mode(error: TypeError) -> bool:
    """Returns whether an error refuses forward-mode differentiation of a `custom_vjp` function."""
    return "forward-mode autodiff" in str(error)
