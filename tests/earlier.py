"""The schema of the revisions before the baseline, from which databases are taken over."""

from __future__ import annotations

from alembic import command

from saf.broker.migrate import BASELINE, BEFORE_BASELINE, config
from saf.database import Dsn
from tests.pipeline import connect

BACK = """
DROP FUNCTION saf.keep_key CASCADE;
DROP TABLE saf.actual_key;

CREATE TABLE saf.cursor_key (
    subscription_id integer,
    shard smallint,
    PRIMARY KEY (subscription_id, shard)
);
COMMENT ON TABLE saf.cursor_key IS
    'actual key of saf.cursor, whose primary key also has the batch; prevents a second row';
INSERT INTO saf.cursor_key SELECT subscription_id, shard FROM saf.cursor;

CREATE TABLE saf.watermark_key (
    source uuid,
    shard smallint,
    lane text,
    PRIMARY KEY (source, shard, lane)
);
COMMENT ON TABLE saf.watermark_key IS
    'actual key of saf.watermark, whose primary key also has the batch; prevents a second row';
INSERT INTO saf.watermark_key SELECT source, shard, lane FROM saf.watermark;

CREATE FUNCTION saf.cursor_is_one() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.cursor_key SELECT NEW.subscription_id, NEW.shard;
    ELSIF TG_OP = 'DELETE' THEN
        DELETE FROM saf.cursor_key
        WHERE (subscription_id, shard) = (OLD.subscription_id, OLD.shard);
    ELSE
        DELETE FROM saf.cursor_key;
    END IF;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION saf.cursor_is_one FROM PUBLIC;
CREATE TRIGGER cursor_is_one AFTER INSERT OR DELETE ON saf.cursor
    FOR EACH ROW EXECUTE FUNCTION saf.cursor_is_one();
CREATE TRIGGER cursor_is_none AFTER TRUNCATE ON saf.cursor
    FOR EACH STATEMENT EXECUTE FUNCTION saf.cursor_is_one();

CREATE FUNCTION saf.watermark_is_one() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO saf.watermark_key SELECT NEW.source, NEW.shard, NEW.lane;
    ELSIF TG_OP = 'DELETE' THEN
        DELETE FROM saf.watermark_key
        WHERE (source, shard, lane) = (OLD.source, OLD.shard, OLD.lane);
    ELSE
        DELETE FROM saf.watermark_key;
    END IF;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION saf.watermark_is_one FROM PUBLIC;
CREATE TRIGGER watermark_is_one AFTER INSERT OR DELETE ON saf.watermark
    FOR EACH ROW EXECUTE FUNCTION saf.watermark_is_one();
CREATE TRIGGER watermark_is_none AFTER TRUNCATE ON saf.watermark
    FOR EACH STATEMENT EXECUTE FUNCTION saf.watermark_is_one();

CREATE TABLE saf.staging (
    attempt bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz DEFAULT now() NOT NULL
);
COMMENT ON TABLE saf.staging IS
    'task attempts with messages that are staged but not sent yet';
COMMENT ON COLUMN saf.staged.attempt IS NULL;
"""


def put_back(dsn: Dsn, revision: str = BEFORE_BASELINE[-1]) -> str:
    """Give a database of today the schema of a revision before the baseline; return its name."""
    assert revision in BEFORE_BASELINE
    command.downgrade(config(dsn), BASELINE)
    with connect(dsn) as connection, connection.transaction():
        connection.execute(BACK.encode())
        connection.execute("UPDATE saf.alembic_version SET version_num = %s", [revision])
    return revision
