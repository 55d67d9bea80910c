"""Roles and their rights in a broker: `saf.broker.grants`, read back.

PostgreSQL stores rights, but not the duties that they were granted for. So a role's rights are
compared with those of each kind. Kinds whose rights are covered by the role's other kinds are left
out: an operator may do everything that a purger may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import psycopg

from saf.broker.grants import RIGHTS, Kind
from saf.database import fetch

Right: TypeAlias = tuple[str, str, str | None]
"""Table, privilege and column; None is for the whole table."""

OTHER = "other rights"
"""Stands for rights that no kind gives, or for kinds whose rights are incomplete."""

# Rights of roles except the owner and PUBLIC; superusers have their rights without a grant
HELD = """
WITH granted (relation, column_name, grantee, privilege, owner) AS (
    SELECT c.relname, NULL::name, a.grantee, a.privilege_type, c.relowner
    FROM pg_class c, aclexplode(c.relacl) a WHERE c.relnamespace = 'saf'::regnamespace
    UNION ALL
    SELECT c.relname, t.attname, a.grantee, a.privilege_type, c.relowner
    FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid, aclexplode(t.attacl) a
    WHERE c.relnamespace = 'saf'::regnamespace)
SELECT pg_get_userbyid(grantee), relation, privilege, column_name
FROM granted WHERE grantee <> 0 AND grantee <> owner
"""


def granted(connection: psycopg.Connection[Any]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of each role that has rights in a broker; `OTHER` for further rights."""
    held: dict[str, set[Right]] = defaultdict(set)
    for role, table, privilege, column in fetch(connection, HELD):
        held[role].add((table, privilege, column))
    return {role: in_kinds(held[role]) for role in sorted(held)}


def in_kinds(held: Collection[Right]) -> tuple[str, ...]:
    """Return the fewest kinds that give these rights, and `OTHER` if some rights are left over.

    >>> in_kinds(rights_of([Kind.WRITER, Kind.RECEIVER]))
    ('receiver', 'writer')
    >>> in_kinds(rights_of([Kind.OPERATOR, Kind.PURGER]))
    ('operator',)
    >>> in_kinds({("outbox", "SELECT", None)})
    ('other rights',)
    """
    held = set(held)
    kinds = [kind for kind in Kind if rights_of([kind]) <= held]
    for kind in sorted(kinds, key=lambda name: len(rights_of([name]))):
        others = [name for name in kinds if name != kind]
        if rights_of(others) == rights_of(kinds):
            kinds = others
    more = [] if rights_of(kinds) == held else [OTHER]
    return (*sorted(map(str, kinds)), *more)


def rights_of(kinds: Iterable[Kind]) -> set[Right]:
    """Return the single rights of kinds."""
    return {
        (table, privilege, column)
        for kind in kinds
        for part in RIGHTS[kind]
        for table, privileges in part.items()
        for privilege, columns in privileges.items()
        for column in (columns or (None,))
    }
