"""Bounds: how long anybody waits in the sessions that are saf's own.

A machine may vanish, a lock may never be given back, a server process may be stopped. None of that
may hold up anybody without end. Each session of saf's own has bounds, by what it is for:

    lock        how long a statement waits for a lock
    statement   how long one takes altogether
    idle        how long a transaction may stand still between two statements, so that a client that
                is stopped in mid-transaction gives its locks back; from PostgreSQL 17 on, the
                transaction also ends after one such time and one statement's
    answer      how long the client waits for a server that says nothing, a little longer than the
                server needs to report one of the bounds above itself; see `saf.database.patience`

Client and server both notice within ``network_seconds`` that the other one's machine has vanished.
A bound is for a statement, and never for a backlog: a large backlog takes many statements.

Some sessions run the statements of an application, a consumer or a test (`THEIRS`); these set their
own bounds. In them, too, a receiver waits for a lock on saf's tables no longer than
``lock_seconds`` (`saf.receiving.claim.begin`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from psycopg import sql

GRACE_SECONDS = 5.0
"""How much longer than the server's own bound the client waits, at most, in seconds. In that time,
the server can report the bound itself.
"""

# In a session whose transactions otherwise may stand still for longer
IDLE_NO_LONGER = """
SELECT set_config('idle_in_transaction_session_timeout', longest, true)
FROM current_setting('lock_timeout') AS longest WHERE longest <> '0'
"""
"""SQL: until its end, a transaction may stand still no longer than others wait for its locks."""

PROBES = 3
"""How many keepalives in a row may go unanswered."""

DOCTORS_LOCK_SECONDS = 2.0
"""The doctor's bound for a lock, in seconds: each of its many questions may meet the same lock."""

METRICS_SECONDS = 5.0
"""The exporter's bound for a statement, in seconds: whoever scrapes it waits for 10 s."""


