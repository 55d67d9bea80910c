"""The tables of a broker's plan: how the entries of each are listed, created and removed.

    [brokers.shop]
    services = ["shop"]                               names
    [brokers.shop.grants]                             a value by name
    shop_app = ["writer"]
    [brokers.shop.routers.departures]                 values by name
    kind = "sql"
    [[brokers.shop.routes]]                           rows
    service = "billing"

All four forms become *values* by *key*; a key is a tuple that identifies an entry. `TABLES` is in
the order of creation; entries are removed in the reverse order.

Grants are read back from PostgreSQL, which stores rights, but not the duties that they were granted
for. So `granted` compares a role's rights with those of each kind of `saf.broker.grants`. Kinds
whose rights are covered by the role's other kinds are left out: an operator may do everything that
a purger may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

import psycopg

from saf.broker import grants, senders, services
from saf.broker.fairness import Column
from saf.broker.grants import RIGHTS, Kind
from saf.database import fetch
from saf.dialogs import contracts
from saf.dialogs.contracts import message_types
from saf.errors import ConfigurationError
from saf.operating.plans import adoptions, captures, schedules
from saf.receiving.dispatch import stored
from saf.routing import routers, routes
from saf.schedules import stored as stored_schedules

Connection: TypeAlias = psycopg.Connection[Any]
Key: TypeAlias = tuple[Any, ...]
Values: TypeAlias = Mapping[str, Any]
Entries: TypeAlias = dict[Key, Values]
Right: TypeAlias = tuple[str, str, str | None]
"""Table, privilege and column; None is for the whole table."""

CLASSES: Column = "message_type"
"""Column whose values are weighted, unless another one is named."""
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


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a plan."""

    name: str
    """Name of the table in the file."""
    one: str
    """Word for one entry."""
    listed: Callable[[Connection], Entries]
    """Lists a broker's entries."""
    create: Callable[[Connection, Key, Values], object]
    """Creates an entry; in a table with ``changes``, also updates an existing one."""
    remove: Callable[[Connection, Key, bool], object] | None = None
    """Removes an entry; the bool allows discarding its messages. None: entries are permanent."""
    changes: bool = False
    key: tuple[str, ...] = ("name",)
    """Fields of the key; if the table has rows, the rows contain these fields."""
    names: bool = False
    """True if entries are only names."""
    value: str | None = None
    """The only field, if a name maps directly to its value."""
    once: tuple[str, ...] = ()
    """Fields that count only when an entry is created, and are not compared later."""
    hidden: tuple[str, ...] = ()
    """Fields whose values are not shown."""
    observed: tuple[str, ...] = ()
    """Fields that are not in a file: how the broker should be follows from the others."""

    def entries(self, table: Any) -> Entries:
        """Return the entries of the file's table, by key.

        Raises:
            ConfigurationError: an entry is repeated.
        """
        if isinstance(table, Mapping):
            return {
                (name,): {self.value: values} if self.value else dict(values)
                for name, values in table.items()
            }
        rows = [entry if isinstance(entry, Mapping) else {self.key[0]: entry} for entry in table]
        found: Entries = {}
        for row in rows:
            key = tuple(row[field] for field in self.key)
            if key in found:
                raise ConfigurationError(f"{self.described(key)} appears twice")
            found[key] = {field: value for field, value in row.items() if field not in self.key}
        return found

    def written(self, entries: Entries) -> Any:
        """Return the file's table for these entries; the inverse of `entries`."""
        entries = {
            key: {field: value for field, value in values.items() if field not in self.observed}
            for key, values in entries.items()
        }
        if len(self.key) > 1:
            return [dict(zip(self.key, key, strict=True)) | dict(v) for key, v in entries.items()]
        if self.names:
            return [key[0] for key in entries]
        return {key[0]: v[self.value] if self.value else dict(v) for key, v in entries.items()}

    def same(self, there: Values, wanted: Values) -> bool:
        """Return whether a broker's entry matches the plan."""
        return all(there[field] == wanted[field] for field in there if field not in self.once)

    def described(self, key: Key) -> str:
        """Describe an entry in words."""
        named = [
            str(part) if field == "name" else f"{field} {part}"
            for field, part in zip(self.key, key, strict=True)
            if part is not None
        ]
        return f"{self.one} {', '.join(named)}"


