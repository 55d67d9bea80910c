"""``saf outbox``, ``saf inbox`` and ``saf message``: messages that were sent, or stored.

`outbox` shows them by state, service, key and age, `inbox` what its readers have not handled, and
`message` one message in all brokers, from its sender to its handlers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import (
    After,
    AsJson,
    AtStore,
    AtStores,
    Brokers,
    Commands,
    Everywhere,
    Limit,
    Round,
    Since,
    Until,
    moment,
)
from saf.cli.console import Listing, Table, complain, echo, results_of, rows_of, write
from saf.cli.status import DROPPED
from saf.errors import UsageError
from saf.operating import held, journey, outbox
from saf.operating.journey import Decided, Stay
from saf.operating.outbox import SECONDS, STATES, Details, Sent, Wanted, forwarded
from saf.operating.places import is_source
from saf.operating.wording import at, counted
from saf.receiving import inbox
from saf.receiving.inbox import Peeked, SubscriptionStatus
from saf.receiving.link import switch
from saf.setaside.dropped import dropped
from saf.setaside.unhandled import unhandled

outboxes = Commands(help="Outboxes: messages that were sent, and their state.")

State = Annotated[
    str | None, typer.Option(help=f"Only messages in this state: {', '.join(STATES)}.")
]
Timeout = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit for a statement.")
]
Key = Annotated[
    str | None,
    typer.Option(help="Only messages with this key. This is the quickest search."),
]

SENT = Table[Sent](
    *("id", "message id", "state", "service", "key", "type", "bytes", "created"),
    things="messages in the outbox",
    below="waits for",
    cells=lambda row: (
        str(row.id), str(row.message_id), row.state, row.service, row.key or "",
        row.message_type or "", f"{row.bytes:,}", at(row.created_at), _waits_for(row),
    ),
)  # fmt: skip


@outboxes.command("list")
def list_(
    *,
    round_: Everywhere,
    sources: Annotated[
        bool,
        typer.Option("--sources", help="Only outboxes of sources, which `saf forward` reads."),
    ] = False,
    state: State = None,
    service: Annotated[str | None, typer.Option(help="Only messages for this service.")] = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Messages per broker, at most.")
    ] = 100,
    after: After = None,
    timeout: Timeout = SECONDS,
    as_json: AsJson = False,
) -> None:
    """List the messages of the outboxes, a page at a time.

    The oldest transactions come first; for parked and dead messages, those that were set aside
    first. Purged messages are gone. Nothing is counted, and a page reads little, however long the
    log is.
    """
    if state is not None and state not in STATES:
        raise UsageError(f"--state {state}: the states are {', '.join(STATES)}")
    place = outbox.place_at(after, state)
    if sources:
        round_ = round_.among(name for name in round_.brokers if is_source(round_.settings, name))
    round_.go_on(after)
    wanted = Wanted(state=state, service=service, key=key, since=since, until=until)
    round_.show_pages(
        "outbox",
        lambda connection: outbox.messages(
            connection, wanted, after=place, limit=limit, seconds=timeout
        ),
        "messages",
        SENT,
        as_json=as_json,
        matching=wanted != Wanted(),
    )


@outboxes.command()
def show(
    which: Annotated[
        str, typer.Argument(metavar="ID", help="Id, as `saf outbox list` shows it, or message id.")
    ],
    *,
    round_: Everywhere,
    key: Annotated[
        str | None, typer.Option(help="Key of the message, to find a message id sooner.")
    ] = None,
    body: Annotated[
        bool, typer.Option("--body", help="Write only its body to standard output.")
    ] = False,
    timeout: Timeout = SECONDS,
    as_json: AsJson = False,
) -> None:
    """Show one message of an outbox: where it is, and why it waits.

    A message id is searched in all outboxes; an id needs --broker.
    """
    number = _number(which)
    round_.only(isinstance(number, int))

    def read(connection: psycopg.Connection[Any]) -> tuple[Details, list[Decided]] | None:
        item = outbox.details(connection, number, key=key, seconds=timeout)
        if item is None:
            return None
        return item, journey.decisions(connection, item.message.message_id)

    asked = round_.visit("outbox", read)
    shown = {name: item for name, item in asked.items() if item is not None}
    found = {name: item for name, (item, _) in shown.items()}
    if asked and not found and not round_.failed:
        raise UsageError(f"no message {which} in the outbox; purged messages are gone")
    if body:
        for name, item in found.items():
            _write_body(round_.among([name]), item.message.id)
        round_.finish(say=False)
        return

    def show_all() -> None:
        for name, (item, decided) in shown.items():
            _show_details(name, item, decided)

    round_.report({"messages": results_of(found)}, show_all, as_json=as_json)


@outboxes.command("forwarded")
def forwarded_(
    *,
    until: Annotated[
        datetime,
        typer.Option(parser=moment, metavar="TIME", help="Messages created before this time."),
    ],
    round_: Brokers,
    service: Annotated[str | None, typer.Option(help="Only messages for this service.")] = None,
    since: Since = None,
    timeout: Timeout = SECONDS,
    as_json: AsJson = False,
) -> None:
    """Check that all messages sent before a time are forwarded.

    Exit code 0 if they are; 1 if a message is still pending or parked, or has become a dead letter;
    75 if a broker does not answer in time. It shows one message of each kind. A schedule waits for
    it before it works with forwarded messages. Without --broker, it checks the sources.
    """
    wanted = Wanted(service=service, since=since, until=until)
    found = round_.visit(
        "outbox", lambda connection: forwarded(connection, wanted, seconds=timeout)
    )
    left = not all(result.everything for result in found.values())

    def show() -> None:
        SENT.show_any({name: [*result.left.values()] for name, result in found.items()})
        if not (left or round_.failed):
            echo(f"everything sent before {at(until)} is forwarded")

    code = int(left and not round_.failed)
    round_.report({"brokers": results_of(found)}, show, as_json=as_json, found=code)


def _number(text: str) -> int | UUID:
    if text.isascii() and text.isdigit() and len(text) <= 18:  # noqa: PLR2004 - a bigint's digits
        return int(text)
    try:
        return UUID(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is neither an id, as `saf outbox list` shows it, nor a message id"
        ) from None


def _write_body(round_: Round, id_: int) -> None:
    for body in round_.visit("outbox", lambda connection: outbox.body(connection, id_)).values():
        write(body or b"")


def _waits_for(row: Sent) -> str:
    return f"{row.destination}: {row.error or ''}" if row.destination else row.error or ""


MOMENTS = ("created_at", "deliver_at", "expires_at")


def _show_details(broker: str, details: Details, decided: Sequence[Decided]) -> None:
    listing = Listing("what", "is")
    for name, value in {"broker": broker, **details.as_dict()}.items():
        if value not in (None, [], ()) and name not in ("destination", "error"):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            shown = at(datetime.fromisoformat(shown)) if name in MOMENTS else shown
            listing.add(name, shown)
    for decision in reversed(decided):
        who = decision.person or decision.who
        why = f": {decision.why}" if decision.why else ""
        listing.add("decided", f"{at(decision.audit_at)}  {decision.words}, by {who}{why}")
    listing.show()


inboxes = Commands(help="Inboxes: messages that are stored and not yet handled.")


SUBSCRIPTIONS = Table[SubscriptionStatus](
    *("subscription", "unread", "lag", "parked", "keys", "dead letters", "receivers"),
    things="subscriptions",
    cells=lambda row: (
        row.subscription, f"{row.unread:,}",
        "-" if row.lag_seconds is None else f"{row.lag_seconds:,.0f} s",
        f"{row.parked:,}", f"{row.keys_waiting:,}", f"{row.dead_letters:,}",
        f"{row.receivers:,}",
    ),
)  # fmt: skip
STORED = Table[Peeked](
    *("id", "message id", "service", "key", "type", "bytes", "received"),
    things="unread messages",
    below="last answer",
    cells=lambda row: (
        str(row.id), str(row.message_id), row.service, row.key or "", row.message_type or "",
        f"{row.bytes:,}", at(row.received_at), row.last_answer or "",
    ),
)  # fmt: skip


class Switch(StrEnum):
    """Notification of receivers: on or off."""

    ON = "on"
    OFF = "off"


@inboxes.command()
def notify(
    state: Annotated[Switch, typer.Argument(help="on or off.")],
    *,
    round_: AtStores,
) -> None:
    """Notify receivers of arriving messages, or let them poll.

    With on, receivers that listen are woken; with off, all poll. While it is on, transactions that
    store messages commit one after the other.
    """
    done = "are woken" if state is Switch.ON else "are no longer woken, and poll"
    round_.tell(
        "inbox",
        lambda connection: switch(connection, state is Switch.ON),
        lambda _: f"receivers that listen {done}",
    )


@inboxes.command()
def status(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """Show each subscription's backlog, drops and connected receivers.

    Messages of types that no receiver has handled are named by type. Receivers are known by their
    application_name, "saf receive" and the subscription, which sessions of an application's own
    engine or pool lack.
    """
    asked = round_.visit(
        "inbox",
        lambda connection: (
            inbox.inbox_status(connection),
            dropped(connection),
            unhandled(connection),
        ),
    )
    found = {where: group for where, (group, _, _) in asked.items()}
    drops = {where: group for where, (_, group, _) in asked.items()}
    waiting = {where: group for where, (_, _, group) in asked.items()}

    def show() -> None:
        SUBSCRIPTIONS.show(found)
        for where, kinds in waiting.items():
            for kind in kinds:
                echo(f"{where}: {kind.subscription}: {kind}, since {at(kind.since)}")
        DROPPED.show_any(drops)

    answer = {
        "subscriptions": rows_of(found),
        "unhandled": rows_of(waiting),
        "dropped": rows_of(drops),
    }
    round_.report(answer, show, as_json=as_json)


@inboxes.command()
def peek(
    subscription: Annotated[str, typer.Argument(help="Name of the subscription.")],
    *,
    round_: AtStore,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the next messages of a subscription without taking them."""
    found = round_.visit("inbox", lambda connection: inbox.peek(connection, subscription, limit))
    answer = {"messages": rows_of(found)}

    def show() -> None:
        if found:
            STORED.show_rows(chain(*found.values()))

    round_.report(answer, show, as_json=as_json)