PAGE_SECONDS = 2.0
"""The dashboard's bound for a statement, in seconds: nobody waits longer for a page."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the table ``[bounds]`` of saf.toml says, in seconds."""

    network_seconds: float = 30.0
    """How long a host may not even acknowledge what it is sent, before its connection is lost."""
    lock_seconds: float = 10.0
    """How long a statement waits for a lock."""
    statement_seconds: float = 60.0
    """How long a statement takes that reads or writes little."""
    chunk_seconds: float = 300.0
    """How long storing or reading one chunk of messages takes."""
    long_seconds: float = 3600.0
    """How long a statement takes that looks at a whole log."""

    def of(self, role: str) -> Limits | None:
        """Return the bounds for the sessions of a role; None for the sessions of `THEIRS`."""
        if role in THEIRS:
            return None
        lock, brief, long = self.lock_seconds, self.statement_seconds, self.long_seconds
        limits = self._limits(lock, brief, idle=brief)
        if role == "doctor":
            limits = self._limits(min(lock, DOCTORS_LOCK_SECONDS), brief, idle=brief)
        elif role == "metrics":
            limits = self._limits(
                min(lock, DOCTORS_LOCK_SECONDS), min(brief, METRICS_SECONDS), idle=brief
            )
        elif role == "ui":
            limits = self._limits(min(lock, PAGE_SECONDS), min(brief, PAGE_SECONDS), idle=brief)
        elif role in AT_SOURCE:
            limits = self._limits(lock, brief, idle=min(lock, brief))
        elif role in ("deliver", "dispatch"):
            limits = self._limits(lock, self.chunk_seconds, idle=brief)
        elif role == "read":
            # a batch is one statement, which waits while its messages are delivered
            limits = self._limits(lock, long, idle=long, answer=self.chunk_seconds)
        elif role in LONG:
            limits = self._limits(lock, long, idle=long)
        elif role in ENDLESS:
            # rolled back after an hour, all of it would be in vain
            limits = self._limits(max(lock, brief), None, idle=long)
        return replace(limits, unread=long) if role in SLOW_READERS else limits

    def _limits(
        self, lock: float, statement: float | None, *, idle: float, answer: float | None = None
    ) -> Limits:
        longest = answer or statement
        return Limits(
            network=self.network_seconds,
            lock=lock,
            statement=statement,
            idle=idle,
            answer=None if longest is None else longest + min(longest, GRACE_SECONDS),
            transaction=None if answer or statement is None else statement + idle,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one session, in seconds."""

    network: float
    lock: float
    statement: float | None
    """The bound of a statement; None: a statement takes as long as it takes."""
    idle: float
    answer: float | None
    """The bound of an answer; None: the client waits as long as the server's machine is there."""
    transaction: float | None
    unread: float | None = None
    """How long the client may leave an answer unread; None: as long as the network's bound."""

    def setting(self, of_process: int | None = None) -> str:
        """Return the statement that sets these bounds at the server, until the session ends.

        ``of_process`` is the id of a process of the server. If another process answers, as behind a
        pooler, the statement sets nothing and gives no row.
        """
        query = SET if of_process is None else SET + HERE
        values = {name: sql.Literal(str(value)) for name, value in self._settings().items()}
        return sql.SQL(query).format(pid=sql.Literal(of_process), **values).as_string(None)

    def conninfo(self) -> dict[str, int]:
        """Return libpq's parameters for the client's side of the bounds."""
        return network(self.network)

    def _settings(self) -> dict[str, int]:
        there = network(self.network)
        return {
            "lock": _milliseconds(self.lock),
            "statement": _milliseconds(self.statement),
            "idle": _milliseconds(self.idle),
            "transaction": _milliseconds(self.transaction),
            # it also ends connections of clients that are there, and have not read for so long
            "user_timeout": _milliseconds(self.unread or self.network),
            "keepalives_idle": there["keepalives_idle"],
            "keepalives_interval": there["keepalives_interval"],
            "keepalives_count": there["keepalives_count"],
            "check": _milliseconds(self.network / PROBES),
        }


THEIRS = frozenset({"receive", "engine", "test", "demo", "application"})
"""Roles whose transactions belong to an application, a consumer or a test."""

AT_SOURCE = frozenset({"forward", "mark"})
"""Roles of forwarders at a source. In their transactions they have rows that all the others need to
share the shards, so none may stand still for longer than the others wait for it.
"""

LONG = frozenset({"purge", "archive", "reconcile", "replay", "dead", "watch", "count"})
"""Roles whose statements look at a whole log or batch, or at all that was set aside."""

SLOW_READERS = frozenset({"read", "archive"})
"""Roles that read a batch or a slot while they do something long with what they have of it."""

ENDLESS = frozenset({"rebase", "migrate", "sink"})
"""Roles whose one transaction covers everything there is, while a person or a job waits for it."""

# The policies of `saf sender` say who sends as whom, and hide nothing; a policy beside them may.
# NULL where no table of saf's has row-level security.
ONLY_SENDERS = """
SELECT bool_and(relname = 'outbox' AND ARRAY(
    SELECT polname || ':' || coalesce(pg_get_expr(polqual, polrelid), '')
    FROM pg_policy WHERE polrelid = c.oid ORDER BY 1) = '{{outbox_read:true,outbox_sender:}}')
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'saf' AND relrowsecurity
"""

# Each holds until the session ends. A server is not asked for what it does not have: before 17
# there is no transaction_timeout, and on Windows nothing tells a server at work that its client has
# gone. Nothing is compiled: the planner expects so much of short statements about snapshots that it
# would compile each, which takes hundreds of times as long as to run it. Times are written as
# psycopg reads them. Transactions are READ COMMITTED unless one says otherwise: whoever has waited
# for a lock has to see what was committed before. A policy that hides rows makes a statement fail,
# where messages would be passed over otherwise. While there are rules of `saf sender`, which are
# policies themselves, `saf.broker.whole` looks for others at each first contact, and the forwarder
# of a source with each batch (`saf.broker.senders`).
SET = (
    """
SELECT set_config('lock_timeout', {lock}, false),
       set_config('statement_timeout', {statement}, false),
       set_config('idle_in_transaction_session_timeout', {idle}, false),
       set_config('tcp_user_timeout', {user_timeout}, false),
       set_config('tcp_keepalives_idle', {keepalives_idle}, false),
       set_config('tcp_keepalives_interval', {keepalives_interval}, false),
       set_config('tcp_keepalives_count', {keepalives_count}, false),
       CASE WHEN current_setting('server_version_num')::int >= 170000
            THEN set_config('transaction_timeout', {transaction}, false) END,
       CASE WHEN version() !~* 'windows|mingw|visual'
            THEN set_config('client_connection_check_interval', {check}, false) END,
       set_config('jit', 'off', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('datestyle', 'ISO', false), set_config('intervalstyle', 'postgres', false),
       set_config('standard_conforming_strings', 'on', false),
       set_config('array_nulls', 'on', false),
"""
    f"CASE WHEN ({ONLY_SENDERS}) IS NOT TRUE THEN set_config('row_security', 'off', false) END\n"
)
HERE = "WHERE pg_backend_pid() = {pid}"

CONNECT_TIMEOUT_SECONDS = 10
"""How long libpq waits for each host at connecting, in seconds."""


def network(seconds: float) -> dict[str, int]:
    """Return libpq's parameters for noticing within so many seconds that a host has vanished."""
    every = max(1, round(seconds / (PROBES + 1)))
    return {
        "tcp_user_timeout": _milliseconds(seconds),
        "keepalives_idle": every,
        "keepalives_interval": every,
        "keepalives_count": PROBES,
    }


def _milliseconds(seconds: float | None) -> int:
    """Return seconds as the server's milliseconds; 0 is no bound.

    >>> _milliseconds(None), _milliseconds(0.0001), _milliseconds(2)
    (0, 1, 2000)
    """
    return 0 if seconds is None else max(1, round(seconds * 1000))
