"""``saf parked``: messages that wait, e.g. for a destination, and their next attempts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import psycopg
import typer

from saf.cli import parked_messages
from saf.cli.brokers import (
    MOST_ROWS,
    After,
    AsJson,
    Config,
    Name,
    Round,
    Why,
    chosen,
    ends,
    rows_of,
    say_next,
)
from saf.cli.console import echo
from saf.cli.listing import Listing
from saf.cli.parked_messages import Destination, LaneKind, Subject, Subscription
from saf.config import load
from saf.operating.wording import at, counted
from saf.setaside.lane import Kind
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

app = typer.Typer(no_args_is_help=True, help="Messages that wait, and when they are tried next.")

LIMIT = 100


@app.command("list")
def list_(
    *,
    config: Config = None,
    broker: Name = None,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="Lanes per broker, at most.")
    ] = LIMIT,
    subscription: Subscription = None,
    destination: Destination = None,
    kind: LaneKind = None,
    subject: Subject = None,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """Show the lanes of parked messages.

    It shows the number of messages in each, why they wait, and the next attempt. If there are more
    lanes than the limit, it shows those that block the most messages.
    """
    place = place_at(after)
    round_ = Round(chosen(load(config), broker))
    round_.go_on(after)
    criteria = Lanes(subscription=subscription, destination=destination, lane=kind, subject=subject)
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


@app.command("retry-now")
def retry_now_(
    *,
    config: Config = None,
    broker: Name = None,
    destination: Destination = None,
    subscription: Subscription = None,
    kind: LaneKind = None,
    subject: Subject = None,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let the next run retry parked messages without waiting longer.

    The next run of the forwarder, or a receiver, retries them. A key that waits for your decision
    about its dead letter is counted, and still waits: see `saf dead`.
    """
    round_ = Round(chosen(load(config), broker))
    criteria = Lanes(subscription=subscription, destination=destination, lane=kind, subject=subject)

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


app.command("messages")(parked_messages.messages)
app.command("discard")(parked_messages.discard)
app.command("redirect")(parked_messages.redirect)


def listing(lanes: Mapping[str, Waiting]) -> Listing:
    """Return a row for each shown lane."""
    rows = Listing("broker", "parked", "lane", "set aside by", "attempts", "next", below="error")
    for name, found in lanes.items():
        for lane in found.shown:
            rows.add(
                name, f"{lane.messages:,}", str(lane.own), lane.subscription, str(lane.attempts),
                _next(lane), below=lane.error,
            )  # fmt: skip
    return rows


def show_how_many_more(lanes: Mapping[str, Waiting]) -> None:
    """Print for each broker how many lanes are not shown."""
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
