"""Numbers of `preflight` as text, with their units."""

from __future__ import annotations

from jaxmp._tools import screen


def gib(size: float) -> str:
    """Formats bytes, in the largest unit that makes at least a half."""
    if size >= 2**29:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**19:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB" if size >= 2**9 else f"{size:.0f} B"


def gb(size: float) -> str:
    """Formats bytes of traffic, in decimal units."""
    return f"{size / 1e9:.2f} GB" if size >= 5e6 else f"{screen.si(size)}B"


def millions(count: int) -> str:
    """Formats a count, in millions if it is large."""
    return f"{count / 1e6:.1f} M" if count >= 50_000 else f"{count:,}"


def seconds(time: float) -> str:
    """Formats a time in seconds or milliseconds."""
    return f"{time:.2f} s" if time >= 1 else f"{1e3 * time:.3g} ms"


def price(cost: float) -> str:
    """Formats a price."""
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"
