"""Selections: which messages set aside operators list, count or decide about.

There are two kinds: `DeadLetters`, and single `ParkedMessages` (`saf.setaside.waiting` has their
lanes). Both are chosen, listed and counted in the same way, in the order of their numbers.
Operators' decisions about them are in `saf.operating.decide`.

Not every message can be decided about now (`WHY`). A process may be about to deliver or to handle
it, or the decision is impossible for it. Messages that a forwarder's open batch has set aside
beyond its position are in hand: while they are set aside, and only then, the batch knows not to
send them as well, or to set them aside again. A receiver that is a member, such as a dispatcher,
has each due key of its shards in hand: from that moment it may have the key's messages in memory.
Until `REST_SECONDS` before, it has not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import fetch
from saf.database.queries import Page, number_at, page_of
from saf.limits import HEADERS_READABLE
from saf.log import shards
from saf.setaside.dead import SHOWN
from saf.setaside.fingerprint import DEAD_GROUP, PARKED_GROUP
from saf.setaside.lane import BROKER, ORIGIN, SAME_LANE, WAITS_FOR, Kind, Lane

Row = TypeVar("Row")

WHY: Mapping[str, str] = MappingProxyType(
    {
        "in_hand": "a process has it in hand, or will within seconds: decide again in a moment",
        "batch": "the forwarder's open batch set it aside and has not passed it yet: decide again "
        "after its run",
        "doubt": "it may have arrived; the next run makes it a dead letter: decide then",
        "later": "it waits for its deliver_at, and blocks no other message",
        "ahead": "it waits for an earlier message of its dialog",
        "no_end": "the end of its dialog is not at this broker, and could not be notified",
        "dialog": "it belongs to a dialog, whose other end cannot move",
        "there": "it waits for that destination already",
        "arrived": "it has arrived at its receiver: only a forwarder's messages can be redirected",
        "stopped": "the decision was stopped: decide again",
        "expires": "it expires before that time, and nobody would get it",
        "signed": "it has no name, so its signature covers its time: it can only be cancelled",
    }
)
"""Why a message stays as it is, in words."""

# The newest version of each cursor, as in saf.log.shards
TAKEN = f"""
taken AS MATERIALIZED (
    SELECT c.subscription_id, c.shard, s.log, c.position, c.opened_at
    FROM saf.subscription s CROSS JOIN {shards.ALL_SHARDS} AS h (shard)
    CROSS JOIN LATERAL (
        SELECT * FROM saf.cursor
        WHERE (subscription_id, shard, batch) <= (s.subscription_id, h.shard, {shards.LAST})
        ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1) AS c
    WHERE c.subscription_id = s.subscription_id AND c.shard = h.shard
      AND CASE WHEN s.log = 'outbox' THEN c.open IS NOT NULL ELSE c.owner IS NOT NULL END)
"""
OF_BATCH = """EXISTS (
    SELECT FROM taken t
    WHERE (t.subscription_id, t.shard) = ({one}.subscription_id, {one}.shard)
      AND t.log = 'outbox' AND {one}.id > t.position AND {one}.{at} t.opened_at)"""
"""SQL: whether a forwarder's open batch, one of `TAKEN`, has set a row aside and is not past it.
``at`` is the column that shows this, and the comparison: `PARKED_BY`, `DEAD_SINCE`."""
PARKED_BY, DEAD_SINCE = "opened_at =", "dead_letter_at >="

REST_SECONDS = 5.0
"""Minimum seconds until a member's key is due, for an operator to decide about it."""

RESTING = f"""(NOT b.awaits_handler
 AND b.next_attempt_at > clock_timestamp() + make_interval(secs => {REST_SECONDS}))"""
"""SQL: whether no member takes messages out of the lane b for a while."""
RESTS = f"EXISTS (SELECT FROM saf.backoff b WHERE {SAME_LANE} AND {RESTING})"

