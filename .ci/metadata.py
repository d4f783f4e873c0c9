"""Gives the package the URLs of the repository: the metadata hook of pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    """Fills in `project.urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling before it reads the rest."""
        address = runpy.run_path(str(Path(__file__).with_name("address.py")))
        metadata["urls"] = address["urls"](address["address"]())
