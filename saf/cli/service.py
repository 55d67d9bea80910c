"""``saf service`` and ``saf subscription``: services of a broker, their readers, and streams."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import psycopg
import typer

from saf.broker import services
from saf.broker.fairness import Column, Fairness
from saf.broker.services import Decided, LeftOver, Start
from saf.cli.brokers import (
    AsJson,
    AtStore,
    Commands,
    Config,
    Everywhere,
    Options,
    Round,
    Store,
    Why,
    Yes,
    round_at,
)
from saf.cli.console import Table, ask, can_ask, confirm, echo
from saf.errors import UsageError
from saf.log import stream
from saf.operating.places import everywhere, store
from saf.operating.wording import counted, first_of, paused

app = Commands(help="Services: what messages are addressed to.")

Service = Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.")]
Discard = Annotated[
    bool, typer.Option("--discard", help="Discard the messages that are left, after asking.")
]
NONE = "none"
"""Removes a limit."""
FromNow = Annotated[bool, typer.Option("--from-now", help="Read only messages stored from now on.")]

SERVICES = Table[services.Service](
    *("service", "subscriptions", "limits", "fair"),
    things="services",
    below="paused",
    sparse=("limits", "fair", "paused"),
    cells=lambda row: (
        row.name,
        ", ".join(row.subscriptions),
        row.limits,
        str(row.fairness),
        _paused(row),
    ),
    plain=lambda row: {"service": row.name, "subscriptions": row.subscriptions, **_decided(row)},
)


def _paused(row: Decided) -> str:
    return paused(row.paused_at, row.paused_by, row.paused_why)


def _decided(row: Decided) -> dict[str, Any]:
    return {
        **row.fairness.as_dict(),
        "paused_at": row.paused_at and row.paused_at.isoformat(),
        "paused_by": row.paused_by,
        "paused_why": row.paused_why,
        "rate": row.rate,
        "concurrency": row.concurrency,
    }


@app.command()
def create(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of the services.")],
    *,
    refuse_others: Annotated[
        bool,
        typer.Option(
            "--refuse-others",
            help="Create a broker's first services even if its inbox has messages for others.",
        ),
    ] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Hand out messages stored for them before, too.")
    ] = False,
    from_now: FromNow = False,
    round_: AtStore,
) -> None:
    """Create services at a broker.

    Each has a subscription of the same name. A broker without services stores messages for any
    service; a broker with services, for these only. Messages for others wait at their sources, and
    `saf parked list` shows them there.

    If the inbox has older messages for a new service, a removed service of the same name may have
    handled them. Then saf asks whether to hand them out; without a terminal, --from-start or
    --from-now is needed.
    """
    start = _start(names, round_, from_start=from_start, from_now=from_now)

    def make(connection: psycopg.Connection[Any]) -> list[str]:
        first = not services.services(connection)
        created = services.create_services(
            connection, names, refuse_others=refuse_others, start=start
        )
        only = ["has services now: messages for a service that it lacks will wait"]
        return [
            f"service {name} {'created' if name in created else 'already exists'}" for name in names
        ] + only * first

    round_.tell("service", make, list)


def _start(
    names: Sequence[str], round_: Round, *, from_start: bool, from_now: bool
) -> Start | None:
    """Return where new services begin to read; ask at a terminal if they have older messages."""
    if from_start and from_now:
        raise UsageError("use either --from-start or --from-now")
    if from_start or from_now:
        return "beginning" if from_start else "now"
    if not can_ask():
        return None
    # in a round of its own: a broker that does not answer is reported when it is to create them
    asked = round_.among(round_.brokers).visit(
        "service", lambda connection: services.stored(connection, names)
    )
    older = {where: counts for where, counts in asked.items() if counts}
    if not older:
        return None
    found = "; ".join(f"{where}: {services.in_words(counts)}" for where, counts in older.items())
    again = ask(
        f"The inbox already has messages, at {found}. A removed service of this name may have "
        "handled them. Hand them out?"
    )
    return "beginning" if again else "now"


@app.command("list")
def list_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List services, the subscriptions that read their messages, and pauses."""
    round_.show_rows("service", services.services, "services", SERVICES, as_json=as_json)


def told_paused(what: str, name: str, changed: bool) -> str:
    """Say that something was paused, and how to resume it; or that it was paused before."""
    if not changed:
        return f"{what} {name} is already paused"
    resume = shlex.join(("saf", what, "resume", name))
    return f"{what} {name} paused; `{resume}` continues"


def told_resumed(what: str, name: str, changed: bool) -> str:
    """Say that something was resumed, or was not paused."""
    return f"{what} {name} {'resumed' if changed else 'is not paused'}"


