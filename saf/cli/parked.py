"""Parked messages: ``saf parked`` shows why messages wait, e.g. for a destination, and until when.

`list_` shows them by lane, with the next attempt of each, and `retry_now_` makes lanes due now.
`messages`, `discard` and `redirect` are about single messages. `discard` and `redirect` run like
decisions about dead letters (`saf.cli.dead.decide_and_show`), and need ``--all`` without numbers or
a filter; ``--dry-run`` only counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import psycopg
import typer

from saf.cli.brokers import (
    GREATEST,
    MOST_ROWS,
    After,
    AsJson,
    Before,
    Brokers,
    Config,
    Limit,
    Name,
    Round,
    Why,
    chosen,
    ends,
    rows_of,
    say_next,
)
from saf.cli.console import Listing, echo
from saf.cli.dead import MOST, decide_and_show, refuse_all, refuse_unknown, say_staying
from saf.cli.options import Options, grouped
from saf.config import load
from saf.database.pages import Page
from saf.operating import decide_parked
from saf.operating.decide import Decision
from saf.operating.wording import at, counted
from saf.setaside import parked_messages
from saf.setaside.lane import Kind
from saf.setaside.parked_messages import ParkedFilter, ParkedMessage
from saf.setaside.parking import BLOCKED
from saf.setaside.waiting import (
    Lanes,
    Parked,
    Waiting,
    parked,
    place_at,
    retry_now,
    undecided,
)

LIMIT = 100

app = typer.Typer(no_args_is_help=True, help="Messages that wait, and when they are tried next.")

Ids = Annotated[
    list[int] | None,
    typer.Argument(max=GREATEST, help="Numbers, as `saf parked messages` shows them."),
]
Subscription = Annotated[str | None, typer.Option(help="Only what this one set aside.")]
Destination = Annotated[
    str | None, typer.Option(help="Only messages waiting for this destination.")
]
LaneKind = Annotated[Kind | None, typer.Option("--kind", help="Only lanes of this kind.")]
Subject = Annotated[
    str | None, typer.Option(help="Only the lane of this service, key, shard or conversation.")
]
Service = Annotated[str | None, typer.Option(help="Only those for this service.")]
Key = Annotated[str | None, typer.Option(help="Only those with this key.")]
All = Annotated[bool, typer.Option("--all", help="Really all, where no filter is given.")]
CountFirst = Annotated[bool, typer.Option("--dry-run", help="Count matches without changing them.")]


def _lanes(*, kind: Kind | None, **criteria: Any) -> Lanes:
    return Lanes(lane=kind, **criteria)


def _filter(*, ids: list[int] | None, kind: Kind | None, **criteria: Any) -> ParkedFilter:
    return ParkedFilter(parked_ids=ids or None, lane=kind, **criteria)


OF_LANES = {
    "subscription": Subscription,
    "destination": Destination,
    "kind": LaneKind,
    "subject": Subject,
}
LANES = Options(OF_LANES, make=_lanes)
MESSAGES = Options(
    {"ids": Ids, **OF_LANES, "service": Service, "key": Key, "before": Before}, make=_filter
)


@app.command("list")
@grouped
def list_(
    *,
    round_: Brokers,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Lanes per broker, at most.")
    ] = LIMIT,
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
    if as_json:
        counts = {name: found.lanes for name, found in lanes.items()}
        report = {"parked": rows_of(lanes), "lanes": counts, "next": ends(lanes)}
        echo(json.dumps({**report, "errors": round_.errors()}))
    else:
        listing(lanes).show()
        if after is None:
            show_how_many_more(lanes)
        say_next(lanes)
    round_.finish(say=not as_json)


def listing(lanes: Mapping[str, Waiting]) -> Listing:
    """Return a table with a row for each shown lane."""
    rows = Listing("broker", "parked", "lane", "set aside by", "attempts", "next", below="error")
    for name, found in lanes.items():
        for lane in found.shown:
            rows.add(
                name, f"{lane.messages:,}", str(lane.own), lane.subscription, str(lane.attempts),
                _next(lane), below=lane.error,
            )  # fmt: skip
    return rows


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

    done = round_.visit("parked", retry)
    if as_json:
        due = {name: lanes for name, (lanes, _) in done.items()}
        waiting = {name: keys for name, (_, keys) in done.items() if keys}
        echo(json.dumps({"lanes": due, "undecided": waiting, "errors": round_.errors()}))
    else:
        for name, (lanes, keys) in done.items():
            wait = (
                f"; {counted(keys, 'key')} more until you decide about a dead letter"
                if keys
                else ""
            )
            echo(f"{name}: {counted(lanes, 'lane')} to be tried by the next run{wait}")
    round_.finish(say=not as_json)


@grouped
def messages(
    *,
    round_: Brokers,
    criteria: Annotated[ParkedFilter, MESSAGES],
    after: After = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Show parked messages one by one.

    Those that were parked first come first.
    """
    criteria = replace(criteria, after=parked_messages.place_at(after))
    round_.go_on(after)
    pages = round_.visit(
        "parked", lambda connection, _: parked_messages.page(connection, criteria, limit)
    )
    if as_json:
        report = {"parked": rows_of(pages), "next": ends(pages), "errors": round_.errors()}
        echo(json.dumps(report))
    else:
        _listing(pages).show()
        say_next(pages)
    round_.finish(say=not as_json)


