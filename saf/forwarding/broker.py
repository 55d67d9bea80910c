"""The source broker: one broker during a run, with its connection, membership and open batches.

This is the driver's part: messages never pass through it. `SourceBroker` makes this process a
member of the forwarder subscription. Between cycles it keeps the lease and the fair share, and
returns the work to forward; after a cycle it closes the batches of completed work.

A database that does not answer raises `Unavailable`, and the next call connects again. A process
that has slept past its lease comes back as a new member.

Searching for work takes several queries, about each shard. So at a source where a search has found
nothing, the driver first asks whether there can be anything new, by a statement that reads no table
(`Quiet`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.broker import health
from saf.broker.senders import vouched_since
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.destinations.identities import Identities
from saf.engine import kept_results
from saf.engine.work import Receipt, Work
from saf.errors import ConfigurationError, Fenced
from saf.forwarding.runner import Vigil
from saf.log import cursor
from saf.log.read import BY_INDEX
from saf.log.shards import NEWEST, Member
from saf.operating.repair.new_id import Place
from saf.routing.matching import Routes
from saf.routing.routers import with_problems
from saf.routing.routes import NOTHING, Declared, configuration, freeze, frozen_routes
from saf.setaside import backoff
from saf.setaside.backoff import Summary
from saf.setaside.lane import Kind
from saf.setaside.parking import Backoff
from saf.telemetry.logger import Log

log = Log("saf.forward")

LOG = "outbox"
SUBSCRIPTION = "forwarder"

LITTLE = 5000
"""Messages that one task forwards in the time that two tasks need to connect."""

DEEP = 300_000
"""Number of messages, roughly, from which a batch is quicker to survey and read than to sort."""
SAMPLE = 4
"""Shards that are counted to estimate the size of a batch."""

SURE_SECONDS = 5.0
"""Seconds for which a driver relies on a sequence that stands still."""

# Finds what any member would find; for a process that owns no shards
PENDING = f"""
SELECT done::text, array_agg(shard), bool_or(open IS NOT NULL) FROM {NEWEST} AS c
GROUP BY done::text
"""

IDENTITY = """
SELECT b.broker_id, s.subscription_id, b.system_identifier,
       (SELECT oid FROM pg_database WHERE datname = current_database())::bigint,
       ARRAY(SELECT jsonb_build_array(r.destination, r.messages) FROM saf.rejecting r
             WHERE r.subscription_id = s.subscription_id)
