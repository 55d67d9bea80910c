"""One piece of a soak: everybody starts, works for some time, and ends; then all is compared."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import httpx

from tests.programs import BIN, environment
from tests.soak import hindrance, ledger
from tests.soak.application import SHOP, WAREHOUSE
from tests.soak.flatness import Sample
from tests.soak.programs import Programs
from tests.soak.sampler import Sampler
from tests.soak.site import Site, Visitor

READY_SECONDS = 120.0
"""How long everybody may take to start."""
STUCK_SECONDS = 60.0
"""What is left and does not become less for so long is lost."""
LOOK_SECONDS = 0.2


@dataclass(kw_only=True)
class Piece:
    """What a piece has come to."""

    number: int
    began: float
    """In seconds since 1970."""
    seconds: float = 0.0
    """How long it was at its rate."""
    messages: int = 0
    """How many were sent by its end, those of earlier pieces too."""
    findings: list[str] = field(default_factory=list)
    recovered: Mapping[str, float | None] = field(default_factory=dict)
    """How long each latency was higher after a hindrance, in seconds; see `hindrance.recovery`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a piece does."""

    seconds: float
    """How long it lasts, unless it is told to stop before."""
    rate: float
    """Messages a second, without the answers in dialogs."""
    sample_seconds: float
    purge_seconds: float
    hinder_seconds: float = 0.0
    """How long all but the application stand still, from a quarter of the piece on."""

    def hinders(self, seconds: float) -> bool:
        """Whether they do, so long after the piece has begun."""
        return self.seconds / 4 <= seconds < self.seconds / 4 + self.hinder_seconds


def run(
    site: Site, number: int, plan: Plan, stopping: threading.Event, note: Callable[[Sample], None]
) -> Piece:
    """Make a piece, on servers that run; ``note`` gets each sample as it is taken."""
    piece = Piece(number=number, began=time.time())
    programs = site.programs()
    try:
        with closing(Visitor(site.ports)) as visitor:
            work = _Work(site, programs, visitor, stopping)
            work.wait_for_all()
            programs.start("application", site.application(plan.rate))
            pids = {name: one.pid for name, one in programs.running.items()}
            piece.seconds = work.go_on(plan, Sampler(site, number, pids), note)
            piece.recovered = hindrance.recovery(work.samples)
            piece.findings += work.failed
            piece.findings += hindrance.findings(piece.recovered)
            piece.findings += _said(programs.ended(), "ended by itself")
            piece.findings += _said(programs.stop("application"), "has failed")
            last = _drain(site)
        piece.messages = sum(last.sent.values())
        piece.findings += last.findings()
        piece.findings += _set_aside(site)
    finally:
        piece.findings += _said(programs.stop(), "did not end in order")
    return piece


class _Work:
    """What is done while everybody runs."""

    def __init__(
        self, site: Site, programs: Programs, visitor: Visitor, stopping: threading.Event
    ) -> None:
        self.site, self.programs = site, programs
        self.visitor, self.stopping = visitor, stopping
        self.samples: list[Sample] = []
        self.failed: list[str] = []
        """Looks and purges that have failed."""

    def wait_for_all(self) -> None:
        """Wait until the dashboard and all figures are there."""
        until = time.monotonic() + READY_SECONDS
        while not self.stopping.wait(LOOK_SECONDS):
            try:
                self.visitor.look()
            except httpx.HTTPError:
                if ended := self.programs.ended():
                    raise RuntimeError(f"{ended} have ended: see {self.programs.logs}") from None
                if time.monotonic() > until:
                    raise
            else:
                return

    def go_on(self, plan: Plan, sampler: Sampler, note: Callable[[Sample], None]) -> float:
        """Sample, visit and purge until the time is over, it is to stop, or somebody has ended.

        Returns:
            How long that was, in seconds.
        """
        began = time.monotonic()
        sampled, purged = 0.0, plan.purge_seconds
        hinders = False

        def sample() -> None:
            one = sampler.take(seconds)
            if hinders:
                one = replace(one, figures={**one.figures, hindrance.HINDERED: 1.0})
            self.samples.append(one)
            note(one)

        try:
            while (seconds := time.monotonic() - began) < plan.seconds:
                if self.stopping.is_set() or self.programs.ended():
                    break
                if hinders != plan.hinders(seconds):
                    hinders = not hinders
                    self.programs.stand_still(hinders, but="application")
                if seconds >= sampled:
                    if not hinders:
                        self._look(seconds)
                    sample()
                    sampled += plan.sample_seconds
                if seconds >= purged:
                    self._purge(seconds)
                    purged += plan.purge_seconds
                self.stopping.wait(LOOK_SECONDS)
        finally:
            self.programs.stand_still(False, but="application")
        sample()
        return seconds

    def _look(self, seconds: float) -> None:
        try:
            self.visitor.look()
        except httpx.HTTPError as error:
            self.failed.append(f"after {seconds:.0f} s, a look failed: {error!r}")

    def _purge(self, seconds: float) -> None:
        command = [str(BIN / "saf"), "purge", "--config", str(self.site.config), "--json"]
        with (self.programs.logs / "purge.log").open("ab") as log:
            ended = subprocess.run(
                command, env=environment(), check=False, stdout=log, stderr=log
            ).returncode
        if ended:
            self.failed.append(f"after {seconds:.0f} s, a purge ended with {ended}")


def _drain(site: Site) -> ledger.Balance:
    """Wait until nothing is left, or does not become less any more."""
    least, until = None, time.monotonic() + STUCK_SECONDS
    while True:
        last = ledger.balance(site.app, site.mom, answered=WAREHOUSE, answers=SHOP)
        if not last.left or time.monotonic() > until:
            return last
        if least is None or last.left < least:
            least, until = last.left, time.monotonic() + STUCK_SECONDS
        time.sleep(LOOK_SECONDS)


def _set_aside(site: Site) -> Sequence[str]:
    """What is parked, or a dead letter, when all has been heard."""
    found = []
    for place, dsn in site.brokers().items():
        with dsn.connect(role="soak", autocommit=True) as connection:
            for table in ("parked", "dead_letter"):
                ((count,),) = connection.execute(f"SELECT count(*) FROM saf.{table}").fetchall()
                if count:
                    found.append(f"{place}: {count} rows are left in saf.{table}")
    return found


def _said(codes: dict[str, int], what: str) -> list[str]:
    return [f"{name} {what}, with {code}" for name, code in codes.items()]
