"""``saf ui``: the dashboard, in a browser."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from typing import Annotated

import typer
from pydantic import SecretStr

from saf.cli.brokers import Config
from saf.cli.console import echo
from saf.config import Settings, load
from saf.errors import MissingExtra, UsageError

PACKAGES = ("jinja2", "jsonpath", "starlette", "uvicorn")
LOCAL = ("127.0.0.1", "::1", "localhost")
ENDING_SECONDS = 3
"""How long open pages may hold up the end."""


def command(
    *,
    config: Config = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8400,
    write: Annotated[
        bool, typer.Option("--write", help="Let those who may operate change something.")
    ] = False,
) -> None:
    """Show all brokers in a browser.

    Whoever logs in with the token of [ui] in saf.toml may look, and with operate_token also act, if
    it is started with --write. Without any token there, one is made up and printed. docs/ui.md says
    more. It stays until SIGTERM or Ctrl-C.
    """
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtra("ui", "saf ui")
    serve(load(config), host=host, port=port, write=write)


def serve(settings: Settings, *, host: str, port: int, write: bool) -> None:
    """Serve the dashboard until a signal ends it; print where, and the token that was made up."""
    import uvicorn

    import saf.ui

    settings, made_up = with_token(settings)
    application = saf.ui.app(settings, write=write)
    # the peer's own address decides which headers are believed: see saf.ui.access
    configured = uvicorn.Config(
        application,
        host=host,
        port=port,
        proxy_headers=False,
        server_header=False,
        log_level="warning",
        timeout_graceful_shutdown=ENDING_SECONDS,
    )
    try:
        listening = configured.bind_socket()
    except (SystemExit, OSError):
        raise UsageError(
            f"the dashboard cannot be served at {host}:{port}: somebody else listens there, or "
            "it is no address of this machine; name another --port, or 0"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    echo(f"the dashboard is at http://{shown}:{listening.getsockname()[1]}/", err=True)
    if made_up is not None:
        echo(f"log in with the token {made_up}", err=True)
    if host not in LOCAL:
        echo(
            "others reach it without encryption: put a reverse proxy with https before it", err=True
        )
    if not write:
        echo("nobody can change anything: it was started without --write", err=True)
    uvicorn.Server(configured).run(sockets=[listening])


def with_token(settings: Settings) -> tuple[Settings, str | None]:
    """Return the settings with a way to log in, and the token that was made up for it."""
    ui = settings.ui
    if ui.token or ui.operate_token or ui.user_header:
        return settings, None
    token = secrets.token_urlsafe(24)
    opened = ui.model_copy(update={"operate_token": SecretStr(token)})
    return settings.model_copy(update={"ui": opened}), token
