"""The site's page of SQL statements: each as a server receives it, with its plan.

    python -m tests.sql_page          # prints the page

A statement is a constant of a module, whole, or with ``{places}`` that names are quoted into when
it is used; those have no plan here. Plans are generic ones, of a fresh broker, without sequential
scans: they tell which indexes serve a statement, not what a full broker's planner would choose.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import psycopg

import saf
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.testing.databases import embedded_server

STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|MERGE|TRUNCATE|LOCK|SET|CREATE)\b")
PLANNED = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|MERGE)\b")
PLACE = re.compile(r"\{\w*\}")
PARAMETER = re.compile(r"%(?:\((\w+)\))?([s%])")

HEAD = """# Statements

This page is for engineers. It lists every SQL statement of the package in the form that the server
receives: parts that several modules contribute are joined. Below each statement is its plan in
PostgreSQL 18, for a new broker and without sequential scans, which shows the indexes that it uses.
Of equal partitions, only one is shown. `{name}` stands for a quoted name or a list of values; such
a statement has no plan here, and neither has a statement whose parameter types only a call defines.

This page is generated when the site is built.
"""


@dataclass(frozen=True)
class Statement:
    """One statement, and what its module says of it."""

    module: str
    name: str
    text: str
    why: str

    @property
    def whole(self) -> bool:
        """Nothing is put into it but parameters."""
        return bool(PLANNED.match(self.text)) and not PLACE.search(self.text)


def statements() -> Iterator[Statement]:
    """All of the package, by module, in the order of their lines."""
    for found in pkgutil.walk_packages(saf.__path__, "saf."):
        # modules of an application of Django import only in a configured project
        if found.name.endswith("__main__") or found.name.startswith("saf.django."):
            continue
        module = importlib.import_module(found.name)
        lines = inspect.getsource(module).splitlines() if module.__file__ else []
        where = {
            match[1]: number
            for number, line in enumerate(lines)
            if (match := re.match(r"([A-Z][A-Z_0-9]*)\b.*=", line))
        }
        for name in sorted(where, key=lambda one: where[one]):
            text = getattr(module, name, None)
            if isinstance(text, str) and STATEMENT.match(text):
                yield Statement(module.__name__, name, text.strip(), _why(lines, where[name]))


def _why(lines: list[str], at: int) -> str:
    said: list[str] = []
    for line in reversed(lines[:at]):
        if not line.startswith("# "):
            break
        said.insert(0, line.removeprefix("# "))
    return " ".join(said)


def numbered(text: str) -> str:
    """A statement with ``$1`` for its first parameter.

    >>> numbered("SELECT %(a)s, %(b)s::int, %(a)s, 5 %% 2")
    'SELECT $1, $2::int, $1, 5 % 2'
    """
    numbers: dict[str, int] = {}
    anonymous = count(1)

    def number(match: re.Match[str]) -> str:
        if match[2] == "%":
            return "%"
        name = match[1] or f"#{next(anonymous)}"
        return f"${numbers.setdefault(name, len(numbers) + 1)}"

    return PARAMETER.sub(number, text) if PARAMETER.search(text) else text


def plan(connection: psycopg.Connection[tuple[str]], statement: Statement) -> str | None:
    """The generic plan, or None where the server cannot know the parameters' types."""
    explain = f"EXPLAIN (GENERIC_PLAN, COSTS OFF) {numbered(statement.text)}"
    try:
        with connection.transaction(force_rollback=True):
            lines = [line for (line,) in connection.execute(explain.encode())]
    except psycopg.Error:
        return None
    return "\n".join(_without_twins(lines))


def _without_twins(lines: list[str]) -> list[str]:
    """A plan without the parts that differ from one before them by a partition only."""
    blocks: list[list[str]] = []
    if not lines:
        return []
    depth = min(len(line) - len(line.lstrip()) for line in lines)
    for line in lines:
        if len(line) - len(line.lstrip()) == depth or not blocks:
            blocks.append([])
        blocks[-1].append(line)
    kept: list[str] = []
    seen: set[str] = set()
    for first, *rest in blocks:
        like = re.sub(r"_\d+", "_N", "\n".join([first, *rest]))
        if like not in seen or not first.lstrip().startswith("->"):
            kept += [first, *_without_twins(rest)]
        seen.add(like)
    return kept


def page(connection: psycopg.Connection[tuple[str]]) -> str:
    """Return the page, with plans from a broker."""
    written = [HEAD]
    of = ""
    for statement in statements():
        if statement.module != of:
            of = statement.module
            written.append(f"## {of}\n")
        written.append(
            f"**{statement.name}**" + (f": {statement.why}\n" if statement.why else "\n")
        )
        written.append(f"```sql\n{statement.text}\n```\n")
        planned = plan(connection, statement) if statement.whole else None
        if planned:
            written.append(f"```text\n{planned}\n```\n")
    return "\n".join(written).strip() + "\n"


def generated() -> str:
    """Return the page, with plans from a new broker on a server of its own."""
    with embedded_server() as server:
        broker: Dsn = server.create_database("statements")
        migrate(broker)
        with psycopg.connect(broker.conninfo, autocommit=True) as connection:
            connection.execute("SET enable_seqscan = off")
            return page(connection)


if __name__ == "__main__":
    print(generated(), end="")
