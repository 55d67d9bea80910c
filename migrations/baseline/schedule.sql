-- Schedules: each sends a message to a service at each of its runs, exactly one a run.
--
-- The times of runs are computed by programs (saf.schedules.times), because PostgreSQL has no cron.
-- So a row has the time of its next run, and saf.run_schedule, which sends the message, moves that
-- time on in the same transaction, if it is still the expected one. It only rises. So of any number
-- of forwarders one sends the message of a run, also after the database's clock was set back.
--
-- As in held.sql, writers have no right on messages: they call functions that run as the owner, and
-- these check the rules of saf.sender for the role of the session, and record that role.
-- saf.run_schedule checks it again at each run.

CREATE TABLE saf.schedule (
    name text COLLATE "C" NOT NULL,
    from_service text,
    to_service text NOT NULL,
    to_broker uuid,
    key text COLLATE "C",
    message_type text,
    headers jsonb,
    body bytea NOT NULL,
    cron text,
    every interval,
    anchor timestamptz NOT NULL,
    zone text NOT NULL,
    missed text NOT NULL,
    next_run timestamptz NOT NULL,
    last_run timestamptz,
    skipped bigint DEFAULT 0 NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    refused text,
    origin text,
    sender text NOT NULL,
    version bigint DEFAULT 1 NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT schedule_named CHECK (octet_length(name) BETWEEN 1 AND 255),
    CONSTRAINT schedule_bounded CHECK (
        saf.accept('3'::xid8, to_service, key, headers, created_at, NULL, NULL)),
    CONSTRAINT schedule_timed CHECK ((cron IS NULL) <> (every IS NULL)),
    CONSTRAINT schedule_every CHECK (every BETWEEN '1 s' AND '36525 days'),
    CONSTRAINT schedule_missed CHECK (missed IN ('none', 'one', 'all')),
    CONSTRAINT schedule_rises CHECK (next_run > last_run)
);
CREATE INDEX schedule_due ON saf.schedule (next_run) WHERE NOT paused AND refused IS NULL;
COMMENT ON TABLE saf.schedule IS 'schedules: each sends a message at each of its runs';
COMMENT ON COLUMN saf.schedule.cron IS
    'minute, hour, day of the month, month and day of the week of runs; NULL: see every';
COMMENT ON COLUMN saf.schedule.every IS 'time between runs; NULL: see cron';
COMMENT ON COLUMN saf.schedule.anchor IS 'a time from which every is counted';
COMMENT ON COLUMN saf.schedule.zone IS 'time zone of cron, e.g. Europe/Berlin';
COMMENT ON COLUMN saf.schedule.missed IS
    'what happens if several runs are due: none: those of more than 5 minutes ago are skipped, and '
    'all but the last; one: the last is sent; all: each is sent';
COMMENT ON COLUMN saf.schedule.next_run IS 'due time of the next run';
COMMENT ON COLUMN saf.schedule.last_run IS 'due time of the last run that was sent';
COMMENT ON COLUMN saf.schedule.skipped IS 'number of missed runs that were skipped';
COMMENT ON COLUMN saf.schedule.paused IS 'true: no run is due until the schedule is resumed';
COMMENT ON COLUMN saf.schedule.refused IS
    'reason why the due run is not sent, e.g. no rule of saf.sender allows it; NULL: none';
COMMENT ON COLUMN saf.schedule.origin IS
    'application that declares the schedule in its code; NULL: none';
COMMENT ON COLUMN saf.schedule.sender IS
    'role that added the schedule, or changed it last; the rules of saf.sender hold for it';
COMMENT ON COLUMN saf.schedule.version IS 'rises with each change, so that no run mixes two';

