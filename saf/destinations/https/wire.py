"""The protocol between a forwarder and a broker behind a URL, version 1.

A forwarder POSTs, and signs each body as defined by Standard Webhooks:

    a question    JSON: ``{"version": 1, "ask": "identity"}``, ``"known"`` with a ``source``, or
                  ``"guarantee"``
    a chunk       messages as a stream of Arrow IPC (`saf.destinations.https.chunks`), to store
                  them, or to ask for the marks of their lanes and shards

The broker answers with one JSON object, which contains the ``version``, and the broker's
``identity`` where it is known. With status 200, the object contains the result. With any other
status, it contains the ``error``, and the forwarder has that error again:

    error            status   the forwarder's error
    fenced           409      Fenced
    ahead, behind    409      Ahead, Behind
    unknown_service  409      UnknownService
    another_broker   409      AnotherBroker
    rejected         422      Rejected
    too_large        413      Rejected: a part of the chunk may be small enough
    unavailable      503      Unavailable
    not_signed       401      Refused: the secrets or the clocks differ
    not_allowed      403      Refused: the broker does not accept this source
    unusable         400      Refused: an operator must fix something at one of the two ends
    version          400      Refused: the ends speak different versions

``rows`` are the numbers of the rows that are refused; none was stored.

A mark is ``[batch, position, opened_at, acknowledged]``, followed by ``set_aside_at`` if it has
one. Marks are a list of ``[lane, shard, mark]``. A moment is text in ISO 8601, with its zone.

An answer without a version is not a broker's: no answer of a proxy counts as stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from saf.destinations import Chunk, Refusal
from saf.destinations.marks import Known, Lower, Mark, Place
from saf.destinations.settings import unusable
from saf.errors import (
    Ahead,
    AnotherBroker,
    Behind,
    Fenced,
    Refused,
    Rejected,
    SafError,
    SchemaError,
    Unavailable,
    UnknownService,
)

VERSION = 1
JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
"""Content types of questions, and of chunks."""
IDENTITY, KNOWN, GUARANTEE = "identity", "known", "guarantee"
"""Questions."""
ROW = "row"
"""Column in which the other end numbers the rows of a chunk."""
UNLIKE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors that reading a value of the wrong type raises."""
SILENT = {"reason": "its database does not answer"}
LOCKED = {
    "reason": "its database denies it access",
    "cure": "its operator finds the reason in its log",
}
"""Members of answers that hide the details of the broker's database."""
Said = Mapping[str, Any]
"""A parsed message of one side."""


class NotUnderstood(ValueError):
    """The other side has sent something outside this protocol; the text gives the reason."""


class OtherVersion(NotUnderstood):
    """The other side speaks another version of the protocol."""

    def __init__(self, version: object) -> None:
        super().__init__(f"version {version!r} of the protocol, and here it is version {VERSION}")
        self.version = version


def written(**fields: Any) -> bytes:
    """Return a message of one side.

    >>> written(ask=IDENTITY)
    b'{"version": 1, "ask": "identity"}'
    """
    return json.dumps({"version": VERSION, **fields}).encode()


def read(body: bytes | bytearray) -> Said:
    """Parse a message of the other side.

    >>> read(written(ask=IDENTITY))["ask"]
    'identity'

    Raises:
        NotUnderstood: the message is not a JSON object with a version.
        OtherVersion: the message has another version.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise NotUnderstood("not JSON") from None
    if not isinstance(message, dict) or "version" not in message:
        raise NotUnderstood("not a JSON object with a version")
    if message["version"] != VERSION:
        raise OtherVersion(message["version"])
    return message


def moment(text: str | None) -> datetime | None:
    """Parse a moment.

    Raises:
        ValueError: the text has no zone, or is not a moment.
    """
    if text is None:
        return None
    result = datetime.fromisoformat(text)
    if result.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return result


def of_mark(mark: Mark) -> list[Any]:
    """Return a mark for a message.

    >>> of_mark(Mark(batch=5, position=90))
    [5, 90, None, False]
    """
    opened_at = mark.opened_at.isoformat() if mark.opened_at else None
    aside = [mark.set_aside_at.isoformat()] if mark.set_aside_at else []
    return [mark.batch, mark.position, opened_at, mark.acknowledged, *aside]


def to_mark(said: Any) -> Mark:
    """Return the mark from a message."""
    batch, position, opened_at, acknowledged, *aside = said
    moments = [moment(text) for text in aside]
    return Mark.of(int(batch), int(position), moment(opened_at), bool(acknowledged), *moments)


def of_marks(marks: Mapping[Place, Mark]) -> list[Any]:
    """Return marks for a message."""
    return [[lane, shard, of_mark(mark)] for (lane, shard), mark in marks.items()]


def to_marks(said: Iterable[Any]) -> dict[Place, Mark]:
    """Return the marks from a message.

    >>> marks = {("retry", 7): Mark(batch=5, position=90)}
    >>> to_marks(of_marks(marks)) == marks
    True
    """
    return {(str(lane), int(shard)): to_mark(mark) for lane, shard, mark in said}


def of_known(known: Known) -> dict[str, Any]:
    """Return a broker's marks and epochs of a source for a message."""
    return {"marks": of_marks(known.marks), "epochs": [*known.epochs.items()]}


