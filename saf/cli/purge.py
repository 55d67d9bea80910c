"""``saf purge``: empty the slots of the logs that are no longer needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from saf.cli.brokers import AsJson, Brokers, duration
from saf.cli.console import Table
from saf.cli.metrics import Push, Textfile, published
from saf.config import with_options
from saf.operating.maintenance import Outcome, count_purged, purge_by_rules

MEANING = {
    "current": "in use: new messages go here",
    "rotated": "left for the next slot; purged when it is old enough",
    "rotatable": "would be left for the next slot",
    "retained": "holds messages younger than the retention",
    "unread": "no subscription has read it",
    "locked": "an open transaction has written or read it: try again",
    "changed": "a message arrived during the purge: try again",
    "purged": "",
    "purgeable": "would be purged",
}


def command(
    *,
    round_: Brokers,
    retention: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Age to keep messages for: 7d, 12h, 30m, 0. Default: purge.retention_seconds.",
        ),
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Archive for the purged messages: a folder of Parquet files, or a table: "
            "delta:/srv/lake/archive. Default: purge.archive, or nowhere.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done.")] = False,
    metrics_textfile: Textfile = None,
    metrics_push: Push = None,
    as_json: AsJson = False,
) -> None:
    """Purge old messages that every subscription has completed.

    It purges one slot of a log at a time, and is safe at any time, however often. A slot that
    cannot be purged now is kept, and the reason is shown.
    """
    rules = with_options(round_.settings.purge, retention_seconds=retention, archive=archive)
    with published(textfile=metrics_textfile, push=metrics_push, job="saf-purge"):
        known = round_.visit_each(
            "purge",
            {
                name: partial(purge_by_rules, dsn=source.dsn, rules=rules, dry_run=dry_run)
                for name, source in round_.brokers.items()
            },
        )
        for name, outcome in known.items():
            count_purged(name, outcome)

    def show() -> None:
        if known:
            SLOTS.show({name: [*_rows(outcome)] for name, outcome in known.items()})

    brokers = [_as_dict(name, outcome) for name, outcome in known.items()]
    round_.report({"dry_run": dry_run, "brokers": brokers}, show, as_json=as_json)


def _as_dict(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "broker": name,
        "busy": outcome.busy,
        "slots": [
            {**asdict(slot), "archive": slot.archive and str(slot.archive)}
            for slot in outcome.slots
        ],
        "route_versions": outcome.route_versions,
        "route_choices": outcome.route_choices,
        "conversations": outcome.conversations,
        "orphans": outcome.orphans,
        "kept_results": outcome.kept_results,
        "names": outcome.names,
    }


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the slots and other things that a purge was about."""
    if outcome.busy:
        yield "", "", "busy", "", "another purge is running"
    if outcome.orphans:
        why = "staged by jobs of Spark that never sent them"
        yield "outbox", "", "removed", f"{outcome.orphans:,}", why
    for slot in outcome.slots:
        if slot.state != "empty":
            why = MEANING.get(slot.state, f"subscription {slot.subscription!r} has not read all")
            messages = "" if slot.messages is None else f"{slot.messages:,}"
            yield slot.log, str(slot.number), slot.state, messages, str(slot.archive or why)


SLOTS = Table[tuple[str, ...]](
    *("log", "slot", "state", "messages"),
    things="slots to purge",
    below="why",
    cells=lambda cells: cells,
)
