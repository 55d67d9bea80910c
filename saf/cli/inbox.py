"""``saf inbox``: the unread messages of an inbox's readers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Config, Limit, Round, Store, store, stores
from saf.cli.console import Listing, echo
from saf.cli.status import DROPPED
from saf.cli.tables import Table, rows_of
from saf.config import load
from saf.operating.wording import at
from saf.receiving import inbox
from saf.receiving.inbox import SubscriptionStatus
from saf.receiving.link import switch
from saf.setaside.dropped import dropped
from saf.setaside.unhandled import unhandled

app = typer.Typer(no_args_is_help=True, help="Messages that are stored and not yet handled.")


SUBSCRIPTIONS = Table[SubscriptionStatus](
    *("subscription", "unread", "lag", "parked", "keys", "dead letters"),
    cells=lambda row: (
        row.subscription, f"{row.unread:,}",
        "-" if row.lag_seconds is None else f"{row.lag_seconds:,.0f} s",
        f"{row.parked:,}", f"{row.keys_waiting:,}", f"{row.dead_letters:,}",
    ),
)  # fmt: skip


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

    def show() -> None:
        SUBSCRIPTIONS.show(found)
        for where, kinds in waiting.items():
            for kind in kinds:
                since = f"{kind.since:%Y-%m-%d %H:%M:%S %Z}"
                echo(f"{where}: {kind.subscription}: {kind}, since {since}")
        DROPPED.show_any(counted)

    answer = {
        "subscriptions": rows_of(found),
        "unhandled": rows_of(waiting),
        "dropped": rows_of(counted),
    }
    round_.report(answer, show, as_json=as_json)


@app.command()
def peek(
    subscription: Annotated[str, typer.Argument(help="Subscription whose messages are shown.")],
    config: Config = None,
    broker: Store = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Show the next messages of a subscription without taking them."""
    round_ = Round(store(load(config), broker))
    found = round_.visit("inbox", lambda connection, _: inbox.peek(connection, subscription, limit))

    def show() -> None:
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

    round_.report({"messages": rows_of(found)}, show, as_json=as_json)
