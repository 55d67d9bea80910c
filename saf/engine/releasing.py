"""Releasing: parked messages whose time has come go before the new ones.

Messages that have waited for a route, or for their router, first move to lanes of the destinations
that routes lead to now; a topic's message moves as a copy for each. This is one transaction, and
they keep their place in the order. From then on each copy waits for its destination alone.

Lanes of a destination are released together, by their rank (`saf.setaside.backoff.rank`): one
ordered read, and chunks that go to the destination in one transaction each, whatever lanes they are
of. An obstacle for one lane keeps only that lane's messages back.

Messages of healthy lanes must not wait for long. So after `RELEASE_SECONDS`, and at least one
chunk, the task goes on with new messages. What is left goes on in the next cycle, after the lanes
that had no turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.chunks import chunks, mark
from saf.engine.held_lanes import HeldLanes
from saf.engine.load_sharing import share
from saf.engine.matcher import Matcher
from saf.engine.parts import Part
from saf.engine.receipts import Receipts
from saf.engine.resolving import Resolver
from saf.engine.set_aside import MAY_HAVE_LEFT, SetAside
from saf.engine.source import read
from saf.engine.source_session import SourceSession
from saf.engine.storing import Storing, nowhere
from saf.engine.work import ForwardingRules, Work
from saf.errors import SafError, Unavailable
from saf.failpoints import fail_point
from saf.log.columns import selected
from saf.log.cursor import hold
from saf.routing.matching import AT_MOST_ONCE
from saf.setaside import backoff, expired, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Kind, Lane, given, service_lane
from saf.setaside.lane_columns import (
    KIND,
    LANE,
    broker_of,
    either,
    found_lanes,
    given_of,
    in_lanes,
    is_in,
    lanes_of,
    route_lanes,
)
from saf.setaside.parking import ADDRESS, Backoff

SENT_AGAIN = (Kind.REPLAY, Kind.FOUND_REPLAY)
"""Kinds of lanes whose messages are sent although they have expired since: what a destination has
lost is sent again, and its reader decides."""

RELEASE_SECONDS = 5.0
"""After so many seconds, no further chunk is begun; a chunk in hand is finished."""


@dataclass
class Releasing:
    """The parked messages of one task's shards."""

    work: Work
    resolver: Resolver
    matcher: Matcher
    rules: ForwardingRules
    source_session: SourceSession
    lanes: HeldLanes
    receipts: Receipts
    storing: Storing
    _until: float = field(init=False, default=0.0)

    def release_all(self) -> None:
        """Deliver what the lanes of the work hold of these shards, if their time has come."""
        self._until = time.monotonic() + RELEASE_SECONDS
        if self.work.of_services:
            self._bury_unrouted()
        for lane in self.work.waiting:
            if not lane.due:
                self.lanes.hold(lane.own, lane.error)
        due = {lane.own: lane for lane in self.work.waiting if lane.due}
        found = self._route([lane for lane in due if not lane.destination])
        if found:
            subscription_id = self.work.batch.subscription_id
            now = self.source_session(lambda source: backoff.named(source, subscription_id, found))
            due |= {lane.own: lane for lane in now if lane.due}
        routed = backoff.in_turn(lane for lane in due.values() if lane.destination)
        for number, ((destination, _), group) in enumerate(groupby(routed, _group)):
            lanes = [lane.own for lane in group]
            if number and self._over:
                self._hold(lanes, "others had their turn")
            else:
                self._release(destination, lanes)

    def forget_untried(self) -> None:
        """Forget lanes that held nothing here, and to which nothing new went either."""
        if self.lanes.untried:
            subscription_id, untried = self.work.batch.subscription_id, self.lanes.untried
            self.source_session(lambda source: backoff.forget(source, subscription_id, untried))

    def _bury_unrouted(self) -> None:
        """Make dead letters of messages that expired without a route and were sent nowhere."""

        def bury(source: psycopg.Connection[Any]) -> int:
            hold(source, self.work.batch)
            return expired.bury_unrouted(source, self.work.batch)

        dead = expired.AT_ONCE
        while dead == expired.AT_ONCE:
            dead = self.source_session(bury)
            self.receipts.of(None).dead += dead

    @property
    def _over(self) -> bool:
        return time.monotonic() > self._until

    def _hold(self, lanes: Collection[Lane], why: str) -> None:
        """Let new messages wait behind these lanes. Lanes of services are looked up instead."""
        for lane in lanes:
            if not lane.of_service:
                self.lanes.hold(lane, why)

    # Routing

    def _route(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Move messages that waited for a route to where routes lead now; return to which lanes."""
        if not lanes:
            return set()
        found: set[Lane] = set()
        led = self._led(lanes)
        in_time = True
        needed = [*selected(self.rules.max_bytes)] if self.resolver else ["id", "shard", *ADDRESS]
        columns = [
            "parked_id",
            *LANE,
            sql.SQL("id AS log_id"),
            *parking.as_log(needed, found=False),
        ]
        for rows in self._read("", led, columns, found=False):
            self._isolate("", rows, partial(self._find_routes, found))
            if self._over:
                in_time = False
                break
        self._stay(lanes if in_time else [lane for lane in lanes if lane not in led])
        if not in_time:
            self._succeed(led)
        return found

    def _led(self, lanes: Sequence[Lane]) -> set[Lane]:
        """The lanes in which some message may have a way out.

        A lane says for which service it is, so a lane without a way out need not be read.
        """
        unrouted = [lane for lane in lanes if lane.unrouted]
        brokers = [lane.broker and lane.broker.bytes for lane in unrouted]
        rows = self.matcher.route(
            pa.table(
                {
                    "number": pa.array(range(len(unrouted)), pa.int64()),
                    "to_service": pa.array([lane.subject for lane in unrouted], pa.string()),
                    "to_broker": pa.array(brokers, pa.binary()),
                }
            )
        )
        routers = pa.array([one.service for one in self.work.routes.routers], pa.string())
        led = pc.or_(rows["route"].is_valid(), pc.is_in(rows["to_service"], routers))
        others = {lane for lane in lanes if not lane.unrouted}
        return others.union(unrouted[n] for n in rows.filter(led)["number"].to_pylist())

    def _stay(self, lanes: Sequence[Lane]) -> None:
        """Note that what is left in these lanes has no way out."""
        here = self.source_session(lambda s: parking.occupied(s, self.work.batch, lanes))
        self._postpone({lane: self.resolver.obstacle(lane) for lane in lanes if lane in here})
        self.lanes.untried.update(lane for lane in lanes if lane not in here)

    def _find_routes(self, found: set[Lane], rows: pa.Table) -> None:
        """Move messages to where routes lead now, and add to ``found`` the lanes they moved to."""
        if "body" in rows.column_names and rows["body"].null_count:
            set_aside = self._aside()
            readable = set_aside.bury_unread(rows)
            self._settle(rows.filter(pc.is_null(rows["body"])), set_aside)
            rows = readable
        resolution = self.resolver.resolve(rows)
        for some, error in resolution.dead:
            # a message that its router cannot resolve leaves its lane
            set_aside = self._aside()
            set_aside.bury(some, "", "unresolved", error)
            self._settle(some, set_aside)
        routed = self.matcher.route(resolution.rows)
        routed = routed.filter(routed["route"].is_valid())
        found |= self._move(share(routed, self.matcher.matches, self.source_session.choose))

    def _move(self, rows: pa.Table) -> set[Lane]:
        to = list(self._copies(rows))
        lanes = {_lane(there, row) for there, _, some in to for row in some}
        gone = {row["parked_id"] for _, _, some in to for row in some}
        subscription_id = self.work.batch.subscription_id

        def move(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            parking.touch(source, subscription_id, lanes, "has found a route")
            for destination, quality, some in to:
                parking.copy(source, destination, quality, some)
            parking.unpark(source, sorted(gone))
            fail_point("routed")

        if to:
            self.source_session(move)
        return lanes

    def _copies(self, rows: pa.Table) -> Iterator[tuple[str, str | None, list[dict[str, Any]]]]:
        """For each destination and quality, the messages that go there, with their lanes there."""
        waited_for_route = pc.equal(rows[KIND], str(Kind.ROUTE))
        rows = in_lanes(rows, found_lanes(either(waited_for_route, route_lanes(rows), rows)))
        there: dict[tuple[str, str | None], list[int]] = {}
        for number in pc.unique(rows["route"]).to_pylist():
            match = self.matcher.matches[number]
            for route in match.routes:
                if match.to_all or route.destination in self.rules.qualities:
                    there.setdefault((route.destination, route.quality), []).append(number)
        for (destination, quality), numbers in there.items():
            mine = rows.filter(pc.is_in(rows["route"], pa.array(numbers, pa.int32())))
            yield destination, quality, mine.select(["parked_id", *LANE, *ADDRESS]).to_pylist()

    # Releasing

    def _release(self, destination: str, lanes: Sequence[Lane]) -> None:
        """Deliver what some lanes of a destination hold of these shards."""
        blocked = self._blocked(destination, lanes)
        self._postpone(blocked)
        left, tried = set(lanes) - blocked.keys(), set[Lane]()
        for rows in self._parked(destination, left):
            if tried and self._over:
                self._succeed(tried & left)
                self._hold(left, "others had their turn")
                return
            tried.update(lanes_of(rows, destination)[0])
            self._isolate(destination, rows, partial(self._deliver, destination, left))
            if not left:
                return
        for lane in left & tried:
            self.lanes.open(lane)
        self._succeed(left & tried)
        self.lanes.untried |= left - tried

    def _blocked(self, destination: str, lanes: Sequence[Lane]) -> dict[Lane, SafError]:
        """Which lanes cannot leave, and why: no match, or older messages wait in another lane."""
        if destination not in self.rules.qualities:
            return dict.fromkeys(lanes, nowhere(destination))
        main = Lane(destination=destination)
        of_services = [one for one in lanes if one.kind in (Kind.SERVICE, Kind.FOUND_ROUTE)]
        if main in self.lanes.held:
            return {lane: _behind(lane, main, self.lanes.held[main]) for lane in of_services}
        known_by = {
            lane: service_lane(destination, lane.subject) for lane in of_services if lane.found
        }
        held = self._held({*known_by.values()})
        return {
            lane: _behind(lane, older, held[older])
            for lane, older in known_by.items()
            if older in held
        }

    def _held(self, lanes: Collection[Lane]) -> Mapping[Lane, str]:
        batch = self.work.batch
        if not lanes:
            return {}
        return self.source_session(
            lambda source: backoff.held(source, batch.subscription_id, batch.shards, lanes)
        )

    def _deliver(self, destination: str, left: set[Lane], rows: pa.Table) -> None:
        """Deliver a chunk, and take what has gone out of its lane.

        Only messages of the lanes ``left`` are delivered; lanes that fail are removed from it.
        """
        rows = rows.filter(is_in(rows, left))
        if not rows.num_rows:
            return
        set_aside = self._aside(destination)
        once: list[Part] = []
        for part in self._fit(destination, rows, set_aside):
            if part.quality == AT_MOST_ONCE:
                once.append(part)
            elif destination in set_aside.down:
                set_aside.wait(part)
            else:
                self.storing.store(part, mark(part.rows), set_aside)
        if destination in set_aside.down:
            for part in once:
                set_aside.wait(part)
            once = []
        sent_once = [number for part in once for number in part.rows["parked_id"].to_pylist()]
        later = pc.is_in(rows["parked_id"], pa.array(sent_once, pa.int64()))
        others = rows.filter(pc.invert(later))
        if others.num_rows or set_aside:
            self._settle(others, set_aside)
        for lane, error in set_aside.failed.items():
            self._hold([lane], str(error))
        left.difference_update(set_aside.failed)
        if set_aside.down:
            self._postpone(dict.fromkeys(left, next(iter(set_aside.failed.values()))))
            left.clear()
        for part in once:
            self._deliver_once(part)

    def _fit(self, destination: str, rows: pa.Table, set_aside: SetAside) -> Iterator[Part]:
        """What may go of a chunk, by quality; what is too large, in doubt or expired is buried."""
        kind = rows[KIND][0].as_py()
        rows = set_aside.bury_unread(rows)
        if kind == Kind.DOUBT:
            set_aside.bury(rows, destination, *MAY_HAVE_LEFT)
            return
        for part in self._qualities(destination, rows):
            fresh = part if kind in SENT_AGAIN else self._unexpired(part, set_aside)
            if fresh.rows.num_rows:
                yield fresh

    def _unexpired(self, part: Part, set_aside: SetAside) -> Part:
        """A part without expired messages, which are buried unless the destination has them."""
        expired_ones = set_aside.expired(part.rows)
        if expired_ones is None:
            return part
        never = part.rows.filter(expired_ones)
        if part.quality != AT_MOST_ONCE:  # a message sent at most once has left its lane
            try:
                never = self.storing.not_stored(replace(part, rows=never))
            except SafError:
                return part  # the storing meets it too, and says so
        set_aside.bury(never, part.waits_at, "expired", expired.EXPIRED)
        gone = pc.is_in(part.rows["parked_id"], never["parked_id"].combine_chunks())
        return replace(part, rows=part.rows.filter(pc.invert(gone)))

    def _aside(self, destination: str = "") -> SetAside:
        return SetAside(
            work=self.work,
            from_lanes=True,
            destination=destination,
            max_bytes=self.rules.max_bytes,
        )

    def _deliver_once(self, part: Part) -> None:
        """Deliver a part at most once, after everything else that could raise."""
        self._doubt(part)
        set_aside = self._aside()
        isolate(
            part.rows,
            lambda some: self.storing.store_once(replace(part, rows=some), set_aside),
            lambda one, error: set_aside.bury(one, part.waits_at, "rejected", error),
        )
        self._settle(part.rows, set_aside)

    def _qualities(self, destination: str, rows: pa.Table) -> Iterator[Part]:
        """Messages by their quality of service."""
        if rows.num_rows and rows[KIND][0].as_py() == Kind.MAIN:
            self.lanes.look(self.source_session, self.work.batch, rows)
            rows = rows.drop_columns(list(LANE))
        qualities = pc.fill_null(rows["quality"], self.rules.qualities[destination])
        for quality in pc.unique(qualities).to_pylist():
            mine = rows.filter(pc.equal(qualities, quality))
            yield Part(destination=destination, quality=quality, rows=mine, waits_at=destination)

    def _parked(self, destination: str, lanes: Collection[Lane]) -> Iterator[pa.Table]:
        found = any(lane.found for lane in lanes)
        log = parking.as_log([*selected(self.rules.max_bytes), "batch"], found=found)
        columns = [*log, "opened_at", "parked_id", *LANE, "quality", sql.SQL("id AS log_id")]
        return self._read(destination, lanes, columns, found=found)

    # What both do

    def _isolate(self, destination: str, rows: pa.Table, step: Callable[[pa.Table], None]) -> None:
        """Make a step for messages of lanes; one that it raises for alone becomes a dead letter."""
        numbers, lanes = rows["parked_id"], rows.select(LANE)
        gone: set[int] = set()
        """Messages that an attempt before has written durably: they have left that lane."""

        def undo() -> None:
            ids = numbers.to_pylist()
            here = self.source_session(
                lambda source: parking.still(source, destination, given_of(lanes), ids)
            )
            gone.update(number for number in ids if number not in here)

        def remaining(some: pa.Table) -> pa.Table:
            if not gone:
                return some
            out = pc.is_in(some["parked_id"], pa.array(list(gone), pa.int64()))
            return some.filter(pc.invert(out))

        def bury(message: pa.Table, error: str) -> None:
            if message["parked_id"][0].as_py() not in gone:
                set_aside = self._aside(destination)
                set_aside.bury_as_stored(message, error)
                self._settle(message, set_aside)

        def make(some: pa.Table) -> None:
            left = remaining(some)
            if left.num_rows:
                step(left)

        isolate(rows, make, bury, undo)

    def _read(
        self,
        destination: str,
        lanes: Collection[Lane],
        columns: Sequence[str | sql.Composable],
        *,
        found: bool,
    ) -> Iterator[pa.Table]:
        """Read what lanes hold of these shards, each lane in order, in chunks."""
        if lanes:
            query = parking.in_lanes(self.work.batch, destination, lanes, columns, found=found)
            yield from chunks(read(self.work, query), self.rules.chunk_rows, self.rules.chunk_bytes)

    def _doubt(self, part: Part) -> None:
        """Note, durably, that messages are about to be sent that must not be sent again.

        They wait in a lane from which nothing is sent. If they stay there, because this process
        ends meanwhile, they become dead letters.
        """
        lane = Lane(destination=part.waits_at, kind=Kind.DOUBT)
        subscription_id = self.work.batch.subscription_id
        ids = part.rows["parked_id"].to_pylist()

        def doubt(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            parking.touch(source, subscription_id, [lane], "sent at most once")
            parking.move(source, lane.destination, given([lane] * len(ids)), ids)
            fail_point("unpark")

        self.source_session(doubt)
        self.lanes.untried.add(lane)  # empty again soon, unless other messages are there too
        fail_point("unpark_commit")

    def _settle(self, rows: pa.Table, set_aside: SetAside) -> None:
        """Take what has gone out of its lane."""

        def settle(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            set_aside.write_from_lanes(source, rows["parked_id"].to_pylist())
            self.storing.acknowledge(source)
            fail_point("unpark")

        self.source_session(settle)
        self.storing.settled()
        self.receipts.of(None).dead += set_aside.dead_letters
        fail_point("unpark_commit")

    def _postpone(self, failed: Mapping[Lane, SafError]) -> None:
        if failed:
            subscription_id = self.work.batch.subscription_id
            errors = {lane: str(error) for lane, error in failed.items()}
            for lane, why in errors.items():
                self._hold([lane], why)
            self.source_session(lambda source: backoff.postpone(source, subscription_id, errors))

    def _succeed(self, lanes: Collection[Lane]) -> None:
        if lanes:
            subscription_id = self.work.batch.subscription_id
            self.source_session(lambda source: backoff.succeeded(source, subscription_id, lanes))


def _group(lane: Backoff) -> tuple[str, int]:
    return lane.destination, backoff.rank(lane)


def _behind(lane: Lane, older: Lane, why: str) -> Unavailable:
    return Unavailable(str(lane), f"behind {older}: {why}")


def _lane(destination: str, row: Mapping[str, Any]) -> Lane:
    return Lane(
        destination=destination,
        kind=Kind(row["kind"]),
        subject=row["subject"],
        broker=broker_of(row["broker"]),
    )
