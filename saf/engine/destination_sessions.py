"""Destination sessions: a task's connections to its destinations, and their marks.

A destination is connected when the first message goes there. With each chunk it gets the marks that
the source remembers, so that it notices if the source or the destination was set back. The
transaction that moves past the chunk writes the marks that the destination returned at the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from traceback import extract_tb
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import pyarrow as pa

from saf.database.bounds import while_unavailable
from saf.destinations import Chunk, Destination, Refusal, Stored
from saf.destinations.marks import AGAIN, ONCE, Mark, Place
from saf.destinations.places import beyond, touched
from saf.engine.acknowledged import acknowledge, acknowledged, not_parked
from saf.engine.parts import Part
from saf.engine.source_session import SourceSession
from saf.engine.work import ForwardingRules, Work
from saf.errors import Ahead, Faulty, SafError, Unavailable, UsageError
from saf.log.cursor import learn_set_aside
from saf.routing.matching import AT_MOST_ONCE, EXACTLY_ONCE
from saf.setaside.isolation import said
from saf.telemetry.logger import Log
from saf.telemetry.tracing import forwarding

log = Log("saf.task")

T = TypeVar("T")

FRAMES = 5
"""Innermost frames of a client's traceback to log."""


def nowhere(name: str) -> Unavailable:
    """Return the error for a destination that is not configured."""
    return _until_configured(name, f"saf.toml has no [destinations.{name}]")


def _until_configured(name: str, reason: str) -> Unavailable:
    error = Unavailable(f"destination {name!r}", reason)
    error.needs_operator = True
    return error


def obstacle(rules: ForwardingRules, name: str, quality: str | None) -> SafError | None:
    """Return why the configuration rules out a quality of service at a destination, or None."""
    destination = rules.destinations.get(name)
    if destination is None:
        return nowhere(name)
    try:
        destination.check_quality(quality)
    except ValueError as error:
        return _until_configured(name, f"by its route, {error}")
    return None


