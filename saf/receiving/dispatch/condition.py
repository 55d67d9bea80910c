"""The condition of an endpoint, shared by all dispatchers of its subscription: saf.breaker.

    closed      the endpoint is up, as far as known
    open        the endpoint is down. When a probe is due, one dispatcher sends it: one message
    disabled    the endpoint is gone (410), or was down too long. An operator resumes it

An operator may pause an endpoint in any state, or the subscription whose messages it gets. In a
pause, nothing is sent; while the endpoint is not closed, only probes are. Messages wait in the log,
in order, and no attempt is counted.

An endpoint that is stored in a broker may be removed there, or replaced by another one of its name.
Dispatchers of the old endpoint begin no more requests, end, and write nothing about it: the
condition belongs to the endpoint that exists now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psycopg

from saf.database import fetch
from saf.setaside.isolation import said

KEPT_ATTEMPTS = 1000
"""Number of failed attempts kept for operators, for each subscription."""

THERE = """
(%(url)s::text IS NULL OR EXISTS (
    SELECT FROM saf.endpoint e
    WHERE e.name = %(endpoint)s AND e.subscription_id = %(subscription_id)s AND e.url = %(url)s))
"""

# One statement, so that a dispatcher that sees a resumed endpoint also sees its removal
CONDITION = f"""
SELECT CASE WHEN there THEN coalesce(state, 'closed') ELSE 'removed' END,
       b.paused_at IS NOT NULL OR s.paused_at IS NOT NULL,
       CASE WHEN there THEN extract(epoch FROM next_probe_at - clock_timestamp())::float END,
       coalesce(failures, 0), error
FROM (SELECT {THERE} AS there) AS t
LEFT JOIN saf.breaker b ON b.subscription_id = %(subscription_id)s
LEFT JOIN saf.subscription s ON s.subscription_id = %(subscription_id)s
"""

# Another process may have closed, disabled or opened it in between: one failure is counted once
DOWN = f"""
INSERT INTO saf.breaker AS b
    (subscription_id, endpoint, state, failures, failing_since, next_probe_at, error)
SELECT %(subscription_id)s, %(endpoint)s, 'open', 1, clock_timestamp(),
       clock_timestamp() + make_interval(secs => %(wait)s), %(error)s
WHERE {THERE}
ON CONFLICT (subscription_id) DO UPDATE SET
    endpoint = excluded.endpoint, state = 'open', failures = 1,
    failing_since = clock_timestamp(), next_probe_at = excluded.next_probe_at,
    error = excluded.error, changed_at = clock_timestamp()
WHERE b.state = 'closed'
"""

# Other dispatchers wait for this probe for its longest time; if its process dies, another is next
PROBE = f"""
UPDATE saf.breaker SET next_probe_at = clock_timestamp() + make_interval(secs => %(seconds)s)
WHERE subscription_id = %(subscription_id)s AND state = 'open' AND paused_at IS NULL
  AND next_probe_at <= clock_timestamp() AND {THERE}
RETURNING failures
"""
STILL_DOWN = f"""
UPDATE saf.breaker SET
    failures = failures + 1, error = %(error)s, changed_at = clock_timestamp(),
    state = CASE WHEN late THEN 'disabled' ELSE 'open' END,
    next_probe_at = CASE WHEN NOT late
                         THEN clock_timestamp() + make_interval(secs => %(wait)s) END
FROM (SELECT clock_timestamp() > failing_since + make_interval(secs => %(longest)s) AS late
      FROM saf.breaker WHERE subscription_id = %(subscription_id)s) AS l
WHERE subscription_id = %(subscription_id)s AND state = 'open' AND {THERE}
"""
UP = f"""
UPDATE saf.breaker SET state = 'closed', failures = 0, failing_since = NULL, next_probe_at = NULL,
    error = NULL, changed_at = clock_timestamp()
WHERE subscription_id = %(subscription_id)s AND state = 'open' AND {THERE}
"""
DISABLE = f"""
INSERT INTO saf.breaker AS b (subscription_id, endpoint, state, failures, failing_since, error)
SELECT %(subscription_id)s, %(endpoint)s, 'disabled', 1, clock_timestamp(), %(error)s
WHERE {THERE}
ON CONFLICT (subscription_id) DO UPDATE SET
    endpoint = excluded.endpoint, state = 'disabled', failures = b.failures + 1,
    failing_since = coalesce(b.failing_since, clock_timestamp()), next_probe_at = NULL,
    error = excluded.error, changed_at = clock_timestamp()
