"""Checks of a broker: its schema, its rights, set-backs, and messages that wait.

These checks need saf's schema. So `schema` and `rows` come first: after an error of either, the
other checks do not run (see `saf.operating.doctor`). The next checks report causes that
keep messages from being stored or read: missing rights, row-level security, a restored backup,
forged transaction ids. The last checks report messages that wait, unread or set aside, and what
helps.

`parked_by` and `set_back_by` return checks that depend on a saf.toml. That of `set_back_by`
examines both sides: was the source, or one of its destinations, set back? Neither reports a
destination that does not answer, because the destination's own examination does.

Checks only read, and repair nothing: each finding names the cure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.broker import grants, whole
from saf.broker.grants import RIGHTS, Kind
from saf.broker.services import service_names
from saf.config import Settings, did_you_mean
from saf.database import check_schema, of_broker
from saf.destinations.marks import shards_of
from saf.dialogs.statements import Code
from saf.errors import REFILL, RowsGone, SafError, SchemaError, in_words
from saf.log import lineage
from saf.log.read import left
from saf.operating.doctor.patient import Check, Found, Patient, Severity
from saf.operating.repair.set_back import IDENTITY, SetBack, remembered
from saf.operating.repair.set_back import set_back as who_was
from saf.operating.wording import age, at, counted, paused
from saf.receiving.inbox import Receivers
from saf.setaside import lane
from saf.setaside.backoff import SHOWN
from saf.setaside.dead import BECAUSE
from saf.setaside.failure_groups import FailureGroup, failure_groups
from saf.setaside.lane import BROKER, OF_SERVICE, SAME_LANE, THE_LANE
from saf.setaside.parking import Backoff
from saf.setaside.selection import DeadLetters
from saf.setaside.unhandled import unhandled


def schema(patient: Patient) -> Found:
    """Check that the schema has the version of this library."""
    try:
        check_schema(patient.connection)
    except RowsGone as error:
        yield "error", f"saf's own rows are gone: {'; '.join(error.missing)}", REFILL
    except SchemaError as error:
        text, _, cure = str(error).partition(": ")
        yield "error", text, cure


def rows(patient: Patient) -> Found:
    """Check that saf's own rows are complete; without them, no other check means anything."""
    if gone := whole.missing(patient.connection):
        yield "error", f"saf's own rows are gone: {'; '.join(gone)}", REFILL


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
    """Check that the role has the rights of a forwarder."""
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
            f"as the owner, {patient.grant('forwarder')}, and --role for its other duties",
        )


def policies(patient: Patient) -> Found:
    """Check that row-level security hides no rows from this login, which would skip them."""
    for table, names in whole.narrowed(patient.connection):
        yield (
            "error",
            f"row-level security of saf.{table} applies to user "
            f"{patient.connection.info.user!r} (policies: {names}): rows could be hidden, and "
            "nothing is read or stored",
            whole.policies_cure(table),
        )


def publications(patient: Patient) -> Found:
    """Check that no publication contains a table without a replica identity."""
    for table in whole.without_identity(patient.connection):
        yield (
            "error",
            f"saf.{table} is published, by a publication such as one FOR ALL TABLES, and has no "
            "replica identity: PostgreSQL refuses each UPDATE and DELETE of it",
            f"as the owner, ALTER TABLE saf.{table} REPLICA IDENTITY FULL",
        )


def search_path(patient: Patient) -> Found:
    """Check that no role has schema saf first in its search_path: it would create tables there."""
    if found := whole.first_for(patient.connection):
        what, cure = found
        yield "warning", what, cure


# Partitions inherit the constraints of their log, and are validated with it
NOT_VALIDATED = """
SELECT c.relname, o.conname FROM pg_constraint o JOIN pg_class c ON c.oid = o.conrelid
WHERE o.connamespace = 'saf'::regnamespace AND NOT o.convalidated AND o.coninhcount = 0
ORDER BY 1, 2
"""


def constraints(patient: Patient) -> Found:
    """Report constraints that hold for new rows, but that older rows may violate."""
    for table, name in patient.ask(NOT_VALIDATED):
        command = sql.SQL("ALTER TABLE {} VALIDATE CONSTRAINT {}").format(
            sql.Identifier("saf", table), sql.Identifier(name)
        )
        yield (
            "warning",
            f"constraint {name!r} of saf.{table} holds for new rows only: it was added to existing "
            "rows, which may violate it, so readers check each row",
            f"as the owner, {command.as_string(None)}: it reads the table, and blocks "
            "no session. It fails while a row violates it: then repeat it after a purge",
        )