@app.command("pause")
def pause_service(name: Service, *, why: Why = "", round_: AtStore) -> None:
    """Pause a service: its receivers hand out no messages.

    It stays paused until it is resumed. This pauses the service's own subscription, whatever reads
    it: workers, processors, dispatchers. Deliveries in hand end as usual, and messages keep
    arriving.
    """

    def decide(connection: psycopg.Connection[Any]) -> bool:
        services.own_subscription(connection, name)
        return services.pause(connection, name, why)

    round_.tell("service", decide, partial(told_paused, "service", name))


Rate = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Rate limit, e.g. 100/s; none: unlimited."),
]
Concurrency = Annotated[
    str | None,
    typer.Option(metavar="NUMBER", help="Maximum deliveries in hand; none: unlimited."),
]
FairBy = Annotated[
    str | None,
    typer.Option(
        metavar="GROUP",
        help="Group of a message: key; key:/ for the key up to its first /; "
        "header:tenant for a header; message_type; or from_service.",
    ),
]
Priority = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=WEIGHT", help="Weight of a message type, such as Alarm=10; others have 1."
    ),
]
PriorityBy = Annotated[
    Column | None,
    typer.Option(help="What --priority names. Default: message_type."),
]
Unfair = Annotated[
    bool, typer.Option("--unfair", help="Hand messages out in their own order again.")
]


@dataclass(frozen=True)
class Rules:
    """Rules for a subscription, as options give them."""

    limits: Mapping[str, Any]
    fairness: Mapping[str, Any] | None
    """Arguments of `saf.broker.services.set_fairness`; None: it stays as it is."""

    def apply(
        self, connection: psycopg.Connection[Any], name: str, why: str
    ) -> services.Subscription:
        """Set the rules of a subscription; return it."""
        with connection.transaction():
            if self.limits:
                services.limit(connection, name, **self.limits, why=why)
            if self.fairness is not None:
                services.set_fairness(connection, name, **self.fairness)
            return services.subscription(connection, name)

    def words(self, what: str, after: services.Subscription) -> str:
        """Return what was set, in words."""
        parts = []
        if self.limits:
            parts.append(f"limited to {after.limits}" if after.limits else "no limits")
        if self.fairness is not None:
            fairness = after.fairness
            parts += [f"fair, {fairness}" if fairness else "not fair", "restart its workers"]
        return f"{what} {after.name}: {'; '.join(parts)}"


def _rules(
    *,
    rate: str | None,
    concurrency: str | None,
    fair_by: str | None,
    priority: list[str] | None,
    priority_by: Column | None,
    unfair: bool,
) -> Rules:
    weights = dict(map(_weight, priority or ()))
    if unfair and (fair_by or weights):
        raise UsageError("--unfair goes with neither --fair-by nor --priority")
    if priority_by and not weights:
        raise UsageError("--priority-by names the column of --priority: add that")
    shares = unfair or fair_by is not None or bool(weights)
    by = priority_by or "message_type"
    Fairness(fair_by=fair_by, priority_by=by if weights else None, priority=weights)  # checks them
    fairness = {"fair_by": fair_by, "priority": weights, "priority_by": by}
    found = Rules(_limits(rate, concurrency), fairness if shares else None)
    if not found.limits and found.fairness is None:
        raise UsageError(
            "nothing to set: add --rate, --concurrency, --fair-by, --priority or --unfair"
        )
    return found


def _limits(rate: str | None, concurrency: str | None) -> dict[str, Any]:
    """Return the limits that options change.

    >>> _limits("100/s", None), _limits("none", "4")
    ({'rate': '100/s'}, {'rate': None, 'concurrency': 4})
    """
    changes: dict[str, Any] = {}
    if rate is not None:
        changes["rate"] = None if rate == NONE else rate
    if concurrency is not None:
        if concurrency != NONE and not concurrency.isdecimal():
            raise UsageError(f"--concurrency {concurrency}: expected a number, or none")
        changes["concurrency"] = None if concurrency == NONE else int(concurrency)
    return changes


def _weight(text: str) -> tuple[str, float]:
    """Return the name and the weight of an option NAME=WEIGHT.

    >>> _weight("Alarm=10"), _weight("a=b=0.5")
    (('Alarm', 10.0), ('a=b', 0.5))

    Raises:
        UsageError: the option is not NAME=WEIGHT.
    """
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise UsageError(f"--priority {text!r}: expected NAME=WEIGHT, such as Alarm=10") from None


RULES = Options(
    {
        "rate": Rate,
        "concurrency": Concurrency,
        "fair_by": FairBy,
        "priority": Priority,
        "priority_by": PriorityBy,
        "unfair": Unfair,
    },
    make=_rules,
)


