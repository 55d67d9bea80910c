"""``saf parked``: what waits for a destination, a route or a service, and when it is tried."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import echo
from saf.cli.wording import at, counted
from saf.config import load
from saf.setaside.lane import Kind
from saf.setaside.parking import Waiting, parked, retry_now

app = typer.Typer(no_args_is_help=True, help="Messages that wait, and when they are tried next.")

LIMIT = 100

FOR_EVER = 9999
"""The year of what is not tried again by itself; see `saf.receiving.retries`."""

Destination = Annotated[str | None, typer.Option(help="Only what waits for this one.")]


@app.command("list")
def list_(
    config: Config = None,
    broker: Name = None,
    limit: Annotated[int, typer.Option(min=1, help="Lanes per broker, at most.")] = LIMIT,
    subscription: Annotated[str | None, typer.Option(help="Only what this one set aside.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the lanes of parked messages: how many, why, and when each is tried next.

    Of many, those that hold up most.
    """
    round_ = Round(chosen(load(config), broker))
    lanes = round_.visit("parked", lambda connection, _: parked(connection, limit, subscription))
    if as_json:
        rows = [
            {"broker": name, **lane.as_dict()}
            for name, found in lanes.items()
            for lane in found.shown
        ]
        counts = {name: found.lanes for name, found in lanes.items()}
        echo(json.dumps({"parked": rows, "lanes": counts, "errors": round_.errors()}))
    else:
        show(lanes)
    round_.finish(say=not as_json)


@app.command("retry-now")
def retry_now_(
    config: Config = None,
    broker: Name = None,
    destination: Destination = None,
    as_json: AsJson = False,
) -> None:
    """Let the next run of the forwarder, or a receiver, try what waits, whatever its time."""
    round_ = Round(chosen(load(config), broker))
    due = round_.visit("parked", lambda connection, _: retry_now(connection, destination))
    if as_json:
        echo(json.dumps({"lanes": due, "errors": round_.errors()}))
    else:
        for name, lanes in due.items():
            echo(f"{name}: {counted(lanes, 'lane')} to be tried by the next run")
    round_.finish(say=not as_json)


def show(lanes: Mapping[str, Waiting]) -> None:
    """A line for each lane that is shown: errors are too long for a table."""
    for name, found in lanes.items():
        for lane in found.shown:
            when = "now" if lane.due else at(lane.next_attempt_at)
            if lane.next_attempt_at.year == FOR_EVER:
                when = "on an operator's word"
                if lane.kind == Kind.AHEAD:
                    when = "when it has come"
            who = "" if lane.subscription == "forwarder" else f" by {lane.subscription}"
            echo(
                f"{name}: {lane.messages:,} parked{who}, {lane.own}; "
                f"{counted(lane.attempts, 'attempt')}, "
                f"next {when}: {lane.error}"
            )
        if more := found.lanes - len(found.shown):
            echo(f"{name}: {counted(more, 'lane')} more; {found.messages:,} parked in all")
