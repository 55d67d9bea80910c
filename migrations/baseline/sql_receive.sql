-- Receiving from SQL: messages in the caller's transaction, whose commit moves the position.
--
-- saf.receive, whose own functions are in sql_taking.sql, reads the inbox by the mechanism of
-- saf.receiving.claim: it locks the cursors of shards with messages (SKIP LOCKED), opens a batch, reads on in it, and moves the cursors, all in
-- the caller's transaction. So a key is in one hand at a time, and a receiver that dies loses its
-- locks and nothing else. Outcomes are written immediately, because nothing runs at the commit: a
-- message that was handed out counts as handled, unless saf.reject or saf.retry_later is called for
-- the message in the same transaction.
--
-- Failed attempts. A function cannot count an attempt in a transaction of its own, before the
-- attempt, as the library does. So the next receiver counts it, by the trace that a failed
-- transaction leaves: its id in the xmax of the rows that it wrote (saf.is_failed). There are two:
--
--     a cursor     a delivery from its shard has failed. Its messages are then handed out with
--                  care: one at first, alone in its transaction, and after each success twice as
--                  many (allowance). If the delivery of one message fails, the message is counted,
--                  and waits in the lane of its key.
--     a lane       (saf.backoff) the attempt at the first message of a key has failed. It is
--                  counted, and the lane waits longer; after the last attempt, the message is a
--                  dead letter.
--
-- The call that finds a trace writes the count and hands out messages of other shards. If its
-- transaction fails, too, the count is lost, but the trace is left again. A message with a trace is
-- not handed out until its count is committed, so every attempt is counted sooner or later, though
-- each receiver be killed.
--
-- Messages that only the library can handle are left to the library: the lane of the key waits for
-- a receiver that handles the message, and saf.backoff.error names the reason. This concerns parts
-- of large bodies, types with a JSON Schema, and dialogs that were set back. Signatures are not
-- verified: SQL has no keys.
--
-- The functions run with the rights of their caller: `saf grant --role receiver` gives the rights
-- on the tables, which the library needs as well, so these functions add none. To receive dialogs,
-- a role is a dialog as well. As the owner, each role that may call them would read every
-- subscription.

