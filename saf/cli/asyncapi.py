"""``saf asyncapi``: a document of an application's events."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from saf.cli.brokers import Commands
from saf.cli.console import echo
from saf.operating.asyncapi import document
from saf.typed.modules import imported

app = Commands(help="AsyncAPI documents of an application's events.")


@app.callback()
def _group() -> None:
    """Keep the name of the only command."""


@app.command()
def export(
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE", help="Python module with the events, such as shop.events."
        ),
    ],
    *,
    send_to: Annotated[
        list[str] | None,
        typer.Option(metavar="SERVICE", help="Service that the events are sent to; repeatable."),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Title of the document. Default: the module's name.")
    ] = None,
    api_version: Annotated[str, typer.Option(help="Version of the document.")] = "1.0.0",
) -> None:
    """Print an AsyncAPI 3 document of a module's events.

    The workers of the module tell which events they receive. JSON, which is YAML, too.
    """
    found = document(imported(module), title=title, version=api_version, send_to=send_to or ())
    for line in json.dumps(found, indent=2, ensure_ascii=False).splitlines():
        echo(line)
