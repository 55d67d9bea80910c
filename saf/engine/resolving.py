"""Resolving: the services that messages for routers are really addressed to, and their matches.

`Resolver` finds the services before routing, inside the task that delivers. So the target sees the
true sender, and no process in between can become a bottleneck. A router may resolve to another
router: to at most `MAX_HOPS` in a row, and to none twice. Answers to questions that are asked only
once are remembered at the source (`saf.routing.resolved`), durably, before anything is sent.

A message that cannot be resolved becomes a dead letter as it was sent: its classifier raises, gives
no answer, or names an invalid service or one that no route leads to. Its neighbours continue.
Messages of a router with a problem (`saf.routing.routers`) wait in the lane of their service, and
later messages for that service wait behind them.

`Matcher` then finds each message's match with the routes, in the same task. A match may have
several routes that share messages; `saf.engine.parts.share` chooses among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.dialogs.statements import COMPARE
from saf.engine.classifying import (
    ANSWERS,
    Function,
    as_answers,
    by_arrow,
    by_database,
    by_python,
)
from saf.errors import ConfigurationError, SafError, Unroutable
from saf.message import MAX_HOPS, MAX_KEY, MAX_NAME
from saf.routing.functions import Classify
from saf.routing.matching import (
    ARROW,
    FUNCTION,
    KEY,
    SQL,
    Match,
    Named,
    Router,
    Routes,
    distinct_matches,
)
from saf.routing.resolved import Resolved
from saf.routing.routers import load
from saf.setaside.lane import Lane
from saf.setaside.parking import ADDRESS

MOST_COMPARED = 32
"""How many routed services are compared with one that has no route."""
LATER = "of its dialog, the first message was not resolved"
RAISED = "its expression raises an error"
"""The error of a message for which an expression in SQL fails; the task knows no more."""

NO_TRANSFORMS: Mapping[str, str | None] = MappingProxyType({})
BY_ROUTER = (
    "router {router!r} leads to {service!r}, whose messages are transformed: a transform is for "
    "messages that are sent to its service, or to its router, itself"
)

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]


class Memory(Protocol):
    """Remembers resolutions; see `saf.routing.resolved`."""

    def resolved(self, router: str, keys: Collection[str]) -> Mapping[str, Resolved]:
        """Return the remembered resolutions of these keys."""

    def keep(self, router: str, new: Mapping[str, Resolved]) -> Mapping[str, Resolved]:
        """Remember resolutions, committed; return those that these keys use from now on."""


class Answers(Protocol):
    """Answers of expressions in SQL, which Spark evaluates in step with the delivery."""

    def about(self, rows: pa.Table) -> Mask:
        """Read up to these messages; return a mask of those with answers."""

    def to(self, router: Router, rows: pa.Table) -> pa.Table:
        """Return a router's answers for some of these messages, as in `saf.engine.classifying`.

        Raises:
            Unavailable: answers are missing, because the source could not be read to the end.
        """


@dataclass(kw_only=True)
class Resolution:
    """Messages after resolving."""

    rows: pa.Table
    """The messages that continue, with their real addresses."""
    dead: list[tuple[pa.Table, str]] = field(default_factory=list)
    """The messages that cannot be resolved, as they were sent, each group with the reason."""
    waiting: pa.Table | None = None
    """The messages whose router cannot be asked, as they were sent."""


class Resolver:
    """The routers of one batch."""

    def __init__(
        self,
        routers: Collection[Router],
        matcher: Matcher,
        memory: Memory,
        answers: Answers | None = None,
        *,
        further: Collection[str] = (),
        transforms: Mapping[str, str | None] = NO_TRANSFORMS,
        classify: Classify | None = None,
    ) -> None:
        """Take routers, and what else decides whether a message may continue.

        ``further`` are services that others resolve later; they need no route here. ``transforms``
        maps each service with a transform (`saf.engine.transforming`) to its problem, if any.
        ``classify`` calls the function of a router whose classifier is one of the database.
        """
        routers = [_usable(router, answers, classify) for router in routers]
        self._routers = {router.service: router for router in routers}
        self._by_spark = answers
        self._by_database = classify
        self._resolved_later = {*self._routers, *further}
        self._matcher = matcher
        self._memory = memory
        self._functions: dict[str, Function] = {}
        self._transforms = transforms
        self.problems: dict[str, str] = {}
        """For each service whose messages wait, the reason."""

    def __bool__(self) -> bool:
        return bool(self._routers)

    def obstacle(self, lane: Lane) -> SafError:
        """Return why messages wait in a lane for a route."""
        service = lane.subject or lane.kind
        broker = str(lane.broker) if lane.broker else None
        if problem := self.problems.get(service):
            return ConfigurationError(problem)
        destinations = self._matcher.routes.elsewhere(service, broker)
        routed = {route.service for route in self._matcher.routes.routes if route.service}
        # thousands of lanes may wait, and each is compared with these services
        return Unroutable(
            service, broker, destinations, routed if len(routed) <= MOST_COMPARED else ()
        )

    def resolve(self, rows: pa.Table, held: Iterable[Lane] = ()) -> Resolution:
        """Give rows their real addresses; rows behind a lane in ``held`` wait.

        Raises:
            ConfigurationError: a classifier that the driver could load cannot be loaded here.
        """
        resolution = self._resolve(rows, held)
        return self._let_wait(rows, resolution) if self._transforms else resolution

    def _let_wait(self, rows: pa.Table, resolution: Resolution) -> Resolution:
        """Let messages wait whose transform cannot run."""
        number = "parked_id" if "parked_id" in rows.column_names else "id"
        going = resolution.rows
        sent = rows["to_service"].take(pc.index_in(going[number], rows[number].combine_chunks()))
        now, problems = going["to_service"], dict[str, str]()
        for service in pc.unique(now).to_pylist():
            if service in self._transforms:
                for by in pc.unique(sent.filter(pc.equal(now, service))).to_pylist():
                    if by != service:
                        problems[by] = BY_ROUTER.format(router=by, service=service)
        for by in pc.unique(sent).to_pylist():
            if (why := self._transforms.get(by)) is not None:
                problems[by] = why
        if not problems:
            return resolution
        self.problems |= problems
        waits = pc.is_in(sent, pa.array(problems, pa.string()))
        numbers = going[number].filter(waits).combine_chunks()
        waiting = rows.filter(pc.is_in(rows[number], numbers))
        if resolution.waiting is not None:
            waiting = pa.concat_tables([waiting, resolution.waiting])
            waiting = waiting.take(pc.sort_indices(waiting, [(number, "ascending")]))
        return replace(resolution, rows=going.filter(pc.invert(waits)), waiting=waiting)

    def _resolve(self, rows: pa.Table, held: Iterable[Lane]) -> Resolution:
        if not self._routers:
            return Resolution(rows=rows)
        sent = rows["to_service"]
        left = _is_in(sent, self._routers)
        if not left.any():
            return Resolution(rows=rows)
        waiting = left & _is_in(sent, [lane.subject for lane in held if lane.unrouted])
        if self._by_spark is not None:
            unasked = ~self._by_spark.about(rows)
            if "parked_id" in rows.column_names:
                waiting |= left & unasked  # parked after Spark read them
        left &= ~waiting
        addressed, errors, trails = rows, dict[int, str](), dict[int, list[str]]()
        for _ in range(MAX_HOPS):
            now = addressed["to_service"]
            for service in _distinct(now, left):
                router = self._routers[service]
                mask = left & _is_in(now, [service])
                if router.problem is not None:
                    self.problems |= dict.fromkeys(_distinct(sent, mask), router.problem)
                    waiting |= mask
                    left &= ~mask
                    continue
                answers = self._answers(router, _filtered(addressed, mask))
                errors |= _errors(np.flatnonzero(mask), answers["error"])
                addressed = _readdressed(addressed, mask, answers)
            left &= _is_in(addressed["to_service"], self._routers)
            left[list(errors)] = False
            if not left.any():
                break
            errors |= _circles(trails, sent, addressed["to_service"], left)
            left[list(errors)] = False
        for row in np.flatnonzero(left):
            errors[int(row)] = f"more than {MAX_HOPS} routers in a row: {_chain(trails[int(row)])}"
        if waiting.any():
            waiting |= _is_in(sent, _distinct(sent, waiting))
        removed = waiting.copy()
        removed[list(errors)] = True
        return Resolution(
            rows=_filtered(addressed, ~removed),
            dead=_dead(rows, errors, waiting),
            waiting=_filtered(rows, waiting) if waiting.any() else None,
        )

    def _answers(self, router: Router, rows: pa.Table) -> pa.Table:
        """Return answers for rows; where a key has one answer, use its first answered row's."""
        keys = _once(router, rows)
        if keys.null_count == len(keys):
            return self._classified(router, rows)
        encoded = keys.dictionary_encode()
        names = [*encoded.dictionary.to_pylist(), None]  # None: rows without a key
        indices = pc.fill_null(encoded.indices, -1).to_numpy()
        known = dict(self._memory.resolved(router.service, names[:-1]))
        since = dict.fromkeys(known, 0)
        asked = indices < 0
        asked[np.unique(indices, return_index=True)[1]] = True
        asked &= np.array([name not in known for name in names])[indices]
        places, own = np.flatnonzero(asked), self._classified(router, _filtered(rows, asked))
        failed = indices[places[own["error"].is_valid().to_numpy()]]
        retries = np.isin(indices, failed[failed >= 0]) & ~asked
        if retries.any():  # a key's first row failed: ask for its others
            places = np.concatenate([places, np.flatnonzero(retries)])
            own = pa.concat_tables([own, self._classified(router, _filtered(rows, retries))])
        new: dict[str, Resolved] = {}
        for place, answer in _resolved(places, own, indices >= 0):
            name = names[indices[place]]
            if name not in new:
                new[name], since[name] = answer, place
        if new:
            known |= self._memory.keep(router.service, new)
        of_keys = as_answers([known.get(name, "") for name in names])
        take = np.zeros(len(indices), np.int64)
        take[places] = np.arange(len(places))
        beginning = np.array([since.get(name, len(indices)) for name in names])
        follows = np.arange(len(indices)) >= beginning[indices]
        take[follows] = len(places) + indices[follows]
        return pa.concat_tables([own, of_keys]).take(take)

    def _classified(self, router: Router, rows: pa.Table) -> pa.Table:
        """Return the classifier's answers; ask it about the first message of each dialog only."""
        later = _later(rows)
        if not later.any():
            return self._judged(router, rows)
        begun = self._judged(router, _filtered(rows, ~later))
        answers = pa.concat_tables([begun, as_answers([LATER] * int(later.sum()))])
        return answers.take(np.argsort(np.argsort(later, kind="stable")))

    def _judged(self, router: Router, rows: pa.Table) -> pa.Table:
        """Return the classifier's answers; turn empty or unroutable ones into errors."""
        answers = self._asked(router, rows)
        services, keys, error = answers["service"], answers["key"], answers["error"]
        addresses = {
            "to_service": services,
            "to_broker": pc.coalesce(answers["broker"], rows["to_broker"]),
        }
        lost = self._matcher.route(pa.table(addresses))["route"].is_null().to_numpy()
        # messages for a still unknown broker wait for the broker
        lost &= addresses["to_broker"].is_null().to_numpy() & ~_is_in(
            services, self._resolved_later
        )
        named = pc.binary_join_element_wise("it names '", services, "', ", "")
        for wrong, why in (
            (pc.is_null(services), pa.scalar("its classifier returns no service")),
            (
                _unfit(services, MAX_NAME),
                pc.binary_join_element_wise(named, "which is not a service name", ""),
            ),
            (_unfit(keys, MAX_KEY), pa.scalar("it names a key that no message can have")),
            (pa.array(lost), pc.binary_join_element_wise(named, "which no route leads to", "")),
        ):
            error = pc.coalesce(error, pc.if_else(wrong, why, pa.scalar(None, pa.string())))
        services = pc.if_else(pc.is_null(error), services, pa.scalar(None, pa.string()))
        return answers.set_column(0, "service", services).set_column(3, "error", error)

    def _asked(self, router: Router, rows: pa.Table) -> pa.Table:
        if router.kind == SQL and self._by_spark is not None:
            return self._by_spark.to(router, rows)
        if router.kind == FUNCTION and self._by_database is not None:
            return by_database(self._by_database, rows)
        if router.service not in self._functions:
            self._functions[router.service] = load(router)
        classify = by_arrow if router.kind == ARROW else by_python
        return classify(self._functions[router.service], rows)


