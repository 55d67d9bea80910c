"""The pulse: figures of all brokers, taken repeatedly while a page is open, and their drawing.

The figures are those of `saf metrics` (`saf.operating.figures`), which are bounded at each broker,
and the traffic since the figures before (`saf.operating.traffic`). While no page is open, they are
taken once a minute, so that the curves and the history (`saf.ui.history`) have a past.

`drawn` shows brokers and destinations, with pending and parked messages between them.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.config import Settings
from saf.operating.figures import Ask, asker
from saf.operating.places import Places
from saf.operating.traffic import meter
from saf.operating.watch import Watch
from saf.telemetry import metrics as m
from saf.telemetry.metrics import Metric, Sample
from saf.ui import history
from saf.ui.beat import Beat
from saf.ui.history import History

EVERY_SECONDS = 3.0
"""Interval while a page is open."""
IDLE_SECONDS = 60.0
"""Interval while no page is open."""
LOOKING_SECONDS = 20.0
"""Time after a request during which a page counts as open."""
PATIENCE_SECONDS = 3.0

PAST = 60
"""Number of values in a curve."""
CURVES: Mapping[str, Metric] = {
    "pending": m.PENDING,
    "unread": m.UNREAD,
    "parked": m.PARKED,
    "dead": m.DEAD,
}

MOST = 12
"""Most brokers and destinations in the drawing; the tables show all."""
ROW, TOP = 46, 14


def both(settings: Settings) -> Ask:
    """Return the function that asks one broker for its figures and its traffic."""
    figures, traffic = asker(settings), meter()

    def ask(connection: psycopg.Connection[Any], name: str) -> list[Sample]:
        found, passed = figures(connection, name), traffic(connection)
        counts = (
            (history.SENT, passed.sent),
            (history.STORED, passed.stored),
            (history.PARKED, passed.parked),
            (history.DEAD, passed.dead),
        )
        return [
            *found,
            *(
                Sample(metric=metric, labels=(name, service), value=float(messages))
                for metric, by_service in counts
                for service, messages in by_service.items()
            ),
        ]

    return ask


class Pulse:
    """Takes the figures in its own thread, from `start` to `stop`."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._watch = Watch(places, both(settings), patience_seconds=PATIENCE_SECONDS)
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._looked_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._first = threading.Event()
        self.beat = Beat()
        self.number = 0
        """Rises with each beat."""
        self.curves: dict[str, deque[float]] = {name: deque(maxlen=PAST) for name in CURVES}
        self.history = History()

    @property
    def over(self) -> bool:
        """True if the pulse has been stopped."""
        return self._over.is_set()

    def look(self) -> Beat:
        """Return the last figures, and note that a page is open; wait only for the very first."""
        self._looked_at = time.monotonic()
        self._wanted.set()
        self.start()
        self._first.wait(PATIENCE_SECONDS)
        return self.beat

    def start(self) -> None:
        """Start the thread, if it is not running."""
        with self._lock:
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._run, name="saf-ui-pulse", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop taking figures."""
        self._over.set()
        self._wanted.set()
        self._watch.close()  # ends its wait
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=PATIENCE_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            samples = tuple(self._watch.take())
            self.beat = Beat(samples=samples, down=dict(self._watch.down), at=time.time())
            for name, metric in CURVES.items():
                self.curves[name].append(self.beat.total(metric))
            self.history.add(self.beat)
            self.number += 1
            self._first.set()
            if self._over.wait(EVERY_SECONDS):
                return
            if time.monotonic() - self._looked_at > LOOKING_SECONDS:
                self._wanted.clear()
                self._wanted.wait(IDLE_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A broker, on the left, or a destination, on the right."""

    name: str
    y: float
    colour: str
    said: str


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Flow of messages from a broker to a destination."""

    path: str
    width: float
    colour: str
    said: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Places of the boxes, in the units of the drawing."""

    name: str
    box: int
    """Width of a box."""
    right: int
    """Where the boxes of destinations begin."""
    letters: int
    """Letters of a name that a box has room for."""
    left: int = 4

    @property
    def width(self) -> int:
        """Width of the drawing."""
        return self.left + self.box + self.right


