"""Rights: what a PostgreSQL role may do in a broker, no more than its duty needs.

A login that sends, forwards or receives does not own the schema. `grant` gives an existing role
exactly the rights of the kinds that it is of. In the same transaction it takes away whatever else
the role had in the schema ``saf``. Granting again changes nothing, and a role that changes its duty
keeps nothing of the old one. Rights that a role has by a group stay; if they go beyond what any
kind may do with the logs, granting is refused.
`RIGHTS` is the complete list of what each kind may do.

    writer      sends: inserts messages, and reads none, not even its own
    forwarder   at a source, reads the outbox and moves its cursors; at a destination, fills the
                inbox. A broker is both, so one kind serves both
    receiver    reads the inbox and moves its cursors; so does a dispatcher. One that replies is a
                writer as well
    dialog      begins, speaks and ends dialogs; one that is spoken to is a receiver as well. Unlike
                a writer, it puts messages into the inbox: those to itself
    router      serves routers that forward; it is a receiver and a dialog as well
    stream      reads the outbox and the inbox as tables and streams, and moves the cursors of
                streams; an operator registers them
    sink        sends what jobs of Spark have staged; it reads no message but those that are staged
    purger      empties slots of the logs, and forgets old routes. Not part of the forwarder, which
                runs on many machines: that every reader has completed a slot is checked by the
                program and not by the server, so whoever may TRUNCATE may destroy messages. A
                forwarder that purges beside its work is a purger as well
    operator    reads everything, and looks after routes, services, messages set aside and slots

Nobody may create, alter or drop: only the owner, who migrates, may do that. Rights on the parent of
a partitioned table are enough to read and write through it, and identity columns need no rights on
their sequences.

`grant` creates no role, and touches no right outside of the schema, such as CONNECT. It does not
tell rows apart: a receiver could move the cursors of other subscriptions too. Who may send as which
service, and to which, is said by rules of their own: see `saf.broker.senders`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import psycopg
from psycopg import sql

from saf.columns import COLUMNS, SENT
from saf.database import check_schema, fetch
from saf.errors import ConfigurationError
from saf.log.ring import SLOTS


class Kind(StrEnum):
    """A duty that a role has. A role may have several."""

    WRITER = "writer"
    FORWARDER = "forwarder"
    RECEIVER = "receiver"
    DIALOG = "dialog"
    ROUTER = "router"
    STREAM = "stream"
    SINK = "sink"
    PURGER = "purger"
    OPERATOR = "operator"


Columns = tuple[str, ...]
Rights = Mapping[str, Mapping[str, Columns]]
"""For each table and privilege, the columns that the privilege holds for."""


WHOLE: Columns = ()
"""The privilege holds for the whole table, with columns that are added later."""

# What every program asks first: is this the schema that I was written for?
VERSION: Rights = {"alembic_version": {"SELECT": ("version_num",)}}

# To be a member of a subscription and to move its cursors. Locking a subscription's row asks for
# the right to update some column: the one that nobody reads.
MEMBERSHIP: Rights = {
    "broker": {"SELECT": WHOLE},
    "subscription": {"SELECT": WHOLE, "UPDATE": ("created_at",)},
    "member": {
        "SELECT": WHOLE,
        "INSERT": ("member_id", "subscription_id", "name", "lease_until"),
        "UPDATE": ("lease_until", "stopping"),
        "DELETE": WHOLE,
    },
    "cursor": {
        "SELECT": WHOLE,
        "UPDATE": (
            "owner",
            "epoch",
            "batch",
            "done",
            "open",
            "position",
            "attempted",
            "route_version",
            "opened_at",
            "set_aside_at",
            "allowance",
            "until",
            "cuts",
        ),
    },
}

# To set messages aside and to take parked ones up again; dead ones are a person's.
SETTING_ASIDE: Rights = {
    "parked": {
        "SELECT": WHOLE,
        "INSERT": WHOLE,
        "UPDATE": ("destination", "kind", "subject", "broker", "deliver_at"),
        "DELETE": WHOLE,
    },
    "backoff": {
        "SELECT": WHOLE,
        "INSERT": WHOLE,
        "UPDATE": (
            *("attempts", "next_attempt_at", "error", "awaits_handler", "message_type"),
            "needs_operator",
        ),
        "DELETE": WHOLE,
    },
    # no bodies: only which are there already
    "dead_letter": {
        "SELECT": ("subscription_id", "destination", "shard", "id", "dead_letter_at", "message_id"),
        "INSERT": WHOLE,
    },
}

# What is handed to nobody
COUNTING: Rights = {
    "dropped": {
        "SELECT": WHOLE,
        "INSERT": ("subscription_id", "shard", "reason", "messages", "last_message_id"),
        "UPDATE": ("messages", "last_message_id", "last_at"),
    },
}

# What a dispatcher, which is a receiver, remembers of its endpoint
DISPATCHING: Rights = {
    "endpoint": {"SELECT": WHOLE},
    "dispatched": {"SELECT": WHOLE, "INSERT": WHOLE, "UPDATE": ("batch", "ids"), "DELETE": WHOLE},
    "breaker": {
        "SELECT": WHOLE,
        "INSERT": WHOLE,
        "UPDATE": (
            *("endpoint", "state", "failures", "failing_since", "next_probe_at", "error"),
            *("paused_at", "paused_by", "changed_at"),
        ),
    },
    "attempt": {
        "SELECT": WHOLE,
        "INSERT": (
            *("subscription_id", "message_id", "key", "status", "seconds", "outcome", "error"),
        ),
        "DELETE": WHOLE,
    },
}

# TRUNCATE, and the lock before it, is of a slot itself. Ids are drawn to leave a slot, and not set:
# whoever may set a sequence may have ids given twice.
PURGING: Rights = {
    "broker": {"SELECT": WHOLE},
    "subscription": {"SELECT": WHOLE},
    "cursor": {"SELECT": WHOLE},
    **{
        f"{log}_{slot}": {"SELECT": WHOLE, "TRUNCATE": WHOLE}
        for log in ("outbox", "inbox")
        for slot in range(SLOTS)
    },
    "outbox_id_seq": {"SELECT": WHOLE, "USAGE": WHOLE},
    "inbox_id_seq": {"SELECT": WHOLE, "USAGE": WHOLE},
    "route_version": {"SELECT": WHOLE, "DELETE": WHOLE},
    "route_choice": {
        "SELECT": ("used_at", "key", "service", "destination"),
        "DELETE": WHOLE,
    },
    "resolved_conversation": {"SELECT": ("used_at", "key", "service"), "DELETE": WHOLE},
    # what waits keeps the choices that it has gone by
    "backoff": {"SELECT": ("destination", "subject")},
    "conversation": {
        "SELECT": (
            *("handle", "conversation_id", "is_initiator", "state", "group_id", "ended_here"),
            *("error_code", "changed_at", "service", "receive_sequence"),
        ),
        "DELETE": WHOLE,
    },
    "fragment": {"SELECT": ("conversation_id", "from_initiator", "sequence"), "DELETE": WHOLE},
    "conversation_group": {"SELECT": ("group_id",), "DELETE": WHOLE},
    "staging": {"SELECT": WHOLE, "DELETE": WHOLE},
    "staged": {"SELECT": ("attempt",), "DELETE": WHOLE},
    "sink": {"SELECT": ("version", "sent_at"), "DELETE": WHOLE},
    # what transforms have made of messages goes when these are set aside no more
    "kept_result": {"SELECT": ("subscription_id", "shard", "id"), "DELETE": WHOLE},
    "parked": {"SELECT": ("subscription_id", "id")},
    "dead_letter": {"SELECT": ("subscription_id", "id")},
}

ROUTE = ("service", "broker", "destination", "quality", "enabled", "expires_at", "comment", "local")
ROUTER = ("service", "kind", "expression", "once_per", "mode", "enabled", "comment")

# To remember what a destination has stored; one statement writes new marks and moves others
ACKNOWLEDGING = {
    "SELECT": WHOLE,
    "INSERT": WHOLE,
    "UPDATE": ("batch", "position", "opened_at"),
}

# To let keys choose among the routes that share, and to remember what routers have resolved
CHOOSING: Rights = {
    "route_choice": {
        "SELECT": WHOLE,
        "INSERT": ("service", "broker", "key", "destination"),
        "UPDATE": ("used_at",),
        "DELETE": WHOLE,
    },
    "route_share": {
        "SELECT": WHOLE,
        "INSERT": ("service", "broker", "keys"),
        "UPDATE": ("keys",),
    },
    "resolved_conversation": {
        "SELECT": WHOLE,
        "INSERT": ("router", "key", "service", "broker", "to_key"),
        "UPDATE": ("used_at",),
    },
}

# An end's facts, and what it says, to the other end and to itself
SPOKEN = (*SENT, "conversation_id", "from_initiator", "sequence")
ENDPOINT = (
    *("handle", "conversation_id", "is_initiator", "monolog", "service", "far_service"),
    *("far_broker", "contract", "contract_version", "group_id", "expires_at", "lineage"),
)
FACTS = (
    *("send_sequence", "receive_sequence", "ended_here", "ended_there", "error_code"),
    *("error_text", "timer", "group_id", "changed_at", "far_service", "far_broker", "far_lineage"),
    "answered_by",
)
# Which end here is told of an error; and how many have failed
TOLD = ("conversation_id", "is_initiator", "service", "ended_here", "error_code")
CONVERSING: Rights = {
    "broker": {"SELECT": WHOLE},
    "service": {"SELECT": WHOLE},
    "contract": {"SELECT": WHOLE},
    "contract_message": {"SELECT": WHOLE},
    "message_type": {"SELECT": WHOLE},
    "conversation": {"SELECT": WHOLE, "INSERT": ENDPOINT, "UPDATE": FACTS},
    "resolved_conversation": {"SELECT": WHOLE},
    "conversation_group": {"SELECT": WHOLE, "INSERT": ("group_id",), "UPDATE": ("state",)},
    "fragment": {"SELECT": WHOLE, "INSERT": WHOLE, "DELETE": WHOLE},
    "outbox": {"INSERT": SPOKEN},
    "inbox": {"INSERT": (*COLUMNS, "source")},
}

RIGHTS: Mapping[Kind, tuple[Rights, ...]] = {
    Kind.WRITER: (VERSION, {"outbox": {"INSERT": tuple(SENT)}}),
    Kind.FORWARDER: (
        VERSION,
        MEMBERSHIP,
        SETTING_ASIDE,
        COUNTING,
        CHOOSING,
        {
            "outbox": {"SELECT": WHOLE},
            "outbox_id_seq": {"SELECT": WHOLE},
            "route": {"SELECT": WHOLE},
            "topic": {"SELECT": WHOLE},
            "router": {"SELECT": WHOLE},
            "route_version": {
                "SELECT": WHOLE,
                "INSERT": ("routes", "topics", "routers", "brokers"),
            },
            # of what is stored, what says whether the store is healthy, and no message
            "inbox": {
                "INSERT": (*COLUMNS, "source"),
                "SELECT": ("xmin", "txid", "shard", "id", "message_id"),
            },
            "inbox_id_seq": {"SELECT": WHOLE},
            "watermark": {
                "SELECT": WHOLE,
                "INSERT": WHOLE,
                "UPDATE": (
                    *("epoch", "batch", "position"),
                    *("opened_at", "acknowledged", "set_aside_at"),
                ),
            },
            "acknowledged": ACKNOWLEDGING,
            "taken_out": {"SELECT": WHOLE},
            "fleet_member": {
                "SELECT": WHOLE,
                "INSERT": ("fleet", "name", "broker_id"),
                "UPDATE": ("broker_id", "missing_since"),
            },
            "rejecting": {
                "SELECT": WHOLE,
                "INSERT": WHOLE,
                "UPDATE": ("messages",),
                "DELETE": WHOLE,
            },
            # what transforms have made
            "kept_result": {"SELECT": WHOLE, "INSERT": WHOLE, "DELETE": WHOLE},
            "service": {"SELECT": WHOLE},
            "conversation": {"SELECT": TOLD},
            # for the doctor
            "breaker": {"SELECT": WHOLE},
            # an inbox behind a URL
            "webhook": {
                "SELECT": WHOLE,
                "INSERT": ("digest",),
                "UPDATE": ("stored_at",),
                "DELETE": WHOLE,
            },
            # what an expression has raised is found out after its dead letter is written
            "dead_letter": {"UPDATE": ("error",)},
        },
    ),
    Kind.RECEIVER: (
        VERSION,
        MEMBERSHIP,
        SETTING_ASIDE,
        COUNTING,
        DISPATCHING,
        {"inbox": {"SELECT": WHOLE}, "inbox_id_seq": {"SELECT": WHOLE}},
    ),
    Kind.DIALOG: (VERSION, CONVERSING),
    Kind.ROUTER: (
        VERSION,
        {
            "route": {"SELECT": WHOLE},
            "topic": {"SELECT": WHOLE},
            "router": {"SELECT": WHOLE},
            "route_version": {"SELECT": ("version", "brokers")},
            "resolved_conversation": {
                "SELECT": WHOLE,
                "INSERT": ("router", "key", "service", "broker", "to_key", "handle"),
                "UPDATE": ("used_at", "handle"),
                "DELETE": WHOLE,
            },
        },
    ),
    Kind.STREAM: (
        VERSION,
        {
            "broker": {"SELECT": WHOLE},
            "subscription": {"SELECT": WHOLE},
            "cursor": {
                "SELECT": WHOLE,
                "UPDATE": ("epoch", "batch", "done", "open", "position", "opened_at"),
            },
            "outbox": {"SELECT": WHOLE},
            "outbox_id_seq": {"SELECT": WHOLE},
            "inbox": {"SELECT": WHOLE},
            "inbox_id_seq": {"SELECT": WHOLE},
        },
    ),
    Kind.SINK: (
        VERSION,
        {
            "outbox": {"INSERT": tuple(SENT)},
            "staging": {"SELECT": WHOLE, "INSERT": WHOLE, "DELETE": WHOLE},
            "staged": {"SELECT": WHOLE, "INSERT": WHOLE, "DELETE": WHOLE},
            "sink": {
                "SELECT": WHOLE,
                "INSERT": ("application", "version", "messages"),
                "UPDATE": ("version", "messages", "sent_at"),
            },
        },
    ),
    Kind.PURGER: (VERSION, PURGING, COUNTING),
    Kind.OPERATOR: (
        VERSION,
        PURGING,
        COUNTING,
        DISPATCHING,
        SETTING_ASIDE,
        CHOOSING,
        CONVERSING,
        {
            "contract": {"INSERT": WHOLE},
            "contract_message": {"INSERT": WHOLE},
            "message_type": {"INSERT": WHOLE},
            "outbox": {"SELECT": WHOLE},
            "outbox_status": {"SELECT": WHOLE},
            "sender": {"SELECT": WHOLE},
            "inbox": {"SELECT": WHOLE},
            "member": {"SELECT": WHOLE},
            "watermark": {"SELECT": WHOLE},
            # to repair a destination that was set back
            "acknowledged": {**ACKNOWLEDGING, "DELETE": WHOLE},
            "broker": {"UPDATE": ("incarnation",)},
            "conversation": {"UPDATE": ("lineage",)},
            "route": {"SELECT": WHOLE, "INSERT": ROUTE, "UPDATE": ROUTE, "DELETE": WHOLE},
            "topic": {"SELECT": WHOLE, "INSERT": ("name",), "DELETE": WHOLE},
            "router": {"SELECT": WHOLE, "INSERT": ROUTER, "UPDATE": ROUTER, "DELETE": WHOLE},
            # locking a row asks for the right to update some column
            "dead_letter": {"SELECT": WHOLE, "UPDATE": ("error",), "DELETE": WHOLE},
            "service": {"SELECT": WHOLE, "INSERT": ("name",), "DELETE": WHOLE},
            "fleet_member": {"SELECT": WHOLE, "DELETE": WHOLE},
            "rejecting": {"SELECT": WHOLE},
            "subscription": {
                "SELECT": WHOLE,
                "INSERT": ("name", "log", "service", "stream"),
                "DELETE": WHOLE,
            },
            # to keep receivers from messages while a person decides about them, and to note it
            "cursor": {
                "SELECT": WHOLE,
                "INSERT": ("subscription_id", "shard", "done"),
                "UPDATE": ("allowance", "set_aside_at"),
            },
            "endpoint": {
                "INSERT": ("name", "subscription_id", "url", "settings"),
                "UPDATE": ("subscription_id", "url", "settings"),
                "DELETE": WHOLE,
            },
            "taken_out": {
                "SELECT": WHOLE,
                "INSERT": (
                    *("subscription_id", "destination", "kind", "subject", "broker"),
                    *("shard", "opened_at"),
                ),
                "DELETE": WHOLE,
            },
            "audit": {"SELECT": WHOLE, "INSERT": ("action", "message_ids", "why", "person")},
        },
    ),
}

EXECUTED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("outbox", "INSERT"): ("accept", "examine", "check_sender"),
}
"""For a table and a privilege, the functions that whoever uses it executes: of CHECKs, policies and
the conditions of triggers. Everybody may, unless the owner's default privileges say otherwise."""

