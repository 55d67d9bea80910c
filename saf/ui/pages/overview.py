"""The overview, charts and pending messages, from the figures, so no page waits for a broker."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.responses import Response

from saf.config import Settings
from saf.telemetry import metrics as m
from saf.ui.beat import Beat
from saf.ui.charts import CHARTS, chart, clock
from saf.ui.history import HOUR_SECONDS, Point
from saf.ui.pulse import NARROW, drawn
from saf.ui.site import LIVE, Visit, navigation


@dataclass(frozen=True, kw_only=True)
class BrokerRow:
    """A broker on the overview."""

    name: str
    up: bool
    why: str
    pending: float
    oldest_seconds: float | None
    unread: float
    lag_seconds: float | None
    parked: float
    dead: float
    members: float
    unowned: float
    slots: float | None
    transaction_seconds: float | None

    @property
    def state(self) -> str:
        """State of the broker in a word or two."""
        if not self.up:
            return "down"
        if self.dead:
            return "dead letters"
        return "parked" if self.parked else "up"

    @property
    def colour(self) -> str:
        """CSS class of the state."""
        return {"down": "bad", "dead letters": "warn", "parked": "warn"}.get(self.state, "good")


@dataclass(frozen=True, kw_only=True)
class DestinationRow:
    """A destination, as the sources see it."""

    name: str
    state: str
    """Worst state that a source reports."""
    pending: float
    parked: float
    sources: int

    @property
    def colour(self) -> str:
        """CSS class of the state."""
        return {"down": "bad", "waiting": "warn"}.get(self.state, "good")


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """A topic of another broker that is read into an inbox."""

    name: str
    kind: str
    topic: str
    into: str
    pending: float | None
    """Messages that the inbox does not have yet; None if the topic was not read yet."""

    @property
    def state(self) -> str:
        """State of the source in a word or two."""
        if self.pending is None:
            return "not read yet"
        return "behind" if self.pending else "up to date"

    @property
    def colour(self) -> str:
        """CSS class of the state."""
        return {"not read yet": "idle", "behind": "warn"}.get(self.state, "good")


def overview(visit: Visit) -> Response:
    """Show all brokers, destinations, endpoints and sources at a glance."""
    beat = visit.beat
    brokers = rows(beat)
    targets = destinations(beat)
    return visit.page(
        "overview.html",
        title="Overview",
        live=LIVE,
        brokers=brokers,
        destinations=targets,
        endpoints=endpoints(beat),
        sources=sources(beat, visit.site.settings),
        drawings=[one for one in (drawn(beat), drawn(beat, NARROW)) if one is not None],
        curves={name: [*values] for name, values in visit.site.pulse.curves.items()},
        totals={
            "pending": beat.total(m.PENDING),
            "unread": beat.total(m.UNREAD),
            "parked": beat.total(m.PARKED),
            "dead": beat.total(m.DEAD),
            "oldest": beat.most(m.OLDEST_PENDING),
            "lag": beat.most(m.LAG),
        },
    )


MOST_ROWS = 12
"""Services with small charts on a page, unless a visitor asks for all."""


def charts(visit: Visit) -> Response:
    """Show the last hour as charts: of all services together and one by one, or of one service."""
    beat, history = visit.beat, visit.site.pulse.history
    points, services = history.points(), history.services()
    service = visit.given("service")
    now = beat.at or time.time()
    shown = services if visit.given("all") else services[:MOST_ROWS]
    since = history.since
    return visit.page(
        "charts.html",
        title="Charts",
        live=LIVE,
        service=service,
        services=services,
        charts=[chart(kind, points, service, now) for kind in CHARTS],
        rows=[] if service else [(one, Row.of(points, one)) for one in shown],
        more=len(services) - len(shown),
        as_tables=visit.given("table"),
        since=None if since is None or since < now - HOUR_SECONDS else clock(since),
        silent=any(point.down for point in points),
        clock=clock,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One service in the table of charts: its present numbers, and their curves."""

    waiting: Sequence[float]
    oldest: Sequence[float]
    per_minute: Sequence[float]
    """The greater of sent and stored messages, where the time is long enough to tell."""
    failures: Sequence[float]

    @classmethod
    def of(cls, points: Sequence[Point], service: str) -> Row:
        """Return the row of a service."""
        numbers = [point.numbers(service) for point in points]
        return cls(
            waiting=[one.pending + one.unread for one in numbers],
            oldest=[max(one.oldest, one.lag) for one in numbers],
            per_minute=[
                rate
                for point, one in zip(points, numbers, strict=True)
                if (rate := point.per_minute(max(one.sent, one.stored))) is not None
            ],
            failures=[one.failures for one in numbers],
        )


