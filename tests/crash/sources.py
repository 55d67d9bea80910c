"""Rounds from a queue: `python -m tests.crash --from redis`, or another one.

The application's messages go to topics of a queue, and readers store the topics in the inbox of the
MOM store: PostgreSQL, a queue, PostgreSQL, with saf at both ends. Besides what goes wrong on the
way to a queue, readers are killed, and stopped past their leases, and so is the MOM store. At the
end, the inbox is compared with what the application has sent, and with the topics: what a topic
has, whether once or twice, is stored as often. A queue of RabbitMQ keeps nothing: what it had twice
is stored once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from saf.broker.services import create_subscription
from saf.config import Settings
from saf.database import Dsn
from saf.errors import SafError
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.forwarding.summary import Summary
from saf.sources.kafka import Kafka
from saf.sources.nats import Nats
from saf.sources.rabbitmq import Rabbitmq
from saf.sources.rabbitmq_stream import RabbitmqStream
from saf.sources.redis import Redis
from saf.sources.settings import SourceSettings
from tests.crash.checker import Verdict, check
from tests.crash.consumers import CONSUMED
from tests.crash.faults import stop_one
from tests.crash.forwarders import LEASE_SECONDS
from tests.crash.plan import OF_SOURCE, QUALITIES, Fault, Plan
from tests.crash.queues import (
    KafkaSite,
    NatsSite,
    QueueSite,
    RabbitmqSite,
    RabbitmqStreamSite,
    RedisSite,
    plan_to,
)
from tests.crash.stall import listen
from tests.kafka_server import KafkaQueue
from tests.rabbitmq_server import Queues

FAULTS = (
    "kill_reader",
    "crash_queue",
    "crash_mom",
    "stop_reader",
    "kill_forwarder",
    "terminate_mom",
    "freeze_queue",
    "kill_reader",
    "lose_answer",
    "crash_source",
    "disk_full",
    "stop_forwarder",
    "kill_writer",
)
READERS = 2
CONSUMED_EVERY = 2
"""In each round of so many, consumers receive what readers have stored."""
REFUSALS = frozenset({"SourceSetBack", "TopicMadeAgain", "RetentionPassed", "SourceChanged"})
STORED = """
SELECT to_service, convert_from(body, 'UTF8') FROM saf.inbox
UNION ALL
SELECT to_service, convert_from(body, 'UTF8') FROM saf.dead_letter
"""
COUNT = "SELECT (SELECT count(*) FROM saf.inbox) + (SELECT count(*) FROM saf.dead_letter)"


class SourceSite(QueueSite):
    """With readers, which store the queue's topics in the MOM store."""

    set_backs = OF_SOURCE  # of a queue that is set back, readers wait for an operator's decision

    def topic(self, service: str) -> SourceSettings:
        """The topic of a service as a source."""
        raise NotImplementedError

    @property
    def refused(self) -> Path:
        """File of what readers have refused to read: there is never a reason."""
        return self.folder / "refused"

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        made = plan_to(seed, number, kinds, faults=FAULTS, set_backs={})
        return replace(made, consumers=number % CONSUMED_EVERY == 0)

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """Those of readers, of a queue, and of any site."""
        return OF_READERS.get(kind) or super().fault(kind)

    def stores(self, plan: Plan) -> dict[str, Dsn]:  # noqa: ARG002 - for all plans
        """The MOM store that the readers fill."""
        return {"mom": self.mom.dsn("mom")}

    def prepare(self, plan: Plan) -> Dsn:
        """Fresh databases, and topics without anything."""
        self.refused.write_text("")
        app = super().prepare(plan)
        with self.mom.dsn("mom").connect(role="crash", autocommit=True) as connection:
            for service in {*QUALITIES} - (CONSUMED if plan.consumers else set()):
                create_subscription(connection, service, service=service)
        return app

    def others(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """Readers."""
        sources = {service: self.topic(service) for service in QUALITIES}
        return [(reader, (self.mom.dsn("mom"), sources, self.refused))] * READERS

    def arrived(self) -> Sequence[str]:
        """Nothing: what matters is in the MOM store."""
        return []

    def left(self) -> int:
        """How many messages of the topics are not stored."""
        had = sum(len(self.queue.entries(service)) for service in QUALITIES)
        with psycopg.connect(self.mom.dsn("mom").conninfo) as connection:
            ((stored,),) = connection.execute(COUNT).fetchall()
        return had - int(stored)

    def look(self, verdict: Verdict) -> None:
        """Add what is stored otherwise than the topics have it, and what readers have refused."""
        with psycopg.connect(self.mom.dsn("mom").conninfo) as connection:
            stored = Counter(connection.execute(STORED).fetchall())
        compare(self.expected(stored), stored, verdict)
        verdict.refused_wrongly += self.refused.read_text().splitlines()

    def expected(self, stored: Counter[Any]) -> Counter[Any]:  # noqa: ARG002 - for queues
        """What is to be stored: as much as the topics have."""
        return Counter(
            (service, fields["body"])
            for service in QUALITIES
            for fields in self.queue.entries(service)
        )


def compare(had: Counter[Any], stored: Counter[Any], verdict: Verdict) -> None:
    """Add what is stored less or more often than topics have it."""
    verdict.lost += [*(had - stored).elements()]
    verdict.duplicated += [*(stored - had).elements()]


class RedisSources(SourceSite, RedisSite):
    """From streams of a Redis server."""

    def topic(self, service: str) -> SourceSettings:
        return Redis(
            server=f"redis://127.0.0.1:{self.queue.port}/0",
            topic=f"{{saf}}:{service}",
            service=service,
            chunk_rows=7,
        )


class KafkaSources(SourceSite, KafkaSite):
    """From topics of a Kafka broker."""

    def topic(self, service: str) -> SourceSettings:
        assert isinstance(self.queue, KafkaQueue)
        settings = Kafka(
            brokers=self.queue.server.address,
            topic=f"{self.queue.prefix}.{service}",
            service=service,
            chunk_rows=7,
        )
        return settings.bounded(self.queue.settings().bounds)


class NatsSources(SourceSite, NatsSite):
    """From a stream of a NATS server."""

    def topic(self, service: str) -> SourceSettings:
        return Nats(
            server=f"nats://127.0.0.1:{self.queue.port}",
            topic=f"saf.{service}",
            service=service,
            chunk_rows=7,
        )


class RabbitmqStreamSources(SourceSite, RabbitmqStreamSite):
    """From streams of a RabbitMQ server."""

    def topic(self, service: str) -> SourceSettings:
        return RabbitmqStream(
            server=f"rabbitmq-stream://127.0.0.1:{self.queue.port}",
            topic=service,
            service=service,
            chunk_rows=7,
        )


class RabbitmqSources(SourceSite, RabbitmqSite):
    """From queues of a RabbitMQ server, which are empty once their messages are stored.

    So what is stored is compared with what the application has sent. Queues have some messages
    twice, and the inbox has each of them once: the window of ids recognises them.
    """

    def topic(self, service: str) -> SourceSettings:
        return Rabbitmq(
            server=f"amqp://127.0.0.1:{self.queue.port}",
            topic=service,
            service=service,
            chunk_rows=7,
        )

    def prepare(self, plan: Plan) -> Dsn:
        self.app = super().prepare(plan)
        return self.app

    def left(self) -> int:
        """How many messages wait in queues, or are promised and not stored."""
        assert isinstance(self.queue, Queues)
        if waiting := sum(map(self.queue.waiting, QUALITIES)):
            return waiting
        return len(check(self.app.conninfo, [self.mom.dsn("mom").conninfo], self.qualities).lost)

    def expected(self, stored: Counter[Any]) -> Counter[Any]:
        """Each stored message once; `left` has compared them with the application's."""
        return Counter({*stored})


SOURCES: Mapping[str, type[SourceSite]] = {
    "redis": RedisSources,
    "kafka": KafkaSources,
    "nats": NatsSources,
    "rabbitmq": RabbitmqSources,
    "rabbitmq_stream": RabbitmqStreamSources,
}


def reader(mom: Dsn, sources: Mapping[str, SourceSettings], refused: Path) -> None:
    """Loop a forwarder that has nothing but sources."""
    listen()
    with Path(os.devnull).open("w") as nowhere:  # it logs each failure, and there are many
        os.dup2(nowhere.fileno(), 1)
    settings = Settings.model_validate(
        {
            "destinations": {"mom": {"dsn": mom.conninfo}},
            "sources": sources,
            "forwarder": {"lease_seconds": LEASE_SECONDS, "interval_seconds": 0.1},
        }
    )

    def report(summary: Summary) -> None:
        if lines := [one["error"] for one in summary.problems if one["kind"] in REFUSALS]:
            with refused.open("a") as file:
                file.writelines(f"{' '.join(line.split())}\n" for line in lines)

    while True:
        with contextlib.suppress(SafError):
            Forwarder(settings, InProcess()).loop(report)
        time.sleep(0.05)


def kill_reader(round_: Any, fault: Fault) -> None:
    """While it reads or stores; another one is started."""
    round_.again(round_.others, fault.target)


def stop_reader(round_: Any, fault: Fault) -> None:
    """Past its lease; the other one takes over, and then it goes on."""
    stop_one(round_.others, fault)


OF_READERS: dict[str, Callable[[Any, Fault], None]] = {
    "kill_reader": kill_reader,
    "stop_reader": stop_reader,
}
