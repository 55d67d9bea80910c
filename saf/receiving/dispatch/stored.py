"""Endpoints in a broker: those that `saf endpoint add` stores, and the state of each for operators.

Anyone with write access to the table chooses a URL, and this process sends to it. So a stored
endpoint is more restricted than an endpoint of saf.toml:

- It reaches only addresses on the public internet, and the networks that saf.toml lists in
  ``[dispatch]``.
- It cannot name files of this machine.
- A secret is never stored, only the name of one of the dispatcher's environment variables, which
  must begin with `PREFIX`. So an endpoint cannot have other variables sent to its URL.

The restrictions are checked when an endpoint is stored and when it is read. `stored` returns the
error in place of an endpoint that is wrong, so that the others still run.

`state` and `attempts` read the condition and the last failed attempts of any endpoint, stored or of
saf.toml. Operators change a condition by `saf.receiving.dispatch.condition`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import pydantic
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from saf.broker import services
from saf.database import fetch
from saf.errors import ConfigurationError, UsageError
from saf.receiving.dispatch.condition import Book
from saf.receiving.dispatch.settings import Endpoint, StoredEndpoint

PREFIX = "SAF_ENDPOINT_"

OF_FILE = frozenset(
    {"url", "broker", "subscription", "public_only", "networks"}
    | {"ca_file", "client_certificate", "client_key"}
    | {"token_url", "client_id", "client_secret", "scope"}
    | {"proxy", "proxy_user", "proxy_password", "wsdl", "operation"}
)
"""Settings that are columns of the table, or allowed in saf.toml only."""

SECRETS = frozenset({"secrets", "bearer", "password"})
"""Settings that contain names of environment variables here."""

ADD = """
INSERT INTO saf.endpoint (name, subscription_id, url, settings)
VALUES (%(name)s, %(subscription_id)s, %(url)s, %(settings)s)
ON CONFLICT DO NOTHING RETURNING name
"""
# The name stays, so dispatchers continue with the changed endpoint
CHANGE = """
UPDATE saf.endpoint e
SET subscription_id = %(subscription_id)s, url = %(url)s, settings = %(settings)s
FROM (SELECT subscription_id AS number FROM saf.endpoint WHERE name = %(name)s FOR UPDATE) AS before
WHERE name = %(name)s RETURNING before.number
"""
OTHER = """
SELECT name FROM saf.endpoint WHERE name = %(name)s OR subscription_id = %(subscription_id)s
"""
LIST = """
SELECT e.name, s.name, e.url, e.settings
FROM saf.endpoint e JOIN saf.subscription s USING (subscription_id) ORDER BY e.name
"""
REMOVE = "DELETE FROM saf.endpoint WHERE name = %(name)s RETURNING subscription_id"

STATE = """
SELECT state, failures, failing_since, next_probe_at, error, paused_at, paused_by
FROM saf.breaker WHERE subscription_id = %(subscription_id)s
"""
ATTEMPTS = """
SELECT at, message_id, key, status, seconds, outcome, error
FROM saf.attempt WHERE subscription_id = %(subscription_id)s
ORDER BY attempt_id DESC LIMIT %(limit)s
"""


@dataclass(frozen=True, kw_only=True)
class State:
    """Condition of an endpoint, as stored in saf.breaker."""

    state: str = "closed"
    failures: int = 0
    failing_since: datetime | None = None
    next_probe_at: datetime | None = None
    error: str | None = None
    paused_at: datetime | None = None
    paused_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A failed attempt."""

    at: datetime
    message_id: UUID
    key: str | None
    status: int | None
    seconds: float
    outcome: str
    error: str


def add(
    connection: psycopg.Connection[Any],
    name: str,
    url: str,
    *,
    subscription: str | None = None,
    settings: Mapping[str, Any],
) -> None:
    """Store an endpoint with a fresh condition; secrets are given as environment variables' names.

    Raises:
        ConfigurationError: a setting is wrong, or the subscription does not exist.
        UsageError: an endpoint of that name, or for that subscription, exists.
    """
    given = {key: value for key, value in settings.items() if value not in (None, ())}
    check(name, url, given)
    found = services.subscription(connection, subscription or name)
    params = {"name": name, "url": url, "subscription_id": found.subscription_id}
    with connection.transaction():
        added = fetch(connection, ADD, params | {"settings": Jsonb(given)})
        if added:
            _begin_anew(connection, name, found.subscription_id)
    if not added:
        rivals = [rival for (rival,) in fetch(connection, OTHER, params)]
        if not rivals:
            raise UsageError(f"another endpoint blocked {name!r} and is gone: try again")
        other = rivals[0]
        raise UsageError(
            f"endpoint {other!r} exists already, for this subscription or with this name: "
            f"saf endpoint remove {other}"
        )


