    -- Columns of a message; every table that holds messages has them in this order

    -- unique id of the message; random by default
    message_id uuid DEFAULT gen_random_uuid() NOT NULL,
    -- service that sends the message
    from_service text,
    -- service that the message is addressed to
    to_service text NOT NULL,
    -- broker that the message is addressed to, if several have the service
    to_broker uuid,
    -- messages with the same key stay in order
    key text COLLATE "C",
    -- dialog that the message belongs to; NULL: none
    conversation_id uuid,
    -- true: sent by the initiator of the dialog; false: by the target
    from_initiator boolean,
    -- ordinal among the messages of that end
    sequence bigint,
    -- type of the body
    message_type text,
    -- JSON values by name; `content-type` is the media type of the body. Names that begin with
    -- `saf-` are reserved for saf
    headers jsonb,
    -- content of the message
    body bytea NOT NULL,
    -- time of sending
    created_at timestamptz DEFAULT now() NOT NULL,
    -- earliest time at which a consumer gets the message
    deliver_at timestamptz,
    -- time from which the message is of no use
    expires_at timestamptz