REVOKE = (
    "REVOKE ALL ON ALL TABLES IN SCHEMA saf FROM {role}",
    "REVOKE ALL ON ALL SEQUENCES IN SCHEMA saf FROM {role}",
    "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA saf FROM {role}",
    "REVOKE ALL ON SCHEMA saf FROM {role}",
)
USE = "GRANT USAGE ON SCHEMA saf TO {role}"
GRANT = "GRANT {privileges} ON {table} TO {role}"
GRANT_EXECUTE = "GRANT EXECUTE ON FUNCTION {functions} TO {role}"

# No kind may: what a message's transaction was is for the server to say. Rights come to a role also
# by a group, or by everybody's rights, and to tables by default privileges that were in force when
# they were created.
FORGERS = """
SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
       array_agg(DISTINCT c.relname::text ORDER BY c.relname::text)
FROM pg_class c CROSS JOIN LATERAL (
    SELECT grantee, privilege_type FROM aclexplode(c.relacl)
    UNION ALL
    SELECT grantee, privilege_type FROM pg_attribute t, aclexplode(t.attacl)
    WHERE t.attrelid = c.oid AND t.attname IN ('txid', 'id')) AS a
WHERE c.relnamespace = 'saf'::regnamespace AND c.relname ~ '^(outbox|inbox)(_[0-9]+)?$'
  AND c.relkind IN ('r', 'p') AND a.privilege_type IN ('INSERT', 'UPDATE')
  AND a.grantee <> c.relowner
  AND (%(role)s::text IS NULL OR a.grantee = 0 OR pg_has_role(%(role)s, a.grantee, 'USAGE'))
GROUP BY a.grantee ORDER BY 1
"""

