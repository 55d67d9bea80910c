"""Checks of a server: its settings, its clock, its connections, and transactions that block others.

Most of these checks fit any database, even one without saf's schema. `long_transactions` and
`prepared_transactions` need the schema, because they show which logs a transaction holds up.

`locks` reports sessions that hold locks that others wait for now, or are about to wait for.
`long_transactions` and `prepared_transactions` report transactions, open or prepared, that hold
back messages, the purge, or vacuum. `sight` reports that this role cannot see the sessions of other
users, so that the lack of a finding is not mistaken for a good sign.

Checks only read, end no session and change no setting: each finding names the cure.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address

from psycopg import sql

from saf.operating.doctor.patient import Found, Patient
from saf.operating.wording import at

# Of the query, the text before its first literal
SESSION = """
a.pid, a.application_name, a.usename, a.state,
CASE WHEN a.state = 'active' THEN a.query_start ELSE a.state_change END,
extract(epoch FROM clock_timestamp() - a.xact_start)::float,
left(split_part(split_part(a.query, '''', 1), '$', 1), 60), a.wait_event_type || ' ' || a.wait_event
"""
"""SQL for the fields of `Session`, of a row ``a`` of pg_stat_activity."""


@dataclass(frozen=True)
class Session:
    """A session of the server; roles without pg_read_all_stats see its names only."""

    pid: int
    application: str | None
    user: str | None
    state: str | None
    since: datetime | None
    age: float | None
    """Age of its transaction, in seconds."""
    query: str
    event: str | None
    """What it waits for; an idle session waits for its client."""

    def __str__(self) -> str:
        names = [*filter(None, [self.application]), f"user {self.user}"]
        return f"pid {self.pid} ({', '.join(names)})"

    @property
    def lasting(self) -> str:
        """For how long its transaction has been open, in words."""
        return "" if self.age is None else f" for {self.age:.0f} s"

    @property
    def doing(self) -> str:
        """Its state and its statement, in words; empty if they are hidden."""
        if self.state is None or self.since is None:
            return ""
        statement = " ".join(self.query.split())
        if self.state == "active":
            waits = f", waiting for {self.event}" if self.event else ""
            return f"running since {at(self.since)}{waits}; statement: {statement}"
        state = self.state.replace("idle in transaction", "idle in an open transaction")
        return f"{state} since {at(self.since)}; last statement: {statement}"


# Find sessions that others wait for, that have one of saf's tables for themselves, or that are idle
# in a transaction that has locked rows needed to own shards and to store messages.
LOCK_HOLDERS = f"""
WITH held AS (
    SELECT pid, array_agg(DISTINCT 'saf.' || coalesce(log.relname, c.relname)) AS tables,
           bool_or(mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                            'AccessExclusiveLock')) AS alone,
           bool_or(mode = 'AccessExclusiveLock') AS unreadable
    FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class log ON log.oid = i.inhparent
    WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND granted AND locktype = 'relation' AND mode <> 'AccessShareLock'
      AND c.relkind IN ('r', 'p') AND c.relnamespace = to_regnamespace('saf')
    GROUP BY 1),
waiting AS (
    SELECT blocker AS pid,
           array_agg(DISTINCT concat_ws(' ', w.pid::text, '(' || nullif(w.application_name, '')
                                                              || ')')) AS waiters
    FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS blocker
    WHERE w.datname = current_database() AND w.wait_event_type = 'Lock'
      AND clock_timestamp() - w.state_change > make_interval(secs => %(waited)s)
    GROUP BY 1)
SELECT {SESSION}, tables, waiters
FROM pg_stat_activity a LEFT JOIN held USING (pid) LEFT JOIN waiting USING (pid)
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND (waiters IS NOT NULL
       OR unreadable AND %(blocked)s
       OR alone AND clock_timestamp() - a.xact_start > make_interval(secs => %(held)s)
       OR tables IS NOT NULL AND starts_with(a.state, 'idle in transaction')
          AND clock_timestamp() - a.state_change > make_interval(secs => %(held)s))
ORDER BY a.xact_start
"""


def locks(patient: Patient, *, blocked: bool = False) -> Found:
    """Report sessions that block others, or are about to: who, since when, and whom.

    With ``blocked``, also each session that keeps this one from reading, however briefly.
    """
    limits = patient.limits
    waited = 0.0 if blocked else limits.waited_seconds
    found = patient.ask(LOCK_HOLDERS, held=limits.held_seconds, waited=waited, blocked=blocked)
    for *session, tables, waiters in found:
        holder = Session(*session)
        has = f"locked {', '.join(tables)}" if tables else "a lock"
        parts = [f"{holder} has {has}{holder.lasting}", holder.doing, _waiting(waiters or [])]
        yield (
            "error" if waiters or blocked else "warning",
            "; ".join(filter(None, parts)),
            f"let it commit or roll back, or SELECT pg_terminate_backend({holder.pid}); a process "
            "that is stopped or waits for a hanging disk must be fixed on the server",
        )


def _waiting(waiters: list[str]) -> str:
    """Return which sessions wait, in words.

    >>> _waiting(["7 (saf mark)"]), _waiting(["7", "9"]), _waiting([])
    ('pid 7 (saf mark) waits for it', 'pids 7, 9 wait for it', '')
    """
    if len(waiters) == 1:
        return f"pid {waiters[0]} waits for it"
    return f"pids {', '.join(waiters)} wait for it" if waiters else ""


def primary(patient: Patient) -> Found:
    """Check that the server is not a standby: its snapshots differ, and it takes no messages."""
    if patient.ask("SELECT pg_is_in_recovery()") == [(True,)]:
        yield "error", "the server is a standby", "name the primary in the dsn of saf.toml"


UNSAFE = """
SELECT name, CASE WHEN name = 'autovacuum' THEN 'warning' ELSE 'error' END
FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'autovacuum') AND setting = 'off'
ORDER BY name
"""


def settings(patient: Patient) -> Found:
    """Report settings with which a crash loses committed data, or tables only grow."""
    for name, severity in patient.ask(UNSAFE):
        harm = "a crash of the machine loses or corrupts committed messages"
        if name == "autovacuum":
            harm = "the tables of cursors and watermarks bloat with each batch"
        yield severity, f"{name} = off: {harm}", f"ALTER SYSTEM SET {name} = on, then reload"


# The login's own default, and defaults of others; a session's own setting does not count
ASYNCHRONOUS = """
SELECT 'the server' WHERE EXISTS (
    SELECT FROM pg_settings WHERE name = 'synchronous_commit' AND reset_val = 'off'
    AND source NOT IN ('database', 'user', 'database user'))
UNION ALL
SELECT concat_ws(' in ', 'role ' || quote_ident(r.rolname), 'database ' || quote_ident(d.datname))
FROM pg_db_role_setting s LEFT JOIN pg_roles r ON r.oid = s.setrole
LEFT JOIN pg_database d ON d.oid = s.setdatabase
WHERE (s.setdatabase = 0 OR d.datname = current_database())
  AND 'synchronous_commit=off' = ANY (s.setconfig)
"""


def synchronous_commit(patient: Patient) -> Found:
    """Check that no default lets a crash undo commits. saf's own sessions set ``on``."""
    for (scope,) in patient.ask(ASYNCHRONOUS):
        yield (
            "error",
            f"synchronous_commit = off by default for {scope}: a crash may undo commits of "
            "applications here, such as received messages",
            f"set it to on for {scope}; turn it off only in transactions that may be lost",
        )


HEADROOM = """
SELECT current_setting('max_connections')::int
       - current_setting('superuser_reserved_connections')::int - count(*),
       current_setting('max_connections')::int
FROM pg_stat_activity WHERE backend_type = 'client backend'
"""


def connections(patient: Patient) -> Found:
    """Check that connections are left for another forwarder with its tasks."""
    ((free, allowed),) = patient.ask(HEADROOM)
    if free < patient.limits.free_connections:
        yield (
            "warning",
            f"{max(free, 0)} of max_connections = {allowed} are free",
            "raise max_connections, or let fewer connect (forwarder.tasks)",
        )


def encryption(patient: Patient) -> Found:
    """Check that messages and passwords do not cross a network in clear text."""
    info, encrypted = patient.connection.info, patient.connection.pgconn.ssl_in_use
    if not encrypted and not is_local(info.hostaddr or info.host):
        yield (
            "warning",
            f"the connection to {info.host} is not encrypted",
            "add sslmode=verify-full and sslrootcert=… to the dsn",
        )


def is_local(host: str) -> bool:
    """Return whether data sent to a host stays on this machine.

    >>> [is_local(host) for host in ("/run/postgresql", "127.0.0.1", "::1", "10.0.0.7", "db")]
    [True, True, True, False, False]
    """
    try:
        return not host or host.startswith(("/", "@")) or ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def clock_skew(patient: Patient) -> Found:
    """Check that this machine's clock and the server's agree."""
    seconds, uncertain = skew_of(patient)
    if abs(seconds) - uncertain > patient.limits.skew_seconds:
        yield (
            "warning",
            f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this "
            "machine's: times such as deliver_at mean different moments there",
            "let both follow the same time servers (NTP)",
        )


def skew_of(patient: Patient) -> tuple[float, float]:
    """Return the seconds by which the server is ahead of this machine, and their uncertainty."""
    before = patient.clock()
    ((server_time,),) = patient.ask("SELECT extract(epoch FROM clock_timestamp())::float")
    after = patient.clock()
    return server_time - (before + after) / 2, (after - before) / 2


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
            f"the transactions of {hidden} sessions of other users are hidden from this role",
            f"GRANT pg_read_all_stats TO {user}",
        )


# A session that wrote to a log or read it locks a slot of the log until its transaction ends
LONG_TRANSACTIONS = """
WITH held AS (
    SELECT pid, virtualtransaction, array_agg(DISTINCT regexp_replace(relname, '_[0-9]$', '')) logs,
           bool_or(mode = 'RowExclusiveLock' AND relname LIKE 'outbox%%') AS sent
    FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND granted AND c.relnamespace = 'saf'::regnamespace AND relname ~ '^(outbox|inbox)(_[0-9])?$'
    GROUP BY 1, 2)
"""
SESSIONS = f"""
{LONG_TRANSACTIONS}
SELECT {SESSION}, held.logs, held.sent
FROM pg_stat_activity a LEFT JOIN held USING (pid)
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.backend_type = 'client backend' AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL
                                             OR held.pid IS NOT NULL)
  AND clock_timestamp() - a.xact_start > make_interval(secs => %(seconds)s)
ORDER BY a.xact_start
"""


def long_transactions(patient: Patient) -> Found:
    """Report sessions whose open transaction holds back its messages, the purge, or vacuum."""
    for *session, logs, sent in patient.ask(SESSIONS, seconds=patient.limits.long_seconds):
        holder = Session(*session)
        yield (
            "warning",
            f"{holder} has had a transaction open{holder.lasting}: it {_held_up(logs, sent)}; "
            f"{holder.doing}",
            f"let it commit or roll back, or SELECT pg_terminate_backend({holder.pid})",
        )


PREPARED = f"""
{LONG_TRANSACTIONS}
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
