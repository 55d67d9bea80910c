"""Checks of where messages go, and of what waits: routes, open dialogs, and dropped messages."""

from __future__ import annotations

from saf.broker.services import OWN, lives_here
from saf.config import Settings, did_you_mean
from saf.dialogs.statements import State
from saf.errors import ConfigurationError
from saf.operating.doctor.patient import Check, Found, Patient
from saf.operating.doctor.server import SESSION, Session
from saf.operating.held import HOLDER
from saf.operating.wording import age, counted
from saf.routing import functions
from saf.routing.local import LEFT, TRIGGER
from saf.routing.matching import FUNCTION, Route
from saf.routing.routers import with_problems
from saf.routing.routes import Configured, ConfiguredRouter, configuration, describe
from saf.setaside.dropped import Reason
from saf.setaside.lane import Kind

# An ended end sends nothing more
DIALOGS = """
SELECT DISTINCT far_service, far_broker::text FROM saf.conversation
WHERE NOT monolog AND state NOT IN ('closed', 'error') ORDER BY 1, 2
"""


def dialogs_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def dialogs(patient: Patient) -> Found:
        """Check that the routes of open dialogs lead to places where their other ends can live."""
        default = config.forwarder.default_destination
        in_force = configuration(patient.connection, default, config.declared).in_force
        for service, broker in patient.ask(DIALOGS):
            match = in_force.match(service, broker)
            for name in match.destinations if match else ():
                settings = config.destinations.get(name)
                if settings is not None and not settings.capabilities.takes_dialogs:
                    yield (
                        "error",
                        f"dialogs with service {service!r} go to destination {name!r} of kind "
                        f"{settings.kind!r}, which takes no messages of dialogs: they are parked",
                        f"{patient.command('route', 'add', 'BROKER', '--service', service)}, where "
                        "BROKER is a destination of kind 'postgresql'",
                    )

    return dialogs


# By the session that has locked them, if any
OVERDUE = f"""
WITH overdue AS (
    SELECT a.pid, count(*) AS messages,
           extract(epoch FROM clock_timestamp() - min(h.due))::float AS seconds
    FROM saf.held h {HOLDER}
    WHERE h.due IS NOT NULL AND h.refused IS NULL
      AND h.due < clock_timestamp() - make_interval(secs => %(seconds)s)
    GROUP BY a.pid)
SELECT messages, seconds, {SESSION}
FROM overdue LEFT JOIN pg_stat_activity a USING (pid) ORDER BY overdue.pid NULLS FIRST
"""


def held(patient: Patient) -> Found:
    """Report held messages that are due and still held: locked, or moved by no forwarder."""
    overdue = patient.ask(OVERDUE, seconds=patient.limits.overdue_seconds)
    for count, seconds, pid, *session in overdue:
        what = f"{counted(count, 'held message')} should have been sent up to {age(seconds)} ago"
        if pid is not None:
            holder = Session(pid, *session)
            yield (
                "error",
                f"{what}, locked by {holder}, in a transaction that has been open"
                f"{holder.lasting}; {holder.doing}",
                f"end its transaction, or SELECT pg_terminate_backend({pid})",
            )
            continue
        yield (
            "error",
            f"{what}: no forwarder moves them to the outbox",
            "run `saf forward`, with a saf.toml that has this database among its brokers; if a "
            "forwarder runs, its log has the error. List the messages: "
            f"{patient.command('held', 'list', '--overdue')}",
        )


MOST_REFUSED = 20
# Whether a rule allows a message now, as saf.check_sender decides
REFUSED = f"""
SELECT h.sender, h.from_service, h.to_service, count(*), min(h.refused),
       CASE WHEN b.senders_since IS NULL THEN 'allowed'
            WHEN to_regrole(quote_ident(h.sender)) IS NULL THEN 'unknown'
            WHEN EXISTS (
                SELECT FROM saf.sender s
                WHERE s.from_service = h.from_service
                  AND (s.to_service = h.to_service OR s.to_service IS NULL)
                  AND pg_has_role(h.sender, to_regrole(quote_ident(s.role)), 'USAGE'))
            THEN 'allowed' ELSE 'forbidden' END
FROM saf.held h CROSS JOIN saf.broker b WHERE h.refused IS NOT NULL
GROUP BY h.sender, h.from_service, h.to_service, b.senders_since
ORDER BY 1, 2, 3 LIMIT {MOST_REFUSED}
"""


