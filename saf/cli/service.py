"""``saf service`` and ``saf subscription``: services of a broker, their readers, and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

import psycopg
import typer

from saf.broker import services
from saf.broker.services import Start
from saf.cli.brokers import (
    AsJson,
    AtStore,
    Commands,
    Config,
    Everywhere,
    Round,
    Store,
    Yes,
    round_at,
)
from saf.cli.console import Table, confirm, echo
from saf.errors import UsageError
from saf.log import stream
from saf.operating.places import everywhere, store
from saf.operating.wording import counted, first_of

app = Commands(help="Services: what messages are addressed to.")

Service = Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.")]
Discard = Annotated[
    bool, typer.Option("--discard", help="Discard the messages that are left, after asking.")
]

SERVICES = Table[services.Service](
    *("service", "subscriptions"),
    things="services",
    cells=lambda row: (row.name, ", ".join(row.subscriptions)),
    plain=lambda row: {"service": row.name, "subscriptions": row.subscriptions},
)


@app.command()
def create(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of the services.")],
    *,
    refuse_others: Annotated[
        bool,
        typer.Option(
            "--refuse-others",
            help="Create a broker's first services even if its inbox has messages for others.",
        ),
    ] = False,
    round_: AtStore,
) -> None:
    """Create services at a broker.

    Each has a subscription of the same name. A broker without services stores messages for any
    service; a broker with services, for these only. Messages for others wait at their sources, and
    `saf parked list` shows them there.
    """

    def make(connection: psycopg.Connection[Any]) -> list[str]:
        first = not services.services(connection)
        created = services.create_services(connection, names, refuse_others=refuse_others)
        only = ["from now on, it stores messages for its services only; others wait"]
        return [
            f"service {name} {'created' if name in created else 'already exists'}" for name in names
        ] + only * first

    round_.tell("service", make, list)


@app.command("list")
def list_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List services, and the subscriptions that read their messages."""
    round_.show_rows("service", services.services, "services", SERVICES, as_json=as_json)


@app.command()
def remove(name: Service, *, round_: AtStore, discard: Discard = False, yes: Yes = False) -> None:
    """Remove a service and its subscriptions.

    New messages for it wait at their sources. Without its last service, a broker stores messages
    for any service again.
    """
    _confirm(f"service {name!r}", round_, discard=discard, yes=yes)

    def forget(connection: psycopg.Connection[Any]) -> list[str]:
        given_up = services.remove_service(connection, name, discard=discard)
        left = services.services(connection)
        any_again = ["no service is left, so it stores messages for any service again"]
        return [f"service {name} removed{_discarded(given_up)}"] + any_again * (not left)

    round_.tell("service", forget, list)


def _discarded(given_up: Sequence[UUID]) -> str:
    """Return how many messages were discarded, and the first ids, in words."""
    if not given_up:
        return ""
    return f"; {counted(len(given_up), 'message')} discarded {first_of(map(str, given_up))}"


def _confirm(what: str, round_: Round, *, discard: bool, yes: bool) -> None:
    """Ask before messages are discarded."""
    if discard:
        at = ", ".join(round_.brokers)
        confirm(f"Remove {what} at {at}, and discard the messages that are left?", yes=yes)


subscriptions = Commands(help="Subscriptions: named readers of an inbox, and streams.")

Log = Literal["outbox", "inbox"]
Subscription = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]

SUBSCRIPTIONS = Table[services.Subscription](
    *("subscription", "service"),
    things="subscriptions",
    cells=lambda row: (row.name, row.service or "(all)"),
    plain=lambda row: {"subscription": row.name, "service": row.service},
)


