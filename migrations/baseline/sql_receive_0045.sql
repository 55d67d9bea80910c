-- Functions of sql_receive.sql as revision 0045 creates them. sql_taking.sql replaces them; its
-- revision creates these again on its way back.

-- PostgreSQL counts the transaction that asks as complete, but it may still write messages
CREATE FUNCTION saf.without_own(snapshot pg_snapshot, own xid8) RETURNS pg_snapshot
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN $2 >= pg_snapshot_xmax($1) THEN $1 ELSE format('%s:%s:%s',
        least(pg_snapshot_xmin($1)::text::bigint, $2::text::bigint), pg_snapshot_xmax($1),
        (SELECT string_agg(DISTINCT x::text, ',' ORDER BY x::text)
         FROM (SELECT pg_snapshot_xip($1) UNION SELECT $2) AS running (x)))::pg_snapshot END
$$;
COMMENT ON FUNCTION saf.without_own IS
    'a snapshot in which the transaction that has taken it counts as still in progress';
REVOKE ALL ON FUNCTION saf.without_own FROM PUBLIC;

CREATE FUNCTION saf.reader(subscription text) RETURNS saf.subscription
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    r saf.subscription;
    moved text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM saf.refuse_receiver(
            format('a receiver needs isolation level READ COMMITTED, and this transaction has %s',
                   upper(current_setting('transaction_isolation'))),
            'Begin it with BEGIN ISOLATION LEVEL READ COMMITTED.');
    END IF;
    SELECT s.* INTO r FROM saf.subscription s
    WHERE s.log = 'inbox' AND s.name = $1 AND NOT s.stream;
    IF NOT FOUND THEN
        PERFORM saf.refuse_receiver(
            format('database %L has no subscription %L of its inbox', current_database(), $1),
            'List them with `saf inbox list`, or create a service with `saf service create`.');
    END IF;
    IF num_nonnulls(r.rate, r.concurrency, r.fair_by, r.priority_by) > 0 THEN
        PERFORM saf.refuse_receiver(
            format('subscription %L has limits or a fair order, which SQL does not follow', $1),
            'Let `saf worker` receive from it, or create a subscription of your own.');
    END IF;
    SELECT string_agg(m.name, ', ' ORDER BY m.name) INTO moved
    FROM saf.member m WHERE m.subscription_id = r.subscription_id;
    IF moved IS NOT NULL THEN
        PERFORM saf.refuse_receiver(
            format('processors own the shards of subscription %L: %s', $1, moved),
            'Stop them, or receive from a subscription of your own.');
    END IF;
    SELECT CASE
        WHEN b.system_identifier <> (SELECT p.system_identifier FROM pg_control_system() p) THEN
            'it was restored into another cluster, or moved there'
        WHEN (SELECT max(pg_snapshot_xmax(coalesce(c.open, c.done))::text::bigint)
              FROM saf.newest_cursors(r.subscription_id) c)
             > pg_snapshot_xmax(pg_current_snapshot())::text::bigint THEN
            'its transaction ids went back' END
    INTO moved FROM saf.broker b;
    IF moved IS NOT NULL THEN
        PERFORM saf.refuse_receiver(
            format('database %L was set back: %s', current_database(), moved),
            'See `saf doctor`.');
    END IF;
    RETURN r;
END $$;
COMMENT ON FUNCTION saf.reader IS
    'the subscription of that name; raises if nobody may receive from it here and now';
REVOKE ALL ON FUNCTION saf.reader FROM PUBLIC;

-- Reads on in a locked shard: delayed messages that are due, then the log. Writes the cursor
CREATE FUNCTION saf.take_shard(
    r saf.subscription, c saf.cursor, wanted integer, conversations uuid[], presumed boolean
) RETURNS TABLE (m saf.parked, handle uuid, before jsonb)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    was_batch bigint = c.batch;
    beyond int8multirange;
    complete boolean = false;
    handed integer = 0;
    read integer = 0;
    found integer;
    p record;
    d record;
