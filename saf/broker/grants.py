"""Rights: what a PostgreSQL role may do in a broker, no more than its duty needs.

A login that sends, forwards or receives does not own the schema. `grant` gives an existing role
exactly the rights of its kinds. In the same transaction it revokes all other rights of the role in
the schema ``saf``. Granting again changes nothing, and a role that changes its duty keeps no rights
of the old one. Rights that a role has by a group stay; if they exceed what any kind may do with the
logs, granting is refused.
`RIGHTS` is the complete list of what each kind may do.

    writer      sends: inserts messages, and reads none but their ids, not even its own. It also
                calls the functions that hold, cancel and reschedule messages, and those that
                change schedules, whose times and states it reads, but not their messages
    forwarder   at a source, reads the outbox and moves its cursors; at a destination, fills the
                inbox. A broker is both, so one kind serves both
    receiver    reads the inbox and moves its cursors; so does a dispatcher. A receiver that replies
                is a writer as well
    dialog      begins, speaks in and ends dialogs; a service that others begin dialogs with is a
                receiver as well. Unlike a writer, it inserts messages into the inbox: those to
                itself
    router      serves routers that forward; it is a receiver and a dialog as well
    stream      reads the outbox and the inbox as tables and streams, and moves the cursors of
                streams; an operator registers them
    sink        sends what jobs of Spark have staged; it reads no messages but staged ones
    purger      empties slots of the logs, and forgets old routes. Not part of the forwarder, which
                runs on many machines: the program, not the server, checks that every reader has
                completed a slot, so a role that may TRUNCATE may destroy messages. A forwarder that
                purges beside its work is a purger as well
    operator    reads everything, and manages routes, services, schedules, messages set aside
                and slots

No kind may create, alter or drop: only the owner, who migrates, may do that. Rights on the parent
of a partitioned table are enough to read and write through it, and identity columns need no rights
on their sequences.

`grant` creates no role, and changes no right outside of the schema, such as CONNECT. It does not
distinguish rows: a receiver could move the cursors of other subscriptions too. Separate rules
define who may send as which service, and to which: see `saf.broker.senders`.
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
    """A duty of a role. A role may have several."""

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

# Every program first checks the schema's revision
VERSION: Rights = {"alembic_version": {"SELECT": ("version_num",)}}

# To be a member of a subscription and to move its cursors. Locking a subscription's row needs the
# right to update some column: this one is never read.
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

# Schedules, but not their messages, and what a forwarder needs to know of those that are due
SCHEDULES: Rights = {
    "schedule": {
        "SELECT": (
            *("name", "from_service", "to_service", "message_type", "cron", "every", "anchor"),
            *("zone", "missed", "next_run", "last_run", "skipped", "paused", "refused", "origin"),
            *("sender", "created_at", "changed_at"),
        ),
    },
    "schedule_run": {"SELECT": WHOLE},
}
DUE_SCHEDULES: Rights = {
    "schedule": {
        "SELECT": (
            *("name", "version", "cron", "every", "anchor", "zone", "missed", "next_run"),
            *("paused", "refused"),
        ),
    },
}

# To set messages aside and to take parked ones up again; dead letters are for operators.
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
    # no bodies: only the identity of existing dead letters
    "dead_letter": {
        "SELECT": ("subscription_id", "destination", "shard", "id", "dead_letter_at", "message_id"),
        "INSERT": WHOLE,
    },
}

# Messages that are handed to nobody
COUNTING: Rights = {
    "dropped": {
        "SELECT": WHOLE,
        "INSERT": ("subscription_id", "shard", "reason", "messages", "last_message_id"),
        "UPDATE": ("messages", "last_message_id", "last_at"),
    },
}

# The records that a dispatcher, which is a receiver, keeps of its endpoint
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

# TRUNCATE, and the lock before it, applies to a slot itself. To leave a slot, ids are drawn, not
# set: a role that may set a sequence may cause duplicate ids.
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
    "resolved_conversation": {
        "SELECT": ("used_at", "kept_until", "key", "service"),
        "DELETE": WHOLE,
    },
    # messages that wait keep the choices by which they were routed
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
    "staged": {"SELECT": ("attempt",), "DELETE": WHOLE},
    "sink": {"SELECT": ("version", "sent_at"), "DELETE": WHOLE},
    # results of transforms are removed when their messages are no longer set aside
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

# To keep a rate
ALLOTTING = {
    "SELECT": WHOLE,
    "INSERT": ("subscription_id", "destination", "next_free_at"),
    "UPDATE": ("next_free_at",),
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

# An end's facts, and the messages that it sends to the other end and to itself
SPOKEN = (*SENT, "conversation_id", "from_initiator", "sequence")
ENDPOINT = (
    *("handle", "conversation_id", "is_initiator", "monolog", "service", "far_service"),
    *("far_broker", "contract", "contract_version", "group_id", "expires_at", "lineage"),
    "redirected_by",
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
    # the ids, for INSERT … RETURNING message_id
    Kind.WRITER: (
        VERSION,
        {"outbox": {"INSERT": tuple(SENT), "SELECT": ("message_id",)}},
        SCHEDULES,
    ),
    Kind.FORWARDER: (
        VERSION,
        MEMBERSHIP,
        SETTING_ASIDE,
        COUNTING,
        CHOOSING,
        DUE_SCHEDULES,
        {
            "outbox": {"SELECT": WHOLE},
            "outbox_id_seq": {"SELECT": WHOLE},
            # the times of held messages, but neither names nor bodies
            "held": {"SELECT": ("due", "refused")},
            "route": {"SELECT": WHOLE},
            "topic": {"SELECT": WHOLE},
            "router": {"SELECT": WHOLE},
            "route_version": {
                "SELECT": WHOLE,
                "INSERT": ("routes", "topics", "routers", "brokers"),
            },
            # of stored messages, only the columns that show whether the store is healthy
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
            # topics that are read into the inbox
            "source": {
                "SELECT": WHOLE,
                "INSERT": ("name", "kind", "topic", "topic_id"),
                "UPDATE": ("topic_id",),
            },
            "source_member": {
                "SELECT": WHOLE,
                "INSERT": ("member_id", "source", "name", "lease_until"),
                "UPDATE": ("lease_until",),
                "DELETE": WHOLE,
            },
            "source_window": {
                "SELECT": WHOLE,
                "INSERT": ("source", "shard", "number", "ids"),
                "DELETE": WHOLE,
            },
            "source_shard": {
                "SELECT": WHOLE,
                "INSERT": ("source", "shard", "start_batch", "start_position", "added"),
                "UPDATE": (
                    *("owner", "epoch", "start_batch", "start_position", "added", "pending"),
                    "looked_at",
                ),
            },
            "taken_out": {"SELECT": WHOLE},
            "allotment": ALLOTTING,
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
            # results of transforms
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
            # an expression's error is known only after its dead letter is written
            "dead_letter": {"UPDATE": ("error",)},
        },
    ),
    Kind.RECEIVER: (
        VERSION,
        MEMBERSHIP,
        SETTING_ASIDE,
        COUNTING,
        DISPATCHING,
        {
            "inbox": {"SELECT": WHOLE},
            "inbox_id_seq": {"SELECT": WHOLE},
            # a subscription with limits; to lock a seat needs the right to update some column
            "allotment": ALLOTTING,
            "seat": {"SELECT": WHOLE, "UPDATE": ("created_at",)},
        },
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
                "UPDATE": ("used_at", "handle", "kept_until"),
                "DELETE": WHOLE,
            },
            # messages that are redirected keep the time at which they were sent
            "outbox": {"INSERT": (*SPOKEN, "created_at")},
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
            "held": {"SELECT": WHOLE, "UPDATE": ("due", "refused"), "DELETE": WHOLE},
            "schedule": {"SELECT": WHOLE},
            "schedule_run": {"SELECT": WHOLE},
            # only the owner writes captures and runs backfills
            "capture": {"SELECT": WHOLE},
            "backfill": {
                "SELECT": WHOLE,
                "UPDATE": ("paused_at", "paused_by", "ended_at", "cancelled"),
            },
            "sender": {"SELECT": WHOLE},
            "inbox": {"SELECT": WHOLE},
            "member": {"SELECT": WHOLE},
            "watermark": {"SELECT": WHOLE},
            # to let a source continue from another place; locking a row needs an UPDATE right
            "source": {
                "SELECT": WHOLE,
                "INSERT": ("name", "kind", "topic", "topic_id"),
                "UPDATE": ("topic_id",),
                "DELETE": WHOLE,
            },
            "source_member": {"SELECT": WHOLE},
            "source_shard": {
                "SELECT": WHOLE,
                "INSERT": ("source", "shard", "start_batch", "start_position", "added"),
            },
            # to repair a destination that was set back
            "acknowledged": {**ACKNOWLEDGING, "DELETE": WHOLE},
            "broker": {"UPDATE": ("incarnation",)},
            "conversation": {"UPDATE": ("lineage",)},
            "route": {"SELECT": WHOLE, "INSERT": ROUTE, "UPDATE": ROUTE, "DELETE": WHOLE},
            "topic": {"SELECT": WHOLE, "INSERT": ("name",), "DELETE": WHOLE},
            "router": {"SELECT": WHOLE, "INSERT": ROUTER, "UPDATE": ROUTER, "DELETE": WHOLE},
            # locking a row needs the right to update some column
            "dead_letter": {"SELECT": WHOLE, "UPDATE": ("error",), "DELETE": WHOLE},
            "service": {"SELECT": WHOLE, "INSERT": ("name",), "DELETE": WHOLE},
            "fleet_member": {"SELECT": WHOLE, "DELETE": WHOLE},
            "rejecting": {"SELECT": WHOLE},
            "backoff": {"UPDATE": ("paused_at",)},
            "allotment": {"SELECT": WHOLE, "DELETE": WHOLE},
            "seat": {"SELECT": WHOLE, "INSERT": ("subscription_id", "seat")},
            "subscription": {
                "SELECT": WHOLE,
                "INSERT": ("name", "log", "service", "stream"),
                "UPDATE": (
                    *("paused_at", "paused_by", "paused_why", "rate", "concurrency"),
                    *("fair_by", "priority_by", "priority"),
                ),
                "DELETE": WHOLE,
            },
            # to keep receivers from messages while an operator decides about them, and to note it
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
            "audit": {
                "SELECT": WHOLE,
                "INSERT": ("action", "message_ids", "why", "person", "names"),
            },
        },
    ),
}

EXECUTED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("outbox", "INSERT"): ("accept", "examine", "check_sender"),
}
"""For a table and a privilege, the functions that its users execute: those of CHECKs, policies and
the conditions of triggers. Everybody may, unless the owner's default privileges forbid it."""

