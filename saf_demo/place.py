"""A place: the application's database, and the destinations of its messages, in one demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saf.config import Broker, Forwarder, Route, Router, Settings
from saf.destinations.settings import DestinationSettings
from saf_demo import proof
from saf_demo.flights import SERVICE

if TYPE_CHECKING:
    from saf.database import Dsn

CLASSIFIER = "saf_demo.flights:by_origin"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The application's database, and the destinations of its messages."""

    application: Dsn
    destinations: Mapping[str, DestinationSettings]
    received: Callable[[str], Iterable[proof.Received]]
    """Returns all messages of a destination, those of each key in order."""
    routed: bool = False
    """Each flight goes to the destination that its airport names."""
    send_on: Callable[[], str] | None = None
    """Sends forwarded messages further on, and returns a sentence about that."""

    @property
    def settings(self) -> Settings:
        """The forwarder's configuration, as a saf.toml would define it.

        The environment is ignored, because it may name brokers unrelated to the demo.
        """
        brokers = {"flights": Broker(dsn=self.application)}
        if not self.routed:
            (default,) = self.destinations
            return Settings.model_construct(
                brokers=brokers,
                destinations=self.destinations,
                forwarder=Forwarder(default_destination=default),
            )
        return Settings.model_construct(
            brokers=brokers,
            destinations=self.destinations,
            routes=tuple(Route(service=name, destination=name) for name in self.destinations),
            routers={SERVICE: Router(kind="arrow", expression=CLASSIFIER)},
        )
