"""Patience: a server that says nothing for too long is not waited for any longer.

A server process that is stopped, or whose disk hangs, keeps its connection, its machine goes on
acknowledging, and its own timeouts do not fire. Its client would wait for ever, inside a C library.
So one thread of the process watches who waits, and cuts the connection of whoever has waited too
long: the library then says that it was lost.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.25
"""How exactly the watch keeps time."""


class Waiting:
    """One wait for an answer."""

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self.thread = threading.get_ident()
        self.given_up = False
        """Its connection was cut."""
        self._cut = cut

    def give_up(self) -> None:
        """Cut the connection, whose owner learns it from the library."""
        self.given_up = True
        self._cut()

    def __str__(self) -> str:
        return f"it has not answered for {self.seconds:g} s, so its connection was cut"


class _Watch:
    """All waits of this process, and the thread that ends them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked process: the thread is the parent's, and so is who waits."""
        self._waiting: set[Waiting] = set()
        self._answered: dict[int, float] = {}
        """When each thread was answered last."""
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
            if any(one.thread == thread for one in self._waiting):
                return 0.0
            now = time.monotonic()
            return now - self._answered.setdefault(thread, now)

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            with self._lock:
                # under the lock: whoever has been answered meanwhile keeps its connection
                for one in [one for one in self._waiting if one.until < now]:
                    self._waiting.discard(one)
                    one.give_up()
                if not self._waiting:
                    self._some.clear()


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.forget)


@contextmanager
def answer_within(seconds: float | None, cut: Callable[[], None]) -> Iterator[Waiting | None]:
    """A wait that ``cut`` ends after so many seconds; None is for ever."""
    if seconds is None:
        yield None
        return
    one = Waiting(seconds, cut)
    _watch.add(one)
    try:
        yield one
    finally:
        _watch.remove(one)


def quiet_seconds(thread: int) -> float:
    """For how long a thread has waited for no server; 0 while it does."""
    return _watch.quiet(thread)


def shut(descriptors: Iterable[int]) -> None:
    """Cut connections by their sockets, which stay the library's to close."""
    for descriptor in descriptors:
        with suppress(OSError), _same(descriptor) as same:
            same.shutdown(socket.SHUT_RDWR)


def sockets() -> set[int]:
    """This process's connections to what may be a database server, by their descriptors."""
    return {
        descriptor
        for descriptor, family, peer in _connections()
        # a server's unix socket has a name of its own; those of Spark have others
        if family != socket.AF_UNIX or SERVER_SOCKET in str(peer)
    }


def sockets_to(port: int) -> set[int]:
    """Its connections to a port, by their descriptors."""
    return {
        descriptor
        for descriptor, family, peer in _connections()
        if family != socket.AF_UNIX and peer[1] == port
    }


SERVER_SOCKET = ".s.PGSQL."
DESCRIPTORS = next(path for path in map(Path, ("/proc/self/fd", "/dev/fd")) if path.is_dir())


def _connections() -> Iterator[tuple[int, int, Any]]:
    """Descriptor, family and peer of each stream that is connected."""
    for file in DESCRIPTORS.iterdir():
        with suppress(OSError), _same(int(file.name)) as same:
            if same.type == socket.SOCK_STREAM:
                yield int(file.name), same.family, same.getpeername()


def _same(descriptor: int) -> socket.socket:
    """A socket of our own to the same connection."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # it is no socket
        os.close(copy)
        raise