# Two at a time would update the same rows of the catalog; migrations take the same turn.
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtextextended('saf migrate', 0))"

# As text, because a longer name would be cut to the length of another role's.
STANDING = """
SELECT pg_get_userbyid(owner), pg_has_role(owner, 'USAGE'), pg_has_role(r.oid, owner, 'MEMBER')
FROM pg_roles r, (SELECT nspowner FROM pg_namespace WHERE nspname = 'saf'
                  UNION SELECT relowner FROM pg_class c JOIN pg_namespace n
                        ON n.oid = c.relnamespace WHERE nspname = 'saf') AS owners (owner)
WHERE r.rolname = %(role)s::text
"""


def statements(role: str, kinds: Iterable[Kind]) -> Iterator[sql.Composed]:
    """Give the SQL that leaves a role the rights of these kinds; without kinds, it has none."""
    grantee = sql.Identifier(role)
    for statement in REVOKE:
        yield sql.SQL(statement).format(role=grantee)
    parts = [part for kind in kinds for part in RIGHTS[kind]]
    if parts:
        yield sql.SQL(USE).format(role=grantee)
    for part in parts:
        for table, privileges in part.items():
            yield sql.SQL(GRANT).format(
                privileges=sql.SQL(", ").join(map(_privilege, privileges, privileges.values())),
                table=sql.Identifier("saf", table),
                role=grantee,
            )
            for privilege in privileges:
                if functions := EXECUTED.get((table, privilege)):
                    names = (sql.Identifier("saf", name) for name in functions)
                    yield sql.SQL(GRANT_EXECUTE).format(
                        functions=sql.SQL(", ").join(names), role=grantee
                    )


