"""Rights: what each kind of role may do with each table, and what the server says of it."""

from __future__ import annotations

from saf.database import Dsn, fetch
from tests.pipeline import connect

# Select, Insert, Update, Delete, Truncate, draw the Next value; in lower case, for the columns in
# SOME only.
# A table that is not listed here fails the test: decide who may do what with it.
KINDS = [
    *("writer", "forwarder", "receiver", "dialog", "router", "purger", "operator", "stream"),
    "sink",
]
MATRIX = {
    "alembic_version": "s      s      s      s      s      s      s      s      s",
    "broker         ": "-      S      S      S      -      S      Su     S      -",
    "outbox         ": "si     S      -      i      i      -      Si     S      i",
    "held           ": "-      s      -      -      -      -      SuD    -      -",
    "held_held_id_seq": "- - - - - - - - -",
    "schedule       ": "s      s      -      -      -      -      S      -      -",
    "schedule_run   ": "S      -      -      -      -      -      S      -      -",
    "schedule_run_run_id_seq": "- - - - - - - - -",
    "capture        ": "-      -      -      -      -      -      S      -      -",
    "capture_capture_id_seq": "- - - - - - - - -",
    "backfill       ": "-      -      -      -      -      -      Su     -      -",
    "backfill_backfill_id_seq": "- - - - - - - - -",
    "outbox_status  ": "-      -      -      -      -      -      S      -      -",
    "inbox          ": "-      si     S      i      -      -      Si     S      -",
    "subscription   ": "-      Su     Su     -      -      S      SiuD   S      -",
    "allotment      ": "-      Siu    Siu    -      -      -      SD     -      -",
    "seat           ": "-      -      Su     -      -      -      Si     -      -",
    "member         ": "-      SiuD   SiuD   -      -      -      S      -      -",
    "cursor         ": "-      Su     Su     -      -      S      Siu    Su     -",
    "sender         ": "-      -      -      -      -      -      S      -      -",
    "route          ": "-      S      -      -      S      -      SiuD   -      -",
    "route_version  ": "-      Si     -      -      s      SD     SD     -      -",
    "topic          ": "-      S      -      -      S      -      SiD    -      -",
    "route_choice   ": "-      SiuD   -      -      -      sD     SiuD   -      -",
    "route_share    ": "-      Siu    -      -      -      -      Siu    -      -",
    "router         ": "-      S      -      -      S      -      SiuD   -      -",
    "resolved_conversation": "- Siu - S SiuD sD SiuD - -",
    "rejecting      ": "-      SIuD   -      -      -      -      S      -      -",
    "fleet_member   ": "-      Siu    -      -      -      -      SD     -      -",
    "watermark      ": "-      SIu    -      -      -      -      S      -      -",
    "source         ": "-      Siu    -      -      -      -      SiuD   -      -",
    "source_member  ": "-      SiuD   -      -      -      -      S      -      -",
    "source_shard   ": "-      Siu    -      -      -      -      Si     -      -",
    "source_window  ": "-      SiD    -      -      -      -      -      -      -",
    "taken_out      ": "-      S      -      -      -      -      SiD    -      -",
    "acknowledged   ": "-      SIu    -      -      -      -      SIuD   -      -",
    "actual_key     ": "-      -      -      -      -      -      -      -      -",
    "timeline       ": "-      -      -      -      -      -      -      -      -",
    "parked         ": "-      SIuD   SIuD   -      -      s      SIuD   -      -",
    "backoff        ": "-      SIuD   SIuD   -      -      s      SIuD   -      -",
    "dead_letter    ": "-      sIu    sI     -      -      s      SIuD   -      -",
    "service        ": "-      S      -      S      -      -      SiD    -      -",
    "dropped        ": "-      Siu    Siu    -      -      Siu    Siu    -      -",
    "audit          ": "-      -      -      -      -      -      Si     -      -",
    "endpoint       ": "-      -      S      -      -      -      SiuD   -      -",
    "dispatched     ": "-      -      SIuD   -      -      -      SIuD   -      -",
    "breaker        ": "-      S      SIu    -      -      -      SIu    -      -",
    "attempt        ": "-      -      SiD    -      -      -      SiD    -      -",
    "webhook        ": "-      SiuD   -      -      -      -      -      -      -",
    "message_type   ": "-      -      -      S      -      -      SI     -      -",
    "contract       ": "-      -      -      S      -      -      SI     -      -",
    "contract_message": "-      -      -      S      -      -      SI     -      -",
    "conversation   ": "-      s      -      Siu    -      sD     SiuD   -      -",
    "conversation_group": "- - - Siu - sD SiuD - -",
    "fragment       ": "-      -      -      SID    -      sD     SID    -      -",
    **{f"{log}_{n}": "- - - - - ST ST - -" for log in ("outbox", "inbox") for n in range(8)},
    "outbox_id_seq  ": "-      S      -      -      -      SN     SN     S      -",
    "inbox_id_seq   ": "-      S      S      -      -      SN     SN     S      -",
    "subscription_subscription_id_seq": "- - - - - - - - -",
    "route_route_id_seq": "- - - - - - - - -",
    "route_version_version_seq": "- - - - - - - - -",
    "parked_parked_id_seq": "- - - - - - - - -",
    "dead_letter_dead_letter_id_seq": "- - - - - - - - -",
    "audit_audit_id_seq": "- - - - - - - - -",
    "attempt_attempt_id_seq": "- - - - - - - - -",
    "staged         ": "-      -      -      -      -      sD     sD     -      SID",
    "kept_result    ": "-      SID    -      -      -      sD     sD     -      -",
    "sink           ": "-      -      -      -      -      sD     sD     -      Siu",
}
# Of an operator, who repairs what was set back and decides about what is parked; of a router
REPAIRING = {
    ("subscription", "u"): "paused_at paused_by paused_why rate concurrency fair_by priority_by "
    "priority",
    ("backoff", "u"): "attempts next_attempt_at error awaits_handler message_type needs_operator "
    "paused_at",
    ("cursor", "u"): "allowance set_aside_at",
    ("outbox", "i"): "message_id from_service to_service to_broker key conversation_id "
    "from_initiator sequence message_type headers body created_at deliver_at expires_at",
    ("conversation", "u"): "far_service far_broker group_id send_sequence receive_sequence "
    "ended_here ended_there error_code error_text timer changed_at lineage far_lineage "
    "answered_by",
}
SOME = {
    ("alembic_version", "s"): "version_num",
    ("outbox", "i"): "message_id from_service to_service to_broker key message_type headers body "
    "deliver_at expires_at",
    ("outbox", "s"): "message_id",
    ("held", "s"): "due refused",
    ("backfill", "u"): "paused_at paused_by ended_at cancelled",
    ("schedule", "s"): "name cron every anchor zone missed next_run paused refused version",
    ("held", "u"): "due refused",
    ("inbox", "s"): "txid id shard message_id",
    ("inbox", "i"): "message_id from_service to_service to_broker key conversation_id "
    "from_initiator sequence message_type headers body created_at deliver_at expires_at source",
    ("subscription", "u"): "created_at",
    ("member", "i"): "member_id subscription_id name lease_until",
    ("member", "u"): "lease_until stopping",
    ("cursor", "u"): "owner epoch batch done open position attempted route_version opened_at "
    "allowance until cuts set_aside_at",
    ("cursor", "i"): "subscription_id shard done",
    ("subscription", "i"): "name log service stream",
    ("allotment", "i"): "subscription_id destination next_free_at",
    ("allotment", "u"): "next_free_at",
    ("seat", "i"): "subscription_id seat",
    ("seat", "u"): "created_at",
    ("route", "i"): "service broker destination quality enabled expires_at comment local",
    ("route", "u"): "service broker destination quality enabled expires_at comment local",
    ("route_version", "i"): "routes topics routers brokers",
    ("route_version", "s"): "version brokers",
    ("dropped", "i"): "subscription_id shard reason messages last_message_id",
    ("dropped", "u"): "messages last_message_id last_at",
    ("router", "i"): "service kind expression once_per enabled comment mode",
    ("router", "u"): "service kind expression once_per enabled comment mode",
    ("resolved_conversation", "i"): "router key service broker to_key",
    ("resolved_conversation", "u"): "used_at",
    ("resolved_conversation", "s"): "key service used_at kept_until",
    ("topic", "i"): "name",
    ("route_choice", "i"): "service broker key destination",
    ("route_choice", "u"): "used_at",
    ("route_choice", "s"): "service key destination used_at",
    ("route_share", "i"): "service broker keys",
    ("route_share", "u"): "keys",
    ("broker", "u"): "incarnation",
    ("watermark", "u"): "epoch batch position opened_at acknowledged set_aside_at",
    ("acknowledged", "u"): "batch position opened_at",
    ("source", "i"): "name kind topic topic_id",
    ("source", "u"): "topic_id",
    ("source_member", "i"): "member_id source name lease_until",
    ("source_member", "u"): "lease_until",
    ("source_shard", "i"): "source shard start_batch start_position added",
    ("source_shard", "u"): "owner epoch start_batch start_position added pending looked_at",
    ("source_window", "i"): "source shard number ids",
    ("taken_out", "i"): "subscription_id destination kind subject broker shard opened_at",
    ("rejecting", "u"): "messages",
    ("fleet_member", "i"): "fleet name broker_id",
    ("fleet_member", "u"): "broker_id missing_since",
    ("parked", "u"): "destination deliver_at kind subject broker",
    ("backoff", "s"): "destination subject",
    ("backoff", "u"): "attempts next_attempt_at error awaits_handler message_type needs_operator",
    ("dead_letter", "s"): "subscription_id destination shard id message_id dead_letter_at",
    ("dead_letter", "u"): "error",
    ("service", "i"): "name",
    ("audit", "i"): "action message_ids why person names",
    ("endpoint", "i"): "name subscription_id url settings",
    ("endpoint", "u"): "subscription_id url settings",
    ("dispatched", "u"): "batch ids",
    ("breaker", "u"): "endpoint state failures failing_since next_probe_at error paused_at "
    "paused_by changed_at",
    ("attempt", "i"): "subscription_id message_id key status seconds outcome error",
    ("staged", "s"): "attempt",
    ("sink", "s"): "version sent_at",
    ("kept_result", "s"): "subscription_id shard id",
    ("parked", "s"): "subscription_id id",
    ("sink", "i"): "application version messages",
    ("sink", "u"): "version messages sent_at",
    ("webhook", "i"): "digest",
    ("webhook", "u"): "stored_at",
    ("conversation", "i"): "handle conversation_id is_initiator monolog service far_service "
    "far_broker contract contract_version group_id expires_at lineage redirected_by",
    (
        "conversation",
        "u",
    ): "far_service far_broker group_id send_sequence receive_sequence ended_here ended_there "
    "error_code error_text timer changed_at far_lineage answered_by",
    ("conversation", "s"): "handle conversation_id is_initiator state service group_id "
    "receive_sequence ended_here error_code changed_at",
    ("fragment", "s"): "conversation_id from_initiator sequence",
    ("conversation_group", "i"): "group_id",
    ("conversation_group", "u"): "state",
    ("conversation_group", "s"): "group_id",
}
# What is said in a dialog has more columns; other kinds may see or write others, or fewer
SPOKEN = {
    ("schedule", "s"): "name from_service to_service message_type cron every anchor zone missed "
    "next_run last_run skipped paused refused origin sender created_at changed_at",
    ("outbox", "i"): "message_id from_service to_service to_broker key conversation_id "
    "from_initiator sequence message_type headers body deliver_at expires_at",
    ("conversation", "s"): "conversation_id is_initiator service ended_here error_code",
    ("resolved_conversation", "i"): "router key service broker to_key handle",
    ("dead_letter", "s"): "subscription_id id",
    ("resolved_conversation", "u"): "used_at handle kept_until",
    ("cursor", "u"): "epoch batch done open position opened_at",
}

