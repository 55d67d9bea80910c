"""Captures and their messages, as tests make and read them."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from saf.capture import backfill
from saf.capture.backfill import Wanted
from saf.capture.stored import Declaration, named, put, review
from saf.database import Dsn, fetch
from tests.pipeline import connect

SENT = "SELECT key, message_type, convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id"
Sent = list[tuple[str | None, str, Any, Any]]


def capture(connection: psycopg.Connection[Any], table: str = "orders", **given: Any) -> str:
    declared = Declaration(**{"table": table, "service": "billing", **given})
    return put(connection, review(connection, declared))


def sent(connection: psycopg.Connection[Any]) -> Sent:
    """Key, op, before and after of each message, in the order of their ids."""
    found: Sent = []
    for key, message_type, text in fetch(connection, SENT):
        body = json.loads(text)
        assert [*body] == ["op", "before", "after"]
        assert message_type.endswith(f".{body['op']}")
        found.append((key, body["op"], body["before"], body["after"]))
    return found


def ops(connection: psycopg.Connection[Any]) -> list[tuple[str | None, str]]:
    return [(key, op) for key, op, _, _ in sent(connection)]


def run_in_process(app: Dsn) -> None:
    """Run a backfill of orders to its end, in small chunks; for `tests.processes`."""
    with connect(app) as connection:
        backfill.run(connection, named(connection, "orders"), Wanted(chunk_rows=3))
