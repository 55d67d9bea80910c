-- Messages before the outbox: those that are due later, and the names of messages.
--
-- A row's life: held (due is set), sent (due is NULL; only its name is kept), deleted when the name
-- is forgotten. A message without a name is deleted when it moves. One row is everything that is
-- known of a name, so senders, saf.cancel and saf.move_held race for one row lock, and never wait
-- for each other in a circle. The outbox stays append-only: a held message gets its id there when
-- it moves.
--
-- Writers have no right on the table, because they must not read the bodies of others, nor the
-- names. They call functions that run as the owner and do one thing each. The owner is not
-- restricted by the rules of saf.sender. So these functions check the rules themselves, for the
-- role of the session: its login, or the role of SET ROLE. No caller can choose that freely. They
-- record the role, and saf.move_held checks it again, because rules may have changed since.
-- saf.send, in contrast, runs with its caller's rights: a message that goes into the outbox
-- immediately is an INSERT like any other.

CREATE TABLE saf.held (
    held_id bigint GENERATED ALWAYS AS IDENTITY,
{message},
    name text COLLATE "C",
    due timestamptz,
    once_for interval,
    forget_at timestamptz,
    sender text NOT NULL,
    refused text,
    PRIMARY KEY (message_id),
    CONSTRAINT held_named CHECK (octet_length(name) BETWEEN 1 AND 255),
    CONSTRAINT held_bounded CHECK (
        saf.accept('3'::xid8, to_service, key, headers, created_at, due, expires_at)),
    CONSTRAINT held_once CHECK (once_for BETWEEN '0' AND '36525 days'),
    CONSTRAINT held_or_sent CHECK (
        CASE WHEN due IS NULL
             THEN name IS NOT NULL AND forget_at IS NOT NULL AND refused IS NULL
             ELSE forget_at IS NULL END),
    CONSTRAINT held_once_named CHECK ((name IS NULL) = (once_for IS NULL))
);
CREATE UNIQUE INDEX held_name ON saf.held (to_service, name) WHERE name IS NOT NULL;
CREATE INDEX held_due ON saf.held (due, held_id) WHERE due IS NOT NULL AND refused IS NULL;
CREATE INDEX held_refused ON saf.held (held_id) WHERE refused IS NOT NULL;
CREATE INDEX held_forget ON saf.held (forget_at) WHERE forget_at IS NOT NULL;
COMMENT ON TABLE saf.held IS
    'messages that are due later, and names of messages; a message that is due moves to the outbox';
COMMENT ON COLUMN saf.held.held_id IS 'order of messages that are due at the same time';
COMMENT ON COLUMN saf.held.created_at IS
    'time of the first send under the name, from which a limit on later sends counts';
COMMENT ON COLUMN saf.held.deliver_at IS 'not used: see due';
COMMENT ON COLUMN saf.held.name IS
    'name of the effect, unique among the messages to a service; NULL: none';
COMMENT ON COLUMN saf.held.due IS
    'time at which the message moves to the outbox; NULL: it was sent, and only its name is kept';
COMMENT ON COLUMN saf.held.once_for IS
    'time after sending for which the name is kept';
COMMENT ON COLUMN saf.held.forget_at IS
    'time from which the name of a sent message may be used again; NULL: not sent';
COMMENT ON COLUMN saf.held.sender IS 'role that sent the message';
COMMENT ON COLUMN saf.held.refused IS
    'reason why the due message stays: no rule of saf.sender allows it any more; NULL: none';

-- The role whose rights and rules count: SET ROLE's, or the login
CREATE FUNCTION saf.session_role() RETURNS text LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$ SELECT coalesce(nullif(current_setting('role'), 'none'), session_user) $$;
COMMENT ON FUNCTION saf.session_role IS
    'the role of SET ROLE, or else the login; the same in functions that run as their owner';

