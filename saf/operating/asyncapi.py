"""AsyncAPI: a document, version 3, of the events of an application's module.

    channels      a service, with the events that go to it
    operations    "receive" for each worker of the module; "send" for each service that is named
    messages      an event, with the JSON Schema of its body; `x-saf-key` names the field of its key

A worker of the module tells which events it receives: those with a handler. Nothing tells where a
module sends its events, so the caller names the services. The bodies' schemas are shared
definitions below `components`, because a reference of AsyncAPI starts at the document.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from saf.errors import UsageError
from saf.receiving.loop import Loop
from saf.typed.event import VERSION, Event
from saf.typed.modules import events

NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
SCHEMAS = "#/components/schemas/"


def document(
    module: ModuleType, *, title: str | None, version: str, send_to: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the document of a module's events.

    Args:
        module: the module with the events and, possibly, with workers.
        title: title of the document. Default: the module's name.
        version: version of the document.
        send_to: services that the events are sent to.

    Raises:
        UsageError: the module has no event, an event has no JSON Schema, or two services would
            have one name.
    """
    found = events(module)
    names = {id(event): _name(event) for event in found}
    channels: dict[str, dict[str, Any]] = {}
    operations: dict[str, Any] = {}

    def operate(action: str, service: str, these: Iterable[Event[Any]]) -> None:
        name = _as_name(service)
        channel = channels.setdefault(name, {"address": service, "messages": {}})
        if channel["address"] != service:
            raise UsageError(f"{service!r} and {channel['address']!r} would both be channel {name}")
        keys = [names[id(event)] for event in these]
        channel["messages"] |= {key: {"$ref": f"#/components/messages/{key}"} for key in keys}
        operations[f"{action}-{name}"] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{key}"} for key in keys],
        }

    for subscription, types in _received(module).items():
        if handled := [event for event in found if event.name in types]:
            operate("receive", subscription, handled)
    for service in send_to:
        operate("send", service, found)
    payloads, schemas = _payloads(found)
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title or module.__name__, "version": version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {
                names[id(event)]: _message(event, payload)
                for event, payload in zip(found, payloads, strict=True)
            },
            "schemas": schemas,
        },
    }


def _received(module: ModuleType) -> dict[str, set[str]]:
    """Return the message types that a module's workers handle, by subscription."""
    found: dict[str, set[str]] = defaultdict(set)
    for value in vars(module).values():
        if isinstance(value, Loop):
            found[value.subscription].update(value.message_types)
    return dict(sorted(found.items()))


def _payloads(found: Sequence[Event[Any]]) -> tuple[list[Any], dict[str, Any]]:
    """Return the schema of each event's body, and the definitions that they share."""
    from pydantic import TypeAdapter

    for event in found:
        _ = event.schema  # raises a `UsageError` without one
    inputs = [(number, "validation", event.adapter) for number, event in enumerate(found)]
    by_input, shared = TypeAdapter.json_schemas(inputs, ref_template=SCHEMAS + "{model}")  # type: ignore[arg-type]
    return [by_input[number, "validation"] for number, *_ in inputs], shared.get("$defs", {})


def _message(event: Event[Any], payload: Any) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": event.name,
        "title": f"{event.name} version {event.version}",
        "contentType": "application/json",
        "payload": payload,
        "x-saf-version": event.version,
    }
    if (text := event.model.__doc__) and not text.startswith(f"{event.model.__name__}("):
        message["summary"] = inspect.cleandoc(text).partition("\n")[0]
    if event.key is not None:
        message["x-saf-key"] = event.key
    if event.version > 1:
        message["headers"] = {
            "type": "object",
            "required": [VERSION],
            "properties": {VERSION: {"type": "integer", "const": event.version}},
        }
    return message


def _name(event: Event[Any]) -> str:
    return _as_name(event.name) + (f".v{event.version}" if event.version > 1 else "")


def _as_name(text: str) -> str:
    """Return text as a name within a document.

    >>> _as_name("//example.com/orders")
    '__example.com_orders'
    """
    return NOT_IN_NAMES.sub("_", text)
