"""``saf router`` and ``saf transform``: functions that choose a service, or change messages.

A router is a service that stands for others; its classifier chooses one. A transform is tried on
one message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import psycopg
import typer
from psycopg.rows import dict_row

from saf.cli.alive import say_spark_starts, waiting
from saf.cli.brokers import AsJson, Brokers, Commands, Config, Name, Round, Store
from saf.cli.console import Table, echo, results_of
from saf.cli.metrics import published
from saf.cli.route import NEXT_BATCH, ask_destinations, show_explanation, show_lacking
from saf.cli.worker import StopTimeout, WorkersListen, alive, listening, supervise
from saf.columns import COLUMNS, JSON
from saf.config import did_you_mean, load, load_keys, load_signer
from saf.errors import ConfigurationError, Unavailable, UsageError
from saf.message import Message, encode
from saf.operating.places import chosen, store
from saf.operating.wording import counted
from saf.routing import functions, routers, routes
from saf.routing.matching import ARROW, FUNCTION, PYTHON, SQL, Router
from saf.routing.routes import ConfiguredRouter

if TYPE_CHECKING:
    from saf.operating.dry_run import DryRun

app = Commands(help="Routers: services that a classifier resolves.")

Service = Annotated[
    str,
    typer.Argument(metavar="SERVICE", help="Name of the router: the service of its messages."),
]
Function = "MODULE:FUNCTION"


@app.command()
def add(
    service: Service,
    *,
    sql: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help="Classifier: a Spark SQL expression.")
    ] = None,
    arrow: Annotated[
        str | None,
        typer.Option(
            metavar=Function, help="Classifier: a function of a pyarrow.RecordBatch of messages."
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar=Function, help="Classifier: a function of one message, a saf.Received."
        ),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEMA.FUNCTION",
            help="Classifier: a function of the broker's database, (body bytea) RETURNS text.",
        ),
    ] = None,
    once_per: Annotated[
        Literal["message", "key"],
        typer.Option(help="Unit that is classified once; a conversation always is."),
    ] = "message",
    mode: Annotated[
        Literal["redirect", "forward"],
        typer.Option(
            help="redirect: both ends then speak directly; forward: through `saf router serve`."
        ),
    ] = "redirect",
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="Do not check that the function exists on this machine, or in the database.",
        ),
    ] = False,
    comment: Annotated[str | None, typer.Option(help="Comment for operators.")] = None,
    round_: Brokers,
) -> None:
    """Add a router, whose classifier chooses the service of each message.

    The classifier is used from the next batch on. Routes then choose the destination of the named
    service. An existing router gets the new values, and is enabled. A router that `saf router
    serve` serves belongs to the broker where its service lives, and so does a function of the
    database.
    """
    given = {SQL: sql, ARROW: arrow, PYTHON: python, FUNCTION: function}
    expressions = [(kind, text) for kind, text in given.items() if text is not None]
    if len(expressions) != 1:
        raise UsageError("a router has one classifier: use --sql, --arrow, --python or --function")
    ((kind, expression),) = expressions
    router = Router(service=service, kind=kind, expression=expression, once_per=once_per)
    routers.check(ConfiguredRouter(router=router, origin="saf.router", mode=mode))
    if kind in (ARROW, PYTHON) and not elsewhere:
        try:
            routers.load(router)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}. If the module exists only elsewhere, add --elsewhere"
            ) from None

    def make(connection: psycopg.Connection[Any]) -> bool:
        if kind == FUNCTION and not elsewhere:
            try:
                functions.check(connection, router)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"{error}. To add the router before its function, add --elsewhere"
                ) from None
        return routers.add_router(
            connection, service, kind, expression, once_per=once_per, mode=mode, comment=comment
        )

    round_.tell("route", make, lambda new: _done(service, "added" if new else "changed"))


@app.command()
def remove(service: Service, *, round_: Brokers) -> None:
    """Remove a router: its service is an ordinary one again."""
    round_.tell(
        "route",
        lambda connection: routers.remove_router(connection, service),
        lambda _: _done(service, "removed"),
    )


@app.command()
def enable(service: Service, *, round_: Brokers) -> None:
    """Enable a disabled router."""
    _enable(service, round_, enabled=True)


@app.command()
def disable(service: Service, *, round_: Brokers) -> None:
    """Disable a router until it is enabled again.

    This also works for a router that saf.toml declares.
    """
    _enable(service, round_, enabled=False)


@app.command("list")
def list_(*, round_: Brokers, as_json: AsJson = False) -> None:
    """List the routers of the sources, and where each is defined."""
    declared = round_.settings.declared
    round_.show_rows(
        "route",
        lambda connection: routes.configuration(connection, None, declared).routers,
        "routers",
        ROUTERS,
        as_json=as_json,
    )


@app.command()
def serve(
    service: Service,
    *,
    threads: Annotated[int, typer.Option(min=1, help="Deliveries at a time, in each process.")] = 1,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes; one that dies is replaced.")
    ] = 1,
    listen: Annotated[
        bool, typer.Option("--listen", help="Wake up when messages arrive; see `saf inbox notify`.")
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Send the stored messages on, and exit.")
    ] = False,
    stop_timeout: StopTimeout = None,
    require_signed: Annotated[
        bool,
        typer.Option(
            "--require-signed", help="Refuse messages that no key of saf.toml has signed."
        ),
    ] = False,
    metrics: WorkersListen = None,
    config: Config = None,
    broker: Store = None,
) -> None:
    """Run the routing service of a router.

    It serves until SIGTERM or Ctrl-C. It receives at the broker where the service lives, and sends
    on from there, so that broker is a destination and a source. With [signing] in saf.toml, it
    signs the messages that it sends on, and refuses altered ones. Exit codes: 0 after a stop
    request; 2 if the router does not exist, or its function cannot be imported or called; 75 if
    the messages in hand took longer than the stop timeout.
    """
    from saf.receiving.stopping import STOP_SECONDS
    from saf.routing_service import RoutingService  # Arrow takes a while to import

    settings = load(config)
    ((where, place),) = store(settings, broker).items()
    serving = RoutingService(
        place.dsn,
        service,
        default_destination=settings.forwarder.default_destination,
        declared=settings.declared,
        threads=threads,
        listen=listen,
        stop_timeout=STOP_SECONDS if stop_timeout is None else stop_timeout,
        require_signed=require_signed,
        keys=load_keys(config) if settings.signing.keys or require_signed else None,
        signer=load_signer(config) if settings.signing.key_id else None,
    )
    if processes > 1 and not drain:
        arguments = [*("router", "serve", service, "--broker", where), *("--threads", str(threads))]
        arguments += ["--config", str(config)] if config else []
        arguments += ["--listen"] if listen else []
        arguments += ["--require-signed"] if require_signed else []
        arguments += [] if stop_timeout is None else ["--stop-timeout", str(stop_timeout)]
        supervise(
            [
                [sys.executable, "-m", "saf", *arguments, *listening(metrics, number)]
                for number in range(processes)
            ],
            f"saf router serve {service}",
        )
        return
    program = f"saf router serve {service}"
    with published(listen=metrics), alive(program, serving, drain=drain):
        count = serving.run(drain=drain)
    echo(f"{where}: router {service!r} has sent on {counted(count, 'message')}")


@app.command()
def explain(
    service: Service,
    *,
    body: Annotated[str, typer.Option(metavar="TEXT", help="Body of the message.")] = "",
    key: Annotated[str | None, typer.Option(help="Key of the message. Default: none.")] = None,
    message_type: Annotated[str | None, typer.Option(help="Type of the message.")] = None,
    round_: Brokers,
    as_json: AsJson = False,
) -> None:
    """Explain which service a classifier chooses for a message.

    It also shows where the message would go. Sends nothing. The classifier runs here. That of a
    router that forwards runs for the broker where its service lives. The writes of a function of
    the database are rolled back. Spark evaluates a classifier in SQL, and takes some seconds to
    start. Exit codes: 75 if the message would wait at some broker; 1 if it would become a dead
    letter.
    """
    from saf.operating.dry_run import try_out  # Arrow takes a while to import
    from saf.spark.answers import DryRuns

    message = Message(service=service, body=body, key=key, message_type=message_type)
    settings = round_.settings
    default, declared = settings.forwarder.default_destination, settings.declared
    with DryRuns(say_spark_starts) as in_sql:
        found: dict[str, DryRun] = round_.visit(
            "route", lambda connection: try_out(connection, message, default, declared, in_sql)
        )

    going = [run.goes for run in found.values() if run.waits is None and run.dead is None]
    asked = ask_destinations(settings, going)

    def show() -> None:
        for where, dry_run in found.items():
            _explain(where, dry_run, settings.destinations)
        show_lacking(asked)

    code = max((run.exit_code for run in found.values()), default=0)
    if asked.missing:
        code = code or Unavailable.exit_code
    answer = {"explanations": results_of(found), "no_service": asked.missing}
    round_.report(answer, show, as_json=as_json, found=code)


def _enable(service: str, round_: Round, *, enabled: bool) -> None:
    round_.tell(
        "route",
        lambda connection: routers.enable_router(
            connection, service, enabled=enabled, declared=round_.settings.declared
        ),
        lambda _: _done(service, "enabled" if enabled else "disabled"),
    )


def _done(service: str, done: str) -> str:
    return f"router {service!r} {done}, {NEXT_BATCH}"


ROUTERS = Table[ConfiguredRouter](
    *("service", "kind", "once per", "mode", "state", "from", "comment"),
    things="routers",
    below="classifier",
    cells=lambda row: (
        row.router.service, row.router.kind, row.router.once_per, row.mode,
        "in force" if row.enabled else "disabled", row.origin, row.comment or "",
        row.router.expression,
    ),
    plain=routers.as_dict,
)  # fmt: skip


def _explain(where: str, dry_run: DryRun, destinations: Collection[str]) -> None:
    subject = f"{where}: a message for {dry_run.service!r}"
    if dry_run.waits is not None:
        echo(f"{subject} would wait: {dry_run.waits}")
    elif dry_run.dead is not None:
        echo(f"{subject} would become a dead letter: {dry_run.dead}")
    else:
        if dry_run.goes.service != dry_run.service:
            echo(f"{subject} becomes one for {dry_run.goes.service!r}")
        show_explanation(where, dry_run.goes, destinations)


transforms = Commands(help="Transforms: functions that change messages on their way.")

DEAD = 1
COLUMN = [f"{name}::text AS {name}" if name in JSON else name for name in COLUMNS]
SENT = f"SELECT {', '.join(COLUMN)} FROM saf.outbox WHERE message_id = %(message_id)s"


@transforms.callback()
def _one_command() -> None:
    """Keep ``try`` a command of its own."""


@transforms.command("try")
def try_(
    service: Annotated[
        str, typer.Argument(metavar="SERVICE", help="Service that has a transform.")
    ],
    *,
    message: Annotated[
        UUID | None,
        typer.Option(metavar="ID", help="Message id of a message in an outbox to try."),
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Body of a message to try instead.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of that message. Default: none.")] = None,
    message_type: Annotated[str | None, typer.Option(help="Type of that message.")] = None,
    config: Config = None,
    broker: Name = None,
    as_json: AsJson = False,
) -> None:
    """Try the transform of a service on one message, and show its result.

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
        round_ = Round(chosen(settings, broker), settings)
        found = round_.visit("message", lambda connection: _sent(connection, message))
        columns = next((item for item in found.values() if item), {})
        if not columns:
            round_.finish(say=True)
            raise ConfigurationError(f"no outbox has message {message}")
    from saf.spark.evaluation import tried  # Arrow takes a while to import

    say_spark_starts()
    with waiting("Spark evaluates the transform"):
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
