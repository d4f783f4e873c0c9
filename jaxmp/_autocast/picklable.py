"""Transformed functions that can be pickled."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any


class Transformed:
    """A function made by a transformation, pickled as what it was made from.

    It looks like the function it was made from: it has its name, documentation, signature and
    `__wrapped__`, and binds as a method.

    Args:
      call: what it does.
      make: the transformation, of `fn` and `arguments`: a function of a module.
      fn: the function that was transformed.
      arguments: the others.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        make: Callable[..., Any],
        fn: Callable[..., Any],
        *arguments: Any,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__call = call
        self.__made = (make, (fn, *arguments))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The transformed function."""
        return self.__call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        make, (fn, *arguments) = self.__made
        name = getattr(fn, "__qualname__", repr(fn))
        return f"{make.__name__}({', '.join([name, *map(str, arguments)])})"

    def __reduce__(self) -> Any:
        # A decorated function took the place of the one it was made from: that name is its own.
        name = getattr(self, "__qualname__", "")
        try:
            found = operator.attrgetter(name)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            found = None
        return name if found is self and self.__module__ != "__main__" else self.__made