def refused(patient: Patient) -> Found:
    """Report held messages that the database refused to move when they were due."""
    for role, sender, service, count, error, state in patient.ask(REFUSED):
        refused_ = ("--service", service, "--refused")
        retry = patient.command("held", "retry", "--service", service)
        cancel = patient.command("held", "cancel", *refused_)
        if state == "forbidden" and sender is not None:
            rule = patient.owners("sender", "add", role, "--from", sender, "--to", service)
            cure = (
                f"if the role may send them, as the owner: {rule}, and the next run moves them; "
                f"otherwise {cancel}"
            )
        elif state == "unknown":
            cure = f"create the role again, then {retry}; or {cancel}"
        else:
            cure = f"fix the cause that the error names, then {retry}; or {cancel}"
        yield (
            "error",
            f"{counted(count, 'held message')} of role {role!r} for service {service!r} "
            f"{'was' if count == 1 else 'were'} refused when due: {error}",
            cure,
        )


# The newest messages of each shard, delivered or not: the check is about their senders
GIVEN_LATER = """
SELECT l.to_service, l.to_broker::text, count(*)
FROM saf.broker b CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS s (shard)
CROSS JOIN LATERAL (
    SELECT to_service, to_broker, created_at, deliver_at FROM saf.outbox o
    WHERE o.shard = s.shard::smallint ORDER BY txid DESC LIMIT 100) AS l
WHERE l.deliver_at > l.created_at
GROUP BY 1, 2 ORDER BY 1, 2
"""


def given_early_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def given_early(patient: Patient) -> Found:
        """Check that destinations hold messages that are sent for later."""
        default = config.forwarder.default_destination
        in_force = configuration(patient.connection, default, config.declared).in_force
        for service, broker, messages in patient.ask(GIVEN_LATER):
            match = in_force.match(service, broker)
            for name in match.destinations if match else ():
                settings = config.destinations.get(name)
                if settings is not None and not settings.capabilities.holds:
                    yield (
                        "warning",
                        f"{counted(messages, 'message')} for service {service!r}, of the newest, "
                        f"have a deliver_at, and destination {name!r} of kind {settings.kind!r} "
                        "holds no message until then: it gets them immediately",
                        "let its readers heed the time that comes with a message; or route the "
                        "service to an inbox",
                    )

    return given_early


# The trigger may be missing because a dump left it out, or a user dropped it
LOCAL = f"""
SELECT r.service, r.destination, b.broker_id::text,
       EXISTS (SELECT FROM pg_trigger t
               WHERE t.tgrelid = 'saf.outbox'::regclass
                 AND t.tgname = '{TRIGGER}' || r.route_id AND t.tgenabled <> 'D')
FROM saf.route r, saf.broker b WHERE r.local AND r.enabled ORDER BY 1
"""


# Open dialogs of two services of this database, whose messages are stored here in one direction
ONE_SIDED = """
SELECT r.service, other.name, b.broker_id::text, min(r.destination)
FROM saf.conversation c JOIN saf.broker b ON b.broker_id = c.far_broker
CROSS JOIN LATERAL (VALUES (c.service, c.far_service), (c.far_service, c.service))
    AS way (from_service, to_service)
JOIN saf.route r ON r.local AND r.enabled AND r.service = way.from_service
JOIN saf.service other ON other.name = way.to_service
WHERE NOT c.monolog AND c.state NOT IN ('closed', 'error')
  AND NOT EXISTS (SELECT FROM saf.route o
                  WHERE o.local AND o.enabled AND o.service = way.to_service)
GROUP BY 1, 2, 3 ORDER BY 1, 2
"""


