"""Storing: the step of a delivery in which messages reach their destinations.

`Storing.store` may be repeated, because a destination drops messages that it already has.
`Storing.store_once` never repeats: messages that may have left become dead letters.

An obstacle delays only the messages that it is about. Halving finds a message that a destination
rejects, and its neighbours are stored. Between halves, the task checks for a request to stop, and
gives nothing more to a destination that rejects one message after the other (`saf.engine.brake`).

Vouching (`vouched`) tells receivers what the source knows of a message's sender. While a broker has
rules for senders (`saf.broker.senders`), its server has checked the sender of each message. The
forwarder states this in a header, with the broker and the service. A header of that name that a
sender has made up is renamed, so that receivers can rely on the name. Messages on a local route
(`saf.routing.local`) bypass the forwarder: the function of its trigger does the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic, perf_counter
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.database.patience import while_unavailable
from saf.destinations import Chunk
from saf.destinations.places import beyond
from saf.engine.brake import Brake
from saf.engine.destination_sessions import DestinationSessions, obstacle, prefix
from saf.engine.parked_lanes import HeldLanes
from saf.engine.parts import Part, unroutable
from saf.engine.set_aside import SetAside
from saf.engine.source_session import SourceSession
from saf.engine.transforming import Transforming, inputs_of, several_of
from saf.engine.work import ForwardingRules, Receipts, Work
from saf.errors import (
    Ahead,
    AnotherBroker,
    Behind,
    Braked,
    ConfigurationError,
    Fenced,
    NoDialogs,
    Refused,
    Rejected,
    SafError,
    SchemaError,
    Unavailable,
    UnknownService,
)
from saf.log.cursor import lock_cursors, told_to_stop
from saf.message import CLAIMED_FROM, VERIFIED_FROM
from saf.setaside.lane import Lane
from saf.setaside.lane_columns import (
    either,
    found_lanes,
    in_lanes,
    route_lanes,
    same,
    service_lanes,
)

TO_REPAIR = (Behind, Braked, ConfigurationError, Refused, SchemaError)
"""Errors of a destination where nothing can be stored until an operator has repaired something."""

REFUSES = (Unavailable, *TO_REPAIR)
"""Errors of a destination where nothing can be stored now."""

ASK_SECONDS = 0.5
"""Interval in seconds at which a task checks, between halves, whether to stop."""

_VERIFIED, _CLAIMED = f'"{VERIFIED_FROM}":', f'"{CLAIMED_FROM}":'


@dataclass
class Storing:
    """Stores the parts of one task's chunks at their destinations."""

    work: Work
    rules: ForwardingRules
    source_session: SourceSession
    lanes: HeldLanes
    receipts: Receipts
    destinations: DestinationSessions
    transforming: Transforming
    to_repair: SafError | None = None
    """The error of a destination where nothing can be stored until an operator has repaired it."""
    brake: Brake = field(init=False)
    stopping: bool = False
    """Whether a request to stop was seen between two halves."""
    _asked: float = field(init=False, default_factory=monotonic)

    def __post_init__(self) -> None:
        self.brake = Brake(self.work, self.rules.max_rejected)

    def store(self, part: Part, set_aside: SetAside) -> None:
        """Store a part; put messages that cannot be stored in ``set_aside``."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        name = part.destination
        part = self._without_dialogs(self._bury_unsuited(part, set_aside), set_aside)
        set_aside.write_ahead(self.source_session)
        if not (part.rows.num_rows or part.main):
            return  # an empty main part is stored all the same: it fences the previous owner
        if part.rows.num_rows and (braked := self.brake.engaged(name)):
            self._wait(part, set_aside, braked)
            return
        services = self.lanes.services(name) if part.main else frozenset()
        chunk = replace(self._chunk(part), behind=services)
        if part.rows.num_rows and not chunk.rows.num_rows:
            self._leave_out(part, chunk, set_aside)
            return
        began = perf_counter()
        try:
            stored = while_unavailable(
                self.rules.attempts, lambda: self.destinations.store(part, chunk)
            )
        except REFUSES as error:
            part = self._without_stored(part, set_aside, error, perf_counter() - began)
            self._wait(part, set_aside, error)
        except AnotherBroker as error:
            error.rows = inputs_of(part.rows, error.rows)
            self._store_own(part, set_aside, error)
        except UnknownService as error:
            error.rows = inputs_of(part.rows, error.rows)
            self._store_known(part, set_aside, error)
        except Fenced as error:
            # if the source knows a newer owner too, this raises Fenced; otherwise the destination
            # is ahead
            self.source_session(lambda source: lock_cursors(source, self.work.batch))
            raise Ahead(f"destination {name!r}", error.shards) from None
        except Rejected as error:
            part = self._without_stored(part, set_aside, error, perf_counter() - began)
            self._store_halves(part, set_aside, error)
        else:
            part = self._leave_out(part, chunk, set_aside)
            self.receipts.of(name).dropped += stored.dropped
            self._note(part, stored.messages, perf_counter() - began)
            lane = Lane(destination=name)
            if part.main and lane in self.lanes.untried:
                self.lanes.untried.discard(lane)
                set_aside.opened.add(lane)

    def store_once(self, part: Part, set_aside: SetAside) -> None:
        """Store a part at most once: bury messages that may have left, and never send them
        again."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        name = part.destination
        part = self._without_dialogs(self._bury_unsuited(part, set_aside), set_aside)
        if not part.rows.num_rows:
            return
        chunk = self._chunk(part)
        part = self._leave_out(part, chunk, set_aside)
        if not part.rows.num_rows:
            return
        began = perf_counter()
        try:
            stored = self.destinations.store(part, chunk)
        except AnotherBroker as error:
            error.rows = inputs_of(part.rows, error.rows)
            own, others = _told_apart(error)
            self._let_wait(others, set_aside, error)
            self.store_once(replace(part, rows=own), set_aside)
        except Rejected as error:
            # rejected messages were not stored, so their neighbours have not left yet
            part = self._without_stored(part, set_aside, error, perf_counter() - began)
            if part.rows.num_rows == 1:
                self._bury_rejected(part, set_aside, error)
            else:
                for half in _halves(part):
                    self.store_once(half, set_aside)
        except (*REFUSES, UnknownService) as error:
            self.receipts.of(name).down |= isinstance(error, REFUSES)
            part = self._without_stored(part, set_aside, error, perf_counter() - began)
            set_aside.bury(part.rows, name, "unavailable", str(error))
            if isinstance(error, REFUSES):
                self._hold_others(name, set_aside, error)
        else:
            self._note(part, stored.messages, perf_counter() - began)

    def _leave_out(self, part: Part, chunk: Chunk, set_aside: SetAside) -> Part:
        """Return a part without the messages that a transform leaves out; count these."""
        assert part.destination is not None  # noqa: S101 - it is on its way there
        if not self.transforming:
            return part
        left = inputs_of(part.rows, chunk.rows, but=True)
        if not left.num_rows:
            return part
        new = set_aside.leave_out(left, part.destination)
        self.receipts.of(part.destination).left_out += new
        return replace(part, rows=inputs_of(part.rows, chunk.rows))

    def _without_stored(
        self, part: Part, set_aside: SetAside, error: SafError, seconds: float
    ) -> Part:
        """Return a part without the messages that its destination stored although it raised."""
        if error.stored is None:
            return part
        stored = inputs_of(part.rows, error.stored)
        set_aside.take(stored)
        self._note(replace(part, rows=stored), stored.num_rows, seconds)
        return replace(part, rows=inputs_of(part.rows, error.stored, but=True))

    def _note(self, part: Part, messages: int, seconds: float) -> None:
        """Note that a part was given to its destination, where ``messages`` were new."""
        assert part.destination is not None  # noqa: S101 - it was stored there
        if messages:
            self.brake.stored(part.destination)
        self.receipts.of(part.destination).messages += messages
        self.receipts.delivered(part.destination, part.rows)
        self.receipts.stored(part.destination, part.rows.num_rows, seconds)
        self.receipts.of(part.destination).early += self._early(part)
        if "parked_id" in part.rows.column_names:
            self.receipts.of(part.destination).retried += messages

    def _early(self, part: Part) -> int:
        """Return how many messages came before their time, at a destination that holds none."""
        assert part.destination is not None  # noqa: S101 - it was stored there
        times = part.rows["deliver_at"]
        holds = self.rules.destinations[part.destination].capabilities.holds
        if holds or times.null_count == len(times):
            return 0
        early = pc.sum(pc.greater(times, pa.scalar(datetime.now(UTC), times.type))).as_py()
        return int(early or 0)

    def not_stored(self, part: Part, rows: pa.Table, set_aside: SetAside) -> pa.Table:
        """Ask its destination which rows of a part it has not stored before.

        Raises the errors of `store`. If the destination refuses everything now, the whole part
        waits, too.
        """
        chunk = self._chunk(replace(part, rows=rows))
        try:
            marks = while_unavailable(
                self.rules.attempts, lambda: self.destinations.marks(part, chunk)
            )
        except REFUSES as error:
            self._wait(part, set_aside, error)
            raise
        stored = {place: mark.number for place, mark in marks.items()}
        return beyond(rows, chunk.batch.number, stored, prefix(part))

    def _wait(self, part: Part, set_aside: SetAside, error: SafError) -> None:
        """Let a part wait for its destination, which refuses everything now."""
        name = part.waits_at
        if isinstance(error, TO_REPAIR):
            self.to_repair = error
        self.receipts.of(name).down |= obstacle(self.rules, name, part.quality) is None
        set_aside.failed |= dict.fromkeys(part.lanes, error)
        set_aside.down.add(name)
        set_aside.wait(part)
        if isinstance(error, Braked):
            self._hold_others(name, set_aside, error)
        if part.main:
            self.lanes.hold(Lane(destination=name), str(error))

    def _hold_others(self, name: str, set_aside: SetAside, error: SafError) -> None:
        """Let unsent messages wait for their destination, which must not be tried immediately."""
        if isinstance(error, TO_REPAIR):
            self.to_repair = error
        lane = Lane(destination=name)
        set_aside.failed[lane] = error
        self.lanes.hold(lane, str(error))

    def _bury_unsuited(self, part: Part, set_aside: SetAside) -> Part:
        """Return a part without messages that its destination never takes; bury these.

        They are too large for it, or were split and it might store only some parts.
        """
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        what = f"destination {part.destination!r}"
        able = self.rules.destinations[part.destination].capabilities
        if able.largest_body is None and (able.takes_parts or not self.transforming):
            return part
        sent, bad = self.transforming.outputs(part.rows), dict[str, pa.Table]()
        if able.largest_body is not None:
            large = pc.greater(pc.binary_length(sent["body"]), able.largest_body)
            bad[f"a body has more than {able.largest_body:,} bytes"] = sent.filter(large)
        if self.transforming and not able.takes_parts:
            bad["it takes no message that a transform has split"] = several_of(sent)
        for why, outputs in bad.items():
            rows = inputs_of(part.rows, outputs)
            if rows.num_rows:
                set_aside.bury(rows, part.destination, "rejected", str(Rejected(what, why)))
                part = replace(part, rows=inputs_of(part.rows, rows, but=True))
        return part

    def _without_dialogs(self, part: Part, set_aside: SetAside) -> Part:
        """Return a part without messages of dialogs; these wait for a route to where an end can
        live.

        Messages of a monolog stay: they are for a topic, and nobody answers.
        """
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        if self.rules.destinations[part.destination].capabilities.takes_dialogs:
            return part
        mask = pc.is_valid(part.rows["conversation_id"])
        if not pc.any(mask).as_py():
            return part
        topics = pa.array([*self.work.routes.topics], pa.string())
        mask = pc.and_not(mask, pc.is_in(part.rows["to_service"], topics))
        rows = part.rows.filter(mask)
        if rows.num_rows:
            services = sorted(pc.unique(rows["to_service"]).to_pylist())
            self._let_wait(
                rows, set_aside, NoDialogs(f"destination {part.destination!r}", services)
            )
        return replace(part, rows=part.rows.filter(pc.invert(mask)))

    def _store_halves(self, part: Part, set_aside: SetAside, error: Rejected) -> None:
        """Store as much as possible of a part in which the destination rejects something."""
        assert part.destination is not None  # noqa: S101 - it was given to it
        if part.rows.num_rows == 1:
            self._bury_rejected(part, set_aside, error)
            return
        first, second = _halves(part)
        self.store(first, set_aside)
        if part.destination in set_aside.down:
            set_aside.wait(second)
        elif self._told_to_stop():
            # in its lane: the next run delivers it before everything else
            set_aside.wait(second)
            self.lanes.hold(Lane(destination=part.destination), "the forwarder was told to stop")
        else:
            self.store(second, set_aside)

    def _bury_rejected(self, part: Part, set_aside: SetAside, error: Rejected) -> None:
        """Make a dead letter of a part's only message, which its destination has rejected."""
        assert part.destination is not None  # noqa: S101 - it was given to it
        set_aside.bury(part.rows, part.destination, "rejected", str(error))
        self.brake.rejected(part.destination, error)
        if braked := self.brake.engaged(part.destination):
            self._hold_others(part.destination, set_aside, braked)

    def _told_to_stop(self) -> bool:
        """Whether the task was told to stop; asks the source now and then."""
        if not self.stopping and monotonic() - self._asked >= ASK_SECONDS:
            batch = self.work.batch
            self.stopping = self.source_session.find(lambda source: told_to_stop(source, batch))
            self._asked = monotonic()
        return self.stopping

    def _store_own(self, part: Part, set_aside: SetAside, error: AnotherBroker) -> None:
        """Store the rest of a part with messages for other brokers: these wait for a route."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        _, others = _told_apart(error)
        self._let_wait(others, set_aside, error)
        self._store_rest(part, others, set_aside)

    def _let_wait(self, rows: pa.Table, set_aside: SetAside, error: SafError) -> None:
        """Park messages to wait for a route, like messages that have none."""
        waiting = unroutable(rows)
        for lane in waiting.lanes:
            set_aside.failed[lane] = error
            self.lanes.hold(lane, str(error))
        set_aside.move(waiting)

    def _store_known(self, part: Part, set_aside: SetAside, error: UnknownService) -> None:
        """Store the rest of a part with services that the destination does not know.

        Messages for these services wait in lanes of the services, so that the rest need not wait.
        The lanes are those for messages that have found a route, unless the messages wait in the
        service's lane already or are in the order in which they were sent. Otherwise a message that
        was stored before the service was removed, or that is sent again, would meet another lane's
        watermark.
        """
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        unknown = pc.is_in(error.rows["to_service"], pa.array(error.services, pa.string()))
        rows = error.rows.filter(unknown)
        by_service = service_lanes(rows)
        if part.main:
            here, lanes = pc.not_equal(rows["id"], rows["id"]), by_service  # none
        else:
            by_route = found_lanes(route_lanes(rows))
            here = pc.or_(same(rows, by_service), same(rows, by_route))
            lanes = either(here, rows, by_route)
        waiting = replace(part, rows=in_lanes(rows, lanes))
        staying = replace(waiting, rows=waiting.rows.filter(here))
        going = replace(waiting, rows=waiting.rows.filter(pc.invert(here)))
        for lane in waiting.lanes:
            why = error.of(lane.subject)
            if not part.main or lane not in self.lanes.held:
                set_aside.failed[lane] = why
            self.lanes.hold(lane, str(why))
        if staying.rows.num_rows:
            set_aside.wait(staying)
        if going.rows.num_rows:
            set_aside.move(going)
        self._store_rest(part, rows, set_aside)

    def _store_rest(self, part: Part, refused: pa.Table, set_aside: SetAside) -> None:
        """Store the rows of a part that its destination has not refused.

        They include rows that the destination has stored before: it drops them, and answers with
        the marks that the source has to acknowledge.
        """
        rest = inputs_of(part.rows, refused, but=True)
        if rest.num_rows:
            self.store(replace(part, rows=rest), set_aside)

    def _chunk(self, part: Part) -> Chunk:
        return Chunk(
            source=self.work.source,
            batch=self.work.batch,
            rows=vouched(
                self.transforming.outputs(part.rows), self.work.source, self.work.vouched_since
            ),
        )


def _halves(part: Part) -> tuple[Part, Part]:
    half = part.rows.num_rows // 2
    first, second = part.rows.slice(0, half), part.rows.slice(half)
    return replace(part, rows=first), replace(part, rows=second)


def _told_apart(error: AnotherBroker) -> tuple[pa.Table, pa.Table]:
    """Split refused rows into those for the destination, and the others."""
    others = pa.array([UUID(other).bytes for other in error.others], pa.binary())
    mask = pc.is_in(error.rows["to_broker"], value_set=others, skip_nulls=True)
    return error.rows.filter(pc.invert(mask)), error.rows.filter(mask)


def vouched(rows: pa.Table, source: UUID, since: int | None) -> pa.Table:
    """Return messages whose headers name the verified senders.

    This works on whole columns of JSON text, as PostgreSQL writes it. If a name has two values, the
    last one wins, in a jsonb and in Python; so the verified value is appended last.

    Args:
        rows: with the columns of messages, and their ids in the outbox.
        source: the broker_id.
        since: senders of messages with greater ids were checked; None: no sender was.
    """
    checked = _checked(rows, since)
    headers = _renamed(rows["headers"], checked)
    if pc.any(checked).as_py():
        headers = _said(headers, rows["from_service"], checked, source)
    if headers is rows["headers"]:
        return rows
    return rows.set_column(rows.schema.get_field_index("headers"), "headers", headers)


def _checked(rows: pa.Table, since: int | None) -> pa.ChunkedArray:
    """Return for each message whether its sender was checked and its headers can tell so."""
    if since is None:
        return pa.chunked_array([pa.nulls(rows.num_rows, pa.bool_())])
    # a parked message has another number as its id
    ids = rows["log_id" if "log_id" in rows.column_names else "id"]
    mask = pc.and_(pc.greater(ids, since), pc.is_valid(rows["from_service"]))
    return pc.and_(mask, pc.fill_null(pc.starts_with(rows["headers"], "{"), True))


def _renamed(headers: pa.ChunkedArray, checked: pa.ChunkedArray) -> pa.ChunkedArray:
    forged = pc.match_substring(headers, _VERIFIED)
    if not pc.any(forged).as_py():
        return headers
    renamed = pc.replace_substring(headers, _VERIFIED, _CLAIMED)
    return pc.if_else(pc.fill_null(checked, False), headers, renamed)


def _said(
    headers: pa.ChunkedArray, services: pa.ChunkedArray, checked: pa.ChunkedArray, source: UUID
) -> pa.ChunkedArray:
    kind = headers.type
    known = pc.unique(services)
    entries = pa.array(
        [
            None
            if name is None
            else f"{_VERIFIED} {json.dumps({'broker': str(source), 'service': name})}}}"
            for name in known.to_pylist()
        ],
        kind,
    )
    given = pc.fill_null(headers, "{}")
    comma = pc.if_else(pc.equal(given, "{}"), pa.scalar("", kind), pa.scalar(", ", kind))
    whole = pc.binary_join_element_wise(
        pc.utf8_slice_codeunits(given, 0, -1),
        comma,
        entries.take(pc.index_in(services, known).combine_chunks()),
        pa.scalar("", kind),
    )
    return pc.if_else(checked, whole, headers)