READABLE = """
SELECT log FROM unnest(%(logs)s::text[]) AS log
WHERE has_table_privilege('saf.' || log, 'SELECT')
  AND has_sequence_privilege('saf.' || log || '_id_seq', 'SELECT')
"""

# The oldest messages of each shard: those in the backup that was restored over them
DOUBLED = """
SELECT count(*), min(f.id)
FROM saf.broker b CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS s (shard)
CROSS JOIN LATERAL (
    SELECT id FROM (SELECT id, message_id, txid FROM {log} l
                    WHERE l.shard = s.shard::smallint ORDER BY txid LIMIT 100) AS oldest
    GROUP BY id, message_id, txid HAVING count(*) > 1) AS f
HAVING count(*) > 0
"""


def restored(patient: Patient) -> Found:
    """Check that new ids and transaction ids follow the existing ones; see saf.log.lineage."""
    logs = tuple(log for (log,) in patient.ask(READABLE, logs=list(lineage.LOGS)))
    for what in lineage.problems(patient.connection, logs):
        yield "error", what, "saf rebase"
    for log in logs:
        query = sql.SQL(DOUBLED).format(log=sql.Identifier("saf", log))
        for count, first in patient.ask(query):
            yield (
                "error",
                f"the {log} has {counted(count, 'message')} twice, of those checked, the first "
                f"with id {first}: a backup was restored over existing rows",
                "saf rebase",
            )


ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
REPAIR = "saf rebase"


def set_back_by(config: Settings) -> Check:
    """Return the check of a source and the destinations of a saf.toml."""

    def set_back(patient: Patient) -> Found:
        """Check that the forwarder will not reject the source or a destination as set back."""
        for name, found in _met(patient, config):
            if found.ahead:
                yield (
                    "error",
                    f"destination {name!r} has stored more of "
                    f"{in_words(shards_of(found.ahead))} than is known here: it seems to be "
                    "restored from a backup, and is not forwarded",
                    REPAIR,
                )
            if found.behind:
                since = found.since and f"since a batch of {found.since.isoformat()}"
                example = f", for example: {found.lower}" if found.lower else ""
                yield (
                    "error",
                    f"destination {name!r} has lost messages that it acknowledged of "
                    f"{in_words(shards_of(found.behind))}, {since or 'or never had any'}{example}; "
                    "it seems to be restored from a backup, and gets no messages",
                    REPAIR,
                )

    return set_back


def _met(patient: Patient, config: Settings) -> Iterator[tuple[str, SetBack]]:
    """Yield each destination that answers, and whether the forwarder would find a set-back."""
    source = patient.connection
    (broker_id,) = of_broker(source, IDENTITY)
    for name, destination in config.destinations.items():
        if not destination.capabilities.exactly_once:
            continue
        try:
            before = remembered(source, destination.identity(name))
            known = destination.known(name, broker_id, role="doctor")
        except (psycopg.OperationalError, SafError):
            continue  # its own examination reports this
        with source.transaction():
            source.execute(ONE_SNAPSHOT)
            yield name, who_was(source, name, known, before)


# Each shard is given, so that the index is used
FORGED = """
SELECT count(*), min(f.id)
FROM saf.broker b CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS s (shard)
CROSS JOIN LATERAL (
    SELECT id FROM {log} l
    WHERE l.shard = s.shard AND l.txid >= pg_snapshot_xmax(pg_current_snapshot())) AS f
"""


def forged(patient: Patient) -> Found:
    """Report messages of transactions that this cluster has not begun: they would never be read."""
    if patient.ask(lineage.MOVED):
        return  # they come from another cluster
    for log in ("outbox", "inbox"):
        query = sql.SQL(FORGED).format(log=sql.Identifier("saf", log))
        for count, first in patient.ask(query):
            if count:
                yield (
                    "error",
                    f"the {log} has {counted(count, 'message')}, the first with id {first}, of "
                    "future transactions, written by a role that may write any column: readers "
                    "do not get these messages, and their slots are not purged",
                    f"as the owner, UPDATE saf.{log} SET txid = DEFAULT WHERE txid >= "
                    "pg_snapshot_xmax(pg_current_snapshot()), and revoke INSERT on the table "
                    "from its senders, as the check forgers shows",
                )


def forgers(patient: Patient) -> Found:
    """Report roles that may write columns that only the server should set, e.g. transaction ids."""
    for holder, tables in grants.forgers(patient.connection):
        yield (
            "error" if holder == "PUBLIC" else "warning",
            f"{holder} and its members may write any column of saf.{tables[0]}"
            f"{f' and {len(tables) - 1} more tables' if tables[1:] else ''}, as no kind of role "
            "may: a message with a future transaction is never forwarded",
            grants.forgers_cure(holder),
        )