def _usable(router: Router, answers: Answers | None, classify: Classify | None) -> Router:
    if router.problem:
        return router
    if router.kind == SQL and not answers:
        return replace(router, problem=f"router {router.service!r} is in SQL, which needs Spark")
    if router.kind == FUNCTION and classify is None:
        calls = "calls a function of the database, which only a routing service does"
        return replace(router, problem=f"router {router.service!r} {calls}")
    return router


def _once(router: Router, rows: pa.Table) -> pa.Array:
    """Return the value that each message is classified once for: conversation, key or null."""
    conversations = rows["conversation_id"]
    keys = rows["key"] if router.once_per == KEY else pa.nulls(len(rows), pa.string())
    if conversations.null_count < len(conversations):
        ids = [id_ and str(UUID(bytes=id_)) for id_ in conversations.to_pylist()]
        keys = pc.coalesce(pa.array(ids, pa.string()), keys)
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _later(rows: pa.Table) -> Mask:
    """Return which messages belong to a dialog, but are not its first message."""
    flags = rows["from_initiator"]
    if flags.null_count == len(flags):
        return np.zeros(len(flags), np.bool_)
    # a COMPARE has the number of the last message, and contains nothing that could be classified
    compares = pc.equal(rows["message_type"], COMPARE)
    follows = pc.or_kleene(pc.greater(rows["sequence"], 1), compares)
    later = pc.and_(flags.is_valid(), pc.fill_null(follows, False))
    return later.to_numpy()  # type: ignore[no-any-return] # pyarrow has no types


