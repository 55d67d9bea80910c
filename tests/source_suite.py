"""What every kind of source has to keep, with a real server that is killed and real forwarders."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from saf.config import load
from saf.database import Dsn, fetch
from saf.destinations.queues import Format, QueueSettings
from saf.errors import Unavailable
from saf.operating.figures import asker
from saf.sources.settings import SourceSettings
from saf.telemetry.metrics import SOURCE_PENDING
from tests.killable import Restartable
from tests.pipeline import bodies, connect, forward
from tests.programs import saf
from tests.receivers import prepare
from tests.topics import TOPIC, arrived, read, reading, written_of
from tests.waits import until

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
POINTS = ("source_read:1", "mom_insert:2", "mom_commit:2", "source_stored:1", "source_stored:3")
MANY = 600

Add = Callable[[Sequence[str]], object]


class SourceSuite(ABC):
    """The suite; a subclass runs it for one kind."""

    @pytest.fixture
    def server(self) -> Restartable:
        """The topic's server, without the topic."""
        raise NotImplementedError

    @pytest.fixture
    def add(self) -> Add:
        """A function that adds messages of another writer; it creates the topic."""
        raise NotImplementedError

    @abstractmethod
    def source(self, server: Any, topic: str | None = None, **more: Any) -> SourceSettings:
        """The topic as a source; ``topic``: that of a service of the destination."""

    @abstractmethod
    def destination(self, server: Any, form: Format) -> QueueSettings:
        """saf's destination of the same kind."""

    topic_of_billing = "billing"
    """Topic to which the destination sends messages for this service."""

    @pytest.fixture
    def billing(self, mom: Dsn) -> Dsn:
        """A store that has the service."""
        prepare(mom)
        return mom

    @pytest.mark.parametrize("form", ["saf", "cloudevents", "cloudevents-structured"])
    def test_a_message_of_saf_comes_back_as_it_was_sent(
        self, app: Dsn, server: Any, billing: Dsn, form: Format
    ) -> None:
        columns = {
            "from_service": "shop", "to_service": "billing", "key": "A-1 ü", "message_type": "paid",
            "headers": json.dumps({"content-type": "application/json", "trace": " 7% ☃"}),
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
        receipts = forward(app, there=self.destination(server, form))
        assert not [receipt.error for receipt in receipts if receipt.error]
        source = self.source(server, self.topic_of_billing)
        read(source, billing)
        (found,) = arrived(billing)
        headers = found.pop("headers")
        assert found.pop("source") not in (None, broker_id)
        assert found == {
            "message_id": message_id,
            **{name: value for name, value in columns.items() if name != "headers"},
        }
        assert headers == {
            "content-type": "application/json", "trace": " 7% ☃", "saf-sent-by": str(broker_id)
        }  # fmt: skip
        assert read(source, billing).messages == 0

    def test_a_topic_is_read_in_order_and_once_over_many_turns(
        self, server: Any, billing: Dsn, add: Add
    ) -> None:
        source = self.source(server, chunk_rows=7)
        assert read(source, billing).chunks == 0  # the topic does not exist yet
        add(numbers(40))
        turn = read(source, billing)
        assert (turn.messages, turn.dropped) == (40, 0)
        assert read(source, billing).messages == 0
        add(numbers(20, 40))
        with reading(source, billing) as reader:
            assert reader.turn(lambda: False).messages == 20
            add(numbers(5, 60))
            assert reader.turn(lambda: False).messages == 5
        assert bodies(billing) == numbers(65)

    def test_a_server_that_is_killed_in_the_middle_loses_nothing_and_repeats_nothing(
        self, server: Any, billing: Dsn, add: Add
    ) -> None:
        source = self.source(server, chunk_rows=10)
        add(numbers(MANY))
        stopped = threading.Event()
        failures: list[BaseException] = []
        lost = 0

        def work() -> None:
            nonlocal lost
            with reading(source, billing) as reader:
                while not stopped.is_set():
                    try:
                        reader.turn(stopped.is_set)
                    except Unavailable:
                        lost += 1
                    except BaseException as error:
                        failures.append(error)
                        return

        thread = threading.Thread(target=work)
        thread.start()
        try:
            until(lambda: failures or len(bodies(billing)) > MANY // 10)
            with server.down():
                until(lambda: failures or lost)
            add(numbers(50, MANY))
            until(lambda: failures or len(bodies(billing)) >= MANY + 50, seconds=60)
        finally:
            stopped.set()
            thread.join()
        assert failures == []
        assert bodies(billing) == numbers(MANY + 50)

    @pytest.mark.slow
    def test_a_forwarder_that_is_killed_anywhere_is_continued_by_the_next_run(
        self, server: Any, billing: Dsn, add: Add, tmp_path: Path
    ) -> None:
        config = written_of(tmp_path / "saf.toml", billing, self.source(server, chunk_rows=10))
        count = 0
        for point in POINTS:
            add(numbers(50, count))
            count += 50
            killed = saf("forward", "--config", config, env={"SAF_FAILPOINT": point})
            assert killed.returncode != 0, point
        done = saf("forward", "--config", config)
        assert done.returncode == 0, done.stderr
        assert bodies(billing) == numbers(count)

    @pytest.mark.slow
    def test_it_is_listed_checked_and_measured(
        self, server: Any, billing: Dsn, add: Add, tmp_path: Path
    ) -> None:
        source = self.source(server)
        config = written_of(tmp_path / "saf.toml", billing, source)
        add(numbers(3))
        assert saf("source", "check", TOPIC, "--config", config).returncode == 0
        file = tmp_path / "metrics" / "saf.prom"
        file.parent.mkdir()
        done = saf("forward", "--metrics-textfile", file, "--config", config)
        assert done.returncode == 0, done.stderr
        assert "received 3 messages (payments: 3)" in done.stdout
        assert 'saf_source_messages_total{source="payments"} 3.0' in file.read_text()
        listed = json.loads(saf("source", "list", "--json", "--config", config).stdout)
        (found,) = listed["sources"]
        assert (found["kind"], found["pending"]) == (source.kind, 0)
        with billing.connect(role="metrics", autocommit=True) as connection:
            samples = asker(load(config))(connection, "mom")
        pending = [one for one in samples if one.metric is SOURCE_PENDING]
        assert [(one.labels, one.value) for one in pending] == [(("mom", TOPIC), 0.0)]
        status = saf("status", "--config", config).stdout
        assert f"source 'payments': {source.kind} topic {source.topic!r}" in status
        assert "source" not in saf("doctor", "--config", config).stdout
        done = saf("source", "forget", TOPIC, "--config", config)
        assert done.returncode == 0, done.stderr

    @pytest.mark.slow
    def test_a_topic_that_is_gone_is_refused_by_name(
        self, server: Any, billing: Dsn, add: Add, delete: Callable[[], object], tmp_path: Path
    ) -> None:
        config = written_of(tmp_path / "saf.toml", billing, self.source(server))
        add(numbers(3))
        assert saf("forward", "--config", config).returncode == 0
        delete()
        refused = saf("forward", "--config", config)
        assert refused.returncode == 2
        assert "was deleted or made again" in refused.stderr
        assert saf("source", "check", TOPIC, "--config", config).returncode == 1
        assert "was deleted or made again" in saf("doctor", "--config", config).stdout
        add(["new"])
        done = saf("source", "continue", TOPIC, "--from", "earliest", "--config", config)
        assert done.returncode == 0, done.stderr
        assert saf("forward", "--config", config).returncode == 0
        assert bodies(billing) == [*numbers(3), "new"]


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, first + count)]
