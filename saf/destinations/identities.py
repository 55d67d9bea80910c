"""Identities: what each destination of saf.toml is; for a broker, its broker_id.

When there is something to forward, and not before, a forwarder's driver asks the destinations in
parallel, each over its own connection. It asks again from time to time, because a name may come to
point to another database. The answers are frozen with each batch (`saf.routing.routes.freeze`), so
tasks do not ask.

A destination that does not answer blocks nobody: the driver waits for it once, and briefly. Until
it answers, its last known identity counts. If none is known, the destination itself refuses
messages that are not for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Condition, Thread

from saf.destinations.settings import DestinationSettings

WAIT_SECONDS = 1.0
ASK_AGAIN_SECONDS = 60.0
ASK_WHO_FAILED_SECONDS = 5.0
"""Seconds until a destination that did not answer is asked again."""


class Identities:
    """Identities that the destinations have reported. Safe to use from several threads."""

    def __init__(self, destinations: Mapping[str, DestinationSettings]) -> None:
        self._destinations = dict(destinations)
        self._said: dict[str, str | None] = dict.fromkeys(destinations)
        self._asked_at = dict.fromkeys(destinations, float("-inf"))
        self._asking: set[str] = set()
        self._wait_until = 0.0
        self._changed = Condition()

    def known(self) -> dict[str, str | None]:
        """Return each destination's identity as text; None if it has never answered."""
        with self._changed:
            self._ask(time.monotonic())
            patience = self._wait_until - time.monotonic()
            self._changed.wait_for(lambda: not self._asking, max(patience, 0.0))
            return dict(self._said)

    def _ask(self, now: float) -> None:
        for name, asked_at in self._asked_at.items():
            interval = ASK_AGAIN_SECONDS if self._said[name] else ASK_WHO_FAILED_SECONDS
            if name in self._asking or now - asked_at < interval:
                continue
            if asked_at < 0:
                self._wait_until = now + WAIT_SECONDS
            self._asked_at[name] = now
            self._asking.add(name)
            Thread(target=self._ask_one, args=(name,), name=f"saf-{name}", daemon=True).start()

    def _ask_one(self, name: str) -> None:
        identity = _identity(name, self._destinations[name])
        with self._changed:
            self._said[name] = identity or self._said[name]
            self._asking.discard(name)
            self._changed.notify_all()


def _identity(name: str, destination: DestinationSettings) -> str | None:
    """Ask a destination for its identity. None if that fails: delivery will report the cause."""
    try:
        return str(destination.identity(name))
    except Exception:  # its client may raise anything
        return None
