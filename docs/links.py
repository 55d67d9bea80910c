"""A hook of the site, for what a page says of files that are not pages.

A link to ``../examples/worker.py`` leads somewhere in a checkout and not on the site, where it
becomes the file's name. A comment ``<!-- file: examples/worker.py -->`` becomes the file's text;
nobody sees it in a checkout. That the files exist is tested with all other links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w/.-]+)(?:#[\w-]+)?\)")
FILE = re.compile(r"^<!-- file: ([\w/.-]+) -->$", re.MULTILINE)
LANGUAGES = {
    **{".py": "python", ".toml": "toml", ".yaml": "yaml", ".service": "ini"},
    **{".sql": "sql", ".go": "go"},
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    depth = page.file.src_uri.count("/") + 1

    def named(match: re.Match[str]) -> str:
        if match[0].count("../") < depth:
            return match[0]  # a page in another folder of docs/
        return match[1] if match[1].strip("`") == match[2] else f"{match[1]} (`{match[2]}`)"

    return FILE.sub(shown, OUTSIDE.sub(named, markdown))


def shown(match: re.Match[str]) -> str:
    """The text of a file, as code."""
    file = ROOT / match[1]
    return f"```{LANGUAGES[file.suffix]}\n{file.read_text()}```"