"""

PAUSE = """
INSERT INTO saf.breaker AS b (subscription_id, endpoint, paused_at, paused_by)
VALUES (%(subscription_id)s, %(endpoint)s, clock_timestamp(), session_user)
ON CONFLICT (subscription_id) DO UPDATE SET
    paused_at = coalesce(b.paused_at, clock_timestamp()),
    paused_by = coalesce(b.paused_by, session_user)
"""
RESUME = """
UPDATE saf.breaker SET state = 'closed', failures = 0, failing_since = NULL, next_probe_at = NULL,
    error = NULL, paused_at = NULL, paused_by = NULL, changed_at = clock_timestamp()
WHERE subscription_id = %(subscription_id)s
"""

TRIM = """
DELETE FROM saf.attempt WHERE subscription_id = %(subscription_id)s AND attempt_id < (
    SELECT attempt_id FROM saf.attempt WHERE subscription_id = %(subscription_id)s
    ORDER BY attempt_id DESC OFFSET %(kept)s LIMIT 1)
"""

IN_WORDS: Mapping[str, str] = MappingProxyType({"closed": "up", "open": "down"})
"""States in the words of operators; other states are words already."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Condition of an endpoint."""

    state: str = "closed"
    """State in saf.breaker; or "removed", if this endpoint is no longer stored."""
    paused: bool = False
    probe_in: float | None = None
    """Seconds until the next probe is due, if the state is open."""
    failures: int = 0
    error: str | None = None

    @property
    def sends(self) -> bool:
        """True if messages are sent."""
        return self.state == "closed" and not self.paused

    @property
    def removed(self) -> bool:
        """True if this endpoint was removed or replaced."""
        return self.state == "removed"

    @property
    def probe_due(self) -> bool:
        """True if a probe is due."""
        return self.probe_in is not None and self.probe_in <= 0 and not self.paused


@dataclass(frozen=True, kw_only=True)
class Book:
    """Reader and writer of one endpoint's condition."""

    subscription_id: int
    endpoint: str
    url: str | None = None
    """URL of the endpoint that a dispatcher uses, if the endpoint is stored in a broker."""

    def look(self, connection: psycopg.Connection[Any]) -> Condition:
        """Return the endpoint's condition."""
        ((state, paused, probe_in, failures, error),) = fetch(connection, CONDITION, self._params())
        return Condition(
            state=state, paused=paused, probe_in=probe_in, failures=failures, error=error
        )

    def down(self, connection: psycopg.Connection[Any], error: str, wait: float) -> None:
        """Store that the endpoint is down; the first probe is due after ``wait`` seconds."""
        connection.execute(DOWN, self._params(error=said(error), wait=wait))

    def probe(self, connection: psycopg.Connection[Any], seconds: float) -> int | None:
        """Take the due probe for up to ``seconds``; return the number of failures so far.

        None if no probe is due.
        """
        found = fetch(connection, PROBE, self._params(seconds=seconds))
        return found[0][0] if found else None

    def still_down(
        self, connection: psycopg.Connection[Any], error: str, wait: float, longest: float
    ) -> None:
        """Store that the probe failed; disable the endpoint if it was down for too long."""
        params = self._params(error=said(error), wait=wait, longest=longest)
        connection.execute(STILL_DOWN, params)

    def up(self, connection: psycopg.Connection[Any]) -> None:
        """Store that the probe succeeded."""
        connection.execute(UP, self._params())

    def disable(self, connection: psycopg.Connection[Any], error: str) -> None:
        """Store that the endpoint is gone."""
        connection.execute(DISABLE, self._params(error=said(error)))

    def pause(self, connection: psycopg.Connection[Any]) -> None:
        """Pause the endpoint for an operator."""
        connection.execute(PAUSE, self._params())

    def resume(self, connection: psycopg.Connection[Any]) -> None:
        """Resume the endpoint for an operator, whatever its state."""
        connection.execute(RESUME, self._params())

    def trim(self, connection: psycopg.Connection[Any]) -> None:
        """Delete all but the latest attempts."""
        connection.execute(TRIM, self._params(kept=KEPT_ATTEMPTS))

    def _params(self, **more: Any) -> dict[str, Any]:
        return {
            "subscription_id": self.subscription_id,
            "endpoint": self.endpoint,
            "url": self.url,
            **more,
        }