CREATE FUNCTION saf.vouch(sender text, from_service text, to_service text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (SELECT b.senders_since FROM saf.broker b) IS NULL OR EXISTS (
        SELECT FROM pg_roles r, pg_class c
        WHERE r.rolname = $1 AND c.oid = 'saf.outbox'::regclass
          AND (r.rolsuper OR r.rolbypassrls OR pg_has_role(r.oid, c.relowner, 'USAGE'))
    ) THEN
        RETURN;
    END IF;
    IF to_regrole(quote_ident($1)) IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege', SCHEMA = 'saf', TABLE = 'held',
            CONSTRAINT = 'sender_allowed',
            MESSAGE = format('role %I, which sent the message, does not exist', $1);
    END IF;
    PERFORM saf.check_sender($1::name, $2, $3);
END $$;
COMMENT ON FUNCTION saf.vouch IS
    'raises unless a role may send as one service to another, as the policies of saf.outbox do';
REVOKE ALL ON FUNCTION saf.vouch FROM PUBLIC;

-- A sender must not learn from an error how to send as another service, so this has no hint
CREATE FUNCTION saf.vouch_for(there saf.held) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM saf.vouch(saf.session_role(), there.from_service, there.to_service);
EXCEPTION WHEN insufficient_privilege THEN
    IF there.sender = saf.session_role() THEN
        RAISE;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'insufficient_privilege', SCHEMA = 'saf', TABLE = 'held', COLUMN = 'name',
        CONSTRAINT = 'name_taken',
        MESSAGE = format('name: %L to service %L is taken by another sender: choose a name of '
                         'your own', there.name, there.to_service);
END $$;
COMMENT ON FUNCTION saf.vouch_for IS
    'raises unless the session''s role may send as the sender of the message that has a name';
REVOKE ALL ON FUNCTION saf.vouch_for FROM PUBLIC;

-- A CHECK would raise, too, but with the whole row, and so with the body, in its DETAIL
CREATE FUNCTION saf.refuse_argument(fault text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'invalid_parameter_value', SCHEMA = 'saf', TABLE = 'held',
        COLUMN = split_part($1, ': ', 1), CONSTRAINT = 'argument_valid', MESSAGE = $1;
END $$;
COMMENT ON FUNCTION saf.refuse_argument IS
    'raises the error of an argument, whose name begins the text, as saf.message raises it';
REVOKE ALL ON FUNCTION saf.refuse_argument FROM PUBLIC;

CREATE FUNCTION saf.text_fault(field text, value text, longest integer, optional boolean)
RETURNS text LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT $1 || ': ' || CASE
        WHEN $2 IS NULL AND NOT $4 THEN 'is NULL'
        WHEN $2 = '' AND $4 THEN 'is empty; if it does not exist, pass None, in SQL NULL'
        WHEN $2 = '' THEN 'is empty'
        WHEN octet_length($2) > $3 THEN
            format('%s bytes are more than %s', to_char(octet_length($2), 'FM9,999,999,999'),
                   to_char($3, 'FM9,999')) END
$$;
COMMENT ON FUNCTION saf.text_fault IS 'what is wrong with a text; NULL: nothing';
REVOKE ALL ON FUNCTION saf.text_fault FROM PUBLIC;

CREATE FUNCTION saf.time_fault(field text, value timestamptz) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN NOT ($2 >= '0001-01-01 00:00:00+00' AND $2 < '9999-12-31 00:00:00+00') THEN
        format('%s: %s is before 0001-01-01 or after 9999-12-30, in UTC%s', $1, $2,
               CASE WHEN $1 = 'expires_at' THEN
                    ': leave it out for a message that never expires' END) END
$$;
COMMENT ON FUNCTION saf.time_fault IS 'what is wrong with a time; NULL: nothing';
REVOKE ALL ON FUNCTION saf.time_fault FROM PUBLIC;

CREATE FUNCTION saf.never_read(field text, deliver_at timestamptz, expires_at timestamptz)
RETURNS text LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format(CASE $1
        WHEN 'deliver_at' THEN 'deliver_at: %1$s is not before expires_at %2$s'
        ELSE 'expires_at: %2$s is not after deliver_at %1$s' END
        || ': nobody would get the message', $2, $3) WHERE $2 >= $3
$$;
COMMENT ON FUNCTION saf.never_read IS
    'what is wrong with two times if a message would expire before it is due; NULL: nothing';
REVOKE ALL ON FUNCTION saf.never_read FROM PUBLIC;

-- A sender that finds the name there waits until the other transaction ends, and then acts on what
-- it left. To skip needs the weakest lock, which neither other senders nor saf.move_held wait for.
-- Names belong to the service that gets the messages, not to their sender. So where there are rules,
-- a role that may not send as the sender of the message with this name gets an error. Otherwise it
-- could keep another sender's messages from being sent, without anybody noticing.
-- A service with a local route has its inbox in this database, which holds messages itself. A
-- database without a forwarder may have such services only. So their messages are held here only if
-- they have a name.
-- Times are compared with clock_timestamp, because now() may be long before a lock was granted.
--
-- A message that is sent now is inserted by the caller, not here. So the outbox checks it as any
-- INSERT: the caller's rights, and all policies, also an operator's own. And saf.outbox gets ids in
-- the order of the messages, while many names are taken in the order of names. The price: a role
-- that calls this function alone takes a name for `once_for` without sending anything. It can do no
-- more harm than by a message with that name, which needs the same right and the same rule.
CREATE FUNCTION saf.hold(
    message_id uuid, from_service text, to_service text, to_broker uuid, key text,
    message_type text, headers jsonb, body bytea, deliver_at timestamptz, expires_at timestamptz,
    name text, if_there text, once_for interval, later_limit interval,
    OUT stored_id uuid, OUT outcome text, OUT send_now boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz = clock_timestamp();
    m saf.held;
    there saf.held;
    fault text;
BEGIN
    fault = CASE
        WHEN coalesce(octet_length(hold.to_service), 0) NOT BETWEEN 1 AND 255 THEN
            saf.text_fault('service', hold.to_service, 255, false)
        WHEN hold.body IS NULL THEN 'body: is NULL'
        WHEN octet_length(hold.key) NOT BETWEEN 1 AND 1024 THEN
            saf.text_fault('key', hold.key, 1024, true)
        WHEN octet_length(hold.message_type) NOT BETWEEN 1 AND 255 THEN
            saf.text_fault('message_type', hold.message_type, 255, true)
        WHEN octet_length(hold.from_service) NOT BETWEEN 1 AND 255 THEN
            saf.text_fault('from_service', hold.from_service, 255, true)
        WHEN octet_length(hold.name) NOT BETWEEN 1 AND 255 THEN
            saf.text_fault('name', hold.name, 255, true)
        WHEN jsonb_typeof(hold.headers) <> 'object' THEN
            'headers: expected a mapping of names to JSON values'
        WHEN pg_column_size(hold.headers) > 96 AND octet_length(hold.headers::text) > 1048576 THEN
            format('headers: %s bytes are more than 1,048,576',
                   to_char(octet_length(hold.headers::text), 'FM9,999,999,999'))
        WHEN hold.if_there IS NULL OR hold.if_there NOT IN ('skip', 'replace', 'later') THEN
            format('if_there: expected ''skip'', ''replace'', ''later'', got %L', hold.if_there)
        WHEN hold.name IS NULL AND hold.if_there <> 'skip' THEN
            format('if_there: %L needs a name', hold.if_there)
        WHEN NOT hold.once_for BETWEEN '0' AND '36525 days' THEN
            format('once_for: %s is not between 0 and 36,525 days', hold.once_for)
        WHEN hold.later_limit IS NOT NULL AND hold.if_there <> 'later' THEN
            'later_limit: needs if_there=''later'''
        WHEN NOT hold.later_limit BETWEEN '0' AND '36525 days' THEN
            format('later_limit: %s is not between 0 and 36,525 days', hold.later_limit)
        WHEN hold.deliver_at IS NOT NULL OR hold.expires_at IS NOT NULL THEN coalesce(
            saf.time_fault('deliver_at', hold.deliver_at),
            saf.time_fault('expires_at', hold.expires_at),
            CASE WHEN hold.expires_at <= moment THEN
                format('expires_at: %s is over: nobody would get the message', hold.expires_at) END,
            saf.never_read('expires_at', hold.deliver_at, hold.expires_at))
    END;
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    m.due = CASE WHEN hold.deliver_at > moment THEN hold.deliver_at END;
    stored_id = hold.message_id;
    send_now = m.due IS NULL OR hold.name IS NULL AND hold.to_broker IS NULL AND EXISTS (
        SELECT FROM saf.route r WHERE r.service = hold.to_service AND r.local AND r.enabled);
    outcome = CASE WHEN send_now THEN 'sent' ELSE 'held' END;
    IF hold.name IS NULL AND send_now THEN
        RETURN;
    END IF;
    m.sender = saf.session_role();
    PERFORM saf.vouch(m.sender, hold.from_service, hold.to_service);
    m.message_id = hold.message_id;
    m.from_service = hold.from_service;
    m.to_service = hold.to_service;
    m.to_broker = hold.to_broker;
    m.key = hold.key;
    m.message_type = hold.message_type;
    m.headers = hold.headers;
    m.body = hold.body;
    m.created_at = moment;
    m.expires_at = hold.expires_at;
    m.name = hold.name;
    IF hold.name IS NOT NULL THEN
        m.once_for = coalesce(hold.once_for,
                              CASE hold.if_there WHEN 'later' THEN '0' ELSE '7 days' END::interval);
    END IF;
    LOOP
        IF send_now THEN
            INSERT INTO saf.held (message_id, from_service, to_service, body, created_at, name,
                                  once_for, forget_at, sender)
            VALUES (m.message_id, m.from_service, m.to_service, '', m.created_at, m.name,
                    m.once_for, moment + m.once_for, m.sender)
            ON CONFLICT (to_service, name) WHERE name IS NOT NULL DO NOTHING;
        ELSE
            INSERT INTO saf.held (message_id, from_service, to_service, to_broker, key,
                                  message_type, headers, body, created_at, expires_at, name, due,
                                  once_for, sender)
            VALUES (m.message_id, m.from_service, m.to_service, m.to_broker, m.key,
                    m.message_type, m.headers, m.body, m.created_at, m.expires_at, m.name, m.due,
                    m.once_for, m.sender)
            ON CONFLICT (to_service, name) WHERE name IS NOT NULL DO NOTHING;
        END IF;
        IF FOUND THEN
            RETURN;
        END IF;
        SELECT h.* INTO there FROM saf.held h
        WHERE h.to_service = m.to_service AND h.name = m.name
          AND (h.forget_at > moment OR h.due IS NOT NULL AND hold.if_there = 'skip')
        FOR KEY SHARE;
        IF FOUND THEN
            PERFORM saf.vouch_for(there);
            stored_id = there.message_id;
            outcome = CASE WHEN there.due IS NULL THEN 'already_sent' ELSE 'kept' END;
            send_now = false;
            RETURN;
        END IF;
        SELECT h.* INTO there FROM saf.held h
        WHERE h.to_service = m.to_service AND h.name = m.name
          AND (h.forget_at <= moment OR h.due IS NOT NULL AND hold.if_there <> 'skip')
        FOR UPDATE;
        EXIT WHEN there.due IS NOT NULL;
        DELETE FROM saf.held h WHERE h.message_id = there.message_id;
    END LOOP;
    PERFORM saf.vouch_for(there);
    outcome = 'replaced';
    m.created_at = there.created_at;
    IF hold.if_there = 'later' THEN
        m.due = greatest(there.due, least(coalesce(m.due, moment),
                                          there.created_at + hold.later_limit));
        send_now = false;
        fault = saf.never_read('expires_at', m.due, m.expires_at);
        IF fault IS NOT NULL THEN
            PERFORM saf.refuse_argument(fault);
        END IF;
    END IF;
    IF send_now THEN
        m.forget_at = moment + m.once_for;
        m.to_broker = NULL;
        m.key = NULL;
        m.message_type = NULL;
        m.headers = NULL;
        m.expires_at = NULL;
        m.body = '';
    END IF;
    UPDATE saf.held h
    SET message_id = m.message_id, from_service = m.from_service, to_broker = m.to_broker,
        key = m.key, message_type = m.message_type, headers = m.headers, body = m.body,
        created_at = m.created_at, expires_at = m.expires_at, due = m.due, once_for = m.once_for,
        forget_at = m.forget_at, sender = m.sender, refused = NULL
    WHERE h.message_id = there.message_id;
END $$;
COMMENT ON FUNCTION saf.hold IS
    'keeps a message that has a name or is due later. If send_now, the caller inserts the message '
    'into saf.outbox, in the same transaction. outcome: sent, held, replaced (a held message), kept '
    '(a held message stays), already_sent';
REVOKE ALL ON FUNCTION saf.hold FROM PUBLIC;

-- Waits for a transaction that has locked the message, such as saf.move_held, and then looks again
CREATE FUNCTION saf.cancel(service text, name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    there saf.held;
    fault text = coalesce(saf.text_fault('service', cancel.service, 255, false),
                          saf.text_fault('name', cancel.name, 255, false));
BEGIN
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    SELECT h.* INTO there FROM saf.held h
    WHERE h.to_service = cancel.service AND h.name = cancel.name AND h.due IS NOT NULL FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM saf.vouch_for(there);
    DELETE FROM saf.held h WHERE h.message_id = there.message_id;
    RETURN true;
END $$;
COMMENT ON FUNCTION saf.cancel IS
    'takes a held message back. True: it is never sent; false: it was sent, or the name is unknown';
REVOKE ALL ON FUNCTION saf.cancel FROM PUBLIC;

CREATE FUNCTION saf.reschedule(service text, name text, deliver_at timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    there saf.held;
    fault text = coalesce(saf.text_fault('service', reschedule.service, 255, false),
                          saf.text_fault('name', reschedule.name, 255, false),
                          saf.time_fault('deliver_at', reschedule.deliver_at));
BEGIN
    IF reschedule.deliver_at IS NULL THEN
        fault = 'deliver_at: is NULL: to send the message now, give now()';
    END IF;
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    SELECT h.* INTO there FROM saf.held h
    WHERE h.to_service = reschedule.service AND h.name = reschedule.name AND h.due IS NOT NULL
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM saf.vouch_for(there);
    fault = saf.never_read('deliver_at', reschedule.deliver_at, there.expires_at);
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    UPDATE saf.held h SET due = reschedule.deliver_at WHERE h.message_id = there.message_id;
    RETURN true;
END $$;
COMMENT ON FUNCTION saf.reschedule IS
    'moves a held message to another time; false: it was sent, or the name is unknown';
REVOKE ALL ON FUNCTION saf.reschedule FROM PUBLIC;

-- As saf.message.encode_headers
CREATE FUNCTION saf.with_content_type(headers jsonb, content_type text) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE
        WHEN $1 IS NULL THEN jsonb_build_object('content-type', $2)
        WHEN jsonb_typeof($1) <> 'object' THEN $1
        WHEN EXISTS (SELECT FROM jsonb_object_keys($1) AS k (name)
                     WHERE lower(k.name) = 'content-type') THEN
            (SELECT jsonb_object_agg(CASE WHEN lower(e.key) = 'content-type' THEN 'content-type'
                                          ELSE e.key END, e.value) FROM jsonb_each($1) AS e)
        ELSE $1 || jsonb_build_object('content-type', $2) END
$$;
COMMENT ON FUNCTION saf.with_content_type IS
    'headers with the content type of the body, unless they have one';

-- A signature covers deliver_at. The time of a message with a name may change, so such a message is
-- signed without it
CREATE FUNCTION saf.send(
    service text, body bytea, key text DEFAULT NULL, name text DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
    message_type text DEFAULT NULL, headers jsonb DEFAULT NULL, from_service text DEFAULT NULL,
    to_broker uuid DEFAULT NULL, if_there text DEFAULT 'skip', once_for interval DEFAULT NULL,
    later_limit interval DEFAULT NULL, OUT message_id uuid, OUT outcome text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    described jsonb = saf.with_content_type(send.headers, 'application/octet-stream');
    held record;
BEGIN
    held = saf.hold(gen_random_uuid(), send.from_service, send.service, send.to_broker, send.key,
                    send.message_type, described, send.body, send.deliver_at, send.expires_at,
                    send.name, send.if_there, send.once_for, send.later_limit);
    IF held.send_now THEN
        INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, message_type,
                                headers, body, deliver_at, expires_at)
        VALUES (held.stored_id, send.from_service, send.service, send.to_broker, send.key,
                send.message_type, described, send.body,
                CASE WHEN send.name IS NULL OR NOT described ? 'saf-signature'
                     THEN send.deliver_at END,
                send.expires_at);
    END IF;
    message_id = held.stored_id;
    outcome = held.outcome;
END $$;
COMMENT ON FUNCTION saf.send(text, bytea, text, text, timestamptz, timestamptz, text, jsonb, text,
                             uuid, text, interval, interval) IS
    'sends a message in the caller''s transaction, as Outbox.send does; returns its id, or the id '
    'of the message that already has the name, and the outcome, as saf.hold';

CREATE FUNCTION saf.send(
    service text, body text, key text DEFAULT NULL, name text DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
    message_type text DEFAULT NULL, headers jsonb DEFAULT NULL, from_service text DEFAULT NULL,
    to_broker uuid DEFAULT NULL, if_there text DEFAULT 'skip', once_for interval DEFAULT NULL,
    later_limit interval DEFAULT NULL, OUT message_id uuid, OUT outcome text
) LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT * FROM saf.send($1, convert_to($2, 'UTF8'), $3, $4, $5, $6, $7,
                           saf.with_content_type($8, 'text/plain; charset=utf-8'),
                           $9, $10, $11, $12, $13)
$$;
COMMENT ON FUNCTION saf.send(text, text, text, text, timestamptz, timestamptz, text, jsonb, text,
                             uuid, text, interval, interval) IS
    'sends text';

CREATE FUNCTION saf.send(
    service text, body jsonb, key text DEFAULT NULL, name text DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL, expires_at timestamptz DEFAULT NULL,
    message_type text DEFAULT NULL, headers jsonb DEFAULT NULL, from_service text DEFAULT NULL,
    to_broker uuid DEFAULT NULL, if_there text DEFAULT 'skip', once_for interval DEFAULT NULL,
    later_limit interval DEFAULT NULL, OUT message_id uuid, OUT outcome text
) LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT * FROM saf.send($1, convert_to($2::text, 'UTF8'), $3, $4, $5, $6, $7,
                           saf.with_content_type($8, 'application/json'),
                           $9, $10, $11, $12, $13)
$$;
COMMENT ON FUNCTION saf.send(text, jsonb, text, text, timestamptz, timestamptz, text, jsonb, text,
                             uuid, text, interval, interval) IS
    'sends JSON';

-- In the order in which the messages are due, which becomes the order of their ids
CREATE FUNCTION saf.pass_on(message_ids uuid[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, message_type,
                            headers, body, deliver_at, expires_at)
    SELECT h.message_id, h.from_service, h.to_service, h.to_broker, h.key, h.message_type,
           h.headers, h.body,
           CASE WHEN h.name IS NULL OR NOT coalesce(h.headers, '{}') ? 'saf-signature'
                THEN h.due END,
           h.expires_at
    FROM saf.held h WHERE h.message_id = ANY ($1) ORDER BY h.due, h.held_id;
    DELETE FROM saf.held h WHERE h.message_id = ANY ($1) AND h.name IS NULL;
    UPDATE saf.held h
    SET due = NULL, forget_at = clock_timestamp() + h.once_for, to_broker = NULL, key = NULL,
        message_type = NULL, headers = NULL, body = '', expires_at = NULL
    WHERE h.message_id = ANY ($1) AND h.name IS NOT NULL;
$$;
COMMENT ON FUNCTION saf.pass_on IS 'moves held messages to the outbox';
REVOKE ALL ON FUNCTION saf.pass_on FROM PUBLIC;

-- Senders that postpone a message by `later` again and again may lock it without a break. So the
-- mover waits briefly for an overdue message, in the queue of its lock. Senders lock only messages
-- with a name.
CREATE FUNCTION saf.lock_overdue(moment timestamptz, message_ids uuid[]) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    overdue saf.held;
BEGIN
    SELECT h.* INTO overdue FROM saf.held h
    WHERE h.due <= $1 - interval '5 seconds' AND h.refused IS NULL
      AND h.message_id <> ALL (coalesce($2, '{}'))
    ORDER BY h.due, h.held_id LIMIT 1;
    SELECT h.* INTO overdue FROM saf.held h
    WHERE h.to_service = overdue.to_service AND h.name = overdue.name AND h.due <= $1
      AND h.refused IS NULL
    FOR NO KEY UPDATE;
    RETURN overdue.message_id;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;
COMMENT ON FUNCTION saf.lock_overdue IS
    'waits for a message that senders have locked since it was due; NULL: none, or still locked';
REVOKE ALL ON FUNCTION saf.lock_overdue FROM PUBLIC;

-- One mover at a time, because two would let a later message of a key overtake an earlier one.
-- Messages that a sender has locked stay for the next call. So nothing is both cancelled and sent.
--
-- The first rule of saf.sender is added under a lock of the outbox that waits for all its writers.
-- So the rules are read after the lock here, and hold to the end of the transaction. Where there
-- are rules, or where the outbox rejects a message, messages move one by one, and a message that
-- may not move stays with the reason.
CREATE FUNCTION saf.move_held(most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment timestamptz = clock_timestamp();
    due_ids uuid[];
    one_by_one boolean;
    m record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('saf move held', 0)) THEN
        RETURN 0;
    END IF;
    SELECT array_agg(d.message_id ORDER BY d.due, d.held_id) INTO due_ids
    FROM (SELECT h.message_id, h.due, h.held_id FROM saf.held h
          WHERE h.due <= moment AND h.refused IS NULL
          ORDER BY h.due, h.held_id LIMIT most FOR NO KEY UPDATE SKIP LOCKED) AS d;
    IF coalesce(cardinality(due_ids), 0) < most THEN
        due_ids = array_append(due_ids, saf.lock_overdue(moment, due_ids));
        due_ids = array_remove(due_ids, NULL);
    END IF;
    IF cardinality(due_ids) = 0 THEN
        RETURN 0;
    END IF;
    LOCK TABLE ONLY saf.outbox IN ROW EXCLUSIVE MODE;
    one_by_one = (SELECT b.senders_since FROM saf.broker b) IS NOT NULL;
    IF NOT one_by_one THEN
        BEGIN
            PERFORM saf.pass_on(due_ids);
        EXCEPTION WHEN integrity_constraint_violation OR data_exception OR raise_exception THEN
            one_by_one = true;
        END;
    END IF;
    IF one_by_one THEN
        FOR m IN SELECT h.message_id, h.sender, h.from_service, h.to_service FROM saf.held h
                 WHERE h.message_id = ANY (due_ids) ORDER BY h.due, h.held_id LOOP
            BEGIN
                PERFORM saf.vouch(m.sender, m.from_service, m.to_service);
                PERFORM saf.pass_on(ARRAY[m.message_id]);
            EXCEPTION WHEN insufficient_privilege OR integrity_constraint_violation
                           OR data_exception OR raise_exception THEN
                UPDATE saf.held h SET refused = SQLERRM WHERE h.message_id = m.message_id;
            END;
        END LOOP;
    END IF;
    RETURN cardinality(due_ids);
END $$;
COMMENT ON FUNCTION saf.move_held IS
    'moves up to the given number of due messages to the outbox; returns how many it found';
REVOKE ALL ON FUNCTION saf.move_held FROM PUBLIC;

CREATE FUNCTION saf.forget_names(most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    forgotten integer;
BEGIN
    DELETE FROM saf.held h WHERE h.message_id IN (
        SELECT o.message_id FROM saf.held o WHERE o.forget_at <= clock_timestamp()
        ORDER BY o.forget_at LIMIT most FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END $$;
COMMENT ON FUNCTION saf.forget_names IS
    'forgets up to the given number of names that may be used again; returns how many it forgot';
REVOKE ALL ON FUNCTION saf.forget_names FROM PUBLIC;
