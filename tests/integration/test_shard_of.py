"""The same key gives the same shard in SQL and in Python, in every process, for ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saf import Message, Outbox
from saf.database import Dsn
from saf.log.shards import hash64, shard_expression, shard_of

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
ALL_LENGTHS = ["x" * length for length in range(40)] + ["ü" * length for length in range(40)]
KNOWN = {"": 45, "N725MQ": 5, "order-1": 11, "Zürich": 30, "日本語": 4, "😀" * 12: 43}

# One connection serves all examples of a test, and the function only reads
EXAMPLES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)


@pytest.fixture
def connection(app: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with app.connect(role="test") as connection:
        yield connection


def in_sql(connection: psycopg.Connection[Any], keys: list[str], shards: int) -> list[int]:
    """The shards by the very expression of the generated column."""
    rows = connection.execute(
        f"SELECT {shard_expression(shards)} FROM unnest(%s::text[]) WITH ORDINALITY AS k (key, n), "
        "(SELECT NULL::uuid AS message_id) AS m ORDER BY n".replace("% ", "%% "),
        [keys],
    ).fetchall()
    return [row[0] for row in rows]


@pytest.mark.every_postgresql
@EXAMPLES
@given(keys=st.lists(KEYS, min_size=1, max_size=50), shards=st.integers(1, 1024))
def test_any_key_has_the_same_shard_in_sql_and_python(
    connection: psycopg.Connection[Any], keys: list[str], shards: int
) -> None:
    assert [shard_of(key, shards) for key in keys] == in_sql(connection, keys, shards)


def test_keys_of_every_length_have_the_same_shard_in_sql_and_python(
    connection: psycopg.Connection[Any],
) -> None:
    assert [shard_of(key, 1000) for key in ALL_LENGTHS] == in_sql(connection, ALL_LENGTHS, 1000)


def test_a_key_with_a_negative_hash_has_the_same_shard_in_sql_and_python(
    connection: psycopg.Connection[Any],
) -> None:
    keys = [f"order-{number}" for number in range(200)]
    negative = [key for key in keys if hash64(key.encode()) < 0]
    assert 50 < len(negative) < 150
    row = connection.execute("SELECT hashtextextended(%s, 0)", [negative[0]]).fetchone()
    assert row == (hash64(negative[0].encode()),)
    for shards in (1, 3, 64, 1000, 1024):
        found = in_sql(connection, negative, shards)
        assert found == [shard_of(key, shards) for key in negative]
        assert min(found) >= 0


@pytest.mark.every_postgresql
def test_the_stored_shard_is_the_one_that_python_computes(
    connection: psycopg.Connection[Any],
) -> None:
    keys = [*KNOWN, *(f"order-{number}" for number in range(500)), None]
    keys.remove("")  # what send refuses
    Outbox().send_many(connection, [Message(service="s", body=b"", key=key) for key in keys])
    connection.execute("INSERT INTO saf.outbox (to_service, body, key) VALUES ('s', '', '')")
    rows = connection.execute("SELECT key, message_id::text, shard FROM saf.outbox").fetchall()
    assert len(rows) == len(keys) + 1
    for key, message_id, shard in rows:
        assert shard == shard_of(message_id if key is None else key, 64)


def test_a_key_has_the_same_shard_in_every_process() -> None:
    out = subprocess.run(
        [sys.executable, "-R", "-c", IN_ANOTHER_PROCESS, *KNOWN],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [int(shard) for shard in out.split()] == list(KNOWN.values())


IN_ANOTHER_PROCESS = """
import sys
from saf.log.shards import shard_of
print(*(shard_of(key, 64) for key in sys.argv[1:]))
"""


def test_known_keys_keep_the_shards_that_they_always_had(
    connection: psycopg.Connection[Any],
) -> None:
    assert {key: shard_of(key, 64) for key in KNOWN} == KNOWN
    assert in_sql(connection, list(KNOWN), 64) == list(KNOWN.values())


def test_messages_without_key_spread_over_the_shards() -> None:
    counts = [0] * 64
    for _ in range(6400):
        counts[shard_of(str(uuid4()), 64)] += 1
    assert min(counts) > 40
