"""Lanes get separate columns, and each place has one cursor and one watermark.

A lane was described by a single text. From now on, saf.parked and saf.backoff have the columns
``kind``, ``subject`` and ``broker``. Marks (saf.watermark, saf.acknowledged) keep their names,
because other databases have them, too.

One name was ambiguous: a service that is itself called x@<uuid>, and x at that broker. Its messages
show which of the two they belong to, and the lane is split accordingly. The service x@<uuid> then
gets new marks. So if the destination has stored some of its parked messages, but the
acknowledgement was lost, these messages arrive twice. Nothing is lost, and no other messages are
affected.

The batch is the last column of a cursor's key, so that its newest version is found first. A unique
index without it would have to check every version on each write. So the actual key is in a separate
table, to which only the first row writes.
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"

NO_BROKER = "ffffffff-ffff-ffff-ffff-ffffffffffff"

# Meaning of a lane's text, for a message with a given address, or without a message
LANE_OF = f"""
CREATE FUNCTION saf.lane_of(lane text, to_service text, to_broker uuid)
RETURNS TABLE (kind text, subject text, broker uuid) LANGUAGE sql IMMUTABLE AS $$
    SELECT t.kind,
           CASE WHEN as_said THEN to_service WHEN at_broker THEN left(rest, -37) ELSE rest END,
           CASE WHEN as_said THEN coalesce(to_broker, '{NO_BROKER}')
                WHEN at_broker THEN CAST(right(rest, 36) AS uuid) ELSE '{NO_BROKER}' END
    FROM (VALUES ('main', ''), ('retry', 'retry'), ('replay', 'replay'), ('doubt', 'doubt'),
                 ('found_retry', 'found:retry'), ('found_replay', 'found:replay'),
                 ('service', 'service:'), ('route', 'route:'), ('found_route', 'found:route:'),
                 ('key', 'key:'), ('later', 'later:'), ('ahead', 'ahead:')) AS t (kind, prefix)
    CROSS JOIN LATERAL (
        SELECT substr(lane, length(t.prefix) + 1) AS rest,
               t.kind IN ('route', 'found_route') AS addressed
    ) AS r
    CROSS JOIN LATERAL (
        SELECT addressed AND to_service IS NOT NULL
                   AND rest = to_service || coalesce('@' || CAST(to_broker AS text), '') AS as_said,
               addressed
                   AND rest ~ '@[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$' AS at_broker
    ) AS s
    WHERE lane = t.prefix OR right(t.prefix, 1) = ':' AND starts_with(lane, t.prefix)
$$;
"""

# The columns of a lane. For a lane without parked messages, they are derived from the text alone.
UP = f"""
ALTER TABLE saf.backoff DROP CONSTRAINT backoff_pkey;
ALTER TABLE saf.backoff ADD COLUMN subject TEXT, ADD COLUMN broker UUID;
INSERT INTO saf.backoff (subscription_id, destination, lane, subject, broker, attempts,
                         next_attempt_at, error, since, shard)
SELECT b.subscription_id, b.destination, coalesce(m.kind, o.kind), coalesce(m.subject, o.subject),
       coalesce(m.broker, o.broker), attempts, next_attempt_at, error, since, shard
FROM saf.backoff b
LEFT JOIN (
    SELECT DISTINCT p.subscription_id, p.destination, p.lane, l.*
    FROM saf.parked p CROSS JOIN LATERAL saf.lane_of(p.lane, p.to_service, p.to_broker) AS l
    WHERE p.lane ~ '^(found:)?route:'
) AS m ON (m.subscription_id, m.destination, m.lane) = (b.subscription_id, b.destination, b.lane)
CROSS JOIN LATERAL saf.lane_of(b.lane, NULL, NULL) AS o;
DELETE FROM saf.backoff WHERE broker IS NULL;

DROP INDEX saf.parked_lane;
ALTER TABLE saf.parked ADD COLUMN subject TEXT DEFAULT '' NOT NULL,
    ADD COLUMN broker UUID DEFAULT '{NO_BROKER}' NOT NULL;