def _resolved(places: Places, answers: pa.Table, keyed: Mask) -> Iterable[tuple[int, Resolved]]:
    """Yield the answers to remember, each with its row."""
    for place, row in zip(places.tolist(), answers.to_pylist(), strict=True):
        if keyed[place] and row["error"] is None:
            broker = UUID(bytes=row["broker"]) if row["broker"] else None
            yield place, Resolved(service=row["service"], broker=broker, key=row["key"])


def _readdressed(rows: pa.Table, mask: Mask, answers: pa.Table) -> pa.Table:
    """Set the addresses of the rows in ``mask`` to the answers; null answers change nothing."""
    for name, answer in zip(ADDRESS, ANSWERS.names[:-1], strict=True):
        new = answers[answer].combine_chunks()
        if new.null_count < len(new):
            old = rows[name].combine_chunks()
            if not mask.all():
                new = pc.replace_with_mask(pa.nulls(len(old), new.type), pa.array(mask), new)
            place = rows.column_names.index(name)
            rows = rows.set_column(place, name, pc.coalesce(new, old))
    return rows


def _circles(
    trails: dict[int, list[str]], sent: pa.ChunkedArray, now: pa.ChunkedArray, left: Mask
) -> dict[int, str]:
    """Extend the trail of each row that is left; return an error for each loop."""
    found = {}
    for row in np.flatnonzero(left).tolist():
        trail, service = trails.setdefault(row, [sent[row].as_py()]), now[row].as_py()
        if service in trail:
            found[row] = f"a loop of routers: {_chain([*trail, service])}"
        trail.append(service)
    return found


