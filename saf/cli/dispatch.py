"""``saf dispatch``: send the messages of services to their endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import psycopg
import typer

from saf.cli.brokers import Config
from saf.cli.console import echo
from saf.cli.metrics import Listen, Push, Textfile, published
from saf.config import Settings, load, load_signer
from saf.dispatch.dispatcher import Dispatcher
from saf.dispatch.running import run
from saf.dispatch.settings import Endpoint
from saf.errors import SafError
from saf.operating.endpoints import Following, find
from saf.receiving.stopping import STOP_SECONDS
from saf.receiving.summary import FOR_A_PERSON, FOR_LATER, Summary

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

    Messages that an endpoint accepts are marked. Without --loop, it sends the messages that are due
    now. Any number of processes share the work. Exit codes: 0 when all is done, or after a stop
    request. Without --loop: 1 if there are new dead letters; 75 if messages wait for another
    attempt, or an endpoint is down, disabled or paused.
    """
    settings = load(config)
    signer = load_signer(config) if settings.signing.key_id else None
    summaries: dict[str, Summary] = {}

    def made(endpoints: Mapping[str, Endpoint]) -> list[Dispatcher]:
        return [
            Dispatcher(
                name,
                item,
                settings.inbox_of(item),
                stop_seconds=stop_timeout,
                signer=signer,
                summary=summaries.setdefault(name, Summary()),
            )
            for name, item in endpoints.items()
        ]

    following = Following(settings)
    problems: list[SafError | psycopg.Error] = []
    if names:
        dispatchers = made(chosen(settings, names))
    else:
        found = following.find()
        problems += found.problems
        # a loop finds the other endpoints later
        dispatchers = made(found.endpoints if loop and problems else found.chosen([]))
    refresh = (lambda: made(following.find().endpoints)) if loop and not names else None
    with published(
        listen=metrics, textfile=metrics_textfile, push=metrics_push, job="saf-dispatch"
    ):
        try:
            run(dispatchers, drain=not loop, find=refresh)
        except (SafError, psycopg.Error) as error:
            if loop:
                raise
            problems.insert(0, error)
        finally:
            for name, summary in [*summaries.items()]:
                echo(f"{name}: {summary}")
    if loop:
        return
    codes = {item.exit_code for item in dispatchers}
    if FOR_A_PERSON not in codes and problems:
        raise problems[0]
    if code := next((code for code in (FOR_A_PERSON, FOR_LATER) if code in codes), 0):
        raise typer.Exit(code)


def chosen(settings: Settings, names: list[str]) -> dict[str, Endpoint]:
    """Return the endpoints with these names, from saf.toml and from the brokers.

    Raises:
        ConfigurationError: no endpoint has this name, or it is invalid.
        Unavailable: a broker that may have the endpoint does not answer.
    """
    if set(names) <= set(settings.endpoints):
        return {name: settings.endpoints[name] for name in names}
    return find(settings).chosen(names)
