"""Subclasses with other methods that pass for their class: when cached, named and pickled."""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import flax.linen as nn


def one_per_key(make: Callable[..., Any]) -> Callable[..., Any]:
    """Caches `make(cls, *key)`, which makes a class, per class and key while that lives.

    The cache is weak: a class that was defined in a function can be collected after it.
    """
    made: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Hashable, Any]]
    made = weakref.WeakKeyDictionary()
    lock = threading.RLock()  # two threads get one class

    @functools.wraps(make)
    def made_class(cls: Any, *key: Hashable) -> Any:
        with lock:
            of_class = made.setdefault(cls, weakref.WeakValueDictionary())
            found = of_class.get(key)
            if found is None:
                found = of_class[key] = make(cls, *key)
            return found

    return made_class


def public(cls: type) -> Iterator[str]:
    """Yields the public names of a class, `__call__` included."""
    return (name for name in dir(cls) if name == "__call__" or not name.startswith("_"))


def subclass(made: tuple[Any, ...], members: dict[str, Any], **options: Any) -> Any:
    """Makes a subclass that to Flax, and when printed, is the class itself.

    Args:
      made: the form in which it and its instances are pickled: a function, and its arguments, of
        which it makes the subclass, the class first.
      members: its methods, and the `_jaxmp_policy` that it is wrapped under, if it is.
      options: keywords of the class statement.
    """
    cls: Any = made[1]
    meta: Any = type(cls)

    @nn.nowrap
    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = cls.__reduce_ex__(self, protocol)
        if reduced[0] not in (copyreg.__newobj__, _new):  # type: ignore[attr-defined]
            return reduced  # the author's own way
        return _new, (made, *reduced[1][1:]), *reduced[2:]

    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_ex,
        "_jaxmp_made": made,
        **members,
    }
    return _metaclass(meta)(cls.__name__, (cls,), members, **options)


def without_part(cls: Any) -> Any:
    """Returns the class that a part of a wrapped module is made of; another class as it is."""
    return cls._jaxmp_made[1] if "_jaxmp_part" in vars(cls) else cls


def authors_class(cls: Any) -> Any:
    """Returns the class that the subclasses made here of it pass for."""
    while "_jaxmp_made" in vars(cls):
        cls = cls._jaxmp_made[1]
    return cls


@functools.cache
def _metaclass(meta: Any) -> Any:
    """Returns a metaclass whose classes pickle as what they were made from, and not by name."""
    pickled = type(meta.__name__, (meta,), {"__module__": meta.__module__})
    copyreg.pickle(pickled, lambda cls: (cls._jaxmp_made[0], cls._jaxmp_made[1:]))
    return pickled


def _new(made: tuple[Any, ...], *args: Any) -> Any:
    """Returns a module without attributes, for them to be unpickled into."""
    make, *key = made
    cls = make(*key)
    return cls.__new__(cls, *args)
