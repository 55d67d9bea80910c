"""An application, two MOM stores, and what can be done with them.

Each deed is done to the databases with the library's own code or a person's SQL, and told to the
truth. Nothing here decides what to do; that is a machine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from saf import Outbox
from saf.database import Dsn
from saf.errors import SafError
from saf.operating import decide
from saf.operating.maintenance import purge_broker
from saf.setaside import parking, waiting
from saf.setaside.selection import DeadLetters
from saf.testing import clock
from tests.stateful.forwarder import AN_HOUR, Forwarder
from tests.stateful.model import AT_MOST_ONCE, Seen, Sent, Truth
from tests.stateful.site import Place, Site

MOM, OTHER = "mom", "other"
STORES = (MOM, OTHER)

SERVICES = {
    "orders": ("exactly_once", (MOM,)),
    "audit": ("exactly_once", (OTHER,)),
    "events": ("at_least_once", (MOM,)),
    "metrics": ("at_most_once", (OTHER,)),
    "spread": ("exactly_once", STORES),
    "news": ("exactly_once", STORES),
}
"""What each service is promised, and where its routes lead."""
TOPIC = "news"

# A MOM store that has an opinion
POLITE = """
ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') !~ 'poison')
"""
ROUTE = "INSERT INTO saf.route (service, destination, quality) VALUES (%s, %s, %s)"
SERVICE = "INSERT INTO saf.service (name) VALUES (%s) ON CONFLICT DO NOTHING"

NAME = "split_part(convert_from(body, 'UTF8'), ' ', 1)"
STORED = f"SELECT {NAME} FROM saf.inbox ORDER BY id"
DEAD = f"SELECT {NAME}, destination, reason FROM saf.dead_letter"
PARKED = f"SELECT {NAME} FROM saf.parked"
OUTBOX = f"SELECT {NAME} FROM saf.outbox"

# Ids go on with the next slot, as they do after a million messages
NEXT_SLOT = """
SELECT setval('saf.outbox_id_seq', ((last_value >> 20) + 1) << 20) FROM saf.outbox_id_seq
"""
EXPIRY = "SELECT now() + interval '1 hour'"
SOON = timedelta(hours=2)
MOST_ROUNDS = 40


@dataclass(eq=False)
class Transaction:
    """One of the application, that has sent something and is not over."""

    connection: psycopg.Connection[Any]
    sent: list[Sent] = field(default_factory=list)
    gid: str | None = None
    """It is prepared, under this name."""

    @property
    def keys(self) -> set[str]:
        """Those whose messages it is writing, under a lock of the application's."""
        return {one.key for one in self.sent}