def put(
    connection: psycopg.Connection[Any],
    name: str,
    url: str,
    *,
    subscription: str,
    settings: Mapping[str, Any],
) -> None:
    """Store an endpoint as `add` does, or change the existing endpoint of that name.

    An endpoint that moves to another subscription gets a fresh condition.

    Raises the errors of `add`.
    """
    check(name, url, settings)
    found = services.subscription(connection, subscription)
    params = {"name": name, "url": url, "subscription_id": found.subscription_id}
    rivals = [rival for (rival,) in fetch(connection, OTHER, params) if rival != name]
    changed: list[tuple[int]] = []
    if not rivals:
        with connection.transaction():
            changed = fetch(connection, CHANGE, params | {"settings": Jsonb(dict(settings))})
            for (before,) in changed:
                if before != found.subscription_id:
                    _begin_anew(connection, name, before, found.subscription_id)
    if not changed:
        add(connection, name, url, subscription=subscription, settings=settings)


def remove(connection: psycopg.Connection[Any], name: str) -> bool:
    """Remove an endpoint and its condition; its messages wait. Return whether it existed."""
    with connection.transaction():
        removed = fetch(connection, REMOVE, {"name": name})
        for (number,) in removed:
            _begin_anew(connection, name, number)
    return bool(removed)


def listed(connection: psycopg.Connection[Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return the endpoints of a broker: name, subscription, URL and settings, as stored."""
    return fetch(connection, LIST)


def stored(
    connection: psycopg.Connection[Any], broker: str, networks: Iterable[str] = ()
) -> dict[str, Endpoint | ConfigurationError]:
    """Return the endpoints of a broker, by name; ``broker`` is its name in saf.toml.

    For an endpoint that is wrong, or lacks an environment variable, return the error instead.
    """
    found: dict[str, Endpoint | ConfigurationError] = {}
    for name, subscription, url, settings in listed(connection):
        try:
            check(name, url, settings)
            known = _with_secrets(name, broker, settings)
            known |= {"broker": broker, "subscription": subscription}
            known |= {"public_only": True, "networks": tuple(networks)}
            found[name] = _made(name, url, known)
        except ConfigurationError as error:
            found[name] = error
    return found


def _with_secrets(name: str, broker: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the values of environment variables in place of their names."""
    for variable in _variables(settings):
        if variable not in os.environ:
            raise ConfigurationError(
                f"endpoint {name!r} of broker {broker!r} needs the environment variable "
                f"{variable}, which is not set"
            )
    known = {key: value for key, value in settings.items() if key not in SECRETS}
    for key in SECRETS & set(settings):
        value = settings[key]
        known[key] = [os.environ[one] for one in value] if key == "secrets" else os.environ[value]
    return known


def check(name: str, url: str, settings: Mapping[str, Any]) -> None:
    """Check that a stored endpoint may have these settings.

    Raises:
        ConfigurationError: it may not; the error names the settings.
    """
    wrong = OF_FILE & set(settings)
    if wrong:
        raise ConfigurationError(f"endpoint {name!r}: {', '.join(sorted(wrong))} in saf.toml only")
    for variable in _variables(settings):
        if not isinstance(variable, str) or not variable.startswith(PREFIX):
            raise ConfigurationError(
                f"endpoint {name!r}: a secret is given as the name of an environment variable "
                f"that begins with {PREFIX}"
            )
    plain = {key: value for key, value in settings.items() if key not in SECRETS}
    if "password" in settings:
        plain["password"] = "-"  # noqa: S105 - a placeholder
    _made(name, url, plain)


def _variables(settings: Mapping[str, Any]) -> list[Any]:
    secrets = settings.get("secrets", [])
    names = secrets if isinstance(secrets, (list, tuple)) else [secrets]
    return [*names, *(settings[key] for key in ("bearer", "password") if key in settings)]


def _made(name: str, url: str, settings: Mapping[str, Any]) -> StoredEndpoint:
    try:
        return StoredEndpoint.model_validate({"url": url, **settings})
    except pydantic.ValidationError as error:
        reasons = "; ".join(
            ".".join([name, *map(str, problem["loc"])])
            + ": "
            + problem["msg"].removeprefix("Value error, ")
            for problem in error.errors(include_input=False)
        )
        raise ConfigurationError(f"endpoint {reasons}") from None


def _begin_anew(connection: psycopg.Connection[Any], name: str, *numbers: int) -> None:
    """Reset the conditions of the endpoints of these subscriptions."""
    for number in numbers:
        Book(subscription_id=number, endpoint=name).resume(connection)


def state(connection: psycopg.Connection[Any], subscription_id: int) -> State:
    """Return the condition of a subscription's endpoint."""
    with psycopg.Cursor(connection, row_factory=class_row(State)) as cursor:
        found = cursor.execute(STATE, {"subscription_id": subscription_id}).fetchone()
    return found or State()


def attempts(
    connection: psycopg.Connection[Any], subscription_id: int, limit: int
) -> list[Attempt]:
    """Return the last failed attempts, newest first."""
    with psycopg.Cursor(connection, row_factory=class_row(Attempt)) as cursor:
        params = {"subscription_id": subscription_id, "limit": limit}
        return cursor.execute(ATTEMPTS, params).fetchall()
