"""The server of `saf ui`: ends soon after the first signal, even while pages are open.

An open page holds a stream (`saf.ui.application`), which would delay the end. So streams are told
to end first. After a second signal, the server does not wait for anything.
"""

from __future__ import annotations

from types import FrameType

import uvicorn

from saf.ui.site import Site


class Server(uvicorn.Server):
    """Serves one dashboard, in the main thread or in another."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site

    def end(self) -> None:
        """Request the end; may be called from any thread or a signal handler."""
        self._site.ending = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Treat SIGINT and SIGTERM as a normal end of the process."""
        self.force_exit = self.should_exit
        self.end()
