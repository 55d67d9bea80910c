"""Bounds: the longest waits in saf's own sessions, on the server's side and on the client's.

A machine may vanish, a lock may never be released, a server process may be stopped. None of these
may block saf without end. Each of saf's own sessions has bounds, by its purpose:

    lock        how long a statement waits for a lock
    statement   how long a statement takes altogether
    idle        how long a transaction may idle between two statements, so that a client that is
                stopped in mid-transaction releases its locks; from PostgreSQL 17 on, the
                transaction also ends after one such time plus one statement's
    answer      how long the client waits for a server that sends nothing, a little longer than the
                server needs to report one of its own bounds above

Client and server both notice within ``network_seconds`` that the other's machine has vanished. A
bound applies to a statement, never to a backlog: a large backlog takes many statements.

Some sessions run the statements of an application, a consumer or a test (`THEIRS`), which set their
own bounds. Even in them, a receiver waits for a lock on saf's tables no longer than
``lock_seconds`` (`saf.receiving.claim.begin`).

A server process may be stopped, or its disk may hang. Then its connection stays, its machine still
acknowledges packets, and its own timeouts do not fire. Its client would wait without end, inside a
C library. So one thread of each process watches the calls in `answer_within`, and cuts the
connection of a call that has waited too long. The library then reports that the connection was
lost. A cut that fails for lack of file descriptors is tried again.

`while_unavailable` retries a call while a service does not answer. No other module uses tenacity.
Neither a server that hangs nor one that refuses a login is retried.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from psycopg import sql

from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    import tenacity

GRACE_SECONDS = 5.0
"""Maximum seconds that the client waits longer than the server's own bound. In that time, the
server can report the bound itself.
"""

# For a session whose transactions may otherwise idle longer
IDLE_NO_LONGER = """
SELECT set_config('idle_in_transaction_session_timeout', longest, true)
FROM current_setting('lock_timeout') AS longest WHERE longest <> '0'
"""
"""SQL: until its end, this transaction may idle no longer than others wait for its locks."""

PROBES = 3
"""Keepalives in a row that may go unanswered."""

DOCTORS_LOCK_SECONDS = 2.0
"""The doctor's bound for a lock, in seconds: each of its many queries may meet the same lock."""

METRICS_SECONDS = 5.0
"""The exporter's bound for a statement, in seconds: Prometheus waits 10 s for a scrape."""


