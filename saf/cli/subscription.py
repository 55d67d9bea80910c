"""``saf subscription``: the named readers of an inbox, and streams of any log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from saf.broker import services
from saf.broker.services import Start
from saf.cli.brokers import AsJson, Config, Round, Store, everywhere, store, stores
from saf.cli.console import echo
from saf.cli.service import Discard
from saf.cli.tables import Table
from saf.config import load
from saf.errors import UsageError
from saf.log import stream

app = typer.Typer(
    no_args_is_help=True, help="Subscriptions: named readers of an inbox, and streams."
)

Log = Literal["outbox", "inbox"]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]

SUBSCRIPTIONS = Table[services.Subscription](
    *("subscription", "service"),
    cells=lambda row: (row.name, row.service or "(all)"),
    plain=lambda row: {"subscription": row.name, "service": row.service},
)


@app.command()
def create(
    name: Name,
    *,
    service: Annotated[str | None, typer.Option(help="Service whose messages are read.")] = None,
    everything: Annotated[
        bool, typer.Option("--all-services", help="Instead: read the messages for all services.")
    ] = False,
    log: Annotated[
        Log | None,
        typer.Option(
            "--stream", help="Instead: register a stream of Spark that reads this log of --broker."
        ),
    ] = None,
    from_now: Annotated[
        bool, typer.Option("--from-now", help="Only messages stored from now on.")
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
    round_ = Round(store(load(config), broker))
    for where, created in round_.visit(
        "subscription",
        lambda connection, _: services.create_subscription(
            connection, name, service=service, start=start
        ),
    ).items():
        echo(f"{where}: subscription {name} {'created' if created else 'already exists'}")
    round_.finish(say=True)


def _register(name: str, log: Log, start: Start, config: Config, broker: Store) -> None:
    if broker is None:
        raise UsageError("a stream belongs to a broker or fleet: add --broker NAME")
    round_ = Round(everywhere(load(config), broker))
    for where, created in round_.visit(
        "subscription",
        lambda connection, _: stream.create(
            connection, f"database {connection.info.dbname!r}", log, name, start
        ),
    ).items():
        echo(f"{where}: stream {name} {'registered' if created else 'already exists'}")
    round_.finish(say=True)


@app.command("list")
def list_(config: Config = None, broker: Store = None, as_json: AsJson = False) -> None:
    """Show the subscriptions of the destinations' inboxes."""
    round_ = Round(stores(load(config), broker))
    found = round_.visit("subscription", lambda connection, _: services.subscriptions(connection))
    round_.show_rows("subscriptions", found, SUBSCRIPTIONS, as_json=as_json)


@app.command()
def drop(
    name: Name,
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
) -> None:
    """Forget a stream of Spark, so that no messages are kept for it.

    Its query cannot continue from its checkpoint: stop it first. If several brokers have such a
    stream, or both logs of one broker, nothing is dropped until you name one.
    """
    round_ = Round(everywhere(load(config), broker))
    asked = round_.visit("subscription", lambda connection, _: stream.logs(connection, name))
    found = {where: [item for item in logs if log in (None, item)] for where, logs in asked.items()}
    found = {where: logs for where, logs in found.items() if logs}
    _refuse_several(name, found, round_, broker)
    dropping = Round({where: round_.brokers[where] for where in found})
    for where, logs in dropping.visit(
        "subscription",
        lambda connection, _: [
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
            f"there is a stream {name!r} in {', '.join(found)}, and none is dropped: which one? "
            "Use --broker NAME"
        )
    if broker is None and round_.failed:
        echo("not every broker answers, so nothing is dropped: add --broker NAME", err=True)
        round_.finish(say=True)
    places = [where for where, logs in found.items() if len(logs) > 1]
    if places:
        raise UsageError(
            f"there is a stream {name!r} of both logs in {', '.join(places)}, and none is dropped: "
            "which one? Use --stream outbox or --stream inbox"
        )


@app.command()
def remove(
    name: Name, config: Config = None, broker: Store = None, discard: Discard = False
) -> None:
    """Remove a reader, with its parked messages and dead letters."""
    round_ = Round(store(load(config), broker))
    for where in round_.visit(
        "subscription",
        lambda connection, _: services.remove_subscription(connection, name, discard=discard),
    ):
        echo(f"{where}: subscription {name} removed")
    round_.finish(say=True)
