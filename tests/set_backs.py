"""Dialogs whose ends are set back, for tests: what both applications know, and whether it fits.

Each end's application writes down, in the transaction in which it happens, what it has said and
what it has heard. A database that is set back takes that with it, as it would an application's own
tables; so the two ends can be asked afterwards what each of them is sure of.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

import saf
from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.database import Dsn, fetch
from saf.destinations.postgresql import known_at
from saf.dialogs.monologs import received_monologs
from saf.dialogs.set_back import compare_all
from saf.dialogs.statements import Code
from saf.operating.repair.rebase import rebase
from saf.operating.repair.reconcile import missing
from saf.operating.repair.send_again import send_again
from saf.routing.matching import Route, Routes
from saf.testing.databases import Database, Databases
from tests.dialogs import END, ERROR, SHOP, WAREHOUSE, begin, forward, prepare, receive
from tests.pipeline import connect, stores

MOST_ROUNDS = 100
THERE = Routes(routes=(Route(destination="there"),))

MEMORY = """
CREATE TABLE memory (
    number bigint GENERATED ALWAYS AS IDENTITY, dialog uuid, said boolean, what text)
"""
REMEMBERED = "SELECT what FROM memory WHERE (dialog, said) = (%(dialog)s, %(said)s) ORDER BY number"
OVER = "SELECT handle FROM saf.conversation WHERE state IN ('disconnected_inbound', 'error')"
ENDS = """
SELECT conversation_id, is_initiator, state, error_code, error_text, ended_here
FROM saf.conversation
"""

# As a purge does it
FORGET = "DELETE FROM saf.outbox WHERE (shard, id) = (%(shard)s, %(id)s)"


def dump(dsn: Dsn) -> bytes:
    """A backup that may be restored into another cluster."""
    program = [str(programs(DEFAULT_VERSION) / "pg_dump"), "--no-owner", dsn.conninfo]
    return subprocess.run(program, capture_output=True, check=True).stdout


def load(server: EmbeddedServer, backup: bytes) -> Dsn:
    """The database in another cluster."""
    copy = server.create_database("restored")
    psql = str(programs(DEFAULT_VERSION) / "psql")
    program = [psql, "-qX", "-v", "ON_ERROR_STOP=1", copy.conninfo]
    subprocess.run(program, input=backup, check=True, stdout=subprocess.DEVNULL)
    return copy


@dataclass
class Place:
    """A broker that may be set back: then it is another database, with the same identity."""

    service: str
    dsn: Dsn
    databases: Databases
    copies: list[Database] = field(default_factory=list)

    def backup(self) -> Dsn:
        """Its state of now; the databases of one server have the same transaction ids."""
        self.copies.append(self.databases.create("backup", self.dsn.database))
        return self.copies[-1].dsn

    def go_back(self, backup: Dsn) -> None:
        """Nobody is told."""
        self.copies.append(self.databases.create("restored", backup.database))
        self.dsn = self.copies[-1].dsn

    def says(self, dialog: saf.Dialog, *texts: str) -> None:
        with self.dsn.connect(role="test") as connection:
            for text in texts:
                dialog.send(connection, text)
                _remember(connection, dialog.conversation_id, said=True, what=text)

    def hears(self) -> list[saf.Received]:
        """Whatever is there; an Error or an End is remembered too, and answered by nothing."""

        def handle(connection: psycopg.Connection[Any], message: saf.Received) -> None:
            assert message.conversation_id is not None
            if message.message_type == END:
                return
            what = str(message.json()["code"]) if message.message_type == ERROR else message.text()
            _remember(connection, message.conversation_id, said=False, what=what)

        return receive(self.dsn, self.service, handle)

    def ends_what_is_over(self) -> int:
        """As a worker without a handler for it does; return how many ends that were."""
        with self.dsn.connect(role="test") as connection:
            over = fetch(connection, OVER)
            for (handle,) in over:
                saf.open_dialog(connection, handle).end(connection)
        return len(over)

    def remembers(self, dialog: UUID, *, said: bool) -> list[str]:
        with connect(self.dsn) as connection:
            rows = fetch(connection, REMEMBERED, {"dialog": dialog, "said": said})
        return [what for (what,) in rows]

    def ends(self) -> dict[UUID, tuple[str, int | None, str | None]]:
        """Of each conversation, the state, and the error."""
        with connect(self.dsn) as connection:
            rows = fetch(connection, ENDS)
        return {row[0]: (row[2], row[3], row[4]) for row in rows}


@dataclass
class Two:
    """A shop and a warehouse, of which each may be set back."""

    shop: Place
    warehouse: Place

    @classmethod
    def at(cls, app: Dsn, mom: Dsn, databases: Databases) -> Two:
        prepare(app, mom)
        for dsn in (app, mom):
            with connect(dsn) as connection:
                connection.execute(MEMORY)
        return cls(shop=Place(SHOP, app, databases), warehouse=Place(WAREHOUSE, mom, databases))

    def begin(self, *texts: str, **options: Any) -> saf.Dialog:
        dialog = begin(self.shop.dsn, **options)
        self.shop.says(dialog, *texts)
        return dialog

    def carry(self) -> None:
        """What is pending arrives."""
        forward(self.shop.dsn, self.warehouse.dsn)

    def talk(self) -> None:
        """All that is under way is received, and what that leads to as well."""
        for _ in range(MOST_ROUNDS):
            self.carry()
            heard = [*self.warehouse.hears(), *self.shop.hears()]
            if not heard and not self._pending():
                return
        raise AssertionError(f"they still talk: {heard}, {self._pending()}")

    def repair(
        self, place: Place, *, bring_back: bool = True, retention_seconds: float = 86400.0
    ) -> None:
        """As docs/operations.md says it."""
        other = self.shop if place is self.warehouse else self.warehouse
        with connect(place.dsn) as here, connect(other.dsn) as there:
            ((source,),) = fetch(here, "SELECT broker_id FROM saf.broker")
            assert rebase(
                here,
                {"there": known_at(there, source)},
                force=True,
                monologs=lambda: received_monologs(there, source),
            )
            if not bring_back:
                lost = missing(
                    "other", other.dsn, stores(there=place.dsn), retention_seconds=86400.0
                )
                for shard, number in lost:
                    there.execute(FORGET, {"shard": shard, "id": number})
            # a backup may also remember what the other one has lost since, and was repaired for
            for source, destination in ((other, place), (place, other)):
                send_again(
                    source.service, source.dsn, stores(there=destination.dsn), lambda _: THERE,
                    retention_seconds=retention_seconds, why="set back",
                )  # fmt: skip
            with there.transaction():
                compare_all(there)

    def other_end(self, dialog: saf.Dialog) -> saf.Dialog:
        with connect(self.warehouse.dsn) as connection:
            ((handle,),) = fetch(
                connection,
                "SELECT handle FROM saf.conversation WHERE conversation_id = %(id)s",
                {"id": dialog.conversation_id},
            )
            return saf.open_dialog(connection, handle)

    def fits(self, dialog: UUID) -> bool:
        """Whether what each has heard is exactly what the other one has said."""
        return all(
            one.remembers(dialog, said=True) == other.remembers(dialog, said=False)
            for one, other in ((self.shop, self.warehouse), (self.warehouse, self.shop))
        )

    def errors(self, dialog: UUID) -> list[str]:
        """What the ends that are there say of a set-back; an end without it is none."""
        found = []
        for place in (self.shop, self.warehouse):
            end = place.ends().get(dialog)
            if end is not None:
                found.append(end[2] or "" if end[1] == Code.SET_BACK else "")
        return found

    def check(self, dialogs: Iterable[UUID]) -> dict[UUID, bool]:
        """Every dialog goes on, or has failed at both ends; return which go on."""
        outcome = {}
        for dialog in dialogs:
            errors = self.errors(dialog)
            outcome[dialog] = not any(errors)
            assert all(errors) if any(errors) else self.fits(dialog), (
                dialog, errors, self.shop.ends().get(dialog), self.warehouse.ends().get(dialog)
            )  # fmt: skip
        return outcome

    def _pending(self) -> list[int]:
        """saf's own that is under way hands nothing out."""
        counts = []
        for place in (self.shop, self.warehouse):
            with connect(place.dsn) as connection:
                counts += fetch(
                    connection,
                    "SELECT id FROM saf.outbox_status WHERE status = 'pending' LIMIT 1",
                )
        return [number for (number,) in counts]


def _remember(connection: psycopg.Connection[Any], dialog: UUID, *, said: bool, what: str) -> None:
    connection.execute(
        "INSERT INTO memory (dialog, said, what) VALUES (%s, %s, %s)", [dialog, said, what]
    )


def begin_monolog(two: Two, *bodies: str) -> saf.Dialog:
    """A monolog of the shop, with messages that were sent."""
    with two.shop.dsn.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=WAREHOUSE)
        for body in bodies:
            monolog.send(connection, body)
    return monolog


def publish(two: Two, monolog: saf.Dialog, *bodies: str) -> None:
    """More messages of a monolog."""
    with two.shop.dsn.connect(role="test") as connection:
        for body in bodies:
            monolog.send(connection, body)
