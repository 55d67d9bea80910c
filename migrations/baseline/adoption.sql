-- Adoptions: a table that another outbox writes. A trigger sends each new row as the message that
-- it is, and not as a change of a row; see saf.capture.adoption.
--
-- An adoption is a row of saf.capture, so a table has a capture or an adoption, and not both.

ALTER TABLE saf.capture
    ADD COLUMN adopted jsonb,
    ALTER COLUMN to_service DROP NOT NULL,
    ALTER COLUMN message_type DROP NOT NULL,
    ALTER COLUMN key DROP NOT NULL,
    ADD CONSTRAINT capture_of_changes CHECK (
        adopted IS NOT NULL
        OR (to_service IS NOT NULL AND message_type IS NOT NULL AND key IS NOT NULL));
COMMENT ON COLUMN saf.capture.adopted IS
    'an outbox table: where the fields of messages come from, what becomes of rows, and in which '
    'order old rows were sent; NULL: a capture of changes';
COMMENT ON COLUMN saf.capture.to_service IS 'NULL: a column of an adopted table has it';
COMMENT ON COLUMN saf.capture.message_type IS
    'beginning of the message types: orders for orders.insert, orders.update and orders.delete; of '
    'an adopted table: the type of all messages, or NULL if a column has it';
COMMENT ON COLUMN saf.capture.key IS
    'column whose text is the key of the messages; NULL: an adopted table';
COMMENT ON COLUMN saf.capture.columns IS
    'columns in the bodies, in this order; of an adopted table: the columns that are read';
COMMENT ON COLUMN saf.capture.condition IS
    'SQL expression about old and new, or about the columns of an adopted table; rows for which it '
    'is not true are not sent; NULL: none';
