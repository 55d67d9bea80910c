"""The dashboard: operators' view of all brokers in a browser, built on the commands' code.

    import saf.ui

    application = saf.ui.app(settings)                            # any ASGI server runs it
    outer.mount("/saf", saf.ui.app(settings, write=True))         # or within another application

`saf ui` serves it. Pages are rendered on the server, so they work without JavaScript; with
JavaScript they stay live. The dashboard has no store of its own: it shows the contents of brokers,
and acts through `saf.operating` and `saf.setaside`, as the commands do, with their audit. Sessions,
the last figures and the progress of jobs are only in the memory of its single process.

- *Access*: every page needs a login, by a token or by the header of a reverse proxy
  (`saf.ui.access`). A role may view, or operate; without ``write``, no role may operate.
- *Data*: bodies are hidden unless ``[ui] bodies = true``, and redaction applies everywhere
  (`saf.ui.redaction`).
- *Failures*: pages show a broker that is down or slow as such, and wait for it at most
  `saf.ui.brokers.PATIENCE_SECONDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from saf.config import Settings

__all__ = ["app"]


def app(settings: Settings, *, write: bool = False) -> ASGIApp:
    """Return the dashboard of all brokers of a saf.toml as an ASGI application.

    Args:
        settings: the result of `saf.config.load`.
        write: let users with the role operate change anything.

    Raises:
        MissingExtra: the packages of the extra ``ui`` are not installed.
        ConfigurationError: no login is configured, or a JSON path is invalid.
    """
    from saf.ui.application import application

    return application(settings, write=write)