BEGIN
    FOR p IN SELECT l AS m FROM saf.parked l
             WHERE l.subscription_id = r.subscription_id AND l.destination = ''
               AND l.kind = 'later' AND l.subject = c.shard::text
               AND l.deliver_at <= statement_timestamp()
             ORDER BY l.deliver_at, l.id LIMIT wanted LOOP
        m = p.m;
        SELECT * INTO d FROM saf.dispose(r, m, conversations, false, presumed);
        IF d.verdict = 'hand' THEN
            IF NOT presumed THEN
                PERFORM saf.keep_copy(m.parked_id);
            END IF;
            handed = handed + 1;
            handle = d.handle;
            before = d.before;
            conversations = conversations || m.conversation_id;
            RETURN NEXT;
        END IF;
    END LOOP;
    PERFORM saf.time_late(r.subscription_id, c.shard);
    IF c.open IS NULL THEN
        c.batch = c.batch + 1;
        c.open = saf.without_own(pg_current_snapshot(), pg_current_xact_id());
        c.opened_at = now();
    ELSE
        SELECT x.ids INTO beyond FROM saf.dispatched x
        WHERE (x.subscription_id, x.shard, x.batch) = (r.subscription_id, c.shard, c.batch);
    END IF;
    <<pages>>
    WHILE handed < wanted AND NOT complete AND read < 1000 LOOP
        found = 0;
        FOR p IN
            SELECT ROW(NULL, r.subscription_id, '', i.shard, i.id, i.message_id, i.from_service,
                       i.to_service, i.to_broker, i.key, i.conversation_id, i.from_initiator,
                       i.sequence, i.message_type, i.headers, i.body, i.created_at, i.deliver_at,
                       i.expires_at, now(), 'key', NULL, c.batch, i.id, NULL, '',
                       'ffffffff-ffff-ffff-ffff-ffffffffffff', i.source)::saf.parked AS m
            FROM (SELECT n.* FROM saf.inbox n
                  WHERE n.shard = c.shard AND n.txid >= pg_snapshot_xmax(c.done)
                  UNION ALL
                  SELECT n.* FROM saf.inbox n
                  WHERE n.shard = c.shard
                    AND n.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))) AS i
            WHERE i.txid < pg_snapshot_xmax(c.open) AND pg_visible_in_snapshot(i.txid, c.open)
              AND (r.service IS NULL OR i.to_service = r.service) AND i.id > c.position
              AND (beyond IS NULL OR NOT i.id <@ beyond)
            ORDER BY i.id LIMIT wanted - handed
        LOOP
            m = p.m;
            SELECT * INTO d FROM saf.dispose(r, m, conversations, false, presumed);
            EXIT pages WHEN d.verdict = 'stop';
            found = found + 1;
            c.position = m.id;
            IF d.verdict = 'hand' THEN
                handed = handed + 1;
                handle = d.handle;
                before = d.before;
                conversations = conversations || m.conversation_id;
                RETURN NEXT;
            END IF;
        END LOOP;
        read = read + found;
        complete = found = 0;
    END LOOP;
    UPDATE saf.cursor u
    SET batch = c.batch, opened_at = c.opened_at,
        done = CASE WHEN complete THEN c.open ELSE c.done END,
        open = CASE WHEN complete THEN NULL ELSE c.open END,
        position = CASE WHEN complete THEN 0 ELSE c.position END,
        until = NULL, cuts = '{}',
        allowance = CASE WHEN presumed THEN 1
                         WHEN handed = 0 AND complete THEN NULL
                         WHEN handed > 0 AND c.allowance >= 128 THEN NULL
                         WHEN handed > 0 THEN c.allowance * 2
                         ELSE c.allowance END
    WHERE (u.subscription_id, u.shard, u.batch) = (r.subscription_id, c.shard, was_batch);
END $$;
COMMENT ON FUNCTION saf.take_shard IS
    'takes the next messages of a locked shard, and moves its cursor past them. presumed: they are '
    'not handed out, but wait in the lanes of their keys, with their attempts counted';
REVOKE ALL ON FUNCTION saf.take_shard FROM PUBLIC;

