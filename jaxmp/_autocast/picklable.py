"""Transformed functions that can be pickled."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any


class Transformed:
    """A transformed function, pickled as the transformation and what it was applied to.

    It looks like the function it was made from: it has its name, documentation, signature and
    `__wrapped__`, and binds as a method.

    Args:
      call: the function that it calls.
      make: the transformation of `fn` and `arguments`, a module-level function.
      fn: the function that was transformed.
      arguments: the other arguments of `make`.
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
        """Calls the transformed function."""
        return self.__call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        make, (fn, *arguments) = self.__made
        name = getattr(fn, "__qualname__", repr(fn))
        return f"{make.__name__}({', '.join([name, *map(str, arguments)])})"

    def __reduce__(self) -> Any:
        # A decorated function replaces the original in its module: it is pickled by its name.
        name = getattr(self, "__qualname__", "")
        try:
            found = operator.attrgetter(name)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            found = None
        return name if found is self and self.__module__ != "__main__" else self.__made
