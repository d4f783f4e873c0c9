"""What MkDocs calls while it builds: the version, the repository's address, links to names."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

# `jaxmp.wrap` and `jaxmp.wrap(model, policy)`, alone in a code span that is not a link yet.
_NAME = re.compile(r"(<a [^>]*>)?<code>(jaxmp\.[A-Za-z_0-9.]+?)(\([^<]*\))?</code>")

_ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Adds the version to the foot of each page, and the repository's address, if there is one."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"jaxmp {project['version']}. {config.copyright}"
    config.repo_url = runpy.run_path(str(_ROOT / ".ci" / "address.py"))["address"]() or None
    return config


def on_page_content(html: str, *, page: Any, files: Any, **kwargs: Any) -> str:
    """Links each name to its page of the reference."""

    def link(match: re.Match[str]) -> str:
        parts = match[2].split(".")
        target = next(
            (
                file
                for name in parts[1:2]
                if (file := files.get_file_from_path(f"reference/{name}.md"))
            ),
            None,
        )
        if match[1] or target is None or target.src_uri == page.file.src_uri:
            return match[0]
        anchor = f"#{match[2]}" if len(parts) > 2 else ""
        url = get_relative_url(target.url, page.url)
        return f'<a href="{url}{anchor}">{match[0]}</a>'

    return _NAME.sub(link, html)
