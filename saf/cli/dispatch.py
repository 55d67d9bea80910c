"""``saf dispatch``: send the messages of services to their endpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from saf.cli.brokers import Config
from saf.cli.console import echo
from saf.config import Settings, did_you_mean, load
from saf.dispatch.dispatcher import Dispatcher, run
from saf.dispatch.settings import Endpoint
from saf.errors import ConfigurationError
from saf.receiving.stopping import STOP_SECONDS

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ENDPOINT]...", help="Only these. Default: all of saf.toml."),
]


def command(
    names: Names = None,
    *,
    loop: Annotated[bool, typer.Option("--loop", help="Stay, until SIGTERM or Ctrl-C.")] = False,
    stop_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            envvar="SAF_STOP_TIMEOUT",
            metavar="SECONDS",
            help="How long requests in flight may take after SIGTERM.",
        ),
    ] = STOP_SECONDS,
    config: Config = None,
) -> None:
    """Send the messages of services to the URLs of [endpoints.*], and mark what was accepted.

    Without --loop, it sends what is there and due now. Any number of processes share the work. Exit
    codes: 0 when all is done, or when told to stop. Without --loop: 1 if there are new dead
    letters; 75 if messages wait for another attempt, or an endpoint is down or paused.
    """
    settings = load(config)
    dispatchers = [
        Dispatcher(name, one, settings.inbox_of(one), stop_seconds=stop_timeout)
        for name, one in chosen(settings, names or []).items()
    ]
    run(dispatchers, drain=not loop)
    codes = set()
    for one in dispatchers:
        echo(f"{one.name}: {one.summary}")
        codes.add(one.exit_code)
    code = next((code for code in (1, 75) if code in codes), 0)
    if code and not loop:
        raise typer.Exit(code)


def chosen(settings: Settings, names: list[str]) -> dict[str, Endpoint]:
    """The endpoints of these names; without names, all.

    Raises:
        ConfigurationError: there is none, or none of that name.
    """
    if not settings.endpoints:
        raise ConfigurationError("there is no [endpoints.NAME] in saf.toml: nowhere to send to")
    for name in names:
        if name not in settings.endpoints:
            raise ConfigurationError(
                f"there is no [endpoints.{name}]{did_you_mean(name, settings.endpoints)}"
            )
    return {name: settings.endpoints[name] for name in names or settings.endpoints}
