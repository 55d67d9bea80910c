-- Rules: which roles may send as which service. The server enforces them once a rule exists.
--
-- The policies always exist but have no effect at first: the first rule in saf.sender enables
-- row-level security, and removal of the last rule disables it. So databases without rules pay
-- nothing. Rules never restrict reading; grants do. Rules do not restrict the owner of the table
-- either.

CREATE TABLE saf.sender (
    role text NOT NULL,
    from_service text NOT NULL,
    to_service text,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT sender_named CHECK (role <> '' AND from_service <> '' AND to_service <> ''),
    CONSTRAINT sender_once UNIQUE NULLS NOT DISTINCT (from_service, to_service, role)
);
COMMENT ON TABLE saf.sender IS
    'roles that may send as a service, to another or any. If rules exist, each send needs one';
COMMENT ON COLUMN saf.sender.role IS
    'name of a role, because dumps contain names; members of the role may send too';
COMMENT ON COLUMN saf.sender.to_service IS 'NULL: any service';
-- The nullable to_service rules out a primary key, and a published table needs an identity
ALTER TABLE saf.sender REPLICA IDENTITY FULL;

-- Reads the rules with the owner's rights, because senders cannot read them. The role to check is
-- an argument, because current_user is the owner inside the function. Raises an error instead of
-- returning false, so that a plain INSERT in any language gets an explanation and the name of the
-- constraint.
CREATE FUNCTION saf.check_sender(sender name, from_service text, to_service text)
RETURNS boolean LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (
        SELECT FROM saf.sender s
        WHERE s.from_service = $2 AND (s.to_service = $3 OR s.to_service IS NULL)
          AND pg_has_role($1, to_regrole(quote_ident(s.role)), 'USAGE')
    ) THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'insufficient_privilege', SCHEMA = 'saf', TABLE = 'outbox',
        CONSTRAINT = 'sender_allowed',
        MESSAGE = format('role %I may not send %s to service %L', $1,
                         coalesce(format('as service %L', $2), 'without a from_service'), $3),
        HINT = CASE WHEN $2 IS NULL THEN 'Set from_service: this broker has rules about senders.'
                    ELSE format('Let the owner of schema saf run: saf sender add %s --from %s '
                                '--to %s', $1, $2, $3) END;
END $$;

CREATE POLICY outbox_read ON saf.outbox FOR SELECT USING (true);
CREATE POLICY outbox_sender ON saf.outbox FOR INSERT
    WITH CHECK (saf.check_sender(current_user, from_service, to_service));
