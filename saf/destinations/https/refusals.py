"""Refusals of a broker behind a URL: how it reports an error, and the error that is raised again.

    error            status   the forwarder raises
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

``rows`` are the numbers of the rows that were not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saf.destinations import Chunk
from saf.destinations.https.wire import Said, moment, of_mark, of_marks, to_mark, to_marks
from saf.destinations.marks import Lower
from saf.destinations.queues import unusable
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

ROW = "row"
"""Column in which the other end numbers the rows of a chunk."""

SILENT = {"reason": "its database does not answer"}
LOCKED = {
    "reason": "its database denies it access",
    "cure": "its operator finds the reason in its log",
}

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
        lambda error: {"services": error.services, "rows": error.rows[ROW].to_pylist()},
    ),
    (
        AnotherBroker,
        409,
        "another_broker",
        lambda error: {
            "broker": error.broker,
            "others": error.others,
            "rows": error.rows[ROW].to_pylist(),
        },
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


def told(error: SafError) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer for an error."""
    for kind, status, name, fields in TOLD:
        if isinstance(error, kind):
            return status, {"error": name, **fields(error)}
    raise AssertionError(error)  # the last line fits


def raised(what: str, said: Said, chunk: Chunk | None) -> SafError:
    """Return the error that a broker has reported, about a chunk or a question."""
    name = said["error"]
    if name in OF_CHUNKS:
        if chunk is None:
            raise ValueError("a question has neither shards nor messages")
        return OF_CHUNKS[name](what, said, chunk)
    reason = str(said["reason"])
    if name == "unavailable":
        return Unavailable(what, reason)
    return (Refused if name == "not_signed" else unusable)(what, reason, str(said["cure"]))


OF_CHUNKS: Mapping[str, Callable[[str, Said, Chunk], SafError]] = {
    "fenced": lambda what, answer, _: Fenced(what, _shards(answer)),
    "ahead": lambda what, answer, _: Ahead(what, _shards(answer), to_marks(answer["marks"])),
    "behind": lambda what, answer, _: Behind(
        what, _shards(answer), moment(answer["since"]), _to_lower(answer["lower"])
    ),
    "unknown_service": lambda what, answer, chunk: UnknownService(
        what, sorted(map(str, answer["services"])), _rows(answer, chunk)
    ),
    "another_broker": lambda what, answer, chunk: AnotherBroker(
        what, str(answer["broker"]), sorted(map(str, answer["others"])), _rows(answer, chunk)
    ),
    "rejected": lambda what, answer, _: Rejected(what, str(answer["reason"])),
    "too_large": lambda what, answer, _: Rejected(what, str(answer["reason"])),
}
"""Errors about a chunk, by the name in the answer."""


def _shards(answer: Said) -> list[int]:
    return [int(shard) for shard in answer["shards"]]


def _rows(answer: Said, chunk: Chunk) -> Any:
    return chunk.rows.take([int(row) for row in answer["rows"]])


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
