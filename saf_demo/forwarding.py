"""The scenario: flights are sent in their transactions, forwarded by Spark, received and proven.

It is the same for each destination. A `Place` holds what differs: an inbox, an inbox for each
airport, a kind of `saf_demo.kinds`, topics that a source reads into an inbox, or an inbox from
which webhooks continue to a receiver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from saf.cli.console import Listing
from saf.cli.forward import ProgressBar
from saf.config import Settings
from saf.destinations.postgresql import Postgresql
from saf.operating.wording import counted
from saf.spark import session
from saf_demo import kinds, proof, topics, webhooks
from saf_demo.place import Place
from saf_demo.stage import Outcome, Stage, counts, step

if TYPE_CHECKING:
    from saf.forwarding.summary import Progress, Summary

AIRPORTS = ("EWR", "JFK", "LGA")
TITLE = "every message exactly once"
"""What a run shows if its proof holds."""
WORDS = {
    "lost": "lost",
    "misrouted": "in a wrong store",
    "duplicated": "duplicated",
    "out_of_order": "out of order",
    "changed": "changed on the way",
    "not_sent": "forwarded although never sent",
    "not_atomic": "without their flight, or flights without theirs",
    "forwarded_now": "forwarded by this run",
    "messages_per_second": "a second, while forwarding",
}


@contextmanager
def place(
    stage: Stage, kind: str, *, through: str | None, routed: bool, http: bool
) -> Iterator[Place]:
    """Yield the place that the options of the command name.

    Raises:
        MissingExtra: the client of the destination is not installed.
        UsageError: its server is not installed, or does not start.
    """
    if http:
        yield _to_webhooks(stage)
    elif through is not None:
        with topics.place(stage, through) as found:
            yield found
    elif kind not in kinds.KINDS:
        yield _to_stores(stage, routed=routed)
    else:
        (application,) = stage.databases(f"{kind}_flights").values()
        with kinds.serve(kind, stage.folder_of(kind)) as settings:
            yield Place(
                application=application,
                destinations={kind: settings},
                received=lambda _: kinds.KINDS[kind].received(settings),
            )


def _to_stores(stage: Stage, *, routed: bool) -> Place:
    """Return a place with one MOM store, or with one for each airport."""
    application, *moms = ("routed_flights", *AIRPORTS) if routed else ("flights", "mom")
    dsns = stage.databases(application, *moms)
    return Place(
        application=dsns[application],
        destinations={name: Postgresql(dsn=dsns[name]) for name in moms},
        received=lambda name: proof.stored(dsns[name]),
        routed=routed,
    )


def _to_webhooks(stage: Stage) -> Place:
    """Return a place with a MOM store, from which webhooks continue to a receiver."""
    folder = stage.folder_of("webhooks")
    application, mom = stage.databases("sent_flights", "webhooks").values()
    webhooks.prepare(mom)

    def send_on() -> str:
        with step(stage.console, "sending webhooks"):
            sent = webhooks.send(mom, folder)
        pause = f", including {webhooks.PAUSE_SECONDS:g} s of the receiver's pause"
        sentence = f"sent {counted(sent.requests, 'webhook')} in {sent.seconds:.1f} s"
        return sentence + (pause if sent.paused else "")

    return Place(
        application=application,
        destinations={"webhooks": Postgresql(dsn=mom)},
        received=lambda _: webhooks.received(folder),
        send_on=send_on,
    )


def run(stage: Stage, place: Place) -> Outcome:
    """Send, forward and prove all flights."""
    started = time.monotonic()
    console, settings = stage.console, place.settings
    application = stage.application(place.application)
    written = stage.record(application)
    summary = _forward(stage, settings)
    console.print(f"forwarded {counted(summary.forwarded, 'message')} in {summary.seconds:.1f} s")
    for problem in summary.problems:
        console.print(f"saf: {problem['error']}", style="red", soft_wrap=True)
    if place.send_on is not None:
        console.print(place.send_on())
    with step(console, "comparing the databases"):
        proofs = {
            name: proof.prove(
                application.dsn, place.received(name), airport=name if place.routed else None
            )
            for name in place.destinations
        }
    total = proof.together(proofs.values())
    rate = summary.forwarded / summary.seconds if summary.seconds else 0.0
    result = {
        **asdict(total),
        "stores": {name: found.forwarded for name, found in proofs.items()},
        "messages_per_second": round(rate, 1),
        "written_now": written.flights,
        "forwarded_now": summary.forwarded,
        "transactions_rolled_back_now": written.rolled_back,
        "seconds": round(time.monotonic() - started, 1),
        "postgresql": application.postgresql,
        "java": application.java,
    }
    return Outcome(
        right=total.holds,
        title=TITLE,
        result=result,
        listing=listing(result),
    )


def _forward(stage: Stage, settings: Settings) -> Summary:
    """Forward everything that is pending."""
    console = stage.console
    with step(console, "starting Spark"):
        spark = session.start(settings.forwarder.master, app_name="saf demo")
    bar = ProgressBar(console)
    reached = [""]

    def note(progress: Progress) -> None:
        reached.append(f"{progress.done:,} of {progress.total:,}")

    try:
        from saf.forwarding.forwarder import Forwarder as Forwarding
        from saf.spark.runner import SparkRunner

        runner = SparkRunner(lambda: spark)
        forwarding = Forwarding(settings, runner, progress=bar.watching or note)
        with step(console, "forwarding", lambda: reached[-1], spins=False):
            return forwarding.drain()
    finally:
        bar.clear()
        with step(console, "stopping Spark"):
            spark.stop()


def listing(result: Mapping[str, Any]) -> Listing:
    """Return what users see of a result."""
    return counts(
        {
            "sent by transactions that committed": result["sent"],
            "rolled back with their transactions": result["rolled_back"],
            "arrived at their destination": result["forwarded"],
            **{f"stored in {name}": count for name, count in result["stores"].items()},
            **{explanation: result[name] for name, explanation in WORDS.items()},
        }
    )
