"""Loading ``module:function`` of a command line, with errors that say what is wrong with it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxmp.dtypes import did_you_mean

TAKES = "a function without arguments that returns (fn, args)"


def load(spec: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function and arguments that ``module:function`` returns.

    Raises:
      ValueError: if there is no such function. Errors of its module when it is imported, and of
        the function when it is called, are not caught.
      TypeError: if it takes arguments, or does not return ``(fn, args)``.
    """
    return _made_by(attribute_of(spec, TAKES), spec, spec.partition(":")[2])


def attribute_of(spec: str, what: str) -> Any:
    """Imports the attribute that ``module:function`` names.

    Raises:
      ValueError: if there is none; the message says that `what` is wanted.
    """
    name, _, attribute = spec.partition(":")
    as_module = name.removesuffix(".py").removeprefix("./").replace("/", ".")
    if name != as_module or not all(map(str.isidentifier, (*name.split("."), attribute))):
        of_file = bool(name and attribute) and name != as_module
        hint = f"; a file's function is named as in '{as_module}:{attribute}'" if of_file else ""
        raise ValueError(f"write module:function, {what}; got {spec!r}{hint}")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (sys.path holds strings)
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ValueError(f"cannot find {spec!r}: there is no module {error.name!r}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        near = did_you_mean(attribute, dir(module))
        raise ValueError(
            f"cannot find {spec!r}: the module {name!r} has no {attribute!r}{near}"
        ) from error


def _made_by(make: Any, spec: str, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Calls a factory; returns its result, checked: a function and its arguments."""
    if not callable(make):
        raise TypeError(f"{spec} is {_kind(make)}; name {TAKES}")
    try:
        inspect.signature(make).bind()
    except ValueError:  # a builtin that does not say what it takes
        pass
    except TypeError as error:
        raise TypeError(
            f"{spec} takes arguments, {inspect.signature(make)}; name {TAKES}, for example: "
            f"def make(): return {name}, (…,)"
        ) from error
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TypeError(
            f"{spec} returned {_kind(made)}; it must return (fn, args), a function and a tuple of "
            "its arguments"
        )
    fn, arguments = made
    # Anything else can be iterated over as well, an array by its rows.
    if type(arguments) not in (tuple, list):
        raise TypeError(
            f"{spec} returned its arguments in {_kind(arguments)}; they must be in a tuple: "
            "(fn, (x,))"
        )
    return fn, tuple(arguments)


def _kind(value: Any) -> str:
    """Describes a value in words."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if inspect.isroutine(value):
        return f"the function {value.__name__!r} alone"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
