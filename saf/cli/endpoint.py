"""Endpoints: ``saf endpoint`` manages them, ``saf dispatch`` sends messages of services to them.

Endpoints are in saf.toml or in brokers. `add` and `remove` change only those in brokers. The other
commands show the state of any endpoint, test it, pause and resume it. `command` sends the messages:
those that are due now, or in a loop.

An invalid endpoint, or a broker that does not answer, does not affect the other endpoints: the
problem is reported, and commands for all endpoints continue with the others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from uuid import uuid4

import psycopg
import typer

from saf.broker import services
from saf.cli.alive import Alive, listed, waiting
from saf.cli.brokers import AsJson, AtStore, Commands, Config, Limit
from saf.cli.console import Table, complain, echo
from saf.cli.metrics import Listen, Push, Textfile, published
from saf.config import Settings, load, load_signer
from saf.database import check_schema, unavailable_if_lost
from saf.errors import SafError, UsageError
from saf.message import CONTENT_TYPE
from saf.operating.endpoints import Following, find
from saf.operating.places import stores
from saf.operating.wording import at
from saf.received import READ, Received
from saf.receiving.dispatch import envelope, stored
from saf.receiving.dispatch.condition import IN_WORDS, Book
from saf.receiving.dispatch.dispatcher import Dispatcher, run
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.settings import Endpoint, without_query
from saf.receiving.dispatch.stored import Attempt
from saf.receiving.stopping import STOP_SECONDS
from saf.receiving.summary import FOR_A_PERSON, FOR_LATER, Summary

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="ENDPOINT", help="Only these endpoints. Default: all."),
]
Name = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Name of the endpoint.")]

app = Commands(help="Endpoints: where `saf dispatch` sends messages.")

ENDPOINTS = Table[dict[str, Any]](
    *("endpoint", "subscription", "url", "state", "next probe"),
    things="endpoints",
    below="error",
    cells=lambda row: (
        row["endpoint"], row["subscription"], row["url"],
        _state(row),
        at(row["next_probe_at"]) if row["next_probe_at"] else "", row["error"] or "",
    ),
)  # fmt: skip
ATTEMPTS = Table[Attempt](
    *("at", "message", "key", "status", "seconds", "outcome"),
    things="failed attempts",
    below="error",
    cells=lambda attempt: (
        at(attempt.at), str(attempt.message_id), attempt.key or "",
        str(attempt.status or ""), f"{attempt.seconds:.3f}", attempt.outcome, attempt.error,
    ),
)  # fmt: skip
Inbox: TypeAlias = tuple[psycopg.Connection[Any], int]
"""A connection to the broker of an endpoint, and the id of its subscription."""


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Name of the endpoint.")],
    *,
    url: Annotated[str, typer.Option(help="URL to send messages to, by POST.")],
    subscription: Annotated[
        str | None,
        typer.Option(help="Subscription whose messages are sent. Default: the endpoint's name."),
    ] = None,
    secret_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable of the dispatcher with a secret to sign requests with.",
        ),
    ] = None,
    bearer_from: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE", help="Environment variable of the dispatcher with a bearer token."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Form of requests: binary (the default), structured, batch, plain, xmlrpc."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="With xmlrpc: method to call.")] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Requests in flight of one process. Default: 100.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Rate limit, e.g. 100/s. Default: unlimited.")
    ] = None,
    reply: Annotated[
        bool, typer.Option("--reply", help="Send answers back to the sender's service.")
    ] = False,
    round_: AtStore,
) -> None:
    """Add an endpoint to the broker that has the subscription.

    It may be on the public internet, or in a network that [dispatch] of saf.toml names. Secrets are
    not stored, only the names of environment variables, which begin with SAF_ENDPOINT_.
    """
    settings = {
        "secrets": secret_from or None,
        "bearer": bearer_from,
        "mode": mode,
        "method": method,
        "max_in_flight": max_in_flight,
        "rate": rate,
        "reply": reply or None,
    }
    round_.tell(
        "endpoint",
        lambda connection: stored.add(
            connection, name, url, subscription=subscription, settings=settings
        ),
        lambda _: f"endpoint {name} added; saf dispatch {name} sends to it",
    )


@app.command()
def remove(name: Name, *, round_: AtStore) -> None:
    """Remove an endpoint that was added to a broker; its messages wait."""
    found = round_.visit("endpoint", lambda connection: stored.remove(connection, name))
    for where, removed in found.items():
        echo(f"{where}: {f'endpoint {name} removed' if removed else f'no endpoint {name}'}")
    round_.finish(say=True, found=0 if any(found.values()) or round_.failed else 1)


@app.command("list")
def list_(config: Config = None, as_json: AsJson = False) -> None:
    """List the endpoints of saf.toml and of all stores, and their state.

    An invalid endpoint, or one whose broker does not answer, is reported on standard error; the
    others are shown. Exit codes: 2 or 75 if there is one.
    """
    settings = load(config)
    rows, at = [], ["the brokers"]
    with waiting(lambda: f"asking {at[-1]}"):
        found = find(settings)
        problems = found.problems
        for name, endpoint in found.endpoints.items():
            at.append(f"the broker of endpoint {name!r}")
            try:
                rows.append(_row(settings, name, endpoint))
            except SafError as error:
                problems.append(error)
    if as_json:
        echo(json.dumps({"endpoints": rows}, default=str))
    elif rows:
        ENDPOINTS.show_rows(rows)
    elif not problems:
        names = ", ".join(stores(settings, None))
        echo(f"No endpoints in saf.toml{names and ' or at '}{names}.")
    for problem in problems:
        complain(str(problem))
    if problems:
        raise typer.Exit(problems[0].exit_code)


@app.command()
def show(name: Name, config: Config = None, as_json: AsJson = False) -> None:
    """Show an endpoint's settings and state.

    No secret is shown.
    """
    settings = load(config)
    (entry,) = chosen(settings, [name]).values()
    row = {**entry.model_dump(mode="json"), **_row(settings, name, entry)}
    row |= {key: without_query(row[key]) for key in ("token_url", "proxy") if row[key]}
    if as_json:
        echo(json.dumps(row, default=str))
        return
    for key, value in (row | {"state": _state(row)}).items():
        if value is not None:
            echo(f"{key}: {value}")


@app.command("history")
def history_(
    name: Name,
    config: Config = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the last failed attempts, newest first, with their answers."""
    with _inbox(config, name) as (connection, subscription_id):
        found = stored.attempts(connection, subscription_id, limit)
    if as_json:
        echo(json.dumps({"attempts": [asdict(entry) for entry in found]}, default=str))
    else:
        ATTEMPTS.show_rows(found)


