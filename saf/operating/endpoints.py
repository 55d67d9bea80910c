"""All endpoints: those in saf.toml and in brokers, with the problems of some.

An invalid endpoint, or a broker that does not answer, does not affect the other endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from saf.config import Settings, did_you_mean
from saf.database import check_schema, unavailable_if_lost
from saf.errors import ConfigurationError, SafError
from saf.operating.places import stores
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.stored import stored
from saf.telemetry.logger import Log

log = Log("saf.dispatch")


@dataclass(kw_only=True)
class Found:
    """The result of a search for endpoints."""

    endpoints: dict[str, Endpoint]
    """Valid endpoints by name."""
    wrong: dict[str, SafError] = field(default_factory=dict)
    """Problems of invalid endpoints by name."""
    unread: list[SafError] = field(default_factory=list)
    """The reasons why brokers could not be queried."""

    @property
    def problems(self) -> list[SafError]:
        """All problems."""
        return [*self.unread, *self.wrong.values()]

    def chosen(self, names: Sequence[str]) -> dict[str, Endpoint]:
        """Return the endpoints with these names; without names, all valid ones.

        Raises:
            ConfigurationError: no endpoint exists, none has this name, or it is invalid.
            Unavailable: a broker that may have the endpoint does not answer.
        """
        missing = [name for name in names if name not in self.endpoints or name in self.wrong]
        for name in missing:
            if problem := self.wrong.get(name) or next(iter(self.unread), None):
                raise problem
        if not self.endpoints:
            raise next(iter(self.problems), None) or ConfigurationError(
                "no endpoint exists: add [endpoints.NAME] to saf.toml, or run saf endpoint add"
            )
        for name in missing:
            raise ConfigurationError(f"no endpoint {name!r}{did_you_mean(name, self.endpoints)}")
        return {name: self.endpoints[name] for name in names or self.endpoints}


def find(settings: Settings, known: Mapping[str, Endpoint] | None = None) -> Found:
    """Find the endpoints of saf.toml and of the brokers.

    While a broker does not answer, its endpoints in ``known`` are assumed to exist.
    """
    found = Found(endpoints=dict(settings.endpoints))
    for where, broker in stores(settings, None).items():
        try:
            with unavailable_if_lost(f"broker {where!r}"):
                connection = broker.dsn.connect(role="endpoint", autocommit=True)
                with connection:
                    check_schema(connection)
                    listed = stored(connection, where, settings.dispatch.networks)
        except SafError as error:
            found.unread.append(error)
            previous = {
                name: endpoint
                for name, endpoint in (known or {}).items()
                if endpoint.broker == where
            }
            found.endpoints = previous | found.endpoints
            continue
        for name, endpoint in listed.items():
            if name in found.endpoints:
                found.wrong[name] = ConfigurationError(
                    f"two endpoints are called {name!r}: one is in broker {where!r}"
                )
            elif isinstance(endpoint, SafError):
                found.wrong[name] = endpoint
            else:
                found.endpoints[name] = endpoint
    return found


class Following:
    """Finds the endpoints repeatedly, and logs each problem when it begins."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, Endpoint] = {}
        self._logged: set[str] = set()

    def find(self) -> Found:
        """Find the current endpoints."""
        found = find(self._settings, self._known)
        self._known = found.endpoints
        problems = {str(error) for error in found.problems}
        for problem in problems - self._logged:
            log.warning("endpoints_not_read", detail=problem)
        self._logged = problems
        return found