CREATE TABLE saf.schedule_run (
    run_id bigint GENERATED ALWAYS AS IDENTITY,
    name text COLLATE "C" NOT NULL REFERENCES saf.schedule ON DELETE CASCADE,
    due timestamptz,
    at timestamptz NOT NULL,
    message_id uuid,
    skipped integer DEFAULT 0 NOT NULL,
    PRIMARY KEY (name, run_id)
);
COMMENT ON TABLE saf.schedule_run IS 'the last 20 runs of each schedule';
COMMENT ON COLUMN saf.schedule_run.due IS
    'time at which the run was due; if none was sent, the first that was skipped; NULL: an '
    'extra run, sent by hand';
COMMENT ON COLUMN saf.schedule_run.at IS 'time at which the message was sent, or runs were skipped';
COMMENT ON COLUMN saf.schedule_run.message_id IS 'id of the message; NULL: none was sent';
COMMENT ON COLUMN saf.schedule_run.skipped IS 'missed runs that were skipped then';

-- For those who change a schedule: no run happens until they end, and the next run that they
-- compute is later than the last one
CREATE FUNCTION saf.lock_schedule(
    name text, OUT moment timestamptz, OUT last_run timestamptz, OUT origin text,
    OUT cron text, OUT every interval, OUT anchor timestamptz, OUT zone text
) RETURNS SETOF record
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT clock_timestamp(), s.last_run, s.origin, s.cron, s.every, s.anchor, s.zone
    FROM saf.schedule s WHERE s.name = $1 FOR NO KEY UPDATE
$$;
COMMENT ON FUNCTION saf.lock_schedule IS
    'locks a schedule for a change, and returns what its next run is computed from';
REVOKE ALL ON FUNCTION saf.lock_schedule FROM PUBLIC;

