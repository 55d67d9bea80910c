"""Rounds to a queue instead of a MOM store: `python -m tests.crash --to redis`.

The queue's server is killed and started again with its data, stopped for a while, and its answers
are lost. There are no dialogs, which cannot go there, and no poison, because no constraint rejects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from saf.database import Dsn
from saf.destinations.redis import Redis
from saf.destinations.settings import DestinationSettings
from tests.crash.plan import QUALITIES, Fault, Plan, plan
from tests.crash.site import Site
from tests.lossy import Lossy
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


def plan_to(seed: int, number: int, kinds: tuple[str, ...] = FAULTS) -> Plan:
    """The plan of a round to a queue."""
    made = plan(seed, number, kinds)
    return replace(made, destinations=1, poison=0.0, spark=False, dialogs=False)


class LosesAnswers:
    """The proxy, as faults know it."""

    def __init__(self, port: int) -> None:
        self._lossy = Lossy(port)
        self.port = self._lossy.port

    def lose_answer(self, armed: bool = True) -> None:
        self._lossy.lose_answers_to(b"EVALSHA" if armed else b"")

    def close(self) -> None:
        self._lossy.close()


class RedisSite(Site):
    """With a Redis server, and a proxy in front of it."""

    def __enter__(self) -> RedisSite:
        super().__enter__()
        self.proxy.close()
        (self.folder / "redis").mkdir()
        self.queue = RedisServer(folder=self.folder / "redis")
        self.queue.start()
        self.proxy: Any = LosesAnswers(self.queue.port)
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
        return plan_to(seed, number, kinds or FAULTS)

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """Those of a queue, and those of any site."""
        return OF_QUEUES.get(kind) or super().fault(kind)

    def stores(self, plan: Plan) -> dict[str, Dsn]:  # noqa: ARG002 - there is none
        """No MOM store."""
        return {}

    def by_proxy(self, plan: Plan) -> Mapping[str, DestinationSettings]:  # noqa: ARG002 - one
        """The queue, under the name that the routes have."""
        return {"mom": Redis(server=f"redis://127.0.0.1:{self.proxy.port}/0", step_rows=7)}

    def prepare(self, plan: Plan) -> Dsn:
        """A fresh source, and a queue without anything."""
        self.queue.client().flushall()
        return super().prepare(plan)

    def arrived(self) -> Sequence[str]:
        """All bodies, each stream in its order."""
        client = self.queue.client(decode_responses=True)
        return [
            fields["body"]
            for service in QUALITIES
            for _, fields in client.xrange(f"{{saf}}:{service}")
        ]


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
}
