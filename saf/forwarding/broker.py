"""The source broker: one broker during a run, with its connection, membership and open batches.

This is the driver's part: messages never pass through it. `SourceBroker` makes this process a
member of the forwarder subscription. Between cycles it keeps the lease and the fair share, and
returns the work to forward; after a cycle it closes the batches of completed work.

A database that does not answer raises `Unavailable`, and the next call connects again. A process
that has slept past its lease comes back as a new member.

Searching for work takes several queries, about each shard. So at a source where a search has found
nothing, the driver first asks whether there can be anything new, by a statement that reads no log
(`Quiet`). This statement also tells when a message or a run is due next. A visit first moves due
messages to the outbox (`saf.forwarding.moving`), and then searches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.broker import health
from saf.broker.senders import vouched_since
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.destinations.identities import Identities
from saf.engine import kept_results
from saf.engine.little import Little
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import ConfigurationError, Fenced
from saf.forwarding import moving
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
"""Seconds for which a driver relies on a sequence that stands still, without a look at cursors."""

MOVES_APART_SECONDS = 0.05
"""Time between two moves of what is due, in seconds: each moves all that is due by then."""

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
ASK = f"""
SELECT last_value + is_called::int, pg_current_snapshot()::text,
       pg_current_snapshot()::text <> %(at)s AND ({backoff.ANY_LANE}), {moving.DUE_IN}
