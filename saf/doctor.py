"""The doctor: what is wrong, or soon will be, with its cause and its cure.

Each check is a small function that asks one question of one database and yields what it found, if
it found anything. `examine` asks all of them of every broker and destination. Nothing is written.

    error      a promise does not hold, or messages wait for a person
    warning    works, and will not for long; or could not be looked at
    ok         asked, and nothing found

A check that the role may not make is a warning that says so, and the others go on. Another
user's session shows its age only to a member of pg_read_all_stats. Of a query, no more is shown
than what comes before its first literal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import combinations
from typing import Any, Literal

import psycopg
from psycopg import sql

from saf.config import Settings
from saf.database import Dsn, check_schema, fetch
from saf.errors import SchemaError, Unavailable
from saf.grants import RIGHTS, Kind
from saf.rebase import IS_RESTORED

REACHABLE = "reachable"
Severity = Literal["ok", "warning", "error"]

SKEW_SECONDS = 5.0
LONG_SECONDS = 300.0
"""From what age on a transaction is long."""
STUCK_SECONDS = 600.0
"""From what age on a message that nobody has taken up is left lying."""
MANY_ATTEMPTS = 10
FREE_CONNECTIONS = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found."""

    check: str
    where: str
    severity: Severity
    what: str = ""
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From when on something is worth a word."""

    long_seconds: float = LONG_SECONDS
    stuck_seconds: float = STUCK_SECONDS
    skew_seconds: float = SKEW_SECONDS
    many_attempts: int = MANY_ATTEMPTS
    free_connections: int = FREE_CONNECTIONS


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One database, connected."""

    where: str
    connection: psycopg.Connection[Any]
    limits: Limits
    clock: Callable[[], float] = field(repr=False)

    def ask(self, query: str | sql.Composed, **params: object) -> list[tuple[Any, ...]]:
        """The answer, as tuples."""
        return fetch(self.connection, query, params)


Found = Iterator[tuple[Severity, str, str]]
"""Severity, what, cure."""


# The server


def primary(patient: Patient) -> Found:
    """Whether it is a standby, whose snapshots are not the primary's and which takes no message."""
    if patient.ask("SELECT pg_is_in_recovery()") == [(True,)]:
        yield "error", "the server is a standby", "name the primary in the dsn of saf.toml"


UNSAFE = """
SELECT name, CASE name WHEN 'autovacuum' THEN 'warning' ELSE 'error' END FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'autovacuum') AND setting = 'off' ORDER BY name
"""


def settings(patient: Patient) -> Found:
    """Settings with which a crash loses what was committed, or tables only grow."""
    for name, severity in patient.ask(UNSAFE):
        harm = {
            "autovacuum": "the tables of cursors and watermarks bloat with each batch",
        }.get(name, "a crash of the machine loses or corrupts committed messages")
        yield severity, f"{name} = off: {harm}", f"ALTER SYSTEM SET {name} = on, then reload"


# The login's own default, and what is set for others; what a session says for itself is its own
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
    """Whether a default makes commits that a crash may undo. saf's own say ``on`` themselves."""
    for (whose,) in patient.ask(ASYNCHRONOUS):
        yield (
            "error",
            f"synchronous_commit = off by default for {whose}: what an application commits here, "
            "such as what it has received, may be undone by a crash",
            f"set it to on for {whose}; turn it off per transaction where that may be",
        )


HEADROOM = """
SELECT current_setting('max_connections')::int
       - current_setting('superuser_reserved_connections')::int - count(*),
       current_setting('max_connections')::int
FROM pg_stat_activity WHERE backend_type = 'client backend'
"""


def connections(patient: Patient) -> Found:
    """Whether another forwarder with its tasks would still find a connection."""
    ((free, allowed),) = patient.ask(HEADROOM)
    if free < patient.limits.free_connections:
        yield (
            "warning",
            f"{max(free, 0)} of max_connections = {allowed} are free",
            "raise max_connections, or let fewer connect (forwarder.tasks)",
        )


def encryption(patient: Patient) -> Found:
    """Whether messages and passwords travel in clear text over a network."""
    info, encrypted = patient.connection.info, patient.connection.pgconn.ssl_in_use
    if not encrypted and not is_local(info.hostaddr or info.host):
        yield (
            "warning",
            f"the connection to {info.host} is not encrypted",
            "add sslmode=verify-full and sslrootcert=… to the dsn",
        )


def is_local(host: str) -> bool:
    """Whether what is sent there stays on this machine.

    >>> [is_local(host) for host in ("/run/postgresql", "127.0.0.1", "::1", "10.0.0.7", "db")]
    [True, True, True, False, False]
    """
    try:
        return not host or host.startswith(("/", "@")) or ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def clock_skew(patient: Patient) -> Found:
    """Whether this machine's clock and the server's differ."""
    seconds, uncertain = _skew(patient)
    if abs(seconds) - uncertain > patient.limits.skew_seconds:
        yield (
            "warning",
            f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this "
            "machine's: times given here, such as deliver_at, mean others there",
            "let both follow the same time servers (NTP)",
        )