def message(
    which: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Message id, as `saf outbox list` shows it, or `message.message_id`; or its name.",
        ),
    ],
    *,
    service: Annotated[
        str | None, typer.Option(help="Service that a named message is for. Default: all.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Key of the message: only its shard is searched. Default: any."),
    ] = None,
    sent: Annotated[
        datetime | None,
        typer.Option(
            parser=moment,
            metavar="TIME",
            help="Approximate time at which it was sent: the search begins there.",
        ),
    ] = None,
    round_: Everywhere,
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds to search at each broker.")
    ] = journey.SECONDS,
    as_json: AsJson = False,
) -> None:
    """Show where one message is, in all brokers.

    It shows what each broker knows of the message, the first event first: held until when, sent,
    stored, taken by which subscription, failed attempts, parked, dead, and operators' decisions.
    Logs are searched from their ends; the part that was not searched is named. A name shows when
    each service gets its message of this name, or got it, as long as the name is known; and the
    last messages of this name that operators have cancelled.
    """
    names = round_.visit("outbox", lambda connection: held.named(connection, which, service))
    round_ = round_.answering(names)
    cancelled = round_.visit("outbox", lambda connection: held.cancelled(connection, which))
    ids = {row.message_id: row.sent_at for rows in names.values() for row in rows}
    with suppress(ValueError):
        ids.setdefault(UUID(which), sent)
    found = [
        (name, item)
        for message_id, sent_at in ids.items()
        for name, item in round_.visit(
            "outbox",
            partial(_stay, message_id, key, about=sent or sent_at, seconds=timeout),
        ).items()
    ]
    known = [(name, item) for name, item in found if not item.nothing]
    unfinished = [words for name, item in found for words in _unfinished(name, item)]
    if not (known or any(names.values()) or any(cancelled.values()) or round_.failed):
        raise UsageError(". ".join([f"no broker has message {which}", *unfinished]))
    if as_json:
        stays = [{"broker": name, **item.as_dict()} for name, item in known]
        answer = {
            "message": stays,
            "names": rows_of(names),
            "cancelled": rows_of(cancelled),
            "errors": round_.errors(),
        }
        echo(json.dumps(answer))
    else:
        round_.say_failures()
        for name, rows in names.items():
            for row in rows:
                echo(f"{name}: {row.words}")
        for name, decisions in cancelled.items():
            for decision in decisions:
                echo(f"{name}: {decision.words}")
        if known:
            traces = [trace for name, item in known for trace in _history(name, item)]
            HISTORY.show_rows(_in_order(traces))
    for words in unfinished:
        complain(words)
    round_.finish(say=not as_json)