UPDATE saf.parked p SET (lane, subject, broker) = (
    SELECT kind, l.subject, l.broker FROM saf.lane_of(p.lane, p.to_service, p.to_broker) AS l);
DROP FUNCTION saf.lane_of;

ALTER TABLE saf.backoff ALTER COLUMN subject SET DEFAULT '', ALTER COLUMN subject SET NOT NULL,
    ALTER COLUMN broker SET DEFAULT '{NO_BROKER}', ALTER COLUMN broker SET NOT NULL;
"""

# NOT NULL is repeated because PostgreSQL 18 names it after the column
OF_EACH = f"""
ALTER TABLE saf.{{table}} RENAME COLUMN lane TO kind;
ALTER TABLE saf.{{table}} ALTER COLUMN kind SET DEFAULT 'main', ALTER COLUMN kind DROP NOT NULL;
ALTER TABLE saf.{{table}} ALTER COLUMN kind SET NOT NULL;
ALTER TABLE saf.{{table}} ADD CONSTRAINT {{table}}_lane_possible CHECK (
    kind IN ('main', 'service', 'route', 'retry', 'replay', 'found_route', 'found_retry',
             'found_replay', 'doubt', 'key', 'later', 'ahead')
    AND (subject = '' OR kind IN ('service', 'route', 'found_route', 'key', 'later', 'ahead'))
    AND (broker = '{NO_BROKER}' OR kind IN ('route', 'found_route'))
);
COMMENT ON COLUMN saf.{{table}}.kind IS
    'of the lane: messages that wait for the same thing, in order; see saf.setaside.lane';
COMMENT ON COLUMN saf.{{table}}.subject IS
    'the service, key, shard or conversation that the lane is of';
COMMENT ON COLUMN saf.{{table}}.broker IS
    'that the messages of the lane are addressed to; all ones where they are to none';
"""

INDEXES = """
ALTER TABLE saf.backoff ADD CONSTRAINT backoff_pkey
    PRIMARY KEY (subscription_id, destination, kind, subject, broker);
CREATE INDEX parked_lane
    ON saf.parked (subscription_id, destination, kind, subject, broker, id);
CREATE INDEX parked_later ON saf.parked (subscription_id, destination, subject, deliver_at, id)
    WHERE kind = 'later';
CREATE INDEX parked_expiring ON saf.parked (subscription_id, expires_at)
    WHERE kind = 'route' AND expires_at IS NOT NULL;
"""

MARKS = """
UPDATE saf.watermark SET acknowledged = false WHERE acknowledged AND starts_with(lane, 'once:');
COMMENT ON COLUMN saf.watermark.acknowledged IS
    'whether the source remembers it too; false of one that nothing has moved, or \
before sources did, and of at_most_once';
COMMENT ON COLUMN saf.watermark.lane IS
    'as its source calls it: a name to compare, not to take apart';
COMMENT ON COLUMN saf.acknowledged.lane IS 'as in saf.watermark there';
"""

# Runs as the owner of the tables for every inserting role: nothing else writes the keys.
ONE_EACH = """
CREATE TABLE saf.{table}_key ({columns}, PRIMARY KEY ({key}));
COMMENT ON TABLE saf.{table}_key IS
    'one for each row of saf.{table}, whose own key has the batch too: it lets in no second one';
INSERT INTO saf.{table}_key SELECT DISTINCT {key} FROM saf.{table};
CREATE FUNCTION saf.{table}_is_one() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.{table}_key SELECT {new};
    ELSIF TG_OP = 'DELETE' THEN
        DELETE FROM saf.{table}_key WHERE ({key}) = ({old});
    ELSE
        DELETE FROM saf.{table}_key;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER {table}_is_one AFTER INSERT OR DELETE ON saf.{table}
    FOR EACH ROW EXECUTE FUNCTION saf.{table}_is_one();
CREATE TRIGGER {table}_is_none AFTER TRUNCATE ON saf.{table}
    FOR EACH STATEMENT EXECUTE FUNCTION saf.{table}_is_one();