PAGE_SECONDS = 2.0
"""The dashboard's bound for a statement, in seconds: nobody waits longer for a page."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The table ``[bounds]`` of saf.toml, in seconds."""

    network_seconds: float = 30.0
    """Time without acknowledgement from a host after which a connection counts as lost."""
    lock_seconds: float = 10.0
    """Time limit of a statement that waits for a lock."""
    statement_seconds: float = 60.0
    """Time limit of a statement that reads or writes little."""
    chunk_seconds: float = 300.0
    """Time limit of storing or reading one chunk of messages."""
    long_seconds: float = 3600.0
    """Time limit of a statement that reads a whole log."""

    def of(self, role: str) -> Limits | None:
        """Return the bounds for the sessions of a role; None for the sessions of `THEIRS`."""
        if role in THEIRS:
            return None
        lock, brief, long = self.lock_seconds, self.statement_seconds, self.long_seconds
        limits = self._limits(lock, brief, idle=brief)
        if role == "doctor":
            limits = self._limits(min(lock, DOCTORS_LOCK_SECONDS), brief, idle=brief)
        elif role == "metrics":
            limits = self._limits(
                min(lock, DOCTORS_LOCK_SECONDS), min(brief, METRICS_SECONDS), idle=brief
            )
        elif role == "ui":
            limits = self._limits(min(lock, PAGE_SECONDS), min(brief, PAGE_SECONDS), idle=brief)
        elif role in AT_SOURCE:
            limits = self._limits(lock, brief, idle=min(lock, brief))
        elif role in ("deliver", "dispatch"):
            limits = self._limits(lock, self.chunk_seconds, idle=brief)
        elif role == "read":
            # a batch is one statement, which waits while its messages are delivered
            limits = self._limits(lock, long, idle=long, answer=self.chunk_seconds)
        elif role in LONG:
            limits = self._limits(lock, long, idle=long)
        elif role in ENDLESS:
            # a rollback after an hour would waste all of the work
            limits = self._limits(max(lock, brief), None, idle=long)
        return replace(limits, unread=long) if role in SLOW_READERS else limits

    def _limits(
        self, lock: float, statement: float | None, *, idle: float, answer: float | None = None
    ) -> Limits:
        longest = answer or statement
        return Limits(
            network=self.network_seconds,
            lock=lock,
            statement=statement,
            idle=idle,
            answer=None if longest is None else longest + min(longest, GRACE_SECONDS),
            transaction=None if answer or statement is None else statement + idle,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one session, in seconds."""

    network: float
    lock: float
    statement: float | None
    """The bound of a statement; None: unlimited."""
    idle: float
    answer: float | None
    """The bound of an answer; None: the client waits as long as the server's machine responds."""
    transaction: float | None
    unread: float | None = None
    """How long the client may leave an answer unread; None: as long as the network's bound."""

    def setting(self, of_process: int | None = None) -> str:
        """Return the statement that sets these bounds at the server, until the session ends.

        ``of_process`` is the id of a process of the server. If another process answers, as behind a
        pooler, the statement sets nothing and returns no row.
        """
        query = SET if of_process is None else SET + HERE
        values = {name: sql.Literal(str(value)) for name, value in self._settings().items()}
        return sql.SQL(query).format(pid=sql.Literal(of_process), **values).as_string(None)

    def conninfo(self) -> dict[str, int]:
        """Return libpq's parameters for the client's side of the bounds."""
        return network(self.network)

    def _settings(self) -> dict[str, int]:
        options = network(self.network)
        return {
            "lock": _milliseconds(self.lock),
            "statement": _milliseconds(self.statement),
            "idle": _milliseconds(self.idle),
            "transaction": _milliseconds(self.transaction),
            # it also ends connections of live clients that have not read for this long
            "user_timeout": _milliseconds(self.unread or self.network),
            "keepalives_idle": options["keepalives_idle"],
            "keepalives_interval": options["keepalives_interval"],
            "keepalives_count": options["keepalives_count"],
            "check": _milliseconds(self.network / PROBES),
        }


THEIRS = frozenset({"receive", "engine", "test", "demo", "application"})
"""Roles whose transactions belong to an application, a consumer or a test."""

AT_SOURCE = frozenset({"forward", "mark"})
"""Roles of forwarders at a source. Their transactions lock rows that all other members need to
share the shards, so no transaction may idle longer than the others wait for it.
"""

LONG = frozenset({"purge", "archive", "reconcile", "replay", "dead", "watch", "count"})
"""Roles whose statements read a whole log or batch, or everything that was set aside."""

SLOW_READERS = frozenset({"read", "archive"})
"""Roles that read a batch or a slot, with long work between the parts that they have read."""

ENDLESS = frozenset({"rebase", "migrate", "sink"})
"""Roles whose one transaction covers everything, while an operator or a job waits for it."""

# The policies of `saf sender` restrict who sends as which service, and hide nothing; a policy
# beside them may hide rows. NULL if no table of saf's has row-level security.
ONLY_SENDERS = """
SELECT bool_and(relname = 'outbox' AND ARRAY(
    SELECT polname || ':' || coalesce(pg_get_expr(polqual, polrelid), '')
    FROM pg_policy WHERE polrelid = c.oid ORDER BY 1) = '{{outbox_read:true,outbox_sender:}}')
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'saf' AND relrowsecurity
"""

# Each setting holds until the session ends. Settings that a server lacks are skipped: before 17
# transaction_timeout does not exist, and on Windows a busy server cannot notice that its client is
# gone. JIT is off: the planner overestimates short statements about snapshots and would compile
# each of them, which takes hundreds of times as long as running it. Dates and times are written in
# the form that psycopg reads. Transactions are READ COMMITTED unless they set another level: a
# transaction that has waited for a lock must see all earlier commits. A policy that hides
# rows makes a statement fail; otherwise messages would be skipped. While there are rules of `saf
# sender`, which are policies themselves, `saf.broker.whole` checks for other policies at each first
# contact, and a source's forwarder with each batch (`saf.broker.senders`).
SET = (
    """
SELECT set_config('lock_timeout', {lock}, false),
       set_config('statement_timeout', {statement}, false),
       set_config('idle_in_transaction_session_timeout', {idle}, false),
       set_config('tcp_user_timeout', {user_timeout}, false),
       set_config('tcp_keepalives_idle', {keepalives_idle}, false),
       set_config('tcp_keepalives_interval', {keepalives_interval}, false),
       set_config('tcp_keepalives_count', {keepalives_count}, false),
       CASE WHEN current_setting('server_version_num')::int >= 170000
            THEN set_config('transaction_timeout', {transaction}, false) END,
       CASE WHEN version() !~* 'windows|mingw|visual'
            THEN set_config('client_connection_check_interval', {check}, false) END,
       set_config('jit', 'off', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('datestyle', 'ISO', false), set_config('intervalstyle', 'postgres', false),
       set_config('standard_conforming_strings', 'on', false),
       set_config('array_nulls', 'on', false),
"""
    f"CASE WHEN ({ONLY_SENDERS}) IS NOT TRUE THEN set_config('row_security', 'off', false) END\n"
)
HERE = "WHERE pg_backend_pid() = {pid}"

CONNECT_TIMEOUT_SECONDS = 10
"""Seconds that libpq waits for each host when connecting."""


def network(seconds: float) -> dict[str, int]:
    """Return libpq's parameters for noticing within ``seconds`` that a host has vanished."""
    every = max(1, round(seconds / (PROBES + 1)))
    return {
        "tcp_user_timeout": _milliseconds(seconds),
        "keepalives_idle": every,
        "keepalives_interval": every,
        "keepalives_count": PROBES,
    }


def _milliseconds(seconds: float | None) -> int:
    """Return seconds as the server's milliseconds; 0 means no bound.

    >>> _milliseconds(None), _milliseconds(0.0001), _milliseconds(2)
    (0, 1, 2000)
    """
    return 0 if seconds is None else max(1, round(seconds * 1000))


T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 2.0

LOOK_SECONDS = 0.25
"""Precision of the watch, in seconds."""

SERVER_SOCKET = ".s.PGSQL."
DESCRIPTORS = next(path for path in map(Path, ("/proc/self/fd", "/dev/fd")) if path.is_dir())


class Waiting:
    """One wait for an answer."""

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self.thread = threading.get_ident()
        self.given_up = False
        """Whether the watch has cut the connection."""
        self._cut = cut

    def give_up(self) -> None:
        """Cut the connection; the library reports this to the connection's owner."""
        self.given_up = True
        self._cut()

    def __str__(self) -> str:
        return f"it has not answered for {self.seconds:g} s, so its connection was cut"


@contextmanager
def answer_within(seconds: float | None, cut: Callable[[], None]) -> Iterator[Waiting | None]:
    """Watch a call, and end it with ``cut`` after ``seconds``; if None, never."""
    if seconds is None:
        yield None
        return
    waiting = Waiting(seconds, cut)
    _watch.add(waiting)
    try:
        yield waiting
    finally:
        _watch.remove(waiting)


def quiet_seconds(thread: int) -> float:
    """Return the seconds since a thread last waited for a server; 0 while it waits for one."""
    return _watch.quiet(thread)


class _Watch:
    """All waits of this process, and the thread that ends them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all waits, in a forked process: the thread and the calls are the parent's."""
        self._waiting: set[Waiting] = set()
        self._answered: dict[int, float] = {}
        """When each thread last got an answer, by the monotonic clock."""
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._started = False

    def add(self, one: Waiting) -> None:
        with self._lock:
            self._waiting.add(one)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="saf watch", daemon=True).start()
        self._some.set()

    def remove(self, one: Waiting) -> None:
        with self._lock:
            self._waiting.discard(one)
            self._answered[one.thread] = time.monotonic()

    def quiet(self, thread: int) -> float:
        with self._lock:
            if any(waiting.thread == thread for waiting in self._waiting):
                return 0.0
            now = time.monotonic()
            return now - self._answered.setdefault(thread, now)

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            with self._lock:
                # under the lock: a call that was answered in the meantime keeps its connection
                for waiting in [waiting for waiting in self._waiting if waiting.until < now]:
                    with suppress(OSError):  # no file descriptor is left: try again next time
                        waiting.give_up()
                        self._waiting.discard(waiting)
                if not self._waiting:
                    self._some.clear()


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.forget)


