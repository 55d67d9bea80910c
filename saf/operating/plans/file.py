"""The file of a plan: what brokers should have, by their names in saf.toml.

    [brokers.mom]                            # a broker, a fleet or a destination
    services = ["billing", "orders"]

    [brokers.mom.subscriptions.audit]        # a further reader; each service has its own
    service = "billing"                      # without: all services

    [brokers.mom.limits.billing]             # of all receivers of a subscription together
    rate = "100/s"
    concurrency = 4

    [brokers.mom.fairness.billing]           # how its messages are shared out
    fair_by = "header:tenant"
    priority = { Alarm = 10 }

    [[brokers.shop.routes]]
    service = "billing"
    destination = "mom"

    [brokers.shop.schedules.nightly]         # those of code are not in a plan
    service = "reports"
    cron = "0 2 * * *"

    [brokers.shop.captures."public.orders"]  # a table's changes as messages
    service = "billing"
    key = "number"
    columns = ["number", "total"]

    [brokers.shop.adoptions."public.outbox"] # an outbox table whose rows are messages
    fields = { to_service = "topic", key = "aggregateid", body = "payload" }
    rows = "delete"

    [brokers.shop.grants]
    shop_app = ["writer"]

    events = ["shop.events"]                 # modules whose saf.event classes are message types

A table that is missing in the file is left unchanged at its broker. An empty table
(``routes = []``) means that the broker should have no entries. Unknown names are rejected, as in
saf.toml (`read`). So are routes to destinations that saf.toml does not have (`check`).

A plan may also be written from the entries of a broker (`broker_plan`, `as_tables`). `document`
writes the TOML, as far as plans need it, because Python can only read TOML.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict

from saf import config
from saf.broker.fairness import Column, Fairness
from saf.broker.grants import Kind
from saf.broker.services import MOST_DELIVERIES
from saf.capture.rows import Field, Rows
from saf.config import ENCODING, Name, Settings, did_you_mean
from saf.destinations.settings import Rate
from saf.errors import ConfigurationError, UsageError
from saf.operating.plans import adoptions, captures, schedules
from saf.operating.plans.tables import CLASSES, TABLES, Entries, in_kinds, rights_of
from saf.receiving.dispatch import stored
from saf.routing import routers
from saf.typed import modules
from saf.typed.event import Event

WIDTH = 80
"""Columns of a line of TOML; longer lists take a line for each item."""
LAST_OF_FOUR_DIGITS = 0xFFFF
"""Last character whose escape has four digits."""
BARE = re.compile(r"[A-Za-z0-9_-]+")
"""Names that TOML takes without quotes."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _parsed(schema: object) -> object:
    """Parse a JSON Schema, which may be JSON text, because TOML has no null."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


class MessageType(_Table):
    """A version of a message type; see `saf.create_message_type`."""

    name: Name
    version: int = 1
    validation: Literal["none", "empty", "json", "json_schema"] = "none"
    schema_: Annotated[dict[str, Any] | None, BeforeValidator(_parsed)] = pydantic.Field(
        default=None, alias="schema"
    )


class Contract(_Table):
    """A version of a contract; see `saf.create_contract`."""

    name: Name
    version: int = 1
    types: dict[str, Literal["initiator", "target", "any"]]
    type_versions: dict[str, int] = {}


class Subscription(_Table):
    """A reader in addition to the services' own."""

    service: Name | None = None
    """Service whose messages it reads; None: all services."""
    from_now: bool = False
    """True if a new subscription reads only messages that are stored after its creation."""


class Limits(_Table):
    """What the receivers of a subscription may take together; see `saf.broker.services.limit`."""

    rate: Rate | None = None
    """Most messages in a time, e.g. 100/s; None: unlimited."""
    concurrency: Annotated[int, pydantic.Field(ge=1, le=MOST_DELIVERIES)] | None = None
    """Most deliveries at a time; None: unlimited."""


class Fair(_Table):
    """How a subscription's messages are shared out; see `saf.broker.services.set_fairness`."""

    fair_by: str | None = None
    """What makes a message's group; None: all messages are one group."""
    priority: dict[str, float] = {}
    """Weight of each class; others have weight 1."""
    priority_by: Column | None = None
    """Column of the classes; None: message_type."""

    @pydantic.field_validator("priority_by")
    @classmethod
    def _has_one_form(cls, column: Column | None) -> Column | None:
        return None if column == CLASSES else column

    @pydantic.model_validator(mode="after")
    def _makes_something_fair(self) -> Fair:
        by = self.priority_by or (CLASSES if self.priority else None)
        try:
            found = Fairness(fair_by=self.fair_by, priority_by=by, priority=self.priority)
        except UsageError as error:
            raise ValueError(str(error)) from None
        if not found:
            raise ValueError("give fair_by, priority or both")
        return self


class Endpoint(_Table):
    """An endpoint stored in a broker; see `saf.receiving.dispatch.stored`."""

    url: str
    subscription: Name | None = None
    """Subscription whose messages are sent; None: the subscription with the endpoint's name."""
    settings: dict[str, Any] = {}
    """Settings as in saf.toml; secrets are names of environment variables."""


