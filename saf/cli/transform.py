"""``saf transform``: functions of messages on their way, tried on one message."""

from __future__ import annotations

import json
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer
from psycopg.rows import dict_row

from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import echo
from saf.columns import COLUMNS, JSON
from saf.config import did_you_mean, load
from saf.errors import ConfigurationError, Unavailable, UsageError
from saf.message import Message, encode

app = typer.Typer(no_args_is_help=True, help="Transforms: functions of messages on their way.")

DEAD = 1
COLUMN = [f"{name}::text AS {name}" if name in JSON else name for name in COLUMNS]
SENT = f"SELECT {', '.join(COLUMN)} FROM saf.outbox WHERE message_id = %(message_id)s"


@app.callback()
def _one_command() -> None:
    """Keep ``try`` a command of its own."""


@app.command("try")
def try_(
    service: Annotated[
        str, typer.Argument(metavar="SERVICE", help="Service that has a transform.")
    ],
    *,
    message: Annotated[
        UUID | None,
        typer.Option(metavar="ID", help="Try the message of an outbox with this message id."),
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instead: body of the message to try.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of that message. Default: none.")] = None,
    message_type: Annotated[str | None, typer.Option(help="Type of that message.")] = None,
    config: Config = None,
    broker: Name = None,
    as_json: AsJson = False,
) -> None:
    """Show what the transform of a service returns for one message.

    Sends nothing. Spark evaluates the function here, and takes some seconds to start. Exit codes:
    75 if the messages of the service would wait, because the function itself fails; 1 if this
    message would become a dead letter.
    """
    settings = load(config)
    transforms = {item.service: item for item in settings.transforms}
    if service not in transforms:
        raise ConfigurationError(
            f"saf.toml has no [[transforms]] for {service!r}{did_you_mean(service, transforms)}"
        )
    if (message is None) == (body is None):
        raise UsageError("use either --message ID or --body TEXT")
    if message is None:
        row = encode(Message(service=service, body=body, key=key, message_type=message_type))
        columns = row._asdict()
    else:
        round_ = Round(chosen(settings, broker))
        found = round_.visit("message", lambda connection, _: _sent(connection, message))
        columns = next((item for item in found.values() if item), {})
        if not columns:
            round_.finish(say=True)
            raise ConfigurationError(f"no outbox has a message {message}")
    from saf.spark.evaluation import tried  # Arrow takes a while to import

    result = tried(
        service,
        transforms[service].function,
        columns,
        settings.forwarder.max_bytes,
        deterministic=transforms[service].deterministic,
    )
    messages = [_shown(item) for item in result.messages]
    if as_json:
        report = {"messages": messages, "dead": result.dead, "waits": result.waits}
        echo(json.dumps({"service": service, **report}))
    elif result.waits is not None:
        echo(f"messages for {service!r} would wait: {result.waits}")
    elif result.dead is not None:
        echo(f"the message would become a dead letter: {result.dead}")
    elif not messages:
        echo("the message would be left out")
    else:
        for item in messages:
            echo(json.dumps(item, ensure_ascii=False))
    failed = Unavailable.exit_code if result.waits is not None else DEAD
    raise typer.Exit(failed if result.waits is not None or result.dead is not None else 0)


def _sent(connection: psycopg.Connection[Any], message_id: UUID) -> dict[str, Any] | None:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(SENT, {"message_id": message_id}).fetchone()


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    headers = None if message["headers"] is None else json.loads(message["headers"])
    body = message["body"].decode(errors="replace")
    return {**message, "message_id": str(message["message_id"]), "headers": headers, "body": body}
