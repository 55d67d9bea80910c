"""``saf router``: services that stand for others, and their classifiers, which choose one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from saf.cli.brokers import AsJson, Brokers, Config, Name, Round, Store, chosen, store
from saf.cli.console import echo
from saf.cli.metrics import published
from saf.cli.options import grouped
from saf.cli.route import show_explanation
from saf.cli.tables import Table, results_of
from saf.cli.worker import StopTimeout, WorkersListen, listening, supervise
from saf.config import load, load_keys, load_signer
from saf.errors import ConfigurationError, UsageError
from saf.message import Message
from saf.operating.wording import counted
from saf.routing import routers, routes
from saf.routing.matching import ARROW, PYTHON, SQL, Router
from saf.routing.routes import ConfiguredRouter

if TYPE_CHECKING:
    from saf.operating.dry_run import DryRun

app = typer.Typer(no_args_is_help=True, help="Routers: services that a classifier resolves.")

Service = Annotated[
    str,
    typer.Argument(
        metavar="SERVICE", help="The router: the service that messages are addressed to."
    ),
]
Function = "MODULE:FUNCTION"


@app.command()
@grouped
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
    once_per: Annotated[
        Literal["message", "key"],
        typer.Option(help="Unit that is classified once; a conversation always is."),
    ] = "message",
    mode: Annotated[
        Literal["redirect", "forward"],
        typer.Option(
            help="redirect: at the source; forward: by a routing service, `saf router serve`."
        ),
    ] = "redirect",
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="Do not check that the function exists on this machine."),
    ] = False,
    comment: Annotated[str | None, typer.Option(help="Comment for operators.")] = None,
    round_: Brokers,
) -> None:
    """Let a classifier choose the service of each message.

    The classifier is used from the next batch on. Routes then choose the destination of the named
    service. An existing router gets the new values, and is enabled. A router that forwards belongs
    to the broker where its service lives.
    """
    expressions = {
        kind: e for kind, e in ((SQL, sql), (ARROW, arrow), (PYTHON, python)) if e is not None
    }
    if len(expressions) != 1:
        raise UsageError("a router has one classifier: use --sql, --arrow or --python")
    ((kind, expression),) = expressions.items()
    router = Router(service=service, kind=kind, expression=expression, once_per=once_per)
    routers.check(ConfiguredRouter(router=router, origin="saf.router", mode=mode))
    if kind != SQL and not elsewhere:
        try:
            routers.load(router)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}. If the module exists only elsewhere, add --elsewhere"
            ) from None
    added = round_.visit(
        "route",
        lambda connection, _: routers.add_router(
            connection, service, kind, expression, once_per=once_per, mode=mode, comment=comment
        ),
    )
    for where, new in added.items():
        _say(where, service, "added" if new else "changed")
    round_.finish(say=True)


@app.command()
def remove(service: Service, config: Config = None, broker: Name = None) -> None:
    """Remove a router: its service is an ordinary one again."""
    round_ = Round(chosen(load(config), broker))
    for where in round_.visit(
        "route", lambda connection, _: routers.remove_router(connection, service)
    ):
        _say(where, service, "removed")
    round_.finish(say=True)


@app.command()
def enable(service: Service, config: Config = None, broker: Name = None) -> None:
    """Enable a disabled router."""
    _enable(service, config, broker, enabled=True)


@app.command()
def disable(service: Service, config: Config = None, broker: Name = None) -> None:
    """Disable a router until it is enabled again.

    This also works for a router that saf.toml declares.
    """
    _enable(service, config, broker, enabled=False)


@app.command("list")
def list_(config: Config = None, broker: Name = None, as_json: AsJson = False) -> None:
    """Show all routers, and where each is defined."""
    settings = load(config)
    round_ = Round(chosen(settings, broker))
    found = round_.visit(
        "route",
        lambda connection, _: routes.configuration(connection, None, settings.declared).routers,
    )
    round_.show_rows("routers", found, ROUTERS, as_json=as_json)


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
    """Run the routing service of a router that forwards.

    It serves until SIGTERM or Ctrl-C. It receives at the broker where the service lives, and sends
    on from there, so that broker is a destination and a source. With [signing] in saf.toml, it
    signs the messages that it sends on, and refuses altered ones. Exit codes: 0 after a stop
    request; 2 if the router does not exist, or its function cannot be imported; 75 if the messages
    in hand took longer than the stop timeout.
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
            ]
        )
        return
    with published(listen=metrics):
        count = serving.run(drain=drain)
    echo(f"{where}: router {service!r} has sent on {counted(count, 'message')}")


@app.command()
def explain(
    service: Service,
    *,
    body: Annotated[str, typer.Option(metavar="TEXT", help="Body of the message.")] = "",
    key: Annotated[str | None, typer.Option(help="Key of the message. Default: none.")] = None,
    message_type: Annotated[str | None, typer.Option(help="Type of the message.")] = None,
    config: Config = None,
    broker: Name = None,
    as_json: AsJson = False,
) -> None:
    """Show the service that a classifier chooses for a message.

    It also shows where the message would go. Sends nothing. The classifier runs here. That of a
    router that forwards runs for the broker where its service lives. Spark evaluates a classifier
    in SQL, and takes some seconds to start. Exit codes: 75 if the message would wait at some
    broker; 1 if it would become a dead letter.
    """
    from saf.operating.dry_run import try_out  # Arrow takes a while to import
    from saf.spark.answers import DryRuns

    settings = load(config)
    message = Message(service=service, body=body, key=key, message_type=message_type)
    round_ = Round(chosen(settings, broker))
    default, declared = settings.forwarder.default_destination, settings.declared
    with DryRuns() as in_sql:
        found: dict[str, DryRun] = round_.visit(
            "route", lambda connection, _: try_out(connection, message, default, declared, in_sql)
        )

    def show() -> None:
        for where, dry_run in found.items():
            _explain(where, dry_run)

    code = max((run.exit_code for run in found.values()), default=0)
    round_.report({"explanations": results_of(found)}, show, as_json=as_json, found=code)


def _enable(service: str, config: Path | None, broker: str | None, *, enabled: bool) -> None:
    settings = load(config)
    round_ = Round(chosen(settings, broker))
    for where in round_.visit(
        "route",
        lambda connection, _: routers.enable_router(
            connection, service, enabled=enabled, declared=settings.declared
        ),
    ):
        _say(where, service, "enabled" if enabled else "disabled")
    round_.finish(say=True)


def _say(where: str, service: str, done: str) -> None:
    echo(f"{where}: router {service!r} {done}, from the next batch on")


ROUTERS = Table[ConfiguredRouter](
    *("service", "kind", "once per", "mode", "state", "from", "comment"),
    below="classifier",
    cells=lambda row: (
        row.router.service, row.router.kind, row.router.once_per, row.mode,
        "in force" if row.enabled else "disabled", row.origin, row.comment or "",
        row.router.expression,
    ),
    plain=routers.as_dict,
)  # fmt: skip


def _explain(where: str, dry_run: DryRun) -> None:
    subject = f"{where}: a message for {dry_run.service!r}"
    if dry_run.waits is not None:
        echo(f"{subject} would wait: {dry_run.waits}")
    elif dry_run.dead is not None:
        echo(f"{subject} would become a dead letter: {dry_run.dead}")
    else:
        if dry_run.goes.service != dry_run.service:
            echo(f"{subject} is really for {dry_run.goes.service!r}")
        show_explanation(where, dry_run.goes)
