"""Repair of a destination that was set back: send lost messages again, then continue.

The forwarder refuses a destination that has less than it had acknowledged
(`saf.destinations.marks`). `saf.operating.repair.reconcile` finds the missing messages: those that
are complete at the source, and in no destination; or, for a topic, no longer in this destination.
Then:

1. The destination's incarnation rises, so that its dialogs compare what both ends know.
2. In one transaction at the source, the lost messages are parked again
(`saf.operating.repair.replay`), and
   the destination's own marks replace the acknowledged ones.
3. The source's dialogs compare too, behind the messages sent again: if the destination has
   forgotten a dialog altogether, only the other end knows the dialog. Subscribers of a monolog
   get an Error for messages that nobody can send them again.

All processes may run during the repair, because nothing is stored in a destination that is behind.
Repairs take turns, so that two operators who repair at the same time send each message once.

For a destination that cannot be read back, the missing messages are unknown. If an operator names a
time, all messages sent to it since then are sent again (`everything_sent`); those that the
destination still has arrive twice. Messages that are set aside for the destination were never sent
to it, and are left alone. A topic's message may be set aside for one destination only; the others
get their copies again. Without a time, the forwarder continues to refuse the destination, and other
destinations are repaired.

Some messages are not sent again, but the result shows them:

- Messages purged from the outbox since: the result has the range that was compared.
- For a destination that cannot be read back: messages whose routes now lead elsewhere, or that a
  router has redirected, and copies of a topic's messages that an operator has discarded (the audit
  does not name their destination). They may be lost too, and are only counted.

For topics, the limits of `saf.operating.repair.reconcile.copies` apply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import merge
from itertools import chain, groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

import psycopg

from saf.broker.health import refuse
from saf.database import Dsn, check_schema, of_broker, unavailable_if_lost
from saf.destinations import Entry
from saf.destinations.marks import Known, reached
from saf.destinations.settings import DestinationSettings
from saf.dialogs.monologs import SentMonolog, received_monologs, sent_monologs, subscribers_set_back
from saf.dialogs.set_back import compare_all
from saf.engine.acknowledged import adopt
from saf.errors import CannotReadBack, UsageError
from saf.log.shards import shard_of
from saf.log.side import in_order
from saf.operating.repair.reconcile import DISCARDED, SENT, SET_ASIDE, Unread, lost, unread_of
from saf.operating.repair.reconcile.copies import RoutesOf, copied_to
from saf.operating.repair.reconcile.outcome import Range, read_both
from saf.operating.repair.replay import Copy, replay
from saf.operating.repair.set_back import IDENTITY, SetBack, raise_incarnation, remembered, set_back
from saf.routing.matching import Routes
from saf.setaside.waiting import retry_now

# Held by the session, not by a transaction: finding the missing messages takes time
TAKE_TURN = "SELECT pg_advisory_lock(hashtextextended('saf replay', 0))"
END_TURN = "SELECT pg_advisory_unlock(hashtextextended('saf replay', 0))"

SOURCE = "SELECT broker_id, shards FROM saf.broker"
NOW = "SELECT clock_timestamp()"

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
    """For each destination that was set back, copies of topics' messages that it may have lost. It
    is unknown whether it had them, so they are not sent again."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Destinations that cannot be read back and so get nothing again, each with the reason."""
    blind: tuple[str, ...] = ()
    """Destinations in `set_back` that cannot be read back: they get all messages again that were
    sent to them since then, so those that they still have arrive twice."""


