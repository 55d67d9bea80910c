"""Regular maintenance of a broker: purge old messages, rotate quiet logs.

Call `purge_broker` as often as you like, e.g. after each run of the forwarder: without work, it
runs some twenty quick queries and writes nothing. If several run at the same time, one works and
the others do nothing.

A purge also deletes old versions of the routes, once no cursor refers to them; route choices of
keys, unused for as long as messages are kept; conversations that were closed that long ago;
messages that Spark jobs staged and never sent; kept results of transforms for messages that were
set aside and are gone; and names of sent messages that may be used again. Members that are gone
need no care here: living members delete them (`saf.log.shards`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psycopg

from saf.broker import health
from saf.config import Purge
from saf.database import Dsn, fetch
from saf.database.dsn import grant_command, place_of
from saf.destinations.kinds import archive_at
from saf.dialogs import conversations
from saf.engine import kept_results
from saf.errors import MayNotPurge
from saf.log.ring import AGE_COLUMN, LOCK_TIMEOUT_SECONDS, Archive, Slot, purge, rotate
from saf.routing.route_choices import forget
from saf.sending import held, staging
from saf.telemetry import metrics as m
from saf.telemetry.metrics import count


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a purge of a broker."""

    slots: tuple[Slot, ...]
    route_versions: int
    """Number of deleted versions of frozen routes."""
    route_choices: int = 0
    """Number of keys whose route choice was deleted."""
    conversations: int = 0
    """Number of deleted conversation ends."""
    orphans: int = 0
    """Number of deleted messages that Spark jobs had staged and never sent."""
    kept_results: int = 0
    """Number of deleted results of transforms that no message needs."""
    names: int = 0
    """Number of forgotten names of messages."""
    busy: bool = False
    """True if another purge of this broker is running, so that this one did nothing."""


TAKE_TURN = "SELECT pg_try_advisory_lock(hashtextextended('saf purge', 0))"
END_TURN = "SELECT pg_advisory_unlock(hashtextextended('saf purge', 0))"

# A version's age counts from the moment when another became the latest. A forwarder that has just
# read it as the latest opens a batch with it soon after.
FORGET_ROUTES = """
WITH forgotten AS (
    DELETE FROM saf.route_version v
    WHERE NOT EXISTS (SELECT FROM saf.cursor c WHERE c.route_version = v.version)
      AND EXISTS (SELECT FROM saf.route_version later
                  WHERE later.version > v.version
                    AND extract(epoch FROM now() - later.created_at) > %(seconds)s)
    RETURNING version)
SELECT count(*) FROM forgotten
"""
ROUTES_KEPT_SECONDS = 3600.0


def purge_broker(
    connection: psycopg.Connection[Any],
    *,
    retention_seconds: float,
    rotate_after_seconds: float,
    archive: Archive | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    dry_run: bool = False,
) -> Outcome:
    """Purge both logs, rotate quiet ones, and delete old versions of the routes.

    The connection is in autocommit; each slot is a transaction of its own.

    Raises:
        MayNotPurge: the role lacks the purger grant.
        Restored: the database was restored into another cluster.
        Unavailable: the archive cannot be written; its slot is kept, and everything else is done.
    """
    ((turn,),) = fetch(connection, TAKE_TURN)
    if not turn:
        return Outcome(slots=(), route_versions=0, busy=True)
    try:
        health.refuse(connection)
        slots: list[Slot] = []
        not_archived: Exception | None = None
        for log in AGE_COLUMN:
            found: list[Slot] = []
            try:
                found = purge(
                    connection,
                    log,
                    retention_seconds=retention_seconds,
                    archive=archive,
                    lock_timeout_seconds=lock_timeout_seconds,
                    dry_run=dry_run,
                )
            except psycopg.Error:
                raise
            except Exception as error:  # from the archive; finish everything else first
                not_archived = not_archived or error
            if rotate(connection, log, rotate_after_seconds=rotate_after_seconds, dry_run=dry_run):
                found = [_rotated(slot, dry_run) for slot in found]
            slots += found
        forgotten = 0 if dry_run else _forget_routes(connection, retention_seconds)
        choices = 0 if dry_run else forget(connection, retention_seconds)
        closed = 0 if dry_run else conversations.forget(connection, retention_seconds)
        orphans = 0 if dry_run else staging.collect(connection)
        results = 0 if dry_run else kept_results.collect(connection)
        names = 0 if dry_run else held.forget(connection)
    except psycopg.errors.InsufficientPrivilege as error:
        raise MayNotPurge(
            f"role {connection.info.user!r} may not purge database {connection.info.dbname!r}: "
            f"{error.diag.message_primary}. As the owner, run "
            f"`{grant_command('purger', connection.info.user, place_of(connection))}`"
        ) from None
    finally:
        if not connection.closed:
            connection.execute(END_TURN)
    if not_archived is not None:
        raise not_archived
    return Outcome(
        slots=tuple(slots),
        route_versions=forgotten,
        route_choices=choices,
        conversations=closed,
        orphans=orphans,
        kept_results=results,
        names=names,
    )


def purge_by_rules(
    connection: psycopg.Connection[Any], dsn: Dsn, rules: Purge, *, dry_run: bool = False
) -> Outcome:
    """Call `purge_broker` with the settings of the configuration, and its archive."""
    archive = None
    if rules.archive is not None and not dry_run:
        archive = archive_at(rules.archive, dsn)
    return purge_broker(
        connection,
        retention_seconds=rules.retention_seconds,
        rotate_after_seconds=rules.rotate_after_seconds,
        archive=archive,
        dry_run=dry_run,
    )


def count_purged(broker: str, outcome: Outcome) -> None:
    """Count purged slots and messages, even 0, for the metrics of this process."""
    for slot in outcome.slots:
        purged = slot.state == "purged"
        count(m.PURGED_SLOTS, int(purged), broker=broker, log=slot.log)
        count(m.PURGED, (slot.messages or 0) * purged, broker=broker, log=slot.log)


def _forget_routes(connection: psycopg.Connection[Any], retention_seconds: float) -> int:
    seconds = max(retention_seconds, ROUTES_KEPT_SECONDS)
    ((count,),) = fetch(connection, FORGET_ROUTES, {"seconds": seconds})
    return int(count)


def _rotated(slot: Slot, dry_run: bool) -> Slot:
    if slot.state != "current":
        return slot
    return replace(slot, state="rotatable" if dry_run else "rotated")
