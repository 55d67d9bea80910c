"""Patience: how long a call waits for a server that sends nothing, and how often it is retried.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    import tenacity

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
