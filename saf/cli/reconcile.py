"""``saf reconcile``: prove that the destinations hold what the sources have completed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated, Any

import typer

from saf.cli.brokers import AsJson, Config, Name, Round, Since, Until, chosen, routes_of
from saf.cli.console import Listing, echo, paragraph
from saf.config import load
from saf.operating.repair.reconcile import Difference, Outcome, Range, reconcile
from saf.operating.wording import at, counted

DIFFERENT = 1


def command(
    *,
    config: Config = None,
    broker: Name = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Name at most this many messages; all are counted.")
    ] = 100,
    shards: Annotated[
        bool, typer.Option("--shards", help="With --json: all shards, not only those that differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare sources with the messages in their destinations.

    Completed messages of a source should be in its destinations. Reads only. It is safe while
    everything runs. Exit code 0: both sides hold the same; 1: messages are lost, duplicated or
    unexpected, and named.
    """
    settings = load(config)
    round_ = Round(chosen(settings, broker))
    known = round_.each(
        lambda name, source: reconcile(
            name,
            source.dsn,
            settings.destinations,
            since=since,
            until=until,
            retention_seconds=settings.purge.retention_seconds,
            routes=routes_of(settings),
            limit=limit,
        )
    ).values()
    brokers = [_as_dict(outcome, whole=shards) for outcome in known]
    # report a proven loss first: unlike a failure to connect, it does not pass with time
    is_equal = all(outcome.same for outcome in known)
    found = 0 if is_equal else DIFFERENT
    round_.report({"brokers": brokers}, lambda: _show(known), as_json=as_json, found=found)


def _as_dict(outcome: Outcome, *, whole: bool) -> dict[str, Any]:
    shards = [
        {name: value for name, value in asdict(shard).items() if name != "hashes"}
        | {"same": shard.same}
        for shard in outcome.shards
        if whole or not shard.same
    ]
    return {
        "broker": outcome.broker,
        "same": outcome.same,
        "since": outcome.range.since and outcome.range.since.isoformat(),
        "until": outcome.range.until and outcome.range.until.isoformat(),
        "purged": list(outcome.range.purged),
        **{figure: _sum(outcome, figure) for figure in FIGURES},
        **{kind: outcome.counts.get(kind, 0) for kind in KINDS},
        "left_out": outcome.left_out,
        "unread": dict(outcome.unread),
        "shards": shards,
        "differences": [difference.as_dict() for difference in outcome.named],
    }


FIGURES = ("complete", "aside", "pending", "stored")
KINDS = ("lost", "duplicate", "unexpected", "in_flight", "not_compared", "uncertain", "doubled")


def _sum(outcome: Outcome, figure: str) -> int:
    """Return a number of messages, summed over all shards."""
    return sum(getattr(shard, figure) for shard in outcome.shards)


def _show(known: Collection[Outcome]) -> None:
    listing = Listing(
        *("broker", "complete", "set aside", "pending", "stored", "in flight"), *KINDS[:3]
    )
    for outcome in known:
        listing.add(
            outcome.broker,
            *(f"{_sum(outcome, figure):,}" for figure in FIGURES),
            *(
                f"{outcome.counts.get(kind, 0):,}"
                for kind in ("in_flight", "lost", "duplicate", "unexpected")
            ),
        )
    if known:
        listing.show()
    for outcome in known:
        paragraph(f"{outcome.broker}: compared {_range(outcome.range)}")
        for name, why in outcome.unread.items():
            paragraph(f"destination {name!r} is not compared: {why}")
        if count := outcome.counts.get("not_compared", 0):
            are = "is" if count == 1 else "are"
            echo(f"{counted(count, 'message')} {are} not compared, because they may be there")
        if count := outcome.counts.get("uncertain", 0):
            echo(
                f"{counted(count, 'message')} of topics may have lost a copy: it is not known "
                "whether a destination that was set back had it"
            )
        if count := outcome.counts.get("doubled", 0):
            echo(
                f"{counted(count, 'message')} are in the outbox twice, because a backup "
                "was restored over existing rows: saf rebase removes the second rows"
            )
        if count := outcome.left_out:
            echo(f"lost counts what transforms leave out, too: {counted(count, 'message')} so far")
        if outcome.named:
            _differences(outcome.named).show()


def _differences(named: Collection[Difference]) -> Listing:
    listing = Listing(
        *("difference", "message id", "service", "key", "shard", "created"), below="where"
    )
    for row in named:
        stored = f"stored at {', '.join(row.stored)}" if row.stored else ""
        lost = f"not any more at {', '.join(row.lost_at)}" if row.lost_at else ""
        listing.add(
            row.kind, str(row.message_id), row.service, row.key or "", str(row.shard),
            at(row.created_at), below=", and ".join(filter(None, [stored, lost])),
        )  # fmt: skip
    return listing


def _range(compared: Range) -> str:
    since = f"messages created since {at(compared.since)}" if compared.since else ""
    until = f"before {at(compared.until)}" if compared.until else ""
    text = " and ".join(filter(None, [since, until])) or "all messages"
    if compared.purged:
        text += (
            f" (now less purge.retention_seconds, because the {' and the '.join(compared.purged)} "
            "may have been purged; if ever with a shorter retention, add --since)"
        )
    return text
