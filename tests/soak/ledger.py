"""The ledger: how far each key has been sent, and how far it has been heard, in a row for each key.

A sender counts a key up in the transaction that sends the count; whoever hears it compares it with
the count before in the transaction that hears it. So what is lost, doubled or out of order is known
at once, over any number of messages, and nothing grows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.database import Dsn

TABLES = """
CREATE SCHEMA IF NOT EXISTS soak;
CREATE TABLE IF NOT EXISTS soak.sent (
    service text, key text, n bigint NOT NULL, PRIMARY KEY (service, key)) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS soak.heard (LIKE soak.sent INCLUDING ALL) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS soak.fault (
    at timestamptz DEFAULT now(), service text, key text, expected bigint, found bigint);
CREATE UNLOGGED TABLE IF NOT EXISTS soak.waited (service text, seconds float8);
CREATE TABLE IF NOT EXISTS soak.talk (handle uuid PRIMARY KEY, conversation text, n bigint);
CREATE TABLE IF NOT EXISTS soak.read (stream text PRIMARY KEY, last text NOT NULL);
"""
KNOWN = "SELECT key, n FROM soak.heard WHERE service = %s AND key = ANY (%s)"
HEARD = """
INSERT INTO soak.heard SELECT %s, * FROM unnest(%s::text[], %s::bigint[])
ON CONFLICT (service, key) DO UPDATE SET n = excluded.n
"""
FAULT = "INSERT INTO soak.fault (service, key, expected, found) VALUES (%s, %s, %s, %s)"
WAITED = "INSERT INTO soak.waited SELECT %s, unnest(%s::float8[])"
TIMED = 0.1
"""The share of messages that are timed."""
COUNTS = "SELECT service, key, n FROM soak.{}"
FAULTS = "SELECT service, key, expected, found FROM soak.fault ORDER BY at LIMIT 100"


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message, as its sender has counted it."""

    key: str
    n: int
    at: float
    """When it was sent, in seconds since 1970."""

    @property
    def body(self) -> str:
        """The message's body, of some 200 bytes."""
        return json.dumps({"key": self.key, "n": self.n, "at": self.at, "more": "x" * 130})

    @classmethod
    def of(cls, body: str | bytes) -> Said:
        """What a body says."""
        said = json.loads(body)
        return cls(key=said["key"], n=said["n"], at=said["at"])


Fault = tuple[str, int, int]
"""A key, the number that was expected, and the one that came."""


def follow(
    known: Mapping[str, int], said: Iterable[Said], *, once: bool = True
) -> tuple[dict[str, int], list[Fault]]:
    """How far each key is after some messages, and what was wrong with them.

    >>> def say(*numbers): return [Said(key="a", n=n, at=0) for n in numbers]
    >>> follow({"a": 1}, say(2, 3))
    ({'a': 3}, [])
    >>> follow({}, say(1, 1, 3))
    ({'a': 3}, [('a', 2, 1), ('a', 2, 3)])
    >>> follow({}, say(1, 1, 2), once=False)
    ({'a': 2}, [])
    """
    after, faults = dict(known), []
    for one in said:
        expected = after.get(one.key, 0) + 1
        if one.n > expected or (one.n < expected and once):
            faults.append((one.key, expected, one.n))
        after[one.key] = max(one.n, expected - 1)
    return after, faults


def hear(
    connection: psycopg.Connection[Any], service: str, said: Sequence[Said], *, once: bool = True
) -> None:
    """Note messages of a service in the transaction that receives them."""
    keys = sorted({one.key for one in said})
    known = dict(connection.execute(KNOWN, [service, keys]).fetchall())
    after, faults = follow(known, said, once=once)
    connection.execute(HEARD, [service, keys, [after[key] for key in keys]])
    for fault in faults:
        connection.execute(FAULT, [service, *fault])
    now = time.time()
    if waits := [now - one.at for one in said if random.random() < TIMED]:
        connection.execute(WAITED, [service, waits])


Counts = Mapping[tuple[str, str], int]
"""How far each key of each service is."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What was sent and what was heard, of both databases."""

    sent: Counts
    heard: Counts
    faults: Sequence[tuple[str, str, int, int]] = ()
    answers: str = ""
    """The service that hears an answer to each message of ``answered``."""
    answered: str = ""

    @property
    def due(self) -> dict[tuple[str, str], int]:
        """How far each key should be heard."""
        answers = {
            (self.answers, key): n
            for (service, key), n in self.sent.items()
            if self.answers and service == self.answered
        }
        return {**self.sent, **answers}

    @property
    def left(self) -> int:
        """How many messages were sent, and not heard yet."""
        return sum(max(n - self.heard.get(at, 0), 0) for at, n in self.due.items())

    def findings(self) -> Iterator[str]:
        """What is wrong when nothing moves any more.

        >>> list(Balance(sent={("a", "k"): 3}, heard={("a", "k"): 2, ("a", "l"): 1}).findings())
        ["a: 2 of 3 messages of 'k' were heard", "a: 1 of 0 messages of 'l' were heard"]
        """
        for service, key, expected, found in self.faults:
            yield f"{service}: of {key!r}, {found} came where {expected} was due"
        due = self.due
        for at in sorted({*due, *self.heard}):
            if self.heard.get(at, 0) != due.get(at, 0):
                yield (
                    f"{at[0]}: {self.heard.get(at, 0)} of {due.get(at, 0)} messages of {at[1]!r} "
                    "were heard"
                )


def balance(app: Dsn, mom: Dsn, *, answered: str, answers: str) -> Balance:
    """Read both ledgers. What is heard meanwhile may seem to be left, and never the other way."""
    heard: dict[tuple[str, str], int] = {}
    faults: list[Any] = []
    sent: dict[tuple[str, str], int] = {}
    for dsn in (mom, app):
        with dsn.connect(role="soak", autocommit=True) as connection:
            heard |= _counts(connection, "heard")
            faults += connection.execute(FAULTS).fetchall()
            sent |= _counts(connection, "sent")
    return Balance(sent=sent, heard=heard, faults=faults, answered=answered, answers=answers)


def _counts(connection: psycopg.Connection[Any], table: str) -> dict[tuple[str, str], int]:
    rows = connection.execute(COUNTS.format(table)).fetchall()
    return {(service, key): n for service, key, n in rows}
