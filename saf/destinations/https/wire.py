"""The protocol between a forwarder and a broker behind a URL, version 1.

A forwarder POSTs, and signs each body as defined by Standard Webhooks:

    a question    JSON: ``{"version": 1, "ask": "identity"}``, ``"known"`` with a ``source``, or
                  ``"guarantee"``
    a chunk       messages as a stream of Arrow IPC (`saf.destinations.https.chunks`), to store
                  them, or to ask for the marks of their lanes and shards

The broker answers with one JSON object, which contains the ``version``, and the broker's
``identity`` where it is known. With status 200 it contains the result; otherwise the ``error``, see
`saf.destinations.https.refusals`. An answer without a version is not a broker's: no answer of a
proxy counts as stored.

A mark is ``[batch, position, opened_at, acknowledged]``, followed by ``set_aside_at`` if it has
one. Marks are a list of ``[lane, shard, mark]``. A moment is text in ISO 8601, with its zone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from saf.destinations.marks import Known, Mark, Place

VERSION = 1
JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
"""Content types of questions, and of chunks."""
IDENTITY, KNOWN, GUARANTEE = "identity", "known", "guarantee"
"""Questions."""

UNLIKE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors that reading a value of the wrong type raises."""

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
