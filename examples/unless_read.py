"""A mail about what was not read: it is sent in ten minutes, unless somebody reads first.

    export SHOP_DSN=postgresql://localhost/shop          # `saf migrate --dsn "$SHOP_DSN"` was run
    python unless_read.py write 42 "Your parcel is on its way"
    python unless_read.py read 42

The mail is cancelled in the transaction that reads. If that transaction finds the mail sent, it
says so.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta

import psycopg

import saf

outbox = saf.Outbox()

TABLE = """
CREATE TABLE IF NOT EXISTS note (
    number text PRIMARY KEY, text text NOT NULL, read_at timestamptz)
"""
INSERT = "INSERT INTO note (number, text) VALUES (%s, %s)"
READ = "UPDATE note SET read_at = now() WHERE number = %s AND read_at IS NULL RETURNING text"


def write(connection: psycopg.Connection, number: str, text: str) -> None:
    """Write a note, and hold the mail about it."""
    connection.execute(TABLE)
    connection.execute(INSERT, [number, text])
    soon = datetime.now(UTC) + timedelta(minutes=10)
    outbox.send(connection, "mail", {"note": number}, name=f"note-{number}", deliver_at=soon)


def read(connection: psycopg.Connection, number: str) -> None:
    """Show a note, and take the mail about it back."""
    found = connection.execute(READ, [number]).fetchone()
    if found is None:
        print("there is no such note, or it was read before")
        return
    unsent = outbox.cancel(connection, "mail", f"note-{number}")
    print(found[0], "(no mail is sent)" if unsent else "(the mail was sent before)")


if __name__ == "__main__":
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:  # one transaction
        match sys.argv[1:]:
            case "write", number, text:
                write(connection, number, text)
            case "read", number:
                read(connection, number)