class Route(config.Route):
    """A row of saf.route."""

    local: bool = False
    """True if senders store the route's messages in this broker's inbox themselves."""
    enabled: bool = True


class Router(config.Router):
    """A row of saf.router."""

    enabled: bool = True


class Sender(_Table):
    """A rule: a role may send as a service, to a service; see `saf.broker.senders`."""

    role: str
    from_service: Name
    to_service: Name | None = None
    """Service that the role may send to; None: any."""


class Schedule(_Table):
    """A schedule; see `saf.schedules.add`."""

    service: Name
    cron: str | None = None
    every: str | None = None
    zone: str = "UTC"
    anchor: datetime | None = None
    missed: Literal["none", "one", "all"] = "one"
    key: str | None = None
    message_type: Name | None = None
    headers: dict[str, Any] = {}
    from_service: Name | None = None
    to_broker: UUID | None = None
    body: str = ""
    """Text: JSON, if it is an object or a list."""
    body_base64: str | None = None
    """A body that is not text, instead."""


class Capture(_Table):
    """A table's changes as messages; see `saf.capture.stored.Declaration`."""

    service: Name
    key: str
    columns: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]
    """All columns are written out: a plan says what it sends."""
    when: str | None = None
    from_service: Name | None = None
    message_type: Name | None = None
    """Beginning of the message types. Default: the table's name."""


class Adoption(_Table):
    """An outbox table whose rows are messages; see `saf.capture.adoption.Declared`."""

    fields: dict[Field, str]
    """Columns of fields of messages, or expressions in parentheses."""
    service: Name | None = None
    message_type: Name | None = None
    from_service: Name | None = None
    where: str | None = None
    rows: Rows = "keep"
    mark: dict[str, str] = {}
    order: str | None = None
    """Column of the order of old rows; None: the primary key."""
    old: bool = True
    """False: existing rows are left to the old relay."""


class BrokerPlan(_Table):
    """Plan of one broker; `saf.operating.plans.tables` has the same names."""

    events: tuple[str, ...] = ()
    """Modules whose events are message types; see `saf.typed.event`."""
    message_types: tuple[MessageType, ...] = ()
    contracts: tuple[Contract, ...] = ()
    services: tuple[Name, ...] = ()
    subscriptions: dict[Name, Subscription] = {}
    limits: dict[Name, Limits] = {}
    """Limits of subscriptions; each service has one of its own name."""
    fairness: dict[Name, Fair] = {}
    """How messages of subscriptions are shared out."""
    endpoints: dict[Name, Endpoint] = {}
    topics: tuple[Name, ...] = ()
    routers: dict[Name, Router] = {}
    routes: tuple[Route, ...] = ()
    schedules: dict[Name, Schedule] = {}
    captures: dict[str, Capture] = {}
    """By table, with its schema."""
    adoptions: dict[str, Adoption] = {}
    """By table, with its schema."""
    grants: dict[str, Annotated[tuple[Kind, ...], pydantic.Field(min_length=1)]] = {}
    senders: tuple[Sender, ...] = ()

    def entries(self) -> dict[str, Entries]:
        """Return the wanted entries of the plan's tables, by the names of tables.

        Raises:
            ConfigurationError: an entry is repeated.
        """
        given = self.model_dump(include=self.model_fields_set, by_alias=True)
        found = {
            table.name: table.entries(given[table.name]) for table in TABLES if table.name in given
        }
        if self.events:
            types = found.setdefault("message_types", {})
            for event in self._events():
                if (key := (event.name, event.version)) in types:
                    raise ConfigurationError(
                        f"message type {event.name}, version {event.version} appears twice, once "
                        f"as {event.model.__module__}.{event.model.__qualname__}"
                    )
                types[key] = {"validation": "json_schema", "schema": event.schema} | (
                    {"upcasts": sorted(event.upcasts)} if event.upcasts else {}
                )
        for (name,), values in found.get("endpoints", {}).items():
            stored.check(name, values["url"], values["settings"])
            found["endpoints"][name,] = {
                **values,
                "subscription": values["subscription"] or name,
            }
        if "schedules" in found:
            found["schedules"] = {
                (name,): schedules.checked(name, values)
                for (name,), values in found["schedules"].items()
            }
        for name, router in self.routers.items():
            try:
                routers.check(router.as_configured(name))
            except UsageError as error:
                raise ConfigurationError(f"routers.{name}: {error}") from None
        if "captures" in found:
            found["captures"] = {
                (table,): captures.checked(table, values)
                for (table,), values in found["captures"].items()
            }
        if "adoptions" in found:
            found["adoptions"] = {
                (table,): adoptions.checked(table, values)
                for (table,), values in found["adoptions"].items()
            }
        if "routes" in found:
            found["routes"] = {
                (service, broker and str(broker), destination): values
                for (service, broker, destination), values in found["routes"].items()
            }
        if "grants" in found:
            found["grants"] = {
                role: {"kinds": in_kinds(rights_of(values["kinds"]))}
                for role, values in found["grants"].items()
            }
        return found

    def _events(self) -> Iterator[Event[Any]]:
        for name in self.events:
            try:
                yield from modules.events(modules.imported(name))
            except UsageError as error:
                raise ConfigurationError(f"events: {error}") from None


