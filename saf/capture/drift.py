"""Drift: differences between a capture and what the database has now.

A capture that drifts either misses changes, because a trigger is gone or disabled, or makes the
application's statements fail, because its function reads a column that is gone. `drift` only reads
the catalog, so any role that may read saf.capture can ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.capture.adoption import Adoption
from saf.capture.code import EVENTS, TRIGGER
from saf.capture.stored import Capture
from saf.database import fetch

# By its names, which to_regclass would look up with the caller's rights
WHERE = """
SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s
"""
# Where the function's triggers are, if the table was renamed
ELSEWHERE = """
SELECT DISTINCT format('%%s.%%s', n.nspname, c.relname)
FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_class c ON c.oid = t.tgrelid
     JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pronamespace = 'saf'::regnamespace AND p.proname = %(function)s AND NOT c.relispartition
"""
FUNCTION = """
SELECT encode(sha256(convert_to(p.prosrc, 'UTF8')), 'hex'), p.prosecdef, p.proconfig,
       pg_get_userbyid(p.proowner)::text, pg_get_userbyid(c.relowner)::text,
       EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
               WHERE a.grantee <> p.proowner AND a.privilege_type = 'EXECUTE')
FROM pg_proc p CROSS JOIN pg_class c
WHERE p.pronamespace = 'saf'::regnamespace AND p.proname = %(function)s
  AND c.oid = 'saf.outbox'::regclass
"""
COLUMNS = """
SELECT a.attname::text FROM pg_attribute a
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'
"""
PRIMARY_KEY = """
SELECT array_agg(a.attname::text ORDER BY k.place)
FROM pg_constraint p CROSS JOIN unnest(p.conkey) WITH ORDINALITY AS k (number, place)
     JOIN pg_attribute a ON a.attrelid = p.conrelid AND a.attnum = k.number
WHERE p.conrelid = %(oid)s AND p.contype = 'p'
"""
# Of the table and its partitions: each with its triggers, and how they are enabled
TRIGGERS = """
SELECT format('%%s.%%s', n.nspname, c.relname), c.oid = %(oid)s,
       coalesce(jsonb_object_agg(t.tgname, t.tgenabled::text) FILTER (WHERE t.oid IS NOT NULL),
                '{}')
FROM (SELECT CAST(%(oid)s AS oid) AS relid UNION SELECT relid FROM pg_partition_tree(%(oid)s)) AS r
     JOIN pg_class c ON c.oid = r.relid JOIN pg_namespace n ON n.oid = c.relnamespace
     LEFT JOIN (pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND p.proname = %(function)s
                AND p.pronamespace = 'saf'::regnamespace) ON t.tgrelid = c.oid
GROUP BY 1, 2 ORDER BY 2 DESC, 1
"""
SUBSCRIBED = """
SELECT DISTINCT format('%%s.%%s', n.nspname, c.relname)
FROM pg_subscription_rel s JOIN pg_class c ON c.oid = s.srrelid
     JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE s.srrelid = %(oid)s OR s.srrelid IN (SELECT relid FROM pg_partition_tree(%(oid)s))
"""

FIRES = ("O", "A")
STATES = {"D": "is disabled", "R": "fires for replicated changes only"}


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A difference."""

    what: str
    fails: bool = False
    """True if the application's statements fail now."""
    misses: bool = True
    """True if changes are missed; False for a remark about changes that no trigger can see."""


def drift(connection: psycopg.Connection[Any], capture: Capture | Adoption) -> list[Drift]:
    """Return the differences between a capture and the database; none if it is as written."""
    return [*_drift(connection, capture)]


def _drift(connection: psycopg.Connection[Any], capture: Capture | Adoption) -> Iterator[Drift]:
    names = {"schema": capture.schema, "table": capture.table, "function": capture.function}
    function = fetch(connection, FUNCTION, names)
    for problem in _of_function(function, capture.digest, capture.settings):
        yield Drift(what=f"function saf.{capture.function} {problem}")
    found = fetch(connection, WHERE, names)
    if not found:
        elsewhere = ", ".join(name for (name,) in fetch(connection, ELSEWHERE, names))
        renamed = f": it was renamed to {elsewhere}" if elsewhere else ""
        yield Drift(what=f"table {capture.called} does not exist{renamed}", misses=not elsewhere)
        return
    params = {**names, "oid": found[0][0]}
    for relation, is_root, triggers in fetch(connection, TRIGGERS, params):
        for problem in _of_triggers(triggers, capture.events):
            partition = "" if is_root else "; statements that name the partition are missed"
            yield Drift(what=f"table {relation}: {problem}{partition}")
    columns = {name for (name,) in fetch(connection, COLUMNS, params)}
    for name in capture.read:
        if name not in columns:
            yield Drift(
                what=f"column {name!r} of table {capture.called} was dropped or renamed: "
                "statements that change the table fail",
                fails=bool(function),
            )
    ((primary_key,),) = fetch(connection, PRIMARY_KEY, params)
    if tuple(primary_key or ()) != capture.primary_key and columns.issuperset(capture.primary_key):
        now = ", ".join(primary_key or ()) or "gone"
        yield Drift(
            what=f"the primary key of table {capture.called} is {now}, and was "
            f"{', '.join(capture.primary_key)}"
        )
    for (relation,) in fetch(connection, SUBSCRIBED, params):
        yield Drift(
            what=f"table {relation} gets rows by logical replication, which fires no triggers for "
            "statements: these changes are not captured",
            misses=False,
        )


def _of_function(
    found: list[tuple[Any, ...]], digest: str, written: Mapping[str, str]
) -> Iterator[str]:
    if not found:
        yield "does not exist"
        return
    ((now, definer, settings, owner, owner_of_outbox, callable_by_others),) = found
    if now != digest:
        yield "has another source than was written"
    if not definer:
        yield "does not run with its owner's rights"
    if not _is_pinned(settings or (), written):
        yield "has other settings than were written"
    if owner != owner_of_outbox:
        yield f"is owned by {owner!r}, and not by {owner_of_outbox!r}, who owns saf.outbox"
    if callable_by_others:
        yield "may be used by others than its owner, in triggers of their own"


def _is_pinned(settings: list[str] | tuple[str, ...], written: Mapping[str, str]) -> bool:
    """Return whether a function has the settings that were written.

    >>> _is_pinned(["TimeZone=UTC"], {"TimeZone": "UTC"}), _is_pinned([], {"TimeZone": "UTC"})
    (True, False)
    """
    found = dict(setting.split("=", 1) for setting in settings)
    return {name.lower(): value for name, value in found.items()} == {
        name.lower(): value for name, value in written.items()
    }


def _of_triggers(triggers: Mapping[str, str], events: Iterable[str] = EVENTS) -> Iterator[str]:
    """Yield what is wrong with the triggers of a table.

    >>> fine = {f"saf_capture_{event}": "O" for event in EVENTS}
    >>> [*_of_triggers({**fine, "saf_capture_insert": "D"})], [*_of_triggers(fine)]
    (['trigger saf_capture_insert is disabled'], [])
    """
    for event in events:
        name = TRIGGER.format(event)
        state = triggers.get(name)
        if state is None:
            yield f"trigger {name} is missing, or calls another function"
        elif state not in FIRES:
            yield f"trigger {name} {STATES.get(state, 'is disabled')}"
