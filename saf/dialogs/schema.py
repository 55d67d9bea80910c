"""Tables of conversations: endpoints and their groups, contracts and message types."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from saf.dialogs.states import STATE

VALIDATIONS = ("none", "empty", "json", "json_schema")
SENDERS = ("initiator", "target", "any")


def add_tables(metadata: sa.MetaData) -> None:
    """Add these tables to the metadata of a broker."""
    now = sa.text("now()")
    moment = sa.DateTime(timezone=True)

    sa.Table(
        "message_type",
        metadata,
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("validation", sa.Text, nullable=False),
        sa.Column("schema", pg.JSONB),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.CheckConstraint("name <> '' AND version > 0", name="message_type_named"),
        sa.CheckConstraint(f"validation IN {VALIDATIONS}", name="message_type_validation"),
        sa.CheckConstraint(
            "(validation = 'json_schema') = (schema IS NOT NULL)", name="message_type_schema"
        ),
        comment="what bodies of a type are; a version never changes",
    )
    sa.Table(
        "contract",
        metadata,
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.CheckConstraint("name <> '' AND version > 0", name="contract_named"),
        comment="which types a dialog's messages have, and who sends them; a version never changes",
    )
    sa.Table(
        "contract_message",
        metadata,
        sa.Column("contract", sa.Text, primary_key=True),
        sa.Column("contract_version", sa.Integer, primary_key=True),
        sa.Column("message_type", sa.Text, primary_key=True),
        sa.Column("message_type_version", sa.Integer, nullable=False),
        sa.Column("sent_by", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["contract", "contract_version"], ["saf.contract.name", "saf.contract.version"]
        ),
        sa.ForeignKeyConstraint(
            ["message_type", "message_type_version"],
            ["saf.message_type.name", "saf.message_type.version"],
        ),
        sa.CheckConstraint(f"sent_by IN {SENDERS}", name="contract_message_sent_by"),
        comment="the types of a contract",
    )
    sa.Table(
        "conversation_group",
        metadata,
        sa.Column(
            "group_id", pg.UUID, primary_key=True, server_default=sa.text("gen_random_uuid()")
        ),
        sa.Column("state", pg.JSONB, comment="the application's own"),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        comment="related conversations: received by one receiver at a time, which locks this row",
    )
    sa.Table(
        "conversation",
        metadata,
        sa.Column("handle", pg.UUID, primary_key=True, server_default=sa.text("gen_random_uuid()")),
        sa.Column("conversation_id", pg.UUID, nullable=False, comment="the same at both ends"),
        sa.Column("is_initiator", sa.Boolean, nullable=False),
        sa.Column(
            "monolog",
            sa.Boolean,
            nullable=False,
            server_default=sa.false(),
            comment="one publisher and any number of subscribers: nobody answers",
        ),
        sa.Column("state", sa.Text, sa.Computed(STATE, persisted=True)),
        sa.Column("service", sa.Text, nullable=False, comment="of this end"),
        sa.Column("far_service", sa.Text, nullable=False),
        sa.Column("far_broker", pg.UUID, comment="where it lives, if that is known"),
        sa.Column("contract", sa.Text),
        sa.Column("contract_version", sa.Integer),
        sa.Column("group_id", pg.UUID, nullable=False),
        sa.Column(
            "send_sequence",
            sa.BigInteger,
            nullable=False,
            server_default="0",
            comment="of the last message sent; assigned under the lock of this row",
        ),
        sa.Column(
            "receive_sequence",
            sa.BigInteger,
            nullable=False,
            server_default="0",
            comment="of the last message received: only the next one is taken",
        ),
        sa.Column("ended_here", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("ended_there", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("error_code", sa.Integer),
        sa.Column("error_text", sa.Text),
        sa.Column("timer", pg.UUID, comment="message_id of the timer that counts"),
        sa.Column("expires_at", moment, comment="both ends must have ended before"),
        sa.Column("created_at", moment, nullable=False, server_default=now),
        sa.Column("changed_at", moment, nullable=False, server_default=now),
        sa.Column(
            "lineage",
            pg.JSONB,
            comment="[[incarnation, after], ...]: numbers sent above after were said by that "
            "incarnation of this broker; null as long as it was not set back",
        ),
        sa.Column("far_lineage", pg.JSONB, comment="that of the other end, as it was last heard"),
        sa.Column(
            "answered_by",
            pg.UUID,
            comment="of an initiator: the broker that its target is at, as it has answered; it "
            "takes no answer of another one",
        ),
        sa.UniqueConstraint("conversation_id", "is_initiator", name="conversation_two_ends"),
        sa.ForeignKeyConstraint(
            ["contract", "contract_version"], ["saf.contract.name", "saf.contract.version"]
        ),
        sa.ForeignKeyConstraint(["group_id"], ["saf.conversation_group.group_id"]),
        sa.CheckConstraint("service <> '' AND far_service <> ''", name="conversation_addressed"),
        sa.CheckConstraint(
            "send_sequence >= 0 AND receive_sequence >= 0", name="conversation_rises"
        ),
        sa.CheckConstraint(
            "(contract IS NULL) = (contract_version IS NULL)", name="conversation_contract"
        ),
        sa.CheckConstraint(
            "(error_code IS NULL) = (error_text IS NULL)", name="conversation_error"
        ),
        sa.CheckConstraint(
            "NOT monolog OR (is_initiator AND receive_sequence = 0)", name="conversation_monolog"
        ),
        sa.CheckConstraint(
            "jsonb_typeof(lineage) = 'array' AND jsonb_typeof(far_lineage) = 'array'",
            name="conversation_lineages",
        ),
        sa.Index("conversation_of_group", "group_id"),
        # the row is rewritten with each message: free room on the page keeps the updates HOT
        postgresql_with={"fillfactor": "60"},
        comment="the endpoints of dialogs that live here; the state follows from the facts",
    )
    sa.Table(
        "fragment",
        metadata,
        sa.Column("conversation_id", pg.UUID, primary_key=True),
        sa.Column("from_initiator", sa.Boolean, primary_key=True, comment="which end has sent it"),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        # no foreign key to saf.conversation: fragments that arrive before their dialog's first
        # message wait here too
        comment="of bodies in fragments: what has come, until the whole is received",
    )
