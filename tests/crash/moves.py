"""The application's database is moved in a round, as docs/moving.md says it.

A planned move takes nothing away: its writers and all else stand still meanwhile, and afterwards
nothing is lost, doubled or out of order. A standby that is promoted may lag; then its application
was set back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.crash.copies import Copies
from tests.crash.faults import all_stopped
from tests.crash.plan import Fault
from tests.crash.set_backs import have_begun, rebase, source_goes_back

if TYPE_CHECKING:
    from tests.crash.rounds import Round

REBASED = "app: rebased"


def move_source(round_: Round, _: Fault) -> None:
    """By a dump into another cluster, which takes the server's place."""
    have_begun(round_)
    copies = round_.site.copies_of_source
    with all_stopped(round_.writers), round_.at_rest():
        copies.take()
        copies.restore("app")
        said = rebase(round_)
        if REBASED not in said:
            round_.not_refused.append(f"the application's database was in another cluster: {said}")


def promote_source(round_: Round, fault: Fault) -> None:
    """A standby takes the place of the server, which crashes; nobody waits until it has all."""
    have_begun(round_)
    copies = round_.site.copies_of_source
    with copies.standby():
        time.sleep(fault.lasts)
    source_goes_back(round_, Copies.set_back, by_dump=False)
