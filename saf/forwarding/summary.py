"""Summary of a run of the forwarder, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from saf import errors
from saf.engine.work import add_services
from saf.errors import SafError, Unavailable, UsageError


@dataclass
class Summary:
    """Results of a run. Counts are messages."""

    forwarded: int = 0
    dropped: int = 0
    """Messages delivered again, and dropped by a watermark."""
    left_out: int = 0
    """Messages that a transform has left out, counted for each destination."""
    early: dict[str, int] = field(default_factory=dict)
    """By destination, messages that it got before their deliver_at, because it holds none."""
    parked: int = 0
    """Messages set aside until a destination, a route or a service exists or answers."""
    dead: int = 0
    """Messages set aside for an operator."""
    by_destination: dict[str, int] = field(default_factory=dict)
    by_service: dict[str, dict[str, int]] = field(default_factory=dict)
    """By destination, messages by service that it has now: ``forwarded`` and ``dropped`` ones. So
    messages that a killed run had stored, without reporting them, are reported by the next run."""
    batches: int = 0
    cycles: int = 0
    seconds: float = 0.0
    stopped: bool = False
    idle: bool = False
    """Whether other forwarders hold all shards of all brokers."""
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Some lanes: ``broker``, ``lane``, ``kind``, ``subject``, ``attempts``, ``next_attempt_at``,
    ``error``."""
    waiting_lanes: int = 0
    """Number of lanes that wait."""
    down: list[str] = field(default_factory=list)
    """Destinations that do not answer, or refuse everything."""
    problems: list[dict[str, str]] = field(default_factory=list)
    """Problems: ``broker``, ``kind`` (an error's class) and ``error``."""

    @property
    def exit_code(self) -> int:
        """0: done or nothing to do; 75: try again later; 2: an operator must act; 1: other.

        Messages that wait for a route or a service block no others, and the next run does not help
        them: that is 0. Messages for a destination that is down are 75.
        """
        codes = {getattr(errors, problem["kind"]).exit_code for problem in self.problems}
        for code in (SafError.exit_code, UsageError.exit_code):
            if code in codes:
                return int(code)
        return Unavailable.exit_code if codes or self.down else 0

    def add(self, cycle: Summary) -> None:
        """Add the counts of another summary."""
        self.forwarded += cycle.forwarded
        self.dropped += cycle.dropped
        self.left_out += cycle.left_out
        self.parked += cycle.parked
        self.dead += cycle.dead
        self.batches += cycle.batches
        self.cycles += cycle.cycles
        for name, count in cycle.early.items():
            self.early[name] = self.early.get(name, 0) + count
        for name, count in cycle.by_destination.items():
            self.by_destination[name] = self.by_destination.get(name, 0) + count
        for name, services in cycle.by_service.items():
            self.add_services(name, services)

    def add_services(self, destination: str, services: Mapping[str, int]) -> None:
        """Add messages by service that a destination has now."""
        if services:
            add_services(self.by_service.setdefault(destination, {}), services)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as a dict, for one line of JSON."""
        rate = self.forwarded / self.seconds if self.seconds else 0.0
        return {
            **asdict(self),
            "seconds": round(self.seconds, 3),
            "messages_per_second": round(rate, 1),
            "exit_code": self.exit_code,
        }
