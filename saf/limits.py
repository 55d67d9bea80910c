"""Limits on the size of a message, as SQL, for readers of a log.

Sizes are in bytes, because indexes, COPY and memory have limits in bytes. Headers are measured as
text, the form in which they travel: ``1e100000`` takes 12 bytes as jsonb, and 100,001 as text.

Both logs have a CHECK, ``bounded``. At the time of sending, and for senders in any language, it
rejects what does not fit in an index or would grow too large on its way; `saf.message.encode`
rejects more. A log may hold rows that are older than the constraint, so readers also check
`READABLE`. That check is cheap for a common row, and never makes a long text of a hostile one. An
unreadable row is never fetched: it becomes a dead letter inside the database.
"""

from __future__ import annotations

from saf.message import MAX_BODY, MAX_HEADERS

LONG_NAMES = 64 * 1024
"""Most bytes that names and key may have together in a readable row."""

# Uncompressed size of the headers, however they are stored
_RAW = "pg_column_size(headers || '{}')"

# Headers above this are never within the limit, because text of at most MAX_HEADERS never takes
# that much
_LARGE = 8 * MAX_HEADERS

NAMES_READABLE = f"""
octet_length(to_service) + coalesce(octet_length(key), 0) + coalesce(octet_length(from_service), 0)
+ coalesce(octet_length(message_type), 0) <= {LONG_NAMES}
"""

# A lower bound of the number of characters, as a power of ten, computed without making a text
_LENGTH = f"""
scale(CAST(n AS numeric)) + CASE {
    " ".join(
        f"WHEN abs(CAST(n AS numeric)) >= 1e{digits} THEN {digits}"
        for digits in (100_000, 10_000, 1_000, 100)
    )
} ELSE 1 END
"""
# Uncompressed headers of up to 2 kB, which may be up to 18 MB as text, cost only two look-ups
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
    """SQL: true for a body of at most ``max_bytes``; see `saf.message.MAX_BODY`."""
    return f"octet_length(body) <= {int(max_bytes)}"


KEPT = """
(SELECT convalidated FROM pg_catalog.pg_constraint
 WHERE conrelid = 'saf.{log}'::regclass AND conname = '{log}_bounded')
"""
"""SQL: true if the constraint holds for all rows of a log, so that no row needs a check."""

READABLE = f"({NAMES_READABLE}) AND ({HEADERS_READABLE}) AND {body_readable()}"
"""SQL: true for a row that can be fetched and shown."""

WHY_NOT = f"""
CASE WHEN octet_length(body) > %(max_bytes)s
     THEN 'the body has more than ' || %(setting)s::text || ' = ' || %(max_bytes)s::bigint
     WHEN NOT ({NAMES_READABLE}) THEN 'names and key have more than {LONG_NAMES} bytes'
     ELSE 'the headers have more than {MAX_HEADERS} bytes as text' END
"""
"""SQL: the reason why a row cannot be fetched; ``setting`` names the limit on a body's size."""