@dataclass
class DestinationSessions:
    """A task's destinations, each connected once."""

    work: Work
    rules: ForwardingRules
    source_session: SourceSession
    _open: dict[str, Destination] = field(default_factory=dict)
    _identities: dict[str, UUID] = field(default_factory=dict)
    _known: dict[str, dict[Place, Mark | None]] = field(default_factory=dict)
    """The marks that have been read, by the destinations' names."""
    _stored: list[tuple[UUID, Mapping[Place, Mark], Mapping[Place, Mark]]] = field(
        default_factory=list
    )
    """Marks to acknowledge: the destination, its marks, and its marks before them."""

    def store(self, part: Part, chunk: Chunk) -> Stored | Refusal:
        """Store a chunk at its part's destination, if the marks there are the known ones.

        An error that is raised is the refusal of the whole chunk: those of
        `saf.destinations.Destination.store`, and `Ahead` or `Behind` if the marks differ, because
        the source, or the destination, was set back.
        """
        attempts = 1 if part.quality == AT_MOST_ONCE else self.rules.attempts
        return _answered(attempts, lambda: self._store(part, chunk))

    def _store(self, part: Part, chunk: Chunk) -> Stored | Refusal:
        name, exactly_once = part.destination, part.quality == EXACTLY_ONCE
        with forwarding(name, chunk.rows):
            known, stored = self._in_step(
                part,
                chunk,
                lambda destination, own: destination.store(own, exactly_once=exactly_once),
            )
        if isinstance(stored, Refusal):
            return stored
        own = {*touched(replace(chunk, prefix=prefix(part)))}
        new = {p: mark for p, mark in stored.marks.items() if p in own and known.get(p) != mark}
        if new:
            self._stored.append((self._identities[name], new, known))
            self._known[name] |= new
        return stored

    def not_stored(self, part: Part, rows: pa.Table) -> pa.Table | Refusal:
        """Return those rows of a part that its destination has not stored, or why it refuses."""
        batch = self.work.batch
        chunk = Chunk(source=self.work.source, batch=batch, rows=rows)
        marks = _answered(
            self.rules.attempts,
            lambda: self._in_step(part, chunk, lambda destination, own: destination.marks(own))[1],
        )
        if isinstance(marks, Refusal):
            return marks
        stored = {place: mark.number for place, mark in marks.items()}
        return beyond(rows, batch.number, stored, prefix(part))

    def acknowledge(self, source: psycopg.Connection[Any]) -> None:
        """Write what destinations have stored, in the transaction that moves the position past
        it."""
        for destination, marks, before in self._stored:
            acknowledge(source, destination, marks, before)

    def settled(self) -> None:
        """Note that the acknowledgements are committed."""
        self._stored.clear()

    def close(self) -> None:
        """Close all connections."""
        for destination in self._open.values():
            destination.close()

    def connected(self, name: str) -> Destination:
        """Return a destination of saf.toml, connected.

        Raises:
            UsageError: another name in saf.toml stands for the same destination.
            Unavailable: connecting failed, for any reason.
        """
        with self._blamed(name):
            if name not in self._open:
                settings = self.rules.destinations[name]
                self._open[name] = settings.open(name, keep=self.work.keep)
            destination = self._open[name]
            identity = self._identities.get(name) or destination.identity()
        if name not in self._identities:
            for other, known in self._identities.items():
                if known == identity:
                    raise UsageError(
                        f"destinations {other!r} and {name!r} are the same: one watermark "
                        "cannot serve both, so keep one in saf.toml; or, if one is a copy "
                        "of the other, run `saf broker new-id` for the copy"
                    )
            self._identities[name] = identity
        return destination

    def _in_step(
        self, part: Part, chunk: Chunk, ask: Callable[[Destination, Chunk], T]
    ) -> tuple[Mapping[Place, Mark], T]:
        """Ask a part's destination, with its known marks; return these marks and the answer."""
        name = part.destination
        if error := obstacle(self.rules, name, part.quality):
            raise error
        destination = self.connected(name)
        chunk = replace(chunk, prefix=prefix(part))
        known = self._known_of(name, touched(chunk))
        chunk = replace(chunk, known=known)
        try:
            with self._blamed(name):
                return known, ask(destination, chunk)
        except Ahead as error:
            batch, marks = self.work.batch, error.marks
            if not marks:
                # or another run of this task has set messages aside since
                if not self.source_session.find(lambda source: learn_set_aside(source, batch)):
                    raise
            # or the messages were stored, the answer was lost, and they wait to be stored again
            elif self.source_session(lambda s: not_parked(s, batch.subscription_id, name, marks)):
                raise
            with self._blamed(name):
                return known, ask(destination, replace(chunk, known={**known, **marks}))

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Blame a destination for any exception that is not an error of its protocol.

        A message is only ever blamed by `Rejected`. A client library that raises may be in any
        state, so the next attempt opens the destination again.
        """
        try:
            yield
        except SafError:
            raise
        except Exception as error:
            raised_at = [
                f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)
            ]
            text = self.rules.destinations[name].redact(said(error))
            log.warning("destination_raised", destination=name, error=text, at=raised_at[-FRAMES:])
            if failed := self._open.pop(name, None):
                with suppress(Exception):
                    failed.close()
            raise Faulty(f"destination {name!r}", f"its client raised {text}") from None

    def _known_of(self, name: str, places: Sequence[Place]) -> dict[Place, Mark]:
        """Return the marks of a destination that the source remembers; ask the source once."""
        known = self._known.setdefault(name, {})
        if missing := [place for place in places if place not in known]:
            identity = self._identities[name]
            found = self.source_session.find(lambda source: acknowledged(source, identity, missing))
            known |= {place: found.get(place) for place in missing}
        return {place: mark for place in places if (mark := known[place]) is not None}


def _answered(attempts: int, ask: Callable[[], T | Refusal]) -> T | Refusal:
    """Return an answer; while the destination is unavailable, ask up to ``attempts`` times."""

    def answer() -> T | Refusal:
        try:
            return ask()
        except SafError as error:
            return Refusal(error=error)

    return while_unavailable(
        attempts, answer, lambda found: found.error if isinstance(found, Refusal) else None
    )


def prefix(part: Part) -> str:
    """Return the prefix of the names of a part's marks."""
    return {EXACTLY_ONCE: "", AT_MOST_ONCE: ONCE}.get(part.quality or "", AGAIN)
