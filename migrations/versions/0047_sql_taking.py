"""Receiving one conversation from SQL, and all that can be handed out; see sql_taking.sql."""

from __future__ import annotations

from saf.broker.migrate import apply, baseline

revision = "0047"
down_revision = "0046"

# A new function has no grants: whoever may call saf.receive may call it, and what it calls
REMEMBER = """
SELECT set_config('saf.callers', coalesce(array_agg(DISTINCT a.grantee), '{}')::text, true)
FROM pg_proc p, aclexplode(p.proacl) AS a
WHERE p.pronamespace = 'saf'::regnamespace AND p.proname = 'receive'
  AND a.grantee <> p.proowner AND a.privilege_type = 'EXECUTE';
"""
GRANT = """
DO $$
DECLARE
    callers oid[] = current_setting('saf.callers');
    item record;
BEGIN
    FOR item IN
        SELECT p.oid::regprocedure AS function,
               CASE c.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(c.grantee)) END
               AS role
        FROM pg_proc p CROSS JOIN unnest(callers) AS c (grantee)
        WHERE p.pronamespace = 'saf'::regnamespace AND p.proname IN ({functions})
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', item.function, item.role);
    END LOOP;
END $$;
"""
REPLACED = (
    *("without_own", "reader", "take_shard", "note_failure", "take_shards", "take_lane"),
    "receive",
)
NEW = ("has_seat", "chosen", "unread", "extend_batch", "read_on", "take_ahead")


def upgrade() -> None:
    _replace(REPLACED, (*REPLACED, *NEW), baseline("sql_taking"))


def downgrade() -> None:
    _replace((*REPLACED, *NEW), REPLACED, baseline("sql_receive_0045"))


def _replace(old: tuple[str, ...], new: tuple[str, ...], sql: str) -> None:
    """Drop functions and create others, which their callers may call as before."""
    apply(REMEMBER)
    apply(f"DROP FUNCTION {', '.join(f'saf.{name}' for name in old)};")
    apply(sql)
    apply(GRANT.replace("{functions}", ", ".join(f"'{name}'" for name in new)))