def local_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def local(patient: Patient) -> Found:
        """Check that local routes lead to their own broker, and serve plain services only.

        A dialog with a local route in one direction only is slower in the other one, and nothing is
        wrong: the forwarder carries the other messages. Without a route by which it could, they
        wait.
        """
        default = config.forwarder.default_destination
        current = configuration(patient.connection, default, config.declared)
        routers = {item.router.service for item in current.routers}
        for service, destination, here, works in patient.ask(LOCAL):
            arguments = (destination, "--service", service)
            remove = patient.command("route", "remove", *arguments)
            if not works:
                yield (
                    "warning",
                    f"the local route of service {service!r} has no trigger at the outbox: its "
                    "messages wait for the forwarder",
                    f"{patient.command('route', 'disable', *arguments)}, then "
                    + patient.command("route", "enable", *arguments),
                )
            elif current.brokers.get(destination, here) != here:
                yield (
                    "warning",
                    f"the route of service {service!r} to {destination!r} is local, and that is "
                    "another broker: messages that their sender does not store go there",
                    f"{remove}, and add it to the destination that is this broker",
                )
            if service in current.topics or service in routers:
                what = "topic" if service in current.topics else "router"
                yield (
                    "error",
                    f"{what} {service!r} has a local route: its messages stay in this inbox",
                    remove,
                )
        in_force = current.in_force
        for service, other, here, destination in patient.ask(ONE_SIDED):
            if in_force.match(other, here) is None:
                add = patient.command("route", "add", destination, "--service", other, "--local")
                yield (
                    "error",
                    f"services {service!r} and {other!r} of this database have open dialogs, and "
                    f"only {service!r} has a local route: no route leads messages for {other!r} to "
                    "this broker, so they wait",
                    _delivered_first(patient, other) + add,
                )

    return local


def _delivered_first(patient: Patient, service: str) -> str:
    """Return what comes before a service's route can become local, if its messages wait."""
    if not patient.ask(LEFT, service=service)[0][0]:
        return ""
    add = patient.command("route", "add", "HERE", "--service", service)
    return (
        f"add this database to saf.toml as a destination, e.g. HERE, {add}, and run `saf forward` "
        "until the messages that wait are delivered; then "
        + patient.command("route", "remove", "HERE", "--service", service)
        + " and "
    )


def routes_by(config: Settings) -> Check:
    """Return the check for one saf.toml."""

    def routes(patient: Patient) -> Found:
        """Check that routes in force have destinations, topics a route, and routers a function."""
        default = config.forwarder.default_destination
        current = configuration(patient.connection, default, config.declared)
        in_force = current.in_force
        configured = {item.route: item for item in current.routes}
        for route in in_force.routes:
            if route.destination not in config.destinations:
                hint = did_you_mean(route.destination, config.destinations)
                yield (
                    "error",
                    f"the route of {describe(route)} leads to a destination that is not in "
                    "saf.toml: its messages are parked",
                    f"add [destinations.{route.destination}] to saf.toml{hint}, or "
                    + _removed(patient, configured[route]),
                )
            else:
                try:
                    config.destinations[route.destination].check_quality(route.quality)
                except ValueError as error:
                    yield (
                        "error",
                        f"the route of {describe(route)}: {error}. Its messages are parked",
                        patient.command(
                            *("route", "add", *_named(route), "--quality", "at_least_once"),
                            *_kept(configured[route]),
                        ),
                    )
            instead = in_force.brokers.get(route.destination)
            if route.broker is not None and instead not in (None, route.broker):
                yield (
                    "warning",
                    f"the route of {describe(route)} is never used: that destination is broker "
                    f"{instead}",
                    _removed(patient, configured[route]),
                )
        services = {route.service for route in in_force.routes}
        for topic in sorted(() if None in services else in_force.topics - services):
            yield (
                "warning",
                f"topic {topic!r} has no destination: its messages are parked",
                f"{patient.command('route', 'add', 'DESTINATION', '--service', topic)}, or "
                + patient.command("topic", "remove", topic),
            )
        for router in with_problems(in_force).routers:
            if router.problem is not None:
                yield (
                    "warning",
                    f"{router.problem}. Where it cannot, its messages are parked",
                    "fix its module or PYTHONPATH, or "
                    + patient.command("router", "remove", router.service),
                )
            if router.service in in_force.topics:
                yield (
                    "warning",
                    f"{router.service!r} is a router and a topic: it counts as a router",
                    f"{patient.command('topic', 'remove', router.service)}, or "
                    + patient.command("router", "remove", router.service),
                )
        for entry in current.routers:
            if (problem := _function_problem(patient, entry)) is not None:
                yield (
                    "warning",
                    f"{problem}. Its routing service does not start",
                    "fix the function, or "
                    + patient.command("router", "remove", entry.router.service),
                )

    return routes