@app.command("test")
def send_test(name: Name, config: Config = None) -> None:
    """Test an endpoint: send one event of the type saf.test.

    It has the form of the endpoint's mode; calls are refused. No message is stored for it. The
    result is shown.
    """
    (entry,) = chosen(load(config), [name]).values()
    if entry.mode in ("soap", "xmlrpc"):
        raise UsageError(
            f"endpoint {name!r} is called by {entry.mode}: a test would make a real call"
        )
    with waiting(f"waiting for the answer of {entry.shown}"):
        answer = asyncio.run(_test(entry))
    if answer.meaning is not Meaning.DONE:
        raise SafError(f"endpoint {name!r}: {answer.error}, after {answer.seconds:.3f} s")
    echo(f"{name}: HTTP {answer.status} after {answer.seconds:.3f} s")


async def _test(endpoint: Endpoint) -> Answer:
    async with Client(endpoint) as client:
        return await client.post(_test_request(endpoint))


def _test_request(endpoint: Endpoint) -> Request:
    """Return the request for a message of the type saf.test, without data.

    Raises:
        UnreadableBody: the endpoint's template names data.
    """
    columns = {
        "message_id": uuid4().bytes,
        "message_type": "saf.test",
        "created_at": datetime.now(UTC),
        "headers": json.dumps({CONTENT_TYPE: "application/json"}),
        "body": b"{}",
    }
    message = Received(tuple(columns.get(name) for name in READ))
    if endpoint.mode == "batch":
        return envelope.together({message.message_id: envelope.event(message, endpoint)})
    return envelope.request(message, endpoint)


