"""Addressed services: does each destination of a message have the service that it is for?

A store that has services stores messages for these only; messages for others wait at their sources.
So a route alone does not say that a message arrives. Other kinds of destinations, and stores
without services, store messages for any service.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import psycopg

from saf.broker.services import service_names
from saf.config import Settings
from saf.database import unavailable_if_lost
from saf.errors import SafError, no_service


@dataclass(kw_only=True)
class Lacking:
    """Answers of destinations about a service."""

    missing: dict[str, str] = field(default_factory=dict)
    """Destinations without the service: each with a sentence that names the fix."""
    unasked: dict[str, SafError] = field(default_factory=dict)
    """Destinations that did not answer."""


def lacking(settings: Settings, destinations: Iterable[str], service: str) -> Lacking:
    """Ask the destinations that are stores whether they have a service. Connects; only reads."""
    found = Lacking()
    for name in destinations:
        destination = settings.destinations.get(name)
        dsn = destination.broker() if destination is not None else None
        if dsn is None:
            continue
        try:
            with (
                unavailable_if_lost(f"destination {name!r}"),
                dsn.connect(role="route", autocommit=True) as connection,
            ):
                known = service_names(connection)
        except SafError as error:
            found.unasked[name] = error
        except psycopg.Error as error:
            reason = error.diag.message_primary or type(error).__name__
            found.unasked[name] = SafError(f"destination {name!r}: {reason}")
        else:
            if known and service not in known:
                found.missing[name] = no_service(name, [service], known=known, broker=name)
    return found
