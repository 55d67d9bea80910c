"""``saf outbox``: the messages of an outbox, by state, service, key and age."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from saf.cli.brokers import (
    After,
    AsJson,
    Brokers,
    Round,
    Since,
    Until,
    moment,
)
from saf.cli.console import Listing, echo, write
from saf.cli.options import grouped
from saf.cli.tables import Table, results_of
from saf.errors import UsageError
from saf.operating import outbox
from saf.operating.outbox import SECONDS, STATES, Details, Sent, Wanted, forwarded
from saf.operating.wording import at

app = typer.Typer(no_args_is_help=True, help="The messages that were sent, and how far they are.")

State = Annotated[str | None, typer.Option(help=f"One of {', '.join(STATES)}. Default: all.")]
Timeout = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit for a statement.")
]
Key = Annotated[
    str | None,
    typer.Option(help="Only messages with this key; such a search is quick."),
]

SENT = Table[Sent](
    *("id", "message id", "state", "service", "key", "type", "bytes", "created"),
    below="waits for",
    cells=lambda row: (
        str(row.id), str(row.message_id), row.state, row.service, row.key or "",
        row.message_type or "", f"{row.bytes:,}", at(row.created_at), _waits_for(row),
    ),
)  # fmt: skip


@app.command("list")
@grouped
def list_(
    *,
    round_: Brokers,
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
    """Show the messages of the outboxes, a page at a time.

    The oldest transactions come first; for parked and dead messages, those that were set aside
    first. Purged messages are gone. Nothing is counted, and a page reads little, however long the
    log is.
    """
    if state is not None and state not in STATES:
        raise UsageError(f"--state {state}: the states are {', '.join(STATES)}")
    place = outbox.place_at(after, state)
    round_.go_on(after)
    wanted = Wanted(state=state, service=service, key=key, since=since, until=until)
    found = round_.visit(
        "outbox",
        lambda connection, _: outbox.messages(
            connection, wanted, after=place, limit=limit, seconds=timeout
        ),
    )
    round_.show_pages("messages", found, SENT, as_json=as_json)


@app.command()
@grouped
def show(
    which: Annotated[
        str, typer.Argument(metavar="ID", help="Id, as `saf outbox list` shows it, or message id.")
    ],
    *,
    round_: Brokers,
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
    asked = round_.visit(
        "outbox",
        lambda connection, _: outbox.details(connection, number, key=key, seconds=timeout),
    )
    found = {name: item for name, item in asked.items() if item is not None}
    if asked and not found and not round_.failed:
        raise UsageError(f"no message {which} in the outbox; purged messages are gone")
    if body:
        for name, item in found.items():
            _write_body(Round({name: round_.brokers[name]}), item.message.id)
        round_.finish(say=False)
        return

    def show_all() -> None:
        for name, item in found.items():
            _show(name, item)

    round_.report({"messages": results_of(found)}, show_all, as_json=as_json)


@app.command("forwarded")
@grouped
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
    """Tell whether all messages sent before a time are forwarded.

    Exit code 0 if they are; 1 if a message is still pending or parked, or has become a dead letter;
    75 if a broker does not answer in time. It shows one message of each kind. A schedule waits for
    it before it works with forwarded messages.
    """
    wanted = Wanted(service=service, since=since, until=until)
    found = round_.visit(
        "outbox", lambda connection, _: forwarded(connection, wanted, seconds=timeout)
    )
    left = not all(result.everything for result in found.values())

    def show() -> None:
        SENT.show_any({name: [*result.left.values()] for name, result in found.items()})
        if not (left or round_.failed):
            echo(f"everything that was sent before {at(until)} has been forwarded")

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
    for body in round_.visit("outbox", lambda connection, _: outbox.body(connection, id_)).values():
        write(body or b"")


def _waits_for(row: Sent) -> str:
    return f"{row.destination}: {row.error or ''}" if row.destination else row.error or ""


def _show(broker: str, details: Details) -> None:
    listing = Listing("what", "is")
    for name, value in {"broker": broker, **details.as_dict()}.items():
        if value not in (None, [], ()) and name not in ("destination", "error"):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            listing.add(name, shown)
    listing.show()
