"""Rounds to a Delta table instead of a MOM store: `python -m tests.crash --to delta`.

Forwarders are killed and stopped at any moment of their commits, the table is out of reach for a
while, its properties change, and it is compacted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deltalake import DeltaTable

from saf.database import Dsn
from saf.destinations.delta import Delta
from saf.destinations.delta.optimizing import optimize
from saf.destinations.settings import DestinationSettings
from saf.errors import SafError
from tests.crash.plan import Fault, Plan
from tests.crash.queues import plan_to
from tests.crash.site import Site
from tests.delta_table import texts

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


class DeltaSite(Site):
    """With a folder for a table."""

    @property
    def lake(self) -> Delta:
        """The table, where messages are partitioned by service."""
        return Delta(table=str(self.folder / "lake"), partition_by="service")

    def plan(self, seed: int, number: int, kinds: tuple[str, ...] = ()) -> Plan:
        """The plan of a round."""
        return plan_to(seed, number, kinds or FAULTS)

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
        folder = self.folder / "lake"
        if folder.exists():
            folder.rename(self.folder / f"lake-{time.monotonic_ns()}")
        folder.mkdir()
        return super().prepare(plan)

    def arrived(self) -> Sequence[str]:
        """All bodies, in the order of the commits."""
        return texts(self.folder / "lake")


def compact_table(round_: Any, fault: Fault) -> None:  # noqa: ARG001 - it takes as long as it takes
    """Its files become few, while forwarders append."""
    try:
        optimize("mom", round_.site.lake, keep_hours=1, dry_run=False)
    except SafError:
        return  # too much was going on, or there is no table yet


def change_table(round_: Any, fault: Fault) -> None:
    """Its properties, so that commits that are under way begin again."""
    if DeltaTable.is_deltatable(round_.site.lake.table):
        table = DeltaTable(round_.site.lake.table)
        table.alter.set_table_description(f"after {fault.after}")


def unmount_table(round_: Any, fault: Fault) -> None:
    """It is not there for a while, and comes back as it was."""
    folder = round_.site.folder / "lake"
    away = folder.rename(round_.site.folder / "away")
    time.sleep(fault.lasts)
    if folder.exists():  # what was written where nothing is mounted is hidden by what comes back
        folder.rename(round_.site.folder / f"hidden-{time.monotonic_ns()}")
    away.rename(folder)


OF_TABLES: Mapping[str, Callable[[Any, Fault], None]] = {
    "compact_table": compact_table,
    "change_table": change_table,
    "unmount_table": unmount_table,
}