ALL_RIGHTS = """
SELECT c.relname, p.privilege,
       CASE WHEN p.privilege <> 'USAGE' THEN has_table_privilege(%(role)s, c.oid, p.privilege)
            WHEN c.relkind = 'S' THEN has_sequence_privilege(%(role)s, c.oid, p.privilege)
            ELSE false END,
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               AND p.privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
               AND has_column_privilege(%(role)s, c.oid, a.attnum, p.privilege)
             ORDER BY a.attnum)
FROM pg_class c, unnest(%(privileges)s::text[]) WITH ORDINALITY AS p (privilege, number)
WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind NOT IN ('i', 'I', 'c', 't')
ORDER BY p.number
"""
LETTERS = {
    "SELECT": "S",
    "INSERT": "I",
    "UPDATE": "U",
    "DELETE": "D",
    "TRUNCATE": "T",
    "USAGE": "N",
}


def expected(kind: str) -> dict[str, str]:
    column = KINDS.index(kind)
    return {table.strip(): cells.split()[column].strip("-") for table, cells in MATRIX.items()}


def rights(dsn: Dsn, role: str) -> dict[str, str]:
    """What the server says that a role may do, in the letters of MATRIX."""
    with connect(dsn) as connection:
        others = ["REFERENCES", "TRIGGER"]
        if connection.info.server_version >= 170000:
            others.append("MAINTAIN")
        rows = fetch(connection, ALL_RIGHTS, {"role": role, "privileges": [*LETTERS, *others]})
    found: dict[str, str] = {}
    for table, privilege, whole, columns in rows:
        letter = LETTERS.get(privilege, f"({privilege})")
        if columns and not whole:
            letter = letter.lower()
            place = table, letter
            assert " ".join(columns) in (SOME[place], SPOKEN.get(place), REPAIRING.get(place))
        found[table] = found.get(table, "") + (letter if whole or columns else "")
    return found
