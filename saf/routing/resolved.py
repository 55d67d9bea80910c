"""Resolutions: answers that a router remembers, so that it does not ask its classifier again.

The first message of each conversation is classified, and the first message of each key too if the
router says so. ``saf.resolved_conversation`` remembers the answer, and all later messages follow
it. The answer is durable before any message that follows it is stored at a destination. The table
is bounded in the same way as the choices (`saf.routing.route_choices`): what is not used for as
long as messages are kept is forgotten.
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
    """What a message for a router is really addressed to."""

    service: str
    broker: UUID | None = None
    """The broker; None: the one that the message says."""
    key: str | None = None
    """The key; None: the one that the message says."""


WANTED = "unnest(%(keys)s::text[]) AS w (key)"
SAME = "r.key = w.key AND r.router = %(router)s"

RESOLVED = f"""
SELECT r.key, r.service, r.broker, r.to_key,
       r.used_at < now() - make_interval(secs => %(noted)s)
FROM {WANTED} JOIN saf.resolved_conversation r ON {SAME}
"""
USED = f"UPDATE saf.resolved_conversation r SET used_at = now() FROM {WANTED} WHERE {SAME}"

# In one order, so that two writers wait for each other instead of deadlocking
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
    """Return what is known of keys or conversations, and note its use. Call it in a transaction."""
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
    """Remember new resolutions; return those that count, which another task may have found before.

    Call it in a transaction. Store no message of these keys anywhere before this has committed, and
    let that commit be durable.
    """
    connection.execute(DURABLY)
    params = {
        "router": router,
        "keys": list(new),
        "services": [one.service for one in new.values()],
        "brokers": [one.broker for one in new.values()],
        "to_keys": [one.key for one in new.values()],
    }
    connection.execute(KEEP, params)
    return resolved(connection, router, new)
