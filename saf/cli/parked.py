"""Parked messages: ``saf parked`` shows why messages wait, e.g. for a destination, and until when.

`list_` shows them by lane, with the next attempt of each, and `retry_now_` makes lanes due now.
`messages` shows single messages, and the decisions of `saf.cli.decisions` are about these. Their
``--dry-run`` only counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import psycopg
import typer

from saf.cli.brokers import (
    MOST_ROWS,
    After,
    AsJson,
    Before,
    Brokers,
    Limit,
    Round,
    Why,
)
from saf.cli.console import echo
from saf.cli.decisions import MOST, Key, Service, add_decisions, numbers, say_staying
from saf.cli.options import Options, grouped
from saf.cli.tables import Table, ends, say_next
from saf.operating.wording import at, counted
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED
from saf.setaside.selection import ParkedMessage, ParkedMessages
from saf.setaside.waiting import (
    Lanes,
    Parked,
    Waiting,
    parked,
    place_at,
    retry_now,
    undecided,
)

app = typer.Typer(no_args_is_help=True, help="Messages that wait, and when they are tried next.")


Subscription = Annotated[
    str | None, typer.Option(help="Only messages that this subscription set aside.")
]
Destination = Annotated[
    str | None, typer.Option(help="Only messages that wait for this destination.")
]
LaneKind = Annotated[Kind | None, typer.Option("--kind", help="Only lanes of this kind.")]
Subject = Annotated[
    str | None, typer.Option(help="Only the lane of this service, key, shard or conversation.")
]


def _lanes(*, kind: Kind | None, **criteria: Any) -> Lanes:
    return Lanes(lane=kind, **criteria)


def _selection(*, ids: list[int] | None, kind: Kind | None, **criteria: Any) -> ParkedMessages:
    return ParkedMessages(numbers=ids or None, lane=kind, **criteria)


OF_LANES = {
    "subscription": Subscription,
    "destination": Destination,
    "kind": LaneKind,
    "subject": Subject,
}
LANES = Options(OF_LANES, make=_lanes)
MESSAGES = Options(
    {
        "ids": numbers("saf parked messages"),
        **OF_LANES,
        "service": Service,
        "key": Key,
        "before": Before,
    },
    make=_selection,
)
CountFirst = Annotated[bool, typer.Option("--dry-run", help="Count matches without changing them.")]

BY_LANE = Table[Parked](
    *("parked", "lane", "set aside by", "attempts", "next"),
    below="error",
    cells=lambda lane: (
        f"{lane.messages:,}", str(lane.own), lane.subscription, str(lane.attempts), _next(lane),
        lane.error,
    ),
)  # fmt: skip
ONE_BY_ONE = Table[ParkedMessage](
    *("number", "when", "lane", "set aside by", "service", "key", "bytes"),
    below="error",
    cells=lambda row: (
        str(row.parked_id), at(row.parked_at), str(row.lane), row.subscription, row.service,
        row.key or "", f"{row.bytes:,}", row.error or "",
    ),
)  # fmt: skip


@app.command("list")
@grouped
def list_(
    *,
    round_: Brokers,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Lanes per broker, at most.")
    ] = 100,
    criteria: Annotated[Lanes, LANES],
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """Show the lanes of parked messages.

    It shows the number of messages in each, why they wait, and the next attempt. If there are more
    lanes than the limit, it shows those that block the most messages.
    """
    place = place_at(after)
    round_.go_on(after)
    lanes = round_.visit(
        "parked", lambda connection, _: parked(connection, limit, lanes=criteria, after=place)
    )

    def show() -> None:
        BY_LANE.show(lanes)
        if after is None:
            show_how_many_more(lanes)
        say_next(lanes)

    counts = {name: found.lanes for name, found in lanes.items()}
    answer = {"parked": BY_LANE.plain(lanes), "lanes": counts, "next": ends(lanes)}
    round_.report(answer, show, as_json=as_json)


def show_how_many_more(lanes: Mapping[str, Waiting]) -> None:
    """Print the number of lanes that are not shown, by broker."""
    for name, found in lanes.items():
        if more := found.lanes - len(found.shown):
            echo(f"{name}: {counted(more, 'lane')} more; {found.messages:,} parked in all")


def _next(lane: Parked) -> str:
    """Return the time of a lane's next attempt, in words."""
    if lane.awaits_handler:
        return "by a receiver that handles it"
    if lane.kind == Kind.AHEAD:
        return "when it has come"
    if lane.braked:
        return "after retry-now"
    if lane.next_attempt_at >= BLOCKED:
        return "after a decision about a dead letter"
    return "now" if lane.due else at(lane.next_attempt_at)


@app.command("retry-now")
@grouped
def retry_now_(
    *,
    round_: Brokers,
    criteria: Annotated[Lanes, LANES],
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let the next run retry parked messages without waiting longer.

    The next run of the forwarder, or a receiver, retries them. A key that waits for your decision
    about its dead letter is counted, and still waits: see `saf dead`.
    """

    def retry(connection: psycopg.Connection[Any], _: object) -> tuple[int, int]:
        return retry_now(connection, lanes=criteria, why=why), undecided(connection, criteria)

    def show() -> None:
        for name, (lanes, keys) in done.items():
            more = f"{counted(keys, 'key')} more until you decide about a dead letter"
            tried = f"{counted(lanes, 'lane')} to be tried by the next run"
            echo(f"{name}: {tried}" + (f"; {more}" if keys else ""))

    done = round_.visit("parked", retry)
    due = {name: lanes for name, (lanes, _) in done.items()}
    waiting = {name: keys for name, (_, keys) in done.items() if keys}
    round_.report({"lanes": due, "undecided": waiting}, show, as_json=as_json)


@app.command()
@grouped
def messages(
    *,
    round_: Brokers,
    criteria: Annotated[ParkedMessages, MESSAGES],
    after: After = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Show parked messages one by one.

    Those that were parked first come first.
    """
    criteria = criteria.going_on(after)
    round_.go_on(after)
    pages = round_.visit("parked", lambda connection, _: criteria.page(connection, limit))
    round_.show_pages("parked", pages, ONE_BY_ONE, as_json=as_json)


def _count(
    round_: Round, criteria: ParkedMessages, *, to: str | None = None, as_json: bool
) -> None:
    found = round_.visit("parked", lambda connection, _: criteria.count(connection, MOST, to=to))

    def show() -> None:
        for name, row in found.items():
            stay = f"; {counted(row.staying, 'other')} would stay" if row.staying else ""
            echo(f"{name}: {counted(row.messages, 'parked message')}{stay}")
            say_staying(row.stays)

    counts = {name: {"messages": row.messages, "stay": row.staying, "why": dict(row.stays)}
              for name, row in found.items()}  # fmt: skip
    round_.report({"parked": counts}, show, as_json=as_json)


add_decisions(
    app,
    "parked",
    MESSAGES,
    _count,
    CountFirst,
    discard="""Give parked messages up for good.

    Messages that a forwarder or a receiver has in hand stay; --dry-run shows which others stay, and
    why. A dialog that lacks one of the discarded messages fails at both ends.
    """,
    redirect="""Send parked messages to another destination.

    The forwarder delivers them, in order. Messages of receivers and of dialogs stay.
    """,
)