def _listing(pages: Mapping[str, Page[ParkedMessage]]) -> Listing:
    listing = Listing(
        "broker", "number", "when", "lane", "set aside by", "service", "key", "bytes", below="error"
    )
    for name, page in pages.items():
        for row in page.shown:
            listing.add(
                name, str(row.parked_id), at(row.parked_at), str(row.lane), row.subscription,
                row.service, row.key or "", f"{row.bytes:,}", below=row.error or "",
            )  # fmt: skip
    return listing


@grouped
def discard(
    *,
    round_: Brokers,
    criteria: Annotated[ParkedFilter, MESSAGES],
    why: Why = "",
    everything: All = False,
    dry_run: CountFirst = False,
    as_json: AsJson = False,
) -> None:
    """Give parked messages up for good.

    What a forwarder or a receiver has in hand stays as it is; --dry-run says what else, and why. A
    dialog that lacks one of them fails at both ends.
    """
    refuse_all(criteria, "parked messages", everything=everything)
    _act(round_, decide_parked.discard, criteria, why, dry_run=dry_run, as_json=as_json)


@grouped
def redirect(
    *,
    to: Annotated[str, typer.Option(help="The destination, by its name in saf.toml.")],
    config: Config = None,
    broker: Name = None,
    criteria: Annotated[ParkedFilter, MESSAGES],
    why: Why = "",
    everything: All = False,
    dry_run: CountFirst = False,
    as_json: AsJson = False,
) -> None:
    """Send parked messages to another destination.

    The forwarder does, in order. Those of receivers and of dialogs stay as they are.
    """
    refuse_all(criteria, "parked messages", everything=everything)
    settings = load(config)
    refuse_unknown(to, settings)
    round_ = Round(chosen(settings, broker))
    decision = partial(decide_parked.redirect, to=to)
    _act(round_, decision, criteria, why, to=to, dry_run=dry_run, as_json=as_json)


app.command("messages")(messages)
app.command("discard")(discard)
app.command("redirect")(redirect)


def _act(
    round_: Round,
    decision: Decision[ParkedFilter],
    criteria: ParkedFilter,
    why: str,
    *,
    to: str | None = None,
    dry_run: bool,
    as_json: bool,
) -> None:
    round_.only(criteria.parked_ids)
    if dry_run:
        _count(round_, criteria, to, as_json=as_json)
        return
    count = partial(parked_messages.count, to=to)
    decide_and_show(round_, "parked", decision, criteria, why=why, count=count, as_json=as_json)


def _count(round_: Round, criteria: ParkedFilter, to: str | None, *, as_json: bool) -> None:
    found = round_.visit(
        "parked", lambda connection, _: parked_messages.count(connection, criteria, MOST, to=to)
    )
    if as_json:
        counts = {name: {"messages": row.messages, "stay": row.staying, "why": dict(row.stays)}
                  for name, row in found.items()}  # fmt: skip
        echo(json.dumps({"parked": counts, "errors": round_.errors()}))
    else:
        for name, row in found.items():
            stay = f"; {counted(row.staying, 'other')} would stay" if row.staying else ""
            echo(f"{name}: {counted(row.messages, 'parked message')}{stay}")
            say_staying(row.stays)
    round_.finish(say=not as_json)
