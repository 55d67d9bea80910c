"""What a message may have at most, as SQL: for the schema, and for those who read a log.

Sizes are in bytes, because indexes, COPY and memory have limits in bytes. Headers are measured as
text, which is how they travel: ``1e100000`` takes 12 bytes in a jsonb, and 100,001 as text.

`BOUNDED` is a CHECK on both logs: what indexes hold, and what grows on its way, is refused when it
is sent, from any language; `saf.message.encode` refuses more. A log may hold rows that are older
than the constraint, so whoever reads one asks for `READABLE` as well, which costs little for a
common row and never makes a long text of a hostile one. A row that is not readable is never
fetched: it becomes a dead letter inside of the database.
"""

from __future__ import annotations

from saf.message import MAX_BODY, MAX_HEADERS, MAX_KEY, MAX_NAME

LONG_NAMES = 64 * 1024
"""Names and key together, of a row that can be read."""

# Uncompressed, however it is stored
_RAW = "pg_column_size(headers || '{}')"

# A jsonb needs 16 bytes for a number, of which 147,456 characters may become. So what is small is
# within the limit whatever it holds, and what is large is not, because text of at most MAX_HEADERS
# never takes so much.
_SMALL, _LARGE = 96, 8 * MAX_HEADERS

BOUNDED = f"""
octet_length(to_service) <= {MAX_NAME} AND octet_length(key) <= {MAX_KEY}
AND ({_RAW} <= {_SMALL} OR octet_length(CAST(headers AS text)) <= {MAX_HEADERS})
"""
"""What a log takes. Short, because PostgreSQL prepares it for each statement that inserts."""

NAMES_READABLE = f"""
octet_length(to_service) + coalesce(octet_length(key), 0) + coalesce(octet_length(from_service), 0)
+ coalesce(octet_length(message_type), 0) <= {LONG_NAMES}
"""

# At least so many characters, to the power of ten, without a text being made
_LENGTH = f"""
scale(CAST(n AS numeric)) + CASE {
    " ".join(
        f"WHEN abs(CAST(n AS numeric)) >= 1e{digits} THEN {digits}"
        for digits in (100_000, 10_000, 1_000, 100)
    )
} ELSE 1 END
"""
# Up to 2 kB that are stored as they are, and so up to 18 MB of text, cost two look-ups
HEADERS_READABLE = f"""
CASE WHEN headers IS NULL THEN true
     WHEN pg_column_size(headers) <= 2048 AND pg_column_compression(headers) IS NULL THEN true
     WHEN {_RAW} > {_LARGE} THEN false
     WHEN {MAX_HEADERS} < (
         SELECT sum({_LENGTH})
         FROM jsonb_path_query(headers, '$.** ? (@.type() == "number")') AS n) THEN false
     ELSE octet_length(CAST(headers AS text)) <= {MAX_HEADERS} END
"""


def body_readable(max_bytes: int = MAX_BODY) -> str:
    """Whether a body is no larger; see `saf.message.MAX_BODY`."""
    return f"octet_length(body) <= {int(max_bytes)}"


KEPT = """
(SELECT convalidated FROM pg_catalog.pg_constraint
 WHERE conrelid = 'saf.{log}'::regclass AND conname = '{log}_bounded')
"""
"""Whether the constraint holds for all rows of a log, so that none has to be asked for its size."""

READABLE = f"({NAMES_READABLE}) AND ({HEADERS_READABLE}) AND {body_readable()}"
"""What can be fetched, to be looked at."""

WHY_NOT = f"""
CASE WHEN octet_length(body) > %(max_bytes)s
     THEN 'the body has more than ' || %(setting)s::text || ' = ' || %(max_bytes)s::bigint
     WHEN NOT ({NAMES_READABLE}) THEN 'names and key have more than {LONG_NAMES} bytes'
     ELSE 'the headers have more than {MAX_HEADERS} bytes as text' END
"""
"""Why a row cannot be fetched; ``setting`` says how large a body may be."""
