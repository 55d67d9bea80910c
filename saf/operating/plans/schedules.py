"""Schedules of a plan: those that no application declares in its code.

A body is text, as for `saf schedule add`: JSON, if it is an object or a list. Whether a schedule is
paused is an operator's decision, and not part of a plan.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import psycopg

from saf.database import fetch
from saf.errors import ConfigurationError, InvalidMessage, UsageError
from saf.message import CONTENT_TYPE, encode_body
from saf.schedules import stored
from saf.schedules.stored import Declaration, declaration, text_headers
from saf.schedules.times import ANCHOR, in_units

LISTED = """
SELECT name, to_service, cron, every, zone, anchor, missed, key, message_type, headers,
       from_service, body, to_broker::text
FROM saf.schedule WHERE origin IS NULL ORDER BY name
"""


def listed(
    connection: psycopg.Connection[Any],
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return the schedules of a broker that a plan may have, by key."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for (
        name,
        service,
        cron,
        every,
        zone,
        anchor,
        missed,
        key,
        kind,
        headers,
        sender,
        *rest,
    ) in fetch(connection, LISTED):
        body, to_broker = rest
        text, binary = _text(bytes(body))
        implied = _headers(text, binary)
        found[(name,)] = {
            "service": service,
            "cron": cron,
            "every": None if every is None else in_units(every),
            "zone": zone,
            "anchor": None if anchor == ANCHOR else anchor,
            "missed": missed,
            "key": key,
            "message_type": kind,
            "headers": {n: v for n, v in (headers or {}).items() if implied.get(n) != v},
            "from_service": sender,
            "to_broker": to_broker,
            "body": text,
            "body_base64": binary,
        }
    return found


def checked(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's entry with the values that `listed` would return for it.

    Raises:
        ConfigurationError: names the value at fault.
    """
    declared = _declared(name, values)
    times = declared.times
    return {
        **values,
        "cron": times.cron,
        "every": None if times.every is None else in_units(times.every),
        "anchor": None if times.anchor == ANCHOR else times.anchor,
        "to_broker": values["to_broker"] and str(values["to_broker"]),
    }


def create(
    connection: psycopg.Connection[Any], key: tuple[Any, ...], values: Mapping[str, Any]
) -> None:
    """Add or change a schedule."""
    stored.put(connection, _declared(key[0], values))


def _declared(name: str, values: Mapping[str, Any]) -> Declaration:
    given = {
        field: value for field, value in values.items() if field not in ("body", "body_base64")
    }
    binary, body = values["body_base64"], values["body"]
    if binary is not None and body:
        raise ConfigurationError(f"schedules.{name}: give either body or body_base64")
    try:
        body = body if binary is None else b64decode(binary, validate=True)
        headers = {**_headers(values["body"], binary), **given.pop("headers")}
        return declaration(name, given.pop("service"), body, headers=headers, **given)
    except (UsageError, InvalidMessage, binascii.Error) as error:
        raise ConfigurationError(f"schedules.{name}: {error}") from None


def _text(body: bytes) -> tuple[str, str | None]:
    """Return a body as text, or in base64."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return "", b64encode(body).decode()


def _headers(text: str, binary: str | None) -> dict[str, str]:
    """Return the headers that a plan leaves out."""
    if binary is not None:
        return {CONTENT_TYPE: encode_body(b"")[1]}
    return {CONTENT_TYPE: encode_body(text)[1], **text_headers(text)}
