"""The server of `saf ui`: it ends soon after the first signal, whoever has a page open.

A page that is open holds a stream (`saf.ui.live`), which would hold up the end. So the streams are
told first, and end by themselves. A second signal waits for nothing that is still under way.
"""

from __future__ import annotations

from types import FrameType

import uvicorn

from saf.ui.site import Site


class Server(uvicorn.Server):
    """Serves one dashboard, in the main thread or another one."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site

    def end(self) -> None:
        """Come to an end, from any thread or a signal's handler."""
        self._site.ending = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Take SIGINT or SIGTERM as what was waited for: the process ends as usual."""
        self.force_exit = self.should_exit
        self.end()