# Rows not visible in done, by the index, except those complete in the open batch. Rows for services
# other than the subscription's are not its backlog: it only has to move past them. Its
# reader is alive if it is a member, or has taken a batch lately.
LEFT_LYING = f"""
SELECT s.name, count(*) FILTER (WHERE lying.wanted),
       extract(epoch FROM now() - min(lying.since) FILTER (WHERE lying.wanted))::float,
       count(*) FILTER (WHERE NOT lying.wanted),
       EXISTS (SELECT FROM saf.member m
               WHERE m.subscription_id = s.subscription_id AND m.lease_until > now())
       OR EXISTS (SELECT FROM saf.cursor r WHERE r.subscription_id = s.subscription_id
                  AND r.opened_at > now() - make_interval(secs => %(seconds)s)),
       s.stream, to_char(max(c.opened_at), 'YYYY-MM-DD HH24:MI:SS TZ')
FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
CROSS JOIN LATERAL (
    SELECT greatest(written, s.created_at) AS since,
           s.service IS NULL OR to_service = s.service AS wanted
    FROM ({left("{log}", "id, txid, to_service, {written} AS written")}) AS since
) AS lying
WHERE s.log = {{name}}
GROUP BY s.subscription_id, s.name
HAVING min(lying.since) < now() - make_interval(secs => %(seconds)s)
"""


def outbox_left_lying(patient: Patient) -> Found:
    """Report subscriptions of the outbox that do not read its messages."""
    start = "run `saf forward`: check its schedule, e.g. cron or the DAG"
    return _left_lying(patient, "outbox", "created_at", start, ("status",))


def inbox_left_lying(patient: Patient) -> Found:
    """Report subscriptions of the inbox that do not read its messages."""
    start = "start its worker"
    return _left_lying(patient, "inbox", "received_at", start, ("inbox", "status"))


def _left_lying(
    patient: Patient, log: str, written: str, start: str, shown_by: tuple[str, ...]
) -> Found:
    query = sql.SQL(LEFT_LYING).format(
        log=sql.Identifier("saf", log),
        written=sql.Identifier(written),
        name=sql.Literal(log),
    )
    stuck = patient.limits.stuck_seconds
    receivers = Receivers(patient.connection)
    for name, count, seconds, others, live, stream, opened in patient.ask(query, seconds=stuck):
        pids = receivers.of(name) if log == "inbox" else []
        reader = "the outbox" if log == "outbox" else repr(name)
        if stream:
            if count and seconds >= stuck:
                yield _abandoned(patient, name, log, count, seconds, opened=opened)
        elif count and seconds >= stuck:
            left = f"{counted(count, 'message')}, waiting for up to {age(seconds)}"
            if not (live or pids):
                yield "error", f"nobody reads {reader}: {left}", start
                continue
            connected = f" (pid {', '.join(map(str, pids))})" if pids else ""
            yield (
                "warning",
                f"the reader of {reader}{connected} is slow or stuck: {left}",
                f"read its log, and `{patient.command(*shown_by)}`",
            )
        elif others:
            yield (
                "warning",
                f"the reader of {reader} has not passed {counted(others, 'message')} of other "
                "services, so their slots cannot be purged; none of its own messages is old",
                start,
            )


def _abandoned(
    patient: Patient, name: str, log: str, count: int, seconds: float, *, opened: str | None
) -> tuple[Severity, str, str]:
    last = f"has taken none since {opened}" if opened else "has never taken any"
    return (
        "error",
        f"the stream {name!r} of the {log} has not committed {counted(count, 'message')}, oldest "
        f"{age(seconds)}, and {last}; their slots cannot be purged",
        "start its query, or read its log; if it is no longer needed, "
        + patient.command("subscription", "drop", name, "--stream", log),
    )


LANES = f"""
SELECT destination, kind, subject, {BROKER}, attempts, next_attempt_at, b.error, needs_operator,
       lanes, next_attempt_at <= now() AS due, since,
       (SELECT count(*) FROM saf.parked p WHERE {SAME_LANE}) AS messages
FROM (SELECT *, count(*) OVER () AS lanes FROM saf.backoff
      WHERE attempts >= %(attempts)s OR needs_operator AND attempts > 0
      ORDER BY kind = ANY (%(of_service)s), attempts DESC, {THE_LANE}
      LIMIT %(shown)s) AS b
ORDER BY kind = ANY (%(of_service)s), attempts DESC, {THE_LANE}
"""