def _function_problem(patient: Patient, one: ConfiguredRouter) -> str | None:
    """Return why a router that is served here cannot call its function of the database, if so."""
    router = one.router
    if router.kind != FUNCTION or not one.enabled:
        return None
    if not lives_here(patient.connection, router.service):
        return None
    try:
        functions.check(patient.connection, router)
    except ConfigurationError as error:
        return str(error)
    return None


def _removed(patient: Patient, entry: Configured) -> str:
    """Return the command that removes a route; a route from saf.toml has no row to remove."""
    if entry.origin != "saf.route":
        return "remove it from saf.toml"
    return patient.command("route", "remove", *_named(entry.route))


def _named(route: Route) -> list[str]:
    """Return the command-line words that identify a route."""
    service = ["--service", route.service] if route.service is not None else []
    broker = ["--to-broker", route.broker] if route.broker is not None else []
    return [route.destination, *service, *broker]


def _kept(entry: Configured) -> list[str]:
    """Return the options that keep a route's settings when it is added again."""
    expires = ["--expires", entry.expires_at.isoformat()] if entry.expires_at is not None else []
    comment = ["--comment", entry.comment] if entry.comment is not None else []
    return [*expires, *comment]


OVER = (State.CLOSED, State.ERROR)
"""States without anything to wait for: `dialogs_set_back` reports failed dialogs, or their
application ends them."""

DAY_SECONDS = 86400.0

OPEN = """
SELECT service, count(*), extract(epoch FROM now() - min(changed_at))::float
FROM saf.conversation
WHERE NOT monolog AND state <> ALL (%(over)s)
  AND changed_at < now() - make_interval(secs => %(seconds)s)
  AND (expires_at IS NULL OR expires_at > now())
GROUP BY service ORDER BY service
"""


def dialogs_open_for_long(patient: Patient) -> Found:
    """Report open dialogs without any message for a long time."""
    seconds = patient.limits.old_seconds
    for service, count, oldest in patient.ask(OPEN, over=list(OVER), seconds=seconds):
        yield (
            "warning",
            f"{counted(count, 'dialog')} of service {service!r} are open and silent, the longest "
            f"for {age(oldest)}: open dialogs are never removed",
            "let the application end them, or begin them with a lifetime; which ones: "
            f"{patient.command('dialog', 'list', '--service', service)}; "
            f"{patient.command('dialog', 'end', 'HANDLE')} ends one",
        )


EXPIRED = """
SELECT service, count(*), extract(epoch FROM now() - min(expires_at))::float
FROM saf.conversation
WHERE state <> ALL (%(over)s) AND expires_at < now() - make_interval(secs => %(seconds)s)
GROUP BY service ORDER BY service
"""


def dialogs_expired(patient: Patient) -> Found:
    """Report dialogs whose lifetime is over, and whose receiver has not noticed."""
    seconds = patient.limits.stuck_seconds
    for service, count, longest in patient.ask(EXPIRED, over=list(OVER), seconds=seconds):
        yield (
            "error",
            f"the lifetime of {counted(count, 'dialog')} of service {service!r} is over, the "
            f"longest for {age(longest)}, and no receiver has noticed: none is running",
            f"start the worker of {service!r}: it gets an Error for each dialog",
        )


BLOCKED = """
SELECT s.name, count(*), count(DISTINCT p.subject), min(p.subject),
       extract(epoch FROM now() - min(p.parked_at))::float
FROM saf.parked p JOIN saf.subscription s USING (subscription_id)
WHERE p.kind = %(kind)s AND p.parked_at < now() - make_interval(secs => %(seconds)s)
GROUP BY s.name ORDER BY s.name
"""


