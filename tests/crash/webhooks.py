"""Rounds that go on to an endpoint: `python -m tests.crash --to http`.

Dispatchers send what the MOM store has to an endpoint that fails at random: it answers 5xx, answers
too late, takes a message and loses the answer, or is down for a while. Dispatchers are killed, and
stopped past their leases. What the endpoint has taken is compared with what the application has
sent: everything at least once, and the first time in the order of its key. There are no dialogs,
because nothing answers on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from saf.broker.services import create_subscription
from saf.database import Dsn, fetch
from saf.errors import Unavailable
from saf.receiving.dispatch import dispatcher as dispatching
from saf.receiving.dispatch import session
from saf.receiving.dispatch.dispatcher import Dispatcher, run
from saf.receiving.dispatch.settings import Endpoint
from tests.crash.forwarders import FASTER, LEASE_SECONDS, hurry
from tests.crash.plan import Fault, Plan, plan
from tests.crash.site import Site
from tests.endpoints import Got, Partner, Reply, serving

FAULTS = (
    "kill_dispatcher",
    "stop_dispatcher",
    "endpoint_down",
    "crash_mom",
    "terminate_mom",
    "kill_forwarder",
    "kill_dispatcher",
    "lose_answer",
    "endpoint_down",
    "disk_full",
    "crash_source",
)
SUBSCRIPTION = "everything"
DISPATCHERS = 2
TIMEOUT_SECONDS = 0.5
# what goes at least once may be stored more often
STORED = "SELECT count(DISTINCT message_id) FROM saf.inbox"


def plan_to(seed: int, number: int, kinds: tuple[str, ...] = FAULTS) -> Plan:
    """The plan of a round to an endpoint."""
    return replace(plan(seed, number, kinds), destinations=1, spark=False, dialogs=False)


@dataclass(kw_only=True)
class Flaky(Partner):
    """An endpoint that remembers the bodies that it has taken first, and fails at random."""

    taken: dict[str, str] = field(default_factory=dict)
    """Bodies by the ids of their messages, in the order in which they were taken."""
    is_down: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.answer, self.keeps = self.fail_or_take, False

    async def fail_or_take(self, got: Got) -> Reply:
        """Answer a request, somehow."""
        self.begun.clear()
        fate, taken = self.chance.random(), self.taken
        if self.is_down or fate < 0.03:
            return 503, {}, b"in maintenance"
        if fate < 0.05:
            return 500, {}, b"oops"
        if fate < 0.06:
            await asyncio.sleep(2 * TIMEOUT_SECONDS)
        taken.setdefault(got.id, got.body.decode())
        if fate < 0.08:
            await asyncio.sleep(2 * TIMEOUT_SECONDS)  # nobody hears the answer
        return 204, {}, b""


class WebhookSite(Site):
    """With an endpoint in this process."""

    def __enter__(self) -> WebhookSite:
        super().__enter__()
        self._stack = ExitStack()
        self.endpoint = Flaky()
        self._stack.enter_context(serving(self.endpoint))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()
        super().__exit__(kind, error, at)

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        return plan_to(seed, number, kinds or FAULTS)

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """Those of an endpoint and its dispatchers, and those of any site."""
        return OF_ENDPOINTS.get(kind) or super().fault(kind)

    def prepare(self, plan: Plan) -> Dsn:
        """Fresh databases, and an endpoint that has taken nothing."""
        app = super().prepare(plan)
        with self.mom.dsn("mom").connect(role="crash", autocommit=True) as connection:
            create_subscription(connection, SUBSCRIPTION, service=None)
        self.endpoint.taken = {}  # what is late of the round before goes nowhere
        self.endpoint.is_down = False
        return app

    def others(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """Dispatchers."""
        return [(dispatch, (self.mom.dsn("mom"), self.endpoint.url))] * DISPATCHERS

    def checked(self, plan: Plan) -> dict[str, Dsn]:  # noqa: ARG002 - for all plans
        """No store: what the endpoint has taken is looked at."""
        return {}

    def arrived(self) -> Sequence[str]:
        """All bodies, in the order in which they were first taken."""
        return list(self.endpoint.taken.values())

    def left(self) -> int:
        """How many messages are stored, and not taken."""
        with self.mom.dsn("mom").connect(role="crash", autocommit=True) as connection:
            ((stored,),) = fetch(connection, STORED)
        return int(stored) - len(self.endpoint.taken)


def dispatch(mom: Dsn, url: str) -> None:
    """Dispatch for ever, with everything that waits some times faster."""
    hurry()
    with Path(os.devnull).open("w") as nowhere:  # it logs each failure, and there are many
        os.dup2(nowhere.fileno(), 1)
    session.PROBE_SECONDS = TIMEOUT_SECONDS
    session.LOOK_SECONDS /= FASTER
    dispatching.RECONNECT_SECONDS /= FASTER
    endpoint = Endpoint(
        url=url,
        subscription=SUBSCRIPTION,
        max_in_flight=20,
        timeout_seconds=TIMEOUT_SECONDS,
        attempts=1000,
    )
    while True:
        with contextlib.suppress(Unavailable):
            run([Dispatcher("crash", endpoint, mom, lease_seconds=LEASE_SECONDS)])


def kill_dispatcher(round_: Any, fault: Fault) -> None:
    """In the middle of its requests; another one is started."""
    round_.again(round_.others, fault.target)


def stop_dispatcher(round_: Any, fault: Fault) -> None:
    """Past its lease; the other one takes over, and then it goes on."""
    stopped: BaseProcess = round_.others[fault.target % len(round_.others)][0]
    assert stopped.pid is not None
    with contextlib.suppress(ProcessLookupError):  # too young for a group of its own
        os.killpg(stopped.pid, signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + fault.lasts)
        os.killpg(stopped.pid, signal.SIGCONT)


def endpoint_down(round_: Any, fault: Fault) -> None:
    """It answers 503 to all."""
    round_.site.endpoint.is_down = True
    time.sleep(fault.lasts)
    round_.site.endpoint.is_down = False


OF_ENDPOINTS: Mapping[str, Callable[[Any, Fault], None]] = {
    "kill_dispatcher": kill_dispatcher,
    "stop_dispatcher": stop_dispatcher,
    "endpoint_down": endpoint_down,
}
