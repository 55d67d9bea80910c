"""The difference between a broker and its plan, and how it is applied.

Entries that the plan does not name are reported and stay. With ``prune``, they are removed, except
for message types and contracts, which dialogs rely on. All changes of a broker are one transaction:
they happen completely or not at all, and only if the difference is still as shown.

A new version of a message type is compared with the version before it
(`saf.operating.plans.compatibility`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psycopg

from saf.broker.senders import senders
from saf.broker.services import refused, services
from saf.database import of_broker
from saf.errors import ConfigurationError
from saf.operating.plans.compatibility import breaks
from saf.operating.plans.compatibility import changed as changed_fields
from saf.operating.plans.tables import TABLES, Entries, Key, Table, Values

BROKER = "SELECT broker_id::text FROM saf.broker"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a broker."""

    action: Literal["create", "change", "remove"]
    table: Table
    key: Key
    there: Values | None = None
    wanted: Values | None = None
    before: tuple[int, Values] | None = None
    """Of a new version of a message type: the version before it, and its values."""

    def make(self, connection: psycopg.Connection[Any], *, discard: bool) -> None:
        """Apply the change."""
        if self.wanted is not None:
            self.table.create(connection, self.key, self.wanted)
        elif self.table.remove is not None:
            self.table.remove(connection, self.key, discard)

    def details(self) -> Iterator[str]:
        """Yield the values that will be set, with their previous values."""
        for name, wanted in (self.wanted or {}).items():
            existing = (self.there or {}).get(name)
            if name in self.table.hidden:
                if self.there is not None and existing != wanted:
                    yield f"another {name}"
            elif self.there is None and _is_worth_saying(name, wanted):
                yield f"{name} {_said(wanted)}"
            elif self.there is not None and name in self.there and existing != wanted:
                yield f"{name} {_said(wanted)}, was {_said(existing)}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Entries that a broker lacks, and entries that the plan does not name."""

    changes: tuple[Change, ...]
    """Changes, in the order in which they are made."""
    kept: tuple[tuple[Table, Key], ...]
    """Existing entries that the plan does not name, and that stay."""
    refused: Mapping[str, int] = field(compare=False)
    """If the broker gets its first services: the other services, whose messages will wait at their
    sources, with the number of their messages in the inbox. The numbers rise while messages
    arrive."""
    any_again: bool
    """True if the broker loses its last service, and so stores messages for any service."""
    only_senders: bool
    """True if the broker gets its first rules for senders, so that each sender needs a rule."""
    any_sender: bool
    """True if the broker loses its last rule for senders: any writer then sends as any service."""
    breaking: tuple[str, ...] = ()
    """Differences by which a new version of a message type rejects bodies of the version before."""


def difference(
    connection: psycopg.Connection[Any], wanted: Mapping[str, Entries], *, prune: bool
) -> Difference:
    """Compare a broker with its plan. Only reads.

    Raises:
        ConfigurationError: an existing entry differs from the plan and cannot be changed.
    """
    removed: list[Change] = []
    changes: list[Change] = []
    kept: list[tuple[Table, Key]] = []
    for table in TABLES:
        if table.name not in wanted:
            continue
        existing, planned = table.listed(connection), wanted[table.name]
        for key in existing:
            if key not in planned and prune and table.remove is not None:
                removed.append(Change(action="remove", table=table, key=key, there=existing[key]))
            elif key not in planned:
                kept.append((table, key))
        for key, values in planned.items():
            if key not in existing:
                change = Change(action="create", table=table, key=key, wanted=values)
                if table.name == "message_types":
                    change = replace(change, before=_before(key, {**existing, **planned}))
                changes.append(change)
            elif not table.same(existing[key], values):
                change = Change(
                    action="change", table=table, key=key, there=existing[key], wanted=values
                )
                if not table.changes:
                    raise _fixed(change)
                changes.append(change)
    before = {item.name for item in services(connection)}
    after = {key[0] for key in wanted.get("services", {})} | (
        before - {item.key[0] for item in removed if item.table.name == "services"}
    )
    ruled, rules = len(senders(connection)), wanted.get("senders", {})
    unruled = sum(item.table.name == "senders" for item in removed)
    return Difference(
        changes=(*reversed(removed), *changes),
        kept=tuple(kept),
        refused=refused(connection, after) if not before else {},
        any_again=bool(before) and not after,
        only_senders=bool(rules) and not ruled,
        any_sender=0 < ruled == unruled and not rules,
        breaking=tuple(_breaking(changes)),
    )


def _breaking(changes: Iterable[Change]) -> Iterator[str]:
    """Yield why new versions of message types reject bodies of the versions before them."""
    for change in changes:
        if change.table.name != "message_types" or change.wanted is None or change.before is None:
            continue
        name, version = change.key
        before, older = change.before
        if any(number in range(before, version) for number in change.wanted.get("upcasts", ())):
            continue
        for field_, problem in breaks(older["schema"], change.wanted["schema"]):
            yield f"{name} version {version} cannot read version {before}: {field_} {problem}"


def apply(
    connection: psycopg.Connection[Any],
    wanted: Mapping[str, Entries],
    shown: Difference,
    *,
    prune: bool,
    discard: bool,
) -> None:
    """Apply the difference that was shown, in one transaction.

    Raises:
        ConfigurationError: the difference has changed since; nothing is changed.
        UsageError: a change has failed; nothing is changed.
    """
    with connection.transaction():
        now = difference(connection, wanted, prune=prune)
        if now != shown or now.refused.keys() != shown.refused.keys():
            raise ConfigurationError(
                "it was changed meanwhile: nothing was done; run the command again"
            )
        for change in shown.changes:
            change.make(connection, discard=discard)


def listed(connection: psycopg.Connection[Any]) -> dict[str, Entries]:
    """Return all entries of a broker, by the names of tables."""
    return {table.name: table.listed(connection) for table in TABLES}


def broker_id(connection: psycopg.Connection[Any]) -> str:
    """Return the broker's id, which identifies it under any name."""
    return str(of_broker(connection, BROKER)[0])


def _before(key: Key, entries: Entries) -> tuple[int, Values] | None:
    """Return the version before that of a key, and its values."""
    name, version = key
    older = [number for other, number in entries if other == name and number < version]
    return (max(older), entries[name, max(older)]) if older else None


def _fixed(change: Change) -> ConfigurationError:
    if change.table.name == "message_types" and change.there and change.wanted:
        schemas = change.there["schema"], change.wanted["schema"]
        if None not in schemas:
            name, version = change.key
            return ConfigurationError(
                f"{change.table.described(change.key)} exists and cannot be changed, because "
                f"receivers rely on it: {', '.join(changed_fields(*schemas))} differ. Give the "
                f"new form of {name} version {version + 1}"
            )
    return ConfigurationError(
        f"{change.table.described(change.key)} exists and cannot be changed "
        f"({'; '.join(change.details())}): use another name or version in the plan, or remove "
        "the existing one"
    )


def _is_worth_saying(field: str, wanted: object) -> bool:
    """Return whether a value differs from the default of a new entry."""
    if isinstance(wanted, bool):
        return wanted != (field == "enabled")
    return wanted is not None and wanted != {}


def _said(value: object) -> str:
    """Return a value as text for humans.

    >>> _said(None), _said(("writer", "dialog")), _said("at_least_once")
    ('none', 'writer and dialog', 'at_least_once')
    """
    if isinstance(value, (tuple, list)):
        return " and ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "none" if value is None else str(value)