def to_known(said: Said) -> Known:
    """Return a broker's marks and epochs of a source from a message."""
    return Known(
        destination=UUID(said["identity"]),
        marks=to_marks(said["marks"]),
        epochs={int(shard): int(epoch) for shard, epoch in said["epochs"]},
    )


TOLD: Sequence[tuple[type[SafError], int, str, Callable[[Any], dict[str, Any]]]] = [
    (Fenced, 409, "fenced", lambda error: {"shards": [*error.shards]}),
    (Ahead, 409, "ahead", lambda e: {"shards": [*e.shards], "marks": of_marks(e.marks)}),
    (
        Behind,
        409,
        "behind",
        lambda error: {
            "shards": [*error.shards],
            "since": error.since and error.since.isoformat(),
            "lower": _of_lower(error.lower),
        },
    ),
    (
        UnknownService,
        409,
        "unknown_service",
        lambda error: {"services": [*error.services]},
    ),
    (
        AnotherBroker,
        409,
        "another_broker",
        lambda error: {"broker": error.broker, "others": [*error.others]},
    ),
    (Rejected, 422, "rejected", lambda error: {"reason": error.reason}),
    (
        SchemaError,
        400,
        "unusable",
        lambda error: {"reason": str(error), "cure": "its operator can fix this"},
    ),
    (Refused, 400, "unusable", lambda _: LOCKED),
    (SafError, 503, "unavailable", lambda _: SILENT),
]
"""Status, name and members of the answer for each error; the first line that fits counts."""


def told(refusal: Refusal) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer for a refusal."""
    rows = {} if refusal.rows is None else {"rows": refusal.rows[ROW].to_pylist()}
    for kind, status, name, fields in TOLD:
        if isinstance(refusal.error, kind):
            return status, {"error": name, **fields(refusal.error), **rows}
    raise AssertionError(refusal)  # the last line fits


OF_CHUNKS: Mapping[str, Callable[[str, Said], SafError]] = {
    "fenced": lambda what, answer: Fenced(what, _shards(answer)),
    "ahead": lambda what, answer: Ahead(what, _shards(answer), to_marks(answer["marks"])),
    "behind": lambda what, answer: Behind(
        what, _shards(answer), moment(answer["since"]), _to_lower(answer["lower"])
    ),
    "rejected": lambda what, answer: Rejected(what, str(answer["reason"])),
    "too_large": lambda what, answer: Rejected(what, str(answer["reason"])),
}
"""Errors about a whole chunk, by the name in the answer."""

OF_ROWS = ("unknown_service", "another_broker")


def refused(what: str, said: Said, chunk: Chunk | None) -> Refusal:
    """Return the refusal that a broker has reported, about a chunk or a question."""
    name = said["error"]
    if name in OF_CHUNKS or name in OF_ROWS:
        if chunk is None:
            raise ValueError("a question has neither shards nor messages")
        if name in OF_ROWS:
            return _of_rows(what, said, chunk)
        return Refusal(error=OF_CHUNKS[name](what, said))
    reason = str(said["reason"])
    if name == "unavailable":
        return Refusal(error=Unavailable(what, reason))
    kind = Refused if name == "not_signed" else unusable
    return Refusal(error=kind(what, reason, str(said["cure"])))


def _of_rows(what: str, said: Said, chunk: Chunk) -> Refusal:
    from saf.destinations import places  # needs Arrow, which a driver may lack

    numbers = [int(row) for row in said["rows"]]
    rows = chunk.rows.take(numbers) if numbers else chunk.rows.slice(0, 0)
    if said["error"] == "unknown_service":
        refusal = places.of_services(what, sorted(map(str, said["services"])), rows)
    else:
        others = sorted(map(str, said["others"]))
        refusal = places.of_brokers(what, str(said["broker"]), others, rows)
    if refusal.rows is None or not refusal.rows.num_rows:
        raise ValueError("it refuses no message of the chunk")
    return refusal


def _shards(answer: Said) -> list[int]:
    return [int(shard) for shard in answer["shards"]]


def _of_lower(lower: object) -> list[Any] | None:
    if not isinstance(lower, Lower):
        return None
    return [lower.lane, lower.shard, of_mark(lower.acknowledged), of_mark(lower.found)]


def _to_lower(values: Any) -> Lower | None:
    if values is None:
        return None
    lane, shard, acknowledged, mark = values
    return Lower(
        lane=str(lane), shard=int(shard), acknowledged=to_mark(acknowledged), found=to_mark(mark)
    )