def _message_types(connection: Connection) -> Entries:
    return {
        (message_type.name, message_type.version): {
            "validation": message_type.validation,
            "schema": message_type.schema,
        }
        for message_type in message_types(connection)
    }


def _create_type(connection: Connection, key: Key, values: Values) -> None:
    name, version = key
    given = {field: values[field] for field in ("validation", "schema")}
    contracts.create_message_type(connection, name, version=version, **given)


def _contracts(connection: Connection) -> Entries:
    # the last version wins
    newest = {item.name: item.version for item in message_types(connection)}
    return {
        (contract.name, contract.version): {
            "types": {item.name: item.sent_by for item in contract.types.values()},
            "type_versions": {
                item.name: item.version
                for item in contract.types.values()
                if item.version != newest[item.name]
            },
        }
        for contract in contracts.contracts(connection)
    }


def _create_contract(connection: Connection, key: Key, values: Values) -> None:
    name, version = key
    contracts.create_contract(connection, name, version=version, **values)


def _services(connection: Connection) -> Entries:
    return {(service.name,): {} for service in services.services(connection)}


def _subscriptions(connection: Connection) -> Entries:
    """Return subscriptions, without the services' own, which come and go with their service."""
    return {
        (item.name,): {"service": item.service}
        for item in services.subscriptions(connection)
        if item.service != item.name
    }


def _subscribe(connection: Connection, key: Key, values: Values) -> None:
    start: services.Start = "now" if values["from_now"] else "beginning"
    services.create_subscription(connection, *key, service=values["service"], start=start)


def _limits(connection: Connection) -> Entries:
    """Return the subscriptions that have limits, also services' own."""
    return {
        (item.name,): {"rate": item.rate, "concurrency": item.concurrency}
        for item in services.subscriptions(connection)
        if item.limits
    }


def _fairness(connection: Connection) -> Entries:
    """Return the subscriptions whose messages are shared out, also services' own."""
    return {
        (item.name,): {
            "fair_by": item.fairness.fair_by,
            "priority": dict(item.fairness.priority),
            "priority_by": None if item.priority_by == CLASSES else item.priority_by,
        }
        for item in services.subscriptions(connection)
        if item.fairness
    }


def _be_fair(connection: Connection, key: Key, values: Values) -> None:
    by = values["priority_by"] or CLASSES
    services.set_fairness(connection, *key, **{**values, "priority_by": by})


def _endpoints(connection: Connection) -> Entries:
    return {
        (name,): {"url": url, "subscription": subscription, "settings": settings}
        for name, subscription, url, settings in stored.listed(connection)
    }


def _routers(connection: Connection) -> Entries:
    return {
        (item.router.service,): {
            "kind": item.router.kind,
            "expression": item.router.expression,
            "once_per": item.router.once_per,
            "mode": item.mode,
            "comment": item.comment,
            "enabled": item.enabled,
        }
        for item in routes.configuration(connection).routers
    }


def _add_router(connection: Connection, key: Key, values: Values) -> None:
    given = {field: value for field, value in values.items() if field != "enabled"}
    routers.add_router(connection, *key, **given)
    if not values["enabled"]:
        routers.enable_router(connection, *key, enabled=False)


def _routes(connection: Connection) -> Entries:
    return {
        (item.route.service, item.route.broker, item.route.destination): {
            "quality": item.route.quality,
            "expires_at": item.expires_at,
            "comment": item.comment,
            "local": item.local,
            "enabled": item.enabled,
        }
        for item in routes.configuration(connection).routes
    }


def _add_route(connection: Connection, key: Key, values: Values) -> None:
    given = {field: value for field, value in values.items() if field != "enabled"}
    routes.add_route(connection, **_named_route(key), **given)
    if not values["enabled"]:
        routes.enable_route(connection, **_named_route(key), enabled=False)


def _named_route(key: Key) -> dict[str, Any]:
    service, broker, destination = key
    return {
        "service": service,
        "broker": UUID(broker) if broker else None,
        "destination": destination,
    }