CREATE FUNCTION saf.is_failed(xid xid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT $1 <> '0'::xid AND pg_xact_status((
        n.next - ((n.next - $1::text::bigint + 2147483648) & 4294967295) + 2147483648
    )::text::xid8) = 'aborted'
    FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS n (next)
$$;
COMMENT ON FUNCTION saf.is_failed IS
    'whether the transaction in a row''s xmax, if any, was rolled back or died';
REVOKE ALL ON FUNCTION saf.is_failed FROM PUBLIC;

-- A setting of the transaction: a rollback, also to a savepoint, takes it back with the rows
CREATE FUNCTION saf.in_hand() RETURNS jsonb LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(nullif(current_setting('saf.in_hand', true), '')::jsonb,
                    '{"alone": false, "messages": []}')
$$;
COMMENT ON FUNCTION saf.in_hand IS
    'messages that this transaction has received and not set aside. alone: it receives no more';
REVOKE ALL ON FUNCTION saf.in_hand FROM PUBLIC;

CREATE FUNCTION saf.newest_cursors(subscription_id integer) RETURNS SETOF saf.cursor
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.* FROM saf.broker b
    CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS s (shard)
    CROSS JOIN LATERAL (
        SELECT f.* FROM saf.cursor f
        WHERE (f.subscription_id, f.shard, f.batch)
              <= ($1, s.shard::smallint, 9223372036854775807)
        ORDER BY f.subscription_id DESC, f.shard DESC, f.batch DESC LIMIT 1) AS c
    WHERE c.subscription_id = $1 AND c.shard = s.shard
$$;
COMMENT ON FUNCTION saf.newest_cursors IS
    'the cursors of a subscription, found without reading their older versions';
REVOKE ALL ON FUNCTION saf.newest_cursors FROM PUBLIC;

CREATE FUNCTION saf.refuse_receiver(fault text, hint text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'object_not_in_prerequisite_state', SCHEMA = 'saf', TABLE = 'subscription',
        CONSTRAINT = 'may_receive', MESSAGE = $1, HINT = $2;
END $$;
COMMENT ON FUNCTION saf.refuse_receiver IS 'raises the error of a receiver';
REVOKE ALL ON FUNCTION saf.refuse_receiver FROM PUBLIC;

-- As saf.setaside.parking.wait_seconds
CREATE FUNCTION saf.wait_after(attempts integer) RETURNS interval
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT make_interval(secs => least(4 * 2 ^ least($1 - 1, 30), 64))
$$;
COMMENT ON FUNCTION saf.wait_after IS 'the wait after a number of failed attempts in a row';
REVOKE ALL ON FUNCTION saf.wait_after FROM PUBLIC;

-- A message here is a row of saf.parked; parked_id is NULL if it was read from the inbox
CREATE FUNCTION saf.set_aside(m saf.parked, kind text, subject text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF m.parked_id IS NOT NULL THEN
        UPDATE saf.parked p SET kind = $2, subject = $3 WHERE p.parked_id = m.parked_id;
    ELSE
        INSERT INTO saf.parked (
            subscription_id, shard, id, message_id, from_service, to_service, to_broker, key,
            conversation_id, from_initiator, sequence, message_type, headers, body, created_at,
            deliver_at, expires_at, kind, subject, batch, position, opened_at, source)
        VALUES (
            m.subscription_id, m.shard, m.id, m.message_id, m.from_service, m.to_service,
            m.to_broker, m.key, m.conversation_id, m.from_initiator, m.sequence, m.message_type,
            m.headers, m.body, m.created_at, m.deliver_at, m.expires_at, $2, $3, m.batch, m.id,
            NULL, m.source);
    END IF;
    IF $2 = 'later' THEN
        PERFORM saf.time_late(m.subscription_id, m.shard);
    END IF;
END $$;
COMMENT ON FUNCTION saf.set_aside IS 'puts a message of a receiver into a lane: key, later, ahead';
REVOKE ALL ON FUNCTION saf.set_aside FROM PUBLIC;

CREATE FUNCTION saf.wait_in_lane(
    m saf.parked, attempts integer, error text, due timestamptz, for_handler boolean
) RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.backoff (subscription_id, destination, kind, subject, shard, attempts, error,
                             next_attempt_at, awaits_handler, message_type)
    VALUES (m.subscription_id, '', 'key', coalesce(m.key, m.message_id::text), m.shard, $2,
            left($3, 2000), CASE WHEN $5 THEN '9999-01-01 00:00:00+00' ELSE $4 END, $5,
            CASE WHEN $5 THEN m.message_type END)
    ON CONFLICT (subscription_id, destination, kind, subject, broker) DO UPDATE SET
        attempts = excluded.attempts, error = excluded.error,
        next_attempt_at = excluded.next_attempt_at,
        awaits_handler = excluded.awaits_handler, message_type = excluded.message_type
$$;
COMMENT ON FUNCTION saf.wait_in_lane IS
    'makes the key of a message wait, until a time or for a handler of the message''s type';
REVOKE ALL ON FUNCTION saf.wait_in_lane FROM PUBLIC;

CREATE FUNCTION saf.time_late(subscription_id integer, shard smallint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.backoff (subscription_id, destination, kind, subject, next_attempt_at, error)
    SELECT $1, '', 'later', $2::text, first.deliver_at, 'deliver_at'
    FROM (SELECT p.deliver_at FROM saf.parked p
          WHERE p.subscription_id = $1 AND p.destination = '' AND p.kind = 'later'
            AND p.subject = $2::text
          ORDER BY p.deliver_at LIMIT 1) AS first
    ON CONFLICT (subscription_id, destination, kind, subject, broker) DO UPDATE SET
        next_attempt_at = excluded.next_attempt_at;
    DELETE FROM saf.backoff b
    WHERE b.subscription_id = $1 AND b.destination = '' AND b.kind = 'later'
      AND b.subject = $2::text AND NOT EXISTS (
          SELECT FROM saf.parked p
          WHERE p.subscription_id = $1 AND p.destination = '' AND p.kind = 'later'
            AND p.subject = $2::text);
$$;
COMMENT ON FUNCTION saf.time_late IS 'notes when the first delayed message of a shard is due';
REVOKE ALL ON FUNCTION saf.time_late FROM PUBLIC;

CREATE FUNCTION saf.bury(m saf.parked, reason text, error text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.dead_letter (
        subscription_id, destination, shard, id, message_id, from_service, to_service, to_broker,
        key, conversation_id, from_initiator, sequence, message_type, headers, body, created_at,
        deliver_at, expires_at, reason, error)
    VALUES (
        m.subscription_id, '', m.shard, m.id, m.message_id, m.from_service, m.to_service,
        m.to_broker, m.key, m.conversation_id, m.from_initiator, m.sequence, m.message_type,
        m.headers, m.body, m.created_at, m.deliver_at, m.expires_at, $2, left($3, 2000));
    DELETE FROM saf.parked p WHERE p.parked_id = m.parked_id
$$;
COMMENT ON FUNCTION saf.bury IS 'makes a dead letter of a receiver''s message';
REVOKE ALL ON FUNCTION saf.bury FROM PUBLIC;

CREATE FUNCTION saf.drop_message(m saf.parked, reason text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.dropped AS d (subscription_id, shard, reason, messages, last_message_id)
    VALUES (m.subscription_id, m.shard, $2, 1, m.message_id)
    ON CONFLICT (subscription_id, shard, reason) DO UPDATE SET
        messages = d.messages + excluded.messages, last_message_id = excluded.last_message_id,
        last_at = now();
    DELETE FROM saf.parked p WHERE p.parked_id = m.parked_id
$$;
COMMENT ON FUNCTION saf.drop_message IS 'counts a message that is handed to nobody';
REVOKE ALL ON FUNCTION saf.drop_message FROM PUBLIC;

-- As saf.dialogs.statements.FAIL
CREATE FUNCTION saf.fail_dialog(handle uuid, code integer, error text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    e saf.conversation;
BEGIN
    UPDATE saf.conversation c
    SET send_sequence = c.send_sequence
                        + CASE WHEN c.send_sequence > 0 OR NOT c.is_initiator THEN 1 ELSE 0 END,
        error_code = fail_dialog.code, error_text = left(fail_dialog.error, 2000),
        changed_at = now()
    WHERE c.handle = fail_dialog.handle AND c.error_code IS NULL RETURNING c.* INTO e;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF e.send_sequence > 0 THEN
        PERFORM saf.utter(e, gen_random_uuid(), 'saf/error',
                          jsonb_build_object('content-type', 'application/json'),
                          convert_to(jsonb_build_object('code', e.error_code, 'text', e.error_text)
                                     ::text, 'UTF8'));
    END IF;
    PERFORM saf.tell_oneself(e, e.error_code, e.error_text, now());
END $$;
COMMENT ON FUNCTION saf.fail_dialog IS 'sends an Error of saf''s own to both ends of a dialog';
REVOKE ALL ON FUNCTION saf.fail_dialog FROM PUBLIC;

CREATE FUNCTION saf.redirecting_router(m saf.parked) RETURNS text LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN jsonb_typeof(m.headers -> 'saf-redirected' -> 'by') = 'string'
                THEN m.headers -> 'saf-redirected' ->> 'by' END
$$;
COMMENT ON FUNCTION saf.redirecting_router IS
    'router that has redirected a message, or the dialog of an answer';
REVOKE ALL ON FUNCTION saf.redirecting_router FROM PUBLIC;

CREATE FUNCTION saf.begin_target(m saf.parked, OUT e saf.conversation, OUT fault text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    b saf.broker;
    hello jsonb = m.headers -> 'saf-dialog';
    named text = hello ->> 'contract';
    numbered bigint = CASE WHEN jsonb_typeof(hello -> 'version') = 'number'
                               AND hello ->> 'version' ~ '^[0-9]{1,10}$'
                          THEN hello ->> 'version' END;
    seconds double precision = CASE WHEN jsonb_typeof(hello -> 'lifetime_seconds') = 'number'
                                    THEN hello ->> 'lifetime_seconds' END;
    late boolean = m.sequence > 1 OR coalesce(m.message_type = 'saf/error', false);
    in_group uuid = gen_random_uuid();
    known saf.contract;
BEGIN
    IF jsonb_typeof(hello) <> 'object' OR abs(seconds) > 31536000000
       OR hello ->> 'broker' !~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
       OR m.created_at > '8999-01-01 00:00:00+00' THEN
        fault = 'library: its first message cannot be read';
        RETURN;
    END IF;
    SELECT * INTO STRICT b FROM saf.broker;
    SELECT k.* INTO known FROM saf.contract k WHERE (k.name, k.version) = (named, numbered);
    INSERT INTO saf.conversation_group (group_id) VALUES (in_group);
    INSERT INTO saf.conversation (is_initiator, lineage, conversation_id, service, far_service,
        far_broker, contract, contract_version, group_id, expires_at)
    VALUES (false,
            CASE WHEN late OR b.incarnation > 1
                 THEN jsonb_build_array(jsonb_build_array(b.incarnation, 0)) END,
            m.conversation_id, m.to_service, m.from_service, (hello ->> 'broker')::uuid,
            known.name, known.version, in_group, m.created_at + make_interval(secs => seconds))
    RETURNING * INTO e;
    -- a router that has given the message another key must get all messages
    IF m.key = m.conversation_id::text AND m.headers ? 'saf-redirected' THEN
        UPDATE saf.conversation c SET redirected_by = saf.redirecting_router(m)
        WHERE c.handle = e.handle RETURNING c.* INTO e;
    END IF;
    PERFORM saf.expire_later(e);
    IF named IS NOT NULL AND known.name IS NULL THEN
        fault = format('contract %L version %s is not known at the target', named, numbered);
    END IF;
END $$;
COMMENT ON FUNCTION saf.begin_target IS
    'begins the target''s end of a dialog from its first message, or from an Error that informs it';
REVOKE ALL ON FUNCTION saf.begin_target FROM PUBLIC;

CREATE FUNCTION saf.find_end(
    m saf.parked, OUT e saf.conversation, OUT verdict text, OUT detail text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    in_group uuid;
    begun record;
BEGIN
    LOOP
        SELECT c.group_id INTO in_group FROM saf.conversation c
        WHERE (c.conversation_id, c.is_initiator) = (m.conversation_id, NOT m.from_initiator);
        EXIT WHEN NOT FOUND;
        PERFORM FROM saf.conversation_group g WHERE g.group_id = in_group
        FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            verdict = 'busy';
            RETURN;
        END IF;
        SELECT c.* INTO e FROM saf.conversation c
        WHERE (c.conversation_id, c.is_initiator) = (m.conversation_id, NOT m.from_initiator)
        FOR NO KEY UPDATE;
        IF e.group_id = in_group THEN
            RETURN;
        END IF;
    END LOOP;
    IF m.from_initiator AND m.from_service <> ''
       AND (m.sequence = 1 OR m.message_type = 'saf/error' AND m.headers ? 'saf-dialog') THEN
        SELECT * INTO begun FROM saf.begin_target(m);
        e = begun.e;
        IF begun.fault LIKE 'library: %' THEN
            verdict = 'library';
            detail = substr(begun.fault, 10);
        ELSIF begun.fault IS NOT NULL THEN
            PERFORM saf.fail_dialog(e.handle, -4, begun.fault);
            verdict = 'dead';
            detail = begun.fault;
        END IF;
    ELSIF m.sequence IS NULL THEN
        verdict = 'drop';
        detail = 'outdated';
    ELSIF NOT m.from_initiator OR (SELECT b.incarnation > 1 FROM saf.broker b) THEN
        verdict = 'library';
        detail = format('this broker has no end of conversation %s', m.conversation_id);
    ELSE
        verdict = 'wait';
    END IF;
END $$;
COMMENT ON FUNCTION saf.find_end IS
    'the end that a message is for, locked with its group; or else what becomes of the message';
REVOKE ALL ON FUNCTION saf.find_end FROM PUBLIC;

-- As saf.dialogs.facts.judge and saf.dialogs.arrival.why_dropped
CREATE FUNCTION saf.judge(
    m saf.parked, e saf.conversation, OUT verdict text, OUT detail text, OUT f saf.conversation
) LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted text = CASE WHEN e.ended_here THEN 'drop' ELSE 'take' END;
    document jsonb;
BEGIN
    f = e;
    detail = CASE WHEN m.sequence IS NULL THEN 'outdated'
                  WHEN m.sequence <= e.receive_sequence THEN 'repeat'
                  WHEN e.expires_at <= now() AND NOT e.ended_here AND NOT e.ended_there
                       AND e.error_code IS NULL THEN 'expired'
                  ELSE 'ended' END;
    IF m.message_type = 'saf/error' THEN
        BEGIN
            document = convert_from(m.body, 'UTF8')::jsonb;
            f.error_code = (document ->> 'code')::integer;
            f.error_text = left(document ->> 'text', 2000);
        EXCEPTION WHEN data_exception OR statement_too_complex THEN
            f.error_code = NULL;
        END;
        IF f.error_code IS NULL OR f.error_text IS NULL THEN
            f.error_code = -3;
            f.error_text = 'an Error that cannot be read';
        END IF;
    END IF;
    IF m.sequence IS NULL AND m.message_type = 'saf/dialog-timer' THEN
        verdict = CASE WHEN e.timer = m.message_id AND e.error_code IS NULL THEN wanted
                       ELSE 'drop' END;
        f.timer = CASE WHEN e.timer = m.message_id AND e.error_code IS NULL THEN NULL
                       ELSE e.timer END;
    ELSIF m.sequence IS NULL THEN
        verdict = CASE WHEN e.error_code = -5 OR e.error_code <> f.error_code THEN 'drop'
                       ELSE wanted END;
        IF e.error_code = -5 OR e.error_code <> f.error_code THEN
            f = e;
        END IF;
    ELSIF e.error_code IS NOT NULL OR m.sequence <= e.receive_sequence THEN
        verdict = 'drop';
        f = e;
    ELSIF m.message_type = 'saf/error' THEN
        verdict = wanted;
        IF m.sequence = e.receive_sequence + 1 THEN
            f.receive_sequence = m.sequence;
        END IF;
    ELSIF e.ended_there THEN
        verdict = 'drop';
    ELSIF m.sequence > e.receive_sequence + 1 THEN
        verdict = 'wait';
    ELSE
        verdict = CASE WHEN e.expires_at <= now() THEN 'drop' ELSE wanted END;
        f.receive_sequence = m.sequence;
        f.ended_there = m.message_type = 'saf/end-dialog'
                        AND NOT coalesce(e.expires_at <= now(), false);
    END IF;
    f.ended_there = coalesce(f.ended_there, false);
END $$;
COMMENT ON FUNCTION saf.judge IS
    'what becomes of a message at its end, why it is dropped, and the end''s facts after it';
REVOKE ALL ON FUNCTION saf.judge FROM PUBLIC;

-- Messages that follow without a gap, and messages that need not wait: an Error, or one to drop. As
-- saf.dialogs.arrival.MAKE_DUE
CREATE FUNCTION saf.make_due(m saf.parked, f saf.conversation) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE saf.parked p SET kind = 'later', subject = p.shard::text, deliver_at = now()
    FROM (SELECT a.parked_id, f.ended_there OR f.error_code IS NOT NULL
                 OR a.message_type = 'saf/error'
                 OR f.receive_sequence
                    >= a.sequence - dense_rank() OVER (ORDER BY a.sequence) AS due
          FROM saf.parked a
          WHERE a.subscription_id = m.subscription_id AND a.destination = ''
            AND a.kind = 'ahead' AND a.subject = f.conversation_id::text
            AND a.from_initiator = m.from_initiator) AS ahead
    WHERE p.parked_id = ahead.parked_id AND ahead.due;
    IF FOUND THEN
        PERFORM saf.time_late(m.subscription_id, m.shard);
    END IF;
END $$;
COMMENT ON FUNCTION saf.make_due IS
    'makes messages of a conversation due that waited for one that has arrived';
REVOKE ALL ON FUNCTION saf.make_due FROM PUBLIC;

-- As saf.dialogs.endpoints.REDIRECTED
CREATE FUNCTION saf.follow_routers(e saf.conversation, answered text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE way (service, broker) AS (
        SELECT e.far_service, e.far_broker
        UNION
        SELECT r.service, coalesce(r.broker, way.broker)
        FROM way JOIN saf.resolved_conversation r
            ON r.key = e.conversation_id::text AND r.router = way.service AND r.to_key IS NULL)
    UPDATE saf.conversation c SET far_service = way.service, far_broker = way.broker
    FROM way WHERE way.service = $2 AND c.handle = e.handle AND c.is_initiator
$$;
COMMENT ON FUNCTION saf.follow_routers IS
    'addresses an initiator''s messages to the service that a router has resolved to';
REVOKE ALL ON FUNCTION saf.follow_routers FROM PUBLIC;

-- As saf.dialogs.redirecting.go_direct
CREATE FUNCTION saf.go_direct(e saf.conversation, m saf.parked) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH redirected AS (
        SELECT c.handle, c.far_service AS router, c.far_broker AS at
        FROM saf.conversation c
        WHERE c.handle = e.handle AND c.is_initiator AND m.from_service <> c.far_service
          AND c.far_service = saf.redirecting_router(m)
    ), known AS (
        UPDATE saf.conversation c SET far_service = m.from_service, far_broker = m.source
        FROM redirected r WHERE c.handle = r.handle
        RETURNING c.service, c.conversation_id, r.router, r.at
    )
    INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                            from_initiator, message_type, headers, body)
    SELECT gen_random_uuid(), service, router, at, conversation_id::text, conversation_id, true,
           'saf/direct', jsonb_build_object('content-type', 'application/json'), '{}'
    FROM known
$$;
COMMENT ON FUNCTION saf.go_direct IS
    'addresses an initiator''s messages to a target that a routing service has redirected to';
REVOKE ALL ON FUNCTION saf.go_direct FROM PUBLIC;

-- The verdict: take, drop, wait, dead, library (only the library can tell), or busy (another
-- receiver has the group in hand). As saf.dialogs.arrival, one message at a time.
CREATE FUNCTION saf.arrive(
    m saf.parked, OUT verdict text, OUT detail text, OUT handle uuid, OUT before jsonb
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    found record;
    e saf.conversation;
    j record;
    checked record;
    lineage jsonb = m.headers -> 'saf-lineage';
BEGIN
    detail = CASE
        WHEN m.conversation_id IS NULL THEN 'it is of a dialog, and has no conversation_id'
        WHEN m.sequence < 1 AND m.message_type IS DISTINCT FROM 'saf/compare' THEN
            format('its number in the dialog is %s', m.sequence)
        WHEN m.sequence = 1 AND m.from_initiator AND coalesce(m.from_service, '') = '' THEN
            'it begins a dialog, and has no from_service to answer to' END;
    IF detail IS NOT NULL THEN
        verdict = 'dead';
        RETURN;
    END IF;
    detail = CASE
        WHEN m.message_type = 'saf/compare' THEN 'one end of its dialog was set back'
        WHEN m.headers ?| ARRAY['saf-fragment', 'saf-whole'] THEN 'it is part of a large body' END;
    IF detail IS NOT NULL THEN
        verdict = 'library';
        RETURN;
    END IF;
    found = saf.find_end(m);
    IF found.verdict IS NOT NULL THEN
        verdict = found.verdict;
        detail = found.detail;
        RETURN;
    END IF;
    e = found.e;
    handle = e.handle;
    before = to_jsonb(e);
    IF lineage IS DISTINCT FROM e.far_lineage AND m.sequence IS NOT NULL THEN
        -- of a broker that was repaired before it began or joined the dialog
        IF e.far_lineage IS NULL AND e.receive_sequence = 0
           AND lineage @? '$[0] ? (@[0].type() == "number" && @[1] == 0)'
           AND jsonb_array_length(lineage) = 1 THEN
            UPDATE saf.conversation c SET far_lineage = lineage WHERE c.handle = e.handle;
        ELSE
            verdict = 'library';
            detail = 'one end of its dialog was set back';
            RETURN;
        END IF;
    END IF;
    IF NOT m.from_initiator AND m.sequence IS NOT NULL AND m.source IS NOT NULL THEN
        IF e.answered_by <> m.source THEN
            verdict = 'library';
            detail = 'its dialog continues with another target';
            RETURN;
        END IF;
        e.answered_by = m.source;
        IF m.sequence = 1 AND m.from_service <> e.far_service THEN
            PERFORM saf.follow_routers(e, m.from_service);
            PERFORM saf.go_direct(e, m);
        END IF;
    END IF;
    SELECT * INTO j FROM saf.judge(m, e);
    verdict = j.verdict;
    detail = j.detail;
    IF verdict = 'wait' AND e.lineage IS NOT NULL THEN
        verdict = 'library';
        detail = 'one end of its dialog was set back';
        RETURN;
    ELSIF verdict = 'take' AND m.sequence IS NOT NULL AND (j.f).error_code IS NULL
          AND (j.f).ended_there = e.ended_there THEN
        SELECT * INTO checked FROM saf.contract_fault(e, m.from_initiator, m.message_type, m.body);
        IF checked.fault IS NOT NULL THEN
            verdict = CASE WHEN checked.unchecked THEN 'library' ELSE 'dead' END;
            detail = checked.fault;
            IF NOT checked.unchecked THEN
                PERFORM saf.fail_dialog(e.handle, -3, checked.fault);
                e.error_code = -3;
                PERFORM saf.make_due(m, e);
            END IF;
            RETURN;
        END IF;
    END IF;
    IF verdict <> 'wait' THEN
        UPDATE saf.conversation c
        SET receive_sequence = (j.f).receive_sequence, ended_there = (j.f).ended_there,
            error_code = (j.f).error_code, error_text = (j.f).error_text, timer = (j.f).timer,
            answered_by = (j.f).answered_by, changed_at = now()
        WHERE c.handle = e.handle;
        PERFORM saf.make_due(m, j.f);
    END IF;
END $$;
COMMENT ON FUNCTION saf.arrive IS
    'processes a dialog''s message at its end: the verdict, the end, and its facts before';
REVOKE ALL ON FUNCTION saf.arrive FROM PUBLIC;

-- The verdict: hand, done, left (the lane waits for the library), or stop (before this message)
CREATE FUNCTION saf.dispose(
    r saf.subscription, m saf.parked, conversations uuid[], of_lane boolean, presumed boolean,
    OUT verdict text, OUT handle uuid, OUT before jsonb
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    lane text = coalesce(m.key, m.message_id::text);
    came record;
BEGIN
    verdict = 'done';
    IF m.expires_at <= statement_timestamp() THEN
        PERFORM saf.bury(m, 'expired', 'expires_at has passed');
    ELSIF m.deliver_at > statement_timestamp() THEN
        PERFORM saf.set_aside(m, 'later', m.shard::text);
    ELSIF NOT of_lane AND EXISTS (
        SELECT FROM saf.backoff b
        WHERE (b.subscription_id, b.destination, b.kind, b.subject)
              = (m.subscription_id, '', 'key', lane)) THEN
        PERFORM saf.set_aside(m, 'key', lane);
    ELSIF presumed THEN
        PERFORM saf.set_aside(m, 'key', lane);
        PERFORM saf.wait_in_lane(
            m, 2, 'the last delivery with this message did not come to its end',
            clock_timestamp() + saf.wait_after(2), false);
        verdict = 'hand';
    ELSIF m.from_initiator IS NULL OR r.name IS DISTINCT FROM r.service THEN
        verdict = 'hand';
    ELSIF m.conversation_id = ANY (conversations) THEN
        verdict = 'stop';
    ELSE
        SELECT * INTO came FROM saf.arrive(m);
        CASE came.verdict
            WHEN 'take' THEN
                verdict = 'hand';
                handle = came.handle;
                before = came.before;
            WHEN 'busy' THEN
                verdict = 'stop';
            WHEN 'drop' THEN
                PERFORM saf.drop_message(m, came.detail);
            WHEN 'wait' THEN
                PERFORM saf.set_aside(m, 'ahead', m.conversation_id::text);
            WHEN 'dead' THEN
                PERFORM saf.bury(m, 'rejected', came.detail);
            ELSE
                PERFORM saf.set_aside(m, 'key', lane);
                PERFORM saf.wait_in_lane(
                    m, 0, format('saf.receive leaves it to a worker: %s', came.detail), NULL, true);
                verdict = 'left';
        END CASE;
    END IF;
END $$;
COMMENT ON FUNCTION saf.dispose IS
    'decides about a message that was read, and writes its outcome unless it is handed out';
REVOKE ALL ON FUNCTION saf.dispose FROM PUBLIC;

-- A portal still sees the row that its transaction has deleted since
CREATE FUNCTION saf.keep_copy(parked_id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept refcursor = format('saf %s', $1);
BEGIN
    OPEN kept NO SCROLL FOR SELECT p.* FROM saf.parked p WHERE p.parked_id = $1;
    DELETE FROM saf.parked p WHERE p.parked_id = $1;
END $$;
COMMENT ON FUNCTION saf.keep_copy IS
    'deletes a parked message that is handed out, and keeps it until the transaction ends';
REVOKE ALL ON FUNCTION saf.keep_copy FROM PUBLIC;

CREATE FUNCTION saf.open_lane(subscription_id integer, lane text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (SELECT FROM saf.parked p
               WHERE (p.subscription_id, p.destination, p.kind, p.subject)
                     = (open_lane.subscription_id, '', 'key', open_lane.lane)) THEN
        UPDATE saf.backoff b SET attempts = 0, next_attempt_at = clock_timestamp(),
               awaits_handler = false, message_type = NULL
        WHERE (b.subscription_id, b.destination, b.kind, b.subject)
              = (open_lane.subscription_id, '', 'key', open_lane.lane);
    ELSE
        DELETE FROM saf.backoff b
        WHERE (b.subscription_id, b.destination, b.kind, b.subject)
              = (open_lane.subscription_id, '', 'key', open_lane.lane);
    END IF;
END $$;
COMMENT ON FUNCTION saf.open_lane IS
    'lets the messages that are left in a key''s lane follow; without any, the key waits no longer';
REVOKE ALL ON FUNCTION saf.open_lane FROM PUBLIC;

-- Counts the attempt at a lane's first message that has failed; after the last one, buries it
CREATE FUNCTION saf.count_failed(b saf.backoff, max_attempts integer) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m saf.parked;
BEGIN
    IF b.attempts + 1 >= $2 THEN
        SELECT p.* INTO m FROM saf.parked p
        WHERE (p.subscription_id, p.destination, p.kind, p.subject)
              = (b.subscription_id, '', 'key', b.subject)
        ORDER BY p.id LIMIT 1;
        IF FOUND THEN
            PERFORM saf.give_up(m, 'failed', format(
                'attempt %s of %s did not come to its end', least(b.attempts + 1, $2), $2));
        END IF;
        PERFORM saf.open_lane(b.subscription_id, b.subject);
    ELSE
        UPDATE saf.backoff u SET attempts = b.attempts + 1,
            next_attempt_at = clock_timestamp() + saf.wait_after(b.attempts + 1),
            error = format('attempt %s did not come to its end', b.attempts + 1)
        WHERE (u.subscription_id, u.destination, u.kind, u.subject, u.broker)
              = (b.subscription_id, b.destination, b.kind, b.subject, b.broker);
    END IF;
END $$;
COMMENT ON FUNCTION saf.count_failed IS 'counts an attempt that has left its trace on a lane';
REVOKE ALL ON FUNCTION saf.count_failed FROM PUBLIC;

-- The other end must not see the error's details: the dead letter has them
CREATE FUNCTION saf.give_up(m saf.parked, reason text, error text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    of_end uuid;
BEGIN
    PERFORM saf.bury(m, $2, $3);
    IF m.from_initiator IS NOT NULL AND EXISTS (
        SELECT FROM saf.subscription s
        WHERE s.subscription_id = m.subscription_id AND s.name = s.service) THEN
        SELECT c.handle INTO of_end FROM saf.conversation c
        WHERE (c.conversation_id, c.is_initiator) = (m.conversation_id, NOT m.from_initiator);
        PERFORM saf.fail_dialog(of_end, -2, format('message %s could not be handled',
                                                   coalesce(m.sequence::text, m.message_type)));
    END IF;
END $$;
COMMENT ON FUNCTION saf.give_up IS
    'makes a dead letter of a message; if it is of a dialog, both ends get an Error';
REVOKE ALL ON FUNCTION saf.give_up FROM PUBLIC;

CREATE FUNCTION saf.out_of_hand(message_id uuid, OUT h jsonb, OUT m saf.parked)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    hand jsonb = saf.in_hand();
    kept refcursor;
BEGIN
    SELECT e.value INTO h FROM jsonb_array_elements(hand -> 'messages') AS e
    WHERE e.value ->> 'message' = out_of_hand.message_id::text;
    IF NOT FOUND THEN
        PERFORM saf.refuse_receiver(
            format('message %s is not in hand', coalesce(out_of_hand.message_id::text, 'NULL')),
            'Set a message aside in the transaction that has received it; a message behind another '
            'one of its key waits with that one.');
    END IF;
    IF h ->> 'parked' IS NULL THEN
        SELECT NULL, (h ->> 'subscription')::integer, '', i.shard, i.id, i.message_id,
               i.from_service, i.to_service, i.to_broker, i.key, i.conversation_id,
               i.from_initiator, i.sequence, i.message_type, i.headers, i.body, i.created_at,
               i.deliver_at, i.expires_at, now(), 'key', NULL, (h ->> 'batch')::bigint, i.id, NULL,
               '', 'ffffffff-ffff-ffff-ffff-ffffffffffff', i.source
        INTO STRICT m FROM saf.inbox i
        WHERE i.shard = (h ->> 'shard')::smallint AND i.id = (h ->> 'id')::bigint
          AND i.message_id = out_of_hand.message_id;
    ELSE
        kept = format('saf %s', h ->> 'parked');
        FETCH kept INTO m;
        m.parked_id = NULL;
    END IF;
    PERFORM set_config('saf.in_hand', jsonb_set(hand, '{messages}', (
        SELECT coalesce(jsonb_agg(e.value ORDER BY e.ordinality), '[]')
        FROM jsonb_array_elements(hand -> 'messages') WITH ORDINALITY AS e
        WHERE e.value ->> 'message' <> out_of_hand.message_id::text))::text, true);
END $$;
COMMENT ON FUNCTION saf.out_of_hand IS
    'takes a message out of the hand of this transaction, to set it aside';
REVOKE ALL ON FUNCTION saf.out_of_hand FROM PUBLIC;

CREATE FUNCTION saf.reject(message_id uuid, reason text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o record;
BEGIN
    IF $2 IS NULL THEN
        PERFORM saf.refuse_argument('reason: is NULL');
    END IF;
    SELECT * INTO o FROM saf.out_of_hand($1);
    PERFORM saf.give_up(o.m, 'failed', $2);
END $$;
COMMENT ON FUNCTION saf.reject IS
    'makes a dead letter of a message that this transaction has received; its key continues. If it '
    'is of a dialog, the dialog ends with an error at both ends';
REVOKE ALL ON FUNCTION saf.reject FROM PUBLIC;

CREATE FUNCTION saf.retry_later(message_id uuid, reason text, wait interval DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    o record;
    behind record;
    due timestamptz;
BEGIN
    IF retry_later.reason IS NULL OR retry_later.wait < '0' THEN
        PERFORM saf.refuse_argument(CASE WHEN retry_later.reason IS NULL THEN 'reason: is NULL'
                                         ELSE 'wait: is negative' END);
    END IF;
    SELECT * INTO o FROM saf.out_of_hand(retry_later.message_id);
    IF (o.h ->> 'attempt')::integer >= (o.h ->> 'of')::integer THEN
        PERFORM saf.give_up(o.m, 'failed', retry_later.reason);
        RETURN 'dead';
    END IF;
    due = clock_timestamp() + coalesce(retry_later.wait,
                                       saf.wait_after((o.h ->> 'attempt')::integer));
    PERFORM saf.set_aside(o.m, 'key', o.h ->> 'lane');
    PERFORM saf.wait_in_lane(o.m, (o.h ->> 'attempt')::integer, retry_later.reason, due, false);
    IF o.h ->> 'handle' IS NOT NULL THEN
        PERFORM saf.take_back(o.h);
    END IF;
    FOR behind IN SELECT (e.value ->> 'message')::uuid AS message_id
                  FROM jsonb_array_elements(saf.in_hand() -> 'messages') WITH ORDINALITY AS e
                  WHERE e.value ->> 'lane' = o.h ->> 'lane'
                    AND e.value ->> 'subscription' = o.h ->> 'subscription'
                    AND (e.value ->> 'id')::bigint > (o.m).id
                  ORDER BY e.ordinality LOOP
        SELECT * INTO o FROM saf.out_of_hand(behind.message_id);
        PERFORM saf.set_aside(o.m, 'key', o.h ->> 'lane');
    END LOOP;
    RETURN 'waits';
END $$;
COMMENT ON FUNCTION saf.retry_later IS
    'sets a message aside that this transaction has received, to be tried again after the wait; '
    'later messages of its key wait, also those in hand. Returns waits, or dead after the '
    'last attempt';
REVOKE ALL ON FUNCTION saf.retry_later FROM PUBLIC;

-- As saf.dialogs.endpoints.TAKE_BACK: the application's later changes stay
CREATE FUNCTION saf.take_back(h jsonb) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE saf.conversation c
    SET receive_sequence = b.receive_sequence, ended_there = b.ended_there,
        error_code = b.error_code, error_text = b.error_text,
        timer = coalesce(c.timer, b.timer), answered_by = b.answered_by, changed_at = now()
    FROM jsonb_populate_record(NULL::saf.conversation, $1 -> 'before') AS b
    WHERE c.handle = b.handle AND NOT c.ended_here
$$;
COMMENT ON FUNCTION saf.take_back IS
    'undoes the arrival of a dialog''s message that is not received after all';
REVOKE ALL ON FUNCTION saf.take_back FROM PUBLIC;