def dialogs_blocked(patient: Patient) -> Found:
    """Report messages of dialogs that wait for a missing earlier message."""
    seconds = patient.limits.stuck_seconds
    for name, count, dialogs, first, oldest in patient.ask(
        BLOCKED, kind=Kind.AHEAD, seconds=seconds
    ):
        yield (
            "error",
            f"subscription {name!r} has {counted(count, 'message')} of "
            f"{counted(dialogs, 'dialog')} that wait for an earlier one, the oldest for "
            f"{age(oldest)}, for example those of conversation {first}",
            "search for the earlier message at the other end's broker: saf outbox list --key "
            f"{first}, saf dead list --key {first}; {patient.command('dialog', 'compare')} lets "
            "both ends compare",
        )


DROPPED = """
SELECT s.name, reason, sum(messages)::bigint, max(last_at)::text,
       (array_agg(last_message_id ORDER BY last_at DESC))[1]::text
FROM saf.dropped JOIN saf.subscription s USING (subscription_id)
WHERE reason = ANY (%(reasons)s)
GROUP BY s.name, reason HAVING max(last_at) > now() - make_interval(secs => %(seconds)s)
ORDER BY s.name, reason
"""
UNHEARD_OF = (Reason.ENDED, Reason.EXPIRED, Reason.INCOMPLETE)
"""Reasons for drops whose senders may have wanted a receiver to get the message."""


def dropped(patient: Patient) -> Found:
    """Report messages of dialogs, dropped in the last day, that their senders may miss."""
    reasons = list(UNHEARD_OF)
    for name, reason, count, last, message_id in patient.ask(
        DROPPED, reasons=reasons, seconds=DAY_SECONDS
    ):
        yield (
            "warning",
            f"subscription {name!r} has dropped {counted(count, 'message')} since counting began, "
            f"{reason}, the last at {last}: {message_id}",
            "docs/where-messages-end.md explains each reason: the dialog has told both ends",
        )


# The messages of the newest transactions of each shard: recent ones, whatever the log's size
MISADDRESSED = """
SELECT to_service, to_broker::text, count(*), max(received_at)::text
FROM (
    SELECT i.to_service, i.received_at,
           CASE WHEN i.to_broker <> b.broker_id THEN i.to_broker END AS to_broker
    FROM saf.broker b CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS n (shard)
    CROSS JOIN LATERAL (
        SELECT to_service, to_broker, received_at FROM saf.inbox i
        WHERE i.shard = n.shard ORDER BY i.txid DESC LIMIT %(look)s) AS i
    WHERE EXISTS (SELECT FROM saf.service)) AS lately
WHERE to_broker IS NOT NULL OR NOT starts_with(to_service, %(own)s) AND NOT EXISTS (
    SELECT FROM saf.service AS lives WHERE lives.name = lately.to_service
    UNION ALL
    SELECT FROM saf.subscription s
    WHERE s.log = 'inbox' AND NOT s.stream
      AND (s.service IS NULL OR s.service = lately.to_service))
GROUP BY 1, 2 ORDER BY 1, 2 LIMIT %(shown)s
"""
LOOK = 100
"""Number of messages to check in each shard: the last ones."""
SHOWN = 20


def misaddressed(patient: Patient) -> Found:
    """Report recent messages for a service that does not live here, or for another broker."""
    for service, broker, count, last in patient.ask(MISADDRESSED, look=LOOK, shown=SHOWN, own=OWN):
        found = f"nobody receives {counted(count, 'message')} in the inbox for {service!r}"
        if broker:
            yield (
                "warning",
                f"{found}, at broker {broker}, which is another one; the last came at {last}",
                "fix the route at the source",
            )
            continue
        yield (
            "warning",
            f"{found}, which does not exist here, unless a removed service of this name has "
            f"handled them; the last came at {last}",
            "if it has, do nothing: `saf purge` frees them. Otherwise fix the route at the source, "
            "or create the service, which hands out all of them: "
            + patient.command("service", "create", service, "--from-start"),
        )
