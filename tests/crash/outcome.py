"""What a round came to: the checkers' verdict, and what the round itself has seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.crash import streams
from tests.crash.checker import Verdict, check, receive
from tests.crash.consumers import CONSUMED
from tests.crash.drops import look
from tests.crash.hearing import listen
from tests.crash.plan import Plan
from tests.crash.transforms import check_made

if TYPE_CHECKING:
    from tests.crash.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a round came to."""

    plan: Plan
    verdict: Verdict
    left: int
    """Messages that the forwarders had not dealt with when the time was over."""
    in_the_way: list[str]
    """What the databases looked like then, in lines."""
    died: list[int]
    """Exit codes of forwarders that ended by themselves."""
    recovery_seconds: float
    """From the end of the last fault to the last message dealt with."""
    taken_away: int | None
    """How many messages set-backs have taken away, if anything was set back."""

    @property
    def findings(self) -> set[str]:
        """The names of all that was found."""
        others = {"left": self.left, "died": self.died}
        return {*self.verdict.findings, *(name for name, found in others.items() if found)}

    @property
    def good(self) -> bool:
        return not self.findings


def judge(round_: Round) -> Verdict:
    """Ask all checkers of a round in which nobody writes any more."""
    app, stores, plan = round_.app.conninfo, round_.checked(), round_.plan
    if plan.transforms:
        verdict = check_made(app, stores, round_.site.qualities, plan.transforms, round_.past)
    else:
        arrived = round_.site.arrived()
        verdict = check(app, stores, round_.site.qualities, arrived, round_.past)
    verdict.not_refused += round_.not_refused
    verdict.not_repaired += round_.not_repaired
    verdict.allowed += round_.allowed.read_text().splitlines()
    verdict.answered_wrongly += round_.answers.read_text().splitlines()
    round_.site.look(verdict)
    if plan.streams:
        streams.check(round_.stream_places, verdict)
    if plan.consumers:
        receive(stores, CONSUMED, verdict)
    if plan.dialogs:
        hubs = [hub.conninfo for hub in round_.hubs.values()]
        listen(app, round_.stores["mom"].conninfo, verdict, round_.past, hubs)
    others = [dsn.conninfo for name, dsn in round_.brokers.items() if name != "app"]
    transforms = bool(plan.transforms)
    look(app, others, verdict, talks=plan.dialogs, transforms=transforms, past=round_.past)
    return verdict
