"""What a forwarder and a broker behind a URL say to each other, in version 1 of this protocol.

A forwarder POSTs, and signs each body as Standard Webhooks has it:

    a question    JSON: ``{"version": 1, "ask": "identity"}``, ``"known"`` with a ``source``, or
                  ``"guarantee"``
    a chunk       messages as a stream of Arrow IPC (`saf.destinations.https.chunks`), to store
                  them, or to ask for the marks of their lanes and shards

The broker answers with one JSON object, which has the ``version``, and the broker's ``identity``
where it is known. With status 200 it has what was asked for; otherwise it has the ``error``, see
`saf.destinations.https.refusals`. Whatever has no version is not a broker's answer: nothing that a
proxy says is taken for stored.

A mark is ``[batch, position, opened_at, acknowledged]``, with ``set_aside_at`` behind it if it has
that, and marks are a list of ``[lane, shard, mark]``. A moment is text, as ISO 8601 has it, with
its zone.
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
"""The content types of questions, and of chunks."""
IDENTITY, KNOWN, GUARANTEE = "identity", "known", "guarantee"
"""Questions."""

UNLIKE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What a value of another kind than it should be makes whoever looks at it raise."""

Said = Mapping[str, Any]
"""What one side has said."""


class NotUnderstood(ValueError):
    """The other side has said what is none of this; the text says why."""


class OtherVersion(NotUnderstood):
    """The other side speaks another version of the protocol."""

    def __init__(self, version: object) -> None:
        super().__init__(f"version {version!r} of the protocol, and here it is version {VERSION}")
        self.version = version


def written(**said: Any) -> bytes:
    """Return what one side says.

    >>> written(ask=IDENTITY)
    b'{"version": 1, "ask": "identity"}'
    """
    return json.dumps({"version": VERSION, **said}).encode()


def read(body: bytes | bytearray) -> Said:
    """Return what the other side has said.

    >>> read(written(ask=IDENTITY))["ask"]
    'identity'

    Raises:
        NotUnderstood: it is no JSON object with a version.
        OtherVersion: it has another version.
    """
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise NotUnderstood("not JSON") from None
    if not isinstance(said, dict) or "version" not in said:
        raise NotUnderstood("not a JSON object with a version")
    if said["version"] != VERSION:
        raise OtherVersion(said["version"])
    return said


def moment(text: str | None) -> datetime | None:
    """Return the moment that a text says.

    Raises:
        ValueError: it has no zone, or is no moment.
    """
    if text is None:
        return None
    said = datetime.fromisoformat(text)
    if said.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return said


def of_mark(mark: Mark) -> list[Any]:
    """Return a mark as it is said.

    >>> of_mark(Mark(batch=5, position=90))
    [5, 90, None, False]
    """
    opened_at = mark.opened_at.isoformat() if mark.opened_at else None
    aside = [mark.set_aside_at.isoformat()] if mark.set_aside_at else []
    return [mark.batch, mark.position, opened_at, mark.acknowledged, *aside]


def to_mark(said: Any) -> Mark:
    """Return the mark that was said."""
    batch, position, opened_at, acknowledged, *aside = said
    moments = [moment(one) for one in aside]
    return Mark.of(int(batch), int(position), moment(opened_at), bool(acknowledged), *moments)


def of_marks(marks: Mapping[Place, Mark]) -> list[Any]:
    """Return marks as they are said."""
    return [[lane, shard, of_mark(mark)] for (lane, shard), mark in marks.items()]


def to_marks(said: Iterable[Any]) -> dict[Place, Mark]:
    """Return the marks that were said.

    >>> marks = {("retry", 7): Mark(batch=5, position=90)}
    >>> to_marks(of_marks(marks)) == marks
    True
    """
    return {(str(lane), int(shard)): to_mark(mark) for lane, shard, mark in said}


def of_known(known: Known) -> dict[str, Any]:
    """Return what a broker knows of a source, as it is said."""
    return {"marks": of_marks(known.marks), "epochs": [*known.epochs.items()]}


def to_known(said: Said) -> Known:
    """Return what a broker has said that it knows of a source."""
    return Known(
        destination=UUID(said["identity"]),
        marks=to_marks(said["marks"]),
        epochs={int(shard): int(epoch) for shard, epoch in said["epochs"]},
    )
