r"""Fingerprints: an error without its values, by which failures of the same cause are grouped.

Errors of one cause differ in numbers, ids, times and quoted values. `fingerprint` replaces these
values, so that the errors have one fingerprint. The database groups a million errors without
sending them: `FINGERPRINT` is the same function in SQL. Both use one pattern, and a test compares
them. The pattern has neither lookaround nor captured groups, so PostgreSQL matches it in one pass.

An error counts up to a database's ``DETAIL``, which quotes a row, and up to `MOST_CHARACTERS`. A
value is one of these, and several in a row count as one value:

    "…"  '…'      a quoted text. Without a closing quote, it extends to the end, because a long
                  error may be cut inside. The apostrophe of a word such as "can't" begins no value
    A-17  1.5 s   a number, and the letters and signs that adjoin a digit: an id, a UUID, a time, a
                  path from its first digit on

A *failure group* is the dead letters with the same subscription, destination, service, reason and
fingerprint, or the parked messages with the same subscription, destination, kind of lane, service
that the lane is about, and fingerprint of the lane's error. Its id is a hash of these values, so it
is the same at each broker, and nothing is stored for it.
"""

from __future__ import annotations

import re

from saf.errors import UsageError
from saf.setaside.lane import OF_SERVICE, THE_LANE

PLACEHOLDER = "…"
"""Replaces each value in a fingerprint."""

DETAIL = "DETAIL: "
BEFORE = "; before: "
"""In a retried message's error, stands between the retry and the original error, which counts."""
RETRIED = f"^retried by .*?{BEFORE}"
MOST_CHARACTERS = 500
"""Characters of an error that its fingerprint depends on, from the beginning."""

_NUMBER = r"[A-Za-z_.-]*[0-9](?:[A-Za-z0-9_.,:/+@-]*[A-Za-z0-9_])?"
_DOUBLE = r'(?:\bb)?"(?:[^"\\]|\\.)*(?:"|\Z)'  # b"…" is how Python shows bytes
_SINGLE = r"(?:\bb|\B)'(?:[^']|'[A-Za-z0-9_])*(?:'|\Z)"
_VALUE = f"(?:{_DOUBLE}|{_SINGLE}|{_NUMBER})"
PATTERN = rf"{_VALUE}(?:(?:[,;] ?| ){_VALUE})*"
_VALUES = re.compile(PATTERN, re.ASCII | re.DOTALL)


def fingerprint(error: str) -> str:
    """Return an error without its values.

    >>> fingerprint("order 4711 of customer 'Jones' is unknown, since 2026-01-31 12:00:07+01:00")
    'order … of customer … is unknown, since …'
    >>> fingerprint("can't reach 10.0.0.7:5432, it's down")
    "can't reach …, it's down"
    >>> fingerprint('KeyError: b"card"') == fingerprint("KeyError: 'price'")
    True
    >>> fingerprint("shards 1, 2, 30 are not owned") == fingerprint("shards 7 are not owned")
    True
    >>> fingerprint("retried by ann; before: order 4711 is unknown")
    'order … is unknown'
    """
    original = re.sub(RETRIED, "", error, count=1, flags=re.DOTALL)
    text = original.partition(DETAIL)[0][:MOST_CHARACTERS]
    return _VALUES.sub(PLACEHOLDER, text)


def _literal(text: str) -> str:
    r"""Return a literal that a server reads in the same way whatever its settings.

    >>> print(_literal(r"\y'"))
    E'\\y'''
    """
    doubled = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{doubled}'"


def _in_sql(pattern: str) -> str:
    r"""Return a pattern as PostgreSQL writes it: ``\b`` and ``\B`` have other names there."""
    return pattern.replace(r"\b", r"\y").replace(r"\B", r"\Y")


def fingerprint_of(error: str) -> str:
    """Return SQL for the fingerprint of a column.

    Collation "C" makes letters and digits those of ASCII in every database, as in `fingerprint`.
    """
    original = (
        f"CASE WHEN starts_with({error}, 'retried by ') "
        f"THEN regexp_replace({error}, '{RETRIED}', '') ELSE {error} END"
    )
    text = f"left(split_part({original}, '{DETAIL}', 1), {MOST_CHARACTERS})"
    pattern = _literal(_in_sql(PATTERN))
    return f"""regexp_replace({text} COLLATE "C", {pattern}, '{PLACEHOLDER}', 'g')"""


ID_DIGITS = 12
_ID = re.compile(f"[0-9a-f]{{{ID_DIGITS}}}")


def group_of(*columns: str) -> str:
    """Return SQL for the id of a failure group; the columns are those that its messages share."""
    return (
        f"left(encode(sha256(convert_to(concat_ws(chr(31), {', '.join(columns)}), 'UTF8')), 'hex'),"
        f" {ID_DIGITS})"
    )


def check_group(group: str | None) -> str | None:
    """Return the id of a failure group, or None.

    >>> check_group("0123456789ab"), check_group(None)
    ('0123456789ab', None)

    Raises:
        UsageError: it is not an id.
    """
    if group is not None and not _ID.fullmatch(group):
        raise UsageError(
            f"{group!r} is not a failure group: `saf dead groups` and `saf parked groups` show "
            f"their ids, of {ID_DIGITS} digits such as 0123456789ab"
        )
    return group


LANES_SERVICE = f"""CASE WHEN b.kind IN ({", ".join(f"'{kind}'" for kind in OF_SERVICE)})
                    THEN b.subject ELSE '' END"""
"""SQL: the service that a lane b is about; empty if none."""

_OF_DEAD = ("s.name", "destination", "to_service", "reason", fingerprint_of("error"))
DEAD_GROUP = f"(%(group)s::text IS NULL OR {group_of(*_OF_DEAD)} = %(group)s)"
"""SQL: whether a dead letter of the subscription s is in the ``group``; NULL means any."""

_OF_PARKED = ("s.name", "b.destination", LANES_SERVICE, "b.kind", fingerprint_of("b.error"))
PARKED_GROUP = f"""(%(group)s::text IS NULL OR (subscription_id, {THE_LANE}) IN (
      SELECT b.subscription_id, {", ".join(f"b.{column}" for column in THE_LANE.split(", "))}
      FROM saf.backoff b JOIN saf.subscription s USING (subscription_id)
      WHERE {group_of(*_OF_PARKED)} = %(group)s))"""
"""SQL: whether a parked message, or a lane, is in the ``group``; NULL means any."""