@app.command("set")
def set_service(
    name: Service, *, rules: Annotated[Rules, RULES], why: Why = "", round_: AtStore
) -> None:
    """Limit a service, or divide its deliveries fairly among groups.

    This concerns the service's own subscription, in all processes. Limits take effect within a
    second; dispatchers do not obey them, because endpoints have limits of their own. With
    --fair-by or --priority, each group, such as a tenant, gets its share of each delivery. Both
    together replace earlier ones: to change one, repeat the other. Restart running workers then.
    """

    def decide(connection: psycopg.Connection[Any]) -> services.Subscription:
        services.own_subscription(connection, name)
        return rules.apply(connection, name, why)

    round_.tell("service", decide, partial(rules.words, "service"))


@app.command("resume")
def resume_service(name: Service, *, why: Why = "", round_: AtStore) -> None:
    """Resume a service that is paused."""

    def decide(connection: psycopg.Connection[Any]) -> bool:
        services.own_subscription(connection, name)
        return services.resume(connection, name, why)

    round_.tell("service", decide, partial(told_resumed, "service", name))


@app.command()
def remove(name: Service, *, round_: AtStore, discard: Discard = False, yes: Yes = False) -> None:
    """Remove a service and its subscriptions.

    New messages for it wait at their sources. Without its last service, a broker stores messages
    for any service again.
    """
    discard = discard and _confirmed(round_, f"service {name!r}", name, _readers, yes=yes)

    def forget(connection: psycopg.Connection[Any]) -> list[str]:
        discarded = services.remove_service(connection, name, discard=discard)
        left = services.services(connection)
        any_again = ["no service is left, so it stores messages for any service again"]
        return [f"service {name} removed{_discarded(discarded)}"] + any_again * (not left)

    round_.tell("service", forget, list)


def _readers(connection: psycopg.Connection[Any], service: str) -> list[str]:
    return [item.name for item in services.subscriptions(connection) if item.service == service]


def _discarded(left: LeftOver) -> str:
    """Return how many messages were discarded, and the first keys, in words."""
    if not left:
        return ""
    count = counted(left.messages, "message")
    return f"; {count} discarded ({left.kinds}) {_first(left)}"


def _first(left: LeftOver) -> str:
    return first_of(left.keys, left.messages - len(left.keys))


def _confirmed(
    round_: Round,
    what: str,
    name: str,
    readers: Callable[[psycopg.Connection[Any], str], Iterable[str]],
    *,
    yes: bool,
) -> bool:
    """Ask whether the messages that are left may be discarded; return whether any may be.

    If none is left, a message that arrives later is not discarded.
    """
    if yes:
        return True
    found = round_.visit(
        "service", lambda connection: services.left_over(connection, readers(connection, name))
    )
    round_.finish(say=True)
    parts = [f"{left} at {where} {_first(left)}" for where, left in found.items() if left]
    if parts:
        lost = " and ".join(parts)
        confirm(f"Discard {lost}, and remove {what}?", yes=False, lost=lost)
    return bool(parts)


subscriptions = Commands(help="Subscriptions: named readers of an inbox, and streams.")

Log = Literal["outbox", "inbox"]
Subscription = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]

SUBSCRIPTIONS = Table[services.Subscription](
    *("subscription", "service", "limits", "fair"),
    things="subscriptions",
    below="paused",
    sparse=("limits", "fair", "paused"),
    cells=lambda row: (
        row.name,
        row.service or "(all)",
        row.limits,
        str(row.fairness),
        _paused(row),
    ),
    plain=lambda row: {"subscription": row.name, "service": row.service, **_decided(row)},
)


@subscriptions.command("create")
def create_subscription(
    name: Subscription,
    *,
    service: Annotated[str | None, typer.Option(help="Service whose messages are read.")] = None,
    everything: Annotated[
        bool, typer.Option("--all-services", help="Read the messages for all services instead.")
    ] = False,
    log: Annotated[
        Log | None,
        typer.Option(
            "--stream", help="Register a stream of Spark instead, which reads this log of --broker."
        ),
    ] = None,
    from_now: FromNow = False,
    config: Config = None,
    broker: Store = None,
) -> None:
    """Add a reader to a service, or register a stream.

    Each reader of a service gets every message.
    """
    if [service is not None, everything, log is not None].count(True) != 1:
        raise UsageError(
            "whose messages? Use either --service NAME or --all-services; or, for a stream, which "
            "log: --stream outbox"
        )
    start: Start = "now" if from_now else "beginning"
    if log is not None:
        _register(name, log, start, config, broker)
        return
    round_at(store, config, broker).tell(
        "subscription",
        lambda connection: services.create_subscription(
            connection, name, service=service, start=start
        ),
        lambda created: f"subscription {name} {'created' if created else 'already exists'}",
    )