_SEND = "text, text, timestamptz, timestamptz, text, jsonb, text, uuid, text, interval, interval"
_SAY = tuple(f"saf.say(uuid, {body}, text, jsonb)" for body in ("bytea", "text", "jsonb"))
_SCHEDULING = (
    *("saf.lock_schedule", "saf.put_schedule", "saf.remove_schedule", "saf.pause_schedule"),
    *("saf.resume_schedule", "saf.send_schedule"),
)
CALLED: Mapping[Kind, tuple[str, ...]] = {
    Kind.WRITER: (
        *(f"saf.send(text, {body}, {_SEND})" for body in ("bytea", "text", "jsonb")),
        *("saf.hold", "saf.cancel", "saf.reschedule", "saf.session_role", "saf.with_content_type"),
        *_SCHEDULING,
    ),
    Kind.FORWARDER: ("saf.move_held", "saf.run_schedule"),
    Kind.RECEIVER: (
        *("saf.receive", "saf.reject", "saf.retry_later", "saf.refuse_argument"),
        # with the caller's rights, as the functions that call these
        *("saf.is_failed", "saf.without_own", "saf.in_hand", "saf.newest_cursors"),
        *("saf.refuse_receiver", "saf.reader", "saf.wait_after", "saf.set_aside"),
        *("saf.wait_in_lane", "saf.time_late", "saf.bury", "saf.drop_message"),
        *("saf.fail_dialog", "saf.begin_target", "saf.find_end", "saf.judge"),
        *("saf.make_due", "saf.follow_routers", "saf.redirecting_router", "saf.go_direct"),
        *("saf.arrive", "saf.dispose"),
        *("saf.take_shard", "saf.keep_copy", "saf.open_lane", "saf.count_failed"),
        *("saf.give_up", "saf.note_failure", "saf.take_shards", "saf.take_lane"),
        *("saf.out_of_hand", "saf.take_back", "saf.has_seat", "saf.chosen", "saf.unread"),
        *("saf.extend_batch", "saf.read_on", "saf.take_ahead"),
    ),
    Kind.DIALOG: (
        *("saf.begin_dialog", "saf.end_dialog", *_SAY, "saf.with_content_type"),
        # with the caller's rights, as the functions that call these
        *("saf.utter", "saf.tell_oneself", "saf.expire_later", "saf.contract_fault"),
        *("saf.text_fault", "saf.header_fault", "saf.refuse_argument", "saf.refuse_dialog"),
        "saf.refuse_handle",
    ),
    Kind.PURGER: ("saf.forget_names",),
    Kind.OPERATOR: ("saf.forget_names", *_SCHEDULING),
}
"""Functions that programs of a kind call."""

