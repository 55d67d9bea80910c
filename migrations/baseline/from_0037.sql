-- Turns a database at revision 0036 or 0037, which have the same schema, into one that lacks only
-- keys.sql. Staged messages stay until a purge: their jobs began with another schema, and fail.

DROP TABLE saf.staging;
COMMENT ON COLUMN saf.staged.attempt IS
    'attempt of a task: the second of its beginning, times 2^31, plus a random number';

DROP FUNCTION saf.cursor_is_one, saf.watermark_is_one CASCADE;
DROP TABLE saf.cursor_key, saf.watermark_key;
