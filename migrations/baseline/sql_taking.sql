-- Receiving from SQL: which messages saf.receive takes, and how it moves the cursors past them.
--
-- The next messages of lanes and shards, as sql_receive.sql says; or the messages of one dialog, or
-- of a group of dialogs, whatever waits before them. A conversation's key is its id, so its messages
-- are in one shard. They are taken ahead of the shard's position, by the mechanism of
-- saf.receiving.chosen: saf.dispatched keeps their ids, and if one has arrived after the shard's
-- batch was opened, a batch is opened that reaches up to now.
--
-- Failures of chosen messages. In a shard that is handed out with care, the conversation's first
-- message is put into its lane and counted. Once this has committed, the message is tried alone. A
-- failed transaction that took messages ahead leaves its trace on the shard's row of saf.dispatched,
-- too. So the failure is not counted against the shard's first message.

-- PostgreSQL counts the transaction that asks as complete, but it may still write messages
CREATE FUNCTION saf.without_own(snapshot pg_snapshot, own xid8) RETURNS pg_snapshot
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN $2 IS NULL OR $2 >= pg_snapshot_xmax($1) THEN $1 ELSE format('%s:%s:%s',
        least(pg_snapshot_xmin($1)::text::bigint, $2::text::bigint), pg_snapshot_xmax($1),
        (SELECT string_agg(x::text, ',' ORDER BY x)
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
    IF num_nonnulls(r.rate, r.fair_by, r.priority_by) > 0 THEN
        PERFORM saf.refuse_receiver(
            format('subscription %L has a rate or a fair order, which SQL does not follow', $1),
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

-- As saf.receiving.allotment.SEAT. A rollback, also to a savepoint, frees the seat and the setting
CREATE FUNCTION saf.has_seat(r saf.subscription) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF r.concurrency IS NULL
       OR current_setting('saf.seat', true) = r.subscription_id::text THEN
        RETURN true;
    END IF;
    PERFORM FROM saf.seat s
    WHERE s.subscription_id = r.subscription_id AND s.seat <= r.concurrency
    ORDER BY s.seat LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM set_config('saf.seat', r.subscription_id::text, true);
    RETURN true;
END $$;
COMMENT ON FUNCTION saf.has_seat IS
    'whether this transaction may be a delivery of a subscription; it locks one of its seats';
REVOKE ALL ON FUNCTION saf.has_seat FROM PUBLIC;

-- As saf.receiving.chosen.Conversations
CREATE FUNCTION saf.chosen(r saf.subscription, conversation uuid, conversation_group uuid)
RETURNS uuid[] LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    e saf.conversation;
BEGIN
    IF num_nonnulls($2, $3) = 2 THEN
        PERFORM saf.refuse_argument(
            'conversation and conversation_group: give one of them, or neither');
    ELSIF num_nonnulls($2, $3) = 0 THEN
        RETURN NULL;
    END IF;
    SELECT c.* INTO e FROM saf.conversation c WHERE c.handle = coalesce($2, $3);
    IF NOT FOUND THEN
        PERFORM saf.refuse_handle(coalesce($2, $3));
    ELSIF e.service <> r.service IS NOT FALSE OR r.name <> r.service THEN
        PERFORM saf.refuse_receiver(
            format('dialog %s is an end of service %L, whose messages subscription %L does not '
                   'receive: receive from %L', e.handle, e.service, r.name, e.service),
            'List the dialogs of this database with `saf dialog list`.');
    END IF;
    RETURN CASE WHEN $2 IS NOT NULL THEN ARRAY[e.conversation_id] ELSE ARRAY(
        SELECT DISTINCT c.conversation_id FROM saf.conversation c
        WHERE c.group_id = e.group_id AND c.service = e.service) END;
END $$;
COMMENT ON FUNCTION saf.chosen IS
    'the conversations to receive: of the end with a handle, or of all ends of a service in the '
    'group of an end; NULL: all';
REVOKE ALL ON FUNCTION saf.chosen FROM PUBLIC;

-- As saf.receiving.chosen.LOOK and ALL
CREATE FUNCTION saf.unread(
    c saf.cursor, service text, conversation uuid, up_to pg_snapshot
) RETURNS TABLE (id bigint, txid xid8, in_batch boolean, complete boolean)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT i.id, i.txid, o.shown, o.shown AND (i.id <= c.position OR coalesce(i.id <@ d.ids, false))
    FROM (SELECT n.* FROM saf.inbox n
          WHERE n.shard = c.shard AND n.txid >= pg_snapshot_xmax(c.done)
          UNION ALL
          SELECT n.* FROM saf.inbox n
          WHERE n.shard = c.shard AND n.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))) AS i
    CROSS JOIN LATERAL (SELECT coalesce(pg_visible_in_snapshot(i.txid, c.open), false)) AS o (shown)
    LEFT JOIN saf.dispatched d
        ON (d.subscription_id, d.shard, d.batch) = (c.subscription_id, c.shard, c.batch)
    WHERE i.to_service = unread.service AND pg_visible_in_snapshot(i.txid, unread.up_to)
      AND (unread.conversation IS NULL OR i.conversation_id = unread.conversation);
END $$;
COMMENT ON FUNCTION saf.unread IS
    'the messages of a shard that done does not show and a snapshot does: whether each is in the '
    'open batch, and complete. conversation: only its messages';
REVOKE ALL ON FUNCTION saf.unread FROM PUBLIC;

-- As saf.receiving.chosen.extend
CREATE FUNCTION saf.extend_batch(
    INOUT c saf.cursor, service text, up_to pg_snapshot, OUT beyond int8multirange
) LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    messages bigint;
    first_id bigint;
    first_txid bigint;
BEGIN
    SELECT count(*), min(u.id) FILTER (WHERE NOT u.complete),
           min(u.txid::text::bigint) FILTER (WHERE NOT u.complete)
    INTO messages, first_id, first_txid
    FROM (SELECT * FROM saf.unread(c, $2, NULL, $3) LIMIT 16385) AS u;
    IF messages > 16384 THEN
        RETURN;
    END IF;
    -- one range between two incomplete messages
    SELECT coalesce(range_agg(int8range(p.first, p.last, '[]')), '{}') INTO beyond
    FROM (SELECT min(u.id) AS first, max(u.id) AS last
          FROM (SELECT n.id, n.complete,
                       count(*) FILTER (WHERE NOT n.complete) OVER (ORDER BY n.id) AS part
                FROM saf.unread(c, $2, NULL, $3) AS n) AS u
          WHERE u.complete AND u.id > first_id GROUP BY u.part) AS p;
    IF first_txid >= pg_snapshot_xmax(c.done)::text::bigint THEN
        SELECT format('%s:%s:%s', coalesce(min(x.txid), first_txid), first_txid,
                      string_agg(x.txid::text, ',' ORDER BY x.txid))::pg_snapshot
        INTO c.done
        FROM (SELECT pg_snapshot_xip($3)::text::bigint) AS x (txid) WHERE x.txid < first_txid;
    END IF;
    c.batch = c.batch + 1;
    c.open = $3;
    c.opened_at = now();
    c.position = first_id - 1;
END $$;
COMMENT ON FUNCTION saf.extend_batch IS
    'a cursor with a batch of what is left of its batch, and of what has arrived up to a snapshot; '
    'and the ids beyond its position that are complete. NULL: the shard has too many messages';
REVOKE ALL ON FUNCTION saf.extend_batch FROM PUBLIC;

CREATE FUNCTION saf.read_on(
    c saf.cursor, service text, conversation uuid, beyond int8multirange, most integer
) RETURNS SETOF saf.parked LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT NULL::bigint, c.subscription_id, '', i.shard, i.id, i.message_id, i.from_service,
           i.to_service, i.to_broker, i.key, i.conversation_id, i.from_initiator, i.sequence,
           i.message_type, i.headers, i.body, i.created_at, i.deliver_at, i.expires_at, now(),
           'key', NULL, c.batch, i.id, NULL::timestamptz, '',
           'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid, i.source
    FROM (SELECT n.* FROM saf.inbox n
          WHERE n.shard = c.shard AND n.txid >= pg_snapshot_xmax(c.done)
          UNION ALL
          SELECT n.* FROM saf.inbox n
          WHERE n.shard = c.shard AND n.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))) AS i
    WHERE i.txid < pg_snapshot_xmax(c.open) AND pg_visible_in_snapshot(i.txid, c.open)
      AND (read_on.service IS NULL OR i.to_service = read_on.service) AND i.id > c.position
      AND (read_on.beyond IS NULL OR NOT i.id <@ read_on.beyond)
      AND (read_on.conversation IS NULL OR i.conversation_id = read_on.conversation)
    ORDER BY i.id LIMIT read_on.most;
