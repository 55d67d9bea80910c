"""``saf inbox``: the unread messages of an inbox's readers."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Config, Limit, Round, Store, store, stores
from saf.cli.console import Listing, echo
from saf.cli.status import show_dropped
from saf.config import load
from saf.operating.wording import at
from saf.receiving import inbox
from saf.receiving.link import switch
from saf.setaside.dropped import dropped
from saf.setaside.unhandled import unhandled

app = typer.Typer(no_args_is_help=True, help="Messages that are stored and not yet handled.")


class Switch(StrEnum):
    """Notification of receivers: on or off."""

    ON = "on"
    OFF = "off"


@app.command()
def notify(
    state: Annotated[Switch, typer.Argument(help="on or off.")],
    config: Config = None,
    broker: Store = None,
) -> None:
    """Notify receivers of arriving messages, or let them poll.

    With on, receivers that listen are woken; with off, all poll. While it is on, transactions that
    store messages commit one after the other.
    """
    round_ = Round(stores(load(config), broker))
    for where in round_.visit(
        "inbox", lambda connection, _: switch(connection, state is Switch.ON)
    ):
        done = "are woken" if state is Switch.ON else "are no longer woken, and poll"
        echo(f"{where}: receivers that listen {done}")
    round_.finish(say=True)


@app.command()
def status(config: Config = None, broker: Store = None, as_json: AsJson = False) -> None:
    """Show the backlog and the drops of each subscription.

    It covers the subscriptions of the destinations. Messages of types that no receiver has handled
    are named by type.
    """
    round_ = Round(stores(load(config), broker))
    asked = round_.visit(
        "inbox",
        lambda connection, _: (
            inbox.inbox_status(connection),
            dropped(connection),
            unhandled(connection),
        ),
    )
    found = {where: group for where, (group, _, _) in asked.items()}
    counted = {where: group for where, (_, group, _) in asked.items()}
    waiting = {where: group for where, (_, _, group) in asked.items()}
    if as_json:
        rows = [
            {"broker": where, **row.as_dict()} for where, group in found.items() for row in group
        ]
        gone = [{"broker": at, **row.as_dict()} for at, group in counted.items() for row in group]
        by_type = [
            {"broker": at, **row.as_dict()} for at, group in waiting.items() for row in group
        ]
        answer = {
            "subscriptions": rows,
            "unhandled": by_type,
            "dropped": gone,
            "errors": round_.errors(),
        }
        echo(json.dumps(answer))
    else:
        listing = Listing(
            "broker", "subscription", "unread", "lag", "parked", "keys", "dead letters"
        )
        for where, group in found.items():
            for row in group:
                lag = "-" if row.lag_seconds is None else f"{row.lag_seconds:,.0f} s"
                listing.add(
                    where, row.subscription, f"{row.unread:,}", lag,
                    f"{row.parked:,}", f"{row.keys_waiting:,}", f"{row.dead_letters:,}",
                )  # fmt: skip
        listing.show()
        for where, kinds in waiting.items():
            for kind in kinds:
                since = f"{kind.since:%Y-%m-%d %H:%M:%S %Z}"
                echo(f"{where}: {kind.subscription}: {kind}, since {since}")
        show_dropped(counted)
    round_.finish(say=not as_json)


@app.command()
def peek(
    subscription: Annotated[str, typer.Argument(help="Whose messages.")],
    config: Config = None,
    broker: Store = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Show the next messages of a subscription without taking them."""
    round_ = Round(store(load(config), broker))
    found = round_.visit("inbox", lambda connection, _: inbox.peek(connection, subscription, limit))
    if as_json:
        rows = [
            {"broker": where, **message.as_dict()}
            for where, group in found.items()
            for message in group
        ]
        echo(json.dumps({"messages": rows, "errors": round_.errors()}))
    else:
        listing = Listing(
            "id", "message id", "service", "key", "type", "bytes", "received", below="last answer"
        )
        for group in found.values():
            for message in group:
                listing.add(
                    str(message.id), str(message.message_id), message.service, message.key or "",
                    message.message_type or "", f"{message.bytes:,}", at(message.received_at),
                    below=message.last_answer or "",
                )  # fmt: skip
        listing.show()
    round_.finish(say=not as_json)
