"""Repair of a destination that was set back: send lost messages again, then continue.

The forwarder refuses a destination that has less than it had acknowledged
(`saf.destinations.marks`). `saf.repair.reconcile` finds the missing messages: those that are
complete at the source, and in no destination; or, for a topic, no longer in this destination. Then:

1. The destination's incarnation rises, so that its dialogs compare what both ends know.
2. In one transaction at the source, the lost messages are parked again (`saf.repair.replay`), and
   the destination's own marks replace the acknowledged ones.
3. The source's dialogs compare too, behind the messages sent again: if the destination has
   forgotten a dialog altogether, only the other end knows of it. Subscribers of a monolog get an
   Error for messages that nobody can send them again.

All processes may run during the repair, because nothing is stored in a destination that is behind.
Repairs take turns, so that two operators who repair at the same time send each message once.

For a destination that cannot be read back, the missing messages are unknown. If an operator names a
time, all messages sent to it since then are sent again (`saf.repair.blind`).

Messages purged from the outbox since cannot be sent again; the result shows this, with the range
that was compared. For topics, the limits of `saf.repair.reconcile.copies` apply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from typing import Any
from uuid import UUID

import psycopg

from saf.broker.health import refuse
from saf.database import Dsn, check_schema, of_broker, unavailable_if_lost
from saf.destinations.marks import Known, adopt, reached
from saf.destinations.settings import DestinationSettings
from saf.dialogs.comparing import compare
from saf.dialogs.monolog_gaps import SentMonolog, sent_monologs, subscribers_set_back
from saf.dialogs.monologs import received_monologs
from saf.errors import CannotReadBack, UsageError
from saf.log.shards import shard_of
from saf.repair.blind import Blind, everything_sent
from saf.repair.incarnation import raise_incarnation
from saf.repair.reconcile import lost
from saf.repair.reconcile.outcome import Range
from saf.repair.replay import replay
from saf.repair.set_back import IDENTITY, SetBack, remembered, set_back
from saf.routing.matching import Routes
from saf.setaside.waiting import retry_now

# Held by the session, not by a transaction: finding the missing messages takes time
TAKE_TURN = "SELECT pg_advisory_lock(hashtextextended('saf replay', 0))"
END_TURN = "SELECT pg_advisory_unlock(hashtextextended('saf replay', 0))"

SOURCE = "SELECT broker_id, shards FROM saf.broker"

# Waits for senders in a dialog, and receivers that have an end in hand; all others wait for it
SILENCE = "LOCK TABLE saf.conversation IN EXCLUSIVE MODE"


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Messages that were, or would be, sent again."""

    by_destination: Mapping[str, list[UUID]]
    """The ids of the messages by destination; those of a router have the empty name."""
    set_back: tuple[str, ...]
    """Destinations that had been set back, and may continue."""
    not_compared: tuple[datetime | None, datetime] | None = None
    """Range of created_at that was not compared, and may be lost; None: from the beginning."""
    unrouted: int = 0
    """Messages that are lost and not sent again, because no route exists."""
    uncertain: Mapping[str, int] = field(default_factory=dict)
    """For each destination that was set back, copies of topics' messages that it may have lost;
    nobody knows whether it had them, so they are not sent again."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Destinations that cannot be read back and so get nothing again, each with the reason."""
    blind: tuple[str, ...] = ()
    """Destinations in `set_back` that cannot be read back: they get all messages again that were
    sent to them since then, so those that they still have arrive twice."""