def _dead(rows: pa.Table, errors: Mapping[int, str], waiting: Mask) -> list[tuple[pa.Table, str]]:
    places: dict[str, list[int]] = defaultdict(list)
    for row, error in errors.items():
        if not waiting[row]:
            places[f"router {rows['to_service'][row].as_py()!r}: {error}"].append(row)
    return [(rows.take(sorted(indices)), error) for error, indices in places.items()]


def _errors(places: Places, errors: pa.ChunkedArray) -> dict[int, str]:
    if errors.null_count == len(errors):
        return {}
    texts = zip(places.tolist(), errors.to_pylist(), strict=True)
    return {place: text for place, text in texts if text is not None}


def _unfit(names: pa.ChunkedArray, longest: int) -> pa.ChunkedArray:
    """Return which names, or keys, are empty, too long or contain NUL."""
    length = pc.binary_length(names)
    bad = pc.or_(pc.equal(length, 0), pc.greater(length, longest))
    return pc.fill_null(pc.or_(bad, pc.match_substring(names, "\0")), False)


def _chain(services: Iterable[str]) -> str:
    return " -> ".join(services)


def _is_in(column: pa.ChunkedArray, values: Collection[str]) -> Mask:
    return pc.is_in(column, pa.array(values, pa.string())).to_numpy()  # type: ignore[no-any-return]


