"""Schedules that an application declares in its code, and deploys where it migrates.

    schedules = saf.Schedules("shop")
    schedules.cron("nightly", "0 2 * * *", zone="Europe/Berlin", service="reports", body={})
    schedules.every("refresh", "15m", service="search", body={"full": False})

    with engine.begin() as connection:
        schedules.deploy(connection)

The body is data, stored in the row, because a run needs no code of the application: any forwarder
sends it. So no decorator takes a function here: the function would run when it is declared, not at
each run.

`deploy` compares the declarations with the rows of this origin. Of two processes that deploy at the
same time, the second finds nothing to do. A changed declaration changes its row. A row that is no
longer declared is reported and stays, because an older release may still be running.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Unpack

from saf.errors import UsageError
from saf.schedules.stored import (
    Declaration,
    Missed,
    Options,
    Sent,
    check_name,
    declaration,
    listed,
    put,
)
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from saf.transaction import Conn

log = Log("saf.schedules")


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """What `Schedules.deploy` has done, by the names of schedules."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    undeclared: tuple[str, ...]
    """Schedules of this origin that are no longer declared. They stay, and run, until they are
    removed with `saf schedule remove` or `saf.schedules.remove`."""


class Schedules:
    """The schedules of one application.

    Args:
        origin: the application's name. A schedule belongs to the origin that has added it, and no
            other origin changes it.
        from_service: the sender's service name, unless a schedule sets its own.
    """

    def __init__(self, origin: str, *, from_service: str | None = None) -> None:
        check_name(origin)
        self.origin = origin
        self.from_service = from_service
        self._declared: dict[str, Declaration] = {}

    def cron(
        self,
        name: str,
        cron: str,
        *,
        service: str,
        body: object,
        zone: str = "UTC",
        missed: Missed = "one",
        **sent: Unpack[Sent],
    ) -> None:
        """Declare a schedule by cron text; see `saf.schedules.add`.

        ``sent`` is what the message has besides, as in `saf.Outbox.send`: ``key``, ``headers``,
        ``message_type``, ``from_service`` and ``to_broker``.

        Raises:
            UsageError, InvalidMessage: a value cannot be used, or the name is declared already.
        """
        self._declare(
            name,
            service,
            body,
            cron=cron,
            zone=zone,
            missed=missed,
            **sent,
        )

    def every(
        self,
        name: str,
        every: str | timedelta,
        *,
        service: str,
        body: object,
        anchor: datetime | None = None,
        missed: Missed = "one",
        **sent: Unpack[Sent],
    ) -> None:
        """Declare a schedule by the time between its runs; see `saf.schedules.add`.

        ``sent`` is what the message has besides, as in `saf.Outbox.send`: ``key``, ``headers``,
        ``message_type``, ``from_service`` and ``to_broker``.

        Raises:
            UsageError, InvalidMessage: a value cannot be used, or the name is declared already.
        """
        self._declare(
            name,
            service,
            body,
            every=every,
            anchor=anchor,
            missed=missed,
            **sent,
        )

    def _declare(self, name: str, service: str, body: object, **options: Unpack[Options]) -> None:
        if options.get("from_service") is None:
            options["from_service"] = self.from_service
        declared = declaration(name, service, body, **options)
        if name in self._declared:
            raise UsageError(f"schedule {name!r} is declared twice")
        self._declared[name] = declared

    def deploy(self, conn: Conn) -> Deployed:
        """Give the database the declared schedules, in the caller's transaction.

        Raises the errors of `saf.schedules.add`.
        """
        done: dict[str, list[str]] = {"added": [], "changed": [], "unchanged": []}
        for name, declared in sorted(self._declared.items()):  # so that two never wait in a circle
            done[put(conn, declared, self.origin)].append(name)
        undeclared = tuple(
            item.name
            for item in listed(conn)
            if item.origin == self.origin and item.name not in self._declared
        )
        if undeclared:
            log.warning("schedules_undeclared", origin=self.origin, schedules=list(undeclared))
        names = {outcome: tuple(found) for outcome, found in done.items()}
        return Deployed(undeclared=undeclared, **names)
