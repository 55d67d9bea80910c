"""A hook of the site: the page of all SQL statements, generated with each build.

Most of its lines are plans, which change with every statement; so the page is not committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

from tests.sql_page import generated

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

PAGE = "sql.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page; mkdocs calls this once per build."""
    files.append(File.generated(config, PAGE, content=generated()))
    return files
