"""Two ends of dialogs for tests: a shop in one database, a warehouse in the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from tests.pipeline import Cycle, connect, drain, forwarding_rules

SHOP, WAREHOUSE = "shop", "warehouse"
END, ERROR, TIMER = "saf/end-dialog", "saf/error", "saf/dialog-timer"

REFUSES = """
CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'not this one'; END $$;
CREATE TRIGGER refuses BEFORE INSERT ON saf.inbox
FOR EACH ROW WHEN (NEW.sequence = {number}) EXECUTE FUNCTION refuses();
"""
"""A database that takes no message with this number."""

Handle = Callable[[psycopg.Connection[Any], saf.Received], None]


def prepare(app: Dsn, mom: Dsn) -> None:
    """Each service where it lives, and a contract at both ends."""
    for dsn, service in ((app, SHOP), (mom, WAREHOUSE)):
        with connect(dsn) as connection:
            services.create_service(connection, service)
            know_contract(connection)


def know_contract(connection: psycopg.Connection[Any]) -> None:
    order = {"type": "object", "properties": {"amount": {"type": "integer"}}}
    saf.create_message_type(connection, "order", validation="json_schema", schema=order)
    saf.create_message_type(connection, "cancel", validation="empty")
    saf.create_contract(
        connection,
        "ordering",
        {"order": "initiator", "cancel": "initiator", "delivery": "target", "note": "any"},
    )


def begin(app: Dsn, *bodies: object, **options: Any) -> saf.Dialog:
    """A dialog that has sent something, in one transaction."""
    with app.connect(role="test") as connection:
        dialog = saf.begin_dialog(
            connection, **{"from_service": SHOP, "to_service": WAREHOUSE, **options}
        )
        for body in bodies:
            dialog.send(connection, body)
    return dialog


def say(dsn: Dsn, dialog: saf.Dialog, *bodies: object) -> None:
    with dsn.connect(role="test") as connection:
        for body in bodies:
            dialog.send(connection, body)


def end(dsn: Dsn, dialog: saf.Dialog) -> None:
    with dsn.connect(role="test") as connection:
        dialog.end(connection)


def forward(app: Dsn, mom: Dsn) -> None:
    """What is pending at both brokers goes to the other one."""
    for source, destination in ((app, mom), (mom, app)):
        with Cycle(source, forwarding_rules("exactly_once", 1000, there=destination)) as cycle:
            drain(cycle)


def receive(
    dsn: Dsn, service: str, handle: Handle | None = None, **options: Any
) -> list[saf.Received]:
    """Receive until nothing is due; return what was handed out, in order."""
    received: list[saf.Received] = []
    while True:
        with saf.receive(dsn, service, **options) as delivery:
            if not delivery:
                return received
            for message in delivery:
                received.append(message)
                if handle:
                    handle(delivery.connection, message)


def said(messages: list[saf.Received]) -> list[str]:
    """The messages as one reads them: their text, or the type of what is saf's own."""
    return [
        one.message_type
        if one.message_type is not None and one.message_type.startswith("saf/")
        else one.text()
        for one in messages
    ]


def states(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT state FROM saf.conversation ORDER BY created_at, handle")
    return [state for (state,) in rows]


def put(
    dsn: Dsn, dialog: saf.Dialog, sequence: int, body: str | bytes = "", **columns: Any
) -> None:
    """What a transport may do: store a message of an initiator in the target's inbox, again."""
    row = {
        "to_service": dialog.far_service,
        "from_service": dialog.service,
        "key": str(dialog.conversation_id),
        "conversation_id": dialog.conversation_id,
        "from_initiator": dialog.is_initiator,
        "sequence": sequence,
        "body": body if isinstance(body, bytes) else body.encode(),
        "headers": '{"saf-dialog": {}}',
        **columns,
    }
    with connect(dsn) as connection:
        connection.execute(
            f"INSERT INTO saf.inbox ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})",
            list(row.values()),
        )