@dataclass(frozen=True, kw_only=True)
class Failing(Backoff):
    """A lane that has failed, with its messages, and the number of such lanes."""

    messages: int
    lanes: int


def parked_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def parked(patient: Patient) -> Found:
        """Report lanes that need an operator; others only after many failures."""
        params = {
            "attempts": patient.limits.many_attempts,
            "of_service": list(OF_SERVICE),
            "shown": SHOWN,
        }
        with psycopg.Cursor(patient.connection, row_factory=class_row(Failing)) as cursor:
            found = cursor.execute(LANES, params).fetchall()
        for row in found:
            next_step = (
                "not tried again until an operator retries them"
                if row.braked
                else f"next attempt {at(row.next_attempt_at)}"
            )
            waiting = f"{counted(row.messages, 'message')} wait{'s' * (row.messages == 1)} for"
            yield (
                "error",
                f"{waiting} {row.own}, {counted(row.attempts, 'failed attempt')}, {next_step}: "
                f"{row.error}",
                _what_helps(patient, config, row),
            )
        if found and (more := found[0].lanes - len(found)):
            yield (
                "error",
                f"{counted(more, 'more lane')} need an operator, or failed "
                f"{patient.limits.many_attempts} times or more",
                f"list them by their causes: {patient.command('parked', 'groups')}",
            )

    return parked


def _what_helps(patient: Patient, config: Settings, row: Failing) -> str:
    """Return an operator's next step for a lane: a command, if one helps."""
    lane_of = (
        *("--destination", row.destination),
        *("--waits-for", row.waits_for, "--subject", row.subject),
    )
    if row.kind in (lane.Kind.SERVICE, lane.Kind.FOUND_ROUTE) and row.needs_operator:
        create = shlex.join(("saf", "service", "create", row.subject, "--broker", row.destination))
        hint = did_you_mean(row.subject, _living(config, row.destination))
        return (
            f"{create}; or, if the sender misspelt it{hint}, correct the sender, and discard the "
            "waiting messages: "
            f"{patient.command('parked', 'discard', *lane_of, '--why', 'misspelt')}"
        )
    if row.unrouted and row.broker is None:
        return patient.command("route", "add", "DESTINATION", "--service", row.subject)
    if row.needs_operator and row.destination:
        retry = patient.command("parked", "retry-now", "--destination", row.destination)
        return f"fix the cause that the error names; then {retry}"
    return "fix the cause that the error names; no message is lost"


def _living(config: Settings, destination: str) -> list[str]:
    """Return the services that live at a destination; empty if it does not answer."""
    settings = config.destinations.get(destination)
    dsn = settings.broker() if settings is not None else None
    if dsn is None:
        return []
    try:
        with dsn.connect(role="doctor", autocommit=True) as connection:
            return service_names(connection)
    except (psycopg.Error, SafError):
        return []  # the destination's own examination reports this


# If no service lives here, messages for any service are stored, and readers of all get them
UNHEARD = """
SELECT name FROM saf.service AS lives
WHERE NOT EXISTS (SELECT FROM saf.subscription s
                  WHERE s.log = 'inbox' AND NOT s.stream
                    AND (s.service IS NULL OR s.service = lives.name))
ORDER BY name
"""


def unheard(patient: Patient) -> Found:
    """Report services that live here and that no subscription reads."""
    for (name,) in patient.ask(UNHEARD):
        yield (
            "warning",
            f"service {name!r} has no subscription: its messages are stored, but nobody receives "
            "them, and `saf purge` deletes them with the others",
            f"{patient.command('subscription', 'create', name, '--service', name)}, which reads "
            "all stored messages; with --from-now, only new ones, if a removed subscription has "
            f"handled the others; or {patient.command('service', 'remove', name)}",
        )


def no_handler(patient: Patient) -> Found:
    """Report messages that wait for a handler of their type."""
    for group in unhandled(patient.connection):
        yield (
            "warning",
            f"subscription {group.subscription!r}: {group}, since {group.since.isoformat()}",
            'deploy a worker that handles the type; if nobody will, run one with unhandled="dead"',
        )


ENDPOINTS = """
SELECT b.endpoint, s.name, b.state, b.failing_since::text, b.error, b.paused_at::text, b.paused_by
FROM saf.breaker b JOIN saf.subscription s USING (subscription_id)
WHERE b.state <> 'closed' OR b.paused_at IS NOT NULL
ORDER BY b.endpoint
"""


