"""Functions of the database that classify: their names, what they must be, and how they are called.

    CREATE FUNCTION public.classify(body bytea) RETURNS text …

A routing service calls the function of its router at its own broker, in the transaction that
receives the messages: it gets the body of each message, and returns the name of a service, or NULL.
Its writes commit or roll back with the messages.

- The name has a schema, and is written as in SQL: ``public.classify``, ``"My app"."Classify"``.
- The function has one argument, bytea, and returns one text. `check` reports anything else.
- It runs with the rights of the routing service's role, or with its owner's (SECURITY DEFINER).
- During the call, ``search_path`` is the function's schema. So a function without a path of its own
  finds the tables beside it, whatever the role's path is.
- One statement calls it for many messages (`call`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.database.queries import in_arrays
from saf.errors import NAMED, ConfigurationError, UsageError
from saf.routing.matching import Router

Classify = Callable[[Sequence[bytes]], list[str | None]]
"""Returns the answer to each body, in their order."""

PART = r'[^\W\d][\w$]*|"(?:[^"\0]|"")+"'
SIMPLE = re.compile(r"[a-z_][a-z0-9_$]*")
"""Names that SQL takes without quotes."""
NAME = re.compile(rf"\s*({PART})\s*\.\s*({PART})\s*")

SIGNATURE = "(body bytea) RETURNS text"
MOST_BYTES = 64 << 20
"""Most bytes of bodies in one call, unless one body is larger; a parameter has at most 1 GiB."""

# In all schemas, because the schema is the part of a name that is most often wrong
FIND = """
SELECT n.nspname, p.prokind = 'f' AND NOT p.proretset,
       p.pronargs = 1 AND p.provariadic = 0
           AND p.proargtypes[0] = 'pg_catalog.bytea'::pg_catalog.regtype,
       p.prorettype = 'pg_catalog.text'::pg_catalog.regtype,
       CASE p.prokind WHEN 'p' THEN 'PROCEDURE ' WHEN 'a' THEN 'AGGREGATE ' WHEN 'w' THEN 'WINDOW '
            ELSE '' END
       || pg_catalog.format('%%I.%%I(%%s)', n.nspname, p.proname,
                            pg_catalog.pg_get_function_arguments(p.oid))
       || coalesce(' RETURNS ' || pg_catalog.pg_get_function_result(p.oid), ''),
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       pg_catalog.has_function_privilege(p.oid, 'EXECUTE'),
       pg_catalog.quote_ident(n.nspname), pg_catalog.quote_ident(current_user)
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE p.proname = %(name)s::text ORDER BY n.nspname, p.oid
"""

FOLLOW_PATH = "SELECT pg_catalog.set_config('search_path', %(path)s, true)"

# In the order of the messages: a function that writes sees what it has written for earlier ones
CALL = """
SELECT {function}(m.body)
FROM pg_catalog.unnest(%(bodies)s::pg_catalog.bytea[]) WITH ORDINALITY AS m (body, place)
ORDER BY m.place
"""


@dataclass(frozen=True, kw_only=True)
class Name:
    """Name of a function, with its schema."""

    schema: str
    function: str

    @property
    def identifier(self) -> sql.Identifier:
        """The name, quoted for a statement with parameters."""
        return sql.Identifier(*(part.replace("%", "%%") for part in (self.schema, self.function)))

    @property
    def path(self) -> str:
        """The ``search_path`` during a call; without pg_temp in it, that would come first."""
        return ", ".join(map(_quoted, (self.schema, "pg_temp")))

    def __str__(self) -> str:
        return f"{_shown(self.schema)}.{_shown(self.function)}"


def parsed(router: Router) -> Name:
    """Return the name of a router's function, read as PostgreSQL reads it.

    >>> str(parsed(Router(service="s", kind="function", expression='App."Which One"')))
    'app."Which One"'

    Raises:
        UsageError: it is not a name with a schema.
    """
    found = NAME.fullmatch(router.expression)
    if found is None:
        raise UsageError(
            f"router {router.service!r}: {router.expression!r} is not schema.function, such as "
            "public.classify: a name without arguments, quoted as in SQL"
        )
    return Name(schema=_unquoted(found[1]), function=_unquoted(found[2]))


def check(connection: psycopg.Connection[Any], router: Router, *, calls: bool = False) -> None:
    """Check that the database has a router's function, and that it may classify.

    With ``calls``, check also that the current role may call it.

    Raises:
        ConfigurationError: the function is missing, is something else, or may not be called.
    """
    name = parsed(router)
    database = f"database {connection.info.dbname!r}"
    rows = fetch(connection, FIND, {"name": name.function})
    here = [row for row in rows if row[0] == name.schema]
    fitting = [row for row in here if row[1] and row[2] and row[3]]
    if not here:
        others = ", ".join(row[4] for row in rows[:NAMED])
        raise ConfigurationError(
            f"router {router.service!r}: {database} has no function {name}, only {others or 'none'}"
            f" of that name. Create it: CREATE FUNCTION {name}{SIGNATURE}"
        )
    if not fitting:
        raise ConfigurationError(
            f"router {router.service!r}: {database} has {', '.join(row[4] for row in here)}, and a "
            f"classifier is a function {name}{SIGNATURE}, which returns one row"
        )
    ((*_, may_look, may_call, schema, role),) = fitting
    if calls and not (may_look and may_call):
        grants = [f"GRANT USAGE ON SCHEMA {schema} TO {role}"] * (not may_look)
        grants += [f"GRANT EXECUTE ON FUNCTION {name}(bytea) TO {role}"] * (not may_call)
        raise ConfigurationError(
            f"router {router.service!r}: role {role} may not call {name}(bytea) in {database}. "
            f"Let the owner run: {'; '.join(grants)}"
        )


def call(
    connection: psycopg.Connection[Any], router: Router, bodies: Sequence[bytes], own: str = ""
) -> list[str | None]:
    """Return the answers of a router's function to the bodies of messages, in an open transaction.

    If it raises, nothing of this call remains. ``own`` is the statement that restores the settings
    of the session, which the function may have changed; see `saf.receiving.link`.

    Raises:
        psycopg.Error: the function raises for one of the bodies, or cannot be called.
    """
    name, answers = parsed(router), list[str | None]()
    statement = sql.SQL(CALL).format(function=name.identifier)
    with connection.transaction():
        for some in _within(bodies):
            connection.execute(FOLLOW_PATH, {"path": name.path})
            rows = fetch(connection, statement, in_arrays(connection, {"bodies": some}))
            answers += [answer for (answer,) in rows]
            if own:
                connection.execute(own.encode())
    return answers


def _within(bodies: Sequence[bytes]) -> list[list[bytes]]:
    """Return the bodies in groups of at most `MOST_BYTES`.

    >>> [len(group) for group in _within([bytes(MOST_BYTES), b"", b"1"])]
    [2, 1]
    """
    groups: list[list[bytes]] = []
    size = MOST_BYTES + 1
    for body in bodies:
        if size + len(body) > MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(body)
        size += len(body)
    return groups


def _unquoted(part: str) -> str:
    if part.startswith('"'):
        return part[1:-1].replace('""', '"')
    return "".join(letter.lower() if letter.isascii() else letter for letter in part)


def _shown(part: str) -> str:
    return part if SIMPLE.fullmatch(part) else _quoted(part)


def _quoted(part: str) -> str:
    return '"' + part.replace('"', '""') + '"'