def grant(connection: psycopg.Connection[Any], role: str, kinds: Iterable[Kind]) -> None:
    """Give a role the rights of these kinds and no others in this broker, in one transaction.

    Raises:
        ConfigurationError: there is no such role, it owns the schema, it has passed rights on, a
            group gives it more than any kind may do, or the connection's user does not own the
            schema.
        SchemaMissing, SchemaMismatch: the database is not a broker of this version.
    """
    try:
        with connection.transaction():
            connection.execute(TAKE_TURN)
            check(connection, role)
            kinds = [*kinds]
            for statement in statements(role, kinds):
                connection.execute(statement)
            for whose, tables in forgers(connection, role) if kinds else ():
                raise ConfigurationError(
                    f"role {role!r} may still write any column of saf.{tables[0]} in database "
                    f"{connection.info.dbname!r}, by the rights of {whose}: {forgers_cure(whose)}"
                )
    except psycopg.errors.DependentObjectsStillExist as error:
        raise ConfigurationError(
            f"role {role!r} has passed rights in schema saf of database "
            f"{connection.info.dbname!r} on to others ({error.diag.message_detail}): "
            "it must REVOKE them first"
        ) from error


def forgers(
    connection: psycopg.Connection[Any], role: str | None = None
) -> list[tuple[str, list[str]]]:
    """Return who may write any column of a log, and of which tables; with ``role``, for that role.

    Such a right is its own, a group's, or everybody's (PUBLIC). The schema's owner has it anyway.
    """
    return [(whose, tables) for whose, tables in fetch(connection, FORGERS, {"role": role})]


