"""Lists that are longer than a page: SQL that makes their rows, and places that they have not."""

import json
from uuid import UUID

DIALOGS = """
WITH g AS (INSERT INTO saf.conversation_group (group_id) VALUES (gen_random_uuid())
           RETURNING group_id)
INSERT INTO saf.conversation
    (conversation_id, is_initiator, service, far_service, group_id, created_at)
SELECT gen_random_uuid(), true, 'service ' || n, 'far', group_id, now() + (n / 4) * interval '1 s'
FROM generate_series(1, 230) AS n, g
"""
LANES = """
INSERT INTO saf.backoff (subscription_id, destination, kind, subject, error)
SELECT subscription_id, '', 'route', 'nobody ' || n, 'no route'
FROM saf.subscription, generate_series(1, 430) AS n WHERE name = 'forwarder'
"""
PARKED = """
INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, batch, position, to_service,
                        key, body)
SELECT subscription_id, 'route', 'nobody', 0, n, 1, n, 'nobody', 'key ' || n, ''
FROM saf.subscription, generate_series(1, 120) AS n WHERE name = 'forwarder'
"""
LETTERS = """
INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error, to_service,
                             key, body)
SELECT subscription_id, 'mom', 0, n, 'rejected', 'no', 'billing', 'key ' || n, ''
FROM saf.subscription, generate_series(1, 120) AS n WHERE name = 'forwarder'
"""
DECISIONS = """
INSERT INTO saf.audit (action, message_ids, why)
SELECT 'discard', '{}', 'reason ' || n FROM generate_series(1, 120) AS n
"""


def lane(subscription: str = "a", attempts: str = "-1", subject: str = "b") -> str:
    """A place in a list of lanes."""
    broker = "00000000-0000-0000-0000-000000000000"
    place = ["true", subscription, "true", attempts, "", "key", subject, broker]
    return json.dumps(place)


NOBODY = UUID(int=7)
FOREIGN = (
    *("x", "", "[]", "-1", "9223372036854775808", "\u0667", "\u0667.\u0667", "1.", "7\udc80"),
    *(f"2026-01-01T00:00:00 {NOBODY}", f"0001-01-01T00:00:00+14:00 {NOBODY}", "2026-01-01 x"),
    *('["true", "a", "true", "1", "", "key", "b", "c"]', "[" * 5000, lane(attempts="-2147483649")),
    *(lane(attempts="1_0"), lane(attempts="x"), lane(subject="a\0"), lane(subscription="\ud800")),
)
"""What no page of any list ends with; much of it a database would not take either."""