REVOKE = (
    "REVOKE ALL ON ALL TABLES IN SCHEMA saf FROM {role}",
    "REVOKE ALL ON ALL SEQUENCES IN SCHEMA saf FROM {role}",
    "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA saf FROM {role}",
    "REVOKE ALL ON SCHEMA saf FROM {role}",
)
USE = "GRANT USAGE ON SCHEMA saf TO {role}"
GRANT = "GRANT {privileges} ON {table} TO {role}"
GRANT_EXECUTE = "GRANT EXECUTE ON FUNCTION {functions} TO {role}"

# No kind may: the server determines a message's transaction. A role also gets rights by a group, or
# by PUBLIC, and by default privileges that applied when a table was created.
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

# Two at the same time would update the same rows of the catalog; migrations use the same lock.
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtextextended('saf migrate', 0))"

# As text, because a longer name would be truncated, perhaps to another role's name.
STANDING = """
SELECT pg_get_userbyid(owner), pg_has_role(owner, 'USAGE'), pg_has_role(r.oid, owner, 'MEMBER')
FROM pg_roles r, (SELECT nspowner FROM pg_namespace WHERE nspname = 'saf'
                  UNION SELECT relowner FROM pg_class c JOIN pg_namespace n
                        ON n.oid = c.relnamespace WHERE nspname = 'saf') AS owners (owner)
WHERE r.rolname = %(role)s::text
"""


