"""A drain: forwards and handles pending messages synchronously, until nothing is due.

    drained = saf_drain(worker)
    assert drained.handled == 1

It alternates between the forwarder's cycle without Spark (see `saf.testing.cycle`) and the workers'
own code, in this process and thread: messages that a handler sends are forwarded and handled, too.
A broker is its own MOM store unless another database is given.

It fails if messages are left behind; the cause of its error is the exception of the first handler
that raised. Failed messages are set aside as in production; ``errors="park"`` serves tests of that.
Delayed messages (``deliver_at``) and expired ones are not failures; `saf.testing.clock` lets their
time come.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from saf.database import fetch
from saf.errors import MissingExtra, UsageError
from saf.setaside.lane import THE_LANE, Kind
from saf.testing.databases import Database

if TYPE_CHECKING:
    from saf.engine.work import Receipt
    from saf.receiving.loop import Loop
    from saf.testing.cycle import Cycle

ROUNDS = 100
"""Rounds after which messages that cause other messages are taken for an endless loop."""

COUNTS = """
SELECT (SELECT count(*) FROM saf.parked), (SELECT count(*) FROM saf.dead_letter),
       (SELECT coalesce(max(dead_letter_id), 0) FROM saf.dead_letter),
       (SELECT count(*) FROM saf.held WHERE due IS NOT NULL)
"""

# Reads the first message of each waiting lane, which has failed
LEFT_BEHIND = f"""
SELECT message_id, to_service, key, messages, error FROM (
    SELECT DISTINCT ON (subscription_id, {THE_LANE})
           p.id, message_id, to_service, key,
           b.error || ', and waits for its next attempt' AS error,
           count(*) OVER (PARTITION BY subscription_id, {THE_LANE}) AS messages
    FROM saf.parked p JOIN saf.backoff b USING (subscription_id, {THE_LANE})
    WHERE kind <> '{Kind.LATER}'
    ORDER BY subscription_id, {THE_LANE}, p.id
) AS waiting
UNION ALL
SELECT message_id, to_service, key, 1, error || ', and is a dead letter (' || reason || ')'
FROM saf.dead_letter WHERE dead_letter_id > %(known)s AND reason <> 'expired'
"""


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Number of messages that a drain has forwarded, handled and set aside."""

    forwarded: int
    """Messages stored in an inbox."""
    handled: int
    """Messages that the workers have handled."""
    parked: int
    """Messages set aside at the end: delayed in an inbox, or waiting for another attempt."""
    dead: int
    """Messages that have become dead letters."""
    held: int
    """Messages that are due later, or that may not be sent any more, at the end."""


class DrainFailed(AssertionError):
    """A drain has left messages behind; its cause is the first handler's exception, if any."""


class Drain:
    """Drains the outbox of one database; see `saf.testing.drain`."""

    def __init__(self, source: Database) -> None:
        self._source = source

    def __call__(
        self,
        *workers: Loop,
        to: Database | Mapping[str, Database] | None = None,
        errors: Literal["raise", "park"] = "raise",
    ) -> Drained:
        """Forward pending messages and let workers handle them, repeatedly, until nothing is due.

        Args:
            workers: workers that handle messages, with engines for this drain's databases.
            to: destination. None: the same database; or another database; or several databases by
                the names in rows of saf.route, the first being the default.
            errors: "park" to continue after failures, without failing at the end.

        Raises:
            DrainFailed: a message failed, or messages cause each other in an endless loop.
            MissingExtra: Arrow is not installed.
            UsageError: a worker receives from another database, or Django never commits the test.
        """
        __tracebackhide__ = True
        self._source.require_commits("saf_drain")
        destinations = to if isinstance(to, Mapping) else {"inbox": to or self._source}
        databases = list(dict.fromkeys([self._source, *destinations.values()]))
        for worker in workers:
            _refuse_elsewhere(worker, databases)
        before = [_counts(database) for database in databases]
        forwarded = handled = 0
        failed: list[BaseException | str] = []
        problems: list[str] = []
        with _cycle(self._source, destinations) as cycle:
            for _ in range(ROUNDS):
                receipts = _forward(cycle)
                deliveries = [one for worker in workers for one in worker.deliveries()]
                stored = sum(one.messages for one in receipts if one.destination is not None)
                forwarded += stored
                handled += sum(delivery.handled for delivery in deliveries)
                failed += [error for delivery in deliveries for _, error in delivery.errors]
                problems += [one.error for one in receipts if one.error is not None]
                if problems or not (stored or deliveries):
                    break
            else:
                raise DrainFailed(f"after {ROUNDS} rounds, messages still cause further ones")
        after = [_counts(database) for database in databases]
        if errors == "raise":
            for database, (_, _, known, _) in zip(databases, before, strict=True):
                problems += _left_behind(database, known)
            if problems:
                causes = [error for error in failed if isinstance(error, BaseException)]
                raise DrainFailed(_complaint(problems)) from next(iter(causes), None)
        return Drained(
            forwarded=forwarded,
            handled=handled,
            parked=sum(parked for parked, *_ in after),
            dead=sum(dead for _, dead, *_ in after) - sum(dead for _, dead, *_ in before),
            held=sum(held for *_, held in after),
        )


def _cycle(source: Database, destinations: Mapping[str, Database]) -> AbstractContextManager[Cycle]:
    try:
        from saf.testing.cycle import Cycle, forwarding_rules
    except ModuleNotFoundError:
        raise MissingExtra("forwarder", "saf_drain") from None
    dsns = {name: database.dsn for name, database in destinations.items()}
    return Cycle(source.dsn, forwarding_rules("exactly_once", 1000, **dsns))


def _forward(cycle: Cycle) -> list[Receipt]:
    """Run cycles until nothing is pending, or there is a problem."""
    receipts: list[Receipt] = []
    while found := cycle.run():
        receipts += found
        if any(receipt.error for receipt in found):
            break
    return receipts


def _refuse_elsewhere(worker: Loop, databases: list[Database]) -> None:
    """Reject a worker of the application that was made for its real database."""
    with worker._equipped(), worker._connected() as link:
        name = link.raw.info.dbname
    if name not in [database.dsn.database for database in databases]:
        raise UsageError(
            f"the worker for {worker.subscription!r} receives from database {name!r}, which has no "
            "part in this drain: set its engine to that of the test's database, as with "
            'monkeypatch.setattr(worker, "engine", saf_database.engine)'
        )


def _counts(database: Database) -> tuple[Any, ...]:
    with database.connect() as connection:
        (counts,) = fetch(connection, COUNTS)
    return counts


def _left_behind(database: Database, known: int) -> list[str]:
    with database.connect() as connection:
        rows = fetch(connection, LEFT_BEHIND, {"known": known})
    return [
        f"message {message_id} to {service!r}"
        + (f", key {key!r}" if key is not None else "")
        + (f" and {messages - 1} behind it" if messages > 1 else "")
        + f": {error}"
        for message_id, service, key, messages, error in rows
    ]


def _complaint(problems: list[str]) -> str:
    lines = [f"  - {problem}" for problem in problems]
    last = 'If that is what the test is about: saf_drain(…, errors="park")'
    return "\n".join(["not everything was forwarded and handled:", *lines, last])
