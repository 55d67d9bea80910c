"""The dashboard: what operators see and do in a browser, on what the commands stand on.

    import saf.ui

    application = saf.ui.app(settings)                            # any ASGI server runs it
    outer.mount("/saf", saf.ui.app(settings, write=True))         # or within another application

`saf ui` serves it. Pages are rendered here, so they can be read without JavaScript; with it they
stay live. It has no store of its own: what it shows is in the brokers, and what it does is done by
`saf.operating` and `saf.setaside`, as the commands do it, and is in their audit. Sessions, the last
figures and the progress of jobs are in the memory of the one process.

- *Who*: nobody sees anything without a login, by a token or by the header of a reverse proxy
  (`saf.ui.access`). A role may view, or operate; and nobody operates without ``write``.
- *What*: bodies are hidden unless ``[ui] bodies = true``, and redaction applies everywhere
  (`saf.ui.redaction`).
- *When a broker is down or slow*: it is shown as that, and no page waits for it longer than
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
        settings: what `saf.config.load` returns.
        write: whether those who may operate can change anything.

    Raises:
        MissingExtra: the packages of the extra ``ui`` are not installed.
        ConfigurationError: nobody could log in, or a JSON path is none.
    """
    from saf.ui.application import application

    return application(settings, write=write)
