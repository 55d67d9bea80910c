"""Lists that are longer than a page: SQL that makes their rows."""

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