def send_again(
    name: str,
    source: Dsn,
    destinations: Mapping[str, DestinationSettings],
    routes: Callable[[psycopg.Connection[Any]], Routes],
    *,
    retention_seconds: float,
    since: datetime | None = None,
    until: datetime | None = None,
    why: str = "",
    dry_run: bool = False,
    only_if_set_back: bool = True,
) -> Sent | None:
    """Park again what destinations have lost of a source; those set back may then continue.

    None if no destination was set back and only those were requested.

    Args:
        name: the source's name, for errors.
        source: the source's dsn.
        destinations: the settings of all of its destinations, by name.
        routes: returns the current routes, given a connection to the source.
        retention_seconds: every purge of either side has kept messages at least this long.
        since: earliest created_at of messages to send again; default: see `saf.repair.reconcile`.
            To a destination that was set back and cannot be read back, all of these are sent.
        until: send again only messages with an earlier created_at; not allowed if a destination was
            set back, because it would continue without later messages that it has lost.
        why: the reason, for the audit.
        dry_run: return what would be sent again, and change nothing.
        only_if_set_back: ignore messages that are missing for another reason.

    Raises:
        Unavailable: one of the databases does not answer.
        Restored: one of them must be rebased first.
        UsageError: a role may not do it, or a destination was set back and ``until`` was given.
        CannotReadBack: a destination was set back, cannot be read back, and ``since`` was not
            given; the others are repaired.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(_connected(f"broker {name!r}", source))
        brokers = {
            one: stack.enter_context(_connected(f"destination {one!r}", dsn))
            for one, settings in destinations.items()
            if (dsn := settings.broker())
        }
        with _turn(connection):
            known, behind = _behind(connection, destinations)
            if only_if_set_back and not behind:
                return None
            if behind and until is not None:
                raise UsageError(
                    f"{' and '.join(behind)} had been set back, and may continue only when every "
                    "lost message is sent again: run saf replay without --until"
                )
            found = lost(
                name, source, destinations,
                since=since, until=until, retention_seconds=retention_seconds, routes=routes,
            )  # fmt: skip
            stuck = [one for one in behind if one in found.unread]
            blind = stuck if since is not None else []
            for one in () if blind else stuck:
                del behind[one]
            unknown = Blind(destinations=blind)
            if blind and since is not None:
                unknown = everything_sent(
                    name, source, blind, routes,
                    since=since, retention_seconds=retention_seconds,
                )  # fmt: skip
            if not dry_run:
                for one in behind.keys() & brokers.keys():
                    _raise_incarnation(brokers[one])
            with connection.transaction():
                sent = replay(
                    connection, found.messages, routes(connection), why,
                    copies=found.copies, dry_run=dry_run,
                )  # fmt: skip
                unsure = replay(
                    connection, unknown.messages, routes(connection), why,
                    copies=unknown.copies, only=blind, dry_run=dry_run,
                )  # fmt: skip
                if behind and not dry_run:
                    _let_go_on(connection, behind, known)
                    _let_subscribers_know(
                        connection, brokers, behind, known, routes(connection),
                        compared=found.range.since, retention_seconds=retention_seconds,
                    )  # fmt: skip
    if stuck and not blind and not dry_run:
        raise _stays_refused(stuck[0], found.unread[stuck[0]])
    left = len(unknown.messages) + len(unknown.copies) - len({*chain(*unsure.values())})
    uncertain = unknown.uncertain + Counter(dict.fromkeys(blind, left))
    return Sent(
        by_destination={
            one: [*sent.get(one, ()), *unsure.get(one, ())] for one in {**sent, **unsure}
        },
        set_back=tuple(behind),
        not_compared=_gap(found.range, known, behind, unknown.purged),
        unrouted=len(found.messages) + len(found.copies) - len({*chain(*sent.values())}),
        uncertain={**found.uncertain, **uncertain},
        unread={one: why for one, why in found.unread.items() if one not in blind},
        blind=tuple(blind),
    )


def _behind(
    connection: psycopg.Connection[Any], destinations: Mapping[str, DestinationSettings]
) -> tuple[dict[str, Known], dict[str, SetBack]]:
    """Return what each destination that keeps marks knows, and which destinations were set back."""
    (source,) = of_broker(connection, IDENTITY)
    known: dict[str, Known] = {}
    behind: dict[str, SetBack] = {}
    for name, settings in destinations.items():
        if not settings.capabilities.exactly_once:
            continue
        before = remembered(connection, settings.identity(name))
        known[name] = settings.known(name, source, role="replay")
        differ = set_back(connection, name, known[name], before)
        if differ.behind:
            behind[name] = differ
    return known, behind


def _let_go_on(
    connection: psycopg.Connection[Any],
    behind: Mapping[str, SetBack],
    known: Mapping[str, Known],
) -> None:
    """Let destinations that were set back continue, in the caller's transaction."""
    for name, differ in behind.items():
        adopt(connection, known[name].destination, known[name].marks, differ.behind)
        retry_now(connection, name)
    compare(connection)


