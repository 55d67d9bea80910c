"""Rounds to a queue instead of a MOM store: `python -m tests.crash --to redis`, or another one.

The queue's server is killed and started again with its data, stopped for a while, and its answers
are lost. There are no dialogs, which cannot go there, and no poison, because no constraint rejects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from saf.database import Dsn
from saf.destinations.nats import Nats
from saf.destinations.rabbitmq import Rabbitmq
from saf.destinations.rabbitmq_stream import RabbitmqStream
from saf.destinations.redis import Redis
from saf.destinations.settings import DestinationSettings
from tests.crash.folders import FolderSite, back_up, set_back
from tests.crash.plan import OF_SOURCE, QUALITIES, Fault, Plan, plan, visited
from tests.crash.plan import set_back as perhaps_set_back
from tests.crash.site import Site
from tests.kafka_server import ENDS, KafkaQueue, KafkaServer, LossyKafka
from tests.lossy import Lossy
from tests.nats_server import NatsServer
from tests.queue_suite import Server
from tests.rabbitmq_server import Queues, RabbitmqServer
from tests.redis_server import RedisServer

FAULTS = (
    "kill_forwarder",
    "crash_queue",
    "lose_answer",
    "stop_forwarder",
    "crash_source",
    "freeze_queue",
    "kill_writer",
    "crash_queue",
    "terminate_source",
    "lose_answer",
    "route_gone",
)

SET_BACKS = {**OF_SOURCE, "set_back_queue": "back_up_queue"}
"""What may be set back, and what has to come before."""


def plan_to(
    seed: int,
    number: int,
    kinds: tuple[str, ...],
    faults: tuple[str, ...] = FAULTS,
    set_backs: Mapping[str, str] = SET_BACKS,
) -> Plan:
    """The plan of a round to a queue; with ``kinds``, of these faults and no other."""
    made = plan(seed, number, kinds or faults)
    made = replace(made, destinations=1, poison=0.0, spark=False, dialogs=False)
    return made if kinds else visited(perhaps_set_back(made, set_backs) if set_backs else made)


class LosesAnswers:
    """The proxy, as faults know it."""

    def __init__(self, lossy: Lossy, request: bytes) -> None:
        self._lossy = lossy
        self._request = request
        self.port = self._lossy.port

    def lose_answer(self, armed: bool = True) -> None:
        self._lossy.lose_answers_to(self._request if armed else b"")

    def close(self) -> None:
        self._lossy.close()


class QueueSite(FolderSite):
    """With a queue's server, and a proxy in front of it. A subclass knows the queue."""

    request: bytes
    """What stands in the request that stores."""
    queue: Server
    set_backs: Mapping[str, str] = SET_BACKS

    @property
    def kept(self) -> Path:
        """The server's folder."""
        return self.folder / "queue"

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """The server is down meanwhile."""
        with self.queue.down():
            yield

    def server(self, folder: Path) -> Server:
        """The server, not started."""
        raise NotImplementedError

    def at(self, port: int) -> DestinationSettings:
        """The server at a port as a destination, which stores a few messages at a time."""
        raise NotImplementedError

    def lossy(self, port: int) -> Lossy:
        """A proxy in front of the server."""
        return Lossy(port)

    def __enter__(self) -> QueueSite:
        super().__enter__()
        self.proxy.close()
        self.kept.mkdir()
        self.queue = self.server(self.kept)
        self.queue.start()
        self.proxy: Any = LosesAnswers(self.lossy(self.queue.port), self.request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.queue.kill()
        super().__exit__(kind, error, at)

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        return plan_to(seed, number, kinds, set_backs=self.set_backs)

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """Those of a queue, and those of any site."""
        return OF_QUEUES.get(kind) or super().fault(kind)

    def stores(self, plan: Plan) -> dict[str, Dsn]:  # noqa: ARG002 - there is none
        """No MOM store."""
        return {}

    def by_proxy(self, plan: Plan) -> Mapping[str, DestinationSettings]:  # noqa: ARG002 - one
        """The queue, under the name that the routes have."""
        return {"mom": self.at(self.proxy.port)}

    def prepare(self, plan: Plan) -> Dsn:
        """A fresh source, and a queue without anything."""
        self.queue.empty()
        self.forget_copy()
        return super().prepare(plan)

    def arrived(self) -> Sequence[str]:
        """All bodies, each topic in its order."""
        return [fields["body"] for service in QUALITIES for fields in self.queue.entries(service)]


class RedisSite(QueueSite):
    """With a Redis server."""

    request = b"EVALSHA"

    def server(self, folder: Path) -> Server:
        return RedisServer(folder=folder)

    def at(self, port: int) -> DestinationSettings:
        return Redis(server=f"redis://127.0.0.1:{port}/0", step_rows=7)


class NatsSite(QueueSite):
    """With a NATS server."""

    request = b"Nats-Batch-Commit"

    def server(self, folder: Path) -> Server:
        return NatsServer(folder=folder)

    def at(self, port: int) -> DestinationSettings:
        return Nats(server=f"nats://127.0.0.1:{port}", step_rows=7)


class KafkaSite(QueueSite):
    """With a Kafka broker."""

    request = ENDS

    def lossy(self, port: int) -> Lossy:
        return LossyKafka(port)

    def server(self, folder: Path) -> Server:
        return KafkaQueue(server=KafkaServer(folder=folder))

    def at(self, port: int) -> DestinationSettings:
        assert isinstance(self.queue, KafkaQueue)
        return self.queue.settings(brokers=f"127.0.0.1:{port}", step_rows=7)

    def prepare(self, plan: Plan) -> Dsn:
        """With topics of other names, because Kafka deletes topics in its own time."""
        assert isinstance(self.queue, KafkaQueue)
        self.queue.prefix = KafkaQueue(server=self.queue.server).prefix
        return super().prepare(plan)


class RabbitmqStreamSite(QueueSite):
    """With streams of a RabbitMQ server."""

    request = b"saf-created-at"

    def server(self, folder: Path) -> Server:
        return RabbitmqServer(folder=folder)

    def at(self, port: int) -> DestinationSettings:
        return RabbitmqStream(server=f"rabbitmq-stream://127.0.0.1:{port}", step_rows=7)


class RabbitmqSite(QueueSite):
    """With queues of a RabbitMQ server, which store at least once."""

    request = b"saf-created-at"
    qualities: ClassVar[Mapping[str, str]] = {
        service: "at_least_once" if quality == "exactly_once" else quality
        for service, quality in QUALITIES.items()
    }
    notices = False
    set_backs = OF_SOURCE  # its queues keep no marks

    def server(self, folder: Path) -> Server:
        return Queues(server=RabbitmqServer(folder=folder), topics=tuple(QUALITIES))

    def at(self, port: int) -> DestinationSettings:
        return Rabbitmq(server=f"amqp://127.0.0.1:{port}", step_rows=7)


QUEUES: Mapping[str, type[Site]] = {
    "redis": RedisSite,
    "nats": NatsSite,
    "kafka": KafkaSite,
    "rabbitmq": RabbitmqSite,
    "rabbitmq_stream": RabbitmqStreamSite,
}


def crash_queue(round_: Any, fault: Fault) -> None:
    """Killed; it comes back with its data."""
    round_.site.queue.kill()
    time.sleep(fault.lasts)
    round_.site.queue.start()


def freeze_queue(round_: Any, fault: Fault) -> None:
    """Stopped where it is; then it goes on."""
    round_.site.queue.freeze()
    time.sleep(fault.lasts)
    round_.site.queue.thaw()


OF_QUEUES: Mapping[str, Callable[[Any, Fault], None]] = {
    "crash_queue": crash_queue,
    "freeze_queue": freeze_queue,
    "back_up_queue": back_up,
    "set_back_queue": set_back,
}
