"""Checks for any database: its server, its settings, its clock."""

from __future__ import annotations

from ipaddress import ip_address

from saf.operating.doctor.patient import Found, Patient


def primary(patient: Patient) -> Found:
    """Check that the server is not a standby: its snapshots differ, and it takes no messages."""
    if patient.ask("SELECT pg_is_in_recovery()") == [(True,)]:
        yield "error", "the server is a standby", "name the primary in the dsn of saf.toml"


UNSAFE = """
SELECT name, CASE WHEN name IN ('autovacuum', 'array_nulls') THEN 'warning' ELSE 'error' END
FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'autovacuum') AND setting = 'off'
   OR name = 'array_nulls' AND reset_val = 'off' -- saf's own sessions have it on
ORDER BY name
"""


def settings(patient: Patient) -> Found:
    """Report settings with which a crash loses committed data, or tables only grow."""
    for name, severity in patient.ask(UNSAFE):
        harm = {
            "array_nulls": "sending many messages in one call fails",
            "autovacuum": "the tables of cursors and watermarks bloat with each batch",
        }.get(name, "a crash of the machine loses or corrupts committed messages")
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
            f"set it to on for {scope}; turn it off per transaction where that may be",
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
            "machine's: times given here, such as deliver_at, mean others there",
            "let both follow the same time servers (NTP)",
        )


def skew_of(patient: Patient) -> tuple[float, float]:
    """Return the seconds by which the server is ahead of this machine, and their uncertainty."""
    before = patient.clock()
    ((server_time,),) = patient.ask("SELECT extract(epoch FROM clock_timestamp())::float")
    after = patient.clock()
    return server_time - (before + after) / 2, (after - before) / 2
