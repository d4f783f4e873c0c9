"""Devices as `jaxmp` asks them for their memories."""

from __future__ import annotations

from types import SimpleNamespace


def device_with(*kinds: str) -> SimpleNamespace:
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    return SimpleNamespace(device_kind="Chip", addressable_memories=lambda: memories)
