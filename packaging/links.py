"""Where a built package says that its sources are: known only to whoever builds a release.

``SAF_REPOSITORY`` holds the address of the repository, as a browser shows it, and ``SAF_REVISION``
the tag or branch (``main`` by default). With them, the package's page has its links, and the links
of README lead to the repository's pages instead of files that are not beside it. Without them, as
in a clone, README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A target in brackets after a text or a picture; what has a scheme, or is on the page, stays
LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?!\w+:|#)(?P<path>[^)]+)\)")


class Links(MetadataHookInterface):
    """Fills in the fields ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields; called by Hatchling."""
        address = os.environ.get("SAF_REPOSITORY", "").rstrip("/")
        revision = os.environ.get("SAF_REVISION", "main")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address:
            text = absolute(text, address, revision)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(address, revision) if address else {}


def urls(address: str, revision: str) -> dict[str, str]:
    """The links of the package's page, by their names."""
    files = f"{address}/blob/{revision}"
    return {
        "Source": address,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute(text: str, address: str, revision: str) -> str:
    """A page whose links to files of the repository lead there."""

    def lead(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['text']}({address}/{kind}/{revision}/{link['path']})"

    return LINK.sub(lead, text)
