"""What tasks have staged is sent together, once, in order, and as `Outbox.send` would send it."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, InvalidMessage, NotThisStream, StagedLost
from saf.message import LAST_DAY, MAX_KEY, MAX_NAME, Message, encode
from saf.operating.maintenance import purge_broker
from saf.routing.routes import add_route
from saf.sending import staging
from saf.spark.table.outgoing import check_columns, staged
from saf.spark.table.sink import Copy, Outgoing, Written
from tests.pipeline import bodies, connect

PLAIN = {"content-type": "application/octet-stream"}


def batch(**columns: list[Any]) -> pa.RecordBatch:
    """Rows as Spark hands them over."""
    types = {
        "headers": pa.map_(pa.string(), pa.string()),
        **dict.fromkeys(("deliver_at", "expires_at"), pa.timestamp("us", "UTC")),
        **dict.fromkeys(("service", "key", "message_type", "from_service"), pa.string()),
    }
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    )


def rows(*bodies: str, key: str = "k") -> pa.RecordBatch:
    return batch(
        service=["billing"] * len(bodies),
        key=[key] * len(bodies),
        body=[body.encode() for body in bodies],
    )


def stage(dsn: Dsn, partition: int, *batches: pa.RecordBatch, query: str | None = None) -> Written:
    """What a task does."""
    with Copy("broker 'app'", dsn) as copy:
        for one in batches:
            copy.add(one)
    return Written(partition=partition, attempt=copy.attempt, messages=copy.messages, query=query)


def to(dsn: Dsn) -> Outgoing:
    return Outgoing(what="broker 'app'", dsn=dsn)


def sent(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        found = fetch(connection, "SELECT body FROM saf.outbox ORDER BY id")
    return [bytes(body).decode() for (body,) in found]


def left(dsn: Dsn) -> tuple[int, int]:
    """What is staged: attempts and messages."""
    with connect(dsn) as connection:
        ((attempts, messages),) = fetch(
            connection,
            "SELECT count(DISTINCT attempt), count(*) FROM saf.staged",
        )
    return attempts, messages


@pytest.mark.every_postgresql
def test_messages_are_sent_together_in_the_order_of_partitions_and_rows(app: Dsn) -> None:
    second = stage(app, 1, rows("c", "d"), rows("e"))
    first = stage(app, 0, rows("a", "b"))
    empty = stage(app, 2)
    assert (sent(app), left(app)) == ([], (2, 5))
    assert to(app).send("one", None, [second, empty, first], stream=False)
    assert (sent(app), left(app)) == (["a", "b", "c", "d", "e"], (0, 0))


def test_each_column_arrives_as_outbox_send_would_store_it(app: Dsn) -> None:
    later = datetime.now(UTC).replace(microsecond=7) + timedelta(days=1)
    broker = uuid4()
    one = batch(
        service=["billing", "shipping"],
        key=["Zürich", None],
        body=["grüezi", ""],
        headers=[[("Content-Type", "text/html"), ("trace", "7")], None],
        message_type=["Greeting", None],
        from_service=["shop", None],
        to_broker=[str(broker), None],
        deliver_at=[later, None],
        expires_at=[later, None],
    )
    to(app).send("one", None, [stage(app, 0, one)], stream=False)
    with connect(app) as connection:
        found = fetch(
            connection,
            "SELECT to_service, key, body, headers, message_type, from_service, to_broker, "
            "deliver_at, expires_at, message_id IS NOT NULL FROM saf.outbox ORDER BY id",
        )
    html = {"content-type": "text/html", "trace": "7"}
    text = {"content-type": "text/plain; charset=utf-8"}
    assert found == [
        ("billing", "Zürich", "grüezi".encode(), html, "Greeting", "shop", broker, later, later,
         True),
        ("shipping", None, b"", text, None, None, None, None, None, True),
    ]  # fmt: skip


def test_headers_may_be_json_with_any_values(app: Dsn) -> None:
    one = pa.RecordBatch.from_pydict(
        {"service": ["a", "a"], "body": [b"", b""], "headers": ['{"n": [1, {"x": null}]}', None]}
    )
    to(app).send("one", None, [stage(app, 0, one)], stream=False)
    with connect(app) as connection:
        found = fetch(connection, "SELECT headers FROM saf.outbox ORDER BY id")
    assert found == [({**PLAIN, "n": [1, {"x": None}]},), (PLAIN,)]


# Once


def test_a_version_that_was_sent_is_not_sent_again_nor_is_an_earlier_one(app: Dsn) -> None:
    for version, body, fresh in ((3, "a", True), (3, "b", False), (2, "c", False), (4, "d", True)):
        written = [stage(app, 0, rows(body))]
        assert to(app).send("scoring", version, written, stream=False) == fresh
    assert to(app).send("another", 1, [stage(app, 0, rows("e"))], stream=False)
    assert (sent(app), left(app)) == (["a", "d", "e"], (0, 0))


def test_a_commit_that_is_tried_again_after_a_lost_answer_sends_nothing_more(app: Dsn) -> None:
    written = [stage(app, 0, rows("a"))]
    assert to(app).send("write 1", None, written, stream=False)
    assert not to(app).send("write 1", None, written, stream=False)
    assert sent(app) == ["a"]


def test_of_two_commits_of_a_version_at_the_same_time_one_sends(app: Dsn) -> None:
    found: list[bool] = []

    def commit(written: Written) -> None:
        found.append(to(app).send("scoring", 1, [written], stream=False))

    threads = [
        threading.Thread(target=commit, args=[stage(app, 0, rows(str(one)))]) for one in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, False, False, True]
    assert (len(sent(app)), left(app)) == (1, (0, 0))


def test_an_epoch_that_comes_again_is_not_sent_and_an_older_one_is_refused(app: Dsn) -> None:
    for epoch in (0, 1):
        written = [stage(app, 0, rows(str(epoch)))]
        assert to(app).send("query", epoch, written, stream=True)
    assert not to(app).send("query", 1, [stage(app, 0, rows("again"))], stream=True)
    with pytest.raises(NotThisStream, match="has sent its epoch 1 already, and comes with 0"):
        to(app).send("query", 0, [stage(app, 0, rows("older"))], stream=True)
    assert sent(app) == ["0", "1"]


def test_a_task_that_fails_leaves_nothing_and_a_job_that_fails_is_discarded(app: Dsn) -> None:
    def fails() -> None:
        with Copy("app", app) as copy:
            copy.add(rows("a"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert left(app)[1] == 0
    written = stage(app, 0, rows("b"))
    to(app).discard([written, None])
    assert (sent(app), left(app)[1]) == ([], 0)


def test_what_a_crash_of_the_server_takes_is_missed_and_nothing_is_sent(
    own_server: EmbeddedServer,
) -> None:
    app = own_server.create_database("app")
    migrate(app)
    written = [stage(app, 0, rows("a", "b")), stage(app, 1, rows("c"))]
    own_server.stop_immediately()
    own_server.start()
    with pytest.raises(StagedLost, match="of 3 messages that tasks have staged, 0 are left"):
        to(app).send("scoring", 1, written, stream=False)
    assert sent(app) == []
    again = [stage(app, 0, rows("a", "b")), stage(app, 1, rows("c"))]
    assert to(app).send("scoring", 1, again, stream=False)
    assert sent(app) == ["a", "b", "c"]


def test_orphans_are_collected_by_a_purge_and_counted(app: Dsn) -> None:
    stage(app, 0, rows("a", "b"))
    with connect(app) as connection:
        connection.execute("UPDATE saf.staged SET attempt = attempt - (2 * 86400::bigint << 31)")
        kept = stage(app, 0, rows("c"))
        for orphans in (2, 0):
            outcome = purge_broker(
                connection, retention_seconds=86400.0, rotate_after_seconds=86400.0
            )
            assert outcome.orphans == orphans
    assert left(app) == (1, 1)
    assert to(app).send("scoring", 1, [kept], stream=False)


# As an outbox does


def test_a_local_route_takes_what_a_job_sends(app: Dsn) -> None:
    with connect(app) as connection:
        create_service(connection, "billing")
        add_route(connection, "app", service="billing", local=True)
    assert to(app).send("one", None, [stage(app, 0, rows("a", "b"))], stream=False)
    assert (sent(app), bodies(app)) == ([], ["a", "b"])


REFUSED: dict[str, dict[str, Any]] = {
    "no service": {"service": None},
    "an empty service": {"service": ""},
    "a long service": {"service": "好" * 86},
    "a long key": {"key": "k" * (MAX_KEY + 1)},
    "an empty key": {"key": ""},
    "a NUL": {"key": "a\0b"},
    "a long type": {"message_type": "t" * (MAX_NAME + 1)},
    "a long sender": {"from_service": "s" * (MAX_NAME + 1)},
    "an expired message": {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)},
    "a time that is too late": {"deliver_at": LAST_DAY},
    "an expiry that is too late": {"expires_at": LAST_DAY},
    "large headers": {"headers": {"h": "x" * (1 << 20)}},
    "a header twice": {"headers": {"A": "1", "a": "2"}},
    "a NUL in a header": {"headers": {"a": "\0"}},
    "a NUL in the content type": {"headers": {"Content-Type": "\0"}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_outbox_send_refuses_is_refused_in_the_same_words(what: str) -> None:
    fields: dict[str, Any] = {"service": "billing", "body": b"x", **REFUSED[what]}
    with pytest.raises(InvalidMessage) as expected:
        encode(Message(**fields))
    good: dict[str, Any] = {"service": "billing", "body": b"x"}
    headers = [*fields["headers"].items()] if "headers" in fields else None
    columns = {
        name: [good.get(name), headers if name == "headers" else value]
        for name, value in fields.items()
    }
    with pytest.raises(InvalidMessage) as found:
        staged(batch(**columns), 1, 10)
    assert str(found.value) == f"messages[11].{expected.value}"


def test_a_stream_may_send_what_has_expired_since_it_was_read() -> None:
    times = [datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC) + timedelta(days=1), None]
    rows_ = batch(service=["billing"] * 3, body=[b"x"] * 3, expires_at=times)
    assert staged(rows_, 1, 0, may_be_late=True)["expires_at"].to_pylist() == times
    with pytest.raises(InvalidMessage, match=r"messages\[0\]\.expires_at"):
        staged(rows_, 1, 0)
    both = batch(service=["a", "a"], body=[b"x", None], expires_at=times[:2])
    with pytest.raises(InvalidMessage, match=r"messages\[1\]\.body: is NULL"):
        staged(both, 1, 0, may_be_late=True)


def test_a_broker_is_written_as_postgresql_reads_it() -> None:
    given = ["urn:uuid:12345678-1234-5678-1234-567812345678", None]
    columns = batch(service=["a", "a"], body=[b"x", b"y"], to_broker=given)
    assert staged(columns, 1, 0)["to_broker"].to_pylist() == [str(UUID(given[0])), None]


@pytest.mark.parametrize("kind", [pa.int16(), pa.int32(), pa.int64(), pa.string()])
def test_a_key_may_be_an_integer_and_is_sent_as_its_digits(kind: pa.DataType) -> None:
    given = ["7", "-7", None] if kind == pa.string() else [7, -7, None]
    columns = batch(service=["a"] * 3, body=[b"x"] * 3)
    columns = columns.append_column("key", pa.array(given, kind))
    assert staged(columns, 1, 0)["key"].to_pylist() == ["7", "-7", None]


def test_of_a_dataframe_a_key_of_another_type_is_refused_by_its_column() -> None:
    def check(kind: DataType) -> None:
        columns = StructType().add("service", StringType()).add("body", StringType())
        check_columns(columns.add("key", kind))

    for kind in (LongType(), IntegerType(), ShortType(), StringType()):
        check(kind)
    for wrong in (DoubleType(), BooleanType()):
        with pytest.raises(ConfigurationError, match=rf"'key'.* not a {wrong.simpleString()}"):
            check(wrong)


def test_what_only_a_dataframe_can_hold_is_refused_too() -> None:
    cases: list[tuple[dict[str, list[Any]], str]] = [
        ({"service": ["a", "a"], "body": [b"x", None]}, "messages[1].body: is NULL"),
        (
            {"service": ["a"], "body": [b"x"], "to_broker": ["here"]},
            "messages[0].to_broker: 'here' is not a UUID",
        ),
    ]
    for columns, said in cases:
        with pytest.raises(InvalidMessage) as found:
            staged(batch(**columns), 1, 0)
        assert str(found.value) == said
    for micros in (253_402_300_800_000_000, -62_135_596_800_000_001):  # no datetime of Python
        columns = {"service": ["a"], "body": [b"x"], "deliver_at": [micros]}
        with pytest.raises(InvalidMessage, match=r"messages\[0\]\.deliver_at: it is before 0001-"):
            staged(batch(**columns), 1, 0)
    for text in ("[1]", "{", "7"):
        broken = pa.RecordBatch.from_pydict({"service": ["a"], "body": [b""], "headers": [text]})
        with pytest.raises(InvalidMessage, match=r"messages\[0\]\.headers: "):
            staged(broken, 1, 0)
    bytes_ = pa.array([b"ok", b"\xff"], pa.binary())
    wrong = pa.StringArray.from_buffers(2, bytes_.buffers()[1], bytes_.buffers()[2])
    not_text = pa.RecordBatch.from_arrays([pa.array(["a", "a"]), wrong], ["service", "body"])
    with pytest.raises(InvalidMessage, match=r"messages\[1\]\.body: is not Unicode text"):
        staged(not_text, 1, 0)


TEXT = st.text(st.characters(codec="utf-8"), max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "service": st.one_of(TEXT, st.sampled_from(["a", "s" * 255, "s" * 256])),
                "key": st.one_of(st.none(), TEXT, st.just("k" * 1025)),
                "body": st.one_of(st.binary(max_size=3)),
                "headers": st.one_of(st.none(), st.dictionaries(TEXT, TEXT, max_size=2)),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_rows_are_accepted_exactly_when_an_outbox_accepts_each(found: list[dict[str, Any]]) -> None:
    columns = {
        name: [
            [*row[name].items()] if name == "headers" and row[name] is not None else row[name]
            for row in found
        ]
        for name in found[0]
    }
    encoded = []
    refused = None
    for number, row in enumerate(found):
        try:
            encoded.append(encode(Message(**row)))
        except InvalidMessage:
            refused = number
            break
    if refused is None:
        result = staged(batch(**columns), 7, 0)
        headers = [json.loads(text) for text in result["headers"].to_pylist()]
        assert headers == [json.loads(one.headers) for one in encoded]
    else:
        with pytest.raises(InvalidMessage):
            staged(batch(**columns), 7, 0)


def test_staged_messages_have_the_columns_that_are_sent() -> None:
    assert set(staging.MESSAGE) == {
        *{"from_service", "to_service", "to_broker", "key", "message_type", "headers", "body"},
        *{"deliver_at", "expires_at"},
    }