WIDE = Layout(name="wide", box=200, right=590, letters=22, left=10)
NARROW = Layout(name="narrow", box=138, right=218, letters=14)
"""For a phone, where the wide drawing would not fit."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The drawing, in its own units."""

    layout: Layout
    height: int
    sources: tuple[Node, ...]
    targets: tuple[Node, ...]
    flows: tuple[Flow, ...]
    more: int
    """Number of brokers that are left out."""


def drawn(beat: Beat, layout: Layout = WIDE) -> Drawing | None:
    """Return the drawing; None if it would be empty."""
    states: dict[tuple[str, str], str] = {
        (broker, destination): state
        for (broker, destination, state), flag in beat.of(m.DESTINATIONS)
        if flag
    }
    pending: dict[tuple[str, str], float] = defaultdict(float)
    for (broker, destination, _), value in beat.of(m.PENDING):
        if destination:
            pending[broker, destination] += value
    parked: dict[tuple[str, str], float] = defaultdict(float)
    for (broker, subscription, destination, _), value in beat.of(m.PARKED):
        if subscription == "forwarder":
            parked[broker, destination] += value
    reachable = {name: bool(value) for (name,), value in beat.of(m.UP)}
    senders = sorted(
        {broker for broker, _ in states} | {name for name, is_up in reachable.items() if not is_up},
        key=lambda one: (reachable.get(one, False), -_of(pending, one) - _of(parked, one), one),
    )
    targets = sorted({name for _, name in states})
    if not senders or not targets:
        return None
    left, right = senders[:MOST], targets[:MOST]
    height = max(len(left), len(right)) * ROW + 2 * TOP
    at_left = _places(left, height)
    at_right = _places(right, height)
    flows = []
    for broker in left:
        for name in right:
            state = states.get((broker, name))
            waits, stuck = pending[broker, name], parked[broker, name]
            if state is None or not (waits or stuck or state != "up" or len(right) == 1):
                continue
            start, end = layout.left + layout.box, layout.right
            half = (start + end) / 2
            y, z = at_left[broker], at_right[name]
            colour = {"down": "bad", "waiting": "warn"}.get(state, "good" if waits else "idle")
            flows.append(
                Flow(
                    path=f"M{start},{y:.0f} C{half:.0f},{y:.0f} {half:.0f},{z:.0f} {end},{z:.0f}",
                    width=1.5 + min(6.0, len(f"{waits + stuck:.0f}") - 1.0),
                    colour=colour,
                    said=f"{broker} to {name}: {waits:,.0f} pending, {stuck:,.0f} parked; {state}",
                )
            )
    return Drawing(
        layout=layout,
        height=height,
        sources=tuple(
            Node(
                name=name,
                y=at_left[name],
                colour="good" if reachable.get(name) else "bad",
                said=f"{_of(pending, name):,.0f} pending" if reachable.get(name) else "down",
            )
            for name in left
        ),
        targets=tuple(
            Node(
                name=name,
                y=at_right[name],
                colour=_worst([state for (_, one), state in states.items() if one == name]),
                said=_said([state for (_, one), state in states.items() if one == name]),
            )
            for name in right
        ),
        flows=tuple(flows),
        more=len(senders) - len(left),
    )


def _of(values: dict[tuple[str, str], float], broker: str) -> float:
    return sum(value for (key, _), value in values.items() if key == broker)


def _places(names: list[str], height: float) -> dict[str, float]:
    step = (height - 2 * TOP) / len(names)
    return {name: TOP + step * (number + 0.5) for number, name in enumerate(names)}


def _worst(states: list[str]) -> str:
    return "bad" if "down" in states else "warn" if "waiting" in states else "good"


def _said(states: list[str]) -> str:
    return "down" if "down" in states else "waiting" if "waiting" in states else "up"