FROM saf.outbox_id_seq
"""

# A text that changes with any cursor of the member
CURSORS = f"""
SELECT md5(string_agg(concat_ws(' ', shard, epoch, batch, done, open), ',' ORDER BY shard))
FROM {NEWEST} AS c WHERE owner = %(owner)s
"""


@dataclass(frozen=True, kw_only=True)
class Here:
    """How visits forward little work, instead of leaving it to a runner."""

    rules: ForwardingRules
    turns: AbstractContextManager[Any]
    """Limits how many visits forward at a time, because each has a session at the destination."""
    seconds: float = 0.0
    """Time for which a visit may continue with what follows, in seconds."""
    keep: bool
    """Whether connections are kept for the next visit."""


@dataclass(frozen=True)
class Visit:
    """What a visit of a source has found."""

    work: list[Work] = field(default_factory=list)
    """Work to forward."""
    forwarded: tuple[Work, list[Receipt]] | None = None
    """Work that the visit has forwarded, and its receipts."""


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
        self.due_in: float | None = None
        """Seconds after the last visit in which something is due next; None: nothing is."""
        self.held_left = False
        """Whether the last visit had no time to move all that was due."""
        self.locked = 0
        """Held messages that the last visit has not moved, because sessions have locked them."""
        self._refused = 0
        self._moves_at = 0.0
        """Earliest time of the next move of what is due."""
        self._began: datetime | None = None
        self._quiet = Quiet()
        self._little: Little | None = None
        self._has_work = False
        """Whether it has searched for work before, so that open batches may be its own."""

    @property
    def connected(self) -> bool:
        """Whether it has a connection, and with it shards."""
        return self._connection is not None

    def visit(
        self,
        default_destination: str | None,
        *,
        brief: bool,
        here: Here | None = None,
    ) -> Visit:
        """Return the work to forward now. Called between cycles.

        With ``here``, forward little work here and now.
        A ``brief`` visit that finds nothing writes nothing, and disconnects at its end.

        Raises:
            Unavailable, UsageError, SchemaError
        """
        if brief and self._member is None and not self._pending():
            self.idle, self.locked = False, 0
            self.leave()
            return Visit()
        self.tend()
        self.idle = not self.shards
        if self._is_quiet():
            return Visit()
        found = self._followed(here) or self._searched(default_destination, here)
        if brief and not found.work:
            self.leave()
        return found

    def _followed(self, here: Here | None) -> Visit | None:
        """Forward what follows the last batch, if it is little and no search is due."""
        if here is None or self._little is None:
            return None
        with here.turns:
            followed = self._little.follow(here.rules, here.seconds)
        if followed is None:
            return None
        _, receipts = followed
        if not receipts:
            self._quiet.nothing(searched=False)
            return Visit()
        self._quiet.forget()
        self.note(receipts)
        return Visit(forwarded=followed)

    def _searched(self, default_destination: str | None, here: Here | None) -> Visit:
        """Search for work; forward it if it is little."""
        work = self.open_work(default_destination)
        if work or self.waiting.lanes:
            self._quiet.forget()
        else:
            self._quiet.nothing()
        if here is not None and len(work) == 1:
            if self._little is None:
                self._little = Little(keep=here.keep)
            with here.turns:
                receipts = self._little.forward(work[0], here.rules, here.seconds)
            if receipts is not None:
                self.note(receipts)
                return Visit(forwarded=(work[0], receipts))
        return Visit(work)

    def _is_quiet(self) -> bool:
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            if self._member is None:
                return False  # search for work, which joins
            quiet = self._quiet.lasts(connection, self._member)
        due_in = self._quiet.due_in
        if due_in is not None:
            due_in = max(due_in, self._moves_at - time.monotonic())
        self.held_left, self.locked = False, 0
        return not (self._is_due(due_in) and self.move_held()) and quiet

    def _is_due(self, due_in: float | None) -> bool:
        """Note in how many seconds something is due; return whether it is due now."""
        is_due = due_in is not None and due_in <= 0
        self.due_in = None if is_due else due_in
        return is_due

    def move_held(self) -> int:
        """Move due messages and runs to the outbox; return how many were found."""
        with unavailable_if_lost(f"broker {self.name!r}"):
            moved = moving.move(self._connect())
        waits = moved.found and not moved.more
        self._moves_at = time.monotonic() + MOVES_APART_SECONDS if waits else 0.0
        self.held_left, self.locked = moved.more, moved.locked
        self._refused += moved.refused
        return moved.found

    def take_refused(self) -> int:
        """Return how many held messages were refused since the last call."""
        refused, self._refused = self._refused, 0
        return refused

    def tend(self) -> None:
        """Connect, be a member, keep the lease and the fair share. Called between cycles.

        Raises:
            Unavailable, SchemaMissing, SchemaMismatch
        """
        with unavailable_if_lost(f"broker {self.name!r}"):
            connection = self._connect()
            if self._member is not None and not self._due():
                return
            before = self._member, self.shards
            try:
                self._balance(connection)
            except Fenced:
                # this process slept past its lease and was removed: it comes back as a new member
                self._member = None
                self._balance(connection)
            if (self._member, self.shards) == before:
                return
            self._quiet.forget()
            if self._little is not None:
                self._little.end()

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
            work = [
                replace(item, new=new if item.batch in opened else 0, configured=configured)
                for item in work
            ]
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
        if self._little is not None:
            self._little.end()
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
        self._connection = self._member = self._little = None
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
            is_due = self._is_due(moving.due_in(connection))
            idle = [(done, shards) for done, shards, _ in found]
            return (
                any(taken for _, _, taken in found)
                or cursor.new_rows(connection, LOG, idle, most=1) > 0
                or backoff.any_due(connection, subscription_id)
                or is_due
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
    transaction that was in progress when the sequence stopped. Now and then (`SURE_SECONDS`), the
    driver compares the cursors with those before its last search, because an operator may have set
    some back.
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
        self._cursors = self._asked_cursors = ""
        """The cursors before a search that found nothing, and before the search that follows."""
        self.due_in: float | None = None
        """Seconds from the last question until something is due; None: nothing will be."""

    def lasts(self, connection: psycopg.Connection[Any], member: Member) -> bool:
        """Whether there is still nothing new; also ask when something is due next.

        Only reads.

        If there may be something, search; then call `nothing` if nothing was found and no lane
        exists, else `forget`.
        """
        params = {"subscription_id": member.subscription_id, "owner": member.member_id}
        ((next_id, snapshot, any_lane, self.due_in),) = fetch(
            connection, ASK, {**params, "at": self._at}
        )
        if snapshot == self._at:
            return True
        running = frozenset(filter(None, snapshot.split(":")[2].split(",")))
        stood_still, self._next_id = next_id == self._next_id, next_id
        known = self._known if stood_still else None
        left = running if known is None else known & running
        self._asked_cursors = ""
        if known is not None and left == known and not any_lane:
            if time.monotonic() < self._until:
                return True
            ((self._asked_cursors,),) = fetch(connection, CURSORS, params)
            if self._asked_cursors == self._cursors:
                self._until = time.monotonic() + SURE_SECONDS
                return True
        self._asked = (snapshot, left if stood_still else None)
        return False

    def nothing(self, *, searched: bool = True) -> None:
        """Note that the search after `lasts` has found nothing, and that no lane waits.

        Without ``searched``, no message follows those forwarded last.
        """
        if self._asked is not None:
            snapshot, self._known = self._asked
            self._at, self._asked = snapshot if searched else "", None
            self._until = time.monotonic() + SURE_SECONDS
        self._cursors = self._asked_cursors if searched else ""

    def forget(self) -> None:
        """Forget all until the next search: something was found, or other shards are owned."""
        self._at, self._known, self._asked = "", None, None
        self._cursors = self._asked_cursors = ""