class World:
    """One example's."""

    def __init__(self, app: Place, stores: dict[str, Place]) -> None:
        self.app = app
        self.stores = stores
        self.truth = Truth()
        self.outbox = Outbox()
        self.open: list[Transaction] = []
        self.forwarders: list[Forwarder] = []
        self.down: set[str] = set()
        self.forgotten: set[tuple[str, str]] = set()
        """Stores and services that they do not know."""
        self.refusals: list[SafError | str] | None = None
        """What forwarders refuse to do; None where they have no reason to."""
        self.settled: set[str] = set()
        """What has arrived, and the source knows it."""
        self.routes: dict[str, tuple[str, tuple[str, ...]]] = dict(SERVICES)
        self._gids = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(parking, "wait_seconds", lambda *_: AN_HOUR)
        Forwarder.begin_anew()
        for place in (app, *stores.values()):
            Site.empty(place)
        for service in SERVICES:
            self._lead(service)
            for store in stores:
                self.know(store, service)
        app.person.execute("INSERT INTO saf.topic (name) VALUES (%s)", [TOPIC])

    @property
    def dsns(self) -> dict[str, Dsn]:
        """Where the stores are."""
        return {name: store.dsn for name, store in self.stores.items()}

    # The application

    def begin(self) -> Transaction:
        """A transaction that stays open for a while."""
        self.open.append(Transaction(self.app.database.connect()))
        return self.open[-1]

    def free(self, key: str, mine: Transaction) -> bool:
        """Whether no other open transaction holds the lock that goes with a key."""
        return not any(key in one.keys for one in self.open if one is not mine)

    def send(
        self,
        transaction: Transaction,
        service: str,
        key: str,
        *,
        poison: bool = False,
        mortal: bool = False,
    ) -> Sent:
        """Send one message."""
        quality, matches = self.routes[service]
        one = self.truth.new(
            service,
            key,
            matches or SERVICES[service][1],
            quality,
            topic=service == TOPIC,
            # what goes at most once may go with its neighbours, so there is no poison among them
            poison=poison and quality != AT_MOST_ONCE,
            mortal=mortal,
        )
        expires_at = None
        if mortal:
            ((expires_at,),) = transaction.connection.execute(EXPIRY).fetchall()
        one.message_id = self.outbox.send(
            transaction.connection, service, one.body, key=key, expires_at=expires_at
        )
        transaction.sent.append(one)
        return one

    def undone_at_once(self, transaction: Transaction, service: str, key: str) -> None:
        """Send something and take it back, by a savepoint."""
        transaction.connection.execute("SAVEPOINT one")
        before = [*transaction.sent]
        self.send(transaction, service, key)
        transaction.connection.execute("ROLLBACK TO SAVEPOINT one")
        transaction.sent = before

    def prepare(self, transaction: Transaction) -> None:
        """Let go of it, until somebody decides."""
        self._gids += 1
        transaction.gid = f"stateful {id(self)} {self._gids}"
        transaction.connection.execute(f"PREPARE TRANSACTION '{transaction.gid}'")

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        """Decide."""
        connection = transaction.connection
        if transaction.gid is not None:
            connection.rollback()
            connection.autocommit = True
            verb = "COMMIT" if commit else "ROLLBACK"
            connection.execute(f"{verb} PREPARED '{transaction.gid}'")
        elif commit:
            connection.commit()
        connection.close()
        self.open.remove(transaction)
        for one in transaction.sent:
            one.committed = commit

    # Forwarders

    def forwarder(self) -> Forwarder:
        """One more process."""
        self.forwarders.append(self.process())
        return self.forwarders[-1]

    def process(self) -> Forwarder:
        """One that the caller looks after."""
        return Forwarder(self.app.dsn, self.dsns, self.refusals)

    def dies(self, forwarder: Forwarder) -> None:
        """It is killed."""
        forwarder.die()
        self.forwarders = [one for one in self.forwarders if one is not forwarder]
        self.unsure()

    def unsure(self) -> None:
        """What goes at most once, and is under way now, may not arrive."""
        for one in self.truth.committed:
            one.may_vanish |= AT_MOST_ONCE in one.qualities

    def forward(self) -> int:
        """A whole run of a new process; how many messages have moved."""
        forwarder = self.process()
        moved, error = 0, False
        try:
            for _ in range(MOST_ROUNDS):
                receipts = forwarder.run(frozenset(self.down))
                moved += sum(r.messages + r.dropped + r.parked + r.dead for r in receipts)
                error = any(receipt.error for receipt in receipts)
                if error or not forwarder.cycle.work:
                    break
        except BaseException:
            forwarder.die()  # members of the next example have the same ids
            raise
        forwarder.leave()
        if not error and not self.forwarders and not self.refusals:
            self.settled = {name for names in self.seen().stored.values() for name in names}
        return moved

    # Time, people and the world around

    def let_time_pass(self) -> None:
        """Two hours: attempts are due, leases over, what is mortal has expired."""
        for place in (self.app, *self.stores.values()):
            clock.let_time_pass(place.dsn, SOON)
        for one in self.truth.committed:
            one.may_expire |= one.mortal

    def know(self, store: str, service: str) -> None:
        """A store learns of a service."""
        self.stores[store].person.execute(SERVICE, [service])
        self.forgotten.discard((store, service))

    def forget(self, store: str, service: str) -> None:
        """A store does not know a service any more; it knows others."""
        self.stores[store].person.execute("DELETE FROM saf.service WHERE name = %s", [service])
        self.forgotten.add((store, service))

    def lead(self, service: str, quality: str, matches: tuple[str, ...]) -> None:
        """Routes lead from a service elsewhere, or nowhere."""
        self.routes[service] = (quality, matches)
        with self.app.person.transaction():
            self._lead(service)
        for one in self.truth.sent.values():
            if one.service == service:
                one.matches.update(matches)
                one.qualities.add(quality)

    def _lead(self, service: str) -> None:
        quality, matches = self.routes[service]
        self.app.person.execute("DELETE FROM saf.route WHERE service = %s", [service])
        for destination in matches:
            self.app.person.execute(ROUTE, [service, destination, quality])

    def attempts_are_due(self) -> None:
        """``saf parked retry-now``."""
        waiting.retry_now(self.app.person)

    def retry_dead(self, service: str | None) -> None:
        """``saf dead retry``."""
        for name, destination, _ in self.dead_ones(service):
            self.truth.sent[name].again[destination] += 1
        decide.retry(self.app.person, DeadLetters(service=service), "a test")

    def discard_dead(self, service: str | None) -> None:
        """``saf dead discard``."""
        for name, destination, _ in self.dead_ones(service):
            self.truth.sent[name].discarded.add(destination)
        decide.discard(self.app.person, DeadLetters(service=service), "a test")

    def dead_ones(self, service: str | None) -> Sequence[tuple[str, str, str]]:
        """Name, destination and reason of the dead letters, of a service or all."""
        some = "(%s::text IS NULL OR to_service = %s)"
        return self.app.person.execute(f"{DEAD} WHERE {some}", [service, service]).fetchall()

    def purge(self) -> None:
        """What may go goes, in a slot that the ids have left."""
        self.app.person.execute(NEXT_SLOT)
        purge_broker(
            self.app.person,
            retention_seconds=0,
            rotate_after_seconds=10**9,
            lock_timeout_seconds=0.001,
        )

    # What came of it

    def seen(self) -> Seen:
        """What is in the databases."""
        here = self.app.person
        return Seen(
            stored={
                name: [one for (one,) in store.person.execute(STORED).fetchall()]
                for name, store in self.stores.items()
            },
            dead=here.execute(DEAD).fetchall(),
            parked=[name for (name,) in here.execute(PARKED).fetchall()],
            outbox=frozenset(name for (name,) in here.execute(OUTBOX).fetchall()),
        )

    def come_to_rest(self) -> Seen:
        """All is up and as it was meant to be; forward until nothing moves any more."""
        for transaction in [*self.open]:
            self.end(transaction, commit=True)
        self.as_it_was_meant_to_be()
        still = 0
        for _ in range(MOST_ROUNDS):
            still = still + 1 if self.forward() == 0 else 0
            if still == 2:
                break
            self.let_time_pass()
        return self.seen()

    def as_it_was_meant_to_be(self) -> None:
        """No forwarder is left; destinations are up, routes lead there, services are known."""
        for forwarder in [*self.forwarders]:
            self.dies(forwarder)
        self.down.clear()
        for service, (quality, matches) in SERVICES.items():
            self.lead(service, quality, matches)
            for store in self.stores:
                self.know(store, service)

    def clear_up(self) -> None:
        """Leave nothing behind."""
        self.patch.undo()
        for forwarder in self.forwarders:
            forwarder.die()
        for transaction in self.open:
            transaction.connection.close()