"""

NOT_ONE_EACH = """
DROP TRIGGER {table}_is_none ON saf.{table};
DROP TRIGGER {table}_is_one ON saf.{table};
DROP FUNCTION saf.{table}_is_one;
DROP TABLE saf.{table}_key;
"""

KEYS = {
    "cursor": {"subscription_id": "INTEGER", "shard": "SMALLINT"},
    "watermark": {"source": "UUID", "shard": "SMALLINT", "lane": "TEXT"},
}

# Two lanes become one lane, as before: the earlier of their times applies.
DOWN = f"""
COMMENT ON COLUMN saf.acknowledged.lane IS NULL;
COMMENT ON COLUMN saf.watermark.lane IS NULL;
COMMENT ON COLUMN saf.watermark.acknowledged IS
    'whether the source remembers it too; false of one that nothing has moved, or \
before sources did';

CREATE FUNCTION saf.text_of(kind text, subject text, broker uuid) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE kind WHEN 'main' THEN '' WHEN 'found_retry' THEN 'found:retry'
                     WHEN 'found_replay' THEN 'found:replay'
                     WHEN 'retry' THEN kind WHEN 'replay' THEN kind WHEN 'doubt' THEN kind
                     ELSE replace(kind, '_', ':') || ':' || subject
                          || CASE WHEN broker <> '{NO_BROKER}'
                                  THEN '@' || CAST(broker AS text) ELSE '' END END
$$;

ALTER TABLE saf.backoff DROP CONSTRAINT backoff_pkey, DROP CONSTRAINT backoff_lane_possible;
ALTER TABLE saf.backoff ALTER COLUMN subject DROP NOT NULL;
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, attempts, next_attempt_at,
                         error, since, shard)
SELECT DISTINCT ON (subscription_id, destination, saf.text_of(kind, subject, broker))
       subscription_id, destination, saf.text_of(kind, subject, broker), NULL, attempts,
       next_attempt_at, error, since, shard
FROM saf.backoff
ORDER BY subscription_id, destination, saf.text_of(kind, subject, broker), next_attempt_at;
DELETE FROM saf.backoff WHERE subject IS NOT NULL;

DROP INDEX saf.parked_expiring;
DROP INDEX saf.parked_later;
DROP INDEX saf.parked_lane;
ALTER TABLE saf.parked DROP CONSTRAINT parked_lane_possible;
UPDATE saf.parked SET kind = saf.text_of(kind, subject, broker);
DROP FUNCTION saf.text_of;
"""

DOWN_OF_EACH = """
ALTER TABLE saf.{table} RENAME COLUMN kind TO lane;
ALTER TABLE saf.{table} ALTER COLUMN lane SET DEFAULT '', ALTER COLUMN lane DROP NOT NULL;
ALTER TABLE saf.{table} ALTER COLUMN lane SET NOT NULL;
ALTER TABLE saf.{table} DROP COLUMN subject, DROP COLUMN broker;
COMMENT ON COLUMN saf.{table}.lane IS
    'messages that wait for the same thing, in order; see saf.parking';
"""

DOWN_INDEXES = """
ALTER TABLE saf.backoff ADD CONSTRAINT backoff_pkey
    PRIMARY KEY (subscription_id, destination, lane);
CREATE INDEX parked_lane ON saf.parked (subscription_id, destination, lane, id);
"""

TABLES = "parked", "backoff"


def upgrade() -> None:
    op.execute(LANE_OF)
    op.execute(UP)
    for table in TABLES:
        op.execute(OF_EACH.format(table=table))
    op.execute(INDEXES)
    op.execute(MARKS)
    for table, columns in KEYS.items():
        op.execute(
            ONE_EACH.format(
                table=table,
                columns=", ".join(f"{name} {kind}" for name, kind in columns.items()),
                key=", ".join(columns),
                new=", ".join(f"NEW.{name}" for name in columns),
                old=", ".join(f"OLD.{name}" for name in columns),
            )
        )


def downgrade() -> None:
    for table in KEYS:
        op.execute(NOT_ONE_EACH.format(table=table))
    op.execute(DOWN)
    for table in TABLES:
        op.execute(DOWN_OF_EACH.format(table=table))
    op.execute(DOWN_INDEXES)