def endpoints(patient: Patient) -> Found:
    """Report endpoints to which dispatchers send nothing."""
    for name, subscription, state, since, error, paused_at, person in patient.ask(ENDPOINTS):
        what = f"endpoint {name!r} of subscription {subscription!r}"
        waits = "its messages wait, and their slots cannot be purged"
        resume = shlex.join(("saf", "endpoint", "resume", name))
        if state == "disabled":
            yield (
                "error",
                f"{what} is disabled, and failing since {since}: {error}; {waits}",
                f"when it works again, {resume}",
            )
        elif state == "open":
            cure = "fix the endpoint; saf retries it"
            yield "warning", f"{what} is down since {since}: {error}; {waits}", cure
        if paused_at is not None:
            yield "warning", f"{what} was paused by {person} at {paused_at}; {waits}", resume


SUBSCRIPTIONS = """
SELECT name, service, paused_at, paused_by, paused_why
FROM saf.subscription WHERE paused_at IS NOT NULL ORDER BY name
"""


PAUSED_DESTINATIONS = """
SELECT destination, paused_at, error FROM saf.backoff WHERE paused_at IS NOT NULL
ORDER BY destination
"""


def pauses(patient: Patient) -> Found:
    """Report subscriptions and destinations that operators have paused."""
    for destination, since, pause in patient.ask(PAUSED_DESTINATIONS):
        yield (
            "warning",
            f"destination {destination!r} was {pause}, at {at(since)}; its messages wait",
            patient.command("destination", "resume", destination),
        )
    for name, service, *pause in patient.ask(SUBSCRIPTIONS):
        what = "service" if service == name else "subscription"
        yield (
            "warning",
            f"{what} {name!r} was {paused(*pause)}; its messages wait, and their slots cannot be "
            "purged",
            patient.command(what, "resume", name),
        )


FAIR = """
SELECT e.name, s.name FROM saf.endpoint e JOIN saf.subscription s USING (subscription_id)
WHERE s.fair_by IS NOT NULL OR s.priority_by IS NOT NULL ORDER BY e.name
"""


def fair(patient: Patient) -> Found:
    """Report endpoints of fair subscriptions, which dispatchers refuse to read."""
    for name, subscription in patient.ask(FAIR):
        yield (
            "error",
            f"endpoint {name!r} reads subscription {subscription!r}, which is fair: dispatchers "
            "receive in no fair order, so they send nothing",
            f"{patient.command('subscription', 'set', subscription, '--unfair')}, or give the "
            "endpoint a subscription of its own",
        )


DEAD = "SELECT reason, count(*), min(error) FROM saf.dead_letter GROUP BY 1 ORDER BY 1"
GROUPED = 100_000
"""Maximum number of dead letters to group by their errors, those that were set aside last."""


def dead_letters(patient: Patient) -> Found:
    """Report messages that wait for an operator, and the largest failure group of each reason."""
    found = patient.ask(DEAD)
    groups = failure_groups(patient.connection, DeadLetters(), newest=GROUPED) if found else None
    largest: dict[str, FailureGroup] = {}
    for group in groups.shown if groups is not None else ():
        largest.setdefault(group.reason, group)
    for reason, count, error in found:
        letters = f"{counted(count, 'dead letter')} ({BECAUSE.get(reason, reason)})"
        all_groups = patient.command("dead", "groups", "--reason", reason)
        if (most := largest.get(reason)) is None:
            yield "warning", f"{letters}, for example: {error}", f"retry or discard: {all_groups}"
            continue
        share = f", {most.messages:,} with one cause" if most.messages < count else ""
        yield (
            "warning",
            f"{letters}{share}, for example: {most.error}",
            f"fix the cause, then {patient.command('dead', 'retry', '--group', most.group)}, or "
            f"discard them; all causes: {all_groups}",
        )


FAILED_DIALOGS = """
SELECT service, count(*) FROM saf.conversation
WHERE error_code = %(code)s AND NOT ended_here GROUP BY service ORDER BY service
"""


def dialogs_set_back(patient: Patient) -> Found:
    """Report dialogs that failed because one end has forgotten what the other end knows."""
    for service, count in patient.ask(FAILED_DIALOGS, code=Code.SET_BACK):
        yield (
            "warning",
            f"{counted(count, 'dialog')} of service {service!r} failed, because one end was set "
            "back: messages may be lost",
            "which ones, and which messages: "
            f"{patient.command('dialog', 'list', '--state', 'error')}; their applications end them",
        )