def _register(name: str, log: Log, start: Start, config: Config, broker: Store) -> None:
    if broker is None:
        raise UsageError("a stream belongs to a broker or fleet: add --broker NAME")
    round_at(everywhere, config, broker).tell(
        "subscription",
        lambda connection: stream.create(
            connection, f"database {connection.info.dbname!r}", log, name, start
        ),
        lambda created: f"stream {name} {'registered' if created else 'already exists'}",
    )


@subscriptions.command("list")
def list_subscriptions(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List the subscriptions of inboxes, and their pauses."""
    round_.show_rows(
        "subscription", services.subscriptions, "subscriptions", SUBSCRIPTIONS, as_json=as_json
    )


@subscriptions.command("pause")
def pause_subscription(name: Subscription, *, why: Why = "", round_: AtStore) -> None:
    """Pause a subscription: its receivers hand out no messages.

    It stays paused until it is resumed. Other subscriptions of its service go on.
    """

    round_.tell(
        "subscription",
        lambda connection: services.pause(connection, name, why),
        partial(told_paused, "subscription", name),
    )


@subscriptions.command("set")
def set_subscription(
    name: Subscription, *, rules: Annotated[Rules, RULES], why: Why = "", round_: AtStore
) -> None:
    """Limit a subscription, or divide its deliveries among groups.

    See `saf service set`.
    """
    round_.tell(
        "subscription",
        lambda connection: rules.apply(connection, name, why),
        partial(rules.words, "subscription"),
    )


@subscriptions.command("resume")
def resume_subscription(name: Subscription, *, why: Why = "", round_: AtStore) -> None:
    """Resume a subscription that is paused."""

    round_.tell(
        "subscription",
        lambda connection: services.resume(connection, name, why),
        partial(told_resumed, "subscription", name),
    )


@subscriptions.command()
def drop(
    name: Subscription,
    *,
    log: Annotated[
        Log | None,
        typer.Option("--stream", help="Log of the stream. Default: the log that has it."),
    ] = None,
    config: Config = None,
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker", metavar="NAME", help="Broker or fleet. Default: the broker that has it."
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Drop a stream of Spark, after asking: no messages are kept for it.

    Its query cannot continue from its checkpoint: stop it first. If several brokers have such a
    stream, or both logs of one broker, nothing is dropped until you name one.
    """
    round_ = round_at(everywhere, config, broker)
    asked = round_.visit("subscription", lambda connection: stream.logs(connection, name))
    found = {where: [item for item in logs if log in (None, item)] for where, logs in asked.items()}
    found = {where: logs for where, logs in found.items() if logs}
    _refuse_several(name, found, round_, broker)
    if found:
        confirm(f"Drop stream {name!r} at {', '.join(found)}? Its query cannot continue.", yes=yes)
    dropping = round_.among(found)
    for where, logs in dropping.visit(
        "subscription",
        lambda connection: [
            item
            for item in stream.logs(connection, name)
            if log in (None, item) and stream.drop(connection, item, name)
        ],
    ).items():
        for item in logs:
            echo(f"{where}: stream {name} of the {item} dropped")
    round_.failed += dropping.failed
    round_.finish(say=True)


def _refuse_several(
    name: str, found: Mapping[str, list[str]], round_: Round, broker: str | None
) -> None:
    """Raise, before anything is dropped, unless it is clear which stream is meant."""
    if not found and not round_.failed:
        raise UsageError(f"no stream {name!r}: `saf status --broker NAME` lists the streams")
    if broker is None and len(found) > 1:
        raise UsageError(
            f"stream {name!r} exists at {', '.join(found)}, so none is dropped: choose one with "
            "--broker NAME"
        )
    if broker is None and round_.failed:
        echo("not every broker answers, so nothing is dropped: add --broker NAME", err=True)
        round_.finish(say=True)
    places = [where for where, logs in found.items() if len(logs) > 1]
    if places:
        raise UsageError(
            f"stream {name!r} of both logs exists at {', '.join(places)}, so none is dropped: "
            "choose one with --stream outbox or --stream inbox"
        )


@subscriptions.command("remove")
def remove_subscription(
    name: Subscription, *, round_: AtStore, discard: Discard = False, yes: Yes = False
) -> None:
    """Remove a reader, with its parked messages and dead letters."""
    discard = discard and _confirmed(
        round_, f"subscription {name!r}", name, lambda _, reader: [reader], yes=yes
    )
    round_.tell(
        "subscription",
        lambda connection: services.remove_subscription(connection, name, discard=discard),
        lambda discarded: f"subscription {name} removed{_discarded(discarded)}",
    )
