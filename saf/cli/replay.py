"""``saf replay``: send again what destinations have lost."""

from __future__ import annotations

import json

from saf.cli.brokers import (
    AsJson,
    Config,
    DryRun,
    Name,
    Round,
    Since,
    Until,
    Why,
    chosen,
)
from saf.cli.console import echo
from saf.config import Broker, load
from saf.database import check_schema, unavailable_if_lost
from saf.reconcile import missing
from saf.replay import replay
from saf.routes import current_routes


def command(
    *,
    config: Config = None,
    broker: Name = None,
    since: Since = None,
    until: Until = None,
    why: Why = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send again what `saf reconcile` says is lost, before everything newer.

    For a destination that was restored from an older backup. The next run of the forwarder
    delivers it, exactly once also if this was said twice.
    """
    settings = load(config)
    destinations = {name: there.dsn for name, there in settings.destinations.items()}
    round_ = Round(chosen(settings, broker))

    def again(name: str, source: Broker) -> dict[str, list[str]]:
        lost = missing(
            name,
            source.dsn,
            destinations,
            since=since,
            until=until,
            retention_seconds=settings.purge.retention_seconds,
        )
        with (
            unavailable_if_lost(f"broker {name!r}"),
            source.dsn.connect(role="replay", autocommit=True) as connection,
        ):
            check_schema(connection)
            routes = current_routes(
                connection, settings.forwarder.default_destination, settings.declared
            )
            sent = replay(connection, lost, routes, why, dry_run=dry_run)
        return {where: [str(one) for one in ids] for where, ids in sent.items()}

    done = round_.each(again)
    if as_json:
        echo(json.dumps({"message_ids": done, "errors": round_.errors()}))
    else:
        for name, by_destination in done.items():
            counts = [
                f"{len(ids):,} for {where or 'a router'}" for where, ids in by_destination.items()
            ]
            verb = "would be sent again" if dry_run else "to be sent again by the next run"
            echo(f"{name}: {', '.join(counts)} {verb}" if counts else f"{name}: nothing lost")
    round_.finish(say=not as_json)