# The names in braces are those of the kind; see `Selection.sql`
CHOSEN = """
FROM {table} JOIN saf.subscription s USING (subscription_id)
WHERE (%(numbers)s::bigint[] IS NULL OR {number} = ANY (%(numbers)s))
  AND (%(subscription)s::text IS NULL OR s.name = %(subscription)s)
  AND (%(destination)s::text IS NULL OR destination = %(destination)s)
  AND (%(service)s::text IS NULL OR to_service = %(service)s)
  AND (%(key)s::text IS NULL OR key = %(key)s)
  AND (%(key_contains)s::text IS NULL OR strpos(lower(key), lower(%(key_contains)s)) > 0)
  AND (%(before)s::timestamptz IS NULL OR {since} < %(before)s)
  AND (%(after)s::bigint IS NULL
       OR CASE WHEN %(newest_first)s THEN {number} < %(after)s ELSE {number} > %(after)s END)
  AND (%(beyond)s::bigint IS NULL OR {number} > %(beyond)s)
  AND (%(through)s::bigint IS NULL OR {number} <= %(through)s)
  {criteria}
"""
LIST = f"""
WITH {TAKEN}
SELECT {{number}}, s.name AS subscription, destination, {{since}}, message_id,
       left(to_service, {SHOWN}) AS service, left(key, {SHOWN}) AS key,
       left(message_type, {SHOWN}) AS message_type, octet_length(body) AS bytes,
       {{columns}}, {{stays}} AS stays
{{chosen}} ORDER BY {{number}} $order LIMIT %(limit)s
"""
COUNT = f"""
WITH {TAKEN}
SELECT stays, count(*) FILTER (WHERE place < %(limit)s),
       max(number) FILTER (WHERE place < %(limit)s), bool_or(place = %(limit)s)
FROM (SELECT {{number}} AS number, {{stays}} AS stays,
             row_number() OVER (ORDER BY {{number}}) AS place
      {{chosen}} ORDER BY {{number}} LIMIT %(limit)s) AS found
GROUP BY 1 ORDER BY 1
"""
LAST = "SELECT coalesce(max({number}), 0) FROM {table}"
EVERY = "SELECT count(*) FROM (SELECT FROM {table} LIMIT %(most)s) AS counted"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Number of messages set aside that a filter matches."""

    messages: int
    """Messages that an operator may decide about."""
    through: int | None
    """The greatest of their numbers; None if there are none."""
    stays: Mapping[str, int]
    """Further matches, which stay whatever is decided, by reason: the keys of `WHY`."""
    more: bool
    """Whether there are more, which were not counted."""

    @property
    def staying(self) -> int:
        """Number of messages that stay."""
        return sum(self.stays.values())

    @classmethod
    def of(cls, rows: Iterable[tuple[str | None, int, int | None, bool]]) -> Self:
        """Return the result of counting up to a limit.

        ``rows`` contain the reason, or None; the count and the greatest number up to the limit; and
        whether the message beyond the limit is one of them.

        >>> Counted.of([(None, 2, 7, False), ("later", 1, 6, False), ("batch", 0, None, True)])
        Counted(messages=2, through=7, stays={'later': 1}, more=True)
        """
        found = {why: (count, through, more) for why, count, through, more in rows}
        messages, through, _ = found.get(None, (0, None, False))
        return cls(
            messages=messages,
            through=through,
            stays={why: count for why, (count, *_) in found.items() if why is not None and count},
            more=any(more for *_, more in found.values()),
        )


@dataclass(frozen=True, kw_only=True)
class Selection(Generic[Row]):
    """Which messages of a kind to choose; None means any."""

    numbers: Sequence[int] | None = None
    subscription: str | None = None
    destination: str | None = None
    service: str | None = None
    key: str | None = None
    key_contains: str | None = None
    """A part of the key, case-insensitive."""
    group: str | None = None
    """The id of a failure group; see `saf.setaside.fingerprint`."""
    before: datetime | None = None
    after: int | None = None
    """Only those with greater numbers, or with lower ones if ``newest_first``: the next page."""
    newest_first: bool = False
    """List in the opposite order."""
    beyond: int | None = None
    """Only those with greater numbers, in either order."""
    through: int | None = None
    """Only those up to this number, without messages set aside later."""

    WORD: ClassVar[str]
    COMMAND: ClassVar[str]
    """The command with the lists and decisions."""
    LISTED_BY: ClassVar[str]
    """Its subcommand that lists messages by number."""
    DECISIONS: ClassVar[Sequence[str]]
    """The possible actions of a `saf.operating.decide.Decision`."""
    ROW: ClassVar[type[Any]]
    TABLE: ClassVar[str]
    CHOSEN: ClassVar[str] = CHOSEN
    LIST: ClassVar[str] = LIST
    NUMBER: ClassVar[str]
    """The column with the number of a message, which rises in the order of setting aside."""
    SINCE: ClassVar[str]
    COLUMNS: ClassVar[str]
    """SQL: the columns of a row that only this kind has."""
    CRITERIA: ClassVar[str]
    """SQL: the conditions that only this kind has."""
    STAYS: ClassVar[str]
    """SQL: why an operator may not decide about a message of the subscription s now, one of
    `WHY`; or NULL. ``to`` is the destination of a redirection, or NULL."""

    @classmethod
    def sql(cls, statement: str) -> str:
        """Return a statement with the names of the kind in place of those in braces."""
        names = {"table": cls.TABLE, "number": cls.NUMBER, "since": cls.SINCE}
        chosen = cls.CHOSEN.format(criteria=cls.CRITERIA, **names)
        return statement.format(chosen=chosen, columns=cls.COLUMNS, stays=cls.STAYS, **names)

    def params(self, limit: int | None, to: str | None) -> dict[str, Any]:
        """Return the parameters of a statement about up to ``limit`` of the chosen messages."""
        return asdict(self) | {"limit": limit, "to": to}

    def rows(
        self, connection: psycopg.Connection[Any], limit: int | None = 100, *, to: str | None = None
    ) -> list[Row]:
        """Return the chosen messages, in the order of their numbers; see also ``newest_first``.

        ``stays`` is set for a redirection ``to`` a destination, or for other decisions.
        """
        with psycopg.Cursor(connection, row_factory=class_row(self.ROW)) as cursor:
            statement = self.sql(self.LIST).replace(
                "$order", "DESC" if self.newest_first else "ASC"
            )
            return cursor.execute(statement, self.params(limit, to)).fetchall()

    def page(
        self, connection: psycopg.Connection[Any], limit: int | None, *, to: str | None = None
    ) -> Page[Row]:
        """Return a page of `rows`; it begins after ``after``."""
        return page_of(
            lambda most: self.rows(connection, most, to=to),
            limit,
            lambda row: str(getattr(row, self.NUMBER)),
        )

    def count(
        self, connection: psycopg.Connection[Any], most: int, *, to: str | None = None
    ) -> Counted:
        """Count the chosen messages, up to ``most``, in the order of their numbers."""
        return Counted.of(fetch(connection, self.sql(COUNT), self.params(most + 1, to)))

    @classmethod
    def every(cls, connection: psycopg.Connection[Any], most: int) -> int:
        """Count all messages of the kind, up to ``most``."""
        return int(fetch(connection, cls.sql(EVERY), {"most": most})[0][0])

    def until_now(self, connection: psycopg.Connection[Any]) -> Self:
        """Return the selection without messages that are set aside from now on."""
        if self.through is not None:
            return self
        return replace(self, through=fetch(connection, self.sql(LAST))[0][0])

    def going_on(self, place: str | None) -> Self:
        """Return the selection for the page that begins at ``place``.

        Raises:
            UsageError: no page of these messages ends there.
        """
        return replace(self, after=number_at(place, f"{self.WORD}s"))


class SetAside:
    """A row of a selection: one message, without its body."""

    key: str | None
    message_id: UUID

    @property
    def called(self) -> str:
        """Its key, or else its id."""
        return self.key or str(self.message_id)

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON, without values that are NULL."""
        plain: dict[str, Any] = asdict(self)  # type: ignore[call-overload] # a kind is a dataclass
        return {
            name: value.isoformat() if isinstance(value, datetime)
            else str(value) if isinstance(value, UUID) else value
            for name, value in plain.items()
            if value is not None
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeadLetter(SetAside):
    """One dead letter, without its body."""

    dead_letter_id: int
    subscription: str
    destination: str
    reason: str
    error: str
    dead_letter_at: datetime
    message_id: UUID
    service: str
    key: str | None
    message_type: str | None
    headers: str | None
    """The headers as JSON text; None also if they are too large to be read."""
    bytes: int
    created_at: datetime
    expires_at: datetime | None
    stays: str | None
    """Why nobody may decide about it now, one of `WHY`; None: operators
    may."""

    def as_dict(self) -> dict[str, Any]:
        """Return the dead letter as a dict for JSON."""
        plain = super().as_dict()
        if self.headers is not None:
            # as text if Python cannot decode them
            with suppress(ValueError, RecursionError):
                plain["headers"] = json.loads(self.headers)
        return plain


@dataclass(frozen=True, kw_only=True)
class ParkedMessage(SetAside):
    """One parked message, without its body."""

    parked_id: int
    subscription: str
    destination: str
    kind: str
    subject: str
    broker: UUID | None
    parked_at: datetime
    message_id: UUID
    service: str
    key: str | None
    message_type: str | None
    bytes: int
    created_at: datetime
    stays: str | None
    """As in `DeadLetter`."""
    error: str | None
    """What its lane waits for."""
    awaits_handler: bool
    """Whether its lane waits for a handler of another type."""

    @property
    def words(self) -> str:
        """What it waits for, in words."""
        return self.lane.of_reader(self.subscription, awaits_handler=self.awaits_handler)

    @property
    def lane(self) -> Lane:
        """The lane that it is in."""
        return Lane(
            destination=self.destination,
            kind=Kind(self.kind),
            subject=self.subject,
            broker=self.broker,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON."""
        plain = super().as_dict() | {"free": self.stays is None, "waits_for": self.lane.waits_for}
        broker = plain.pop("broker", None)
        # must not be mistaken for the broker that it is parked at
        return plain if broker is None else {**plain, "to_broker": broker}


@dataclass(frozen=True, kw_only=True)
class DeadLetters(Selection[DeadLetter]):
    """Which dead letters to choose; None means any."""

    reason: str | None = None
    error: str | None = None
    """A part of the error's text, case-insensitive."""

    WORD, COMMAND, LISTED_BY = "dead letter", "saf dead", "list"
    DECISIONS = ("retry", "redirect", "discard")
    ROW = DeadLetter
    TABLE = "saf.dead_letter d"
    NUMBER, SINCE = "dead_letter_id", "dead_letter_at"
    COLUMNS = f"""reason, error, d.created_at, expires_at,
       CASE WHEN {HEADERS_READABLE} THEN headers::text END AS headers"""
    CRITERIA = f"""
  AND (%(reason)s::text IS NULL OR reason = %(reason)s)
  AND (%(error)s::text IS NULL OR strpos(lower(error), lower(%(error)s)) > 0)
  AND {DEAD_GROUP}"""
    # If one of an open batch were deleted, the batch would set it aside again, or deliver it
    STAYS = f"""
CASE WHEN s.log = 'inbox' AND %(to)s::text IS NOT NULL THEN 'arrived'
     WHEN %(to)s::text IS NOT NULL AND d.conversation_id IS NOT NULL THEN 'dialog'
     WHEN {OF_BATCH.format(one="d", at=DEAD_SINCE)} THEN 'batch' END"""


@dataclass(frozen=True, kw_only=True)
class ParkedMessages(Selection[ParkedMessage]):
    """Which parked messages to choose; None means any."""

    waits_for: str | None = None
    """What they wait for; see `saf.setaside.lane.WaitsFor`."""
    origin: str | None = None
    """Where they come from; see `saf.setaside.lane.Origin`."""
    subject: str | None = None
    subject_contains: str | None = None
    """A part of the subject, case-insensitive."""

    WORD, COMMAND, LISTED_BY = "parked message", "saf parked", "messages"
    DECISIONS = ("redirect", "discard")
    ROW = ParkedMessage
    TABLE = "saf.parked p"
    NUMBER, SINCE = "parked_id", "parked_at"
    COLUMNS = f"""kind, subject, {BROKER}, p.created_at,
       (SELECT b.error FROM saf.backoff b WHERE {SAME_LANE}) AS error,
       coalesce((SELECT b.awaits_handler FROM saf.backoff b WHERE {SAME_LANE}), false)
           AS awaits_handler"""
    CRITERIA = f"""
  AND (%(waits_for)s::text IS NULL OR {WAITS_FOR} = %(waits_for)s)
  AND (%(origin)s::text IS NULL OR {ORIGIN} = %(origin)s)
  AND (%(subject)s::text IS NULL OR subject = %(subject)s)
  AND (%(subject_contains)s::text IS NULL
       OR strpos(lower(subject), lower(%(subject_contains)s)) > 0)
  AND {PARKED_GROUP}"""
    STAYS = f"""
CASE WHEN s.log = 'inbox' AND %(to)s::text IS NOT NULL THEN 'arrived'
     WHEN p.kind = '{Kind.DOUBT}' THEN 'doubt'
     WHEN p.kind = '{Kind.LATER}' THEN 'later'
     WHEN p.kind = '{Kind.AHEAD}' THEN 'ahead'
     WHEN s.log = 'inbox' AND p.from_initiator IS NOT NULL AND NOT EXISTS (
         SELECT FROM saf.conversation d
         WHERE d.conversation_id = p.conversation_id AND d.is_initiator = NOT p.from_initiator)
     THEN 'no_end'
     WHEN %(to)s::text IS NOT NULL AND p.conversation_id IS NOT NULL THEN 'dialog'
     WHEN p.destination = %(to)s::text THEN 'there'
     WHEN {OF_BATCH.format(one="p", at=PARKED_BY)} THEN 'batch'
     WHEN EXISTS (
         SELECT FROM taken t
         WHERE (t.subscription_id, t.shard) = (p.subscription_id, p.shard)
           AND t.log = 'inbox' AND NOT {RESTS})
     THEN 'in_hand' END"""


def staying_in_words(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return how many messages stay, by reason in words; ``counts`` are by the keys of `WHY`.

    >>> staying_in_words([{"later": 2}, {"later": 2}])
    {'it waits for its deliver_at, and blocks no other message': 4}
    """
    found: Counter[str] = Counter()
    for count in counts:
        for why, number in count.items():
            found[WHY[why]] += number
    return dict(found)
