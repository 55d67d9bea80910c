"""Subjects of messages and marks in a stream.

TOPIC                                    messages; see `subject`
saf-marks.STREAM.SOURCE.SHARD.LANE       the mark of a place: the last message counts
saf-marks.STREAM.identity                the destination's identity

A lane's name is in hexadecimal, because a subject cannot contain every character; ``-`` is the
destination's own lane.
"""

from __future__ import annotations

import re
from string import Formatter
from urllib.parse import quote
from uuid import UUID

from saf.destinations.marks import MAIN, Place

OWN = "-"
CANNOT = re.compile(r"[\x00-\x20\x7f%*>]|^\.+|\.+$|\.{2,}")
"""Forbidden in a subject: controls, spaces, wildcards, and dots without a word between them."""


def subject(topic: str) -> str:
    """Return a topic as a subject; forbidden characters are encoded as in URLs.

    >>> subject("orders.a topic"), subject("a..b"), subject("100%.grüezi")
    ('orders.a%20topic', 'a%2E%2Eb', '100%25.grüezi')
    """
    return CANNOT.sub(lambda match: "".join(map(_encoded, match[0])), topic)


def _encoded(character: str) -> str:
    return "%2E" if character == "." else quote(character, safe="")


def pattern(template: str) -> str:
    """Return the pattern of the subjects that a template of topics can make, for a new stream.

    >>> pattern("orders.{service}"), pattern("orders.eu.all")
    ('orders.>', 'orders.eu.all')

    Raises:
        ValueError: the template begins with a placeholder, which could be any subject.
    """
    literal, name, _, _ = next(iter(Formatter().parse(template)))
    parts = literal.split(".")
    if name is None:
        return subject(template)
    words = parts[:-1]
    if not words or not words[0]:
        raise ValueError(
            f"{template!r} could be any subject: begin it with a word, as in orders.{{service}}"
        )
    return f"{subject('.'.join(words))}.>"


def takes(wanted: str, given: str) -> bool:
    """Return True if a pattern covers a subject, or all subjects of another pattern.

    >>> takes("orders.*", "orders.a"), takes("orders.*", "orders.a.b")
    (True, False)
    >>> takes("orders.>", "orders.*"), takes("orders.*", "orders.>")
    (True, False)
    """
    tokens, target = wanted.split("."), given.split(".")
    for place, word in enumerate(tokens):
        if word == ">":
            return len(target) > place
        if place >= len(target) or target[place] == ">" or word not in ("*", target[place]):
            return False
    return len(tokens) == len(target)


def all_marks(stream: str) -> str:
    """Return the pattern of all marks."""
    return f"saf-marks.{stream}.>"


def identity(stream: str) -> str:
    """Return the subject of the destination's identity."""
    return f"saf-marks.{stream}.identity"


def marks(stream: str, source: UUID | str) -> str:
    """Return the pattern of a source's marks."""
    return f"saf-marks.{stream}.{source}.>"


def mark(stream: str, source: UUID, place: Place) -> str:
    """Return the subject of a place's mark.

    >>> mark("SAF", UUID(int=7), ("retry", 3))
    'saf-marks.SAF.00000000-0000-0000-0000-000000000007.3.7265747279'
    """
    lane, shard = place
    return f"saf-marks.{stream}.{source}.{shard}.{lane.encode().hex() or OWN}"


def source_of(name: str) -> UUID | None:
    """Return the source of a mark's subject; None for another subject.

    >>> source_of(mark("SAF", UUID(int=7), ("retry", 3))), source_of(identity("SAF"))
    (UUID('00000000-0000-0000-0000-000000000007'), None)
    """
    _, _, source, *place = name.split(".")
    return UUID(source) if place else None


def place_of(name: str) -> Place:
    """Return the place of a mark's subject.

    >>> place_of(mark("SAF", UUID(int=7), ("retry", 3)))
    ('retry', 3)
    """
    shard, lane = name.split(".")[-2:]
    return MAIN if lane == OWN else bytes.fromhex(lane).decode(), int(shard)