END $$;
COMMENT ON FUNCTION saf.read_on IS
    'the next messages of a cursor''s open batch, as rows of saf.parked';
REVOKE ALL ON FUNCTION saf.read_on FROM PUBLIC;

-- Reads on in a locked shard: delayed messages that are due, then the log. Writes the cursor. A
-- batch that is complete is closed, and the next one is opened in the same call: without a message
-- in hand, nothing is left to hand out. Pages grow, so that many messages that are not handed out
-- are not sorted again and again.
CREATE FUNCTION saf.take_shard(
    r saf.subscription, c saf.cursor, wanted integer, conversations uuid[], presumed boolean,
    chosen uuid
) RETURNS TABLE (m saf.parked, handle uuid, before jsonb)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    was_batch bigint = c.batch;
    beyond int8multirange;
    up_to_now boolean = false;
    complete boolean;
    handed integer = 0;
    passed integer = 0;
    read integer = 0;
    found integer;
    p record;
    d record;
BEGIN
    LOOP
        found = 0;
        FOR p IN SELECT l AS m FROM saf.parked l
                 WHERE l.subscription_id = r.subscription_id AND l.destination = ''
                   AND l.kind = 'later' AND l.subject = c.shard::text
                   AND l.deliver_at <= statement_timestamp()
                   AND (chosen IS NULL OR l.conversation_id = chosen)
                 ORDER BY l.deliver_at, l.id LIMIT wanted - handed OFFSET passed LOOP
            found = found + 1;
            m = p.m;
            SELECT * INTO d FROM saf.dispose(r, m, conversations, false, presumed);
            IF d.verdict = 'stop' THEN
                passed = passed + 1;
            ELSIF d.verdict = 'hand' THEN
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
        EXIT WHEN found = 0 OR handed >= wanted;
    END LOOP;
    PERFORM saf.time_late(r.subscription_id, c.shard);
    IF chosen IS NOT NULL THEN
        RETURN QUERY SELECT a.* FROM saf.take_ahead(
            r, c, wanted - handed, conversations, presumed, chosen) AS a;
        RETURN;
    END IF;
    IF c.open IS NOT NULL THEN
        SELECT x.ids INTO beyond FROM saf.dispatched x
        WHERE (x.subscription_id, x.shard, x.batch) = (r.subscription_id, c.shard, c.batch);
    END IF;
    LOOP
        IF c.open IS NULL THEN
            c.batch = c.batch + 1;
            c.open = saf.without_own(pg_current_snapshot(), pg_current_xact_id());
            c.opened_at = now();
            beyond = NULL;
            up_to_now = true;
        END IF;
        complete = false;
        <<pages>>
        WHILE handed < wanted AND NOT complete AND (handed = 0 OR read < 1000) LOOP
            found = 0;
            FOR p IN SELECT n AS m FROM saf.read_on(
                         c, r.service, NULL, beyond, wanted - handed + least(read, 1000)) AS n LOOP
                EXIT pages WHEN handed >= wanted;
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
        EXIT WHEN up_to_now OR NOT complete;
        c.done = c.open;
        c.open = NULL;
        c.position = 0;
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
    'not handed out, but wait in the lanes of their keys, with their attempts counted. chosen: only '
    'messages of this conversation, ahead of the position';