class Plan(_Table):
    """Plans of all brokers."""

    brokers: dict[Name, BrokerPlan]


def read(path: Path) -> Plan:
    """Read and check a plan.

    Raises:
        ConfigurationError: names the file, the setting and the value at fault.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding=ENCODING))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from None
    try:
        plan = Plan(**tables)
    except pydantic.ValidationError as error:
        problems = "; ".join(map(_explained, error.errors()))
        raise ConfigurationError(f"{path}: {problems}") from None
    except TypeError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    for name, broker in plan.brokers.items():
        try:
            broker.entries()
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: brokers.{name}: {error}") from None
    return plan


def _explained(problem: Any) -> str:
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        *table, name = where
        models: dict[int, type[BaseModel]] = {0: Plan, 2: BrokerPlan}
        known = models[len(table)].model_fields if len(table) in models else ()
        return f"unknown setting {'.'.join(where)}{did_you_mean(name, known)}"
    return f"{'.'.join(where)}: {str(problem['msg']).removeprefix('Value error, ')}"


def check(plan: Plan, settings: Settings) -> None:
    """Check that routes lead to destinations of saf.toml, with a quality that these support.

    Raises:
        ConfigurationError: names the route.
    """
    for name, broker in plan.brokers.items():
        for number, route in enumerate(broker.routes):
            where = f"brokers.{name}.routes.{number}"
            destination = settings.destinations.get(route.destination)
            if destination is None:
                raise ConfigurationError(
                    f"{where}: no [destinations.{route.destination}] in saf.toml"
                    f"{did_you_mean(route.destination, settings.destinations)}"
                )
            try:
                destination.check_quality(route.quality)
            except ValueError as error:
                raise ConfigurationError(f"{where}.quality: {error}") from None


def broker_plan(entries: Mapping[str, Entries]) -> BrokerPlan:
    """Return a broker's plan with these entries; the inverse of `BrokerPlan.entries`.

    Raises:
        ConfigurationError: an entry cannot be expressed in a plan; the error names it.
    """
    values = {
        table.name: table.written(entries[table.name]) for table in TABLES if table.name in entries
    }
    try:
        return BrokerPlan(**values)
    except pydantic.ValidationError as error:
        problems = "; ".join(map(_explained, error.errors()))
        raise ConfigurationError(f"a plan cannot express an existing entry: {problems}") from None


def as_tables(plan: BrokerPlan) -> dict[str, Any]:
    """Return all tables of a plan, for `document`, without values that are defaults."""
    values = plan.model_dump(exclude_defaults=True, by_alias=True)
    for entry in values.get("message_types", ()):
        if "schema" in entry:
            entry["schema"] = json.dumps(entry["schema"])
    empty = plan.model_dump(by_alias=True)
    return {table.name: values.get(table.name, empty[table.name]) for table in TABLES}


def document(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the lines of a table: first its values, then its tables, then its arrays of tables.

    >>> print(*document({"a": {"names": ["x"], "b c": {"n": 1}, "rows": [{"s": "it's"}]}}), sep="|")
    [a]|names = ["x"]||[a."b c"]|n = 1||[[a.rows]]|s = "it's"|
    """
    values = {name: item for name, item in table.items() if not _tables(item) and not _rows(item)}
    if values and path:
        yield f"[{_name(path)}]"
    for name, item in values.items():
        yield from _assigned(_name((name,)), item)
    if values:
        yield ""
    for name, item in table.items():
        if _tables(item):
            yield from document(item, (*path, name)) if item else [f"[{_name((*path, name))}]", ""]
    for name, rows in table.items():
        for row in rows if _rows(rows) else ():
            yield f"[[{_name((*path, name))}]]"
            for field, item in row.items():
                yield from _assigned(_name((field,)), item)
            yield ""


def _tables(value: object) -> bool:
    return isinstance(value, Mapping)


def _rows(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _assigned(name: str, value: object) -> Iterator[str]:
    line = f"{name} = {_value(value)}"
    if len(line) <= WIDTH or not isinstance(value, (list, tuple)):
        yield line
        return
    yield f"{name} = ["
    yield from (f"    {_value(item)}," for item in value)
    yield "]"


def _value(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{_name((str(name),))} = {_value(item)}" for name, item in value.items()
        )
        return f"{{{inside}}}" if not inside else f"{{ {inside} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value, default=str)  # e.g. an id


def _text(text: str) -> str:
    r"""Return a TOML string, as in JSON; characters that do not print become escapes.

    >>> print(_text("Zürich\xad \x85 \x7f \U000e0001 \t"))
    "Zürich\u00ad \u0085 \u007f \U000e0001 \t"
    """
    return "".join(
        character if character.isprintable() else _escape(ord(character))
        for character in json.dumps(str(text), ensure_ascii=False)
    )


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= LAST_OF_FOUR_DIGITS else f"\\U{code:08x}"


def _name(path: tuple[str, ...]) -> str:
    return ".".join(part if BARE.fullmatch(part) else _text(part) for part in path)
