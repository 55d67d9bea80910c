"""What a sender runs, kept for each revision of the schema.

A revision keeps the senders of the revision before it working (docs/upgrading.md). So what they
run is in tests/migration/senders, a file for each revision, and tests run it at the next revision.
After a change of the statements, write the file of today's revision again:

    python -m tests.recorded_senders
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from saf import Message, Outbox
from saf.broker.grants import Kind, statements
from saf.columns import SENT
from saf.database import HAS_SCHEMA, REVISION, SCHEMA_REVISION
from saf.outbox import COPY, FORBIDDEN, INSERT, INSERT_MANY, _columns
from saf.transaction import WHO_AND_WHERE

FOLDER = Path(__file__).parent / "migration" / "senders"
ROLE = "a_sender"
"""Stands for the role's name in recorded statements."""
LATER = datetime(2199, 1, 1, tzinfo=UTC)

MESSAGES = (
    Message(service="billing", body={"total": 90}, key="A"),
    Message(service="billing", body=b"\x00\xff", key="A", from_service="shop"),
    Message(
        service="billing",
        body="text",
        key="A",
        headers={"trace": "1"},
        message_type="OrderPlaced",
        expires_at=LATER,
        from_service="shop",
    ),
)
"""The messages of each way to send: plain, bytes, and with all that a message can have here."""


def recorded(revision: str) -> dict[str, Any]:
    """Return what senders of a revision run."""
    found: dict[str, Any] = json.loads((FOLDER / f"{revision}.json").read_text())
    return found


def revisions() -> list[str]:
    """Return the revisions whose senders are recorded, from the oldest on."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def today() -> dict[str, Any]:
    """Return what the senders of this package run."""
    outbox = Outbox()
    rows = [
        outbox._row(message)._replace(message_id=UUID(int=number))
        for number, message in enumerate(MESSAGES, 1)
    ]
    return {
        "rights": [statement.as_string(None) for statement in statements(ROLE, [Kind.WRITER])],
        "first contact": [HAS_SCHEMA, WHO_AND_WHERE, SCHEMA_REVISION],
        "insert": {"statement": INSERT, "each": [_plain(row._asdict()) for row in rows]},
        "insert many": {"statement": INSERT_MANY, "once": _plain(_columns(rows))},
        "copy": {
            "allowed if false": FORBIDDEN,
            "statement": COPY,
            "rows": [_plain({name: getattr(row, name) for name in SENT}) for row in rows],
        },
    }


def send_as(record: dict[str, Any], connection: psycopg.Connection[Any]) -> int:
    """Send as the sender of a record does, from its first contact on; return how many messages."""
    for query in record["first contact"]:
        assert connection.execute(query).fetchall()
    sent = 0
    for params in record["insert"]["each"]:
        sent += connection.execute(record["insert"]["statement"], _values(params)).rowcount
    many = record["insert many"]
    sent += connection.execute(many["statement"], _values(many["once"])).rowcount
    copied = record["copy"]
    assert connection.execute(copied["allowed if false"]).fetchall() == [(False,)]
    with connection.cursor() as cursor, cursor.copy(copied["statement"]) as copy:
        for row in copied["rows"]:
            copy.write_row([*_values(row).values()])
    return sent + len(copied["rows"])


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _values(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as psycopg takes them."""
    return {name: _value(item) for name, item in params.items()}


def _value(item: Any) -> Any:
    if isinstance(item, list):
        return [*map(_value, item)]
    return bytes.fromhex(item["hex"]) if isinstance(item, dict) else item


def main() -> None:
    """Write the file of today's revision."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{REVISION}.json").write_text(json.dumps(today(), indent=1) + "\n")


if __name__ == "__main__":
    main()
