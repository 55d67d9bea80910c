"""Rounds to a table instead of a MOM store: `python -m tests.crash --to delta`, or iceberg.

Forwarders are killed and stopped at any moment of their commits, the table is out of reach for a
while, its properties change, and it is compacted, or its snapshots are forgotten, meanwhile. The
table may be set back to a copy of its folder, and so may the application's database.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyiceberg.exceptions import CommitFailedException
from sqlalchemy.exc import SQLAlchemyError

from saf.database import Dsn
from saf.destinations.delta import Delta
from saf.destinations.delta.table import optimize
from saf.destinations.iceberg import Iceberg
from saf.destinations.iceberg.link import Link
from saf.destinations.lake import LakeSettings
from saf.destinations.settings import DestinationSettings
from saf.errors import SafError
from tests import delta_table, iceberg_table
from tests.crash.folders import FolderSite, back_up, set_back
from tests.crash.plan import OF_SOURCE, Fault, Plan
from tests.crash.queues import plan_to

FAULTS = (
    "kill_forwarder",
    "compact_table",
    "stop_forwarder",
    "unmount_table",
    "kill_forwarder",
    "crash_source",
    "change_table",
    "kill_writer",
    "kill_forwarder",
    "terminate_source",
    "route_gone",
)

SET_BACKS = {**OF_SOURCE, "set_back_table": "back_up_table"}
"""What may be set back, and what has to come before."""


class LakeSite(FolderSite):
    """With a folder for a table."""

    @property
    def kept(self) -> Path:
        """The table's folder."""
        return self.folder / "lake"

    @property
    def lake(self) -> LakeSettings:
        """The table, where messages are partitioned by service."""
        raise NotImplementedError

    def care(self) -> None:
        """Make it smaller, while forwarders append."""
        raise NotImplementedError

    def change(self, text: str) -> None:
        """Change what it says of itself, if it is there yet."""
        raise NotImplementedError

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        return plan_to(seed, number, kinds, FAULTS, SET_BACKS)

    def fault(self, kind: str) -> Callable[[Any, Fault], None]:
        """Those of a table, and those of any site."""
        return OF_TABLES.get(kind) or super().fault(kind)

    def stores(self, plan: Plan) -> dict[str, Dsn]:  # noqa: ARG002 - there is none
        """No MOM store."""
        return {}

    def by_proxy(self, plan: Plan) -> Mapping[str, DestinationSettings]:  # noqa: ARG002 - one
        """The table, under the name that the routes have."""
        return {"mom": self.lake}

    def prepare(self, plan: Plan) -> Dsn:
        """A fresh source, and another table."""
        if self.kept.exists():
            self.kept.rename(self.folder / f"lake-{time.monotonic_ns()}")
        self.kept.mkdir()
        self.forget_copy()
        return super().prepare(plan)


class DeltaSite(LakeSite):
    """With a Delta table, which is compacted."""

    @property
    def lake(self) -> Delta:
        """The table."""
        return Delta(table=str(self.kept), partition_by="service")

    def care(self) -> None:
        """Its files become few."""
        optimize("mom", self.lake, keep_hours=1, dry_run=False)

    def change(self, text: str) -> None:
        """Its description."""
        if DeltaTable.is_deltatable(self.lake.table):
            DeltaTable(self.lake.table).alter.set_table_description(text)

    def arrived(self) -> Sequence[str]:
        """All bodies, in the order of the commits."""
        return delta_table.texts(self.kept)


class IcebergSite(LakeSite):
    """With an Iceberg table and its catalog, which forgets snapshots."""

    @property
    def lake(self) -> Iceberg:
        """The table."""
        return Iceberg(
            catalog=f"sqlite:///{self.kept}/catalog.db",
            table="shop.messages",
            warehouse=str(self.kept),
            partition_by="service",
        )

    def care(self) -> None:
        """All snapshots but the newest are forgotten."""
        if table := Link("mom", self.lake).load():
            table.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()

    def change(self, text: str) -> None:
        """A property; commits that fail are to be tried again."""
        if table := Link("mom", self.lake).load():
            with table.transaction() as change:
                change.set_properties({"comment": text, "commit.retry.num-retries": "4"})

    def arrived(self) -> Sequence[str]:
        """All bodies, in the order of the commits."""
        return iceberg_table.texts(self.lake)


def compact_table(round_: Any, fault: Fault) -> None:  # noqa: ARG001 - it takes as long as it takes
    """It becomes smaller, while forwarders append."""
    with suppress(SafError, CommitFailedException, SQLAlchemyError):  # too much was going on
        round_.site.care()


def change_table(round_: Any, fault: Fault) -> None:
    """Its properties, so that commits that are under way begin again."""
    with suppress(SafError, CommitFailedException, SQLAlchemyError):
        round_.site.change(f"after {fault.after}")


def unmount_table(round_: Any, fault: Fault) -> None:
    """It is not there for a while, and comes back as it was."""
    folder = round_.site.kept
    away = folder.rename(round_.site.folder / "away")
    time.sleep(fault.lasts)
    if folder.exists():  # what was written where nothing is mounted is hidden by what comes back
        folder.rename(round_.site.folder / f"hidden-{time.monotonic_ns()}")
    away.rename(folder)


OF_TABLES: Mapping[str, Callable[[Any, Fault], None]] = {
    "compact_table": compact_table,
    "change_table": change_table,
    "unmount_table": unmount_table,
    "back_up_table": back_up,
    "set_back_table": set_back,
}
