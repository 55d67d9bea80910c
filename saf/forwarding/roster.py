"""The roster: the source brokers of a run, each served in a thread of `BrokerThreads`.

A broker that fails is a problem of this cycle, and is tried again after 1, 2, 4, … 32 times
``interval_seconds``; a run that only drains does not try it again. Fleets are asked again as
`saf.operating.places` describes. Of two brokers with the same broker_id, one is a copy: the copy is
not forwarded, and neither is if the roster cannot tell which is the copy.

*Connections.* The driver stays connected to a broker, because a member of a subscription is a
session. With more brokers than ``max_sessions``, it connects to each in turn, and stays only for
the cycle in which there is something to forward: it is never connected to more than
``max_sessions`` brokers at the same time.

*Slow databases.* No database delays another. Each has one action at a time, and the roster does not
wait for a database that takes longer than all others. A database that does not answer uses
``connect_timeout`` of its own thread, and of nothing else. Its late answer is taken later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from uuid import UUID

import psycopg

from saf.config import Broker, Fleet, Settings
from saf.database import Dsn
from saf.destinations.identities import Identities
from saf.engine.work import Receipt, Work
from saf.errors import Fenced, MemberMissing, SafError, SameBroker, SchemaMissing, Unexpected
from saf.forwarding.broker import Here, SourceBroker, Visit
from saf.log.pauses import Pauses
from saf.operating.places import Candidate, Listing, Member, ask, memory, missing
from saf.setaside.parking import wait_seconds
from saf.telemetry.logger import Log

T = TypeVar("T")

log = Log("saf.forward")

THREADS = 64
"""Brokers that are served at a time."""
LONGEST_WAIT = 32
NEVER = float("inf")

PATIENCE_SECONDS = 1.0
"""Seconds without any result after which slow databases are no longer waited for."""


class Roster:
    """All source brokers, including those of fleets.

    ``problem`` is called with each failure and its place; ``left``, with a database that is no
    longer a source. With ``once``, for a run that ends when everything is drained, a broker that
    has nothing more, or has failed, is not visited again.
    """

    def __init__(
        self,
        settings: Settings,
        problem: Callable[[str, SafError], None],
        left: Callable[[Dsn], None],
    ) -> None:
        self.options = settings.forwarder
        self.once = True
        self.stopped = False
        """Whether to stop waiting for brokers."""
        self.skipped = False
        """Whether some brokers were not visited, because all connections or threads were in use."""
        self.brokers: dict[str, SourceBroker] = {}
        self.watch: Callable[[int, int], object] = lambda *_: None
        """With ``once``, called with the number of brokers that were visited, and of all."""
        self._visited: set[str] = set()
        self._problem = problem
        self._left = left
        self._threads = BrokerThreads(min(THREADS, self.options.max_sessions))
        self._fleets = settings.fleets
        self._declared = settings.declared
        self._identities = Identities(settings.destinations)
        self._ask_at = dict.fromkeys(settings.fleets, 0.0)
        self._listed: dict[str, dict[str, Broker]] = {"": dict(settings.brokers)}
        self._memory = memory(settings)
        self._met: dict[str, Member] = {}
        """The members of fleets that this run has met."""
        self._remembered: set[Member] = set()
        self._heard = False
        """Whether a fleet has answered since brokers were last added and removed."""
        self._visit_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._pauses: defaultdict[str, Pauses] = defaultdict(Pauses)
        self._sessions: set[str] = set()
        """The brokers that may be connected."""
        self._found: list[Work] = []
        """Work that was found and not returned yet."""
        self.here: Here | None = None
        """How visits forward little work; None: they leave it to the runner."""
        self._forwarded: list[tuple[Work, list[Receipt]]] = []
        self._enlist()

    @property
    def brief(self) -> bool:
        """Whether there are too many brokers to stay connected to all."""
        return len(self.brokers) > self.options.max_sessions

    @property
    def waiting(self) -> bool:
        """Whether any broker has not been asked, or has not answered yet, or too late."""
        return self.skipped or bool(self._threads.busy or self._found)

    def visit(
        self, default_destination: str | None, but: Collection[SourceBroker] = ()
    ) -> list[Work]:
        """Return the work at brokers that answer in time; ``but`` some that have running tasks.

        Work of brokers that answer later is returned by a later visit.
        """
        if not but:
            self._refresh()
        now, brief, late = time.monotonic(), self.brief, self._late

        def on_result(broker: SourceBroker, visit: Visit) -> None:
            self._failures.pop(broker.name, None)
            self._meet(broker)
            self._note_visit(broker.name)
            if visit.work or visit.forwarded:
                self._pauses[broker.name].end()
                self._visit_at.pop(broker.name, None)
            else:
                self._visit_at[broker.name] = NEVER if self.once else self._next_visit(broker)
            self._found.extend(visit.work)
            if visit.forwarded is not None:
                self._forwarded.append(visit.forwarded)

        left = [
            broker
            for name, broker in self.brokers.items()
            if self._visit_at.get(name, 0.0) <= now
            and name not in self._threads.busy
            and name not in late
            and broker not in but
        ]
        # taken from the end: brokers that have waited longest come first, those that fail come last
        left.sort(key=lambda b: (-self._failures.get(b.name, 0), -b.last_turn))
        while left and (self._may_connect(left[-1]) or self._threads.take_results()):
            if self._may_connect(left[-1]):
                broker = left.pop()
                job = partial(
                    broker.visit,
                    default_destination,
                    brief=brief,
                    here=self.here,
                )
                self._start(broker, job, partial(on_result, broker))
        self.skipped = bool(left)
        self._threads.finish(set(self.brokers))
        while self.once and not (self._found or but or self.stopped) and self._threads.busy:
            self._threads.take_results()  # nothing else to do
        found, self._found = self._without_copies(self._found), []
        return found

    def _without_copies(self, found: list[Work]) -> list[Work]:
        """Leave out work of brokers that have another's broker_id: one is a copy of the other.

        Of two databases of one cluster, the copy was created later. Of two clusters, either may be
        the copy, so neither is forwarded.
        """
        met = [broker for broker in self.brokers.values() if broker.place is not None]
        originals: dict[UUID, SourceBroker] = {}
        copies: dict[str, SourceBroker] = {}
        for broker in sorted(met, key=_created):
            assert broker.place is not None  # noqa: S101 - for the type checker
            original = originals.setdefault(broker.place.broker_id, broker)
            if original.place is None or broker.place.database == original.place.database:
                continue
            copies[broker.name] = original
            if broker.place.system_identifier != original.place.system_identifier:
                copies.setdefault(original.name, broker)
        for name, original in copies.items():
            broker = self.brokers[name]
            if broker.place is not None and name not in self._threads.busy:
                self._problem(name, SameBroker(name, original.name, broker.place.broker_id))
                broker.leave()
                broker.place = None  # asked again at the next visit
                self._count(broker)
                self.failed(name)
        return [item for item in found if item.broker not in copies]

    def take_forwarded(self) -> list[tuple[Work, list[Receipt]]]:
        """Return the work that visits have forwarded since the last call, with its receipts."""
        forwarded, self._forwarded = self._forwarded, []
        return forwarded

    @property
    def rest_seconds(self) -> float:
        """Time until the next visit of a broker is due, in seconds; at most the interval."""
        due = min(
            (
                self._visit_at.get(name, 0.0)
                for name in self.brokers
                if name not in self._threads.busy
            ),
            default=NEVER,
        )
        return max(0.0, min(due - time.monotonic(), self.options.interval_seconds))

    def _next_visit(self, broker: SourceBroker) -> float:
        now, interval = time.monotonic(), self.options.interval_seconds
        pause = self._pauses[broker.name].next(interval)
        # all that have been quiet for long are visited together: the driver wakes up once for them
        at = now + pause if pause < interval else now - now % interval + interval
        return at if broker.due_in is None else min(at, now + broker.due_in)

    def give_back(self, work: Iterable[Work]) -> None:
        """Keep work for the next visit, because all slots are taken now."""
        self._found.extend(work)

    def each(
        self,
        action: Callable[[SourceBroker], Any],
        brokers: Iterable[SourceBroker],
        *,
        quiet: bool = False,
    ) -> None:
        """Call ``action`` for those brokers that are free, and wait until most have done it.

        A failure is a problem; with ``quiet``, it is a line in the log.
        """
        names = set()
        self._threads.take_results(0)  # who has answered since is free
        for broker in brokers:
            if broker.name not in self._threads.busy:
                names.add(broker.name)
                self._start(broker, partial(action, broker), lambda _: None, quiet=quiet)
        self._threads.finish(names)

    def well(self) -> list[SourceBroker]:
        """Return the brokers that answered when they were last asked."""
        return [broker for broker in self.brokers.values() if self._is_well(broker)]

    @property
    def all_well(self) -> bool:
        """Whether there are brokers, and all have answered when they were last asked."""
        return 0 < len(self.brokers) == len(self.well())

    def failed(self, name: str) -> None:
        """Skip a broker for a while, because nothing more can be done for it now."""
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        seconds = wait_seconds(failures, 1, LONGEST_WAIT) * self.options.interval_seconds
        self._visit_at[name] = NEVER if self.once else time.monotonic() + seconds
        self._note_visit(name)

    def rest(self, but: Collection[SourceBroker] = ()) -> None:
        """If there are too many brokers to stay connected, disconnect; ``but`` from some at
        work."""
        if self.brief:
            late = self._late
            done = [
                broker
                for name, broker in self.brokers.items()
                if broker.connected and broker not in but and name not in late
            ]
            self.each(SourceBroker.leave, done)

    def leave(self) -> None:
        """Leave all brokers, without waiting for those that do not answer."""
        try:
            self._remember(self._met.values())
        except (SafError, psycopg.Error) as error:
            log.warning("members_not_remembered", error=str(error))
        self.each(SourceBroker.leave, [b for b in self.brokers.values() if b.connected], quiet=True)
        self._threads.dismiss(
            lambda name: self.brokers[name].leave() if name in self.brokers else None
        )

    @property
    def _late(self) -> set[str]:
        """The brokers with work that was not returned yet."""
        return {item.broker for item in self._found}

    def _refresh(self) -> None:
        """Ask the fleets that are due for their brokers."""
        for name, fleet in self._fleets.items():
            key = f"fleet {name}"
            if key in self._threads.busy or time.monotonic() < self._ask_at[name]:
                continue
            self._ask_at[name] = NEVER if self.once else time.monotonic() + fleet.refresh_seconds
            failed = partial(self._problem, name)
            question = partial(self._listed_by, name, fleet, [*self._met.values()])
            self._threads.start(key, question, partial(self._hears, name), failed)
        asked = {f"fleet {name}" for name in self._fleets}
        while not self._threads.finish(asked) and self.once and not self.stopped:
            pass
        if self._heard:
            self._heard = False
            self._enlist()

    def _note_visit(self, name: str) -> None:
        """Note that a broker has answered, or failed."""
        if self.once and name not in self._visited:
            self._visited.add(name)
            self.watch(len(self._visited & self.brokers.keys()), len(self.brokers))

    def _meet(self, broker: SourceBroker) -> None:
        """Note that a member of a fleet was met."""
        fleet, _, rest = broker.name.partition("/")
        if rest and broker.name in self._listed.get(fleet, {}):
            broker_id = broker.place.broker_id if broker.place is not None else None
            self._met[broker.name] = Member(fleet=fleet, name=broker.name, broker_id=broker_id)

    def _listed_by(self, name: str, fleet: Fleet, met: Sequence[Member]) -> Listing:
        """Ask a fleet for its members; a member that was met before and is missing is a problem.

        Called in a thread. If the store that remembers the members does not answer, use those that
        this run has met.
        """
        listing = ask(name, fleet)
        known = [member for member in met if member.fleet == name]
        gone = missing(known, listing.brokers)
        try:
            if self._memory is not None:
                self._remember(met)
                gone = missing(self._memory.known([name]), listing.brokers)
                self._memory.note_missing(name, [member.name for member in gone])
        except (SafError, psycopg.Error) as error:
            log.warning("members_not_remembered", fleet=name, error=str(error))
        listing.problems += [
            (name, MemberMissing(name, member.name, closed=member.name in listing.closed))
            for member in gone
        ]
        return listing

    def _remember(self, met: Iterable[Member]) -> None:
        """Let the store remember members that this run has met."""
        new = {*met} - self._remembered
        if new and self._memory is not None:
            self._memory.meet(new)
            self._remembered |= new

    def _hears(self, fleet: str, listing: Listing) -> None:
        """Note the members of a fleet; a member that leaves may have tasks until the next cycle."""
        for name, error in listing.problems:
            self._problem(name, error)
        self._listed[fleet] = listing.brokers
        self._heard = True

    def _enlist(self) -> None:
        """Add new brokers, and remove those that are gone or have moved."""
        wanted = {name: new for listed in self._listed.values() for name, new in listed.items()}
        for name, broker in list(self.brokers.items()):
            entry = wanted.get(name)
            if (entry is None or entry.dsn != broker.dsn) and name not in self._threads.busy:
                broker.leave()
                self._left(broker.dsn)
                self._count(broker)
                del self.brokers[name]
                self._found = [item for item in self._found if item.broker != name]
                self._failures.pop(name, None)
                self._pauses.pop(name, None)
                self._visit_at.pop(name, None)
            if isinstance(entry, Candidate) and self._visit_at.get(name) == NEVER:
                del self._visit_at[name]
        for name, new in wanted.items():
            if name not in self.brokers:
                limit = new.max_connections or self.options.max_connections
                self.brokers[name] = SourceBroker(
                    name,
                    new.dsn,
                    lease_seconds=self.options.lease_seconds,
                    max_connections=limit,
                    declared=self._declared,
                    identities=self._identities,
                )

    def _start(
        self,
        broker: SourceBroker,
        action: Callable[[], Any],
        on_result: Callable[[Any], None],
        *,
        quiet: bool = False,
    ) -> None:
        def answered(result: Any) -> None:
            self._count(broker)
            on_result(result)

        def failed(error: SafError) -> None:
            self._count(broker)
            self._fails(broker, error, quiet=quiet)

        self._sessions.add(broker.name)
        self._threads.start(broker.name, action, answered, failed)

    def _count(self, broker: SourceBroker) -> None:
        if not broker.connected:
            self._sessions.discard(broker.name)

    def _may_connect(self, broker: SourceBroker) -> bool:
        """Whether a thread is free, and one more connection stays within ``max_sessions``."""
        if self._threads.full or broker.name in self._threads.busy:
            return False
        room = not self.brief or len(self._sessions) < self.options.max_sessions
        return room or broker.name in self._sessions

    def _is_well(self, broker: SourceBroker) -> bool:
        return broker.name not in self._threads.busy and not self._failures.get(broker.name)

    def _fails(self, broker: SourceBroker, error: SafError, *, quiet: bool) -> None:
        if isinstance(error, Fenced):
            log.info("taken_over", broker=broker.name, detail=str(error))
            return
        if quiet:
            log.warning("unavailable", broker=broker.name, error=str(error))
            return
        broker.forget_connection()
        self._count(broker)
        self.failed(broker.name)
        fleet = self._listed.get(broker.name.partition("/")[0], {})
        if isinstance(error, SchemaMissing) and isinstance(fleet.get(broker.name), Candidate):
            self._visit_at[broker.name] = NEVER  # not a broker, or not yet
            return
        self._problem(broker.name, error)


def _created(broker: SourceBroker) -> tuple[int, int, str]:
    """Return the key by which brokers are sorted: those of one cluster by creation."""
    cluster, oid = broker.place.database if broker.place is not None else (0, 0)
    return cluster, oid, broker.name


class BrokerThreads:
    """A number of threads, and the databases that they serve, each with one action at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="saf-broker")
        self._jobs: dict[Future[Any], tuple[str, Callable[[Any], None], Callable[[Any], None]]] = {}
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self.busy: set[str] = set()
        """The databases that have not answered yet."""

    @property
    def full(self) -> bool:
        """Whether every thread is busy."""
        return len(self.busy) >= self.threads

    def start(
        self,
        name: str,
        action: Callable[[], T],
        on_result: Callable[[T], None],
        on_failure: Callable[[SafError], None],
    ) -> None:
        """Run ``action`` in a thread; `take_results` calls ``on_result`` or ``on_failure``."""
        self.busy.add(name)
        job = self._pool.submit(action)
        self._jobs[job] = (name, on_result, on_failure)
        job.add_done_callback(self._done.put)

    def take_results(self, timeout: float = PATIENCE_SECONDS) -> bool:
        """Take all results so far, or wait for the first; return False if none comes in time."""
        done = []
        try:
            done.append(self._done.get(timeout=timeout if self._jobs else 0))
            while True:
                done.append(self._done.get_nowait())
        except Empty:
            pass
        for job in done:
            name, on_result, on_failure = self._jobs.pop(job)
            self.busy.discard(name)
            try:
                result = job.result()
            except SafError as error:
                on_failure(error)
            except Exception as error:  # any error concerns one database only
                on_failure(Unexpected(name, error))
            else:
                on_result(result)
        return bool(done)

    def finish(self, names: set[str]) -> bool:
        """Take the results of all these; return False if some databases are no longer waited
        for."""
        while self.busy & names:
            if not self.take_results():
                return False
        return True

    def dismiss(self, last: Callable[[str], None]) -> None:
        """Take no more work; a thread that is still busy runs ``last`` afterwards."""
        for job, (name, *_) in self._jobs.items():
            job.add_done_callback(partial(_afterwards, last, name))
        self._pool.shutdown(wait=False, cancel_futures=True)


def _afterwards(last: Callable[[str], None], name: str, _: Future[Any]) -> None:
    last(name)