def _let_subscribers_know(
    connection: psycopg.Connection[Any],
    brokers: Mapping[str, psycopg.Connection[Any]],
    behind: Mapping[str, SetBack],
    known: Mapping[str, Known],
    routes: Routes,
    *,
    compared: datetime | None,
    retention_seconds: float,
) -> None:
    """Tell subscribers at brokers that were set back which of their monologs have gaps."""
    source_id, shards = of_broker(connection, SOURCE)
    for name in behind.keys() & brokers.keys():
        lacking = _Lacking(
            destination=name,
            shards=shards,
            reached=reached(known[name].marks, behind[name].behind),
            compared=compared,
            retention=timedelta(seconds=retention_seconds),
            routes=routes,
        )
        sent = sent_monologs(connection, name)
        arrived = received_monologs(brokers[name], source_id)
        subscribers_set_back(
            connection, known[name].destination, sent, arrived,
            is_behind=lacking.is_behind, may_lack=lacking.may_lack,
        )  # fmt: skip


def _stays_refused(name: str, why: str) -> CannotReadBack:
    return CannotReadBack(
        name,
        f"{why}. It was set back, and its lost messages are not known, so nothing is sent to it "
        "again; other destinations are repaired. Run `saf replay --since` with a time before "
        "the oldest transaction that was open at its backup: then all messages since are sent "
        "again, and those that it still has arrive twice",
    )


def _raise_incarnation(store: psycopg.Connection[Any]) -> None:
    with store.transaction():
        store.execute(SILENCE)
        raise_incarnation(store)


def _gap(
    span: Range,
    known: Mapping[str, Known],
    behind: Mapping[str, SetBack],
    purged: datetime | None,
) -> tuple[datetime | None, datetime] | None:
    """Return the range that a destination may have lost and that was not compared, or purged."""
    oldest = [
        moment
        for name, differ in behind.items()
        for moment in reached(known[name].marks, differ.behind).values()
    ]
    if span.since is None or not oldest:
        return None
    since = None if None in oldest else min(filter(None, oldest))
    until = purged or span.since
    return (since, until) if since is None or since < until else None


@dataclass(frozen=True, kw_only=True)
class _Lacking:
    """What a destination that was set back lacks, as far as its marks show."""

    destination: str
    shards: int
    """The number of shards at the source."""
    reached: Mapping[int, datetime | None]
    compared: datetime | None
    """Messages created before were not compared."""
    retention: timedelta
    routes: Routes

    def is_behind(self, monolog: UUID) -> bool:
        return shard_of(str(monolog), self.shards) in self.reached

    def may_lack(self, monolog: UUID, sent: SentMonolog) -> bool:
        """Whether parts of a monolog may be lost of which the destination has nothing.

        Messages that had arrived within the retention before the backup would still be there.
        """
        backup = self.reached[shard_of(str(monolog), self.shards)]
        if self.compared is None or (backup and backup >= self.compared):
            return False
        if backup and sent.changed_at < backup - self.retention:
            return False
        match = self.routes.match(sent.to_service, None)
        routed = {router.service for router in self.routes.routers}
        return sent.to_service in routed or bool(match and self.destination in match.destinations)


@contextmanager
def _connected(what: str, dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with unavailable_if_lost(what), dsn.connect(role="replay", autocommit=True) as connection:
        check_schema(connection)
        refuse(connection)
        yield connection


@contextmanager
def _turn(connection: psycopg.Connection[Any]) -> Iterator[None]:
    connection.execute(TAKE_TURN)
    try:
        yield
    finally:
        if not connection.closed:
            connection.execute(END_TURN)