CREATE FUNCTION saf.put_schedule(
    name text, from_service text, to_service text, to_broker uuid, key text, message_type text,
    headers jsonb, body bytea, cron text, every interval, anchor timestamptz, zone text,
    missed text, next_run timestamptz, origin text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    role text = saf.session_role();
    there saf.schedule;
    same_times boolean;
BEGIN
    PERFORM saf.vouch(role, put_schedule.from_service, put_schedule.to_service);
    LOOP
        INSERT INTO saf.schedule (name, from_service, to_service, to_broker, key, message_type,
                                  headers, body, cron, every, anchor, zone, missed, next_run,
                                  origin, sender)
        VALUES (put_schedule.name, put_schedule.from_service, put_schedule.to_service,
                put_schedule.to_broker, put_schedule.key, put_schedule.message_type,
                put_schedule.headers, put_schedule.body, put_schedule.cron, put_schedule.every,
                put_schedule.anchor, put_schedule.zone, put_schedule.missed,
                put_schedule.next_run, put_schedule.origin, role)
        ON CONFLICT (name) DO NOTHING;
        IF FOUND THEN
            RETURN 'added';
        END IF;
        SELECT s.* INTO there FROM saf.schedule s
        WHERE s.name = put_schedule.name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    IF there.origin IS DISTINCT FROM put_schedule.origin THEN
        RETURN 'elsewhere';
    END IF;
    same_times = (there.cron, there.every, there.anchor, there.zone) IS NOT DISTINCT FROM
        (put_schedule.cron, put_schedule.every, put_schedule.anchor, put_schedule.zone);
    IF same_times AND
       (there.from_service, there.to_service, there.to_broker, there.key, there.message_type,
        there.headers, there.body, there.missed) IS NOT DISTINCT FROM
       (put_schedule.from_service, put_schedule.to_service, put_schedule.to_broker,
        put_schedule.key, put_schedule.message_type, put_schedule.headers, put_schedule.body,
        put_schedule.missed) THEN
        RETURN 'unchanged';
    END IF;
    -- the other message, and its service, are changed as well
    PERFORM saf.vouch(role, there.from_service, there.to_service);
    UPDATE saf.schedule s
    SET from_service = put_schedule.from_service, to_service = put_schedule.to_service,
        to_broker = put_schedule.to_broker, key = put_schedule.key,
        message_type = put_schedule.message_type, headers = put_schedule.headers,
        body = put_schedule.body, cron = put_schedule.cron, every = put_schedule.every,
        anchor = put_schedule.anchor, zone = put_schedule.zone, missed = put_schedule.missed,
        next_run = CASE WHEN same_times THEN there.next_run ELSE put_schedule.next_run END,
        refused = NULL, sender = role, version = there.version + 1,
        changed_at = clock_timestamp()
    WHERE s.name = there.name;
    RETURN 'changed';
END $$;
COMMENT ON FUNCTION saf.put_schedule IS
    'adds or changes a schedule: added, changed, unchanged, or elsewhere if another origin has it';
REVOKE ALL ON FUNCTION saf.put_schedule FROM PUBLIC;

CREATE FUNCTION saf.schedule_to_change(name text) RETURNS saf.schedule
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    there saf.schedule;
BEGIN
    SELECT s.* INTO there FROM saf.schedule s WHERE s.name = schedule_to_change.name
    FOR NO KEY UPDATE;
    IF FOUND THEN
        PERFORM saf.vouch(saf.session_role(), there.from_service, there.to_service);
    END IF;
    RETURN there;
END $$;
COMMENT ON FUNCTION saf.schedule_to_change IS
    'locks a schedule that the session''s role may change, and returns it; NULL: it does not exist';
REVOKE ALL ON FUNCTION saf.schedule_to_change FROM PUBLIC;

CREATE FUNCTION saf.remove_schedule(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    there saf.schedule = saf.schedule_to_change($1);
BEGIN
    DELETE FROM saf.schedule s WHERE s.name = there.name;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION saf.remove_schedule IS 'removes a schedule; false: it does not exist';
REVOKE ALL ON FUNCTION saf.remove_schedule FROM PUBLIC;

CREATE FUNCTION saf.pause_schedule(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    there saf.schedule = saf.schedule_to_change($1);
BEGIN
    UPDATE saf.schedule s SET paused = true, changed_at = clock_timestamp()
    WHERE s.name = there.name;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION saf.pause_schedule IS
    'pauses a schedule until it is resumed; false: it does not exist';
REVOKE ALL ON FUNCTION saf.pause_schedule FROM PUBLIC;

-- Runs during a pause were not missed. A run that was refused was: it is due again
CREATE FUNCTION saf.resume_schedule(name text, next_run timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    there saf.schedule = saf.schedule_to_change($1);
BEGIN
    UPDATE saf.schedule s
    SET paused = false, refused = NULL, changed_at = clock_timestamp(),
        next_run = CASE WHEN there.paused THEN greatest(there.next_run, $2)
                        ELSE there.next_run END
    WHERE s.name = there.name;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION saf.resume_schedule IS
    'resumes a schedule, after a pause with the given next run; false: it does not exist';
REVOKE ALL ON FUNCTION saf.resume_schedule FROM PUBLIC;

-- The header tells receivers which run it is, whatever time it is when they get the message
CREATE FUNCTION saf.send_scheduled(s saf.schedule, due timestamptz, skipped integer) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sent uuid = CASE WHEN due IS NOT NULL OR skipped = 0 THEN gen_random_uuid() END;
BEGIN
    IF sent IS NOT NULL THEN
        INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key,
                                message_type, headers, body)
        VALUES (sent, s.from_service, s.to_service, s.to_broker, s.key, s.message_type,
                CASE WHEN due IS NULL THEN s.headers
                     ELSE coalesce(s.headers, '{}') || jsonb_build_object('scheduled-for',
                          to_char(due AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')) END,
                s.body);
    END IF;
    RETURN sent;
END $$;
COMMENT ON FUNCTION saf.send_scheduled IS 'sends the message of a run; due is NULL: an extra one';
REVOKE ALL ON FUNCTION saf.send_scheduled FROM PUBLIC;

CREATE FUNCTION saf.note_run(
    name text, due timestamptz, message_id uuid, skipped integer
) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO saf.schedule_run (name, due, at, message_id, skipped)
    VALUES ($1, $2, clock_timestamp(), $3, $4);
    DELETE FROM saf.schedule_run r WHERE r.name = $1 AND r.run_id <= (
        SELECT o.run_id FROM saf.schedule_run o WHERE o.name = $1
        ORDER BY o.run_id DESC OFFSET 20 LIMIT 1);
$$;
COMMENT ON FUNCTION saf.note_run IS 'records a run of a schedule, and forgets older ones';
REVOKE ALL ON FUNCTION saf.note_run FROM PUBLIC;

-- An extra run: the scheduled ones stay as they are
CREATE FUNCTION saf.send_schedule(name text) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    there saf.schedule;
    sent uuid;
BEGIN
    LOCK TABLE ONLY saf.outbox IN ROW EXCLUSIVE MODE;
    SELECT s.* INTO there FROM saf.schedule s WHERE s.name = send_schedule.name FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM saf.vouch(saf.session_role(), there.from_service, there.to_service);
    sent = saf.send_scheduled(there, NULL, 0);
    PERFORM saf.note_run(there.name, NULL, sent, 0);
    RETURN sent;
END $$;
COMMENT ON FUNCTION saf.send_schedule IS
    'sends the message of a schedule in an extra run; NULL: the schedule does not exist';
REVOKE ALL ON FUNCTION saf.send_schedule FROM PUBLIC;

-- The caller has computed what to do about a run that is due from the row of this version. The
-- first rule of saf.sender is added under a lock of the outbox that waits for all its writers, so
-- the rules are read after the lock here. Another forwarder that has the row runs it.
CREATE FUNCTION saf.run_schedule(
    name text, version bigint, expected timestamptz, due timestamptz, skipped integer,
    next_run timestamptz, problem text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    there saf.schedule;
    sent uuid;
BEGIN
    LOCK TABLE ONLY saf.outbox IN ROW EXCLUSIVE MODE;
    SELECT s.* INTO there FROM saf.schedule s
    WHERE s.name = run_schedule.name AND s.version = run_schedule.version
      AND s.next_run = run_schedule.expected AND s.next_run <= clock_timestamp()
      AND NOT s.paused AND s.refused IS NULL
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF run_schedule.problem IS NOT NULL THEN
        UPDATE saf.schedule s SET refused = run_schedule.problem WHERE s.name = there.name;
        RETURN true;
    END IF;
    IF run_schedule.due > clock_timestamp() THEN
        RETURN false; -- the clock was set back since then
    END IF;
    IF NOT run_schedule.next_run > greatest(there.next_run, run_schedule.due)
       OR run_schedule.due < there.next_run
       OR (run_schedule.due IS NULL AND run_schedule.skipped < 1) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('a run of schedule %L is due at %s, not at %s, and the next one then',
                             there.name, there.next_run, run_schedule.due);
    END IF;
    BEGIN
        PERFORM saf.vouch(there.sender, there.from_service, there.to_service);
        sent = saf.send_scheduled(there, run_schedule.due, run_schedule.skipped);
    EXCEPTION WHEN insufficient_privilege OR integrity_constraint_violation
                   OR data_exception OR raise_exception THEN
        UPDATE saf.schedule s SET refused = SQLERRM WHERE s.name = there.name;
        RETURN true;
    END;
    UPDATE saf.schedule s
    SET next_run = run_schedule.next_run, last_run = coalesce(run_schedule.due, s.last_run),
        skipped = s.skipped + run_schedule.skipped
    WHERE s.name = there.name;
    PERFORM saf.note_run(there.name, coalesce(run_schedule.due, there.next_run), sent,
                         run_schedule.skipped);
    RETURN true;
END $$;
COMMENT ON FUNCTION saf.run_schedule IS
    'sends the message of a run that is due, or skips missed runs, and sets the time of the next '
    'run; false: it is not due any more, or another session runs it';
REVOKE ALL ON FUNCTION saf.run_schedule FROM PUBLIC;
