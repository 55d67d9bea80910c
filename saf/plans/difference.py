"""The difference between what a broker has and what a plan wants, and how it is made good.

What the plan does not name stays, and is said; with ``prune``, it is removed, but for message types
and contracts, which dialogs rely on. All changes of one broker are one transaction: they happen
whole or not at all, and only if the difference is still the one that was shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg

from saf.broker.senders import senders
from saf.broker.services import refused, services
from saf.database import of_broker
from saf.errors import ConfigurationError
from saf.plans.tables import TABLES, Entries, Key, Table, Values

BROKER = "SELECT broker_id::text FROM saf.broker"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing to be done."""

    action: Literal["create", "change", "remove"]
    table: Table
    key: Key
    there: Values | None = None
    wanted: Values | None = None

    def make(self, connection: psycopg.Connection[Any], *, discard: bool) -> None:
        """Do it."""
        if self.wanted is not None:
            self.table.create(connection, self.key, self.wanted)
        elif self.table.remove is not None:
            self.table.remove(connection, self.key, discard)

    def details(self) -> Iterator[str]:
        """The values that will be set, and what they were."""
        for name, wanted in (self.wanted or {}).items():
            there = (self.there or {}).get(name)
            if self.there is None and _is_worth_saying(name, wanted):
                yield f"{name} {_said(wanted)}"
            elif self.there is not None and name in self.there and there != wanted:
                yield f"{name} {_said(wanted)}, was {_said(there)}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What a broker lacks, and what the plan does not name."""

    changes: tuple[Change, ...]
    """In the order in which they are made."""
    kept: tuple[tuple[Table, Key], ...]
    """What is there, is not named, and stays."""
    refused: Mapping[str, int] = field(compare=False)
    """If the broker gets its first services: the others, whose messages will wait at their sources,
    and how many the inbox holds; where messages come in, these numbers rise all the time."""
    any_again: bool
    """Whether the broker loses its last service, and stores messages for any."""
    only_senders: bool
    """Whether the broker gets its first rules for senders, so that nobody sends without one."""
    any_sender: bool
    """Whether the broker loses its last rule for senders, so that any writer sends as anybody."""


def difference(
    connection: psycopg.Connection[Any], wanted: Mapping[str, Entries], *, prune: bool
) -> Difference:
    """Compare what a broker has with what a plan wants of it. Reads only.

    Raises:
        ConfigurationError: something is there that is not as the plan says and cannot be changed.
    """
    removed: list[Change] = []
    made: list[Change] = []
    kept: list[tuple[Table, Key]] = []
    for table in TABLES:
        if table.name not in wanted:
            continue
        there, mine = table.listed(connection), wanted[table.name]
        for key in there:
            if key not in mine and prune and table.remove is not None:
                removed.append(Change(action="remove", table=table, key=key, there=there[key]))
            elif key not in mine:
                kept.append((table, key))
        for key, values in mine.items():
            if key not in there:
                made.append(Change(action="create", table=table, key=key, wanted=values))
            elif not table.same(there[key], values):
                change = Change(
                    action="change", table=table, key=key, there=there[key], wanted=values
                )
                if not table.changes:
                    raise _fixed(change)
                made.append(change)
    before = {one.name for one in services(connection)}
    after = {key[0] for key in wanted.get("services", {})} | (
        before - {one.key[0] for one in removed if one.table.name == "services"}
    )
    ruled, rules = len(senders(connection)), wanted.get("senders", {})
    unruled = sum(one.table.name == "senders" for one in removed)
    return Difference(
        changes=(*reversed(removed), *made),
        kept=tuple(kept),
        refused=refused(connection, after) if not before else {},
        any_again=bool(before) and not after,
        only_senders=bool(rules) and not ruled,
        any_sender=0 < ruled == unruled and not rules,
    )


def apply(
    connection: psycopg.Connection[Any],
    wanted: Mapping[str, Entries],
    shown: Difference,
    *,
    prune: bool,
    discard: bool,
) -> None:
    """Make good the difference that was shown, in one transaction.

    Raises:
        ConfigurationError: it is another one by now; nothing is changed.
        UsageError: whatever a change raises; nothing is changed.
    """
    with connection.transaction():
        now = difference(connection, wanted, prune=prune)
        if now != shown or now.refused.keys() != shown.refused.keys():
            raise ConfigurationError(
                "somebody else has changed it in between: nothing was done; run the command again"
            )
        for change in shown.changes:
            change.make(connection, discard=discard)


def listed(connection: psycopg.Connection[Any]) -> dict[str, Entries]:
    """All that a broker has, by the names of tables."""
    return {table.name: table.listed(connection) for table in TABLES}


def broker_id(connection: psycopg.Connection[Any]) -> str:
    """The broker's id, by which it is told apart whatever it is called."""
    return str(of_broker(connection, BROKER)[0])


def _fixed(change: Change) -> ConfigurationError:
    return ConfigurationError(
        f"{change.table.described(change.key)} exists and cannot be changed "
        f"({'; '.join(change.details())}): use another name or version in the plan, or remove "
        "the existing one"
    )


def _is_worth_saying(field: str, wanted: object) -> bool:
    """Whether a value is another one than what a new entry has by itself."""
    if isinstance(wanted, bool):
        return wanted != (field == "enabled")
    return wanted is not None and wanted != {}


def _said(value: object) -> str:
    """A value for people.

    >>> _said(None), _said(("writer", "dialog")), _said("at_least_once")
    ('none', 'writer and dialog', 'at_least_once')
    """
    if isinstance(value, (tuple, list)):
        return " and ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return "none" if value is None else str(value)
