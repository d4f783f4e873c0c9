"""Reads jaxmp for the site as Python does, and its docstrings as they are meant."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From "Returns:" and a capital letter to the first colon.
_SENTENCE = re.compile(r"(\nReturns:\n +[A-Z](?:[^:\n]|\n(?!\n))*):")


class HouseStyle(griffe.Extension):
    """What Griffe, which reads sources and does not import them, would get wrong."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """What docstrings call `Example:` is Griffe's `Examples:`.

        And a colon in the sentence that says what is returned does not end a type.
        """
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = _SENTENCE.sub(r"\1&#58;", text)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Of a function and the file of its name, the package's `__init__` exports the function."""
        for name, member in list(pkg.members.items()):
            if member.is_alias and member.target_path.startswith(f"{pkg.name}."):
                parent, _, target = member.target_path.rpartition(".")
                found = pkg.modules_collection[parent].members.get(target)
                if found is not None and found.is_module and target in found.members:
                    path = f"{parent}.{target}.{target}"
                    pkg.set_member(name, griffe.Alias(name, path, parent=pkg))