@subscriptions.command("create")
def create_subscription(
    name: Subscription,
    *,
    service: Annotated[str | None, typer.Option(help="Service whose messages are read.")] = None,
    everything: Annotated[
        bool, typer.Option("--all-services", help="Read the messages for all services instead.")
    ] = False,
    log: Annotated[
        Log | None,
        typer.Option(
            "--stream", help="Register a stream of Spark instead, which reads this log of --broker."
        ),
    ] = None,
    from_now: Annotated[
        bool, typer.Option("--from-now", help="Read only messages stored from now on.")
    ] = False,
    config: Config = None,
    broker: Store = None,
) -> None:
    """Add a reader to a service, or register a stream.

    Each reader of a service gets every message.
    """
    if [service is not None, everything, log is not None].count(True) != 1:
        raise UsageError(
            "whose messages? Use either --service NAME or --all-services; or, for a stream, which "
            "log: --stream outbox"
        )
    start: Start = "now" if from_now else "beginning"
    if log is not None:
        _register(name, log, start, config, broker)
        return
    round_at(store, config, broker).tell(
        "subscription",
        lambda connection: services.create_subscription(
            connection, name, service=service, start=start
        ),
        lambda created: f"subscription {name} {'created' if created else 'already exists'}",
    )


def _register(name: str, log: Log, start: Start, config: Config, broker: Store) -> None:
    if broker is None:
        raise UsageError("a stream belongs to a broker or fleet: add --broker NAME")
    round_at(everywhere, config, broker).tell(
        "subscription",
        lambda connection: stream.create(
            connection, f"database {connection.info.dbname!r}", log, name, start
        ),
        lambda created: f"stream {name} {'registered' if created else 'already exists'}",
    )


@subscriptions.command("list")
def list_subscriptions(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List the subscriptions of inboxes."""
    round_.show_rows(
        "subscription", services.subscriptions, "subscriptions", SUBSCRIPTIONS, as_json=as_json
    )


@subscriptions.command()
def drop(
    name: Subscription,
    *,
    log: Annotated[
        Log | None,
        typer.Option("--stream", help="Log of the stream. Default: the log that has it."),
    ] = None,
    config: Config = None,
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker", metavar="NAME", help="Broker or fleet. Default: the broker that has it."
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Drop a stream of Spark, after asking: no messages are kept for it.

    Its query cannot continue from its checkpoint: stop it first. If several brokers have such a
    stream, or both logs of one broker, nothing is dropped until you name one.
    """
    round_ = round_at(everywhere, config, broker)
    asked = round_.visit("subscription", lambda connection: stream.logs(connection, name))
    found = {where: [item for item in logs if log in (None, item)] for where, logs in asked.items()}
    found = {where: logs for where, logs in found.items() if logs}
    _refuse_several(name, found, round_, broker)
    if found:
        confirm(f"Drop stream {name!r} at {', '.join(found)}? Its query cannot continue.", yes=yes)
    dropping = round_.among(found)
    for where, logs in dropping.visit(
        "subscription",
        lambda connection: [
            item
            for item in stream.logs(connection, name)
            if log in (None, item) and stream.drop(connection, item, name)
        ],
    ).items():
        for item in logs:
            echo(f"{where}: stream {name} of the {item} dropped")
    round_.failed += dropping.failed
    round_.finish(say=True)


def _refuse_several(
    name: str, found: Mapping[str, list[str]], round_: Round, broker: str | None
) -> None:
    """Raise, before anything is dropped, unless it is clear which stream is meant."""
    if not found and not round_.failed:
        raise UsageError(f"no stream {name!r}: `saf status` lists the streams")
    if broker is None and len(found) > 1:
        raise UsageError(
            f"stream {name!r} exists at {', '.join(found)}, so none is dropped: choose one with "
            "--broker NAME"
        )
    if broker is None and round_.failed:
        echo("not every broker answers, so nothing is dropped: add --broker NAME", err=True)
        round_.finish(say=True)
    places = [where for where, logs in found.items() if len(logs) > 1]
    if places:
        raise UsageError(
            f"stream {name!r} of both logs exists at {', '.join(places)}, so none is dropped: "
            "choose one with --stream outbox or --stream inbox"
        )


@subscriptions.command("remove")
def remove_subscription(
    name: Subscription, *, round_: AtStore, discard: Discard = False, yes: Yes = False
) -> None:
    """Remove a reader, with its parked messages and dead letters."""
    _confirm(f"subscription {name!r}", round_, discard=discard, yes=yes)
    round_.tell(
        "subscription",
        lambda connection: services.remove_subscription(connection, name, discard=discard),
        lambda given_up: f"subscription {name} removed{_discarded(given_up)}",
    )
