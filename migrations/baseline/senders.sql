-- Who may send as whom: rules that the server enforces from the first one on.
--
-- The policies exist from the beginning and do nothing: row-level security is enabled with the
-- first rule of saf.sender, and disabled with the last one. So databases without rules pay nothing.
-- Reading is never restricted by rules, but by grants. The owner of the table is not restricted
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
    'who may send as whom, and to whom: while there is a rule, nobody sends without one';
COMMENT ON COLUMN saf.sender.role IS 'by name, because a dump has names; its members may too';
COMMENT ON COLUMN saf.sender.to_service IS 'NULL: any';
-- No primary key, because to_service may be NULL: a published table needs another identity
ALTER TABLE saf.sender REPLICA IDENTITY FULL;

-- It reads the rules with the owner's rights, because a sender cannot read them. The role to check
-- is an argument, because current_user is the owner inside of the function. It raises instead of
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
        HINT = CASE WHEN $2 IS NULL THEN 'Say from_service: here, rules say who sends as whom.'
                    ELSE format('Let the owner of schema saf run: saf sender add %s --from %s '
                                '--to %s', $1, $2, $3) END;
END $$;

CREATE POLICY outbox_read ON saf.outbox FOR SELECT USING (true);
CREATE POLICY outbox_sender ON saf.outbox FOR INSERT
    WITH CHECK (saf.check_sender(current_user, from_service, to_service));
