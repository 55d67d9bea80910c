    -- The columns of a message, in this order in every table that holds messages

    -- tells the message from all others; a random one by default
    message_id uuid DEFAULT gen_random_uuid() NOT NULL,
    -- the sender's service
    from_service text,
    -- the service that the message is for
    to_service text NOT NULL,
    -- the one broker that it is for, where several have the service
    to_broker uuid,
    -- what must stay in order together
    key text COLLATE "C",
    -- the dialog that the message belongs to; NULL: none
    conversation_id uuid,
    -- which end of the dialog has sent it
    from_initiator boolean,
    -- its number among the messages of that end
    sequence bigint,
    -- what the body is
    message_type text,
    -- JSON values by name; `content-type` says what the body is. Names that begin with `saf-` are
    -- saf's
    headers jsonb,
    -- the content
    body bytea NOT NULL,
    -- when it was sent
    created_at timestamptz DEFAULT now() NOT NULL,
    -- no consumer gets the message before
    deliver_at timestamptz,
    -- from then on the message is of no use
    expires_at timestamptz