@app.command()
def pause(name: Name, config: Config = None) -> None:
    """Pause an endpoint: send nothing to it until it is resumed.

    Its messages wait, in order.
    """
    with _inbox(config, name) as (connection, subscription_id):
        Book(subscription_id=subscription_id, endpoint=name).pause(connection)
    echo(f"{name}: paused; `saf endpoint resume {name}` continues")


@app.command()
def resume(name: Name, config: Config = None) -> None:
    """Resume an endpoint that is paused, disabled or down."""
    with _inbox(config, name) as (connection, subscription_id):
        Book(subscription_id=subscription_id, endpoint=name).resume(connection)
    echo(f"{name}: resumed")


def command(
    names: Names = None,
    *,
    loop: Annotated[
        bool, typer.Option("--loop", help="Keep running until SIGTERM or Ctrl-C.")
    ] = False,
    stop_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            envvar="SAF_STOP_TIMEOUT",
            metavar="SECONDS",
            help="Seconds that requests in flight may take after SIGTERM.",
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
            with _shown(dispatchers, summaries, loop=loop):
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


@contextmanager
def _shown(
    dispatchers: Sequence[Dispatcher], summaries: Mapping[str, Summary], *, loop: bool
) -> Iterator[None]:
    """Show that dispatchers live, while a block runs them; without a loop, their progress."""
    if not loop:
        with waiting(lambda: "; ".join(f"{name}: {item}" for name, item in [*summaries.items()])):
            yield
        return
    to = (f"{item.name} ({item.endpoint.shown})" for item in dispatchers)
    alive = Alive(
        "saf dispatch --loop",
        f"sends to {listed(to, 'endpoint yet')}",
        lacks="nothing sent (see `saf endpoint list`)",
    )
    with alive.watching(lambda: sum(item.total for item in [*summaries.values()])):
        yield


def chosen(settings: Settings, names: list[str]) -> dict[str, Endpoint]:
    """Return the endpoints with these names, from saf.toml and from the brokers.

    Raises:
        ConfigurationError: no endpoint has this name, or it is invalid.
        Unavailable: a broker that may have the endpoint does not answer.
    """
    if set(names) <= set(settings.endpoints):
        return {name: settings.endpoints[name] for name in names}
    return find(settings).chosen(names)


def _state(row: Mapping[str, Any]) -> str:
    """Return the state of an endpoint in words."""
    paused = "" if row["paused_at"] is None else ", paused"
    return f"{IN_WORDS.get(row['state'], row['state'])}{paused}"


def _row(settings: Settings, name: str, endpoint: Endpoint) -> dict[str, Any]:
    with _inbox_of(settings, name, endpoint) as (connection, subscription_id):
        state = stored.state(connection, subscription_id)
    return {
        "endpoint": name,
        "url": endpoint.shown,
        "subscription": endpoint.subscription or name,
        **asdict(state),
    }


def _inbox(config: Path | None, name: str) -> AbstractContextManager[Inbox]:
    settings = load(config)
    (endpoint,) = chosen(settings, [name]).values()
    return _inbox_of(settings, name, endpoint)


@contextmanager
def _inbox_of(settings: Settings, name: str, endpoint: Endpoint) -> Iterator[Inbox]:
    with (
        unavailable_if_lost(f"the database of endpoint {name!r}"),
        settings.inbox_of(endpoint).connect(role="endpoint", autocommit=True) as connection,
    ):
        check_schema(connection)
        subscription = services.subscription(connection, endpoint.subscription or name)
        yield connection, subscription.subscription_id
