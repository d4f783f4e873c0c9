"""Classes made from other classes, kept for as long as somebody uses them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any


class MadeClasses:
    """The class that `make(cls, *key)` makes: one per class and key, while it lives.

    It keeps neither: a class that was defined in a function can be collected after it.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Hashable, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.RLock()  # two threads get one class

    def __call__(self, cls: Any, *key: Hashable) -> Any:
        """The class made from `cls`."""
        with self._lock:
            made = self._made.setdefault(cls, weakref.WeakValueDictionary())
            found = made.get(key)
            if found is None:
                found = made[key] = self._make(cls, *key)
            return found