def _skew(patient: Patient) -> tuple[float, float]:
    """By how many seconds the server is ahead of here, give or take how many."""
    before = patient.clock()
    ((there,),) = patient.ask("SELECT extract(epoch FROM clock_timestamp())::float")
    after = patient.clock()
    return there - (before + after) / 2, (after - before) / 2


# Who holds things up

# Whoever wrote to a log, or read it, has locked some slot of it until his transaction ends
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
       left(split_part(split_part(a.query, '''', 1), '$', 1), 60), held.logs, held.sent
FROM pg_stat_activity a LEFT JOIN held USING (pid)
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.backend_type = 'client backend' AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL
                                             OR held.pid IS NOT NULL)
  AND clock_timestamp() - a.xact_start > make_interval(secs => %(seconds)s)
ORDER BY a.xact_start
"""


def long_transactions(patient: Patient) -> Found:
    """Sessions whose open transaction holds back its messages, the purge, or vacuum."""
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
    """The same of prepared transactions, which no restart ends."""
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
    """Whether sessions of other users are hidden from this role."""
    ((hidden,),) = patient.ask(HIDDEN)
    if hidden:
        user = sql.Identifier(patient.connection.info.user).as_string(None)
        yield (
            "warning",
            f"how long the transactions of {hidden} sessions of other users last could not be seen",
            f"GRANT pg_read_all_stats TO {user}",
        )


# The broker


def schema(patient: Patient) -> Found:
    """Whether the schema is the one that this library was written for."""
    try:
        check_schema(patient.connection)
    except SchemaError as error:
        text, _, cure = str(error).partition(": ")
        yield "error", text, cure


MISSING_RIGHTS = """
SELECT wanted.name, wanted.privilege, wanted.part
FROM unnest(%(tables)s::text[], %(privileges)s::text[], %(parts)s::text[])
    AS wanted (name, privilege, part)
JOIN pg_class c ON c.relnamespace = 'saf'::regnamespace AND c.relname = wanted.name
WHERE NOT CASE WHEN part = '' THEN has_table_privilege(c.oid, privilege)
               ELSE has_column_privilege(c.oid, part, privilege) END
ORDER BY 1, 2, 3
"""


def rights(patient: Patient) -> Found:
    """Whether the role may do what a forwarder does."""
    wanted = [
        (table, privilege, column)
        for part in RIGHTS[Kind.FORWARDER]
        for table, privileges in part.items()
        for privilege, columns in privileges.items()
        for column in columns or ("",)
    ]
    tables, privileges, parts = map(list, zip(*wanted, strict=True))
    found = patient.ask(MISSING_RIGHTS, tables=tables, privileges=privileges, parts=parts)
    if found:
        lacking = sorted({f"{privilege} on saf.{table}" for table, privilege, _ in found})
        user = patient.connection.info.user
        yield (
            "error",
            f"role {user!r} lacks what a forwarder needs: {', '.join(lacking)}",
            f"as the owner, saf grant --role forwarder {user}, and --role for whatever else it is",
        )


def restored(patient: Patient) -> Found:
    """Whether its cursors speak of transactions of another cluster, or of ones undone."""
    if patient.ask(IS_RESTORED) == [(True,)]:
        yield (
            "error",
            "the database was restored into another cluster, or its transaction ids went back: "
            "its cursors do not say any more what was read",
            "saf rebase",
        )


# Rows that are not visible in done, by the index, less those complete in the batch in hand
LEFT_LYING = """
SELECT s.name, count(*), extract(epoch FROM now() - min(lying.written))::float,
       EXISTS (SELECT FROM saf.member m
               WHERE m.subscription_id = s.subscription_id AND m.lease_until > now())
FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
CROSS JOIN LATERAL (
    SELECT id, txid, {written} AS written FROM {log} o
    WHERE o.shard = c.shard AND o.txid >= pg_snapshot_xmax(c.done)
    UNION ALL
    SELECT id, txid, {written} FROM {log} o
    WHERE o.shard = c.shard AND o.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))
) AS lying
WHERE s.log = {name} AND (c.open IS NOT NULL AND pg_visible_in_snapshot(lying.txid, c.open)
                          AND lying.id <= c.position) IS NOT TRUE
GROUP BY s.subscription_id, s.name
HAVING min(lying.written) < now() - make_interval(secs => %(seconds)s)
"""


def outbox_left_lying(patient: Patient) -> Found:
    """Subscriptions of the outbox that do not take up its messages."""
    return _left_lying(patient, "outbox", "created_at", "run `saf forward`: look at cron, the DAG")


def inbox_left_lying(patient: Patient) -> Found:
    """The same of the inbox."""
    return _left_lying(patient, "inbox", "received_at", "start its consumer")


def _left_lying(patient: Patient, log: str, written: str, start: str) -> Found:
    query = sql.SQL(LEFT_LYING).format(
        log=sql.Identifier("saf", log), written=sql.Identifier(written), name=sql.Literal(log)
    )
    for name, count, age, alive in patient.ask(query, seconds=patient.limits.stuck_seconds):
        yield (
            "warning" if alive else "error",
            f"subscription {name!r} of the {log} has {count} messages to read, the oldest for "
            f"{age:.0f} s, and {'is slow or stuck' if alive else 'no live member'}; the slots that "
            "they are in cannot be purged",
            "look at its log and at `saf status`" if alive else start,
        )


LANES = """
SELECT destination, lane, attempts, next_attempt_at::text, b.error, count(p.parked_id)
FROM saf.backoff b LEFT JOIN saf.parked p USING (subscription_id, destination, lane)
WHERE attempts >= %(attempts)s GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2
"""


def parked(patient: Patient) -> Found:
    """Lanes that were tried in vain again and again."""
    found = patient.ask(LANES, attempts=patient.limits.many_attempts)
    for destination, lane, attempts, next_at, error, count in found:
        name = " ".join(filter(None, [destination, lane]))
        yield (
            "error",
            f"lane {name!r} has failed {attempts} times, {count} messages are parked in it, the "
            f"next attempt is at {next_at}: {error}",
            "mend what the error says; nothing is lost meanwhile",
        )


DEAD = "SELECT reason, count(*), min(error) FROM saf.dead_letter GROUP BY 1 ORDER BY 1"


def dead_letters(patient: Patient) -> Found:
    """Messages that wait for a person."""
    for reason, count, error in patient.ask(DEAD):
        yield (
            "warning",
            f"{count} dead letters, {reason}, such as: {error}",
            "retry or discard them: saf dead list",
        )


Check = Callable[[Patient], Found]

SERVER: tuple[Check, ...] = (
    primary,
    settings,
    synchronous_commit,
    connections,
    encryption,
    clock_skew,
    sight,
)
"""Checks of any database."""

BROKER: tuple[Check, ...] = (
    rights,
    restored,
    long_transactions,
    prepared_transactions,
    outbox_left_lying,
    inbox_left_lying,
    parked,
    dead_letters,
)
"""Checks that need the schema."""


def examine(
    config: Settings,
    *,
    limits: Limits = Limits(),
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Make every check of every broker and destination. Reads only.

    A database that does not answer is a finding, check `REACHABLE`.
    """
    databases = [(f"broker {name!r}", one.dsn) for name, one in config.brokers.items()]
    databases += [(f"destination {name!r}", one.dsn) for name, one in config.destinations.items()]
    found: list[Finding] = []
    patients: list[Patient] = []
    with ExitStack() as stack:
        for where, dsn in databases:
            try:
                connection = stack.enter_context(dsn.connect(role="doctor", autocommit=True))
            except Unavailable as error:
                found.append(_unreachable(where, error.reason))
                continue
            found.append(Finding(check=REACHABLE, where=where, severity="ok"))
            patients.append(Patient(where=where, connection=connection, limits=limits, clock=clock))
            found += _examined(patients[-1], dsn)
        found += _disagreements(patients)
    return found


def _unreachable(where: str, reason: str) -> Finding:
    return Finding(
        check=REACHABLE,
        where=where,
        severity="error",
        what=reason,
        cure="start the server, or mend the dsn in saf.toml; nothing is lost meanwhile",
    )


def _examined(patient: Patient, dsn: Dsn) -> Iterator[Finding]:
    try:
        for check in SERVER:
            yield from _made(check, patient)
        fit = list(_made(schema, patient))
        yield from fit
        if all(finding.severity == "ok" for finding in fit):
            for check in BROKER:
                yield from _made(check, patient)
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        yield _unreachable(patient.where, dsn.redact(str(error)))


def _made(check: Check, patient: Patient) -> Iterator[Finding]:
    name, where = check.__name__, patient.where
    quiet = True
    try:
        for severity, what, cure in check(patient):
            quiet = False
            yield Finding(check=name, where=where, severity=severity, what=what, cure=cure)
    except psycopg.errors.InsufficientPrivilege as error:
        yield Finding(
            check=name,
            where=where,
            severity="warning",
            what=f"could not look: {error.diag.message_primary}",
            cure="run the doctor as an operator: as the owner, saf grant --role operator …",
        )
    else:
        if quiet:
            yield Finding(check=name, where=where, severity="ok")


def _disagreements(patients: list[Patient]) -> Iterator[Finding]:
    """What no database can know by itself: whether any two of them agree on the time."""
    clocks = []
    for patient in patients:
        try:
            clocks.append((patient, *_skew(patient)))
        except psycopg.Error:
            continue  # it has gone meanwhile, and its own examination says so
    for (one, ahead, blur), (other, behind, more_blur) in combinations(clocks, 2):
        seconds = abs(ahead - behind)
        if seconds - blur - more_blur > one.limits.skew_seconds:
            yield Finding(
                check="clocks_agree",
                where=f"{one.where} and {other.where}",
                severity="warning",
                what=f"their clocks differ by {seconds:.0f} s: a range of time is not the same",
                cure="let both follow the same time servers (NTP)",
            )