def nav(visit: Visit) -> Response:
    """Return the navigation alone, with its counts."""
    return visit.part("nav.html", nav=navigation(visit.beat, visit.given("here") or ""))


def rows(beat: Beat) -> list[BrokerRow]:
    """Return the brokers; those that need attention come first."""
    found = []
    for (name,), reachable in beat.of(m.UP):
        members = sum(v for (log, role), v in beat.of(m.MEMBERS, name) if role == "forwarder")
        unowned = sum(v for (log, role), v in beat.of(m.UNOWNED, name) if role == "forwarder")
        slots = [value for _, value in beat.of(m.SLOTS, name)]
        found.append(
            BrokerRow(
                name=name,
                up=bool(reachable),
                why=beat.down.get(name, ""),
                pending=beat.total(m.PENDING, name),
                oldest_seconds=beat.most(m.OLDEST_PENDING, name),
                unread=beat.total(m.UNREAD, name),
                lag_seconds=beat.most(m.LAG, name),
                parked=beat.total(m.PARKED, name),
                dead=beat.total(m.DEAD, name),
                members=members,
                unowned=unowned,
                slots=max(slots, default=None),
                transaction_seconds=beat.most(m.OLDEST_TRANSACTION, name),
            )
        )
    return sorted(found, key=lambda row: (row.up, -row.dead, -row.parked, -row.pending, row.name))


STATES = ("down", "waiting", "up")


def destinations(beat: Beat) -> list[DestinationRow]:
    """Return the destinations, each with the worst state that a source reports."""
    states_of: dict[str, list[str]] = defaultdict(list)
    for (_, name, state), flag in beat.of(m.DESTINATIONS):
        if flag:
            states_of[name].append(state)
    pending: dict[str, float] = defaultdict(float)
    for (_, name, _), value in beat.of(m.PENDING):
        pending[name] += value
    parked: dict[str, float] = defaultdict(float)
    for (_, _, name, _), value in beat.of(m.PARKED):
        parked[name] += value
    return [
        DestinationRow(
            name=name,
            state=min(states, key=STATES.index),
            pending=pending[name],
            parked=parked[name],
            sources=len(states),
        )
        for name, states in sorted(states_of.items())
    ]


ENDPOINT_STATES = {"closed": "up", "open": "down"}
"""States of an endpoint's circuit breaker, in words that name the endpoint's own state."""


def endpoints(beat: Beat) -> Mapping[tuple[str, str], str]:
    """Return the state of each endpoint, by broker and name."""
    return {
        (broker, name): ENDPOINT_STATES.get(state, state)
        for (broker, name, state), flag in beat.of(m.ENDPOINTS)
        if flag
    }


def sources(beat: Beat, settings: Settings) -> list[SourceRow]:
    """Return the sources of saf.toml, as forwarders last saw them."""
    pending = {name: value for (_, name), value in beat.of(m.SOURCE_PENDING)}
    return [
        SourceRow(
            name=name,
            kind=source.kind,
            topic=source.topic,
            into=settings.inbox_for(name)[0],
            pending=pending.get(name),
        )
        for name, source in sorted(settings.sources.items())
    ]


@dataclass(frozen=True, kw_only=True)
class PendingRow:
    """Pending messages for one service."""

    broker: str
    destination: str
    service: str
    messages: float
    oldest_seconds: float | None


def pending(visit: Visit) -> Response:
    """Show pending messages by broker, destination and service, the oldest first."""
    beat = visit.beat
    oldest = dict(beat.of(m.OLDEST_PENDING))
    wanted = {name: visit.given(name) for name in ("broker", "destination", "service")}
    found = [
        PendingRow(
            broker=broker,
            destination=destination,
            service=service,
            messages=value,
            oldest_seconds=oldest.get((broker, destination, service)),
        )
        for (broker, destination, service), value in beat.of(m.PENDING)
        if value
        and wanted["broker"] in (None, broker)
        and wanted["destination"] in (None, destination)
        and wanted["service"] in (None, service)
    ]
    found.sort(key=lambda one: (-(one.oldest_seconds or 0.0), one.broker, one.service))
    lags = [
        (broker, log, subscription, value, beat.total(m.UNREAD, broker, subscription))
        for (broker, log, subscription), value in beat.of(m.LAG)
        if log == "inbox" and wanted["broker"] in (None, broker)
    ]
    lags.sort(key=lambda one: (-one[3], one[0], one[2]))
    every = 0 if found else round(beat.total(m.PENDING, *filter(None, [wanted["broker"]])))
    return visit.page(
        "pending.html",
        title="Pending",
        live=LIVE,
        rows=found,
        every=every,
        lags=lags,
        wanted=wanted,
    )
