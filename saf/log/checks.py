"""What a log accepts, in any language: the CHECKs of both logs.

Before a statement inserts into a table, PostgreSQL reads and prepares the table's CHECKs, which
takes longer than inserting a row. A chunk of thousands pays that once, but a sending application
pays it for each message. So at an outbox a function makes the same checks, and the server prepares
it once per transaction. The larger an expression is, the longer that takes, too. So `ACCEPT` has a
small one that is true for nearly all messages; `EXAMINE` checks the others as CHECKs would. It
raises with the name of the constraint that it replaces, so that the sender learns which one was
violated.
"""

from __future__ import annotations

from saf.limits import BOUNDED, SMALL_HEADERS
from saf.message import MAX_KEY, MAX_NAME

# Arrow and Python know the years 1 to 9999; a row with 'infinity' could never be forwarded.
IN_CALENDAR = " AND ".join(
    f"{column} >= '0001-01-01 00:00:00+00' AND {column} < '9999-12-31 00:00:00+00'"
    for column in ("created_at", "deliver_at", "expires_at")
)

# Ids above the current one belong to no transaction either, but the current one differs between
# clusters, and a dump must fit into any of them: `saf.operating.doctor` finds such ids.
POSSIBLE = "txid < '9223372036854775808'::xid8"

CHECKS = {
    "addressed": "to_service <> ''",
    "possible": POSSIBLE,
    "in_calendar": IN_CALENDAR,
    "bounded": BOUNDED,
}
"""The checks, by the ends of their constraints' names."""

ACCEPTED = "saf.accept(txid, to_service, key, headers, created_at, deliver_at, expires_at)"
"""SQL: the check of an outbox, which raises for rows that it does not accept."""

_REFUSE = "\n".join(
    f"         WHEN NOT ({check}) THEN 'outbox_{name}'" for name, check in CHECKS.items()
)
_ARGUMENTS = """
    txid xid8, to_service text, key text, headers jsonb,
    created_at timestamptz, deliver_at timestamptz, expires_at timestamptz
"""
# Its own search_path, so that senders cannot substitute their own operators
EXAMINE = f"""
CREATE FUNCTION saf.examine({_ARGUMENTS}) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    refused text;
BEGIN
    IF ({" AND ".join(f"({check})" for check in CHECKS.values())}) IS NOT FALSE THEN
        RETURN true;
    END IF;
    refused = CASE
{_REFUSE}
    END;
    RAISE EXCEPTION USING
        ERRCODE = 'check_violation', SCHEMA = 'saf', TABLE = 'outbox', CONSTRAINT = refused,
        MESSAGE = format('new row for relation "outbox" violates check constraint %I', refused);
END $$
"""
# Setting a search_path takes as long as checking, so each name is qualified with its schema
ACCEPT = f"""
CREATE FUNCTION saf.accept({_ARGUMENTS}) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.>=) 1
       AND pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.<=) {MAX_NAME}
       AND (key IS NULL OR pg_catalog.octet_length(key) OPERATOR(pg_catalog.<=) {MAX_KEY})
       AND (headers IS NULL OR {SMALL_HEADERS})
       AND txid OPERATOR(pg_catalog.<) '{2**63}'::pg_catalog.xid8
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
