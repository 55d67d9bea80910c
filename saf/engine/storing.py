"""Storing: the step of a delivery in which messages reach their destinations.

A destination takes a chunk, or answers with a `saf.destinations.Refusal`. `next_step` is the table
of cases: what follows from a refusal. `work_off` is the list of the pieces of a part that are still
to be tried, in order.

Storing may be repeated, because a destination drops messages that it already has. At most once is
never repeated: messages that may have left become dead letters.

A destination with a rate gets a part in pieces, each with permits (`saf.log.rates`). If the waits
for permits take too long, the rest waits in the destination's lane, which is due in the next cycle.
The same applies to waits for a seat at a destination with a concurrency (`saf.engine.seats`).

An obstacle delays only the messages that it is about. Halving finds a message that a destination
rejects, and its neighbours are stored. Between pieces, the task checks for a request to stop, and
gives nothing more to a destination that rejects one message after the other
(`saf.engine.context.Brake`).

Vouching (`vouched`) tells receivers what the source knows of a message's sender. While a broker has
rules for senders (`saf.broker.senders`), its server has checked the sender of each message. The
forwarder states this in a header, with the broker and the service. A header of that name that a
sender has made up is renamed, so that receivers can rely on the name. Messages on a local route
(`saf.routing.local`) bypass the forwarder: the function of its trigger does the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum, auto
from time import perf_counter
from typing import TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Chunk, Refusal
from saf.engine.context import Context
from saf.engine.destination_sessions import obstacle
from saf.engine.parts import Part, several_of, unroutable
from saf.engine.set_aside import SetAside
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
from saf.log.cursor import lock_cursors
from saf.message import CLAIMED_FROM, VERIFIED_FROM
from saf.routing.matching import AT_MOST_ONCE
from saf.setaside.dropped import EXPIRED
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

_VERIFIED, _CLAIMED = f'"{VERIFIED_FROM}":', f'"{CLAIMED_FROM}":'

T = TypeVar("T")


class Step(Enum):
    """What follows for a piece of a part that its destination has refused."""

    SPLIT = auto()
    """Try each half."""
    REJECT = auto()
    """Make a dead letter of the only message."""
    DIVERT = auto()
    """Let the refused messages wait elsewhere, for a route or a service; try the others again."""
    PARK = auto()
    """Let the piece wait for the destination, and all pieces after it."""
    GIVE_UP = auto()
    """Make dead letters of messages that may have left, because they must not be sent again."""
    END = auto()
    """End the task."""


def next_step(refusal: Refusal, messages: int, *, once: bool) -> Step:
    """Return what follows from the refusal of a number of messages; ``once``: sent at most once.

    >>> rejected = Refusal(error=Rejected("destination 'mom'", "too large"))
    >>> [next_step(rejected, messages, once=False).name for messages in (2, 1)]
    ['SPLIT', 'REJECT']
    >>> unavailable = Refusal(error=Unavailable("destination 'mom'", "it is down"))
    >>> [next_step(unavailable, 2, once=once).name for once in (False, True)]
    ['PARK', 'GIVE_UP']
    """
    names_rows = refusal.rows is not None and refusal.rows.num_rows > 0
    match refusal.error:
        case Rejected():
            return Step.SPLIT if messages > 1 else Step.REJECT
        case AnotherBroker() if names_rows:
            return Step.DIVERT
        case UnknownService() if once:
            return Step.GIVE_UP
        case UnknownService() if names_rows:
            return Step.DIVERT
        case error if isinstance(error, REFUSES):
            return Step.GIVE_UP if once else Step.PARK
    return Step.END


def work_off(
    first: T, attempt: Callable[[T], Sequence[T]], stops: Callable[[], bool]
) -> Sequence[T]:
    """Try a piece, and the pieces that each attempt leaves in its place, in order.

    After an attempt that leaves none, ``stops`` decides whether to end. Return the pieces that are
    not tried then.

    >>> tried = []
    >>> def halve(numbers):
    ...     tried.append(numbers)
    ...     half = len(numbers) // 2
    ...     return [numbers[:half], numbers[half:]] if 4 in numbers and half else []
    >>> work_off([1, 2, 3, 4], halve, lambda: False), tried
    ([], [[1, 2, 3, 4], [1, 2], [3, 4], [3], [4]])
    >>> work_off([1, 2, 3, 4], halve, lambda: True)
    [[3, 4]]
    """
    pending = [first]
    while pending:
        left = attempt(pending.pop())
        pending += reversed(left)
        if not left and pending and stops():
            return pending[::-1]
    return []


class Storing:
    """Stores the parts of one task's chunks at their destinations."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def deliver(self, part: Part, set_aside: SetAside) -> None:
        """Store a part; put messages that cannot be stored in ``set_aside``."""
        part = self._without_dialogs(self._bury_unsuited(part, set_aside), set_aside)
        with self.context.storing(part.destination):
            left = work_off(
                part,
                lambda piece: self._attempt(piece, set_aside),
                lambda: part.quality != AT_MOST_ONCE and self._stops(part, set_aside),
            )
        for piece in left:
            set_aside.wait(piece)

    def _attempt(self, part: Part, set_aside: SetAside) -> Sequence[Part]:
        """Give a piece of a part to its destination; return the pieces to try in its place."""
        name, once, context = part.destination, part.quality == AT_MOST_ONCE, self.context
        if not once:
            set_aside.write_ahead(context.source)
        if not part.rows.num_rows and (once or not part.main):
            return ()  # an empty main part is stored all the same: it fences the previous owner
        if part.rows.num_rows and not once and (braked := context.brake.engaged(name)):
            self._wait(part, set_aside, Refusal(error=braked))
            return ()
        if (pieces := self._slowed(part, set_aside)) is not None:
            return pieces
        chunk = self._chunk(part)
        if once or (part.rows.num_rows and not chunk.rows.num_rows):
            part = self._leave_out(part, chunk, set_aside)
            if not part.rows.num_rows:
                return ()
        began = perf_counter()
        answer = context.destinations.store(part, chunk)
        seconds = perf_counter() - began
        if isinstance(answer, Refusal):
            return self._refused(part, answer, seconds, set_aside)
        part = self._leave_out(part, chunk, set_aside)
        self._note(part, answer.messages, seconds)
        if not once:
            context.receipts.of(name).dropped += answer.dropped
            lane = Lane(destination=name)
            if part.main and lane in context.lanes.untried:
                context.lanes.untried.discard(lane)
                set_aside.opened.add(lane)
        return ()

    def _slowed(self, part: Part, set_aside: SetAside) -> Sequence[Part] | None:
        """Return the pieces to try in place of a part, by its destination's limits; None: all may
        go.

        A piece that is returned has its permits.
        """
        name, context, messages = part.destination, self.context, part.rows.num_rows
        settings = context.rules.destinations[name]
        if not settings.is_limited:
            return None
        once = part.quality == AT_MOST_ONCE  # its attempt is recorded, so it must go
        patient = once or context.work.alone == name
        if not context.has_seat(name, patient=patient, must=once):
            return self._used_up(part, set_aside)
        if not messages or settings.rate is None:
            return None
        permits = context.permits(name, messages, patient=patient)
        if permits >= messages or (once and not permits):
            context.use(name, messages)
            return None
        if permits:
            return [replace(part, rows=part.rows.slice(*cut)) for cut in ((0, permits), (permits,))]
        return self._used_up(part, set_aside)

    def _used_up(self, part: Part, set_aside: SetAside) -> Sequence[Part]:
        """Let a part wait for a destination that gets nothing more in this task."""
        lane, context = Lane(destination=part.destination), self.context
        if paused := context.paused(part.destination):
            set_aside.fail([lane], paused)
        context.lanes.hold(lane, context.used_up[part.destination])
        if part.rows.num_rows:
            set_aside.wait(part)
        return ()

    def _refused(
        self, part: Part, refusal: Refusal, seconds: float, set_aside: SetAside
    ) -> Sequence[Part]:
        """Do what follows from a refusal; return the pieces to try in place of the refused one."""
        name, once, error = part.destination, part.quality == AT_MOST_ONCE, refusal.error
        if refusal.stored is not None:
            stored = part.of(refusal.stored)
            set_aside.take(stored.rows)
            self._note(stored, stored.rows.num_rows, seconds)
            part = part.but(refusal.stored)
        match next_step(refusal, part.rows.num_rows, once=once):
            case Step.SPLIT:
                return part.halves()
            case Step.REJECT:
                self._reject(part, set_aside, error)
            case Step.DIVERT:
                return self._divert(part, refusal, set_aside)
            case Step.PARK:
                self._wait(part, set_aside, refusal)
            case Step.GIVE_UP:
                self._give_up(part, refusal, set_aside)
            case Step.END:
                if isinstance(error, Fenced) and not once:
                    # if the source knows a newer owner too, this raises Fenced; otherwise the
                    # destination is ahead
                    self.context.source(lambda s: lock_cursors(s, self.context.work.batch))
                    raise Ahead(f"destination {name!r}", error.shards)
                raise error
        return ()

    def _stops(self, part: Part, set_aside: SetAside) -> bool:
        """Whether to try no further piece of a part."""
        if part.destination in set_aside.down or part.destination in self.context.used_up:
            return True
        if self.context.told_to_stop():
            # the pieces wait in their lane: the next run delivers them before everything else
            self.context.lanes.hold(
                Lane(destination=part.destination), "the forwarder was told to stop"
            )
            return True
        return False

    def _reject(self, part: Part, set_aside: SetAside, error: SafError) -> None:
        """Make a dead letter of a part's only message, which its destination has rejected."""
        name, brake = part.destination, self.context.brake
        set_aside.bury(part.rows, name, "rejected", str(error))
        assert isinstance(error, Rejected)  # noqa: S101 - see `next_step`
        brake.rejected(name, error)
        if braked := brake.engaged(name):
            self._hold(part, set_aside, Refusal(error=braked))

    def _divert(self, part: Part, refusal: Refusal, set_aside: SetAside) -> Sequence[Part]:
        """Let refused messages wait for a route or a service; return the part of the others.

        The others include messages that the destination has stored before: it drops them, and
        answers with the marks that the source has to acknowledge.
        """
        refused = part.of(refusal.rows)
        if isinstance(refusal.error, UnknownService):
            self._wait_for_services(refused, refusal.error, set_aside)
        else:
            self._wait_for_route(refused.rows, set_aside, refusal.error)
        rest = part.but(refused.rows)
        return [rest] if rest.rows.num_rows else []

    def _wait_for_services(self, part: Part, error: UnknownService, set_aside: SetAside) -> None:
        """Let messages wait in lanes of their services, which the destination does not know.

        The lanes are those for messages that have found a route, unless the messages wait in the
        service's lane already or are in the order in which they were sent. Otherwise a message that
        was stored before the service was removed, or that is sent again, would meet another lane's
        watermark.
        """
        rows, held = part.rows, self.context.lanes
        by_service = service_lanes(rows)
        if part.main:
            here, lanes = pc.not_equal(rows["id"], rows["id"]), by_service  # none
        else:
            by_route = found_lanes(route_lanes(rows))
            here = pc.or_(same(rows, by_service), same(rows, by_route))
            lanes = either(here, rows, by_route)
        waiting = replace(part, rows=in_lanes(rows, lanes))
        for lane in waiting.lanes:
            why = error.of(lane.subject)
            if not part.main or lane not in held.held:
                set_aside.fail([lane], why)
            held.hold(lane, str(why))
        for mask, put in ((here, set_aside.wait), (pc.invert(here), set_aside.move)):
            rows = waiting.rows.filter(mask)
            if rows.num_rows:
                put(replace(waiting, rows=rows))

    def _wait_for_route(self, rows: pa.Table, set_aside: SetAside, error: SafError) -> None:
        """Let messages wait for a route, like messages that have none."""
        waiting = unroutable(rows)
        set_aside.fail(waiting.lanes, error)
        for lane in waiting.lanes:
            self.context.lanes.hold(lane, str(error))
        set_aside.move(waiting)

    def _wait(self, part: Part, set_aside: SetAside, refusal: Refusal) -> None:
        """Let a part wait for its destination, which refuses everything now."""
        name, error = part.destination, refusal.error
        self.context.receipts.of(name).down |= (
            obstacle(self.context.rules, name, part.quality) is None
        )
        set_aside.fail(part.lanes, error, moving=refusal.stored is not None)
        set_aside.down.add(name)
        if part.main or isinstance(error, Braked):
            self._hold(part, set_aside, refusal)
        elif isinstance(error, TO_REPAIR):
            self.context.to_repair = error
        set_aside.wait(part)

    def _hold(self, part: Part, set_aside: SetAside, refusal: Refusal) -> None:
        """Let unsent messages wait for their destination, which must not be tried immediately."""
        error, lane = refusal.error, Lane(destination=part.destination)
        if isinstance(error, TO_REPAIR):
            self.context.to_repair = error
        set_aside.fail([lane], error, moving=refusal.stored is not None)
        self.context.lanes.hold(lane, str(error))

    def _give_up(self, part: Part, refusal: Refusal, set_aside: SetAside) -> None:
        """Make dead letters of messages that may have left, and must not be sent again."""
        name = part.destination
        set_aside.bury(part.rows, name, "unavailable", str(refusal.error))
        if isinstance(refusal.error, REFUSES):
            self.context.receipts.of(name).down = True
            self._hold(part, set_aside, refusal)
            set_aside.down.add(name)

    def _leave_out(self, part: Part, chunk: Chunk, set_aside: SetAside) -> Part:
        """Return a part without the messages that a transform leaves out; count these."""
        if not self.context.transforming:
            return part
        left = part.but(chunk.rows).rows
        if not left.num_rows:
            return part
        new = set_aside.leave_out(left, part.destination)
        self.context.receipts.of(part.destination).left_out += new
        return part.of(chunk.rows)

    def _note(self, part: Part, messages: int, seconds: float) -> None:
        """Note that a part was given to its destination, where ``messages`` were new."""
        name, receipts = part.destination, self.context.receipts
        if messages:
            self.context.brake.stored(name)
        receipts.delivered(name, part.rows)
        receipts.stored(name, part.rows.num_rows, seconds)
        receipt = receipts.of(name)
        receipt.messages += messages
        receipt.early += self._early(part)
        if "parked_id" in part.rows.column_names:
            receipt.retried += messages

    def _early(self, part: Part) -> int:
        """Return how many messages came early, at a destination that cannot hold messages back."""
        times = part.rows["deliver_at"]
        holds = self.context.rules.destinations[part.destination].capabilities.holds
        if holds or times.null_count == len(times):
            return 0
        early = pc.sum(pc.greater(times, pa.scalar(datetime.now(UTC), times.type))).as_py()
        return int(early or 0)

    def unexpired(self, part: Part, set_aside: SetAside) -> Part:
        """Return a part of lanes without expired messages; bury those not stored before.

        A destination that cannot tell is down, and the whole part waits. After any other refusal,
        storing the part ends the task.
        """
        mask = set_aside.expired(part.rows)
        if mask is None:
            return part
        expired = part.rows.filter(mask)
        if part.quality != AT_MOST_ONCE:  # a message sent at most once has left its lane
            answer = self.context.destinations.not_stored(part, expired)
            if isinstance(answer, Refusal):
                if isinstance(answer.error, REFUSES):
                    self._wait(part, set_aside, answer)
                return part
            expired = answer
        set_aside.bury(expired, part.destination, "expired", EXPIRED)
        return part.but(expired)

    def _bury_unsuited(self, part: Part, set_aside: SetAside) -> Part:
        """Return a part without messages that its destination never takes; bury these.

        They are too large for it, or were split and it might store only some parts.
        """
        name, transforming = part.destination, self.context.transforming
        able = self.context.rules.destinations[name].capabilities
        if able.largest_body is None and (able.takes_parts or not transforming):
            return part
        sent, bad = transforming.outputs(part.rows), dict[str, pa.Table]()
        if able.largest_body is not None:
            large = pc.greater(pc.binary_length(sent["body"]), able.largest_body)
            bad[f"a body has more than {able.largest_body:,} bytes"] = sent.filter(large)
        if transforming and not able.takes_parts:
            bad["it takes no message that a transform has split"] = several_of(sent)
        for why, outputs in bad.items():
            rows = part.of(outputs).rows
            if rows.num_rows:
                error = Rejected(f"destination {name!r}", why)
                set_aside.bury(rows, name, "rejected", str(error))
                part = part.but(rows)
        return part

    def _without_dialogs(self, part: Part, set_aside: SetAside) -> Part:
        """Return a part without messages of dialogs; these wait for a route to where an end can
        live.

        Messages of a monolog stay: they are for a topic, and nobody answers.
        """
        name, work = part.destination, self.context.work
        if self.context.rules.destinations[name].capabilities.takes_dialogs:
            return part
        mask = pc.is_valid(part.rows["conversation_id"])
        if not pc.any(mask).as_py():
            return part
        topics = pa.array([*work.routes.topics], pa.string())
        mask = pc.and_not(mask, pc.is_in(part.rows["to_service"], topics))
        rows = part.rows.filter(mask)
        if rows.num_rows:
            services = sorted(pc.unique(rows["to_service"]).to_pylist())
            error = NoDialogs(f"destination {name!r}", services)
            self._wait_for_route(rows, set_aside, error)
        return replace(part, rows=part.rows.filter(pc.invert(mask)))

    def _chunk(self, part: Part) -> Chunk:
        """Return a part as its destination gets it."""
        work, behind = self.context.work, frozenset[str]()
        if part.main and part.quality != AT_MOST_ONCE:
            behind = self.context.lanes.services(part.destination)
        rows = self.context.transforming.outputs(part.rows)
        rows = vouched(rows, work.source, work.vouched_since)
        return Chunk(source=work.source, batch=work.batch, rows=rows, behind=behind)


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