REVOKE ALL ON FUNCTION saf.take_shard FROM PUBLIC;

-- A conversation's messages are processed up to the first that is handed out. The epoch tells
-- readers that have prefetched messages that some of them are complete. saf.dispatched is always
-- written, as the trace of this transaction
CREATE FUNCTION saf.take_ahead(
    r saf.subscription, c saf.cursor, wanted integer, conversations uuid[], presumed boolean,
    chosen uuid
) RETURNS TABLE (m saf.parked, handle uuid, before jsonb)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    was_batch bigint = c.batch;
    up_to pg_snapshot = saf.without_own(pg_current_snapshot(), pg_current_xact_id());
    ids int8multirange = '{}';
    in_batch boolean;
    found integer = 1;
    x record;
    p record;
    d record;
BEGIN
    IF c.open IS NULL THEN
        c.batch = c.batch + 1;
        c.open = up_to;
        c.opened_at = now();
    ELSE
        ids = coalesce((
            SELECT a.ids FROM saf.dispatched a
            WHERE (a.subscription_id, a.shard, a.batch) = (r.subscription_id, c.shard, c.batch)
        ), '{}');
    END IF;
    SELECT u.in_batch INTO in_batch FROM saf.unread(c, r.service, chosen, up_to) AS u
    WHERE NOT u.complete ORDER BY u.id LIMIT 1;
    IF NOT in_batch THEN
        SELECT * INTO x FROM saf.extend_batch(c, r.service, up_to);
        IF x.beyond IS NOT NULL THEN
            c = x.c;
            ids = x.beyond;
        END IF;
    END IF;
    <<pages>>
    WHILE wanted > 0 AND found > 0 LOOP
        found = 0;
        FOR p IN SELECT n AS m FROM saf.read_on(c, r.service, chosen, ids, 100) AS n LOOP
            m = p.m;
            SELECT * INTO d FROM saf.dispose(r, m, conversations, false, presumed);
            EXIT pages WHEN d.verdict = 'stop';
            found = found + 1;
            ids = ids + int8multirange(int8range(m.id, m.id, '[]'));
            IF d.verdict = 'hand' THEN
                handle = d.handle;
                before = d.before;
                RETURN NEXT;
            END IF;
            EXIT pages WHEN d.verdict IN ('hand', 'left');
        END LOOP;
    END LOOP;
    UPDATE saf.cursor u
    SET batch = c.batch, opened_at = c.opened_at, done = c.done, open = c.open,
        position = c.position, epoch = u.epoch + 1,
        until = CASE WHEN c.batch = was_batch THEN u.until END,
        cuts = CASE WHEN c.batch = was_batch THEN u.cuts ELSE '{}' END
    WHERE (u.subscription_id, u.shard, u.batch) = (r.subscription_id, c.shard, was_batch);
    INSERT INTO saf.dispatched (subscription_id, shard, batch, ids)
    VALUES (r.subscription_id, c.shard, c.batch,
            ids * int8multirange(int8range(c.position, NULL, '()')))
    ON CONFLICT (subscription_id, shard) DO UPDATE SET
        batch = excluded.batch, ids = excluded.ids;