def statements(role: str, kinds: Iterable[Kind]) -> Iterator[sql.Composed]:
    """Yield the SQL that leaves a role exactly the rights of these kinds; without kinds, none."""
    grantee = sql.Identifier(role)
    for statement in REVOKE:
        yield sql.SQL(statement).format(role=grantee)
    kinds = [*kinds]
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
    for kind in kinds:
        if called := CALLED.get(kind):
            listed = sql.SQL(", ").join(map(sql.SQL, called))
            yield sql.SQL(GRANT_EXECUTE).format(functions=listed, role=grantee)


def grant(connection: psycopg.Connection[Any], role: str, kinds: Iterable[Kind]) -> None:
    """Give a role the rights of these kinds and no others in this broker, in one transaction.

    Raises:
        ConfigurationError: the role does not exist, owns the schema, has passed rights on, or gets
            more from a group than any kind may do; or the connection's user does not own the
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
            for holder, tables in forgers(connection, role) if kinds else ():
                raise ConfigurationError(
                    f"role {role!r} may still write any column of saf.{tables[0]} in database "
                    f"{connection.info.dbname!r}, by the rights of {holder}: {forgers_cure(holder)}"
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
    """Return the roles that may write any column of a log, with the tables; see ``role``.

    With ``role``, return only those through which it may: itself, a group, or PUBLIC.
    The schema's owner is left out.
    """
    return [(holder, tables) for holder, tables in fetch(connection, FORGERS, {"role": role})]


def forgers_cure(whose: str) -> str:
    """Return the cure for excessive rights of a role or group, given as SQL."""
    return (
        f"as the owner, REVOKE ALL ON ALL TABLES IN SCHEMA saf FROM {whose}, run `saf grant` for "
        f"each role that needs rights, and remove default privileges that gave them (\\ddp in psql)"
    )


def check(connection: psycopg.Connection[Any], role: str) -> None:
    """Raise the errors of `grant`; change nothing."""
    check_schema(connection)
    database = connection.info.dbname
    owners = fetch(connection, STANDING, {"role": role})
    if not owners:
        create = sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)).as_string(connection)
        raise ConfigurationError(
            f"the server of database {database!r} has no role {role!r}: create it first, with "
            f"{create}"
        )
    for owner, user_owns, role_owns in owners:
        if role_owns:
            raise ConfigurationError(
                f"role {role!r} may do everything in database {database!r}, as superuser or as "
                f"{owner!r}, who owns schema saf: grant to a role of its own"
            )
        if not user_owns:
            raise ConfigurationError(
                f"user {connection.info.user!r} may not grant in database {database!r}: "
                f"let {owner!r}, who owns schema saf, do it"
            )


def _privilege(privilege: str, columns: Columns) -> sql.Composable:
    if not columns:
        return sql.SQL(privilege)
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    return sql.SQL(privilege + " ({})").format(names)