def _stay(
    message_id: UUID,
    key: str | None,
    connection: psycopg.Connection[Any],
    *,
    about: datetime | None,
    seconds: float,
) -> Stay:
    return journey.stay(connection, message_id, key, about=about, seconds=seconds)


def _unfinished(broker: str, stay: Stay) -> Iterator[str]:
    """Describe the logs of a broker that were not searched to the end."""
    for log, search in stay.unfinished.items():
        yield (
            f"the {log} of broker {broker!r} was searched only for messages {search.said}: add "
            "--sent TIME, the message's --key, or --timeout with more seconds"
        )


def _history(broker: str, stay: Stay) -> Iterator[Trace]:
    """Yield what a broker knows of a message."""
    if stay.held is not None:
        row = stay.held
        until = f"refused at {at(row.due)}" if row.refused else f"held until {at(row.due)}"
        what = f"to {row.service}"
        yield row.created_at, (broker, until, what, row.refused or "")
    if stay.sent is not None:
        sent = stay.sent.message
        yield sent.created_at, (broker, f"sent, {sent.state}", f"to {sent.service}")
    if stay.stored is not None:
        yield stay.stored.received_at, (broker, "stored", f"for {stay.stored.service}")
    for reading in stay.readings:
        yield None, (broker, "taken" if reading.complete else "unread", reading.subscription)
    for tried in stay.attempts:
        yield tried.at, (broker, tried.words, tried.subscription, tried.error)
    for aside in stay.aside:
        what = aside.reason or ""
        if aside.lane is not None:
            what = f"{aside.lane}, {counted(aside.attempts or 0, 'attempt')}"
        words = f"{aside.state}: {what}"
        yield aside.since, (broker, words, aside.subscription, aside.error or "")
    for decided in stay.decided:
        who = decided.person or decided.who
        yield decided.audit_at, (broker, decided.words, who, decided.why)


def _in_order(traces: Sequence[Trace]) -> list[Trace]:
    """Return traces by time; those whose time is not recorded are last."""
    dated = [(moment, cells) for moment, cells in traces if moment is not None]
    return [*sorted(dated, key=itemgetter(0)), *(trace for trace in traces if trace[0] is None)]


Trace = tuple[datetime | None, tuple[str, ...]]
"""When something happened to a message, and the broker, what it was, by whom, and why."""

HISTORY = Table[Trace](
    *("broker", "when", "what", "by"),
    things="traces of the message",
    below="why",
    cells=lambda trace: (trace[1][0], at(trace[0]) if trace[0] else "", *trace[1][1:]),
)
