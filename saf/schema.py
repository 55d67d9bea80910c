"""The tables of a broker, defined once.

All tables are in the PostgreSQL schema ``saf``. The Alembic migrations create exactly what
`build_metadata` describes; a test compares the two in the catalogs.

Both logs are rings, partitioned by ``(id / SLOT_ROWS) % SLOTS``: ids walk through the slots without
any DDL at run time, and TRUNCATE removes the old rows of a whole slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from saf.columns import MESSAGE
from saf.dialogs import schema as of_dialogs
from saf.dispatch import schema as of_dispatchers
from saf.engine import schema as of_engine
from saf.log.checks import ACCEPT, ACCEPTED, CHECKS, EXAMINE
from saf.log.ring import SLOT_ROWS, SLOTS
from saf.log.shards import DEFAULT_SHARDS, MAX_SHARDS, shard_expression
from saf.sending import schema as of_senders
from saf.setaside.lane import COLUMNS as LANE_COLUMNS
from saf.setaside.lane import NO_BROKER, Kind
from saf.setaside.parking import BLOCKED
from saf.webhooks import schema as of_webhooks

SCHEMA = "saf"
QUALITIES = ("at_most_once", "at_least_once", "exactly_once")
CLASSIFIERS = ("sql", "arrow", "python")


class Snapshot(sa.types.UserDefinedType[str]):
    """``pg_snapshot``: the transactions that were complete at one moment."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """Return the type's name in DDL."""
        return "pg_snapshot"


class Xid8(sa.types.UserDefinedType[int]):
    """``xid8``: a transaction id that does not wrap around."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """Return the type's name in DDL."""
        return "xid8"


LANE = f"""
kind IN ({", ".join(f"'{kind}'" for kind in Kind)})
AND (subject = '' OR kind IN ('service', 'route', 'found_route', 'key', 'later', 'ahead'))
AND (broker = '{NO_BROKER}' OR kind IN ('route', 'found_route'))
"""

# A lane that waits for a handler has no next attempt, so it is never taken for due
AWAITS = f"""
CASE WHEN awaits_handler
     THEN kind = '{Kind.KEY}' AND shard IS NOT NULL AND next_attempt_at = '{BLOCKED}'
     ELSE message_type IS NULL END
"""


TYPES: dict[str, sa.types.TypeEngine[Any]] = {
    "uuid": pg.UUID(),
    "text": sa.Text(),
    "boolean": sa.Boolean(),
    "bigint": sa.BigInteger(),
    "jsonb": pg.JSONB(),
    "bytea": sa.LargeBinary(),
    "timestamptz": sa.DateTime(timezone=True),
}
COLLATED = {"key": sa.Text(collation="C")}
"""Text that is compared byte by byte, so that an index has the same order on every server."""


def message_columns() -> list[sa.Column[Any]]:
    """Return the columns of a message, which are the same in every table that holds messages."""
    return [
        sa.Column(
            column.name,
            COLLATED.get(column.name, TYPES[column.type]),
            nullable=not column.needed,
            server_default=sa.text(column.default) if column.default else None,
        )
        for column in MESSAGE
    ]


COMMENTS = {"bounded": "in bytes: indexes, COPY and memory have limits in bytes; see saf.limits"}


def _log(
    metadata: sa.MetaData,
    name: str,
    shards: int,
    comment: str,
    checks: Mapping[str, str],
    *extra: sa.Column[Any],
) -> sa.Table:
    table = sa.Table(
        name,
        metadata,
        # txid comes before id so that a row's id is always drawn after its transaction's xid
        sa.Column("txid", Xid8, nullable=False, server_default=sa.text("pg_current_xact_id()")),
        sa.Column("id", sa.BigInteger, sa.Identity(always=True, cache=1), nullable=False),
        sa.Column("shard", sa.SmallInteger, sa.Computed(shard_expression(shards), persisted=True)),
        *message_columns(),
        *extra,
        *(
            sa.CheckConstraint(check, name=f"{name}_{suffix}", comment=COMMENTS.get(suffix))
            for suffix, check in checks.items()
        ),
        sa.Index(f"{name}_shard_txid", "shard", "txid"),
        # % is doubled, because SQLAlchemy passes this part to the driver unchanged
        postgresql_partition_by=f"LIST (((id / {SLOT_ROWS}) %% {SLOTS}))",
        comment=comment,
    )
    for slot in range(SLOTS):
        sa.event.listen(
            table,
            "after_create",
            sa.DDL(  # type: ignore[no-untyped-call] # SQLAlchemy leaves this untyped
                f"CREATE TABLE {SCHEMA}.{name}_{slot} "
                f"PARTITION OF {SCHEMA}.{name} FOR VALUES IN ({slot})"
            ),
        )
    return table


