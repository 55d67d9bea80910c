"""Sources: a stream of Redis into an inbox, exactly once, whatever is killed, lost or set back."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from saf import receive
from saf.config import load
from saf.database import Dsn, fetch
from saf.destinations.queues import Format
from saf.destinations.redis import Redis as Destination
from saf.errors import (
    ConfigurationError,
    RetentionPassed,
    SourceChanged,
    SourceSetBack,
    TopicMadeAgain,
    Unavailable,
    UnknownService,
)
from saf.failpoints import arm
from saf.operating.figures import asker
from saf.operating.sources import resume
from saf.telemetry.metrics import SOURCE_PENDING
from tests.pipeline import bodies, connect, forward
from tests.programs import saf
from tests.receivers import prepare
from tests.redis_server import RedisServer, redis_server
from tests.topics import TOPIC, add, arrived, dead, read, reading, redis_source, written
from tests.waits import until

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def billing(mom: Dsn) -> Dsn:
    """A store that has the service."""
    prepare(mom)
    return mom


class Interrupted(Exception):
    """A process that ends in the middle."""


def interrupt() -> None:
    raise Interrupted


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, first + count)]


def test_a_topic_is_read_in_order_and_once_over_many_turns(
    queue: RedisServer, billing: Dsn
) -> None:
    source = redis_source(queue, chunk_rows=7)
    assert read(source, billing).chunks == 0  # the stream does not exist yet
    add(queue, *numbers(40))
    turn = read(source, billing)
    assert (turn.messages, turn.dropped) == (40, 0)
    assert read(source, billing).messages == 0
    add(queue, *numbers(20, 40))
    with reading(source, billing) as reader:
        assert reader.turn(lambda: False).messages == 20
        add(queue, *numbers(5, 60))
        assert reader.turn(lambda: False).messages == 5
    assert bodies(billing) == numbers(65)
    sources = {row["source"] for row in arrived(billing)}
    assert len(sources) == 1


@pytest.mark.parametrize("point", ["source_read", "mom_insert", "mom_commit", "source_stored"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_process_that_ends_anywhere_stores_each_message_once(
    queue: RedisServer, billing: Dsn, point: str, times: int
) -> None:
    source = redis_source(queue, chunk_rows=7)
    add(queue, *numbers(150))
    arm(f"{point}:{times}", interrupt)
    with pytest.raises(Interrupted):
        read(source, billing)
    arm("")
    read(source, billing)
    assert bodies(billing) == numbers(150)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["source_read", "mom_insert", "mom_commit", "source_stored"])
def test_a_killed_forwarder_is_continued_by_the_next_run(
    queue: RedisServer, billing: Dsn, tmp_path: Path, point: str
) -> None:
    config = written(tmp_path / "saf.toml", billing, queue, chunk_rows=10)
    add(queue, *numbers(150))
    killed = saf("forward", "--config", config, env={"SAF_FAILPOINT": f"{point}:2"})
    assert killed.returncode != 0
    done = saf("forward", "--config", config)
    assert done.returncode == 0, done.stderr
    assert bodies(billing) == numbers(150)


def test_a_message_of_another_writer_has_its_headers_its_key_and_an_id_of_its_position(
    queue: RedisServer, billing: Dsn
) -> None:
    add(queue, b"\x00\xff", order="A-1", note="grüezi")
    queue.client().xadd(TOPIC, {"order": "A-2", "amount": "7"})
    queue.client().xadd(TOPIC, {"body": "3", "order": "A-1", b"raw": b"\xff"})
    read(redis_source(queue, key_header="order"), billing)
    first, second, third = arrived(billing)
    assert (first["body"], first["key"]) == (b"\x00\xff", "A-1")
    assert first["headers"] == {"order": "A-1", "note": "grüezi"}
    assert abs((first["created_at"] - datetime.now(UTC)).total_seconds()) < 60
    # an entry without a body is an object of its fields
    assert json.loads(second["body"]) == {"order": "A-2", "amount": "7"}
    assert second["headers"] == {"content-type": "application/json"}
    assert third["headers"] == {"order": "A-1", "raw": {"base64": "/w=="}}
    again = [row["message_id"] for row in arrived(billing)]
    with connect(billing) as connection:
        connection.execute("TRUNCATE saf.inbox")
        connection.execute("DELETE FROM saf.watermark")
        connection.execute(
            "UPDATE saf.source_shard SET start_batch = 0, start_position = 0, added = 0"
        )
    read(redis_source(queue, key_header="order"), billing)
    assert [row["message_id"] for row in arrived(billing)] == again


@pytest.mark.parametrize("form", ["saf", "cloudevents", "cloudevents-structured"])
def test_a_message_of_saf_comes_back_as_it_was_sent(
    app: Dsn, queue: RedisServer, billing: Dsn, form: Format
) -> None:
    columns = {
        "from_service": "shop", "to_service": "billing", "key": "A-1", "message_type": "paid",
        "headers": json.dumps({"content-type": "application/json", "trace": "7"}),
        "body": b'{"total": 1.50}', "created_at": NOON, "expires_at": NOON.replace(year=2199),
        "deliver_at": NOON.replace(year=2027),
    }  # fmt: skip
    with connect(app) as connection:
        ((message_id,),) = fetch(
            connection,
            f"INSERT INTO saf.outbox ({', '.join(columns)}) VALUES "
            f"({', '.join(f'%({name})s' for name in columns)}) RETURNING message_id",
            columns,
        )
        ((broker_id,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
    receipts = forward(app, there=Destination(server=queue.address, format=form))
    assert not [receipt.error for receipt in receipts if receipt.error]
    read(redis_source(queue, topic="{saf}:billing"), billing)
    (found,) = arrived(billing)
    headers = found.pop("headers")
    assert found.pop("source") not in (None, broker_id)
    assert found == {
        "message_id": message_id,
        **{name: value for name, value in columns.items() if name != "headers"},
    }
    assert headers == {
        "content-type": "application/json", "trace": "7", "saf-sent-by": str(broker_id)
    }  # fmt: skip


def test_a_message_goes_to_the_service_that_it_names_only_if_the_settings_say_so(
    queue: RedisServer, billing: Dsn
) -> None:
    said = {
        "saf-id": str(UUID(int=7)), "saf-source": str(UUID(int=8)), "saf-shard": "3",
        "saf-service": "shipping", "saf-created-at": NOON.isoformat(),
        "saf-verified-from": '{"service": "bank"}',
    }  # fmt: skip
    add(queue, "1", **said)
    with connect(billing) as connection:
        connection.execute("INSERT INTO saf.service (name) VALUES ('shipping')")
    read(redis_source(queue), billing)
    read(redis_source(queue, named_services=True), billing, name="again")
    first, second = arrived(billing)
    assert (first["to_service"], second["to_service"]) == ("billing", "shipping")
    # nobody has verified what a topic says
    assert first["headers"]["saf-claimed-from"] == '{"service": "bank"}'
    assert "saf-verified-from" not in first["headers"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"content-type": "application/cloudevents+json"}, "undecodable"),
        ({"saf-source": str(UUID(int=8)), "saf-shard": "3", "saf-id": "seven"}, "undecodable"),
        ({"order": "x" * 1025}, "undecodable"),
        ({"order": "a\x00b"}, "stored"),
        ({"note": "x" * (1 << 20)}, "undecodable"),
        (
            {
                "saf-source": str(UUID(int=8)), "saf-shard": "3", "saf-id": str(UUID(int=7)),
                "saf-conversation": str(UUID(int=9)),
            },
            "no_dialog",
        ),
    ],
)  # fmt: skip
def test_a_record_that_no_inbox_takes_is_a_dead_letter_between_its_neighbours(
    queue: RedisServer, billing: Dsn, fields: dict[str, str], reason: str
) -> None:
    add(queue, "before")
    add(queue, "bad", **fields)
    add(queue, "after")
    turn = read(redis_source(queue, key_header="order"), billing)
    if reason == "stored":
        assert bodies(billing) == ["before", "bad", "after"]
        return
    assert (turn.messages, turn.dead) == (2, 1)
    assert bodies(billing) == ["before", "after"]
    assert dead(billing) == [(reason, "billing", b"bad")]
    assert read(redis_source(queue, key_header="order"), billing).dead == 0


def test_only_undecodable_records_move_the_mark_too(queue: RedisServer, billing: Dsn) -> None:
    add(queue, "bad", **{"content-type": "application/cloudevents+json"})
    assert read(redis_source(queue), billing).dead == 1
    assert read(redis_source(queue), billing).dead == 0
    assert len(dead(billing)) == 1


def test_a_body_that_is_too_large_is_a_dead_letter(queue: RedisServer, billing: Dsn) -> None:
    add(queue, "x" * 2000, "small")
    read(redis_source(queue), billing, max_bytes=1999)
    assert bodies(billing) == ["small"]
    assert [reason for reason, *_ in dead(billing)] == ["over_size"]


def test_a_dead_letter_that_is_retried_reaches_the_handler(
    queue: RedisServer, billing: Dsn, tmp_path: Path
) -> None:
    add(queue, "bad", **{"content-type": "application/cloudevents+json"})
    config = written(tmp_path / "saf.toml", billing, queue)
    assert saf("forward", "--config", config).returncode == 0
    done = saf("dead", "retry", "--all", "--broker", "mom", "--config", config)
    assert done.returncode == 0, done.stderr
    with connect(billing) as connection:
        found = fetch(connection, "SELECT kind, body FROM saf.parked")
    assert [(kind, bytes(body)) for kind, body in found] == [("key", b"bad")]


def test_a_stream_that_was_set_back_is_refused(queue: RedisServer, billing: Dsn) -> None:
    first, *_ = add(queue, *numbers(10))
    read(redis_source(queue), billing)
    queue.client().delete(TOPIC)
    queue.client().xadd(TOPIC, {"body": "0"}, id=first)
    with pytest.raises(SourceSetBack, match="was set back"):
        read(redis_source(queue), billing)
    assert bodies(billing) == numbers(10)


def test_a_stream_that_was_deleted_is_refused_and_so_is_one_made_again(
    queue: RedisServer, billing: Dsn
) -> None:
    add(queue, *numbers(10))
    read(redis_source(queue), billing)
    queue.client().delete(TOPIC)
    with pytest.raises(TopicMadeAgain, match="does not exist"):
        read(redis_source(queue), billing)
    add(queue, *numbers(3, 10))  # fewer than were read
    with pytest.raises(TopicMadeAgain, match="10 messages of shard 0 were read, it has had 3"):
        read(redis_source(queue), billing)
    add(queue, *numbers(20, 13))  # and more
    with pytest.raises(TopicMadeAgain, match="fewer were removed"):
        read(redis_source(queue), billing)
    assert bodies(billing) == numbers(10)


def test_messages_that_were_removed_before_they_were_read_are_counted_and_refused(
    queue: RedisServer, billing: Dsn
) -> None:
    add(queue, *numbers(10))
    read(redis_source(queue), billing)
    queue.client().xtrim(TOPIC, maxlen=0)  # all of them were read
    assert read(redis_source(queue), billing).messages == 0
    add(queue, *numbers(10, 10))
    queue.client().xtrim(TOPIC, maxlen=7, approximate=False)
    with pytest.raises(RetentionPassed, match="no longer has 3 messages of shard 0"):
        read(redis_source(queue), billing)
    assert bodies(billing) == numbers(10)


def test_a_purge_of_messages_that_were_read_is_nothing(queue: RedisServer, billing: Dsn) -> None:
    add(queue, *numbers(10))
    queue.client().xtrim(TOPIC, maxlen=8, approximate=False)  # before anything was read
    read(redis_source(queue), billing)
    add(queue, *numbers(10, 10))
    queue.client().xtrim(TOPIC, maxlen=10, approximate=False)
    read(redis_source(queue), billing)
    assert bodies(billing) == numbers(18, 2)


def test_a_name_that_stands_for_another_topic_is_refused(queue: RedisServer, billing: Dsn) -> None:
    add(queue, "1")
    read(redis_source(queue), billing)
    with pytest.raises(SourceChanged, match="it read topic 'payments' of redis before"):
        read(redis_source(queue, topic="refunds"), billing)


def test_an_operator_lets_a_refused_source_continue(
    queue: RedisServer, billing: Dsn, tmp_path: Path
) -> None:
    config = written(tmp_path / "saf.toml", billing, queue)
    add(queue, *numbers(3))
    assert saf("forward", "--config", config).returncode == 0
    queue.client().delete(TOPIC)
    add(queue, "new")
    refused = saf("forward", "--config", config)
    assert refused.returncode == 2
    assert "saf source continue payments --from earliest" in refused.stderr
    assert saf("source", "check", "payments", "--config", config).returncode == 1
    doctor = saf("doctor", "--config", config)
    assert "was deleted or made again" in doctor.stdout
    done = saf(
        *("source", "continue", "payments", "--from", "earliest", "--why", "cleaned"),
        *("--config", config),
    )
    assert done.returncode == 0, done.stderr
    assert saf("forward", "--config", config).returncode == 0
    assert bodies(billing) == [*numbers(3), "new"]
    assert len({row["source"] for row in arrived(billing)}) == 2
    with connect(billing) as connection:
        assert fetch(connection, "SELECT action, why FROM saf.audit") == [
            ("continue source payments from earliest", "cleaned")
        ]
    add(queue, "skipped")
    assert saf(
        "source", "continue", "payments", "--from", "latest", "--config", config
    ).returncode == 0  # fmt: skip
    add(queue, "last")
    assert saf("forward", "--config", config).returncode == 0
    assert bodies(billing) == [*numbers(3), "new", "last"]


def test_a_process_that_still_reads_stores_nothing_after_an_operators_decision(
    queue: RedisServer, billing: Dsn, tmp_path: Path
) -> None:
    config = written(tmp_path / "saf.toml", billing, queue)
    source = redis_source(queue)
    add(queue, "1")
    with reading(source, billing, lease_seconds=1e6) as reader:
        reader.turn(lambda: False)
        add(queue, "2")
        done = saf("source", "continue", "payments", "--from", "latest", "--config", config)
        assert done.returncode == 0
        add(queue, "3")
        reader.turn(lambda: False)  # the old one
        assert bodies(billing) == ["1"]
        reader.turn(lambda: False)
    assert bodies(billing) == ["1", "3"]


def test_an_operator_may_decide_between_reading_and_storing(
    queue: RedisServer, billing: Dsn, tmp_path: Path
) -> None:
    settings = load(written(tmp_path / "saf.toml", billing, queue))
    add(queue, "1")

    def decide() -> None:
        resume(settings, "payments", "latest", "by hand")

    with reading(redis_source(queue), billing) as reader:
        arm("source_read", decide)
        turn = reader.turn(lambda: False)
        arm("")
        assert turn.messages == 0
        assert bodies(billing) == []
        add(queue, "2")
        reader.turn(lambda: False)
    assert bodies(billing) == ["2"]


def test_reading_may_begin_at_the_end(queue: RedisServer, billing: Dsn) -> None:
    add(queue, "old")
    read(redis_source(queue, start="latest"), billing)
    add(queue, "new")
    read(redis_source(queue, start="latest"), billing)
    assert bodies(billing) == ["new"]


def test_one_process_reads_a_partition_at_a_time_and_the_next_one_takes_over(
    queue: RedisServer, billing: Dsn
) -> None:
    source = redis_source(queue)
    add(queue, "1")
    with reading(source, billing) as first:
        assert first.turn(lambda: False).owned == 1
        with reading(source, billing) as second:
            assert second.turn(lambda: False).owned == 0
            first.close()
            until(lambda: second.turn(lambda: False).owned == 1)
            add(queue, "2")
            second.turn(lambda: False)
    assert bodies(billing) == ["1", "2"]


def test_a_process_that_outlived_its_lease_is_fenced(queue: RedisServer, billing: Dsn) -> None:
    source = redis_source(queue)
    add(queue, "1")
    with reading(source, billing, lease_seconds=1e6) as frozen:
        frozen.turn(lambda: False)
        with connect(billing) as connection:
            connection.execute("UPDATE saf.source_member SET lease_until = now()")
        add(queue, "2")
        read(source, billing)  # the new owner, which ends
        add(queue, "3")
        frozen.turn(lambda: False)
        assert bodies(billing) == ["1", "2"]
        frozen.turn(lambda: False)
    assert bodies(billing) == ["1", "2", "3"]


@pytest.mark.slow
def test_two_that_take_over_from_each_other_store_each_message_once(
    queue: RedisServer, billing: Dsn
) -> None:
    source = redis_source(queue, chunk_rows=5)
    stopped = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with reading(source, billing) as reader:
                while not stopped.is_set():
                    reader.turn(stopped.is_set)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with connect(billing) as connection:
        for first in range(0, 320, 80):
            add(queue, *numbers(80, first))
            until(lambda: failures or len(bodies(billing)) > first)  # noqa: B023 - called now
            # as if all had slept past their leases, in the middle of a turn
            connection.execute("UPDATE saf.source_member SET lease_until = now() - interval '1 s'")
            until(lambda: failures or len(bodies(billing)) >= first + 80)  # noqa: B023 - too
    stopped.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert bodies(billing) == numbers(320)


def test_a_source_that_is_down_delays_no_outbox(app: Dsn, billing: Dsn, tmp_path: Path) -> None:
    config = written(tmp_path / "saf.toml", billing, "redis://127.0.0.1:1/0", app=app)
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '1')")
    done = saf("forward", "--json", "--config", config)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, said["forwarded"], said["received"]) == (75, 1, 0)
    (problem,) = said["problems"]
    assert (problem["broker"], problem["kind"]) == ("source payments", "Unavailable")
    assert bodies(billing) == ["1"]


def test_one_run_forwards_and_receives_and_says_both(
    app: Dsn, billing: Dsn, queue: RedisServer, tmp_path: Path
) -> None:
    config = written(tmp_path / "saf.toml", billing, queue, app=app)
    add(queue, *numbers(3))
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('billing', '7')")
    done = saf("forward", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "forwarded 1 message" in done.stdout
    assert "received 3 messages (payments: 3)" in done.stdout
    assert sorted(bodies(billing)) == ["0", "1", "2", "7"]
    listed = json.loads(saf("source", "list", "--json", "--config", config).stdout)
    (source,) = listed["sources"]
    assert (source["pending"], source["topic"], source["into"]) == (0, "payments", "mom")
    add(queue, "3")
    status = saf("status", "--config", config).stdout
    assert "source 'payments': redis topic 'payments' -> service 'billing' of mom" in status


def test_what_was_read_and_what_is_left_are_metrics(
    billing: Dsn, queue: RedisServer, tmp_path: Path
) -> None:
    config = written(tmp_path / "saf.toml", billing, queue)
    add(queue, *numbers(3))
    add(queue, "bad", **{"content-type": "application/cloudevents+json"})
    file = tmp_path / "metrics" / "saf.prom"
    file.parent.mkdir()
    done = saf("forward", "--metrics-textfile", file, "--config", config)
    assert done.returncode == 0, done.stderr
    text = file.read_text()
    assert 'saf_source_messages_total{source="payments"} 3.0' in text
    assert 'saf_source_dead_letters_total{source="payments"} 1.0' in text
    with billing.connect(role="metrics", autocommit=True) as connection:
        samples = asker(load(config))(connection, "mom")
    pending = [one for one in samples if one.metric is SOURCE_PENDING]
    assert [(one.labels, one.value) for one in pending] == [(("mom", "payments"), 0.0)]


def test_a_server_that_goes_and_comes_back_loses_nothing(billing: Dsn, tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        source = redis_source(server)
        add(server, *numbers(10))
        with reading(source, billing) as reader:
            reader.turn(lambda: False)
            with server.down(), pytest.raises(Unavailable):
                reader.turn(lambda: False)
            add(server, *numbers(10, 10))
            reader.turn(lambda: False)
    assert bodies(billing) == numbers(20)


def test_a_service_that_does_not_live_there_is_named_before_anything_is_read(
    queue: RedisServer, mom: Dsn
) -> None:
    add(queue, "1")
    with pytest.raises(UnknownService, match="saf service create billing --broker mom"):
        read(redis_source(queue), mom)
    assert bodies(mom) == []


def test_a_worker_handles_what_was_read(queue: RedisServer, billing: Dsn) -> None:
    add(queue, "1", "2")
    read(redis_source(queue), billing)
    handled: list[bytes] = []
    for _ in range(4):  # the two may be in two shards
        with receive(billing.conninfo, "billing") as delivery:
            handled += [message.body for message in delivery]
    assert sorted(handled) == [b"1", b"2"]


def test_an_inbox_that_was_set_back_reads_again_what_it_has_lost(
    queue: RedisServer, billing: Dsn
) -> None:
    """The mark is where the messages are, so both are set back together."""
    source = redis_source(queue)
    add(queue, *numbers(3))
    read(source, billing)
    with connect(billing) as connection:
        mark = fetch(connection, "SELECT batch, position FROM saf.watermark")
        place = fetch(connection, "SELECT added, start_batch, start_position FROM saf.source_shard")
        add(queue, *numbers(3, 3))
        read(source, billing)
        connection.execute("DELETE FROM saf.inbox WHERE id > 3")
        connection.execute("UPDATE saf.watermark SET batch = %s, position = %s", mark[0])
        connection.execute(
            "UPDATE saf.source_shard SET (added, start_batch, start_position) = (%s, %s, %s)",
            place[0],
        )
    read(source, billing)
    assert bodies(billing) == numbers(6)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('kind = "paper"', "unknown kind of source 'paper'"),
        ('kind = "redis"\nserver = "redis://x"\ntopic = "t"', "service"),
        ('kind = "redis"\nserver = "redis://x"\ntopic = ""\nservice = "b"', "a name has 1 to 255"),
        (
            'kind = "redis"\nserver = "redis://x"\ntopic = "t"\nservice = "b"\ntopics = "u"',
            "did you mean 'topic'",
        ),
        (
            'kind = "redis"\nserver = "redis://x"\ntopic = "t"\nservice = "b"\ninto = "mon"',
            "did you mean 'mom'",
        ),
        (
            'kind = "redis"\nserver = "redis://x"\ntopic = "t"\nservice = "b"\nkey_file = "k"',
            "certificate_file and key_file belong together",
        ),
    ],
)
def test_a_setting_at_fault_is_named(tmp_path: Path, setting: str, said: str) -> None:
    file = tmp_path / "saf.toml"
    file.write_text(f'[destinations.mom]\ndsn = "dbname=mom"\n[sources.payments]\n{setting}\n')
    with pytest.raises(ConfigurationError, match=said):
        load(file)
