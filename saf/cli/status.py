"""``saf status``: pending messages of each broker, their age, and the forwarders at work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from saf.cli import parked
from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import Listing, echo
from saf.config import load
from saf.errors import ranges
from saf.operating.status import BrokerStatus, broker_status
from saf.operating.wording import age, at
from saf.setaside.backoff import SHOWN
from saf.setaside.dropped import Dropped


def command(
    config: Config = None,
    broker: Name = None,
    shards: Annotated[bool, typer.Option("--shards", help="Also list each shard.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show pending, parked and dead messages of each source.

    It also shows why messages wait.
    """
    round_ = Round(chosen(load(config), broker))
    known = round_.visit("status", lambda connection, _: broker_status(connection, SHOWN))
    if as_json:
        brokers = [
            {"broker": name, **status.as_dict(shards=shards)} for name, status in known.items()
        ]
        echo(json.dumps({"brokers": brokers, "errors": round_.errors()}))
    else:
        _overview(known).show()
        lanes = {name: status.waiting for name, status in known.items()}
        parked.BY_LANE.show_any(lanes)
        parked.show_how_many_more(lanes)
        show_dropped({name: status.dropped for name, status in known.items()})
        _streams(known)
        if shards:
            _by_shard(known).show()
    round_.finish(say=not as_json)


def show_dropped(known: Mapping[str, Sequence[Dropped]]) -> None:
    """Show a row for each reason for drops, if any messages were dropped."""
    listing = Listing("broker", "dropped", "by", "reason", "the last at", "the last one")
    for name, found in known.items():
        for entry in found:
            listing.add(
                name, f"{entry.messages:,}", entry.subscription, entry.reason,
                at(entry.last_at), str(entry.last_message_id),
            )  # fmt: skip
    if any(known.values()):
        listing.show()


def _overview(known: dict[str, BrokerStatus]) -> Listing:
    listing = Listing(
        *("broker", "pending", "oldest", "parked", "dead letters"), below="shards and their owners"
    )
    for name, status in known.items():
        listing.add(
            name,
            f"{status.pending:,}",
            age(status.oldest_pending_seconds),
            f"{status.parked:,}",
            f"{status.dead_letters:,}",
            below="; ".join(_map(status)),
        )
    return listing


def _map(status: BrokerStatus) -> Iterator[str]:
    """Yield the owners of shards, with their shards and the remaining time of their leases."""
    for member in status.members:
        shards = f" ({ranges(member.shards)})" if member.shards else ""
        lease = f"{member.lease_seconds:.0f} s" if member.lease_seconds > 0 else "over"
        yield f"{member.name}: {len(member.shards)}{shards}, lease {lease}"
    free = [shard.shard for shard in status.shards if shard.owner is None]
    if free:
        yield f"nobody: {len(free)} ({ranges(free)})"


def _streams(known: Mapping[str, BrokerStatus]) -> None:
    """Show a row for each stream, if any exist."""
    listing = Listing("broker", "stream", "log", "not committed", "oldest", "last took some")
    for name, status in known.items():
        for stream in status.streams:
            listing.add(
                name, stream.stream, stream.log,
                "may not be read" if stream.pending is None else f"{stream.pending:,}",
                age(stream.lag_seconds),
                at(stream.opened_at) if stream.opened_at else "never",
            )  # fmt: skip
    if any(status.streams for status in known.values()):
        listing.show()


def _by_shard(known: Mapping[str, BrokerStatus]) -> Listing:
    listing = Listing("broker", "shard", "owner", "epoch", "batch", "pending", "lag")
    for name, status in known.items():
        for shard in status.shards:
            listing.add(
                name,
                str(shard.shard),
                shard.owner or "-",
                str(shard.epoch),
                f"{shard.batch}{' open' if shard.open else ''}",
                f"{shard.pending:,}",
                age(shard.lag_seconds),
            )
    return listing
