"""``saf demo --lake``: a stream of Spark into a Delta table, killed in the middle, with a chart."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saf.cli import demo_flights
from saf.cli.console import Listing, plain_console

if TYPE_CHECKING:
    from saf.broker.embedded import EmbeddedServer

TITLE = "every message exactly once, and the sums are equal"


def stream(
    server: EmbeddedServer, folder: Path, limit: int | None, *, reset: bool
) -> tuple[dict[str, Any], bool]:
    """Send flights, and stream them; return the result, and whether it is right."""
    from saf.demo import lake
    from saf.demo.proof import prove_received
    from saf.spark import java

    lake.require_packages()
    started = time.monotonic()
    console = plain_console(stderr=True)
    found = java.find()
    if reset:
        lake.remove(folder)
    application, _ = demo_flights.databases(server, "streamed_flights", (), reset=reset)
    version, recorded = demo_flights.look(application)
    console.print(f"PostgreSQL {version}, embedded, in {server.data_dir}", soft_wrap=True)
    console.print(str(found), soft_wrap=True)
    with demo_flights.flights_bar(console, recorded, limit) as report:
        written, course = lake.follow(application, folder, recorded, limit, report)
    console.print(demo_flights.written(written), soft_wrap=True)
    for second in course.killed:
        console.print(f"killed the stream's driver after {second:.1f} s, and started it again")
    chart = folder / "lag.png"
    lake.draw(course, chart)
    console.print(f"how far the stream was behind: {chart}", soft_wrap=True)
    with console.status("comparing the database with the table"):
        proof = prove_received(application, lake.received(folder))
        delays = lake.delays(application, folder)
    result = {
        **asdict(proof),
        "delay_minutes": {"sent": delays[0], "in_the_table": delays[1]},
        "written_now": written.flights,
        "streamed_now": course.streamed,
        "killed_now": len(course.killed),
        "largest_lag": course.largest_lag,
        "seconds": round(time.monotonic() - started, 1),
        "chart": str(chart),
        "postgresql": version,
        "java": str(found),
    }
    return result, proof.holds and delays[0] == delays[1]


def listing(result: dict[str, Any]) -> Listing:
    """Return the result as rows for users."""
    listing = Listing("messages", "count")
    for name, explanation in {
        "sent": "sent by transactions that committed",
        "rolled_back": "rolled back with their transactions",
        "forwarded": "in the table",
        "lost": "lost",
        "duplicated": "duplicated",
        "out_of_order": "out of order",
        "changed": "changed on the way",
        "not_sent": "in the table although never sent",
        "not_atomic": "without their flight, or flights without theirs",
        "streamed_now": "streamed by this run",
        "largest_lag": "behind at most",
        "killed_now": "times that the stream was killed",
    }.items():
        listing.add(explanation, f"{result[name]:,}")
    delays = result["delay_minutes"]
    listing.add("minutes of delay of all flights, in their rows", f"{delays['sent']:,}")
    listing.add("minutes of delay of all flights, in the table", f"{delays['in_the_table']:,}")
    return listing
