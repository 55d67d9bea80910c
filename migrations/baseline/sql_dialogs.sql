-- Dialogs from SQL: saf.begin_dialog, saf.say and saf.end_dialog, in the caller's transaction. They
-- write the same rows as saf.dialogs.dialog, whose statements are in saf.dialogs.statements. One
-- suite of tests runs through both.
--
-- The functions run with the rights of their caller, as the statements of the library do: `saf
-- grant --role dialog` gives a role rights on the tables, so these functions add none. The policies
-- of saf.outbox apply to the caller, and an operator's own policies, too. As the owner, they would
-- let each role that may call them speak in every dialog of the database, past all policies.
--
-- They reject requests that only the library can handle: bodies in fragments, and message types
-- with a JSON Schema. Signatures are a matter of the sending process, so messages from SQL are not
-- signed.

CREATE FUNCTION saf.refuse_dialog(cause text, message text, hint text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = CASE $1
            WHEN 'contract_allows' THEN 'check_violation'
            WHEN 'needs_library' THEN 'feature_not_supported'
            WHEN 'dialog_over' THEN 'object_not_in_prerequisite_state'
            ELSE 'undefined_object' END,
        SCHEMA = 'saf', TABLE = 'conversation', CONSTRAINT = $1, MESSAGE = $2,
        HINT = coalesce($3, '');
END $$;
COMMENT ON FUNCTION saf.refuse_dialog IS
    'raises the error of a dialog. The cause, as the name of a constraint: contract_allows, '
    'needs_library, dialog_over, dialog_known, service_known, contract_known';
REVOKE ALL ON FUNCTION saf.refuse_dialog FROM PUBLIC;

CREATE FUNCTION saf.header_fault(headers jsonb) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE
        WHEN jsonb_typeof($1) <> 'object' THEN
            'headers: expected a mapping of names to JSON values'
        WHEN pg_column_size($1) > 96 AND octet_length($1::text) > 1048576 THEN
            format('headers: %s bytes are more than 1,048,576',
                   to_char(octet_length($1::text), 'FM9,999,999,999'))
        WHEN EXISTS (SELECT FROM jsonb_object_keys($1) AS k (name)
                     WHERE starts_with(lower(k.name), 'saf-')) THEN
            'headers: saf-… is for saf''s own' END
$$;
COMMENT ON FUNCTION saf.header_fault IS 'what is wrong with headers; NULL: nothing';
REVOKE ALL ON FUNCTION saf.header_fault FROM PUBLIC;

-- The states are those of saf.errors.DialogEnded
CREATE FUNCTION saf.refuse_handle(handle uuid) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    e saf.conversation;
BEGIN
    SELECT c.* INTO e FROM saf.conversation c WHERE c.handle = $1;
    IF e.handle IS NULL THEN
        PERFORM saf.refuse_dialog('dialog_known', format(
            'database %L has no conversation %s: it is closed and forgotten, or the handle is of '
            'another database; see `saf dialog list`',
            current_database(), coalesce($1::text, 'NULL')));
    ELSIF e.state NOT IN ('closed', 'disconnected_outbound')
          AND (e.error_code = -1 OR e.error_code IS NULL AND e.expires_at <= now()) THEN
        PERFORM saf.refuse_dialog('dialog_over', format(
            'the lifetime of conversation %s was over at %s: end it', $1, e.expires_at));
    ELSE
        PERFORM saf.refuse_dialog('dialog_over', format(
            'nothing can be sent on conversation %s any more: %s', $1, CASE e.state
                WHEN 'disconnected_outbound' THEN 'this end has ended it'
                WHEN 'disconnected_inbound' THEN 'the other end has ended it: end it here too'
                WHEN 'error' THEN
                    format('it has failed (%s: %s): end it', e.error_code, e.error_text)
                ELSE 'it is closed' END));
    END IF;
END $$;
COMMENT ON FUNCTION saf.refuse_handle IS
    'raises the error of an end that exists no longer, or cannot send any more';
REVOKE ALL ON FUNCTION saf.refuse_handle FROM PUBLIC;

CREATE FUNCTION saf.begin_dialog(
    from_service text, to_service text, contract text DEFAULT NULL, lifetime interval DEFAULT NULL,
    to_broker uuid DEFAULT NULL, related uuid DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    b saf.broker;
    known saf.contract;
    in_group uuid = gen_random_uuid();
    e saf.conversation;
    fault text = coalesce(saf.text_fault('from_service', begin_dialog.from_service, 255, false),
                          saf.text_fault('to_service', begin_dialog.to_service, 255, false));
BEGIN
    IF fault IS NULL AND NOT (begin_dialog.lifetime > '0'
                              AND begin_dialog.lifetime <= '365000 days') THEN
        fault = format('lifetime: %s is not above zero, and at most 365,000 days',
                       begin_dialog.lifetime);
    END IF;
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    SELECT * INTO STRICT b FROM saf.broker;
    IF EXISTS (SELECT FROM saf.service)
       AND NOT EXISTS (SELECT FROM saf.service s WHERE s.name = begin_dialog.from_service) THEN
        PERFORM saf.refuse_dialog('service_known', format(
            'service %L does not live in database %L, so nobody would get the replies: create it '
            'with `saf service create %s`',
            begin_dialog.from_service, current_database(), begin_dialog.from_service));
    END IF;
    IF begin_dialog.contract IS NOT NULL THEN
        SELECT k.* INTO known FROM saf.contract k WHERE k.name = begin_dialog.contract
        ORDER BY k.version DESC LIMIT 1;
        IF NOT FOUND THEN
            PERFORM saf.refuse_dialog('contract_known', format(
                'contract %L is not known in database %L: create it with `saf contract create` or '
                'saf.create_contract, the same at both ends',
                begin_dialog.contract, current_database()));
        END IF;
    END IF;
    IF begin_dialog.related IS NULL THEN
        INSERT INTO saf.conversation_group (group_id) VALUES (in_group);
    ELSE
        SELECT c.group_id INTO in_group FROM saf.conversation c
        WHERE c.handle = begin_dialog.related;
        IF NOT FOUND THEN
            PERFORM saf.refuse_handle(begin_dialog.related);
        END IF;
    END IF;
    INSERT INTO saf.conversation (handle, conversation_id, is_initiator, monolog, service,
        far_service, far_broker, contract, contract_version, group_id, expires_at)
    VALUES (gen_random_uuid(), gen_random_uuid(), true, false, begin_dialog.from_service,
            begin_dialog.to_service, begin_dialog.to_broker, known.name, known.version, in_group,
            now() + begin_dialog.lifetime)
    RETURNING * INTO e;
    PERFORM saf.expire_later(e);
    RETURN e.handle;
END $$;
COMMENT ON FUNCTION saf.begin_dialog IS
    'begins a dialog, as the library''s begin_dialog does; returns the handle of this end';
REVOKE ALL ON FUNCTION saf.begin_dialog FROM PUBLIC;

-- A message to oneself, as if the other end had sent it: the Error at the end of the lifetime
CREATE FUNCTION saf.tell_oneself(e saf.conversation, code integer, error text, due timestamptz)
RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.inbox (message_id, from_service, to_service, key, conversation_id,
                           from_initiator, message_type, headers, body, deliver_at, source)
    SELECT gen_random_uuid(), e.service, e.service, e.conversation_id::text, e.conversation_id,
           NOT e.is_initiator, 'saf/error', jsonb_build_object('content-type', 'application/json'),
           convert_to(jsonb_build_object('code', $2, 'text', $3)::text, 'UTF8'), $4,
           (SELECT b.broker_id FROM saf.broker b)
$$;
COMMENT ON FUNCTION saf.tell_oneself IS
    'puts an Error to an end into its own inbox; due: earliest time to receive it, NULL: now';
REVOKE ALL ON FUNCTION saf.tell_oneself FROM PUBLIC;

CREATE FUNCTION saf.expire_later(e saf.conversation) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT saf.tell_oneself(e, -1, 'the lifetime is over', e.expires_at)
    WHERE e.expires_at IS NOT NULL
$$;
COMMENT ON FUNCTION saf.expire_later IS
    'puts the Error at the end of a dialog''s lifetime, if it has one, into the inbox';
REVOKE ALL ON FUNCTION saf.expire_later FROM PUBLIC;

-- The first message, and an Error, inform the target of the dialog. The caller has locked the end,
-- and counted the message
CREATE FUNCTION saf.utter(
    e saf.conversation, message_id uuid, message_type text, headers jsonb, body bytea
) RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                            from_initiator, sequence, message_type, headers, body)
    VALUES ($2, e.service, e.far_service, e.far_broker, e.conversation_id::text,
            e.conversation_id, CASE WHEN NOT e.monolog THEN e.is_initiator END, e.send_sequence,
            $3, $4
            || CASE WHEN e.is_initiator AND NOT e.monolog
                         AND (e.send_sequence = 1 OR e.error_code IS NOT NULL)
                    THEN jsonb_build_object('saf-dialog', jsonb_strip_nulls(jsonb_build_object(
                        'contract', e.contract, 'version', e.contract_version,
                        'lifetime_seconds', extract(epoch FROM e.expires_at - now()),
                        'broker', (SELECT b.broker_id FROM saf.broker b))))
                    WHEN e.send_sequence = 1 AND to_jsonb(e) ->> 'redirected_by' IS NOT NULL
                    THEN jsonb_build_object('saf-redirected', jsonb_build_object(
                        'by', to_jsonb(e) ->> 'redirected_by'))
                    ELSE '{}' END
            || CASE WHEN e.lineage IS NULL THEN '{}'
                    ELSE jsonb_build_object('saf-lineage', e.lineage) END,
            $5)
$$;
COMMENT ON FUNCTION saf.utter IS 'puts the message that an end has counted into the outbox';
REVOKE ALL ON FUNCTION saf.utter FROM PUBLIC;

CREATE FUNCTION saf.contract_fault(
    e saf.conversation, from_initiator boolean, message_type text, body bytea,
    OUT fault text, OUT unchecked boolean
) LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m record;
    named text = format('contract %L version %s', e.contract, e.contract_version);
BEGIN
    unchecked = false;
    IF e.contract IS NULL THEN
        RETURN;
    END IF;
    SELECT c.sent_by, t.validation INTO m
    FROM saf.contract_message c JOIN saf.message_type t
        ON (t.name, t.version) = (c.message_type, c.message_type_version)
    WHERE (c.contract, c.contract_version, c.message_type) = (e.contract, e.contract_version, $3);
    IF NOT FOUND THEN
        fault = format('%s has no message type %s, only %s', named,
                       coalesce(quote_literal($3), 'NULL'),
                       coalesce((SELECT string_agg(quote_literal(c.message_type), ', '
                                                   ORDER BY c.message_type)
                                 FROM saf.contract_message c
                                 WHERE (c.contract, c.contract_version)
                                       = (e.contract, e.contract_version)), 'none'));
    ELSIF m.sent_by NOT IN ('any', CASE WHEN $2 THEN 'initiator' ELSE 'target' END) THEN
        fault = format('%s: message type %L is sent by the %s only', named, $3, m.sent_by);
    ELSIF m.validation = 'empty' AND $4 <> '' THEN
        fault = format('message type %L: at $: expected no body, got %s bytes', $3,
                       to_char(octet_length($4), 'FM9,999,999,999'));
    ELSIF m.validation = 'json' THEN
        BEGIN
            PERFORM convert_from($4, 'UTF8')::json;
        EXCEPTION WHEN data_exception OR statement_too_complex THEN
            fault = format('message type %L: at $: not JSON: %s', $3, SQLERRM);
        END;
    ELSIF m.validation = 'json_schema' THEN
        unchecked = true;
        fault = format('message type %L of %s has a JSON Schema, which SQL cannot check',
                       $3, named);
    END IF;
END $$;
COMMENT ON FUNCTION saf.contract_fault IS
    'why the contract does not allow a message; NULL: it does. unchecked: SQL cannot tell';
REVOKE ALL ON FUNCTION saf.contract_fault FROM PUBLIC;

-- The row's lock defines the order: a session that waits for it sees all earlier counts, and the
-- message's id is drawn under the lock
CREATE FUNCTION saf.say(
    handle uuid, body bytea, message_type text DEFAULT NULL, headers jsonb DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    e saf.conversation;
    checked record;
    message_id uuid = gen_random_uuid();
    fault text = coalesce(saf.text_fault('message_type', say.message_type, 255, true),
                          saf.header_fault(say.headers));
BEGIN
    fault = coalesce(fault, CASE
        WHEN say.body IS NULL THEN 'body: is NULL'
        WHEN starts_with(say.message_type, 'saf/') THEN
            format('message_type: %L: saf/… is for saf''s own', say.message_type)
    END);
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    SELECT c.* INTO e FROM saf.conversation c WHERE c.handle = say.handle;
    IF NOT FOUND THEN
        PERFORM saf.refuse_handle(say.handle);
    END IF;
    SELECT * INTO checked
    FROM saf.contract_fault(e, e.is_initiator, say.message_type, say.body);
    IF checked.unchecked THEN
        PERFORM saf.refuse_dialog('needs_library', checked.fault,
                                  'Send it with the Python library.');
    ELSIF checked.fault IS NOT NULL THEN
        PERFORM saf.refuse_dialog('contract_allows', checked.fault);
    END IF;
    IF octet_length(say.body) > (CASE WHEN e.monolog THEN 67108864 ELSE 1048576 END) THEN
        PERFORM saf.refuse_dialog('needs_library', format(
            'body: %s bytes are more than %s, and a longer body travels in fragments, which SQL '
            'cannot send', to_char(octet_length(say.body), 'FM9,999,999,999'),
            CASE WHEN e.monolog THEN '67,108,864' ELSE '1,048,576' END),
            'Send it with the Python library.');
    END IF;
    UPDATE saf.conversation c SET send_sequence = c.send_sequence + 1, changed_at = now()
    WHERE c.handle = say.handle
      AND c.state IN ('started_outbound', 'started_inbound', 'conversing')
      AND NOT coalesce(c.expires_at <= now(), false)
    RETURNING c.* INTO e;
    IF NOT FOUND THEN
        PERFORM saf.refuse_handle(say.handle);
    END IF;
    PERFORM saf.utter(e, message_id, say.message_type,
                      saf.with_content_type(say.headers, 'application/octet-stream'), say.body);
    RETURN message_id;
END $$;
COMMENT ON FUNCTION saf.say(uuid, bytea, text, jsonb) IS
    'sends a message on a dialog or a monolog, by its handle; returns the message''s id';
REVOKE ALL ON FUNCTION saf.say(uuid, bytea, text, jsonb) FROM PUBLIC;

CREATE FUNCTION saf.say(
    handle uuid, body text, message_type text DEFAULT NULL, headers jsonb DEFAULT NULL
) RETURNS uuid LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT saf.say($1, convert_to($2, 'UTF8'), $3,
                   saf.with_content_type($4, 'text/plain; charset=utf-8'))
$$;
COMMENT ON FUNCTION saf.say(uuid, text, text, jsonb) IS 'sends text on a dialog';
REVOKE ALL ON FUNCTION saf.say(uuid, text, text, jsonb) FROM PUBLIC;

CREATE FUNCTION saf.say(
    handle uuid, body jsonb, message_type text DEFAULT NULL, headers jsonb DEFAULT NULL
) RETURNS uuid LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT saf.say($1, convert_to($2::text, 'UTF8'), $3,
                   saf.with_content_type($4, 'application/json'))
$$;
COMMENT ON FUNCTION saf.say(uuid, jsonb, text, jsonb) IS 'sends JSON on a dialog';
REVOKE ALL ON FUNCTION saf.say(uuid, jsonb, text, jsonb) FROM PUBLIC;

-- If an initiator has sent nothing, no other end exists that could get an End or an Error
CREATE FUNCTION saf.end_dialog(
    handle uuid, error_code integer DEFAULT NULL, error_text text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    e saf.conversation;
    fault text = CASE
        WHEN end_dialog.error_code <= 0 THEN
            format('error_code: %s: an application''s are from 1 to 2147483647',
                   end_dialog.error_code)
        WHEN end_dialog.error_code IS NULL AND end_dialog.error_text IS NOT NULL THEN
            'error_code: is NULL, and error_text is not'
        WHEN end_dialog.error_code IS NOT NULL AND end_dialog.error_text IS NULL THEN
            'error_text: is NULL, and error_code is not' END;
BEGIN
    IF fault IS NOT NULL THEN
        PERFORM saf.refuse_argument(fault);
    END IF;
    UPDATE saf.conversation c
    SET send_sequence = c.send_sequence
                        + CASE WHEN c.send_sequence > 0 OR NOT c.is_initiator THEN 1 ELSE 0 END,
        ended_here = true, changed_at = now(),
        ended_there = c.ended_there OR end_dialog.error_code IS NULL
                      AND (c.monolog OR c.send_sequence = 0 AND c.is_initiator),
        error_code = CASE
            WHEN end_dialog.error_code IS NOT NULL THEN end_dialog.error_code
            WHEN c.error_code IS NULL AND c.expires_at <= now() THEN -1
            ELSE c.error_code END,
        error_text = CASE
            WHEN end_dialog.error_code IS NOT NULL THEN left(end_dialog.error_text, 2000)
            WHEN c.error_code IS NULL AND c.expires_at <= now() THEN 'the lifetime is over'
            ELSE c.error_text END
    WHERE c.handle = end_dialog.handle AND NOT c.ended_here
    RETURNING c.* INTO e;
    IF NOT FOUND THEN
        PERFORM saf.refuse_handle(end_dialog.handle);
    END IF;
    IF e.send_sequence > 0 AND end_dialog.error_code IS NOT NULL THEN
        PERFORM saf.utter(e, gen_random_uuid(), 'saf/error',
                          jsonb_build_object('content-type', 'application/json'),
                          convert_to(jsonb_build_object('code', e.error_code, 'text', e.error_text)
                                     ::text, 'UTF8'));
    ELSIF e.send_sequence > 0 AND e.error_code IS NULL THEN
        PERFORM saf.utter(e, gen_random_uuid(), 'saf/end-dialog',
                          jsonb_build_object('content-type', 'application/octet-stream'), '');
    END IF;
END $$;
COMMENT ON FUNCTION saf.end_dialog IS
    'ends this side of a dialog in order; with an error, ends both sides. Codes are above zero';
REVOKE ALL ON FUNCTION saf.end_dialog FROM PUBLIC;
