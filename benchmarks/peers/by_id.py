"""Marking for who marks messages by their ids."""

from __future__ import annotations

from collections.abc import Callable

import psycopg


def in_batches(
    connection: psycopg.Connection, ids: str, mark: str, batch: int
) -> Callable[[], None]:
    """What marks all whose ids a query finds, so many in a statement, each committed by itself."""
    found = [row[0] for row in connection.execute(ids.encode()).fetchall()]

    def work() -> None:
        for start in range(0, len(found), batch):
            connection.execute(mark.encode(), [found[start : start + batch]])

    return work
