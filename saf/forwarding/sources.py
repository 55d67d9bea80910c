"""Sources beside the outboxes: a forwarder reads each source in a thread of its own.

A source that is down, slow or refused delays neither outboxes nor other sources. A run that drains
reads each source once, up to the end that it had at the start. A loop reads each source again and
again: pauses grow up to ``interval_seconds`` while nothing is found, and after failures up to
`LONGEST_WAIT` times that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from saf.config import Settings
from saf.errors import SafError, Unexpected
from saf.log.pauses import Pauses
from saf.setaside.parking import wait_seconds
from saf.telemetry import metrics as m
from saf.telemetry.logger import Log
from saf.telemetry.metrics import count

log = Log("saf.forward")

LONGEST_WAIT = 32
LEAVE_SECONDS = 30.0
"""Time for a source to end after its chunk, in seconds."""
LOOK_SECONDS = 0.2


@dataclass
class Arrived:
    """What was read since the last look."""

    messages: dict[str, int] = field(default_factory=dict)
    """Stored messages by source."""
    dropped: int = 0
    dead: int = 0
    problems: dict[str, SafError] = field(default_factory=dict)
    """The last problem of each source that could not be read."""

    @property
    def any(self) -> bool:
        """Whether anything was read."""
        return bool(self.messages or self.dropped or self.dead)


class Sources:
    """All sources of a saf.toml."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads: list[Thread] = []
        self._stop = Event()
        self._turn = Lock()
        self._arrived = Arrived()
        self._busy: set[str] = set()

    def start(self, *, once: bool) -> None:
        """Begin to read all sources; ``once``: only what they have now."""
        for name in self._settings.sources:
            self._busy.add(name)
            thread = Thread(
                target=self._read, args=(name, once), name=f"saf-source-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether a source is still being read."""
        with self._turn:
            return bool(self._busy)

    def take(self) -> Arrived:
        """Return what was read since the last call."""
        with self._turn:
            arrived, self._arrived = self._arrived, Arrived()
        return arrived

    def stop(self) -> None:
        """Let each source end after its chunk."""
        self._stop.set()

    def finish(self, stopped: Callable[[], bool]) -> None:
        """Wait until all sources have ended; after a stop request, wait only briefly."""
        since: float | None = None
        while any(thread.is_alive() for thread in self._threads):
            if stopped() or self._stop.is_set():
                self._stop.set()
                since = since or time.monotonic()
                if time.monotonic() - since > LEAVE_SECONDS:
                    return
            for thread in self._threads:
                thread.join(LOOK_SECONDS / len(self._threads))

    def _read(self, name: str, once: bool) -> None:
        from saf.sources.reader import Reader  # needs Arrow, which some drivers lack

        settings, options = self._settings, self._settings.forwarder
        into, dsn = settings.inbox_for(name)
        reader = Reader(
            name,
            settings.sources[name],
            into,
            dsn,
            lease_seconds=options.lease_seconds,
            max_bytes=options.max_bytes,
            chunk_bytes=options.chunk_bytes,
        )
        pauses, failures = Pauses(), 0
        try:
            while not self._stop.is_set():
                pause = 0.0
                try:
                    turn = reader.turn(self._stop.is_set)
                except Exception as error:  # a kind of another package may raise anything
                    failures += 1
                    self._note_problem(name, error)
                    pause = wait_seconds(failures, 1, LONGEST_WAIT) * options.interval_seconds
                else:
                    failures = 0
                    self._note(name, turn.messages, turn.dropped, turn.dead)
                    if turn.chunks:
                        pauses.end()
                    else:
                        pause = pauses.next(options.interval_seconds)
                if once:
                    break
                self._stop.wait(pause)
        finally:
            reader.end()
            with self._turn:
                self._busy.discard(name)

    def _note(self, name: str, messages: int, dropped: int, dead: int) -> None:
        if not (messages or dropped or dead):
            return
        count(m.SOURCE_MESSAGES, messages, source=name)
        count(m.SOURCE_DEAD, dead, source=name)
        with self._turn:
            known = self._arrived.messages
            if messages:
                known[name] = known.get(name, 0) + messages
            self._arrived.dropped += dropped
            self._arrived.dead += dead

    def _note_problem(self, name: str, error: Exception) -> None:
        problem = error if isinstance(error, SafError) else Unexpected(f"source {name!r}", error)
        log.warning("source_failed", source=name, error=str(problem))
        with self._turn:
            self._arrived.problems[name] = problem
