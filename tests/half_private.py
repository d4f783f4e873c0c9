"""What JAX and Flax do not promise and we rely on: found by its name, wherever it is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

# The files in which such things are read, and no others.
HOMES = (
    "jaxmp/_core/flax.py",
    "jaxmp/_core/jaxprs/attributes.py",
    "jaxmp/_core/jaxprs/equation_parameters.py",
    "jaxmp/_core/jaxprs/compat.py",
    "jaxmp/_core/jaxprs/higher_order.py",
    "jaxmp/_core/jaxprs/compiler_hints.py",
    "jaxmp/_core/jaxprs/float32_dot.py",
    "jaxmp/_core/jaxprs/parameter_products.py",
    "jaxmp/_core/jaxprs/aux_outputs.py",
)

# Attributes whose names alone give them away. The parameters of equations are found by themselves.
_OF_EQUATIONS = """
    ctx debug_info effects func_name get_bind_params jaxprs_in_params multiple_results
    name_stack source_info
"""
_OF_TYPES_AND_ARRAYS = "inner_aval manual_axis_type str_short to_tangent_aval weak_type"
_OF_THE_NEXT_GENERATION = "fun_name traced traced_fwd"  # which equations keep
_OF_FLAX = "_call_wrapped_method _pytree__is_pytree method_handler_wrapped rng_counters"
ATTRIBUTES = frozenset(
    f"{_OF_EQUATIONS} {_OF_TYPES_AND_ARRAYS} {_OF_THE_NEXT_GENERATION} {_OF_FLAX}".split()
)

# Modules that are no public interface, or not one that lasts.
_MODULES = """
    flax.core flax.linen.module flax.linen.transforms flax.nnx.graphlib flax.nnx.transforms
    jax.core jax.extend.core.primitives jax.extend.source_info_util jax.interpreters nn.module
"""
MODULES = tuple(_MODULES.split())


def read_in(path: Path) -> set[str]:
    """What a file reads of all that, by name: ``ctx``, ``params[length]``, ``jax.core.Tracer``."""
    return set(_found(ast.parse(path.read_text(encoding="utf-8"))))


def read_at_home() -> set[str]:
    """The same of all `HOMES`."""
    return set().union(*(read_in(ROOT / home) for home in HOMES))


def _found(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                for dotted in (f"{module}.{alias.name}" for alias in names):
                    if _is_private(dotted):
                        yield dotted
            case ast.Attribute(attr=attr) if attr in ATTRIBUTES:
                yield attr
            case ast.Attribute() if _is_private(dotted := ast.unparse(node)):
                yield dotted
            case ast.Subscript(value=of, slice=ast.Constant(value=str(key))) if _is_params(of):
                yield f"params[{key}]"
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[of]) if _is_params(of):
                yield f"params[{key}]"
            case ast.Call(
                func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(key)), *_]
            ) if _is_params(of):
                yield f"params[{key}]"
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]
            ) if name in ATTRIBUTES:
                yield name
            case ast.Call(func=ast.Attribute(attr="update"), keywords=keywords) if any(
                keyword.arg == "dtype" for keyword in keywords
            ):
                yield "update(dtype=)"


def _is_params(node: ast.AST) -> bool:
    """Whether an expression is the parameters of an equation: ``eqn.params``, ``params``."""
    match node:
        case ast.Attribute(attr="params") | ast.Name(id="params"):
            return True
    return False


def _is_private(dotted: str) -> bool:
    return any(dotted.startswith(f"{module}.") or dotted == module for module in MODULES)
