"""The address of the repository: `repository` in `[tool.jaxmp]` of pyproject.toml alone.

The site's link to it and the package's URLs are made of it (docs/site_hooks.py, .ci/metadata.py).
README cannot read it: after filling it in,

    python .ci/address.py

writes its badges. Without an address there is no link.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BADGES = re.compile(r"(?<=<!-- badges -->\n).*?(?=<!-- end -->\n)", re.DOTALL)


def address() -> str:
    """The address without a slash at its end; empty as long as there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["jaxmp"]["repository"].rstrip("/")


def urls(repository: str) -> dict[str, str]:
    """What a package index shows beside the package."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def badges(repository: str) -> str:
    """The lines of README between its two comments."""
    if not repository:
        return ""
    ci = f"{repository}/actions/workflows/ci.yml"
    return f"[![CI]({ci}/badge.svg)]({ci})\n"


def with_badges(readme: str, repository: str) -> str:
    """README with its badges written anew."""
    return _BADGES.sub(lambda _: badges(repository), readme)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(with_badges(text, address()), encoding="utf-8")
