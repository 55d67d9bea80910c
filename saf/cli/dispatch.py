"""``saf dispatch``: send the messages of services to their endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from saf.cli.brokers import Config, stores
from saf.cli.console import echo
from saf.cli.metrics import Listen, Push, Textfile, published
from saf.config import Settings, did_you_mean, load, load_signer
from saf.database import check_schema, unavailable_if_lost
from saf.dispatch.dispatcher import Dispatcher
from saf.dispatch.running import run
from saf.dispatch.settings import Endpoint
from saf.dispatch.stored import stored
from saf.errors import ConfigurationError
from saf.receiving.stopping import STOP_SECONDS

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="ENDPOINT", help="Only these. Default: all."),
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
    metrics: Listen = None,
    metrics_textfile: Textfile = None,
    metrics_push: Push = None,
    config: Config = None,
) -> None:
    """Send messages to the URLs of their endpoints.

    What an endpoint accepts is marked. Without --loop, it sends what is there and due now. Any
    number of processes share the work. Exit codes: 0 when all is done, or when told to stop.
    Without --loop: 1 if there are new dead letters; 75 if messages wait for another attempt, or an
    endpoint is down, disabled or paused.
    """
    settings = load(config)
    signer = load_signer(config) if settings.signing.key_id else None

    def made(some: Mapping[str, Endpoint]) -> list[Dispatcher]:
        return [
            Dispatcher(name, one, settings.inbox_of(one), stop_seconds=stop_timeout, signer=signer)
            for name, one in some.items()
        ]

    dispatchers = made(chosen(settings, names or []))
    find = (lambda: made(endpoints(settings))) if loop and not names else None
    with published(
        listen=metrics, textfile=metrics_textfile, push=metrics_push, job="saf-dispatch"
    ):
        run(dispatchers, drain=not loop, find=find)
    codes = set()
    for one in dispatchers:
        echo(f"{one.name}: {one.summary}")
        codes.add(one.exit_code)
    code = next((code for code in (1, 75) if code in codes), 0)
    if code and not loop:
        raise typer.Exit(code)


def chosen(settings: Settings, names: list[str]) -> dict[str, Endpoint]:
    """The endpoints of these names, of saf.toml and of the brokers; without names, all.

    Raises:
        ConfigurationError: there is none, or none of that name, or one of them is wrong.
        Unavailable: a broker does not answer that may have them.
    """
    if names and set(names) <= set(settings.endpoints):
        return {name: settings.endpoints[name] for name in names}
    found = endpoints(settings)
    if not found:
        raise ConfigurationError(
            "there is no endpoint: say [endpoints.NAME] in saf.toml, or saf endpoint add"
        )
    for name in names:
        if name not in found:
            raise ConfigurationError(f"there is no endpoint {name!r}{did_you_mean(name, found)}")
    return {name: found[name] for name in names or found}


def endpoints(settings: Settings) -> dict[str, Endpoint]:
    """All endpoints, of saf.toml and of the brokers.

    Raises:
        ConfigurationError: one of them is wrong, or there are two of a name.
        Unavailable: a broker does not answer.
    """
    found = dict(settings.endpoints)
    for where, broker in stores(settings, None).items():
        with unavailable_if_lost(f"broker {where!r}"):
            connection = broker.dsn.connect(role="endpoint", autocommit=True)
            with connection:
                check_schema(connection)
                there = stored(connection, where, settings.dispatch.networks)
        for name, one in there.items():
            if name in found:
                raise ConfigurationError(
                    f"there are two endpoints {name!r}: one of them is in broker {where!r}"
                )
            found[name] = one
    return found