END $$;
COMMENT ON FUNCTION saf.take_ahead IS
    'takes the next message of a conversation in a locked shard, ahead of its position';
REVOKE ALL ON FUNCTION saf.take_ahead FROM PUBLIC;

-- A write replaces the trace, so the cursor is written in any case. The cursor's lock keeps other
-- receivers from the lanes. A lock on a lane would leave a trace, too, if this transaction fails,
-- so only lanes that have one are written. saf.dispatched gets its row here, because only a row that
-- has committed keeps the trace of a transaction that takes messages ahead.
CREATE FUNCTION saf.note_failure(
    r saf.subscription, c saf.cursor, touched xid, max_attempts integer
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b record;
    of_lane boolean = false;
    ahead boolean = EXISTS (
        SELECT FROM saf.dispatched x
        WHERE (x.subscription_id, x.shard) = (r.subscription_id, c.shard) AND x.xmax = $3);
BEGIN
    FOR b IN SELECT o AS lane, o.xmax AS touched FROM saf.backoff o
             WHERE o.subscription_id = r.subscription_id AND o.shard = c.shard
               AND saf.is_failed(o.xmax) LOOP
        of_lane = of_lane OR b.touched = $3;
        PERFORM saf.count_failed(b.lane, $4);
    END LOOP;
    IF NOT of_lane AND NOT ahead AND c.allowance = 1 THEN
        PERFORM FROM saf.take_shard(r, c, 1, '{}', true, NULL);
        RETURN;
    END IF;
    UPDATE saf.cursor u
    SET allowance = CASE WHEN of_lane THEN c.allowance
                         WHEN ahead THEN coalesce(c.allowance, 1) ELSE 1 END
    WHERE (u.subscription_id, u.shard, u.batch) = (r.subscription_id, c.shard, c.batch);
    INSERT INTO saf.dispatched (subscription_id, shard, batch, ids)
    VALUES (r.subscription_id, c.shard, c.batch, '{}')
    ON CONFLICT (subscription_id, shard) DO NOTHING;
END $$;
COMMENT ON FUNCTION saf.note_failure IS
    'counts the attempt that has left its trace on a locked cursor';
REVOKE ALL ON FUNCTION saf.note_failure FROM PUBLIC;

-- A chosen conversation is looked for without locks, so that a call that finds nothing writes
-- nothing. If its lane waits, saf.take_lane takes its messages. In a shard that is handed out with
-- care, its first message is counted, and tried alone after that has committed
CREATE FUNCTION saf.take_shards(
    r saf.subscription, wanted integer, max_attempts integer, fresh boolean, conversations uuid[],
    chosen uuid[]
) RETURNS TABLE (m saf.parked, handle uuid, before jsonb, attempt integer, alone boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    up_to pg_snapshot = saf.without_own(pg_current_snapshot(), pg_current_xact_id_if_assigned());
    s record;
    l record;
    t record;
    c saf.cursor;
    with_care boolean;
    handed integer = 0;
BEGIN
    FOR s IN
        SELECT f.shard, f.conversation FROM (
            SELECT n.shard, NULL::uuid FROM saf.newest_cursors(r.subscription_id) AS n
            WHERE chosen IS NULL AND n.owner IS NULL AND (
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
            UNION ALL
            SELECT n.shard, w.conversation
            FROM unnest(chosen) AS w (conversation) CROSS JOIN saf.broker b
            JOIN saf.newest_cursors(r.subscription_id) AS n ON n.shard
                = (hashtextextended(w.conversation::text, 0) % b.shards + b.shards) % b.shards
            WHERE n.owner IS NULL AND w.conversation <> ALL (conversations)
              AND NOT EXISTS (SELECT FROM saf.backoff k
                              WHERE (k.subscription_id, k.destination, k.kind, k.subject)
                                    = (r.subscription_id, '', 'key', w.conversation::text))
              AND (EXISTS (SELECT FROM saf.unread(n, r.service, w.conversation, up_to) AS u
                           WHERE NOT u.complete)
                   OR EXISTS (SELECT FROM saf.parked p
                              WHERE p.subscription_id = r.subscription_id AND p.destination = ''
                                AND p.kind = 'later' AND p.subject = n.shard::text
                                AND p.conversation_id = w.conversation
                                AND p.deliver_at <= statement_timestamp()))
        ) AS f (shard, conversation)
        ORDER BY random()
    LOOP
        SELECT q.* INTO l FROM (
            SELECT f AS cursor, f.xmax AS touched FROM saf.cursor f
            WHERE (f.subscription_id, f.shard) = (r.subscription_id, s.shard)
              AND f.batch = (SELECT n.batch FROM saf.cursor n
                             WHERE (n.subscription_id, n.shard) = (r.subscription_id, s.shard)
                             ORDER BY n.batch DESC LIMIT 1)
              AND f.owner IS NULL AND (fresh AND handed = 0 OR f.allowance IS NULL)
            FOR UPDATE SKIP LOCKED) AS q;
        CONTINUE WHEN NOT FOUND;
        c = l.cursor;
        IF saf.is_failed(l.touched) THEN
            PERFORM saf.note_failure(r, c, l.touched, max_attempts);
            CONTINUE;
        END IF;
        with_care = chosen IS NOT NULL AND c.allowance IS NOT NULL;
        alone = c.allowance IS NOT NULL;
        attempt = CASE WHEN c.allowance = 1 THEN 2 ELSE 1 END;
        FOR t IN SELECT * FROM saf.take_shard(
                     r, c, least(wanted - handed, c.allowance,
                                 CASE WHEN chosen IS NOT NULL THEN 1 END),
                     conversations, with_care, s.conversation) LOOP
            IF with_care THEN
                PERFORM saf.wait_in_lane(
                    t.m, 1, 'a delivery from its shard did not come to its end',
                    clock_timestamp(), false);
                PERFORM set_config('saf.in_hand',
                                   jsonb_set(saf.in_hand(), '{alone}', 'true')::text, true);
                CONTINUE;
            END IF;
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
COMMENT ON FUNCTION saf.take_shards IS
    'locks free shards with messages, and takes the next ones. chosen: only messages of these '
    'conversations';
REVOKE ALL ON FUNCTION saf.take_shards FROM PUBLIC;

-- Due lanes of shards that other receivers have locked are passed over, however many they are
CREATE FUNCTION saf.take_lane(
    r saf.subscription, wanted integer, max_attempts integer, chosen uuid[]
) RETURNS TABLE (m saf.parked, handle uuid, before jsonb, attempt integer, alone boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    s record;
    l record;
    p record;
    d record;
    b saf.backoff;
    verdict text;
    busy smallint[] = '{}';
    looked integer;
    newly integer;
    handed integer = 0;
BEGIN
    alone = true;
    <<looks>>
    LOOP
        looked = 0;
        newly = cardinality(busy);
        FOR s IN
            SELECT n.shard, o.subject
            FROM (SELECT k.shard, k.subject, k.next_attempt_at FROM saf.backoff k
                  WHERE chosen IS NULL AND k.subscription_id = r.subscription_id
                    AND k.shard IS NOT NULL AND k.next_attempt_at <= clock_timestamp()
                  UNION ALL
                  SELECT k.shard, k.subject, k.next_attempt_at
                  FROM unnest(chosen) AS w (conversation) JOIN saf.backoff k
                      ON (k.subscription_id, k.destination, k.kind, k.subject)
                         = (r.subscription_id, '', 'key', w.conversation::text)
                  WHERE k.next_attempt_at <= clock_timestamp()) AS o
            JOIN saf.newest_cursors(r.subscription_id) AS n ON n.shard = o.shard
            WHERE n.owner IS NULL AND n.shard <> ALL (busy)
            ORDER BY o.next_attempt_at LIMIT 100
        LOOP
            looked = looked + 1;
            CONTINUE WHEN s.shard = ANY (busy);
            SELECT q.* INTO l FROM (
                SELECT f AS cursor, f.xmax AS touched FROM saf.cursor f
                WHERE (f.subscription_id, f.shard) = (r.subscription_id, s.shard)
                  AND f.batch = (SELECT n.batch FROM saf.cursor n
                                 WHERE (n.subscription_id, n.shard) = (r.subscription_id, s.shard)
                                 ORDER BY n.batch DESC LIMIT 1)
                  AND f.owner IS NULL FOR UPDATE SKIP LOCKED) AS q;
            IF NOT FOUND THEN
                busy = busy || s.shard;
                CONTINUE;
            END IF;
            IF saf.is_failed(l.touched) THEN
                PERFORM saf.note_failure(r, l.cursor, l.touched, max_attempts);
                busy = busy || s.shard;
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
            LOOP
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
                    END IF;
                    attempt = 1;
                END LOOP;
                EXIT WHEN handed > 0 OR verdict IS DISTINCT FROM 'done';
                b.attempts = 0;
            END LOOP;
            IF handed > 0 OR verdict IS NULL THEN
                PERFORM saf.open_lane(r.subscription_id, b.subject);
            END IF;
            EXIT looks WHEN handed > 0;
        END LOOP;
        EXIT WHEN looked < 100 OR cardinality(busy) = newly;
    END LOOP;
END $$;
COMMENT ON FUNCTION saf.take_lane IS
    'takes the first message of a key that waits and is due; or the next ones, if they only wait '
    'behind it. chosen: only of these conversations';
REVOKE ALL ON FUNCTION saf.take_lane FROM PUBLIC;

-- Lanes and shards at random, so that neither starves; the lanes of chosen conversations first,
-- because the shards fill them. Plans use the indexes, because a slot that is empty when they are
-- made may be large a moment later
CREATE FUNCTION saf.receive(
    subscription text, max_messages integer DEFAULT 1, max_attempts integer DEFAULT 5,
    conversation uuid DEFAULT NULL, conversation_group uuid DEFAULT NULL
) RETURNS TABLE (
    id bigint, message_id uuid, from_service text, to_service text, key text, message_type text,
    headers jsonb, body bytea, created_at timestamptz, conversation_id uuid, handle uuid,
    sequence bigint, attempt integer
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    r saf.subscription;
    chosen uuid[];
    hand jsonb = saf.in_hand();
    fresh boolean;
    taken jsonb[] = '{}';
    is_alone boolean = false;
    lanes_first boolean;
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
    chosen = saf.chosen(r, receive.conversation, receive.conversation_group);
    IF r.paused_at IS NOT NULL OR (hand ->> 'alone')::boolean OR NOT saf.has_seat(r) THEN
        RETURN;
    END IF;
    fresh = coalesce(current_setting('saf.in_hand', true), '') = '';
    conversations = ARRAY(SELECT (h ->> 'conversation')::uuid
                          FROM jsonb_array_elements(hand -> 'messages') AS h
                          WHERE h ->> 'conversation' IS NOT NULL);
    lanes_first = chosen IS NOT NULL OR random() < 0.5;
    FOR step IN 1..2 LOOP
        FOR t IN
            SELECT * FROM saf.take_lane(r, receive.max_messages, receive.max_attempts, chosen)
            WHERE (step = 1) = lanes_first AND fresh
            UNION ALL
            SELECT * FROM saf.take_shards(
                r, receive.max_messages, receive.max_attempts, fresh, conversations, chosen)
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
            'alone', is_alone OR (saf.in_hand() ->> 'alone')::boolean,
            'messages', (hand -> 'messages') || to_jsonb(taken))::text, true);
    END IF;
END $$;
COMMENT ON FUNCTION saf.receive IS
    'receives the next messages of a subscription, in order; they are handled when the caller''s '
    'transaction commits. conversation, or conversation_group: only the messages of the dialog of '
    'this handle, or of all dialogs in its group. No row: no message can be handed out now';
REVOKE ALL ON FUNCTION saf.receive FROM PUBLIC;
