"""Check for sessions that hold locks which others wait for, now."""

from __future__ import annotations

from saf.operating.doctor.patient import SHOWN_OF_QUERY, Found, Patient

# Finds sessions that others wait for, that have one of saf's tables for themselves, or that are
# idle in a transaction that has locked rows needed to own shards and to store messages.
HOLDERS = f"""
WITH held AS (
    SELECT pid, array_agg(DISTINCT c.oid::regclass::text) AS tables,
           bool_or(mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                            'AccessExclusiveLock')) AS alone
    FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND granted AND locktype = 'relation' AND mode <> 'AccessShareLock'
      AND c.relkind IN ('r', 'p') AND c.relnamespace = to_regnamespace('saf')
    GROUP BY 1),
waiting AS (
    SELECT blocker AS pid,
           array_agg(DISTINCT format('pid %%s (%%s)', w.pid, w.application_name)) AS waiters
    FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS blocker
    WHERE w.datname = current_database() AND w.wait_event_type = 'Lock'
      AND clock_timestamp() - w.state_change > make_interval(secs => %(waited)s)
    GROUP BY 1)
SELECT a.pid, coalesce(a.application_name, ''), a.usename, coalesce(a.state, 'hidden'),
       a.query_start::text, extract(epoch FROM clock_timestamp() - a.xact_start)::float,
       {SHOWN_OF_QUERY},
       a.wait_event_type || ' ' || a.wait_event, tables, waiters
FROM pg_stat_activity a LEFT JOIN held USING (pid) LEFT JOIN waiting USING (pid)
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND (waiters IS NOT NULL
       OR alone AND clock_timestamp() - a.xact_start > make_interval(secs => %(held)s)
       OR tables IS NOT NULL AND starts_with(a.state, 'idle in transaction')
          AND clock_timestamp() - a.state_change > make_interval(secs => %(held)s))
ORDER BY a.xact_start
"""


def locks(patient: Patient) -> Found:
    """Report sessions that block others, or are about to: who, since when, and whom."""
    limits = patient.limits
    found = patient.ask(HOLDERS, held=limits.held_seconds, waited=limits.waited_seconds)
    for pid, application, user, state, since, age, query, event, tables, waiters in found:
        holds = f"has had locks on {', '.join(tables)} for {age:.0f} s" if tables else "has a lock"
        waits = f", and itself waits for {event}" if event else ""
        up = f": {', '.join(waiters)} wait for it" if waiters else ""
        yield (
            "error" if waiters else "warning",
            f"pid {pid} ({application!r}, user {user!r}, {state} since {since}, "
            f"{' '.join(query.split())!r}{waits}) {holds}{up}",
            f"let it commit or roll back, or SELECT pg_terminate_backend({pid}); a process that "
            "is stopped or waits for a hanging disk must be fixed on the server",
        )
