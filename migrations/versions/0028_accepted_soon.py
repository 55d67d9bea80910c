"""An outbox's check first tests a small expression that holds for nearly all messages."""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"

ARGUMENTS = """
    txid xid8, to_service text, key text, headers jsonb,
    created_at timestamptz, deliver_at timestamptz, expires_at timestamptz
"""
CHECKS = {
    "addressed": "to_service <> ''",
    "possible": "txid < '9223372036854775808'::xid8",
    "in_calendar": " AND ".join(
        f"{column} >= '0001-01-01 00:00:00+00' AND {column} < '9999-12-31 00:00:00+00'"
        for column in ("created_at", "deliver_at", "expires_at")
    ),
    "bounded": """
octet_length(to_service) <= 255 AND octet_length(key) <= 1024
AND (pg_column_size(headers || '{}') <= 96 OR octet_length(CAST(headers AS text)) <= 1048576)
""",
}
REFUSE = "\n".join(
    f"         WHEN NOT ({check}) THEN 'outbox_{name}'" for name, check in CHECKS.items()
)

# The former check, for the other messages
EXAMINE = f"""
CREATE OR REPLACE FUNCTION saf.{{name}}({ARGUMENTS}) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    refused text;
BEGIN
    IF ({" AND ".join(f"({check})" for check in CHECKS.values())}) IS NOT FALSE THEN
        RETURN true;
    END IF;
    refused = CASE
{REFUSE}
    END;
    RAISE EXCEPTION USING
        ERRCODE = 'check_violation', SCHEMA = 'saf', TABLE = 'outbox', CONSTRAINT = refused,
        MESSAGE = format('new row for relation "outbox" violates check constraint %I', refused);
END $$
"""
ACCEPT = f"""
CREATE OR REPLACE FUNCTION saf.accept({ARGUMENTS}) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.>=) 1
       AND pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.<=) 255
       AND (key IS NULL OR pg_catalog.octet_length(key) OPERATOR(pg_catalog.<=) 1024)
       AND (headers IS NULL OR
pg_catalog.pg_column_size(headers OPERATOR(pg_catalog.||) '{{}}'::pg_catalog.jsonb)
           OPERATOR(pg_catalog.<=) 96)
       AND txid OPERATOR(pg_catalog.<) '9223372036854775808'::pg_catalog.xid8
       AND least(created_at, deliver_at, expires_at)
           OPERATOR(pg_catalog.>=) '0001-01-01 00:00:00+00'::pg_catalog.timestamptz
       AND greatest(created_at, deliver_at, expires_at)
           OPERATOR(pg_catalog.<) '9999-12-31 00:00:00+00'::pg_catalog.timestamptz
    THEN
        RETURN true;
    END IF;
    RETURN saf.examine(txid, to_service, key, headers, created_at, deliver_at, expires_at);
END $$
"""


def upgrade() -> None:
    op.execute(EXAMINE.replace("{name}", "examine"))
    op.execute(ACCEPT)


def downgrade() -> None:
    op.execute(EXAMINE.replace("{name}", "accept"))
    op.execute("DROP FUNCTION saf.examine")