def _grants(connection: Connection) -> Entries:
    return {(role,): {"kinds": kinds} for role, kinds in granted(connection).items()}


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


def _senders(connection: Connection) -> Entries:
    return {
        (rule.role, rule.from_service, rule.to_service): {} for rule in senders.senders(connection)
    }


TABLES = (
    Table(
        name="message_types",
        one="message type",
        key=("name", "version"),
        listed=_message_types,
        create=_create_type,
    ),
    Table(
        name="contracts",
        one="contract",
        key=("name", "version"),
        listed=_contracts,
        create=_create_contract,
        # without a version, a type's newest version is chosen at creation
        once=("type_versions",),
    ),
    Table(
        name="services",
        one="service",
        names=True,
        listed=_services,
        # the difference shows what this means for others
        create=lambda connection, key, _: services.create_service(
            connection, *key, refuse_others=True
        ),
        remove=lambda connection, key, discard: services.remove_service(
            connection, *key, discard=discard
        ),
    ),
    Table(
        name="subscriptions",
        one="subscription",
        listed=_subscriptions,
        create=_subscribe,
        remove=lambda connection, key, discard: services.remove_subscription(
            connection, *key, discard=discard
        ),
    ),
    Table(
        name="limits",
        one="limits of subscription",
        listed=_limits,
        create=lambda connection, key, values: services.limit(connection, *key, **values),
        remove=lambda connection, key, _: services.limit(
            connection, *key, rate=None, concurrency=None
        ),
        changes=True,
    ),
    Table(
        name="fairness",
        one="fairness of subscription",
        listed=_fairness,
        create=_be_fair,
        remove=lambda connection, key, _: services.set_fairness(connection, *key),
        changes=True,
    ),
    Table(
        name="endpoints",
        one="endpoint",
        listed=_endpoints,
        create=lambda connection, key, values: stored.put(connection, *key, **values),
        remove=lambda connection, key, _: stored.remove(connection, *key),
        changes=True,
    ),
    Table(
        name="topics",
        one="topic",
        names=True,
        listed=lambda connection: {(name,): {} for name in routes.topics(connection)},
        create=lambda connection, key, _: routes.add_topic(connection, *key),
        remove=lambda connection, key, _: routes.remove_topic(connection, *key),
    ),
    Table(
        name="routers",
        one="router",
        listed=_routers,
        create=_add_router,
        remove=lambda connection, key, _: routers.remove_router(connection, *key),
        changes=True,
    ),
    Table(
        name="routes",
        one="route",
        key=("service", "broker", "destination"),
        listed=_routes,
        create=_add_route,
        remove=lambda connection, key, _: routes.remove_route(connection, **_named_route(key)),
        changes=True,
    ),
    Table(
        name="schedules",
        one="schedule",
        listed=schedules.listed,
        create=schedules.create,
        remove=lambda connection, key, _: stored_schedules.remove(connection, *key),
        changes=True,
        hidden=("body", "body_base64"),
    ),
    Table(
        name="captures",
        one="capture of",
        listed=captures.listed,
        create=captures.create,
        remove=lambda connection, key, _: captures.remove(connection, key),
        changes=True,
        observed=("triggers",),
    ),
    Table(
        name="adoptions",
        one="adoption of",
        listed=adoptions.listed,
        create=adoptions.create,
        remove=lambda connection, key, _: adoptions.remove(connection, key),
        changes=True,
        observed=("triggers",),
    ),
    Table(
        name="grants",
        one="role",
        value="kinds",
        listed=_grants,
        create=lambda connection, key, values: grants.grant(connection, key[0], values["kinds"]),
        remove=lambda connection, key, _: grants.grant(connection, key[0], ()),
        changes=True,
    ),
    Table(
        name="senders",
        one="sender",
        key=("role", "from_service", "to_service"),
        listed=_senders,
        # the difference shows what the first and the last rule mean for others
        create=lambda connection, key, _: senders.add_senders(
            connection, key[0], key[1], [key[2]], refuse_others=True
        ),
        remove=lambda connection, key, _: senders.remove_senders(
            connection, key[0], key[1], [key[2]], allow_others=True
        ),
    ),
)
"""All tables of a plan."""