def forgers_cure(whose: str) -> str:
    """Return what to do about rights of a role or group, given as SQL, that no kind has."""
    return (
        f"as the owner, REVOKE ALL ON ALL TABLES IN SCHEMA saf FROM {whose}, run `saf grant` for "
        f"each role that needs rights, and remove default privileges that gave them (\\ddp in psql)"
    )


def check(connection: psycopg.Connection[Any], role: str) -> None:
    """Raise what `grant` would raise; change nothing."""
    check_schema(connection)
    database = connection.info.dbname
    owners = fetch(connection, STANDING, {"role": role})
    if not owners:
        create = sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)).as_string(connection)
        raise ConfigurationError(
            f"the server of database {database!r} has no role {role!r}: create it first, with "
            f"{create}"
        )
    for owner, is_mine, is_its in owners:
        if is_its:
            raise ConfigurationError(
                f"role {role!r} may do everything in database {database!r}, as superuser or as "
                f"{owner!r}, who owns schema saf: grant to a role of its own"
            )
        if not is_mine:
            raise ConfigurationError(
                f"user {connection.info.user!r} may not grant in database {database!r}: "
                f"let {owner!r}, who owns schema saf, do it"
            )


def _privilege(privilege: str, columns: Columns) -> sql.Composable:
    if not columns:
        return sql.SQL(privilege)
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    return sql.SQL(privilege + " ({})").format(names)
