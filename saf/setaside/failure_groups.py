"""Failure groups: dead letters or parked messages whose errors differ in their values alone.

`failure_groups` lists them, the largest first, each with its newest message as the example. The
``group`` of a selection (`saf.setaside.selection`) or of lanes (`saf.setaside.waiting`) chooses the
messages of one group, for lists and decisions. `saf.setaside.fingerprint` defines a group.

The database groups the messages, and sends only the groups that are shown. It reads each error,
which takes seconds for a million dead letters. A page or a metric has less time: with ``newest``,
only that many messages are grouped, those that were set aside last, and the answer tells where they
begin. The error of a parked message is that of its lane, so it is read once per lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.database.queries import records
from saf.setaside.dead import SHOWN
from saf.setaside.fingerprint import LANES_SERVICE, fingerprint_of, group_of
from saf.setaside.lane import SAME_LANE, THE_LANE, Kind, Lane
from saf.setaside.selection import DeadLetters, ParkedMessages, Selection

SHARED = "subscription, destination, service, reason, fingerprint"


@dataclass(frozen=True, kw_only=True)
class Source:
    """SQL that differs between the kinds of messages."""

    found: str
    """The chosen messages, with the columns of `SHARED`, their numbers, and when they were set
    aside."""
    error: str
    """The error of a message."""
    lanes: str = ""
    """A common table expression for both."""


DEAD = Source(
    found=f"""
SELECT s.name AS subscription, destination, to_service AS service, reason,
       {fingerprint_of("error")} AS fingerprint, {{number}} AS number, {{since}} AS at
{{chosen}}""",
    error="error",
)
# Messages without a row in saf.backoff wait for another message or a time: they have not failed
PARKED = Source(
    found=f"""
SELECT b.name AS subscription, b.destination, b.service, b.kind AS reason, b.fingerprint,
       p.number, p.at
FROM (SELECT subscription_id, {THE_LANE}, {{number}} AS number, {{since}} AS at {{chosen}}) AS p
JOIN lanes b ON {SAME_LANE}""",
    error=f"(SELECT b.error FROM lanes b WHERE {SAME_LANE})",
    lanes=f"""
lanes AS MATERIALIZED (
    SELECT b.*, s.name, {LANES_SERVICE} AS service, {fingerprint_of("b.error")} AS fingerprint
    FROM saf.backoff b JOIN saf.subscription s USING (subscription_id)),""",
)
SOURCES: Mapping[type[Selection[Any]], Source] = MappingProxyType(
    {DeadLetters: DEAD, ParkedMessages: PARKED}
)

GROUPS = f"""
WITH {{lanes}}
grouped AS (
    SELECT *, count(*) OVER () AS groups
    FROM (SELECT {SHARED}, count(*) AS messages, min(at) AS first_at, max(at) AS last_at,
                 max(number) AS last
          FROM ({{found}}) AS found GROUP BY {SHARED}) AS every
    ORDER BY messages DESC, last DESC LIMIT %(limit)s)
SELECT {group_of(*SHARED.split(", "))} AS "group", grouped.*, example.*
FROM grouped CROSS JOIN LATERAL (
    SELECT left(key, {SHOWN}) AS key, message_id, created_at, {{error}} AS error
    FROM {{table}} WHERE {{number}} = last) AS example
ORDER BY messages DESC, last DESC
"""
BEYOND = "SELECT {number} FROM {table} ORDER BY {number} DESC OFFSET %(newest)s LIMIT 1"


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Messages set aside for the same cause."""

    group: str
    """Its id; see `saf.setaside.fingerprint`."""
    subscription: str
    destination: str
    service: str
    """The service of dead letters, or that a lane is about; empty if none."""
    reason: str
    """The reason of dead letters, or the kind of a lane."""
    fingerprint: str
    messages: int
    first_at: datetime
    """When the first of them was set aside."""
    last_at: datetime
    last: int
    """The number of the newest message, which is the example."""
    key: str | None
    message_id: UUID
    created_at: datetime
    error: str

    @property
    def lane(self) -> Lane:
        """The lane of parked messages, without a key, shard or conversation."""
        return Lane(destination=self.destination, kind=Kind(self.reason), subject=self.service)

    def as_dict(self) -> dict[str, Any]:
        """Return the group as a dict for JSON, without values that are NULL."""
        texts = {
            "first_at": self.first_at.isoformat(),
            "last_at": self.last_at.isoformat(),
            "created_at": self.created_at.isoformat(),
            "message_id": str(self.message_id),
        }
        plain = asdict(self) | texts
        return {name: value for name, value in plain.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class _Row(FailureGroup):
    groups: int


@dataclass(frozen=True, kw_only=True)
class FailureGroups:
    """The largest failure groups of a broker."""

    shown: Sequence[FailureGroup] = ()
    groups: int = 0
    """Number of all groups."""
    beyond: int | None = None
    """Only messages with greater numbers were grouped; None: all."""

    @property
    def more(self) -> int:
        """Number of groups that are not shown."""
        return self.groups - len(self.shown)


def failure_groups(
    connection: psycopg.Connection[Any],
    chosen: Selection[Any],
    limit: int | None = 100,
    *,
    newest: int | None = None,
) -> FailureGroups:
    """Group the chosen messages; return up to ``limit`` groups, the largest first. Only reads.

    With ``newest``, only messages among this many, those set aside last, are grouped.
    """
    kind = type(chosen)
    beyond = None
    if newest is not None:
        rows = fetch(connection, kind.sql(BEYOND), {"newest": newest})
        beyond = rows[0][0] if rows else None
        chosen = replace(chosen, beyond=max(beyond or 0, chosen.beyond or 0))
    source = SOURCES[kind]
    # the kind's own names are in these texts, and in the rest
    statement = GROUPS.replace("{lanes}", source.lanes).replace("{found}", source.found)
    statement = kind.sql(statement.replace("{error}", source.error))
    found = records(connection, _Row, statement, chosen.params(limit, None))
    shown = [FailureGroup(**{k: v for k, v in vars(r).items() if k != "groups"}) for r in found]
    return FailureGroups(shown=shown, groups=found[0].groups if found else 0, beyond=beyond)