@dataclass(frozen=True, kw_only=True)
class Blind:
    """Messages that some destinations may have got since a time."""

    destinations: Collection[str]
    messages: list[tuple[int, int]] = field(default_factory=list)
    """As (shard, id)."""
    copies: list[Copy] = field(default_factory=list)
    """Copies of topics' messages that are set aside for other destinations."""
    uncertain: Counter[str] = field(default_factory=Counter)
    """Copies of discarded messages that each destination may have got."""
    purged: datetime | None = None
    """Messages sent before this time may have been purged, and are not sent again."""

    def add(self, entries: Sequence[Entry], routes: Routes, may_be_there: Unread) -> None:
        """Add a message, given all rows with its id."""
        discarded = any(entry.state == "discarded" for entry in entries)
        for entry in entries:
            if entry.state not in ("complete", "aside") or not may_be_there.may_have(entry):
                continue
            held = {
                other.where
                for other in entries
                if other.state == "set_aside" and (other.shard, other.id) == (entry.shard, entry.id)
            }
            if entry.state == "complete":
                self.messages.append((entry.shard, entry.id))
            elif "" not in held:
                self._add_aside(entry, held, routes, discarded=discarded)

    def _add_aside(
        self, entry: Entry, held: Collection[str], routes: Routes, *, discarded: bool
    ) -> None:
        """Add a message that is set aside for some destinations, or was discarded."""
        if any(router.service == entry.service for router in routes.routers):
            if not {*self.destinations} <= {*held}:
                self.messages.append((entry.shard, entry.id))
            return
        ways = copied_to(routes, entry.service, entry.broker)
        lacking = tuple(way for way in ways if way in self.destinations and way not in held)
        if len(ways) < 2 or not lacking:  # noqa: PLR2004 - a single destination lacks it
            return
        if discarded:
            self.uncertain.update(lacking)
            return
        address = (entry.service, entry.broker, entry.key)
        self.copies.append(
            Copy(shard=entry.shard, id=entry.id, destinations=lacking, address=address)
        )


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
    """Park lost messages of a source again; destinations that were set back may then continue.

    Return None if no destination was set back and ``only_if_set_back`` is true.

    Args:
        name: the source's name, for errors.
        source: the source's dsn.
        destinations: the settings of all of its destinations, by name.
        routes: returns the current routes, given a connection to the source.
        retention_seconds: every purge of either side has kept messages at least this long.
        since: earliest created_at of messages to send again; default: see
        `saf.operating.repair.reconcile`.
            To a destination that was set back and cannot be read back, all of these are sent.
        until: send again only messages with an earlier created_at; not allowed if a destination was
            set back, because it would continue without later messages that it has lost.
        why: the reason, for the audit.
        dry_run: return the messages that would be sent again, and change nothing.
        only_if_set_back: ignore messages that are missing for another reason.

    Raises:
        Unavailable: one of the databases does not answer.
        Restored: one of the databases must be rebased first.
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


def everything_sent(
    name: str,
    source: Dsn,
    destinations: Collection[str],
    routes: RoutesOf,
    *,
    since: datetime,
    retention_seconds: float,
) -> Blind:
    """Return the messages that these destinations may have got since a time.

    Args:
        name: the source's name, for errors.
        source: the source's dsn.
        destinations: their names.
        routes: returns the current routes, given a connection to the source.
        since: the earliest created_at.
        retention_seconds: every purge has kept messages at least this long.

    Raises:
        Unavailable: the source does not answer.
        UsageError: a role may not read.
    """
    with read_both(
        name, source, {}, since=since, until=None, retention_seconds=retention_seconds
    ) as both:
        here, shards = both.source, list(range(both.what.shards))
        ((now,),) = here.fetch(NOW, {})
        kept = now - timedelta(seconds=retention_seconds)
        found = Blind(
            destinations=destinations,
            purged=kept if since < kept and here.may_be_purged() else None,
        )
        unread = unread_of(here.connection, destinations, routes)
        current = routes(here.connection)
        sent = here.stream(in_order(SENT, shards, state="state"), both.params)
        aside = (here.stream(query, both.params) for query in (SET_ASIDE, DISCARDED))
        for _, rows in groupby(merge(sent, *aside, key=itemgetter(0)), key=itemgetter(0)):
            found.add([Entry._make(row) for row in rows], current, unread)
    return found


def _raise_incarnation(store: psycopg.Connection[Any]) -> None:
    with store.transaction():
        store.execute(SILENCE)
        raise_incarnation(store)


def _let_go_on(
    connection: psycopg.Connection[Any],
    behind: Mapping[str, SetBack],
    known: Mapping[str, Known],
) -> None:
    """Let destinations that were set back continue, in the caller's transaction."""
    for name, differ in behind.items():
        adopt(connection, known[name].destination, known[name].marks, differ.behind)
        retry_now(connection, name)
    compare_all(connection)


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


@dataclass(frozen=True, kw_only=True)
class _Lacking:
    """Messages that a destination that was set back lacks, as far as its marks show."""

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
        """Return whether messages of a monolog may be lost at the destination, which has none.

        Messages that had arrived within the retention before the backup would still exist.
        """
        backup = self.reached[shard_of(str(monolog), self.shards)]
        if self.compared is None or (backup and backup >= self.compared):
            return False
        if backup and sent.changed_at < backup - self.retention:
            return False
        match = self.routes.match(sent.to_service, None)
        routed = {router.service for router in self.routes.routers}
        return sent.to_service in routed or bool(match and self.destination in match.destinations)


def _stays_refused(name: str, why: str) -> CannotReadBack:
    return CannotReadBack(
        name,
        f"{why}. It was set back, and its lost messages are not known, so nothing is sent to it "
        "again; other destinations are repaired. Run `saf replay --since` with a time before "
        "the oldest transaction that was open at its backup: then all messages since are sent "
        "again, and those that it still has arrive twice",
    )


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
