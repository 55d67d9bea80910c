"""Checks of blocking transactions: open and prepared ones."""

from __future__ import annotations

from psycopg import sql

from saf.operating.doctor.patient import SHOWN_OF_QUERY, Found, Patient

# A session that wrote to a log, or read it, locks some slot of it until its transaction ends
HOLDERS = """
WITH held AS (
    SELECT pid, virtualtransaction, array_agg(DISTINCT regexp_replace(relname, '_[0-9]$', '')) logs,
           bool_or(mode = 'RowExclusiveLock' AND relname LIKE 'outbox%%') AS sent
    FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND granted AND c.relnamespace = 'saf'::regnamespace AND relname ~ '^(outbox|inbox)(_[0-9])?$'
    GROUP BY 1, 2)
"""
SESSIONS = f"""
{HOLDERS}
SELECT a.pid, coalesce(a.application_name, ''), a.usename, a.state, a.query_start::text,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float,
       {SHOWN_OF_QUERY}, held.logs, held.sent
FROM pg_stat_activity a LEFT JOIN held USING (pid)
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.backend_type = 'client backend' AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL
                                             OR held.pid IS NOT NULL)
  AND clock_timestamp() - a.xact_start > make_interval(secs => %(seconds)s)
ORDER BY a.xact_start
"""


def long_transactions(patient: Patient) -> Found:
    """Report sessions whose open transaction holds back its messages, the purge, or vacuum."""
    found = patient.ask(SESSIONS, seconds=patient.limits.long_seconds)
    for pid, application, user, state, since, age, query, logs, sent in found:
        yield (
            "warning",
            f"pid {pid} ({application!r}, user {user!r}, {state} since {since}, "
            f"{' '.join(query.split())!r}) has had a transaction open for {age:.0f} s: it "
            + _held_up(logs, sent),
            f"let it commit or roll back, or SELECT pg_terminate_backend({pid})",
        )


PREPARED = f"""
{HOLDERS}
SELECT gid, p.owner, extract(epoch FROM clock_timestamp() - prepared)::float, held.logs, held.sent
FROM pg_prepared_xacts p
LEFT JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = p.transaction
    AND l.granted AND l.mode = 'ExclusiveLock'
LEFT JOIN held ON held.pid IS NULL AND held.virtualtransaction = l.virtualtransaction
WHERE p.database = current_database()
  AND clock_timestamp() - prepared > make_interval(secs => %(seconds)s)
ORDER BY prepared
"""


def prepared_transactions(patient: Patient) -> Found:
    """Report prepared transactions that hold back messages, purge or vacuum across restarts."""
    for gid, owner, age, logs, sent in patient.ask(PREPARED, seconds=patient.limits.long_seconds):
        literal = sql.Literal(gid).as_string(None)
        yield (
            "error",
            f"transaction {gid!r} of {owner!r} was prepared {age:.0f} s ago and not ended: it "
            + _held_up(logs, sent),
            f"COMMIT PREPARED {literal} or ROLLBACK PREPARED {literal}, as {owner!r}",
        )


def _held_up(logs: list[str] | None, sent: bool | None) -> str:
    held = ["vacuum"]
    if logs:
        held.insert(0, f"the purge of the {' and '.join(logs)}")
    if sent:
        held.insert(0, "the messages it has sent")
    return f"holds up {', '.join(held)}"


HIDDEN = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND query = '<insufficient privilege>'
"""


def sight(patient: Patient) -> Found:
    """Check that this role can see the sessions of other users."""
    ((hidden,),) = patient.ask(HIDDEN)
    if hidden:
        user = sql.Identifier(patient.connection.info.user).as_string(None)
        yield (
            "warning",
            f"how long the transactions of {hidden} sessions of other users last could not be seen",
            f"GRANT pg_read_all_stats TO {user}",
        )