def shut(descriptors: Iterable[int]) -> None:
    """Cut connections by their sockets; the library still closes the sockets itself.

    Raises:
        OSError: this process has no file descriptor left for it.
    """
    for descriptor in descriptors:
        try:
            with _same(descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # other errors: it is already closed
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise


def hung_up(descriptors: Iterable[int]) -> bool:
    """Return whether a server has closed a connection, while no call waits for an answer on it.

    Unrequested data counts as closed too: a server rarely sends any for another reason.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


def sockets() -> set[int]:
    """Return the descriptors of this process's connections that may lead to a database server."""
    return {
        descriptor
        for descriptor, family, peer in _connections()
        # a server's unix socket has a special name; the sockets of Spark have other names
        if family != socket.AF_UNIX or SERVER_SOCKET in str(peer)
    }


def sockets_to(port: int) -> set[int]:
    """Return the descriptors of this process's connections to a port."""
    return {
        descriptor
        for descriptor, family, peer in _connections()
        if family != socket.AF_UNIX and peer[1] == port
    }


def _connections() -> Iterator[tuple[int, int, Any]]:
    """Yield the descriptor, the family and the peer of each connected stream."""
    for file in DESCRIPTORS.iterdir():
        with suppress(OSError), _same(int(file.name)) as connection:
            if connection.type == socket.SOCK_STREAM:
                yield int(file.name), connection.family, connection.getpeername()


def _same(descriptor: int) -> socket.socket:
    """Return another socket object for the same connection."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # not a socket
        os.close(copy)
        raise


def while_unavailable(
    attempts: int,
    action: Callable[[], T],
    error_of: Callable[[T], SafError | None] = lambda _: None,
) -> T:
    """Call ``action`` up to ``attempts`` times while it raises `Unavailable`; return its result.

    ``error_of`` is the error that a result reports; such a result is retried like a raised error.

    This bridges outages of a few seconds, such as a server's restart. A server that hangs is not
    retried, because the first call has already waited for it. The last error is raised unchanged.
    """
    import tenacity

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential(FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
        retry=tenacity.retry_if_exception(_passing)
        | tenacity.retry_if_result(lambda result: _passing(error_of(result))),
        retry_error_callback=_outcome,
    )(action)


def _outcome(state: tenacity.RetryCallState) -> Any:
    assert state.outcome is not None  # noqa: S101 - there was an attempt
    return state.outcome.result()


def _passing(error: BaseException | None) -> bool:
    return isinstance(error, Unavailable) and not (error.hangs or isinstance(error, Refused))