def build_metadata(shards: int = DEFAULT_SHARDS) -> sa.MetaData:
    """Return all tables of a broker whose logs have ``shards`` shards."""
    metadata = sa.MetaData(schema=SCHEMA)
    now = sa.text("now()")
    moment = sa.DateTime(timezone=True)

    sa.Table(
        "broker",
        metadata,
        sa.Column("singleton", sa.Boolean, primary_key=True, server_default=sa.true()),
        sa.Column(
            "broker_id", pg.UUID, nullable=False, server_default=sa.text("gen_random_uuid()")
        ),
        sa.Column("name", sa.Text, nullable=False, server_default=sa.text("current_database()")),
        sa.Column("shards", sa.SmallInteger, nullable=False),
        sa.Column(
            "system_identifier",
            sa.BigInteger,
            nullable=False,
            comment="of the cluster: transaction ids in the logs mean nothing in another one",
        ),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column(
            "incarnation",
            sa.BigInteger,
            nullable=False,
            server_default="1",
            comment="raised when this broker is repaired after it was set back: who remembers an "
            "older one has to compare what it knows. The moment of the repair in microseconds, so "
            "that no two repairs after the same backup have the same",
        ),
        sa.Column(
            "senders_since",
            sa.BigInteger,
            comment="messages of the outbox with greater ids were checked by saf.sender when they "
            "were written; NULL: none were",
        ),
        sa.CheckConstraint("singleton", name="broker_is_one_row"),
        sa.CheckConstraint(f"shards BETWEEN 1 AND {MAX_SHARDS}", name="broker_shards"),
        comment="who this broker is: one row, written by the first migration",
    )

    outbox = _log(
        metadata,
        "outbox",
        shards,
        "messages sent from this broker; append-only, read by cursor",
        {"bounded": ACCEPTED},
    )
    for function in (EXAMINE, ACCEPT):
        ddl = sa.DDL(function.replace("%", "%%"))  # type: ignore[no-untyped-call]
        sa.event.listen(outbox, "before_create", ddl)
    _log(
        metadata,
        "inbox",
        shards,
        "messages stored for the services that live here; append-only, read by cursor",
        CHECKS,
        sa.Column("source", pg.UUID),
        sa.Column("received_at", moment, nullable=False, server_default=now),
    )

    sa.Table(
        "subscription",
        metadata,
        sa.Column("subscription_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("log", sa.Text, nullable=False),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column(
            "service",
            sa.Text,
            comment="whose messages of the inbox it reads; NULL for everybody's",
        ),
        sa.Column(
            "stream",
            sa.Boolean,
            nullable=False,
            server_default=sa.false(),
            comment="read by a stream, whose checkpoint says how far it is; its cursors say what "
            "it has committed",
        ),
        sa.UniqueConstraint("log", "name", name="subscription_name"),
        sa.CheckConstraint("log IN ('outbox', 'inbox')", name="subscription_log"),
        sa.CheckConstraint("service IS NULL OR log = 'inbox'", name="subscription_service"),
        sa.CheckConstraint("NOT (stream AND service IS NOT NULL)", name="subscription_stream"),
        sa.ForeignKeyConstraint(["service"], ["saf.service.name"]),
        comment="named readers of a log, each with one cursor per shard",
    )
    sa.Table(
        "member",
        metadata,
        sa.Column("member_id", pg.UUID, primary_key=True),
        sa.Column("subscription_id", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("joined_at", moment, nullable=False, server_default=now),
        sa.Column("lease_until", moment, nullable=False),
        sa.Column("stopping", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        comment="live processes of a subscription; a lease is a term by this database's clock",
    )
    sa.Table(
        "route",
        metadata,
        sa.Column("route_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("service", sa.Text),
        sa.Column("broker", pg.UUID),
        sa.Column("destination", sa.Text, nullable=False),
        sa.Column("quality", sa.Text),
        sa.Column("enabled", sa.Boolean, nullable=False, server_default=sa.true()),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column("expires_at", moment, comment="from then on it does not count"),
        sa.Column("comment", sa.Text),
        sa.Column(
            "local",
            sa.Boolean,
            nullable=False,
            server_default=sa.false(),
            comment="its senders store what they send in the inbox of this database themselves",
        ),
        sa.CheckConstraint(f"quality IN {QUALITIES}", name="route_quality"),
        sa.CheckConstraint(
            "NOT local OR service IS NOT NULL AND broker IS NULL AND quality IS NULL AND "
            "expires_at IS NULL",
            name="route_local",
        ),
        sa.Index("route_local_once", "service", unique=True, postgresql_where=sa.text("local")),
        sa.UniqueConstraint(
            "service",
            "broker",
            "destination",
            name="route_once",
            postgresql_nulls_not_distinct=True,
        ),
        comment="service and broker to destination; NULL matches any",
    )
    sa.Table(
        "route_version",
        metadata,
        sa.Column("version", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("routes", pg.JSONB, nullable=False),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column("topics", pg.ARRAY(sa.Text), nullable=False, server_default="{}"),
        sa.Column("routers", pg.JSONB, nullable=False, server_default="[]"),
        sa.Column(
            "brokers",
            pg.JSONB,
            nullable=False,
            server_default="{}",
            comment="by destination: the broker_id that it was known to have",
        ),
        comment="the frozen set of routes that a batch was opened with",
    )
    sa.Table(
        "sender",
        metadata,
        sa.Column(
            "role",
            sa.Text,
            nullable=False,
            comment="by name, because a dump has names; its members may too",
        ),
        sa.Column("from_service", sa.Text, nullable=False),
        sa.Column("to_service", sa.Text, comment="NULL: any"),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.CheckConstraint(
            "role <> '' AND from_service <> '' AND to_service <> ''", name="sender_named"
        ),
        sa.UniqueConstraint(
            "from_service",
            "to_service",
            "role",
            name="sender_once",
            postgresql_nulls_not_distinct=True,
        ),
        comment="who may send as whom, and to whom: while there is a rule, nobody sends without "
        "one",
    )
    sa.Table(
        "topic",
        metadata,
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.CheckConstraint("name <> ''", name="topic_named"),
        comment="services whose messages go to every destination that a route leads to",
    )
    sa.Table(
        "route_choice",
        metadata,
        sa.Column("service", sa.Text, nullable=False, comment="as the message addresses it"),
        sa.Column("broker", pg.UUID),
        sa.Column("key", sa.Text(collation="C"), nullable=False),
        sa.Column("destination", sa.Text, nullable=False),
        sa.Column(
            "used_at",
            moment,
            nullable=False,
            server_default=now,
            comment="give or take a day; what nobody uses is forgotten",
        ),
        # the key comes first, because it alone distinguishes nearly all rows
        sa.UniqueConstraint(
            "key",
            "service",
            "broker",
            name="route_choice_once",
            postgresql_nulls_not_distinct=True,
        ),
        comment="which of several routes that share a key has taken, and stays with",
    )
    sa.Table(
        "route_share",
        metadata,
        sa.Column("service", sa.Text, nullable=False),
        sa.Column("broker", pg.UUID),
        sa.Column("keys", sa.BigInteger, nullable=False),
        sa.UniqueConstraint(
            "service", "broker", name="route_share_once", postgresql_nulls_not_distinct=True
        ),
        comment="how many keys have chosen a route: whose turn is next",
    )
    sa.Table(
        "router",
        metadata,
        sa.Column("service", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column(
            "expression", sa.Text, nullable=False, comment="Spark SQL, or module:function of Python"
        ),
        sa.Column(
            "once_per",
            sa.Text,
            nullable=False,
            server_default="message",
            comment="what is classified once; a conversation always is",
        ),
        sa.Column("enabled", sa.Boolean, nullable=False, server_default=sa.true()),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column("comment", sa.Text),
        sa.Column(
            "mode",
            sa.Text,
            nullable=False,
            server_default="redirect",
            comment="classified at the source, or forwarded by a routing service of its own",
        ),
        sa.CheckConstraint("service <> ''", name="router_named"),
        sa.CheckConstraint(f"kind IN {CLASSIFIERS}", name="router_kind"),
        sa.CheckConstraint("once_per IN ('message', 'key')", name="router_once_per"),
        sa.CheckConstraint("mode IN ('redirect', 'forward')", name="router_mode"),
        sa.CheckConstraint("mode = 'redirect' OR kind <> 'sql'", name="router_sql_needs_spark"),
        comment="services that stand for others: a classifier says for which",
    )
    sa.Table(
        "resolved_conversation",
        metadata,
        sa.Column("router", sa.Text, nullable=False),
        sa.Column(
            "key",
            sa.Text(collation="C"),
            nullable=False,
            comment="of the messages, or their conversation_id",
        ),
        sa.Column("service", sa.Text, nullable=False, comment="that the router stood for"),
        sa.Column("broker", pg.UUID, comment="NULL: as the message says"),
        sa.Column("to_key", sa.Text(collation="C"), comment="NULL: as the message says"),
        sa.Column(
            "used_at",
            moment,
            nullable=False,
            server_default=now,
            comment="give or take a day; what nobody uses is forgotten",
        ),
        sa.Column(
            "handle",
            pg.UUID,
            comment="of the end, at a routing service, on which this conversation goes on",
        ),
        sa.PrimaryKeyConstraint("key", "router"),
        comment="what a router has resolved once: later messages are not classified again",
    )
    sa.Table(
        "cursor",
        metadata,
        sa.Column("subscription_id", sa.Integer, primary_key=True),
        sa.Column("shard", sa.SmallInteger, primary_key=True),
        sa.Column("owner", pg.UUID),
        sa.Column(
            "epoch",
            sa.BigInteger,
            nullable=False,
            server_default="0",
            comment="rises with each change of owner; fences the owners before",
        ),
        # in the key only so that the newest version is found first; see saf.log.shards.NEWEST
        sa.Column("batch", sa.BigInteger, primary_key=True, server_default="0"),
        sa.Column(
            "done",
            Snapshot,
            nullable=False,
            server_default=sa.text("'1:1:'"),
            comment="every row visible in it is complete",
        ),
        sa.Column(
            "open",
            Snapshot,
            comment="the batch in hand: the rows visible in open and not in done",
        ),
        sa.Column(
            "position",
            sa.BigInteger,
            nullable=False,
            server_default="0",
            comment="within the open batch, rows with id <= position are complete",
        ),
        sa.Column(
            "attempted",
            sa.BigInteger,
            nullable=False,
            server_default="0",
            comment="within the open batch, at_most_once rows with id <= attempted are not sent "
            "again",
        ),
        sa.Column("route_version", sa.BigInteger),
        sa.Column("opened_at", moment, comment="by this clock messages of the batch expire"),
        sa.Column(
            "allowance",
            sa.Integer,
            comment="how many messages are handed out at once after a delivery that failed; NULL "
            "for any number",
        ),
        sa.Column("until", Snapshot, comment="what cuts are cuts of"),
        sa.Column(
            "cuts",
            pg.ARRAY(Xid8),
            comment="where the next batches of a deep backlog may end; see saf.claim",
        ),
        sa.Column(
            "set_aside_at",
            pg.ARRAY(sa.DateTime(timezone=True)),
            comment="the last times at which messages of the shard were set aside",
        ),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["owner"], ["saf.member.member_id"], ondelete="SET NULL"),
        sa.ForeignKeyConstraint(["route_version"], ["saf.route_version.version"]),
        sa.CheckConstraint(
            "open IS NOT NULL OR (position = 0 AND attempted = 0)", name="cursor_position"
        ),
        sa.CheckConstraint("attempted >= 0 AND position >= 0", name="cursor_rises"),
        sa.CheckConstraint("allowance > 0", name="cursor_allowance"),
        # short rows, rewritten with each batch: free room on the page keeps the updates HOT
        postgresql_with={"fillfactor": "40"},
        comment="how far a subscription has got in one shard",
    )
    sa.Table(
        "watermark",
        metadata,
        sa.Column("source", pg.UUID),
        sa.Column("shard", sa.SmallInteger),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column(
            "lane",
            sa.Text,
            server_default="",
            comment="as its source calls it: a name to compare, not to take apart",
        ),
        sa.Column(
            "opened_at",
            moment,
            comment="when the source opened the batch: tells it from another of the same number",
        ),
        sa.Column(
            "acknowledged",
            sa.Boolean,
            nullable=False,
            server_default=sa.false(),
            comment="whether the source remembers it too; false of one that nothing has moved, or "
            "before sources did, and of at_most_once",
        ),
        sa.Column(
            "set_aside_at",
            moment,
            comment="of the shard's own lane: when the source had last set aside messages of the "
            "shard; NULL if it had not",
        ),
        # batch is in the key for the same reason as in saf.cursor
        sa.PrimaryKeyConstraint("source", "shard", "lane", "batch"),
        postgresql_with={"fillfactor": "40"},
        comment="the last (batch, position) stored here of one source shard: what makes "
        "delivery exactly once",
    )
    _one_each(metadata, "cursor", "subscription_id integer", "shard smallint")
    _one_each(metadata, "watermark", "source uuid", "shard smallint", "lane text")
    _acknowledged(metadata)
    sa.Table(
        "timeline",
        metadata,
        sa.Column("singleton", sa.Boolean, primary_key=True, server_default=sa.true()),
        sa.Column(
            "written",
            Xid8,
            nullable=False,
            server_default=sa.text("pg_current_xact_id()"),
            comment="by which transaction: if it is not the xmin of the row, a dump has brought it "
            "here, and the logs with it",
        ),
        sa.CheckConstraint("singleton", name="timeline_is_one_row"),
        comment="whose transaction ids the logs have: one row, never updated but by a rebase",
    )
    sa.Table(
        "service",
        metadata,
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.CheckConstraint("name <> ''", name="service_named"),
        comment="the services that live here; while there is none, messages for any are stored",
    )
    _set_aside(
        metadata,
        "parked",
        "set aside in order, to be tried again",
        _kind(),
        sa.Column("quality", sa.Text),
        sa.Column(
            "batch",
            sa.BigInteger,
            nullable=False,
            comment="with position: what the lane's watermark is compared with",
        ),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column(
            "opened_at",
            moment,
            server_default=now,
            comment="of its batch; of what is sent again, or has found a route, when that was: "
            "tells the mark of a lane from another of the same number",
        ),
        *_more_of_lane(),
        sa.Column("source", pg.UUID, comment="of what a receiver has set aside, as in the inbox"),
        sa.CheckConstraint(LANE, name="parked_lane_possible"),
        sa.Index("parked_lane", "subscription_id", *LANE_COLUMNS, "id"),
        sa.Index(
            "parked_later",
            "subscription_id",
            "destination",
            "subject",
            "deliver_at",
            "id",
            postgresql_where=sa.text(f"kind = '{Kind.LATER}'"),
        ),
        sa.Index(
            "parked_expiring",
            "subscription_id",
            "expires_at",
            postgresql_where=sa.text(f"kind = '{Kind.ROUTE}' AND expires_at IS NOT NULL"),
        ),
    )
    _set_aside(
        metadata,
        "dead_letter",
        "set aside for a person: not tried again by itself",
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )
    sa.Table(
        "backoff",
        metadata,
        sa.Column("subscription_id", sa.Integer),
        sa.Column("destination", sa.Text),
        _kind(),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_attempt_at", moment, nullable=False, server_default=now),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("since", moment, nullable=False, server_default=now),
        sa.Column(
            "shard",
            sa.SmallInteger,
            comment="of a lane that holds the messages of one key, for a receiver; NULL for the "
            "others",
        ),
        *_more_of_lane(),
        sa.Column(
            "awaits_handler",
            sa.Boolean,
            nullable=False,
            server_default=sa.false(),
            comment="whether the lane waits until a receiver comes that handles its first message",
        ),
        sa.Column(
            "message_type",
            sa.Text,
            comment="of that message, if it has one; NULL where the lane waits for something else",
        ),
        sa.Column(
            "needs_operator",
            sa.Boolean,
            nullable=False,
            server_default=sa.false(),
            comment="whether the last attempt failed for a reason that only an operator can remove",
        ),
        sa.PrimaryKeyConstraint("subscription_id", *LANE_COLUMNS),
        sa.CheckConstraint(LANE, name="backoff_lane_possible"),
        sa.CheckConstraint(AWAITS, name="backoff_awaits_possible"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        sa.Index(
            "backoff_key",
            "subscription_id",
            "next_attempt_at",
            postgresql_where=sa.text("shard IS NOT NULL"),
        ),
        # over a digest, because index rows are bounded and message types from other writers are not
        sa.Index(
            "backoff_awaits_handler",
            "subscription_id",
            sa.text("hashtextextended(message_type, 0)"),
            "since",
            postgresql_where=sa.text("awaits_handler"),
        ),
        comment="lanes that wait: when they are tried next, shared by all members",
    )
    sa.Table(
        "fleet_member",
        metadata,
        sa.Column("fleet", sa.Text),
        sa.Column("name", sa.Text, comment="FLEET/NAME, as commands call it"),
        sa.Column("broker_id", pg.UUID, comment="NULL: it had nothing to forward when it was met"),
        sa.Column("met_at", moment, nullable=False, server_default=now),
        sa.Column("missing_since", moment, comment="NULL: its fleet lists it"),
        sa.PrimaryKeyConstraint("fleet", "name"),
        comment="at a store: the members of fleets that forwarders have met, so that a missing one "
        "is noticed",
    )
    sa.Table(
        "rejecting",
        metadata,
        sa.Column("subscription_id", sa.Integer),
        sa.Column("destination", sa.Text),
        sa.Column("messages", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("subscription_id", "destination"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        sa.CheckConstraint("messages > 0", name="rejecting_counted"),
        comment="how many messages a destination has rejected in a row; no row: none",
    )
    sa.Table(
        "taken_out",
        metadata,
        sa.Column("subscription_id", sa.Integer),
        sa.Column("destination", sa.Text),
        _kind(),
        *_more_of_lane(),
        sa.Column("shard", sa.SmallInteger),
        sa.Column("opened_at", moment, comment="as in saf.parked"),
        sa.Column("taken_out_at", moment, nullable=False, server_default=now),
        sa.PrimaryKeyConstraint("subscription_id", *LANE_COLUMNS, "shard", "opened_at"),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        comment="what people took out of lanes: it may be stored at the destination, whose answer "
        "got lost",
    )
    sa.Table(
        "dropped",
        metadata,
        sa.Column("subscription_id", sa.Integer, primary_key=True),
        sa.Column("shard", sa.SmallInteger, primary_key=True),
        sa.Column("reason", sa.Text, primary_key=True),
        sa.Column("messages", sa.BigInteger, nullable=False),
        sa.Column("last_message_id", pg.UUID, nullable=False, comment="to look for it in the log"),
        sa.Column("last_at", moment, nullable=False, server_default=now),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        sa.CheckConstraint("reason <> '' AND messages > 0", name="dropped_counted"),
        # only the shard's owner counts here, so no writer waits for a row lock
        postgresql_with={"fillfactor": "60"},
        comment="how many messages a subscription took without handing them on, and why",
    )
    sa.Table(
        "audit",
        metadata,
        sa.Column("audit_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("audit_at", moment, nullable=False, server_default=now),
        sa.Column("who", sa.Text, nullable=False, server_default=sa.text("session_user")),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("message_ids", pg.ARRAY(pg.UUID), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("person", sa.Text, comment="whom a program acted for; NULL: nobody else"),
        comment="what people did to messages that were set aside",
    )
    of_dialogs.add_tables(metadata)
    of_dispatchers.add_tables(metadata)
    of_webhooks.add_tables(metadata)
    of_senders.add_tables(metadata)
    of_engine.add_tables(metadata)
    _identified(metadata)
    return metadata


def _identified(metadata: sa.MetaData) -> None:
    """Identify rows by all columns in tables without a primary key, in case they are published.

    The logs have no replica identity: their rows are not updated, and an index would slow each
    send.
    """
    for table in metadata.tables.values():
        if not len(table.primary_key) and table.name not in ("outbox", "inbox"):
            full = f"ALTER TABLE {table.fullname} REPLICA IDENTITY FULL"
            sa.event.listen(
                table,
                "after_create",
                sa.DDL(full),  # type: ignore[no-untyped-call] # as above
            )


def _one_each(metadata: sa.MetaData, name: str, *columns: str) -> sa.Table:
    """Return the table of keys for a table with the batch in its key; migrations add triggers."""
    keys = [column.split() for column in columns]
    types = {"integer": sa.Integer, "smallint": sa.SmallInteger, "uuid": pg.UUID, "text": sa.Text}
    return sa.Table(
        f"{name}_key",
        metadata,
        *(sa.Column(key, types[kind], primary_key=True, autoincrement=False) for key, kind in keys),
        comment=f"one for each row of saf.{name}, whose own key has the batch too: it lets in no "
        "second one",
    )


def _acknowledged(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "acknowledged",
        metadata,
        sa.Column("destination", pg.UUID, comment="its broker_id"),
        sa.Column("lane", sa.Text, comment="as in saf.watermark there"),
        sa.Column("shard", sa.SmallInteger),
        sa.Column("batch", sa.BigInteger),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True)),
        # batch is in the key for the same reason as in saf.cursor
        sa.PrimaryKeyConstraint("destination", "lane", "shard", "batch"),
        postgresql_with={"fillfactor": "40"},
        comment="the last that each destination has said to have stored of a shard: one that has "
        "less was set back, and if one has more, this broker was",
    )


def _kind() -> sa.Column[object]:
    return sa.Column(
        "kind",
        sa.Text,
        nullable=False,
        server_default=Kind.MAIN,
        comment="of the lane: messages that wait for the same thing, in order; see "
        "saf.setaside.lane",
    )


def _more_of_lane() -> tuple[sa.Column[Any], sa.Column[Any]]:
    return (
        sa.Column(
            "subject",
            sa.Text,
            nullable=False,
            server_default="",
            comment="the service, key, shard or conversation that the lane is of",
        ),
        sa.Column(
            "broker",
            pg.UUID,
            nullable=False,
            server_default=str(NO_BROKER),
            comment="that the messages of the lane are addressed to; all ones where they are to "
            "none",
        ),
    )


def _set_aside(
    metadata: sa.MetaData, name: str, comment: str, *extra: sa.schema.SchemaItem
) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column(f"{name}_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("subscription_id", sa.Integer, nullable=False),
        sa.Column("destination", sa.Text, nullable=False, server_default=""),
        sa.Column("shard", sa.SmallInteger, nullable=False),
        sa.Column("id", sa.BigInteger, nullable=False),
        *message_columns(),
        sa.Column(
            f"{name}_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("now()"),
        ),
        *extra,
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["saf.subscription.subscription_id"], ondelete="CASCADE"
        ),
        comment=comment,
    )
