"""An outbox is checked by a function, which the server prepares once per session.

Existing rows have passed the same checks, or are older than the checks. To find out, a log must be
read while its table is locked; a long log is not read, up and down.
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"

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
ACCEPT = f"""
CREATE FUNCTION saf.accept(
    txid xid8, to_service text, key text, headers jsonb,
    created_at timestamptz, deliver_at timestamptz, expires_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
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
ACCEPTED = "saf.accept(txid, to_service, key, headers, created_at, deliver_at, expires_at)"

ADD = "ALTER TABLE saf.outbox ADD CONSTRAINT outbox_{name} CHECK ({check})"
DROP = "ALTER TABLE saf.outbox DROP CONSTRAINT outbox_{name}"
BOUNDED = """
ALTER TABLE saf.outbox ADD CONSTRAINT outbox_bounded CHECK ({check}) NOT VALID;
COMMENT ON CONSTRAINT outbox_bounded ON saf.outbox IS
    'in bytes: indexes, COPY and memory have limits in bytes; see saf.limits';
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM saf.outbox OFFSET 1000000) THEN
        ALTER TABLE saf.outbox VALIDATE CONSTRAINT outbox_bounded;
    END IF;
EXCEPTION WHEN check_violation THEN
    NULL;  -- an older row cannot be read; whoever reads the log looks at each
END $$;
"""


def upgrade() -> None:
    op.execute(ACCEPT)
    for name in CHECKS:
        op.execute(DROP.format(name=name))
    op.execute(BOUNDED.format(check=ACCEPTED))


def downgrade() -> None:
    op.execute(DROP.format(name="bounded"))
    op.execute("DROP FUNCTION saf.accept")
    for name, check in CHECKS.items():
        if name != "bounded":
            op.execute(ADD.format(name=name, check=check))
    op.execute(BOUNDED.format(check=CHECKS["bounded"]))
