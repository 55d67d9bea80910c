"""``saf ui``: the dashboard, in a browser."""

from __future__ import annotations

import os
import secrets
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import SecretStr

from saf.cli.alive import Alive, listed
from saf.cli.brokers import Config
from saf.cli.console import echo
from saf.config import Settings, load
from saf.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from saf.ui.server import Server

PACKAGES = ("jinja2", "jsonpath", "starlette", "uvicorn")
LOCAL = ("127.0.0.1", "::1", "localhost")
ENDING_SECONDS = 3
"""How long open pages may delay the end."""


def command(
    *,
    config: Config = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free port.")
    ] = 8400,
    write: Annotated[
        bool,
        typer.Option("--write", help="Allow decisions about messages to users who may operate."),
    ] = False,
) -> None:
    """Show all brokers in a browser.

    Users who log in with the token of [ui] in saf.toml may look; with operate_token they may also
    act, if it is started with --write. Without a token there, one is generated and printed. See
    docs/ui.md. It runs until SIGTERM or Ctrl-C.
    """
    settings = load(config)
    server, listening, notes = prepared(settings, host=host, port=port, write=write)
    for line in notes:
        echo(line, err=True)
    sources = listed([*settings.brokers, *(f"fleet {name}" for name in settings.fleets)], "broker")
    alive = Alive("saf ui", f"shows {sources}", lacks="no request")
    with alive.watching(lambda: server.server_state.total_requests):
        server.run(sockets=[listening])


def prepared(
    settings: Settings, *, host: str, port: int, write: bool
) -> tuple[Server, socket.socket, list[str]]:
    """Return a server of the dashboard, its listening socket, and lines to print to the user.

    Raises:
        MissingExtra: packages are missing.
        UsageError: the address cannot be listened at.
    """
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtra("ui", "saf ui")
    import uvicorn

    import saf.ui
    from saf.ui.server import Server

    settings, token = with_token(settings)
    application: Any = saf.ui.app(settings, write=write)
    # the peer's own address decides which headers are trusted: see saf.ui.access
    configured = uvicorn.Config(
        application,
        proxy_headers=False,
        server_header=False,
        log_level="warning",
        timeout_graceful_shutdown=ENDING_SECONDS,
    )
    shown = f"[{host}]" if ":" in host else host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"the dashboard cannot be served at {shown}:{port}: {_why(error)}; name "
            "another --port, or 0 for any that is free"
        ) from None
    notes = [f"the dashboard is at http://{shown}:{listening.getsockname()[1]}/"]
    if token is not None:
        notes.append(f"log in with the token {token}")
    if host not in LOCAL:
        notes.append(
            "other machines reach it unencrypted: put a reverse proxy with https in front of it"
        )
    if not write:
        notes.append("nobody can change anything: it was started without --write")
    return Server(configured, application.state.site), listening, notes


def _why(error: OSError) -> str:
    """Return why an address cannot be listened at, without the address."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def with_token(settings: Settings) -> tuple[Settings, str | None]:
    """Return the settings with a way to log in, and the generated token, if any."""
    ui = settings.ui
    if ui.token or ui.operate_token or ui.user_header:
        return settings, None
    token = secrets.token_urlsafe(24)
    opened = ui.model_copy(update={"operate_token": SecretStr(token)})
    return settings.model_copy(update={"ui": opened}), token
