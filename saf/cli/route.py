"""``saf route`` and ``saf topic``: where messages go, and which of them go to all destinations."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import AsJson, Brokers, Commands, Options, Round, moment, named
from saf.cli.console import Table, complain, echo, paragraph, results_of
from saf.config import Settings
from saf.database import of_broker
from saf.destinations.identities import Identities
from saf.destinations.settings import Quality
from saf.errors import ConfigurationError, Unroutable, meant
from saf.operating.addressed import Lacking, lacking
from saf.operating.wording import at
from saf.routing import routes
from saf.routing.explain import Explanation, Verdict, as_dict, explain
from saf.routing.matching import Route
from saf.routing.routes import Configuration, Configured, describe

app = Commands(help="Routes: which messages go where.")
topics = Commands(help="Topics: services whose messages go to every destination.")

ANY = "(any)"
NEXT_BATCH = "from the next batch on"
BROKER_ID = "SELECT broker_id::text FROM saf.broker"

Destination = Annotated[
    str, typer.Argument(metavar="DESTINATION", help="Name of the destination in saf.toml.")
]
Service = Annotated[
    str | None, typer.Option(metavar="NAME", help="Service that messages are for. Default: any.")
]
ToBroker = Annotated[
    UUID | None,
    typer.Option(metavar="UUID", help="broker_id that messages are for. Default: any."),
]


def _key(destination: str, service: str | None, to_broker: UUID | None) -> Mapping[str, Any]:
    return {"destination": destination, "service": service, "broker": to_broker}


Key = Annotated[
    Mapping[str, Any],
    Options({"destination": Destination, "service": Service, "to_broker": ToBroker}, make=_key),
]
"""What identifies a route, as arguments of the functions of `saf.routing.routes`."""
Topic = Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.")]

TOPICS = Table[tuple[str, list[str]]](
    "topic",
    things="topics",
    below="destinations",
    cells=lambda row: (row[0], ", ".join(row[1]) or "none"),
    plain=lambda row: {"topic": row[0], "destinations": row[1]},
)


@app.command()
def add(
    *,
    key: Key,
    quality: Annotated[
        Quality | None, typer.Option(help="Quality of service. Default: the destination's.")
    ] = None,
    expires: Annotated[
        datetime | None,
        typer.Option(
            parser=moment,
            metavar="TIME",
            help="Time from which the route is ignored. Default: never.",
        ),
    ] = None,
    comment: Annotated[str | None, typer.Option(help="Comment for operators.")] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="DESTINATION is this broker: the sender's transaction stores the messages.",
        ),
    ] = False,
    round_: Brokers,
) -> None:
    """Route messages to a destination, from the next batch on.

    Of the routes that match a message, the most specific win: service and broker, then service,
    then broker, then neither. If several win, they share the load; for a topic, all apply.
    An existing route gets the new values, and is enabled.
    """
    destination = key["destination"]
    settings = named(round_.settings, destination)
    try:
        settings.check_quality(quality)
    except ValueError as error:
        raise ConfigurationError(f"--quality: {error}") from None
    known = Identities({destination: settings}).known() if local else {}

    def add_to(connection: psycopg.Connection[Any]) -> bool:
        if local:
            _is_here(connection, destination, known[destination])
        return routes.add_route(
            connection, **key, quality=quality, expires_at=expires, comment=comment, local=local
        )

    added = round_.visit("route", add_to)
    since = "from now on" if local else NEXT_BATCH
    for where, new in added.items():
        echo(f"{where}: {_named(key)} {'added' if new else 'changed'}, {since}")
    warn_of_early(round_.settings, [destination])
    round_.finish(say=True)


@app.command()
def remove(*, key: Key, round_: Brokers) -> None:
    """Remove a route.

    Messages that only it matched go by a less specific route, or are parked.
    """
    _change(round_, key, "removed", partial(routes.remove_route, **key))


@app.command()
def enable(*, key: Key, round_: Brokers) -> None:
    """Enable a disabled route."""
    declared = round_.settings.declared
    _change(round_, key, "enabled", partial(routes.enable_route, **key, declared=declared))


@app.command()
def disable(*, key: Key, round_: Brokers) -> None:
    """Disable a route until it is enabled again.

    This also works for a route that saf.toml declares.
    """
    declared = round_.settings.declared
    change = partial(routes.enable_route, **key, enabled=False, declared=declared)
    _change(round_, key, "disabled", change)


@app.command("list")
def list_(*, round_: Brokers, as_json: AsJson = False) -> None:
    """List the routes of the sources, the most specific first.

    Each has the place where it is defined: the database, or a file.
    """

    def rows(connection: psycopg.Connection[Any]) -> list[tuple[Configured, Configuration]]:
        found = _configuration(round_, connection)
        return [(entry, found) for entry in found.routes]

    round_.show_rows("route", rows, "routes", ROUTES, as_json=as_json)


@app.command("explain")
def explain_(
    service: Annotated[
        str, typer.Argument(metavar="SERVICE", help="Service that the message is for.")
    ],
    *,
    to_broker: ToBroker = None,
    key: Annotated[str | None, typer.Option(help="Key of the message. Default: none.")] = None,
    round_: Brokers,
    as_json: AsJson = False,
) -> None:
    """Explain where a message would go with the next batch.

    It also shows why the other routes do not count, and asks the destinations whether they have the
    service. Exit code 75: the message would wait, because at some broker no route matches, or
    because a destination lacks the service.
    """
    settings = round_.settings
    identities = Identities(settings.destinations).known()
    found = round_.visit(
        "route",
        lambda connection: explain(
            connection,
            service,
            str(to_broker) if to_broker else None,
            key,
            default_destination=settings.forwarder.default_destination,
            declared=settings.declared,
            identities=identities,
        ),
    )

    asked = ask_destinations(settings, found.values())

    def show() -> None:
        for where, explanation in found.items():
            show_explanation(where, explanation, settings.destinations)
        show_lacking(asked)

    lost = any(explanation.lost for explanation in found.values())
    code = Unroutable.exit_code if lost or asked.missing else 0
    answer = {"explanations": results_of(found), "no_service": asked.missing}
    round_.report(answer, show, as_json=as_json, found=code)


@topics.command("add")
def add_topic(name: Topic, *, round_: Brokers) -> None:
    """Add a topic: its messages go to all destinations of its routes."""
    round_.tell(
        "route",
        lambda connection: routes.add_topic(connection, name),
        lambda added: f"{name} is a topic {NEXT_BATCH if added else 'already'}",
    )


@topics.command("list")
def list_topics(*, round_: Brokers, as_json: AsJson = False) -> None:
    """List the topics of the sources, and where a message of each goes now."""

    def rows(connection: psycopg.Connection[Any]) -> list[tuple[str, list[str]]]:
        found = _configuration(round_, connection)
        matches = {name: found.in_force.match(name, None) for name in sorted(found.topics)}
        return [(name, [*match.destinations] if match else []) for name, match in matches.items()]

    round_.show_rows("route", rows, "topics", TOPICS, as_json=as_json)


@topics.command("remove")
def remove_topic(name: Topic, *, round_: Brokers) -> None:
    """Remove a topic: its service is an ordinary one again.

    Its most specific routes share its messages.
    """
    round_.tell(
        "route",
        lambda connection: routes.remove_topic(connection, name),
        lambda _: f"{name} is no longer a topic, {NEXT_BATCH}",
    )


def _configuration(round_: Round, connection: psycopg.Connection[Any]) -> Configuration:
    settings = round_.settings
    default = settings.forwarder.default_destination
    return routes.configuration(connection, default, settings.declared)


def state(one: Configured, there: Configuration) -> str:
    """Return the state of a route: in force, disabled, expired or not needed.

    The default destination is not needed if a wildcard route exists.
    """
    if one.in_force(there.now):
        return "in force" if one.route in there.in_force.routes else "not needed"
    return "expired" if one.enabled else "disabled"


def warn_of_early(settings: Settings, destinations: Iterable[str]) -> None:
    """Warn of destinations that deliver messages before their ``deliver_at``."""
    for name in destinations:
        destination = settings.destinations[name]
        if not destination.capabilities.holds:
            complain(
                f"destination {name!r} of kind {destination.kind!r} holds no message until "
                "its deliver_at: it gets it immediately, with the time as a column or header"
            )


def _change(
    round_: Round,
    key: Mapping[str, Any],
    done: str,
    change: Callable[[psycopg.Connection[Any]], None],
) -> None:
    round_.tell("route", change, lambda _: f"{_named(key)} {done}, {NEXT_BATCH}")


def _named(key: Mapping[str, Any]) -> str:
    return describe(Route(**{**key, "broker": key["broker"] and str(key["broker"])}))


def _is_here(connection: psycopg.Connection[Any], destination: str, identity: str | None) -> None:
    (here,) = of_broker(connection, BROKER_ID)
    if identity != here:
        fact = f"is broker {identity}" if identity else "does not answer"
        raise ConfigurationError(
            f"--local: destination {destination!r} {fact}, and database {connection.info.dbname!r} "
            f"is broker {here}: a local route leads to the database of its senders"
        )


def _cells(row: tuple[Configured, Configuration]) -> Sequence[str]:
    entry, configuration = row
    topic = ", a topic" if entry.route.service in configuration.topics else ""
    return (
        ANY if entry.route.service is None else entry.route.service,
        entry.route.broker or ANY,
        entry.route.destination,
        entry.route.quality or "",
        at(entry.expires_at) if entry.expires_at else "",
        state(entry, configuration) + topic + (", local" if entry.local else ""),
        entry.origin,
        entry.comment or "",
    )


ROUTES = Table[tuple[Configured, Configuration]](
    *("service", "to broker", "destination", "quality", "until", "state", "from"),
    things="routes",
    below="comment",
    cells=_cells,
    plain=lambda row: {**as_dict(row[0]), "state": state(*row)},
)
VERDICTS = Table[Verdict](
    *("taken", "route", "from"),
    things="routes",
    below="why",
    cells=lambda verdict: (
        "yes" if verdict.takes else "no", describe(verdict.route.route), verdict.route.origin,
        verdict.why,
    ),
)  # fmt: skip


def show_explanation(where: str, one: Explanation, destinations: Collection[str]) -> None:
    """Print where a message goes, and for each route whether it counts and why.

    If it would wait, print the command that adds a route to one of the destinations of saf.toml.
    """
    key = "without a key" if one.key is None else f"with key {one.key!r}"
    to = f" at broker {one.broker}" if one.broker else ""
    leads = f" goes to {', '.join(map(repr, one.destinations))}"
    if one.router:
        explain_it = shlex.join(("saf", "router", "explain", one.service, "--body", "…"))
        leads = f" goes where its router says: `{explain_it}`"
    elif one.lost:
        broker = ("--to-broker", one.broker) if one.broker else ()
        routed = {verdict.route.route.service for verdict in one.verdicts} - {None, one.service}
        only = destinations if len(destinations) == 1 else ["DESTINATION"]
        add_it = ("saf", "route", "add", *only, "--service", one.service, *broker)
        several = f"; DESTINATION is one of {', '.join(destinations)}" * (len(destinations) > 1)
        leads = (
            f": no route, so it would wait. {meant([one.service], map(str, routed))}"
            f"Add one: `{shlex.join((*add_it, '--broker', where))}`{several}"
        )
    paragraph(f"{where}: a message for {one.service!r}{to} {key}{leads}")
    if one.verdicts:
        VERDICTS.show_rows(one.verdicts)


def ask_destinations(settings: Settings, explanations: Iterable[Explanation]) -> Lacking:
    """Ask the destinations of explained messages whether they have their services."""
    found = Lacking()
    wanted = {(name, one.service): None for one in explanations for name in one.destinations}
    for name, service in wanted:
        asked = lacking(settings, [name], service)
        found.missing |= asked.missing
        found.unasked |= asked.unasked
    return found


def show_lacking(asked: Lacking) -> None:
    """Print which destinations lack a service, and which did not answer."""
    for sentence in asked.missing.values():
        paragraph(sentence)
    for name, error in asked.unasked.items():
        complain(f"whether {name} has the service is not known: {error}")
