"""A hook of the site: links to files that are not pages become their names.

A page may link to ``../examples/worker.py``, which leads somewhere in a checkout and not on the
site. That the file exists is tested with all other links.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w/.-]+)(?:#[\w-]+)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    depth = page.file.src_uri.count("/") + 1

    def named(match: re.Match[str]) -> str:
        if match[0].count("../") < depth:
            return match[0]  # a page in another folder of docs/
        return match[1] if match[1].strip("`") == match[2] else f"{match[1]} (`{match[2]}`)"

    return OUTSIDE.sub(named, markdown)