FROM saf.broker b, saf.subscription s WHERE s.log = %(log)s AND s.name = %(subscription)s
"""

# Destinations with failed attempts in their own lane, not in a service's, that still wait
DOWN = """
SELECT DISTINCT destination FROM saf.backoff
WHERE subscription_id = %(subscription_id)s AND kind = %(kind)s AND attempts > 0
"""

# The snapshot is older than the sequence's value. So it counts only if the previous `ASK` returned
# the same value.
ASK = "SELECT last_value + is_called::int, pg_current_snapshot()::text FROM saf.outbox_id_seq"


class SourceBroker:
    """A broker whose outbox this process forwards as a member of the forwarder subscription.

    Methods raise `Unavailable` when the database does not answer; the next call connects again.
    """

    def __init__(
        self,
        name: str,
        dsn: Dsn,
        *,
        lease_seconds: float,
        max_connections: int | None = None,
        declared: Declared = NOTHING,
        identities: Identities | None = None,
    ) -> None:
        self.name = name
        self.dsn = dsn
        self.declared = declared
        self.identities = identities
        self.lease_seconds = lease_seconds
        self.max_connections = max_connections
        self.shards = 0
        """Shards that this member owns."""
        self.idle = False
        """Whether it is a member, but the others own all shards."""
        self.resumed = False
        """Whether the work in hand has batches of an earlier cycle, so more may be pending."""
        self.last_turn = 0
        """The cycle in which it last had tasks."""
        self.unfinished = False
        """Whether the last cycle left some of its work open for the next one."""
        self.vigil: Vigil | None = None
        """The vigil over the running tasks."""
        self._connection: psycopg.Connection[Any] | None = None
        self._member: Member | None = None
        self._broker_id: UUID | None = None
        self.place: Place | None = None
        """The broker's identity and database, once connected."""
        self._renewed = 0.0
        self._routes: dict[int, Routes] = {}
        self.waiting = Summary()
        """Lanes of parked messages, and destinations that wait for their next attempt."""
        self.down: set[str] = set()
        """Destinations of these lanes that have not answered."""
        self.lanes_left = False
        """Whether the last cycle had no time for lanes that were due when this run began."""
        self._lanes: tuple[Backoff, ...] = ()
        self._of_services = False
        self._rejecting: dict[str, int] = {}
        """Messages that destinations have rejected in a row, as far as this process knows."""
        self._began: datetime | None = None
        self._quiet = Quiet()
        self._has_work = False
        """Whether it has searched for work before, so that open batches may be its own."""

    @property
    def connected(self) -> bool:
        """Whether it has a connection, and with it shards."""
        return self._connection is not None

    def visit(self, default_destination: str | None, *, brief: bool) -> list[Work]:
        """Return the work to forward now. Called between cycles.

        A ``brief`` visit that finds nothing writes nothing, and disconnects at its end.

        Raises:
            Unavailable, UsageError, SchemaError
        """
        if brief and self._member is None and not self._pending():
            self.idle = False
            self.leave()
            return []
        self.tend()
        self.idle = not self.shards
        if self._is_quiet():
            return []
        work = self.open_work(default_destination)
        if work or self.waiting.lanes:
            self._quiet.forget()
        else:
            self._quiet.nothing()
        if brief and not work:
            self.leave()
        return work

    def _is_quiet(self) -> bool:
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            # without a member, search for work, which joins
            return self._member is not None and self._quiet.lasts(
                connection, self._member.subscription_id
            )

    def tend(self) -> None:
        """Connect, be a member, keep the lease and the fair share. Called between cycles.

        Raises:
            Unavailable, SchemaMissing, SchemaMismatch
        """
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            if self._member is not None and not self._due():
                return
            try:
                self._balance(connection)
            except Fenced:
                # this process slept past its lease and was removed: it comes back as a new member
                self._member = None
                self._balance(connection)
            self._quiet.forget()

    @property
    def renewal_due(self) -> bool:
        """Whether it is time to `renew`."""
        return self._member is not None and self._due()

    def renew(self) -> None:
        """Renew the lease if it is time and tasks give signs of life. Called during a cycle."""
        if self._member is None or not self._due():
            return
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            silent = 0.0
            if self.vigil is not None:
                silent = self.vigil.silence(self.name, connection)
            self._renewed = time.monotonic()
            if self._member is None or silent >= self.lease_seconds:
                return
            try:
                self._member.renew(connection, silent)
            except Fenced:
                return  # the tasks' own writes raise too, and `tend` joins again

    def open_work(self, default_destination: str | None) -> list[Work]:
        """Return the work to forward now.

        It consists of open batches, and a new batch if there are new messages or a lane is due.
        Nothing is returned while the only destination is down and not due.
        """
        member = self._member
        self.resumed = False
        if member is None:
            return []
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            self._look_at_lanes(connection, member)
            if not self.shards:
                return []
            owned = cursor.owned(connection, LOG, member)
            self.resumed = bool(owned.in_hand)
            self._say_resumed(owned.in_hand)
            due = any(lane.due for lane in self._lanes) and backoff.due_here(
                connection, member.subscription_id, member.member_id
            )
            opened: list[cursor.Batch] = []
            configured = None
            new = cursor.new_rows(connection, LOG, owned.idle, most=LITTLE + 1)
            if due or new:
                known = self.identities.known() if self.identities else None
                rows = configuration(connection, default_destination, self.declared, known)
                configured = rows.lasting
                version = freeze(connection, with_problems(rows.in_force))
                opened = cursor.open_batch(connection, LOG, member, version)
            if not (owned.in_hand or opened):
                return []
            # after opening the batch, so that rules removed before do not apply to it
            since = vouched_since(connection)
            work = [self._work(connection, batch, since) for batch in [*owned.in_hand, *opened]]
            little = opened if new <= LITTLE else []
            work = [replace(item, new=item.batch in opened, configured=configured) for item in work]
            return [
                item if item.batch in little else self._sized(connection, item)
                for item in work
                if not self._in_vain(item)
            ]

    def _say_resumed(self, in_hand: Iterable[cursor.Batch]) -> None:
        """Log once that an earlier run has marked messages of open batches, which are not
        counted."""
        begun = [batch for batch in in_hand if batch.position]
        if begun and not self._has_work:
            log.info(
                "resumed",
                broker=self.name,
                shards=sum(len(batch.epochs) for batch in begun),
                detail="an earlier run has marked messages of these shards' open batches: they are "
                "in its counts, or, if it was killed, in none",
            )
        self._has_work = True

    def _sized(self, connection: psycopg.Connection[Any], work: Work) -> Work:
        if not cursor.has_more_than(connection, work.batch, LITTLE):
            return work
        sample = replace(work.batch, epochs=work.batch.epochs[:SAMPLE])
        share = DEEP * len(sample.epochs) // len(work.batch.epochs)
        return replace(work, much=True, deep=cursor.has_more_than(connection, sample, share))

    def _in_vain(self, work: Work) -> bool:
        down = {lane.destination for lane in self._lanes if lane.kind == Kind.MAIN and not lane.due}
        return work.alone in down

    def close(
        self, complete: Iterable[Work], *, waits: bool = True, transformed: bool = False
    ) -> None:
        """Close the batches of completed work.

        ``waits`` tells whether the cycle set any messages aside; ``transformed``, whether it may
        have kept results of transforms.

        Raises:
            Fenced: another member has taken over shards, and closes their batches.
        """
        batches = cursor.join_splits(work.batch for work in complete)
        if batches:
            with unavailable_if_lost(f"broker {self.name!r}"):
                connection = self._connect()
                with connection.transaction() if transformed else nullcontext():
                    cursor.close(connection, batches)
                    if transformed:
                        kept_results.remove(connection, batches)
        if waits or self.waiting.lanes:
            self.look_at_waiting()

    def note(self, receipts: Iterable[Receipt]) -> None:
        """Note destinations' rejections in a row, for the next cycle."""
        answered = [
            receipt for receipt in receipts if receipt.destination and receipt.rejecting is not None
        ]
        for receipt in answered:
            self._rejecting.pop(str(receipt.destination), None)
        for receipt in answered:
            if receipt.rejecting:
                before = self._rejecting.get(str(receipt.destination), 0)
                self._rejecting[str(receipt.destination)] = max(before, receipt.rejecting)

    def look_at_waiting(self) -> None:
        """Read the lanes that wait now. Called after a cycle."""
        if self._member is not None:
            with unavailable_if_lost(f"broker {self.name!r}"):
                connection, member = self._connect(), self._member
                self._look_at_waiting(connection, member.subscription_id)
                self.lanes_left = self._began is not None and backoff.had_no_turn(
                    connection, member.subscription_id, member.member_id, self._began
                )

    def _look_at_lanes(self, connection: psycopg.Connection[Any], member: Member) -> None:
        """Read the lanes that the cycle must know. Called before a cycle."""
        if self._began is None:
            ((self._began,),) = fetch(connection, "SELECT now()")
        self._look_at_waiting(connection, member.subscription_id)
        self._lanes, self._of_services = (), False
        if self.waiting.lanes:
            self._lanes = backoff.waiting(connection, member.subscription_id, member.member_id)
            self._of_services = backoff.any_of_services(connection, member.subscription_id)

    def _look_at_waiting(self, connection: psycopg.Connection[Any], subscription_id: int) -> None:
        self.waiting = backoff.summary(connection, subscription_id)
        self.down = set()
        if self.waiting.lanes:
            params = {"subscription_id": subscription_id, "kind": Kind.MAIN}
            self.down = {name for (name,) in fetch(connection, DOWN, params)}

    def stop(self) -> None:
        """Ask the tasks to finish the current chunk and end."""
        if self._member is not None and self._connection is not None:
            with unavailable_if_lost(f"broker {self.name!r}"):
                self._member.stop(self._connection)

    def take_back_stop(self) -> None:
        """Withdraw `stop` after the end of the cycle, because another cycle follows."""
        if self._member is not None and self._connection is not None:
            with unavailable_if_lost(f"broker {self.name!r}"):
                self._member.take_back_stop(self._connection)

    def leave(self) -> None:
        """Free the shards and disconnect. If the server is gone, they become free anyway."""
        connection, self._connection = self._connection, None
        member, self._member = self._member, None
        if connection is None:
            return
        try:
            if member is not None:
                member.leave(connection)
        except psycopg.Error:
            return
        finally:
            connection.close()

    def forget_connection(self) -> None:
        """Drop the connection after `Unavailable`; the next `tend` connects again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._member = None
        self.shards = 0

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._member = None
            self._connection = self.dsn.connect(role="forward", autocommit=True)
            check_schema(self._connection)
            self._connection.execute(BY_INDEX)
        return self._connection

    def _identify(self, connection: psycopg.Connection[Any]) -> int:
        """Read the broker's id; return the subscription's."""
        known = fetch(connection, IDENTITY, {"log": LOG, "subscription": SUBSCRIPTION})
        if not known:
            raise ConfigurationError(
                f"broker {self.name!r}: saf.broker or the subscription {SUBSCRIPTION!r} of the "
                "outbox is missing; `saf migrate` had created both"
            )
        ((self._broker_id, subscription_id, cluster, oid, rejecting),) = known
        self.place = Place(broker_id=self._broker_id, system_identifier=cluster, oid=oid)
        self._rejecting = dict(rejecting)
        return int(subscription_id)

    def _refuse_unhealthy(self, connection: psycopg.Connection[Any]) -> None:
        health.refuse(connection, LOG, reader=f"{LOG}/{SUBSCRIPTION}")

    def _balance(self, connection: psycopg.Connection[Any]) -> None:
        if self._member is None:
            self._refuse_unhealthy(connection)
            subscription_id = self._identify(connection)
            self._member = Member(subscription_id=subscription_id, lease_seconds=self.lease_seconds)
            self._member.join(connection)
        self._member.renew(connection)
        self._renewed = time.monotonic()
        self.shards = self._member.balance(connection)

    def _frozen(self, connection: psycopg.Connection[Any], batch: cursor.Batch) -> Routes:
        version = batch.route_version
        assert version is not None  # noqa: S101 - set at open
        if version not in self._routes:
            self._routes = {version: frozen_routes(connection, version)}
        return self._routes[version]

    def _pending(self) -> bool:
        """Whether any member would find something to forward. Only reads."""
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            # each visit may reach another server, whose cursors would never find anything
            self._refuse_unhealthy(connection)
            subscription_id = self._identify(connection)
            found = fetch(connection, PENDING, {"subscription_id": subscription_id})
            self._look_at_waiting(connection, subscription_id)
            idle = [(done, shards) for done, shards, _ in found]
            return (
                any(taken for _, _, taken in found)
                or cursor.new_rows(connection, LOG, idle, most=1) > 0
                or backoff.any_due(connection, subscription_id)
            )

    def _due(self) -> bool:
        """Whether a third of the lease has passed: two renewals may fail before it is over."""
        return time.monotonic() - self._renewed > self.lease_seconds / 3

    def _work(
        self, connection: psycopg.Connection[Any], batch: cursor.Batch, since: int | None
    ) -> Work:
        assert self._broker_id is not None  # noqa: S101 - known since joining
        return Work(
            broker=self.name,
            source=self._broker_id,
            dsn=self.dsn,
            batch=batch,
            routes=self._frozen(connection, batch),
            waiting=self._lanes,
            of_services=self._of_services,
            rejecting=dict(self._rejecting),
            vouched_since=since,
            lease_seconds=self.lease_seconds,
        )


class Quiet:
    """A driver's knowledge from its last search at a source that found nothing.

    Before the next search, `lasts` tells whether anything may be new (`ASK`):

    - *Has any transaction of the server ended* that has written something? If not, nothing is new.
    - *Has an id been drawn?* A row's id is drawn after its transaction has its own id. So while the
      outbox's sequence stands still, no transaction that began later has written to the outbox.
    - *Has a transaction ended* that was in progress at the search? It may have drawn its ids
      before.
    - *Is there a lane?* An operator may have created one.

    So other databases of a server, however busy, cause few searches: one at most for each
    transaction that was in progress when the sequence stopped. The driver still searches now and
    then (`SURE_SECONDS`), because an operator may have set back cursors.
    """

    def __init__(self) -> None:
        self._next_id: int | None = None
        self._asked: tuple[str, frozenset[str] | None] | None = None
        """The snapshot before the search that follows, and the new `_known` if it finds nothing."""
        self._at = ""
        """The snapshot before a search that found nothing. Snapshots without a search do not count,
        because a cursor may have been set back before."""
        self._known: frozenset[str] | None = None
        """Transactions that were in progress at a search that found nothing, and still are. None:
        the sequence has not stood still."""
        self._until = 0.0

    def lasts(self, connection: psycopg.Connection[Any], subscription_id: int) -> bool:
        """Whether there is still nothing new. Only reads.

        If not, search; then call `nothing` if nothing was found and no lane exists, else `forget`.
        """
        ((next_id, snapshot),) = fetch(connection, ASK)
        if snapshot == self._at:
            return True
        running = frozenset(filter(None, snapshot.split(":")[2].split(",")))
        stood_still, self._next_id = next_id == self._next_id, next_id
        known = self._known if stood_still else None
        left = running if known is None else known & running
        if (
            known is not None
            and left == known
            and time.monotonic() < self._until
            and not backoff.any_lane(connection, subscription_id)
        ):
            return True
        self._asked = (snapshot, left if stood_still else None)
        return False

    def nothing(self) -> None:
        """Note that the search after `lasts` has found nothing, and that no lane waits."""
        if self._asked is not None:
            self._at, self._known = self._asked
            self._asked = None
            self._until = time.monotonic() + SURE_SECONDS

    def forget(self) -> None:
        """Forget all until the next search: something was found, or other shards are owned."""
        self._at, self._known, self._asked = "", None, None
