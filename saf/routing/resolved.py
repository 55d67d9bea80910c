"""Resolutions: a router's remembered answers, so that its classifier is not called again.

The first message of each conversation is classified, and also the first message of each key if the
router is set so. ``saf.resolved_conversation`` stores the answer, and all later messages follow it.
The answer is durable before any message that follows it is stored at a destination. The table is
bounded like the choices (`saf.routing.route_choices`): an answer is forgotten if it is not used for
as long as messages are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from saf.database import DURABLY, fetch
from saf.routing.route_choices import NOTED_SECONDS


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Actual address of a message for a router."""

    service: str
    broker: UUID | None = None
    """The broker; None: as in the message."""
    key: str | int | UUID | None = None
    """The key; None: as in the message."""


WANTED = "unnest(%(keys)s::text[]) AS w (key)"
SAME = "r.key = w.key AND r.router = %(router)s"

RESOLVED = f"""
SELECT r.key, r.service, r.broker, r.to_key,
       r.used_at < now() - make_interval(secs => %(noted)s)
FROM {WANTED} JOIN saf.resolved_conversation r ON {SAME}
"""
USED = f"UPDATE saf.resolved_conversation r SET used_at = now() FROM {WANTED} WHERE {SAME}"

# In a fixed order, so that two writers wait for each other instead of deadlocking
KEEP = """
INSERT INTO saf.resolved_conversation (router, key, service, broker, to_key)
SELECT %(router)s, w.* FROM unnest(%(keys)s::text[], %(services)s::text[], %(brokers)s::uuid[],
                                   %(to_keys)s::text[]) AS w (key, service, broker, to_key)
ORDER BY w.key
ON CONFLICT DO NOTHING
"""


def resolved(
    connection: psycopg.Connection[Any], router: str, keys: Collection[str]
) -> dict[str, Resolved]:
    """Return stored resolutions of keys or conversations; note their use. Needs a transaction."""
    params = {"router": router, "keys": list(keys), "noted": NOTED_SECONDS}
    rows = fetch(connection, RESOLVED, params)
    if unnoted := [key for key, *_, old in rows if old]:
        connection.execute(USED, params | {"keys": unnoted})
    return {
        key: Resolved(service=service, broker=broker, key=to_key)
        for key, service, broker, to_key, _ in rows
    }


def keep(
    connection: psycopg.Connection[Any], router: str, new: Mapping[str, Resolved]
) -> dict[str, Resolved]:
    """Store new resolutions; return those in force, which another task may have stored before.

    Call it in a transaction. Store no message of these keys anywhere before that transaction has
    committed durably.
    """
    connection.execute(DURABLY)
    params = {
        "router": router,
        "keys": list(new),
        "services": [row.service for row in new.values()],
        "brokers": [row.broker for row in new.values()],
        "to_keys": [row.key for row in new.values()],
    }
    connection.execute(KEEP, params)
    return resolved(connection, router, new)