def _distinct(column: pa.ChunkedArray, of: Mask) -> list[Any]:
    return pc.unique(column.filter(pa.array(of))).to_pylist()  # type: ignore[no-any-return]


def _filtered(rows: pa.Table, mask: Mask) -> pa.Table:
    return rows if mask.all() else rows.filter(pa.array(mask))


class Matcher:
    """The matches of one set of routes.

    Services and brokers are looked up in Arrow hash tables, built from the names in the routes. So
    a thousand routes cost as much as one: some 10 ns per message. (In Spark, a CASE over 1,000
    conditions takes minutes to compile, and a literal map or a broadcast join of 1,000 costs half a
    µs per message.)
    """

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.matches: list[Match] = distinct_matches(routes)
        """The matches that the numbers in the column ``route`` stand for."""
        number = {match: place for place, match in enumerate(self.matches)}
        self._for_any = _Table(routes.matches, number)
        self._to_known = _Table(routes.matches_of_known, number)
        self._to_unknown = _Table(routes.matches_of_unknown, number)

    def route(self, rows: pa.Table) -> pa.Table:
        """Add the column ``route``: the number of each row's match, or null."""
        services, brokers = rows["to_service"], rows["to_broker"]
        route = pc.coalesce(self._for_any.by_service(services), self._for_any.any)
        if brokers.null_count < len(brokers):
            of_broker = pc.coalesce(
                self._to_known.by_both(services, brokers),
                self._to_known.by_broker(brokers),
                self._to_unknown.by_both(services, brokers),
                self._to_unknown.by_service(services),
                self._to_unknown.by_broker(brokers),
                self._to_unknown.any,
            )
            route = pc.if_else(pc.is_valid(brokers), of_broker, route)
        return rows.append_column("route", route)

    def quality(self, rows: pa.Table, destination: str) -> pa.ChunkedArray:
        """Return for each row the quality of service that its route to a destination names, or
        null."""
        named = [
            next((r.quality for r in match.routes if r.destination == destination), None)
            for match in self.matches
        ]
        return pa.array(named, pa.string()).take(self.route(rows)["route"])


class _Table:
    """The numbers of matches, by the service and broker that routes name."""

    def __init__(self, matches: Mapping[Named, Match], number: Mapping[Match, int]) -> None:
        self._services: dict[str, int] = {}
        self._brokers: dict[bytes, int] = {}
        self._both: dict[tuple[str, bytes], int] = {}
        self.any = pa.scalar(None, pa.int32())
        for (service, broker), match in matches.items():
            broker_id = UUID(broker).bytes if broker is not None else None
            if service is not None and broker_id is not None:
                self._both[service, broker_id] = number[match]
            elif service is not None:
                self._services[service] = number[match]
            elif broker_id is not None:
                self._brokers[broker_id] = number[match]
            else:
                self.any = pa.scalar(number[match], pa.int32())

    def by_service(self, services: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the number of each service's match, or null."""
        return _looked_up(services, pa.array(self._services, pa.string()), self._services.values())

    def by_broker(self, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the number of each broker's match, or null."""
        return _looked_up(brokers, pa.array(self._brokers, pa.binary()), self._brokers.values())

    def by_both(self, services: pa.ChunkedArray, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the number of the match of each service at a broker, or null."""
        service = pa.array(dict.fromkeys(service for service, _ in self._both), pa.string())
        broker = pa.array(dict.fromkeys(broker for _, broker in self._both), pa.binary())
        width = np.int64(len(broker))

        def code(services: pa.Array, brokers: pa.Array) -> pa.Array:
            index = pc.index_in(services, value_set=service).cast(pa.int64())
            return pc.add(pc.multiply(index, width), pc.index_in(brokers, value_set=broker))

        named = list(zip(*self._both, strict=True)) or [(), ()]
        codes = code(pa.array(named[0], pa.string()), pa.array(named[1], pa.binary()))
        return _looked_up(code(services, brokers), codes, self._both.values())


def _looked_up(column: pa.ChunkedArray, names: pa.Array, numbers: Iterable[int]) -> pa.ChunkedArray:
    """Return the number of each value's name, or null."""
    places = pc.index_in(column, value_set=names, skip_nulls=True)
    return pa.array(numbers, pa.int32()).take(places)
