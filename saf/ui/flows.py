"""Flows: a drawing of brokers and destinations, with pending and parked messages between them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from saf.metrics import declared as m
from saf.ui.pulse import Beat

MOST = 12
"""Most brokers and destinations in the drawing; the tables show all."""
ROW, TOP, LEFT, RIGHT, BOX = 46, 14, 10, 590, 200


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
class Drawing:
    """The drawing, in its own units."""

    width: int
    height: int
    sources: tuple[Node, ...]
    targets: tuple[Node, ...]
    flows: tuple[Flow, ...]
    more: int
    """Number of brokers that are left out."""


def drawn(beat: Beat) -> Drawing | None:
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
            start, end = LEFT + BOX, RIGHT
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
        width=LEFT + BOX + RIGHT,
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
