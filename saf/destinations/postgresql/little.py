"""Few messages for an inbox, stored by one statement.

The statement stores messages, given as whole columns, only if nothing must be decided: the broker
is the known one and knows their services, and its watermarks are the marks that the source
remembers. It locks and compares the marks, moves them with the owner's epochs, and inserts the
messages. Otherwise it changes nothing, and `saf.destinations.postgresql.inbox` judges the same
messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from saf.broker import health
from saf.columns import COLUMNS
from saf.database import REVISION, Dsn, check_schema, of_broker
from saf.database.arrays import passing
from saf.destinations.marks import PLACES
from saf.log import lineage

IDENTITY = "SELECT broker_id FROM saf.broker"

# A server whose default is off would acknowledge what a crash could still lose. A stricter default
# (remote_apply) stays.
DURABLE = """
CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
     THEN set_config('synchronous_commit', 'on', false) END
"""

_THE_MARK = "w.source = %(source)s AND w.shard = p.shard AND w.lane = '' AND w.batch = p.batch"
_NAMES = ", ".join(COLUMNS)
_VALUES = ", ".join(f"%({column})s" for column in COLUMNS)

# Locked in the order of the shards, so that two deliveries wait for each other instead of
# deadlocking. A mark that another delivery moves meanwhile is no longer the same.
STORE = f"""
WITH same AS MATERIALIZED (
    SELECT w.shard FROM {PLACES} JOIN saf.watermark w ON {_THE_MARK}
    WHERE w.epoch <= p.epoch AND w.position = p.position AND w.acknowledged
      AND w.opened_at IS NOT DISTINCT FROM p.opened_at
      AND w.set_aside_at IS NOT DISTINCT FROM p.aside
    ORDER BY w.shard FOR UPDATE OF w
), agreed AS MATERIALIZED (
    SELECT FROM saf.broker
    WHERE (SELECT count(*) FROM same) = cardinality(%(place_shards)s)
      AND broker_id = %(destination)s
      AND %(revision)s = (SELECT version_num FROM saf.alembic_version)
      AND NOT EXISTS ({lineage.MOVED.replace("%", "%%")})
      AND (%(services)s::text[] <@ ARRAY(SELECT name FROM saf.service)
           OR NOT EXISTS (SELECT FROM saf.service))
), moved AS (
    UPDATE saf.watermark w
    SET epoch = p.epoch, batch = %(batch)s, position = p.last, opened_at = %(opened_at)s
    FROM {PLACES} WHERE EXISTS (SELECT FROM agreed) AND {_THE_MARK}
), stored AS (
    INSERT INTO saf.inbox ({_NAMES}, source)
    SELECT {_NAMES}, %(source)s
    FROM unnest({_VALUES}) WITH ORDINALITY AS m ({_NAMES}, place)
    WHERE EXISTS (SELECT FROM agreed) ORDER BY place
)
SELECT FROM agreed
"""


class FewMessages:
    """A session that stores few messages; see `saf.destinations.FewMessages`.

    Raises the errors of `saf.broker.health.refuse`.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._connection = dsn.connect(role="deliver", autocommit=True)
        check_schema(self._connection)
        health.refuse(self._connection, "inbox")
        self._connection.execute(f"SELECT {DURABLE}")
        passing(self._connection)
        (identity,) = of_broker(self._connection, IDENTITY)
        self.identity = UUID(str(identity))

    def store(self, given: Mapping[str, Any]) -> bool:
        """Store messages; see `saf.destinations.FewMessages.store`."""
        return self._connection.execute(STORE, {**given, "revision": REVISION}).rowcount > 0

    def close(self) -> None:
        """End the session."""
        self._connection.close()
