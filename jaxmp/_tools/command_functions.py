"""The commands of a command line, of functions; and ``module:function``, which a user names there.

A command's options are the arguments of a function: their types from its annotations, their
defaults from its signature, their help from its docstring. Errors say what is wrong with a name.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from jaxmp.dtypes import did_you_mean

TAKES = "a function without arguments that returns (fn, args)"


def add_command(
    commands: Any,
    function: Callable[..., int],
    texts: Mapping[str, str],
    exclusive: Sequence[str] = (),
) -> None:
    """Adds the command of a function; `texts` are what its docstring names in braces.

    An argument's line in the docstring is its help, after what stands for a value in parentheses.
    Of those that are `exclusive`, one can be given.
    """
    doc = (inspect.getdoc(function) or "").format_map(texts)
    description, arguments, example = re.split(r"\n\n(?:Args|Example):\n", doc)
    command: argparse.ArgumentParser = commands.add_parser(
        function.__name__.removeprefix("_"),
        help=description.removeprefix("Prints ").removesuffix("."),
        description=description,
        epilog=f"example (the programs are in the folder examples/):\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lines = re.findall(r"^  (\w+)(?: \((\S+)\))?: (.+(?:\n    .+)*)", arguments, re.MULTILINE)
    parameters = inspect.signature(function).parameters
    hints = get_type_hints(function, include_extras=True)
    group = command.add_mutually_exclusive_group() if exclusive else command
    for name, metavar, said in lines:
        parameter = parameters[name]
        options = _options(parameter, hints[name]) | ({"metavar": metavar} if metavar else {})
        if parameter.kind is parameter.KEYWORD_ONLY:
            name = f"--{name.removesuffix('_').replace('_', '-')}"
        (group if parameter.name in exclusive else command).add_argument(name, help=said, **options)

    def run(args: argparse.Namespace) -> int:
        return function(**{name: getattr(args, name) for name in parameters})

    command.set_defaults(run=run)


def _options(parameter: inspect.Parameter, of_type: Any) -> dict[str, Any]:
    """Returns what argparse is told of a parameter of a type."""
    required = parameter.default is parameter.empty
    if parameter.kind is not parameter.KEYWORD_ONLY:
        return {"nargs": None if required else "?"}
    if NoneType in get_args(of_type):
        [of_type] = (t for t in get_args(of_type) if t is not NoneType)
    found = {"dest": parameter.name, "required": required}
    if of_type is bool:
        return found | {"action": "store_true"}
    found |= {} if required else {"default": parameter.default}
    if get_origin(of_type) is list:
        [of_type] = get_args(of_type)
        found |= {"action": "extend", "nargs": "+"} if required else {"action": "append"}
    if get_origin(of_type) in (Annotated, Literal):
        return found | {"choices": getattr(of_type, "__metadata__", [get_args(of_type)])[0]}
    return found | {"type": of_type, "metavar": "N" if of_type is int else None}


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