-- A write replaces the trace, so the cursor is written in any case. The cursor's lock keeps other
-- receivers from the lanes. A lock on a lane would leave a trace, too, if this transaction fails,
-- so only lanes that have one are written.
CREATE FUNCTION saf.note_failure(
    r saf.subscription, c saf.cursor, touched xid, max_attempts integer
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b record;
    of_lane boolean = false;
BEGIN
    FOR b IN SELECT o AS lane, o.xmax AS touched FROM saf.backoff o
             WHERE o.subscription_id = r.subscription_id AND o.shard = c.shard
               AND saf.is_failed(o.xmax) LOOP
        of_lane = of_lane OR b.touched = $3;
        PERFORM saf.count_failed(b.lane, $4);
    END LOOP;
    IF NOT of_lane AND c.allowance = 1 THEN
        PERFORM FROM saf.take_shard(r, c, 1, '{}', true);
    ELSE
        UPDATE saf.cursor u SET allowance = CASE WHEN of_lane THEN c.allowance ELSE 1 END
        WHERE (u.subscription_id, u.shard, u.batch) = (r.subscription_id, c.shard, c.batch);
    END IF;
END $$;
COMMENT ON FUNCTION saf.note_failure IS
    'counts the attempt that has left its trace on a locked cursor';
REVOKE ALL ON FUNCTION saf.note_failure FROM PUBLIC;

CREATE FUNCTION saf.take_shards(
    r saf.subscription, wanted integer, max_attempts integer, fresh boolean, conversations uuid[]
) RETURNS TABLE (m saf.parked, handle uuid, before jsonb, attempt integer, alone boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    s record;
    l record;
    t record;
    c saf.cursor;
    handed integer = 0;
BEGIN
    FOR s IN
        SELECT n.shard, n.batch FROM saf.newest_cursors(r.subscription_id) AS n
        WHERE n.owner IS NULL AND (
            n.open IS NOT NULL OR n.allowance IS NOT NULL
            OR (SELECT i.txid FROM saf.inbox i
                WHERE i.shard = n.shard AND i.txid >= pg_snapshot_xmax(n.done)
                ORDER BY i.txid LIMIT 1) IS NOT NULL
            OR EXISTS (SELECT FROM saf.inbox i
                       WHERE i.shard = n.shard
                         AND i.txid = ANY (ARRAY(SELECT pg_snapshot_xip(n.done))))
            OR EXISTS (SELECT FROM saf.backoff b
                       WHERE b.subscription_id = n.subscription_id AND b.destination = ''
                         AND b.kind = 'later' AND b.subject = n.shard::text
                         AND b.next_attempt_at <= statement_timestamp()))
        ORDER BY random()
    LOOP
        SELECT q.* INTO l FROM (
            SELECT f AS cursor, f.xmax AS touched FROM saf.cursor f
            WHERE (f.subscription_id, f.shard, f.batch) = (r.subscription_id, s.shard, s.batch)
              AND f.owner IS NULL AND (fresh AND handed = 0 OR f.allowance IS NULL)
            FOR UPDATE SKIP LOCKED) AS q;
        CONTINUE WHEN NOT FOUND;
        c = l.cursor;
        IF saf.is_failed(l.touched) THEN
            PERFORM saf.note_failure(r, c, l.touched, max_attempts);
            CONTINUE;
        END IF;
        alone = c.allowance IS NOT NULL;
        attempt = CASE WHEN c.allowance = 1 THEN 2 ELSE 1 END;
        FOR t IN SELECT * FROM saf.take_shard(
                     r, c, least(wanted - handed, c.allowance), conversations, false) LOOP
            handed = handed + 1;
            m = t.m;
            handle = t.handle;
            before = t.before;
            conversations = conversations || (t.m).conversation_id;
            RETURN NEXT;
        END LOOP;
        EXIT WHEN handed >= wanted OR alone AND handed > 0;
    END LOOP;
END $$;
COMMENT ON FUNCTION saf.take_shards IS 'locks free shards with messages, and takes the next ones';
REVOKE ALL ON FUNCTION saf.take_shards FROM PUBLIC;

CREATE FUNCTION saf.take_lane(r saf.subscription, wanted integer, max_attempts integer)
RETURNS TABLE (m saf.parked, handle uuid, before jsonb, attempt integer, alone boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    s record;
    l record;
    p record;
    d record;
    b saf.backoff;
    verdict text;
    handed integer = 0;
BEGIN
    alone = true;
    FOR s IN
        SELECT n.shard, n.batch, o.subject
        FROM saf.backoff o JOIN saf.newest_cursors(r.subscription_id) AS n ON n.shard = o.shard
        WHERE o.subscription_id = r.subscription_id AND n.owner IS NULL
          AND o.next_attempt_at <= clock_timestamp()
        ORDER BY o.next_attempt_at LIMIT 100
    LOOP
        SELECT q.* INTO l FROM (
            SELECT f AS cursor, f.xmax AS touched FROM saf.cursor f
            WHERE (f.subscription_id, f.shard, f.batch) = (r.subscription_id, s.shard, s.batch)
              AND f.owner IS NULL FOR UPDATE SKIP LOCKED) AS q;
        CONTINUE WHEN NOT FOUND;
        IF saf.is_failed(l.touched) THEN
            PERFORM saf.note_failure(r, l.cursor, l.touched, max_attempts);
            CONTINUE;
        END IF;
        SELECT o AS lane, o.xmax AS touched INTO l FROM saf.backoff o
        WHERE (o.subscription_id, o.destination, o.kind, o.subject)
              = (r.subscription_id, '', 'key', s.subject)
          AND o.next_attempt_at <= clock_timestamp();
        CONTINUE WHEN NOT FOUND;
        b = l.lane;
        IF saf.is_failed(l.touched) OR b.attempts >= max_attempts THEN
            PERFORM saf.count_failed(b, max_attempts);
            CONTINUE;
        END IF;
        -- leaves the trace, also of an error that is raised below
        UPDATE saf.backoff u SET attempts = u.attempts
        WHERE (u.subscription_id, u.destination, u.kind, u.subject)
              = (r.subscription_id, '', 'key', b.subject);
        attempt = b.attempts + 1;
        verdict = NULL;
        FOR p IN SELECT w AS m FROM saf.parked w
                 WHERE (w.subscription_id, w.destination, w.kind, w.subject)
                       = (r.subscription_id, '', 'key', b.subject)
                 ORDER BY w.id LIMIT CASE WHEN b.attempts = 0 THEN wanted ELSE 1 END LOOP
            m = p.m;
            SELECT * INTO d FROM saf.dispose(r, m, '{}', true, false);
            verdict = d.verdict;
            EXIT WHEN verdict IN ('left', 'stop');
            IF verdict = 'hand' THEN
                PERFORM saf.keep_copy(m.parked_id);
                handed = handed + 1;
                handle = d.handle;
                before = d.before;
                RETURN NEXT;
                EXIT WHEN d.handle IS NOT NULL;
                attempt = 1;
            END IF;
        END LOOP;
        IF handed > 0 OR verdict IS NULL OR verdict = 'done' THEN
            PERFORM saf.open_lane(r.subscription_id, b.subject);
        END IF;
        EXIT WHEN handed > 0;
    END LOOP;
END $$;
COMMENT ON FUNCTION saf.take_lane IS
    'takes the first message of a key that waits and is due; or the next ones, if they only wait '
    'behind it';
REVOKE ALL ON FUNCTION saf.take_lane FROM PUBLIC;

-- Lanes and shards at random, so that neither starves. Plans use the indexes, because a slot that
-- is empty when they are made may be large a moment later
CREATE FUNCTION saf.receive(
    subscription text, max_messages integer DEFAULT 1, max_attempts integer DEFAULT 5
) RETURNS TABLE (
    id bigint, message_id uuid, from_service text, to_service text, key text, message_type text,
    headers jsonb, body bytea, created_at timestamptz, conversation_id uuid, handle uuid,
    sequence bigint, attempt integer
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    r saf.subscription;
    hand jsonb = saf.in_hand();
    fresh boolean;
    taken jsonb[] = '{}';
    is_alone boolean = false;
    lanes_first boolean = random() < 0.5;
    conversations uuid[];
    t record;
BEGIN
    IF receive.max_messages IS NULL OR receive.max_messages < 1 THEN
        PERFORM saf.refuse_argument(format('max_messages: %s is less than 1',
                                           coalesce(receive.max_messages::text, 'NULL')));
    ELSIF receive.max_attempts IS NULL OR receive.max_attempts < 1 THEN
        PERFORM saf.refuse_argument(format('max_attempts: %s is less than 1',
                                           coalesce(receive.max_attempts::text, 'NULL')));
    END IF;
    r = saf.reader(receive.subscription);
    IF r.paused_at IS NOT NULL OR (hand ->> 'alone')::boolean THEN
        RETURN;
    END IF;
    fresh = coalesce(current_setting('saf.in_hand', true), '') = '';
    conversations = ARRAY(SELECT (h ->> 'conversation')::uuid
                          FROM jsonb_array_elements(hand -> 'messages') AS h);
    FOR step IN 1..2 LOOP
        FOR t IN
            SELECT * FROM saf.take_lane(r, receive.max_messages, receive.max_attempts)
            WHERE (step = 1) = lanes_first AND fresh
            UNION ALL
            SELECT * FROM saf.take_shards(
                r, receive.max_messages, receive.max_attempts, fresh, conversations)
            WHERE (step = 2) = lanes_first
        LOOP
            is_alone = t.alone;
            id = (t.m).id;
            message_id = (t.m).message_id;
            from_service = (t.m).from_service;
            to_service = (t.m).to_service;
            key = (t.m).key;
            message_type = (t.m).message_type;
            headers = (t.m).headers;
            body = (t.m).body;
            created_at = (t.m).created_at;
            conversation_id = (t.m).conversation_id;
            handle = t.handle;
            sequence = (t.m).sequence;
            attempt = t.attempt;
            taken = taken || jsonb_build_object(
                'message', message_id, 'subscription', r.subscription_id, 'shard', (t.m).shard,
                'id', id, 'parked', (t.m).parked_id, 'batch', (t.m).batch,
                'lane', coalesce(key, message_id::text), 'attempt', attempt,
                'of', receive.max_attempts, 'handle', handle, 'before', t.before,
                'conversation', CASE WHEN t.handle IS NOT NULL THEN conversation_id END);
            RETURN NEXT;
        END LOOP;
        EXIT WHEN cardinality(taken) > 0;
    END LOOP;
    IF cardinality(taken) > 0 THEN
        PERFORM set_config('saf.in_hand', jsonb_build_object(
            'alone', is_alone, 'messages', (hand -> 'messages') || to_jsonb(taken))::text, true);
    END IF;
END $$;
COMMENT ON FUNCTION saf.receive IS
    'receives the next messages of a subscription, in order; they are handled when the caller''s '
    'transaction commits. No row: no message can be handed out now';
REVOKE ALL ON FUNCTION saf.receive FROM PUBLIC;
